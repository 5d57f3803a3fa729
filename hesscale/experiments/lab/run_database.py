"""The SQLite database of a run: facts, metrics and results. Files that are damaged or of another kind raise DamagedRun."""

from __future__ import annotations

import hashlib
import io
import json
import math
import operator
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
MARK = 0x48455353  # identifies databases of runs
SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE metrics (id INTEGER PRIMARY KEY, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL);
CREATE TABLE results (name TEXT PRIMARY KEY, value BLOB NOT NULL);
"""

Row = tuple[int, str, Any]
Metrics = dict[str, list[tuple[int, float]]]


class DamagedRun(Exception):
    """A file of a run is damaged, or of another kind."""


def new_database(path: Path, facts: Mapping[str, Any]) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"BEGIN; {SCHEMA} PRAGMA application_id = {MARK}; PRAGMA user_version = {FORMAT}; COMMIT;")
        with database:
            write_facts(database, facts)


def connect(directory: Path) -> sqlite3.Connection:
    """Open the database of a run. Raises DamagedRun if it is damaged or of another kind."""
    path = directory / "run.sqlite"
    if not path.exists():
        raise DamagedRun(f"{path} is missing; remove the directory to start this run again")
    with reading(path):
        database = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=60)
    try:
        with reading(path):
            (mark,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
        if mark != MARK:
            raise DamagedRun(f"{path} is not the database of a run; move it away")
        if version != FORMAT:
            raise DamagedRun(
                f"{path} has format {version}, but this version reads format {FORMAT}; choose another folder with --runs"
            )
    except DamagedRun:
        database.close()
        raise
    return database


@contextmanager
def reading(path: Path, remedy: str = "remove the directory to begin this run again") -> Iterator[None]:
    """Convert errors to DamagedRun with the file's name and a remedy. If the file is only locked, there is no remedy."""
    try:
        yield
    except (sqlite3.DatabaseError, ValueError, TypeError, KeyError) as error:
        is_torn = not isinstance(error, sqlite3.OperationalError) or "no such" in str(error)
        raise DamagedRun(f"{path} cannot be read ({error}){f'; {remedy}' if is_torn else ''}") from None


def read_facts(database: sqlite3.Connection) -> dict[str, Any]:
    return {name: json.loads(value) for name, value in database.execute("SELECT name, value FROM facts")}


def write_facts(database: sqlite3.Connection, facts: Mapping[str, Any]) -> None:
    rows = [(name, json.dumps(value)) for name, value in facts.items()]
    database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", rows)


def as_row(step: int, name: str, value: float) -> Row:
    """A row as SQLite returns it. SQLite supports neither NaN nor −0."""
    number = float(value) + 0.0
    return operator.index(step), name, None if math.isnan(number) else number


def read_rows(database: sqlite3.Connection) -> list[Row]:
    return database.execute("SELECT step, name, value FROM metrics ORDER BY id").fetchall()


def by_name(rows: list[Row]) -> Metrics:
    found: Metrics = {}
    for step, name, value in rows:
        found.setdefault(name, []).append((step, math.nan if value is None else value))
    return found


def digest(rows: Iterable[tuple[Any, ...]], onto: Any = None) -> Any:
    """Update the SHA-256 digest ``onto`` with rows of a database."""
    found = hashlib.sha256() if onto is None else onto
    for row in rows:
        found.update(repr(row).encode())
    return found


def pack(name: str, value: Any) -> bytes:
    if not isinstance(value, Tensor):
        try:
            return json.dumps(value).encode()
        except TypeError as error:
            raise TypeError(f"{name} cannot be kept: {error}; return tensors and plain values") from None
    buffer = io.BytesIO()
    torch.save(value.detach().cpu().clone(), buffer)
    return buffer.getvalue()


def unpack(value: bytes) -> Any:
    is_tensor = value[:2] == b"PK"  # a zip archive, as torch.save writes
    return torch.load(io.BytesIO(value), weights_only=True) if is_tensor else json.loads(value)
