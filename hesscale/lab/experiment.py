"""An experiment: settings with presets, tasks that they ask for, a function that does one, and what all of them show together."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import fingerprint
from .plots import Section
from .store import Result, Run, Store, Task

PRESETS = ("smoke", "small", "paper")


@dataclass(frozen=True)
class Experiment:
    """One file in ``hesscale/experiments``, as its ``EXPERIMENT``.

    Attributes:
        name: of the command.
        title: what it shows, in a line.
        settings: a frozen dataclass; each field is an :func:`option` and one of the command line.
        presets: settings of ``smoke`` (seconds), ``small`` (minutes) and ``paper`` (the paper's).
        task: a frozen dataclass of plain values: all that decides the numbers of one run, and nothing else.
        tasks: those that settings ask for. The same task asked for by other settings is the same run.
        work: how much that is, in a line.
        run: does a task, from ``run.state`` on where there is one, and returns what came out: tensors and plain values by name.
        sections: what the runs show, whatever settings they differ in; some may be missing.
        alone: one run at a time, because it measures time.
    """

    name: str
    title: str
    settings: type
    presets: Mapping[str, Any]
    task: type
    tasks: Callable[[Any], list[Any]]
    work: Callable[[Any], str]
    run: Callable[[Any, Run, Path | None], Mapping[str, Any]]
    sections: Callable[[list[Result]], list[Section]]
    alone: bool = False

    def do(self, store: Store, task: Task, data: Path | None, command: str = "") -> None:
        """Do a task, or what is left of it. ``data`` is where the user keeps data sets."""
        with store.open(self.name, task, command) as run:
            if not run.is_finished:
                run.reads(self.inputs(task, data))
                run.finish(self.run(self.task(**task), run, data))

    def inputs(self, task: Task, data: Path | None) -> str:
        """What tells the data that a task reads from others of the same name; nothing if it reads none."""
        return fingerprint(task["dataset"], data) if "dataset" in task else ""

    def results(self, store: Store, tasks: list[Task]) -> list[Result]:
        """Those of these tasks that are done, with tasks as the experiment's own type."""
        found = [store.result(self.name, task) for task in tasks]
        return [dataclasses.replace(result, task=self.task(**result.task)) for result in found if result is not None]


def option(default: Any, help: str) -> Any:
    """A field of settings."""
    return dataclasses.field(default=default, metadata={"help": help})


def experiments() -> dict[str, Experiment]:
    """By name: every module of ``hesscale.experiments`` has one."""
    from .. import experiments as package

    modules = [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    return {module.EXPERIMENT.name: module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")}


def as_task(task: Any) -> Task:
    return dataclasses.asdict(task)
