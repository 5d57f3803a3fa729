"""The command: which workloads, methods and modes, how often, and where the results go."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from ..lab.choices import choose, named
from ..lab.machine import commit, cpu_model
from . import report
from .ensemble import ensemble_row
from .measure import message, rows_of
from .methods import BASELINE, GRAPH, METHODS, MODES, Method
from .workloads import CPU, CUDA, SWEEPS, WORKLOADS, Workload, sweep

Say = Callable[[str], None]

HELP = {
    "device": "cpu or cuda",
    "only": f"workloads, separated by commas: {', '.join(WORKLOADS)}",
    "methods": f"methods, separated by commas; Adam always runs: {', '.join(METHODS)}",
    "modes": f"modes, separated by commas: {', '.join(MODES)}",
    "sweep": "in place of the workloads, the paper's networks of growing size: outputs or layers",
    "rounds": "blocks of each method; targets need 30",
    "block": "milliseconds that a block of steps should take",
    "limit": "seconds that a step may take; slower methods are reported as such",
    "threads": "of torch on the CPU",
    "tf32": "allow TF32 in matrix products and convolutions on CUDA",
    "ensemble": "measure the ensemble too",
    "quick": "a few seconds: one workload, four methods, three rounds",
    "out": "folder for the results; out/step_cost/cpu or out/step_cost/cuda unless given",
    "name": "of the files there",
    "report": "measure nothing: make tables from all records below this folder and print them",
    "into": "with --report, write the tables into this page, between its marks, and each record's own page anew",
}


@dataclass(frozen=True)
class Settings:
    """What to measure; the options of the command line, with their defaults."""

    device: str = CPU
    only: str = ""
    methods: str = ""
    modes: str = ""
    sweep: str = ""
    rounds: int = 30
    block: float = 20.0
    limit: float = 10.0
    threads: int = 1
    tf32: bool = False
    ensemble: bool = False
    quick: bool = False
    out: str = ""
    name: str = ""
    report: str = ""
    into: str = ""

    def command(self, program: str) -> str:
        words = [program]
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                words += [f"--{field.name}"] if value is True else [f"--{field.name}", shlex.quote(str(value))]
        return " ".join(words)

    @property
    def folder(self) -> Path:
        return Path(self.out or f"out/step_cost/{self.device}")

    @property
    def file_name(self) -> str:
        return self.name or self.sweep or "step_cost"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line without further packages."""
    parser = argparse.ArgumentParser(description="Cost of a training step, as ratios to torch's Adam in the same run.")
    for field in fields(Settings):
        kind = type(field.default)
        how: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "default": field.default}
        parser.add_argument(f"--{field.name}", help=HELP[field.name].replace("%", "%%"), **how)
    settings = Settings(**vars(parser.parse_args(arguments)))
    try:
        run(settings, lambda text: print(text, flush=True), "python benchmarks/step_cost.py")
    except ValueError as error:
        parser.error(str(error))


def run(settings: Settings, say: Say, program: str) -> dict[str, Any] | None:
    """Measure, or only report; returns the record. Unknown names are a ValueError that lists the known ones."""
    if settings.report:
        found = report.load(Path(settings.report))
        text = report.readme(found, Path(settings.into))
        if settings.into:
            report.insert(Path(settings.into), text)
            for path, record in found:
                report.save_page(path.with_suffix(".md"), record)
        say(f"Wrote {settings.into}" if settings.into else text)
        return None
    command = settings.command(program)
    if settings.quick:
        settings = quick(settings)
    work = plan(settings)
    if settings.device == CUDA and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here; take --device cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")  # BackPACK's hooks, at every first layer
            return measure(settings, work, say, command)
    finally:
        torch.set_num_threads(before)


Work = list[tuple[Workload, list[tuple[Method, str]]]]


def quick(settings: Settings) -> Settings:
    """Seconds in place of minutes, wherever nothing else was asked for."""
    default = Settings()
    small: dict[str, Any] = {"only": "mlp-64", "modes": "eager", "rounds": 3, "block": 2.0}
    small["methods"] = "adam,adahesscale,adahesscale-gn,adahesscale-every10"
    asked = {name for name in small if getattr(settings, name) != getattr(default, name)}
    if settings.sweep:
        asked.add("only")
    return replace(settings, **{name: value for name, value in small.items() if name not in asked})


def plan(settings: Settings) -> Work:
    """Workloads, each with the methods and modes to measure on it."""
    if settings.device not in (CPU, CUDA):
        raise ValueError(f"no device is called {settings.device!r}; there are cpu, cuda")
    if settings.rounds < 1 or settings.threads < 1 or settings.block <= 0 or settings.limit <= 0:
        raise ValueError("--rounds, --threads, --block and --limit must be positive")
    if settings.sweep:
        if settings.only:
            raise ValueError("--sweep has its own workloads; leave --only out")
        workloads = sweep(choose(settings.sweep, named(SWEEPS), "sweep")[0])
    elif settings.only:
        workloads = choose(settings.only, WORKLOADS, "workload")
    else:
        workloads = [w for w in WORKLOADS.values() if settings.device in w.devices]
    default = IN_THE_PAPER if settings.sweep else ",".join(METHODS)
    methods = choose(settings.methods or default, METHODS, "method")
    if METHODS[BASELINE] not in methods:
        methods.insert(0, METHODS[BASELINE])
    modes = choose(settings.modes, named(MODES), "mode") if settings.modes else default_modes(settings)
    if GRAPH in modes and settings.device != CUDA:
        raise ValueError("the mode graph needs --device cuda")
    return [(w, [(method, mode) for mode in modes for method in methods if mode in method.modes]) for w in workloads]


IN_THE_PAPER = "sgd,adam,adahesscale,adahesscale-gn,adahessian,ggnmc,bl89,exact-ggn,exact-h"  # the lines of its Appendix D


def default_modes(settings: Settings) -> list[str]:
    if settings.sweep:
        return ["eager"]
    return [mode for mode in MODES if mode != GRAPH or settings.device == CUDA]


def measure(settings: Settings, work: Work, say: Say, command: str) -> dict[str, Any]:
    """Measure workload after workload and save after each."""
    device = torch.device(settings.device)
    start = time.perf_counter()
    record: dict[str, Any] = {
        "command": command,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(settings),
        "rounds": settings.rounds,
        "sweep": settings.sweep or None,
        "finished": False,
        "workloads": [],
    }

    def tell(text: str) -> None:
        say(f"[{time.perf_counter() - start:5.0f} s] {text}")

    if device.type == CUDA:
        prepare_cuda(device, settings.tf32)
    slow: dict[tuple[Method, str], str] = {}
    for workload, chosen in work:
        rows = [skipped(m, mode, slow[m, mode]) for m, mode in chosen if (m, mode) in slow]
        pairs = [pair for pair in chosen if pair not in slow]
        rows = (
            rows_of(workload, pairs, device, rounds=settings.rounds, block=settings.block / 1e3, limit=settings.limit, say=tell)
            + rows
        )
        if settings.sweep:
            slow.update(too_slow_to_go_on(rows, workload, settings.limit))
        record["workloads"].append(entry(workload, device, rows))
        record["seconds"] = round(time.perf_counter() - start)
        report.save(settings.folder, settings.file_name, record)
        if device.type == CUDA:
            torch.cuda.empty_cache()
    if settings.ensemble:
        tell("ensemble")
        try:
            record["ensemble"] = ensemble_row(device, rounds=settings.rounds, block=settings.block / 1e3)
        except Exception as error:
            record["ensemble"] = {"error": message(error)}
    record["finished"] = True
    record["seconds"] = round(time.perf_counter() - start)
    written = report.save(settings.folder, settings.file_name, record)
    tell(f"wrote {', '.join(written)} to {settings.folder}")
    return record


def skipped(method: Method, mode: str, why: str) -> dict[str, Any]:
    return {"method": method.name, "label": method.label, "mode": mode, "error": why}


def too_slow_to_go_on(rows: Iterable[dict[str, Any]], workload: Workload, limit: float) -> dict[tuple[Method, str], str]:
    """Methods that a network of twice the size may take over the limit: cost can grow with the cube of it."""
    found = {}
    for row in rows:
        method = METHODS[row["method"]]
        if row.get("error", "").startswith("too slow"):
            found[method, row["mode"]] = f"too slow at {workload.name} already"
        elif "ms" in row and row["ms"]["median"] > 1e3 * limit / 4:
            found[method, row["mode"]] = f"too slow: {row['ms']['median'] / 1e3:.1f} s a step at {workload.name} already"
    return found


def entry(workload: Workload, device: torch.device, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": workload.name,
        "description": workload.description,
        "size": workload.size,
        "batch": workload.batch[device.type],
        "parameters": sum(p.numel() for p in workload.network().parameters()),
        "rows": rows,
    }


def prepare_cuda(device: torch.device, tf32: bool) -> None:
    """Set the precision, and let the libraries take their workspaces before memory is counted."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    x = torch.ones(64, 64, device=device)
    torch.mm(x, x)
    torch.nn.functional.conv2d(x.view(1, 1, 64, 64), x[:3, :3].view(1, 1, 3, 3))
    torch.cuda.synchronize(device)


def machine(settings: Settings) -> dict[str, Any]:
    on_cuda = settings.device == CUDA
    return {
        "device": settings.device,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": settings.threads,
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "cuda": torch.version.cuda if on_cuda else None,
        "tf32": settings.tf32 if on_cuda else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        "commit": commit(),
    }
