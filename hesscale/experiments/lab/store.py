"""A store of runs: one directory for each, with a database and the last checkpoint.

A run is identified by the experiment's name and its task, that is, by all settings that its numbers depend on. If it is requested
again, a finished run is read. An unfinished run resumes from its checkpoint, and metrics after the checkpoint are dropped.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .locks import BusyRun, is_locked
from .run import FAILED, FINISHED, RUNNING, Pause, Run, Task, check_identity, has_begun, key_of, now
from .run_database import DamagedRun, Metrics, by_name, connect, digest, read_facts, read_rows, reading, unpack

__all__ = [
    "DAMAGED",
    "FAILED",
    "FINISHED",
    "INTERRUPTED",
    "RUNNING",
    "BusyRun",
    "DamagedRun",
    "Metrics",
    "Pause",
    "Record",
    "Result",
    "Run",
    "Store",
    "Task",
    "key_of",
    "seeded",
]


INTERRUPTED, DAMAGED = "interrupted", "damaged"  # statuses that are detected, not recorded


@dataclass
class Record:
    """The store's information about a run."""

    directory: Path
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # why its files cannot be read

    @property
    def status(self) -> str:
        """The recorded status, or "interrupted" for a run that is recorded as running but has no process."""
        if self.problem:
            return DAMAGED
        status = str(self.facts["status"])
        return INTERRUPTED if status == RUNNING and not is_locked(self.directory) else status

    @property
    def task(self) -> Task:
        task: Task = self.facts["task"]
        return task


@dataclass
class Result:
    """A finished run: its task, its results, and its metrics."""

    task: Any
    values: dict[str, Any]
    metrics: Metrics
    facts: dict[str, Any]


class Store:
    """All runs in a directory. An opened run pauses at its first checkpoint after ``seconds``."""

    def __init__(self, root: Path | str, *, tensorboard: bool = False, seconds: float = math.inf) -> None:
        self.root, self.tensorboard, self.seconds = Path(root), tensorboard, seconds

    def directory(self, experiment: str, task: Task) -> Path:
        return self.root / experiment / key_of(experiment, task)

    def open(self, experiment: str, task: Task, command: str = "") -> Run:
        """Open the run of a task; see :class:`Run`."""
        run = Run(self.directory(experiment, task), experiment, task, command, tensorboard=self.tensorboard)
        run.deadline = time.monotonic() + self.seconds
        return run

    def record(self, experiment: str, task: Task) -> Record | None:
        directory = self.directory(experiment, task)
        return read_record(directory) if has_begun(directory) else None

    def latest(self, directory: Path, metric: str) -> float | None:
        """The last value of a metric of a run; None if there is none yet, or if it cannot be read."""
        if not metric or not (directory / "run.sqlite").exists():
            return None
        query = "SELECT value FROM metrics WHERE name = ? ORDER BY id DESC LIMIT 1"
        try:
            with reading(directory / "run.sqlite"), closing(connect(directory)) as database:
                row = database.execute(query, (metric,)).fetchone()
        except DamagedRun:
            return None
        return None if row is None else row[0]

    def records(self, experiment: str = "*") -> list[Record]:
        """All runs, the oldest first. A run that cannot be read has a ``problem``."""
        found = [read_record(path) for path in self.root.glob(f"{experiment}/*") if has_begun(path)]
        return sorted(found, key=lambda record: (str(record.facts.get("started", "")), str(record.facts.get("task"))))

    def result(self, experiment: str, task: Task) -> Result | None:
        """A finished run, or None. Raises DamagedRun if its files have changed."""
        record = self.record(experiment, task)
        if record is None or (not record.problem and record.facts["status"] != FINISHED):
            return None
        if record.problem:
            raise DamagedRun(record.problem)
        path = record.directory / "run.sqlite"
        with reading(path), closing(connect(record.directory)) as database:
            rows = read_rows(database)
            packed = database.execute("SELECT name, value FROM results ORDER BY name").fetchall()
            if record.facts.get("digest") != digest([*rows, *packed]).hexdigest():
                raise DamagedRun(f"{path} is not as its run wrote it; remove the directory to start this run again")
            return Result(task, {name: unpack(value) for name, value in packed}, by_name(rows), record.facts)

    def request(self, experiment: str, tasks: list[Task], command: str) -> None:
        """Record the tasks of a command, which a report shows."""
        self.root.mkdir(parents=True, exist_ok=True)
        row = experiment, command, json.dumps(tasks), now()
        with self.asked() as database, database:
            database.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", row)

    def requests(self) -> dict[str, tuple[str, list[Task]]]:
        """For each experiment, the last command that has a finished run, and its tasks. If none has one, the last command."""
        if not (self.root / "requests.sqlite").exists():
            return {}
        with self.asked() as database:
            rows = database.execute("SELECT experiment, command, tasks FROM requests ORDER BY rowid").fetchall()
        found: dict[str, tuple[str, list[Task]]] = {}
        shown = set()
        for experiment, command, text in rows:
            tasks = json.loads(text)
            if any(self.is_finished(experiment, task) for task in tasks):
                shown.add(experiment)
            elif experiment in shown:
                continue
            found[experiment] = command, tasks
        return found

    def finished(self, experiment: str) -> tuple[str, list[Task]]:
        """The commands of all finished runs, one per line, and their tasks."""
        facts = [record.facts for record in self.records(experiment) if not record.problem and record.status == FINISHED]
        return "\n".join(dict.fromkeys(found["command"] for found in facts)), [found["task"] for found in facts]

    def is_finished(self, experiment: str, task: Task) -> bool:
        record = self.record(experiment, task)
        return record is not None and record.status == FINISHED

    @contextmanager
    def asked(self) -> Iterator[sqlite3.Connection]:
        path = self.root / "requests.sqlite"
        with (
            reading(path, "move it away, and give the commands again"),
            closing(sqlite3.connect(path, timeout=60)) as database,
        ):
            database.execute("CREATE TABLE IF NOT EXISTS requests (experiment TEXT, command TEXT, tasks TEXT, time TEXT)")
            yield database


def read_record(directory: Path) -> Record:
    try:
        with reading(directory / "run.sqlite"), closing(connect(directory)) as database:
            facts = read_facts(database)
            check_identity(directory, facts)
        return Record(directory, facts)
    except DamagedRun as error:
        return Record(directory, problem=str(error))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers, and restore their state afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
