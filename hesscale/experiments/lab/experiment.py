"""An experiment: its settings and presets, the tasks for given settings, the function that does a task, and its report."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .data import fingerprint
from .plots import Section
from .store import BusyRun, DamagedRun, Result, Run, Store, Task

PRESETS = ("smoke", "small", "paper")


class Watched(NamedTuple):
    """A metric that is shown while runs are in progress."""

    name: str
    metric: str


NOTHING = Watched("", "")


@dataclass(frozen=True)
class Experiment:
    """An experiment, which a file in ``hesscale/experiments/figures`` defines as its ``EXPERIMENT``.

    Attributes:
        name: the name of its command.
        title: what it measures, as a noun phrase of one line.
        settings: a frozen dataclass. Each field is an :func:`option` of the command line.
        presets: settings of ``smoke`` (seconds), ``small`` (minutes) and ``paper`` (the paper's).
        task: a frozen dataclass of plain values: everything that the numbers of one run depend on, and nothing else.
        tasks: returns the tasks for given settings. If two settings have a task in common, they share its run.
        work: describes in one line how much work given settings mean.
        run: does a task, and returns its results, tensors and plain values by name. It resumes from ``run.state`` if that is set.
        sections: makes the report's sections from results. Some results may be missing, and they may differ in any setting.
        alone: whether no other task may run at the same time as a given task, because it measures time.
        run_together: does several tasks at once, each with its own run, and returns the results of each.
        kind: maps a task to its kind. Tasks of the same kind can be done together.
        after: does further work for given settings and the directories of finished runs. Yields lines to print.
        curves: metrics that a report stores for each run, so that the report can be made again. If empty, it stores no runs.
        unit: the unit of a run's progress, in the plural.
        amount: maps a task to its total number of these units, by which its time is estimated.
        watched: the metric of performance that the progress display shows; none if its name is empty.
        examples: commands for the help text, without ``hesscale`` and the name.
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
    alone: Callable[[Any], bool] | None = None
    run_together: Callable[[Sequence[Any], Sequence[Run], Path | None], Sequence[Mapping[str, Any]]] | None = None
    kind: Callable[[Any], Hashable] | None = None
    after: Callable[[Any, Mapping[Any, Path]], Iterator[str]] | None = None
    curves: tuple[str, ...] = ()
    unit: str = "steps"
    amount: Callable[[Any], float] | None = None
    watched: Watched = NOTHING
    examples: tuple[str, ...] = ()

    def do(self, store: Store, task: Task, data: Path | None, command: str = "") -> None:
        """Do a task, or resume it. ``data`` is the folder of data sets."""
        self.do_together(store, [task], data, command)

    def do_together(
        self, store: Store, tasks: Sequence[Task], data: Path | None, command: str = ""
    ) -> Sequence[BusyRun | DamagedRun | None]:
        """Do several tasks, together if possible. Returns for each task the error that kept it from starting, or None.

        For a single task, this error is raised.
        """
        problems: list[BusyRun | DamagedRun | None] = []
        with ExitStack() as stack:
            runs = []
            for task in tasks:
                try:
                    runs.append(stack.enter_context(store.open(self.name, task, command)))
                    problems.append(None)
                except (BusyRun, DamagedRun) as problem:
                    if len(tasks) == 1:
                        raise
                    problems.append(problem)
            left = [run for run in runs if not run.is_finished]
            for run in left:
                run.together = len(left)
                run.reads(self.inputs(run.task, data))
            for run, values in zip(left, self.outcomes(left, data), strict=True):
                run.finish(values)
        return problems

    def outcomes(self, runs: list[Run], data: Path | None) -> Sequence[Mapping[str, Any]]:
        tasks = [self.task(**run.task) for run in runs]
        if self.run_together is not None and len(runs) > 1:
            return self.run_together(tasks, runs, data)
        return [self.run(task, run, data) for task, run in zip(tasks, runs, strict=True)]

    def kind_of(self, task: Task) -> Hashable:
        return self.kind(self.task(**task)) if self.kind is not None else None

    def is_alone(self, tasks: Iterable[Task]) -> bool:
        return self.alone is not None and any(self.alone(self.task(**task)) for task in tasks)

    def inputs(self, task: Task, data: Path | None) -> str:
        """A fingerprint of the data that a task reads; empty if it reads none."""
        return fingerprint(task["dataset"], data) if "dataset" in task else ""

    def results(self, store: Store, tasks: list[Task]) -> list[Result]:
        """The results of finished tasks, with tasks as instances of the experiment's ``task``."""
        found = [store.result(self.name, task) for task in tasks]
        return [dataclasses.replace(result, task=self.task(**result.task)) for result in found if result is not None]


def option(default: Any, help: str) -> Any:
    """A field of a dataclass of settings, with its help text."""
    return dataclasses.field(default=default, metadata={"help": help})


def experiments() -> dict[str, Experiment]:
    """All experiments by name, from the modules of ``hesscale.experiments.figures``."""
    from .. import figures as package

    modules = [importlib.import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    return {module.EXPERIMENT.name: module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")}


def as_task(task: Any) -> Task:
    return dataclasses.asdict(task)
