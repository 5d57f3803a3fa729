"""A run in progress: a directory with a database of metrics and the last checkpoint.

A checkpoint and a finished run contain a digest of their metrics, to detect files that do not belong together.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import operator
import sqlite3
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .archives import load_archive, save_archive
from .files import write_whole
from .locks import is_same_file, lock
from .machine import commit, machine
from .run_database import (
    FORMAT,
    DamagedRun,
    Row,
    as_row,
    connect,
    digest,
    new_database,
    pack,
    read_facts,
    read_rows,
    reading,
    write_facts,
)

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
FLUSH_SECONDS = 1.0

Task = dict[str, Any]  # plain values by name


class Pause(BaseException):
    """Raised by a checkpoint after :attr:`Run.deadline`. The run is resumed later."""


class Run:
    """An open run, which no other process can open at the same time. It is a context manager.

    Attributes:
        state: the last state that :meth:`checkpoint` saved; None at the beginning.
        is_finished: whether the run is complete.
        deadline: the time on the monotonic clock after which a checkpoint raises :class:`Pause`.
        together: how many runs are done together, including this one.
    """

    def __init__(self, directory: Path, experiment: str, task: Task, command: str = "", *, tensorboard: bool = False) -> None:
        self.directory, self.experiment, self.task, self.command = directory, experiment, task, command
        self.state: dict[str, Any] | None = None
        self.is_finished = False
        self.deadline = math.inf
        self.together = 1
        self.began, self.seconds_before = time.monotonic(), 0.0  # the time that earlier commands spent on it
        self.done = 0
        self.tensorboard, self.writer = tensorboard, None
        self.rows, self.digest = 0, digest([])  # of the metrics in the database
        self.pending: list[Row] = []
        self.pending_facts: dict[str, Any] = {}
        self.flushed = -math.inf
        self.has_saved = False

    def __enter__(self) -> Run:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.directory)
        try:
            if not has_begun(self.directory):
                first = {"format": FORMAT, "experiment": self.experiment, "task": self.task, "status": RUNNING, "started": now()}
                write_whole(self.directory / "run.sqlite", lambda path: new_database(path, first))
            self.database = connect(self.directory)
            try:
                self.begin()
            except BaseException:
                self.database.close()
                raise
        except BaseException:
            self.lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and not self.is_finished:
                with suppress(sqlite3.Error, OSError, DamagedRun):  # such as a full disk; ``error`` is more important
                    self.flush()
                    if isinstance(error, Exception):
                        lines = "".join(traceback.format_exception(error))
                        self.note(status=FAILED, error=f"{type(error).__name__}: {error}", traceback=lines)
        finally:
            if self.writer is not None:
                self.writer.close()
            self.database.close()
            self.lock.close()

    def begin(self) -> None:
        """Go back to the last checkpoint, or to the beginning."""
        with reading(self.directory / "run.sqlite"):
            facts, rows = read_facts(self.database), read_rows(self.database)
            check_identity(self.directory, facts)
        self.is_finished = facts["status"] == FINISHED
        if self.is_finished:
            return
        for partial in [*self.directory.glob(".checkpoint.pt.*"), *self.directory.glob(".run.sqlite.*")]:
            partial.unlink()
        path = self.directory / "checkpoint.pt"
        if path.exists():
            self.seconds_before = facts.get("seconds", 0.0)
            saved = load_checkpoint(path)
            self.state, self.rows = saved["state"], saved["rows"]
            if (saved["run"], saved["digest"]) != (self.directory.name, digest(rows[: self.rows]).hexdigest()):
                raise DamagedRun(f"{path} does not belong to the metrics beside it; remove it to start this run again")
        rows = rows[: self.rows]
        digest(rows, self.digest)
        with self.database:
            self.database.execute("DELETE FROM metrics WHERE id > ?", (self.rows,))
            self.database.execute("DELETE FROM results")
        here = machine()
        before = [*facts.get("earlier_machines", []), facts.get("machine", here)]
        self.note(
            status=RUNNING,
            resumed=facts.get("resumed", -1) + 1,
            commits=sorted({*facts.get("commits", []), commit()}),
            machine=here,
            earlier_machines=[known for known in before if known != here],
            command=self.command,
            error="",
            traceback="",
        )
        if self.tensorboard:
            self.writer = tensorboard_writer(self.directory, 1 + max((step for step, _, _ in rows), default=-1))

    def reads(self, inputs: str) -> None:
        """Record the fingerprint of the data. Raises an error if the run has begun with other data."""
        before = read_facts(self.database).get("inputs", inputs)
        if before != inputs:
            raise ValueError(
                f"{self.directory} was begun with different data of the same name; use those, or choose other --runs"
            )
        self.note(inputs=inputs)

    @property
    def seconds(self) -> float:
        """The time that the run has taken, without work that was lost by interruptions."""
        return self.seconds_before + time.monotonic() - self.began

    def note(self, **facts: Any) -> None:
        with self.database:
            write_facts(self.database, facts)

    def log(self, step: int, **values: float) -> None:
        """Log metrics of a step. They are written to disk about once per second, and with every checkpoint."""
        self.pending += [as_row(step, name, value) for name, value in values.items()]
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        self.flush_sometimes()

    def progress(self, done: int, total: int) -> None:
        """Report progress to the process that waits for the run."""
        self.done = operator.index(done)
        self.pending_facts = {"done": self.done, "total": operator.index(total)}
        self.flush_sometimes()

    def flush_sometimes(self) -> None:
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if not is_same_file(self.lock, self.directory / "lock"):
            raise DamagedRun(f"{self.directory} was removed during its run; give the command again")
        with self.database:
            self.database.executemany("INSERT INTO metrics (step, name, value) VALUES (?, ?, ?)", self.pending)
            write_facts(self.database, self.pending_facts)
        digest(self.pending, self.digest)
        self.rows += len(self.pending)
        self.pending, self.pending_facts, self.flushed = [], {}, time.monotonic()

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Save everything that is needed to resume: tensors, numbers and text, in lists and dicts."""
        self.flush()
        saved = {"run": self.directory.name, "state": state, "rows": self.rows, "digest": self.digest.hexdigest()}
        write_whole(self.directory / "checkpoint.pt", lambda path: self.save(saved, path))
        self.note(saved=self.done, seconds=self.seconds)
        if time.monotonic() > self.deadline:
            raise Pause

    def save(self, saved: dict[str, Any], path: Path) -> None:
        """Save a state. The first one is loaded again as a check, so a state that cannot be loaded fails at once."""
        save_archive(saved, path)
        if not self.has_saved:
            try:
                load_archive(path)
            except Exception as error:  # torch may raise anything
                raise TypeError(f"a checkpoint must be of tensors, numbers and text, in lists and dicts ({error})") from None
        self.has_saved = True

    def finish(self, values: Mapping[str, Any]) -> None:
        """Store the results, tensors and plain values by name, and mark the run as finished."""
        self.flush()
        packed = sorted((name, pack(name, value)) for name, value in values.items())
        with self.database:
            self.database.executemany("INSERT INTO results VALUES (?, ?)", packed)
            write_facts(self.database, {"status": FINISHED, "finished": now(), "digest": digest(packed, self.digest).hexdigest()})
            write_facts(self.database, {"seconds": self.seconds, "together": self.together})
        self.is_finished = True
        (self.directory / "checkpoint.pt").unlink(missing_ok=True)


def key_of(experiment: str, task: Task) -> str:
    """A hash of the task that does not depend on the order of its settings."""
    return hashlib.sha256(json.dumps([FORMAT, experiment, task], sort_keys=True).encode()).hexdigest()[:16]


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def has_begun(directory: Path) -> bool:
    """Whether the directory holds files of a run."""
    try:
        return any((directory / name).exists() for name in ("run.sqlite", "checkpoint.pt"))
    except PermissionError:  # there are files, and reading them will raise an error
        return True


def check_identity(directory: Path, facts: Mapping[str, Any]) -> None:
    if directory.name != key_of(facts["experiment"], facts["task"]) or facts["status"] not in (RUNNING, FINISHED, FAILED):
        raise DamagedRun(f"{directory / 'run.sqlite'} belongs to another run; move it away")


def load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        saved = load_archive(path)
        if not isinstance(saved, dict) or saved.keys() != {"run", "state", "rows", "digest"}:
            raise ValueError("it is not a checkpoint of a run")
    except Exception as error:  # torch may raise anything for a damaged file
        raise DamagedRun(f"{path} cannot be read ({error}); remove it to start this run again") from None
    return saved


def tensorboard_writer(directory: Path, begin: int) -> Any:
    """A writer that begins at this step. TensorBoard then hides later steps that were written before."""
    try:
        package: Any = importlib.import_module("torch.utils.tensorboard")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"logging for TensorBoard needs {missing.name}: pip install tensorboard") from None
    return package.SummaryWriter(str(directory / "tensorboard"), purge_step=begin)
