"""A store of runs that loses nothing: a directory for each, with a database of its own and its last checkpoint.

A run is what an experiment's name and a task decide: all settings that its numbers depend on. Asked for again, a finished run is
there, and an unfinished one goes on from its checkpoint, without the metrics that came after it.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import write_whole
from .machine import commit, machine

FORMAT = 1
MARK = 0x48455353  # of our databases
RUNNING, FINISHED, FAILED = "running", "finished", "failed"
FLUSH_SECONDS = 1.0
SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE metrics (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL);
CREATE TABLE results (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""

Task = dict[str, Any]  # plain values by name
Metrics = dict[str, list[tuple[int, float]]]


class DamagedRun(Exception):
    """A file of a run is torn, or is not one of ours."""


class BusyRun(Exception):
    """Another process works on a run."""


@dataclass
class Record:
    """What is known of a run."""

    directory: Path
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""  # why its files cannot be read

    @property
    def status(self) -> str:
        """As noted; a run that nobody works on any more was interrupted."""
        if self.problem:
            return "damaged"
        status = str(self.facts["status"])
        return "interrupted" if status == RUNNING and not is_locked(self.directory) else status

    @property
    def task(self) -> Task:
        task: Task = self.facts["task"]
        return task


@dataclass
class Result:
    """A finished run: its task, what it returned, and its metrics."""

    task: Any
    values: dict[str, Any]
    metrics: Metrics
    facts: dict[str, Any]


class Store:
    """All runs below a directory."""

    def __init__(self, root: Path | str, *, tensorboard: bool = False) -> None:
        self.root, self.tensorboard = Path(root), tensorboard

    def directory(self, experiment: str, task: Task) -> Path:
        return self.root / experiment / key_of(experiment, task)

    def open(self, experiment: str, task: Task, command: str = "") -> Run:
        """The run of a task, to work on; see :class:`Run`."""
        return Run(self.directory(experiment, task), experiment, task, command, tensorboard=self.tensorboard)

    def record(self, experiment: str, task: Task) -> Record | None:
        directory = self.directory(experiment, task)
        return read_record(directory) if directory.exists() else None

    def records(self, experiment: str = "*") -> list[Record]:
        """Every run that is here, the oldest first; those that cannot be read have a problem."""
        found = [read_record(path) for path in self.root.glob(f"{experiment}/*") if path.is_dir()]
        return sorted(found, key=lambda record: str(record.facts.get("started", "")))

    def result(self, experiment: str, task: Task) -> Result | None:
        """A finished run, or None."""
        record = self.record(experiment, task)
        if record is None or record.problem or record.facts["status"] != FINISHED:
            return None
        with closing(connect(record.directory)) as database:
            values = {name: unpack(value) for name, value in database.execute("SELECT name, value FROM results")}
            return Result(task, values, read_metrics(database), record.facts)

    def request(self, experiment: str, tasks: list[Task], command: str) -> None:
        """Note what was asked for, which is what a report shows."""
        self.root.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self.root / "requests.sqlite", timeout=60)) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS requests (experiment TEXT, command TEXT, tasks TEXT, time TEXT)")
            database.execute("INSERT INTO requests VALUES (?, ?, ?, ?)", (experiment, command, json.dumps(tasks), now()))

    def requests(self) -> dict[str, tuple[str, list[Task]]]:
        """For each experiment, the last command and its tasks."""
        path = self.root / "requests.sqlite"
        if not path.exists():
            return {}
        try:
            with closing(sqlite3.connect(path, timeout=60)) as database:
                rows = database.execute("SELECT experiment, command, tasks FROM requests ORDER BY rowid").fetchall()
        except sqlite3.DatabaseError as error:
            raise DamagedRun(f"{path} cannot be read ({error}); move it away, and ask for the experiments again") from None
        return {experiment: (command, json.loads(tasks)) for experiment, command, tasks in rows}


class Run:
    """A run being worked on; a context manager, which nobody else can open meanwhile.

    Attributes:
        state: what :meth:`checkpoint` saved last, None at the beginning.
        is_finished: whether there is nothing left to do.
    """

    def __init__(self, directory: Path, experiment: str, task: Task, command: str = "", *, tensorboard: bool = False) -> None:
        self.directory, self.experiment, self.task, self.command = directory, experiment, task, command
        self.state: dict[str, Any] | None = None
        self.is_finished = False
        self.writer: Any = tensorboard_writer(directory) if tensorboard else None
        self.pending: list[tuple[int, str, float]] = []
        self.flushed = 0.0

    def __enter__(self) -> Run:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.directory)
        try:
            self.database = connect(self.directory, create=True)
            self.begin()
        except BaseException:
            self.lock.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and not self.is_finished:
                self.flush()
                is_fault = isinstance(error, Exception)
                self.note(status=FAILED if is_fault else RUNNING, error=f"{type(error).__name__}: {error}")
        finally:
            self.database.close()
            self.lock.close()
            if self.writer is not None:
                self.writer.close()

    def begin(self) -> None:
        """Go back to the last checkpoint, or to the beginning."""
        facts = read_facts(self.database)
        self.is_finished = facts.get("status") == FINISHED
        if self.is_finished:
            return
        path = self.directory / "checkpoint.pt"
        rows = 0
        if path.exists():
            saved = load_checkpoint(path)
            self.state, rows = saved["state"], saved["rows"]
        with self.database:
            self.database.execute("DELETE FROM metrics WHERE id > ?", (rows,))
            self.database.execute("DELETE FROM results")
        self.note(
            format=FORMAT,
            experiment=self.experiment,
            task=self.task,
            status=RUNNING,
            started=facts.get("started", now()),
            resumed=facts.get("resumed", -1) + 1,
            commits=sorted({*facts.get("commits", []), commit()}),
            machine=machine(),
            command=self.command,
            error="",
        )

    def note(self, **facts: Any) -> None:
        with self.database:
            rows = [(name, json.dumps(value)) for name, value in facts.items()]
            self.database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)

    def log(self, step: int, **values: float) -> None:
        """Metrics of a step, as they come; they are on the disk a second later, and with the next checkpoint."""
        self.pending += [(step, name, float(value)) for name, value in values.items()]
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        if time.monotonic() - self.flushed > FLUSH_SECONDS:
            self.flush()

    def progress(self, done: int, total: int) -> None:
        """How far it is, for whoever waits."""
        if time.monotonic() - self.flushed > FLUSH_SECONDS or done == total:
            self.note(done=done, total=total)
            self.flush()

    def flush(self) -> None:
        self.flushed = time.monotonic()
        with self.database:
            rows = [(step, name, value) for step, name, value in self.pending]
            self.database.executemany("INSERT INTO metrics (step, name, value) VALUES (?, ?, ?)", rows)
        self.pending = []

    def checkpoint(self, state: dict[str, Any]) -> None:
        """Save all that is needed to go on: tensors, numbers and text, in lists and dicts."""
        self.flush()
        (rows,) = self.database.execute("SELECT COALESCE(MAX(id), 0) FROM metrics").fetchone()
        write_whole(self.directory / "checkpoint.pt", lambda path: torch.save({"state": state, "rows": rows}, path))

    def finish(self, values: Mapping[str, Any]) -> None:
        """Keep what came out, tensors and plain values by name, and be done."""
        self.flush()
        with self.database:
            packed = [(name, pack(value)) for name, value in values.items()]
            self.database.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", packed)
            done = [("status", json.dumps(FINISHED)), ("finished", json.dumps(now()))]
            self.database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", done)
        self.is_finished = True
        (self.directory / "checkpoint.pt").unlink(missing_ok=True)


def key_of(experiment: str, task: Task) -> str:
    """The same for the same task, whatever the order of its settings."""
    return hashlib.sha256(json.dumps([FORMAT, experiment, task], sort_keys=True).encode()).hexdigest()[:16]


def now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def connect(directory: Path, create: bool = False) -> sqlite3.Connection:
    """The database of a run; DamagedRun if it is none of ours."""
    path = directory / "run.sqlite"
    if not create and not path.exists():
        raise DamagedRun(f"{path} is not there; remove the directory to begin this run again")
    database = sqlite3.connect(path, timeout=60)
    try:
        (mark,) = database.execute("PRAGMA application_id").fetchone()
        (tables,) = database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if create and mark == 0 and tables == 0:
            database.executescript(f"BEGIN; {SCHEMA} PRAGMA application_id = {MARK}; PRAGMA user_version = {FORMAT}; COMMIT;")
        elif mark != MARK:
            raise DamagedRun(f"{path} is not a database of a run; move it away")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise DamagedRun(f"{path} has format {version}, and this version reads {FORMAT}; use another directory for runs")
    except sqlite3.DatabaseError as error:
        database.close()
        raise DamagedRun(f"{path} cannot be read ({error}); remove the directory to begin this run again") from None
    except DamagedRun:
        database.close()
        raise
    return database


def read_record(directory: Path) -> Record:
    try:
        with closing(connect(directory)) as database:
            facts = read_facts(database)
        if "status" not in facts:
            raise DamagedRun(f"{directory / 'run.sqlite'} says nothing of its run; remove the directory to begin again")
        return Record(directory, facts)
    except DamagedRun as error:
        return Record(directory, problem=str(error))


def read_facts(database: sqlite3.Connection) -> dict[str, Any]:
    try:
        return {name: json.loads(value) for name, value in database.execute("SELECT name, value FROM facts")}
    except (sqlite3.DatabaseError, json.JSONDecodeError) as error:
        raise DamagedRun(f"the facts of a run cannot be read ({error})") from None


def read_metrics(database: sqlite3.Connection) -> Metrics:
    """By name; SQLite keeps nan as NULL."""
    found: Metrics = {}
    for step, name, value in database.execute("SELECT step, name, value FROM metrics ORDER BY id"):
        found.setdefault(name, []).append((step, math.nan if value is None else value))
    return found


def load_checkpoint(path: Path) -> dict[str, Any]:
    try:
        saved = torch.load(path, weights_only=True)
        if not isinstance(saved, dict) or saved.keys() != {"state", "rows"}:
            raise ValueError("it is not a checkpoint of a run")
    except Exception as error:  # whatever torch makes of a torn file
        raise DamagedRun(f"{path} cannot be read ({error}); remove it to begin this run again") from None
    return saved


def pack(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return json.dumps(value).encode()
    buffer = io.BytesIO()
    torch.save(value.detach().cpu().clone(), buffer)
    return buffer.getvalue()


def unpack(value: bytes) -> Any:
    is_tensor = value[:2] == b"PK"  # a zip archive, as torch.save writes
    return torch.load(io.BytesIO(value), weights_only=True) if is_tensor else json.loads(value)


def lock(directory: Path) -> io.TextIOWrapper:
    """A lock that the system takes back however this process ends."""
    import fcntl

    file = (directory / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise BusyRun(f"{directory} is being worked on by {owner}") from None
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


def is_locked(directory: Path) -> bool:
    import fcntl

    try:
        with (directory / "lock").open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def tensorboard_writer(directory: Path) -> Any:
    try:
        package: Any = importlib.import_module("torch.utils.tensorboard")
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"logging for TensorBoard needs {missing.name}: pip install tensorboard") from None
    return package.SummaryWriter(str(directory / "tensorboard"))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers from a seed, and those of before afterwards."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
