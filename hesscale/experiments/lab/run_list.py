"""The list of runs: one line for each run with the settings that differ, or all details of a single run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .store import DAMAGED, FAILED, FINISHED, INTERRUPTED, RUNNING, Record, Store, Task
from .terminal import count

STATUSES = (FINISHED, RUNNING, INTERRUPTED, FAILED, DAMAGED)


def select(records: Sequence[Record], experiments: Sequence[str], filters: Sequence[str]) -> list[Record]:
    """The runs that match all filters. A filter is an experiment, a status, setting=value, or the beginning of an id.

    Raises:
        ValueError: for a filter that is none of these, or that no run matches.
    """
    for text in filters:
        name, equals, value = text.partition("=")
        if text in experiments:
            records = [record for record in records if record.directory.parent.name == text]
        elif text in STATUSES:
            records = [record for record in records if record.status == text]
        elif equals:
            name = name.strip().removeprefix("--").replace("-", "_")
            known = {setting for record in records for setting in settings_of(record)}
            if records and name not in known:
                raise ValueError(f"{text!r}: no run has a setting named {name}; the settings are {', '.join(sorted(known))}")
            records = [record for record in records if is_value(settings_of(record).get(name), value.strip())]
        else:
            found = [record for record in records if record.directory.name.startswith(text)]
            if records and not found:
                raise ValueError(
                    f"{text!r} matches nothing: it is not an experiment ({', '.join(experiments)}), a status "
                    f"({', '.join(STATUSES)}), setting=value, or the beginning of a run's id"
                )
            records = found
        if not records:
            raise ValueError(f"no run matches {' '.join(filters)}")
    return list(records)


def is_value(found: Any, text: str) -> bool:
    """Whether a setting has the value in ``text``. 1e-3 and 0.001 are the same."""
    if isinstance(found, float):
        try:
            return found == float(text)
        except ValueError:
            return False
    return str(found) == text


def settings_of(record: Record) -> Task:
    return {} if record.problem else record.task


def lines(records: Sequence[Record], room: int | None) -> Iterator[str]:
    """For each experiment, a heading and one line per run, with the settings that differ and the path.

    If a line does not fit into ``room`` columns, ids replace paths. If that is not enough, settings are cut off.
    """
    for experiment in dict.fromkeys(record.directory.parent.name for record in records):
        own = [record for record in records if record.directory.parent.name == experiment]
        statuses = Counter(record.status for record in own)
        states = ", ".join(f"{n} {status}" for status, n in statuses.items())
        yield f"{experiment}: {count(len(own), 'run')} in {own[0].directory.parent} ({states})"
        names = differing([settings_of(record) for record in own])
        settings = aligned([["status", *names], *([state_of(record), *values(record, names)] for record in own)])
        paths = ["path", *(str(record.directory) for record in own)]
        if room is not None and len(settings[0]) + max(map(len, paths)) + 4 > room:
            paths = ["id", *(record.directory.name for record in own)]
        space = None if room is None else max(room - max(map(len, paths)) - 4, 1)
        for text, path in zip(settings, paths, strict=True):
            yield f"  {shortened(text, space)}  {path}"
        for problem, number in Counter(filter(None, map(problem_of, own))).items():
            yield f"  {number} {problem}"


def values(record: Record, names: Sequence[str]) -> list[str]:
    settings = settings_of(record)
    return [str(settings.get(name, "–")) for name in names]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def state_of(record: Record) -> str:
    total = record.facts.get("total")
    is_partial = record.status in (RUNNING, INTERRUPTED, FAILED) and total
    return f"{record.status} {record.facts['done'] / total:.0%}" if is_partial else record.status


def problem_of(record: Record) -> str:
    error = record.problem or record.facts.get("error", "")
    return f"{record.status}: {error}" if record.status in (FAILED, DAMAGED) else ""


def differing(tasks: Sequence[Task]) -> list[str]:
    """The settings that are not the same in all tasks."""
    known = [task for task in tasks if task]
    names = dict.fromkeys(name for task in known for name in task)
    return [name for name in names if any(task.get(name) != known[0].get(name) for task in known)]


def shortened(text: str, room: int | None) -> str:
    return text if room is None or len(text) <= room else f"{text[: room - 1]}…"


def details(record: Record) -> Iterator[str]:
    """Everything about one run."""
    facts = record.facts
    yield f"{record.directory.parent.name}, {state_of(record)}: {record.directory}"
    for name in ("command", "started", "finished", "resumed", "commits", "machine", "error"):
        if value := facts.get(name):
            yield f"  {name}: {plain(value)}"
    if record.problem:
        yield f"  problem: {record.problem}"
    yield "  settings:"
    for name, value in settings_of(record).items():
        yield f"    {name}={value}"


def plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def as_json(records: Sequence[Record]) -> str:
    """A JSON list with one object per run, each on one line."""
    found = [
        {
            "experiment": record.directory.parent.name,
            "id": record.directory.name,
            "status": record.status,
            "path": str(record.directory),
            "settings": settings_of(record),
            **{name: value for name, value in record.facts.items() if name not in ("experiment", "task", "status", "digest")},
            **({"problem": record.problem} if record.problem else {}),
        }
        for record in records
    ]
    return "[\n" + ",\n".join(json.dumps(each, ensure_ascii=False) for each in found) + "\n]"


def run_of(store: Store, beginning: str, last: bool, files: Sequence[str]) -> Path:
    """The directory of the run whose id begins with ``beginning``, or of the last run. It must have one of these files.

    Raises:
        ValueError: if there is no such run, or more than one.
    """
    having = [found for found in store.records() if any((found.directory / name).is_file() for name in files)]
    if not having:
        raise ValueError(f"no run in {store.root} has {' or '.join(files)}")
    if last:
        return having[-1].directory
    found = [record for record in having if record.directory.name.startswith(beginning)]
    if len(found) == 1:
        return found[0].directory
    if not found:
        raise ValueError(
            f"{beginning} is neither a file or folder nor the beginning of the id of a run in {store.root} that has "
            f"{' or '.join(files)}; hesscale runs lists the runs"
        )
    names = ", ".join(record.directory.name for record in found)
    raise ValueError(f"{count(len(found), 'run')} have an id that begins with {beginning}: {names}")
