"""Do the tasks of an experiment in worker processes or on a Ray cluster, and make the settings of a sweep.

A finished task is not repeated. If a worker process dies, the others continue, and its task resumes from its checkpoint. A task
that raises an error is recorded as failed. Every task runs on one thread, so its numbers do not depend on the machine's cores. If
tasks are done together, their numbers differ only by rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

from ...errors import CurvatureWarning
from .experiment import Experiment
from .store import Store, Task, key_of

RETRIES = 3  # of a task whose worker died
POLL_SECONDS = 0.5
Settings = TypeVar("Settings")
Keys = tuple[str, ...]


class Interrupted(KeyboardInterrupt):
    """The user has stopped a sweep. The message says how to resume it."""


@dataclass
class SweepProgress:
    """The progress of a sweep.

    Attributes:
        finished: the number of finished runs, including those of earlier commands.
        running: the runs in progress, by key: a label, the work done, and the total work (0 while unknown).
        learned: the last value of the experiment's watched metric, for runs in progress that have logged it.
        failed: the number of runs that failed.
    """

    finished: int
    running: dict[str, tuple[str, int, int]]
    learned: dict[str, float] = field(default_factory=dict)
    failed: int = 0


@dataclass
class Outcome:
    """The number of finished runs, including those of earlier commands, and the directories and errors of failed runs."""

    finished: int = 0
    failed: list[tuple[Path, str]] = field(default_factory=list)


def run_tasks(
    experiment: Experiment,
    store: Store,
    tasks: list[Task],
    *,
    workers: int,
    data: Path | None,
    command: str,
    together: int = 1,
    ray: str | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Outcome:
    """Do the tasks that are not finished.

    Args:
        workers: the number of worker processes; 0 to do tasks in this process.
        data: the folder of data sets, which has the same path on all machines.
        command: the command line, which is recorded with each run.
        together: the maximum number of tasks that a process does together, if the experiment supports this.
        ray: the address of a Ray cluster to run on, or "local".
        watch: called regularly with the progress, and at the end.
    """
    if workers < 0:
        raise ValueError(f"workers must be 0 or more, not {workers}")
    if together < 1:
        raise ValueError(f"together must be at least 1, not {together}")
    sweep = Sweep(experiment, store, tasks, data and data.absolute(), command, watch, together)
    try:
        if ray is not None:
            from .cluster import run_on_ray

            run_on_ray(sweep, ray, workers)
        else:
            sweep.divide(max(workers, 1))
            if workers:
                from .workers import run_in_processes

                run_in_processes(sweep, workers)
            else:
                run_here(sweep)
    except KeyboardInterrupt:
        done = f"{sweep.outcome.finished} of {sweep.total} runs are finished"
        raise Interrupted(f"Stopped: {done}. The same command resumes the others from their last checkpoints.") from None
    sweep.show([])
    return sweep.outcome


class Sweep:
    """The queue of unfinished tasks, by key, and the outcome of all other tasks."""

    def __init__(
        self,
        experiment: Experiment,
        store: Store,
        tasks: list[Task],
        data: Path | None,
        command: str,
        watch: Callable[[SweepProgress], None] | None,
        together: int = 1,
    ) -> None:
        self.experiment, self.store, self.data, self.command, self.watch = portable(experiment), store, data, command, watch
        self.tasks = {key_of(experiment.name, task): task for task in tasks}
        self.kinds = {key: experiment.kind_of(task) for key, task in self.tasks.items()}
        self.together = together if experiment.run_together is not None else 1
        self.labels: dict[str, str] = {}
        self.total = len(self.tasks)
        self.deaths: Counter[str] = Counter()
        # the tasks of one entry are done together
        self.left: deque[Keys] = deque((key,) for key in self.tasks if not self.is_finished(key))
        self.outcome = Outcome(finished=self.total - len(self.left))

    def divide(self, workers: int) -> None:
        """Group up to ``together`` tasks of a kind, as evenly as possible, so that every worker has something to do.

        Finished tasks count too, so that the rest of an interrupted group resumes as a group.
        """
        most = min(self.together, math.ceil(self.total / workers))
        if most < 2:
            return
        waiting = {key for keys in self.left for key in keys}
        kinds: dict[Hashable, list[str]] = {}
        for key, kind in self.kinds.items():
            kinds.setdefault(kind, []).append(key)
        self.left.clear()
        for keys in kinds.values():
            parts = math.ceil(len(keys) / most)
            groups = [keys[len(keys) * i // parts : len(keys) * (i + 1) // parts] for i in range(parts)]
            self.left.extend(found for group in groups if (found := tuple(key for key in group if key in waiting)))

    def is_finished(self, key: str) -> bool:
        return self.store.is_finished(self.experiment.name, self.tasks[key])

    def directory(self, key: str) -> Path:
        return self.store.directory(self.experiment.name, self.tasks[key])

    def settle(self, keys: Keys, errors: Sequence[str]) -> None:
        """Record that tasks are finished or have failed."""
        for key, error in zip(keys, errors, strict=True):
            if error:
                self.outcome.failed.append((self.directory(key), error))
            else:
                self.outcome.finished += 1

    def again(self, keys: Keys, reason: str) -> None:
        """Queue the tasks of a worker that died, one by one, to find the task that caused it."""
        for key in reversed(keys):
            self.deaths[key] += 1
            if self.deaths[key] <= RETRIES:
                self.left.appendleft((key,))
            else:
                self.settle((key,), [f"its worker died {self.deaths[key]} times, at last with {reason}"])

    def show(self, keys: Iterable[str]) -> None:
        if self.watch is None:
            return
        running, learned = {}, {}
        for key in keys:
            record = self.store.record(self.experiment.name, self.tasks[key])
            facts = {} if record is None else record.facts
            running[key] = self.label(key), facts.get("done", 0), facts.get("total", 0)
            value = self.store.latest(self.directory(key), self.experiment.watched.metric)
            if value is not None:
                learned[key] = value
        self.watch(SweepProgress(self.outcome.finished, running, learned, len(self.outcome.failed)))

    def label(self, key: str) -> str:
        """The settings in which a task differs from the other tasks."""
        if key in self.labels:
            return self.labels[key]
        task, others = self.tasks[key], self.tasks.values()
        different = [f"{name}={value}" for name, value in task.items() if any(other.get(name) != value for other in others)]
        self.labels[key] = " ".join(different) or self.experiment.name
        return self.labels[key]


def portable(experiment: Experiment) -> Experiment:
    """The experiment without the parts that workers do not need. These may not be picklable."""
    return dataclasses.replace(
        experiment, presets={}, tasks=unknown, work=unknown, sections=unknown, kind=None, after=None, amount=None
    )


def unknown(_: Any) -> Any:
    raise NotImplementedError


def attempt(experiment: Experiment, store: Store, tasks: Sequence[Task], data: Path | None, command: str) -> list[str]:
    """Do tasks together. Returns the error of each, or an empty string; the traceback is stored with its run."""
    try:
        with warnings.catch_warnings():  # the paper's optimizers have no bounds on purpose
            warnings.filterwarnings("ignore", ".*times the step size", CurvatureWarning)
            problems = experiment.do_together(store, tasks, data, command)
    except Exception as error:
        if len(tasks) > 1:  # one by one, to find the task that fails
            return [attempt(experiment, store, [task], data, command)[0] for task in tasks]
        return [f"{type(error).__name__}: {error}"]
    return [f"{type(problem).__name__}: {problem}" if problem else "" for problem in problems]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_here(sweep: Sweep) -> None:
    with one_thread():
        while sweep.left:
            keys = sweep.left.popleft()
            sweep.show(keys)
            tasks = [sweep.tasks[key] for key in keys]
            sweep.settle(keys, attempt(sweep.experiment, sweep.store, tasks, sweep.data, sweep.command))


def grid(settings: Settings, over: Mapping[str, Sequence[Any]]) -> list[Settings]:
    """Settings for every combination of values of some fields. Values may be text."""
    hints = get_type_hints(type(settings))
    names = [each.name for each in dataclasses.fields(settings)]  # type: ignore[arg-type]
    for name, values in over.items():
        if name not in names:
            raise ValueError(f"{name} is not a setting; the settings are {', '.join(names)}")
        if not values:
            raise ValueError(f"{name} has no values to sweep over")
    several = [dict.fromkeys(parse(name, hints[name], value) for value in values) for name, values in over.items()]
    return [dataclasses.replace(settings, **dict(zip(over, each, strict=True))) for each in itertools.product(*several)]  # type: ignore[type-var]


def parse(name: str, kind: type, value: Any) -> Any:
    """Convert text to a value of a field's type. Values that already have this type are returned unchanged."""
    text = str(value).strip()
    words = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    try:
        if kind is bool:
            return words[text.lower()]
        if kind is int:
            return int(text)
        if kind is float and not math.isnan(float(text)):
            return float(text)
    except (ValueError, KeyError):
        pass
    if kind is str:
        return text
    raise ValueError(f"{name} must be a value of type {getattr(kind, '__name__', kind)}, not {text!r}")
