"""Finished runs in one compressed file, with the settings, results and curves that are needed to make the report again."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .files import write_whole
from .run_database import DamagedRun
from .store import Result

FORMAT = 1
DIGITS = 6  # of the numbers of curves; results are not rounded


def write_runs(path: Path, results: Sequence[Result], curves: Sequence[str]) -> None:
    """Write runs, with the metrics in ``curves``. The same runs give the same bytes."""
    tasks = [dataclasses.asdict(result.task) for result in results]
    shared = {name: value for name, value in tasks[0].items() if all(task[name] == value for task in tasks)} if tasks else {}
    runs = [
        {
            "settings": {name: value for name, value in task.items() if name not in shared},
            "results": result.values,
            "curves": {name: curve_columns(result.metrics[name]) for name in curves if name in result.metrics},
        }
        for task, result in zip(tasks, results, strict=True)
    ]
    content = {"format": FORMAT, "settings": shared, "runs": runs}
    packed = gzip.compress(json.dumps(content, ensure_ascii=False, allow_nan=False).encode(), mtime=0)
    write_whole(path, lambda partial: partial.write_bytes(packed))


def curve_columns(points: Sequence[tuple[int, float]]) -> list[list[Any]]:
    """Steps and values. A value that is not finite becomes None."""
    values = [float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None for _, value in points]
    return [[step for step, _ in points], values]


def read_runs(path: Path, task: type) -> list[Result]:
    """The runs of a file, with tasks as instances of ``task``.

    Raises:
        DamagedRun: if the file cannot be read, or its runs have other settings than ``task``.
    """
    try:
        content = json.loads(gzip.decompress(path.read_bytes()))
        if content["format"] != FORMAT:
            raise DamagedRun(
                f"{path} has format {content['format']}, but this version reads format {FORMAT}; make the report again"
            )
        return [
            Result(task(**content["settings"], **run["settings"]), run["results"], metrics_of(run["curves"]), {})
            for run in content["runs"]
        ]
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise DamagedRun(
            f"this version cannot read runs from {path}: {error!r}; check the file out of the repository again"
        ) from error


def metrics_of(curves: dict[str, list[list[Any]]]) -> dict[str, list[tuple[int, float]]]:
    def value(found: float | None) -> float:
        return math.nan if found is None else found

    return {name: [(step, value(at)) for step, at in zip(*columns, strict=True)] for name, columns in curves.items()}
