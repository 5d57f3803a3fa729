"""The options of the command, and the workloads, methods and modes that they select."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..lab.choices import check_least, check_numbers, choose, named
from ..lab.experiment import option
from .methods import AGAIN, BASELINE, EAGER, GRAPH, METHODS, MODES, Method
from .workloads import CPU, CUDA, SWEEPS, WORKLOADS, Workload, sweep

Work = list[tuple[Workload, list[tuple[Method, str]]]]

IN_THE_PAPER = "sgd,adam,adahesscale,adahesscale-gn,adahessian,ggnmc,bl89,exact-ggn,exact-h"  # the lines of its Appendix D
QUICK_METHODS = "adam,adahesscale,adahesscale-gn,adahesscale-every10"


@dataclass(frozen=True)
class Settings:
    """The options of the command line, with their defaults."""

    device: str = option(CPU, "where to measure: cpu or cuda")
    only: str = option("", f"workloads, separated by commas: {', '.join(WORKLOADS)}")
    methods: str = option("", f"methods, separated by commas; Adam is always included: {', '.join(METHODS)}")
    modes: str = option("", f"modes, separated by commas: {', '.join(MODES)}")
    sweep: str = option("", "measure the paper's networks of growing size instead of the workloads: outputs or layers")
    rounds: int = option(30, "number of blocks of steps that each method runs; targets need 30")
    block: float = option(20.0, "milliseconds that a block of steps should take")
    limit: float = option(10.0, "seconds that a step may take; slower methods are reported as too slow")
    threads: int = option(1, "number of CPU threads for torch")
    tf32: bool = option(False, "allow TF32 in matrix products and convolutions on CUDA")
    ensemble: bool = option(False, "also measure an ensemble of 32 networks")
    quick: bool = option(False, "measure one workload with four methods and three rounds, in a few seconds")
    out: str = option("", "folder for the results; out/step_cost/cpu or out/step_cost/cuda by default")
    name: str = option("", "name of the files in that folder")
    report: str = option("", "measure nothing, but print the tables of all records in this folder")
    into: str = option(
        "", "with --report, write the tables between the two markers of this page, and rewrite the page of each record"
    )

    def command(self, program: str) -> str:
        """The command that repeats this."""
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


def quick(settings: Settings) -> Settings:
    """Settings that take seconds instead of minutes, except for those that the user has set."""
    small: dict[str, Any] = {"only": "mlp-64", "modes": EAGER, "rounds": 3, "block": 2.0, "methods": QUICK_METHODS}
    asked = {name for name in small if getattr(settings, name) != getattr(Settings(), name)}
    if settings.sweep:
        asked.add("only")
    return replace(settings, **{name: value for name, value in small.items() if name not in asked})


def plan(settings: Settings) -> Work:
    """Workloads, each with the methods and modes to measure on it. For an unknown name, ValueError lists the known ones."""
    check(settings)
    modes = choose(settings.modes, named(MODES), "mode") if settings.modes else default_modes(settings)
    if GRAPH in modes and settings.device != CUDA:
        raise ValueError("the mode graph needs --device cuda")
    workloads, methods = workloads_of(settings), methods_of(settings)
    return [(w, [(method, mode) for mode in modes for method in methods if mode in method.modes]) for w in workloads]


def check(settings: Settings) -> None:
    if settings.device not in (CPU, CUDA):
        raise ValueError(f"no device is called {settings.device!r}; there are cpu, cuda")
    check_least(settings, {"rounds": 1, "threads": 1})
    check_numbers(settings, positive=("block", "limit"))
    if settings.sweep and settings.only:
        raise ValueError("--sweep has its own workloads; leave out --only")


def workloads_of(settings: Settings) -> list[Workload]:
    if settings.sweep:
        return sweep(choose(settings.sweep, named(SWEEPS), "sweep")[0])
    if settings.only:
        return choose(settings.only, WORKLOADS, "workload")
    return [workload for workload in WORKLOADS.values() if settings.device in workload.devices]


def methods_of(settings: Settings) -> list[Method]:
    """The selected methods, and Adam, to which all others are compared."""
    default = IN_THE_PAPER if settings.sweep else ",".join(METHODS)
    methods = choose(settings.methods or default, METHODS, "method")
    return methods if METHODS[BASELINE] in methods else [METHODS[BASELINE], *methods]


def default_modes(settings: Settings) -> list[str]:
    if settings.sweep:
        return [EAGER]
    return [mode for mode in MODES if mode != AGAIN and (mode != GRAPH or settings.device == CUDA)]
