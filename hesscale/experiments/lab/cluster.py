"""Tasks of a sweep on a Ray cluster, whose machines need not share any files.

A machine receives tasks with the files of their runs, works on them for a while in temporary directories, and sends the files
back at a checkpoint. If a machine or the driver process dies, only the work since the files were last sent back is lost.
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

from ..install import how_to_install
from .experiment import Experiment
from .files import write_whole
from .locks import BusyRun, lock
from .run import has_begun
from .run_database import DamagedRun, connect
from .store import Pause, Store, Task
from .sweep import POLL_SECONDS, Keys, Sweep, attempt

SLICE_SECONDS = 120.0
ORDER = "run.sqlite", "checkpoint.pt"

Files = dict[str, bytes]


def run_on_ray(sweep: Sweep, address: str, workers: int) -> None:
    ray = import_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        own = {"num_cpus": max(1, workers), "include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level="warning", **own)
    is_alone = sweep.experiment.is_alone(sweep.tasks.values())
    sweep.divide(1 if is_alone else cpus(ray))
    work = ray.remote(num_cpus=1, max_retries=0)(work_for_a_while)
    away: dict[Any, tuple[Keys, ExitStack]] = {}  # keys and locks of tasks on other machines, by Ray's object reference
    try:
        while sweep.left or away:
            most = 1 if is_alone else 2 * cpus(ray)
            while sweep.left and len(away) < most:
                send(sweep, work, away, sweep.left.popleft())
            sweep.show(key for keys, _ in away.values() for key in keys)
            for promise in ray.wait([*away], timeout=POLL_SECONDS)[0] if away else []:
                keys, held = away.pop(promise)
                with held:
                    receive(sweep, ray, keys, promise)
    finally:
        for promise, (_, held) in away.items():
            ray.cancel(promise, force=True)
            held.close()
        if is_ours:
            ray.shutdown()


def cpus(ray: Any) -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def send(sweep: Sweep, work: Any, away: dict[Any, tuple[Keys, ExitStack]], keys: Keys) -> None:
    taken: dict[str, Files] = {}
    with ExitStack() as stack:
        for key in keys:
            directory = sweep.directory(key)
            directory.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock(directory))
                taken[key] = take(directory)
            except (BusyRun, DamagedRun) as error:
                sweep.settle((key,), [f"{type(error).__name__}: {error}"])
        if not taken:
            return
        work_on = [(sweep.tasks[key], files) for key, files in taken.items()]
        promise = work.remote(sweep.experiment, work_on, sweep.data, sweep.command, sweep.store.tensorboard, SLICE_SECONDS)
        away[promise] = tuple(taken), stack.pop_all()


def receive(sweep: Sweep, ray: Any, keys: Keys, promise: Any) -> None:
    try:
        files, errors = ray.get(promise)
    except ray.exceptions.RayTaskError as failure:
        sweep.settle(keys, [str(failure)] * len(keys))
    except ray.exceptions.RayError as death:
        sweep.again(keys, type(death).__name__)
    else:
        for key, own in zip(keys, files, strict=True):
            put(sweep.directory(key), own)
        if errors is None:
            sweep.left.appendleft(keys)
            for key in keys:
                del sweep.deaths[key]
        else:
            sweep.settle(keys, errors)


def work_for_a_while(
    experiment: Experiment, tasks: list[tuple[Task, Files]], data: Path | None, command: str, tensorboard: bool, seconds: float
) -> tuple[list[Files], list[str] | None]:
    """Work on some runs for a while. Returns their files, and for each run the error, "" if it is done, None if it is not."""
    torch.set_num_threads(1)
    if data is not None and not data.exists():
        problem = f"{data} does not exist on {platform.node()}: data sets must have the same path on every machine of the cluster"
        return [{} for _ in tasks], [problem] * len(tasks)
    with tempfile.TemporaryDirectory(prefix="hesscale-") as root:
        store = Store(root, tensorboard=tensorboard, seconds=seconds)
        directories = [store.directory(experiment.name, task) for task, _ in tasks]
        for directory, (_, files) in zip(directories, tasks, strict=True):
            put(directory, files)
        errors: list[str] | None
        try:
            errors = attempt(experiment, store, [task for task, _ in tasks], data, command)
        except Pause:
            errors = None
        return [files_in(directory) for directory in directories], errors


def files_in(directory: Path) -> Files:
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def take(directory: Path) -> Files:
    """The files that a run needs to resume. The caller holds its lock."""
    if has_begun(directory):
        connect(directory).close()  # rolls back an incomplete transaction of a process that was killed
    return {name: (directory / name).read_bytes() for name in ORDER if (directory / name).exists()}


def put(directory: Path, files: Files) -> None:
    """Write each file atomically, and the checkpoint last: until then, the old checkpoint works with the new database too."""
    for name in [*(files.keys() - ORDER), *(name for name in ORDER if name in files)]:
        write_whole(directory / name, lambda path, name=name: path.write_bytes(files[name]))  # type: ignore[misc]
    if files and "checkpoint.pt" not in files:
        (directory / "checkpoint.pt").unlink(missing_ok=True)


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"running on a Ray cluster needs ray: {how_to_install('ray')}") from None
