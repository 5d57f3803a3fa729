"""Estimate how long unfinished runs will take, from the times of finished runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .experiment import Experiment
from .store import FINISHED, Record, Store, Task
from .terminal import count, duration

SAMPLE = 200  # the number of most recent finished runs to use
REPLICATES = ("seed", "first")  # settings that do not change how long a run takes


def time_needed(experiment: Experiment, store: Store, tasks: Sequence[Task], workers: int) -> str:
    """A sentence on how long these tasks will take with this number of workers."""
    known = [record for record in store.records(experiment.name) if is_measured(record)][-SAMPLE:]
    if not known:
        return (
            f"The time is unknown, since {store.root} has no finished and timed run of {experiment.name}. "
            f"To get an estimate, first run hesscale {experiment.name} --preset smoke."
        )
    costs: dict[tuple[Any, ...], float] = {}
    seconds = [costs.setdefault(key, cost(experiment, task, known)) for task in tasks for key in [kind_of(task)]]
    takes = max(sum(seconds) / workers, max(seconds))
    with_workers = f" with {count(workers, 'worker')}" if workers > 1 else ""
    return f"It will take about {duration(takes)}{with_workers}, estimated from {count(len(known), 'finished run')}."


def is_measured(record: Record) -> bool:
    return not record.problem and record.status == FINISHED and "seconds" in record.facts


def kind_of(task: Task) -> tuple[Any, ...]:
    return tuple(value for name, value in task.items() if name not in REPLICATES)


def cost(experiment: Experiment, task: Task, known: Sequence[Record]) -> float:
    """Seconds of one worker: the mean over the finished runs that share most settings with the task, scaled by amount of work."""
    shared = [sum(task.get(name) == value for name, value in record.task.items() if name not in REPLICATES) for record in known]
    nearest = [record for record, found in zip(known, shared, strict=True) if found == max(shared)]
    rates = [record.facts["seconds"] / record.facts.get("together", 1) / amount(experiment, record.task) for record in nearest]
    return math.fsum(rates) / len(rates) * amount(experiment, task)


def amount(experiment: Experiment, task: Mapping[str, Any]) -> float:
    return max(experiment.amount(experiment.task(**task)), 1) if experiment.amount is not None else 1
