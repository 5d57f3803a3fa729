"""The paper's networks of growing size: times by size, their slopes, and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..lab.plots import Plot, Series
from .methods import METHODS, MODES

Record = dict[str, Any]
Row = dict[str, Any]
Key = tuple[str, str]  # a method and a mode


@dataclass(frozen=True)
class Slope:
    """d log time / d log size, and its difference from Adam's slope, fitted to the ratios to Adam at each size."""

    slope: float
    above_adam: float | None
    sizes: int


@dataclass
class Sweep:
    """The points of a sweep, the smallest first: rows by size, and by method and mode."""

    kind: str
    rows: dict[int, dict[Key, Row]]

    def of(self, key: Key, quantity: str) -> dict[int, dict[str, float]]:
        """Median and quartiles by size, for the sizes that have them."""
        found = {size: rows.get(key, {}).get(quantity) for size, rows in self.rows.items()}
        return {size: value for size, value in found.items() if value is not None}

    @property
    def keys(self) -> list[Key]:
        return list(dict.fromkeys(key for rows in self.rows.values() for key in rows))

    def label(self, key: Key) -> str:
        """The method's label, with the mode if there are several."""
        method, mode = key
        has_modes = len({other for _, other in self.keys}) > 1
        return METHODS[method].label + (f", {MODES[mode]}" if has_modes else "")

    @property
    def slopes(self) -> dict[Key, Slope]:
        """The slopes of methods that were measured at two or more sizes."""
        found = {}
        for key in self.keys:
            times, ratios = self.of(key, "ms"), self.of(key, "ratio")
            if len(times) > 1:
                above = fit(medians(ratios)) if len(ratios) == len(times) else None
                found[key] = Slope(fit(medians(times)), above, len(times))
        return found

    def time_cells(self, key: Key) -> list[str]:
        """Milliseconds at every size."""
        times = self.of(key, "ms")
        return [f"{times[size]['median']:.3g}" if size in times else "–" for size in self.rows]

    def slope_cells(self, key: Key) -> list[str]:
        """The slope, and the slope minus Adam's."""
        slope = self.slopes.get(key)
        if slope is None:
            return ["–", "–"]
        return [f"{slope.slope:.3f}", "–" if slope.above_adam is None else f"{slope.above_adam:+.3f}"]

    def plot(self, quantity: str, name: str, title: str, label: str, caption: str) -> Plot:
        """Medians and quartiles of a quantity by size, with both axes logarithmic; modes other than the first are dashed."""
        series = []
        for key in self.keys:
            if points := self.of(key, quantity):
                middle, low, high = ([value[q] for value in points.values()] for q in ("median", "q1", "q3"))
                is_dashed = key[1] != self.keys[0][1]
                colour = METHODS[key[0]].colour
                series.append(Series(self.label(key), list(points), middle, low, high, colour=colour, dashed=is_dashed))
        return Plot(name, title, series, f"number of {self.kind}", label, log_x=True, log_y=True, caption=caption)


def sweep_of(record: Record) -> Sweep:
    """The sweep of a record."""
    points = {
        workload["size"]: {(row["method"], row["mode"]): row for row in workload["rows"]} for workload in record["workloads"]
    }
    return Sweep(record["sweep"], points)


def medians(points: Mapping[int, Mapping[str, float]]) -> list[tuple[float, float]]:
    return [(size, value["median"]) for size, value in points.items()]


def fit(points: Iterable[tuple[float, float]]) -> float:
    """The slope of a line through the logarithms."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope
