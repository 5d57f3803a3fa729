"""The command of the benchmark. It measures one workload after another, and writes the results after each.

It is not an experiment with runs in the store, since the store would return the times of earlier runs.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..lab.machine import commit, machine
from . import record_files
from .ensemble import ensemble_row
from .measure import message, rows_of
from .methods import METHODS, Method
from .settings import Settings, Work, plan, quick
from .workloads import CUDA, Workload

Log = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. It needs no packages besides torch."""
    parser = argparse.ArgumentParser(description="Cost of a training step, as ratios to torch's Adam in the same run.")
    for field in fields(Settings):
        kind = type(field.default)
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "default": field.default}
        parser.add_argument(f"--{field.name}", help=field.metadata["help"].replace("%", "%%"), **how)
    settings = Settings(**vars(parser.parse_args(arguments)))
    try:
        run(settings, lambda text: print(text, flush=True), "python benchmarks/step_cost.py")
    except ValueError as error:
        parser.error(str(error))


def run(settings: Settings, log: Log, program: str) -> dict[str, Any] | None:
    """Measure and return the record. With ``report``, only print tables and return None.

    Raises:
        ValueError: for settings with unknown names, or that contradict each other.
    """
    if settings.report:
        log(report(Path(settings.report), settings.into))
        return None
    command = settings.command(program)
    if settings.quick:
        settings = quick(settings)
    work = plan(settings)
    if settings.device == CUDA and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here; use --device cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # BackPACK's hooks, at every first layer
            return measure(settings, work, log, command)
    finally:
        torch.set_num_threads(before)


def report(folder: Path, into: str) -> str:
    """Return the tables of all records in a folder; or write them to the file ``into``, and return a line that says so."""
    found = record_files.load(folder)
    text = record_files.readme(found, Path(into))
    if not into:
        return text
    record_files.insert(Path(into), text)
    for path, record in found:
        record_files.save_page(path.with_suffix(".md"), record)
    return f"Wrote {into}"


def measure(settings: Settings, work: Work, log: Log, command: str) -> dict[str, Any]:
    """Measure one workload after another, and save the record after each."""
    device = torch.device(settings.device)
    start = time.perf_counter()
    record: dict[str, Any] = {
        "command": command,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine_of(settings),
        "rounds": settings.rounds,
        "sweep": settings.sweep or None,
        "finished": False,
        "workloads": [],
    }

    def log_with_time(text: str) -> None:
        log(f"[{time.perf_counter() - start:5.0f} s] {text}")

    def save() -> list[str]:
        record["seconds"] = round(time.perf_counter() - start)
        return record_files.save(settings.folder, settings.file_name, record)

    if device.type == CUDA:
        prepare_cuda(device, settings.tf32)
    options: dict[str, Any] = {"rounds": settings.rounds, "block": settings.block / 1e3, "limit": settings.limit}
    slow: dict[tuple[Method, str], str] = {}
    for workload, chosen in work:
        skipped = [skipped_row(*pair, slow[pair]) for pair in chosen if pair in slow]
        rows = rows_of(workload, [pair for pair in chosen if pair not in slow], device, **options, log=log_with_time) + skipped
        if settings.sweep:
            slow.update(too_slow_to_go_on(rows, workload, settings.limit))
        record["workloads"].append(entry(workload, device, rows))
        save()
        if device.type == CUDA:
            torch.cuda.empty_cache()
    if settings.ensemble:
        log_with_time("ensemble")
        record["ensemble"] = ensemble_or_error(device, settings)
    record["finished"] = True
    log_with_time(f"wrote {', '.join(save())} to {settings.folder}")
    return record


def ensemble_or_error(device: torch.device, settings: Settings) -> dict[str, Any]:
    try:
        return ensemble_row(device, rounds=settings.rounds, block=settings.block / 1e3)
    except Exception as error:
        return {"error": message(error)}


def skipped_row(method: Method, mode: str, why: str) -> dict[str, Any]:
    return {"method": method.name, "label": method.label, "mode": mode, "error": why}


def too_slow_to_go_on(rows: Iterable[dict[str, Any]], workload: Workload, limit: float) -> dict[tuple[Method, str], str]:
    """Methods that may exceed the limit with a network of twice the size, and why. Cost may grow with the cube of the size."""
    found = {}
    for row in rows:
        method = METHODS[row["method"]]
        if row.get("error", "").startswith("too slow"):
            found[method, row["mode"]] = f"too slow at {workload.name} already"
        elif "ms" in row and row["ms"]["median"] > 1e3 * limit / 4:
            found[method, row["mode"]] = f"too slow: {row['ms']['median'] / 1e3:.1f} s a step at {workload.name} already"
    return found


def entry(workload: Workload, device: torch.device, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A workload and its rows, as an entry of the record."""
    return {
        "name": workload.name,
        "description": workload.description,
        "size": workload.size,
        "batch": workload.batch[device.type],
        "parameters": sum(p.numel() for p in workload.network().parameters()),
        "rows": rows,
    }


def prepare_cuda(device: torch.device, tf32: bool) -> None:
    """Set the precision, and let the libraries allocate their workspaces before memory is measured."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    x = torch.ones(64, 64, device=device)
    torch.mm(x, x)
    torch.nn.functional.conv2d(x.view(1, 1, 64, 64), x[:3, :3].view(1, 1, 3, 3))
    torch.cuda.synchronize(device)


def machine_of(settings: Settings) -> dict[str, Any]:
    """The machine, with the GPU only if it was used."""
    found: dict[str, Any] = {"gpu": None, "cuda": None, **machine()}
    if settings.device != CUDA:
        found |= {"gpu": None, "cuda": None}
    used = {"device": settings.device, "threads": settings.threads, "tf32": settings.tf32 if found["gpu"] else None}
    return {**used, **found, "commit": commit()}
