"""Tasks of a sweep on a Ray cluster, whose machines need not share any files.

A task travels with the files of its run, is worked on for a while in a directory of its own, and comes back with them at a
checkpoint: what is lost with a machine, or with the process that asked, is what was done since.
"""

from __future__ import annotations

import importlib
import os
import platform
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .database import DamagedRun, connect
from .experiment import Experiment
from .files import write_whole
from .locks import BusyRun, lock
from .run import has_begun
from .store import Pause, Store, Task
from .sweep import POLL_SECONDS, Sweep, attempt

SLICE_SECONDS = 120.0
ORDER = "run.sqlite", "checkpoint.pt"

Files = dict[str, bytes]


def run_on_ray(sweep: Sweep, address: str, workers: int) -> None:
    ray = import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        own = {"num_cpus": max(1, workers), "include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level="warning", **own)
    work = ray.remote(num_cpus=1, max_retries=0)(work_for_a_while)
    away: dict[Any, tuple[str, Any]] = {}  # key and lock, by what Ray promises
    try:
        while sweep.left or away:
            most = 1 if sweep.experiment.alone else 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
            while sweep.left and len(away) < most:
                send(sweep, work, away, sweep.left.popleft())
            sweep.show(key for key, _ in away.values())
            for promise in ray.wait([*away], timeout=POLL_SECONDS)[0] if away else []:
                key, held = away.pop(promise)
                with held:
                    receive(sweep, ray, key, promise)
    finally:
        for promise, (_, held) in away.items():
            ray.cancel(promise, force=True)
            held.close()
        if is_ours:
            ray.shutdown()


def send(sweep: Sweep, work: Any, away: dict[Any, tuple[str, Any]], key: str) -> None:
    directory, task = sweep.directory(key), sweep.tasks[key]
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            held = stack.enter_context(lock(directory))
            files = take(directory)
        except (BusyRun, DamagedRun) as error:
            sweep.settle(key, f"{type(error).__name__}: {error}")
            return
        promise = work.remote(sweep.experiment, task, files, sweep.data, sweep.command, sweep.store.tensorboard, SLICE_SECONDS)
        away[promise] = key, held
        stack.pop_all()


def receive(sweep: Sweep, ray: Any, key: str, promise: Any) -> None:
    try:
        files, error = ray.get(promise)
    except ray.exceptions.RayTaskError as failure:
        sweep.settle(key, str(failure))
    except ray.exceptions.RayError as death:
        sweep.again(key, type(death).__name__)
    else:
        put(sweep.directory(key), files)
        if error is None:
            sweep.left.appendleft(key)
            del sweep.deaths[key]
        else:
            sweep.settle(key, error)


def work_for_a_while(
    experiment: Experiment, task: Task, files: Files, data: Path | None, command: str, tensorboard: bool, seconds: float
) -> tuple[Files, str | None]:
    """The files of a run after some work on it, and what went wrong: "" if it is done, None if there is more to do."""
    torch.set_num_threads(1)
    if data is not None and not data.exists():
        return {}, f"{data} is not there on {platform.node()}: data sets must have the same path on every machine of the cluster"
    with tempfile.TemporaryDirectory(prefix="hesscale-") as root:
        store = Store(root, tensorboard=tensorboard, seconds=seconds)
        directory = store.directory(experiment.name, task)
        put(directory, files)
        error: str | None
        try:
            error = attempt(experiment, store, task, data, command)
        except Pause:
            error = None
        paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}, error


def take(directory: Path) -> Files:
    """What a run needs to go on; its lock is held."""
    if has_begun(directory):
        connect(directory).close()  # which undoes what was being written when a process was killed
    return {name: (directory / name).read_bytes() for name in ORDER if (directory / name).exists()}


def put(directory: Path, files: Files) -> None:
    """Each file whole, and the checkpoint last: the one of before goes with the new database too."""
    for name in [*(files.keys() - ORDER), *(name for name in ORDER if name in files)]:
        write_whole(directory / name, lambda path, name=name: path.write_bytes(files[name]))  # type: ignore[misc]
    if files and "checkpoint.pt" not in files:
        (directory / "checkpoint.pt").unlink(missing_ok=True)


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ModuleNotFoundError("running on a Ray cluster needs ray: pip install 'hesscale[ray]'") from None
