"""The layout of a plot's series, shared by files and the page: colours, positions within categories, points to leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from .plots import Heat, Plot, Series, Table

# ten colours that can be told apart with any kind of colour vision (M. Petroff, arXiv:2107.02270)
COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#717581", "#e76300", "#a96b59", "#92dadd", "#b9ac70", "#94a4a2")
KINDS = ("line", "dots", "bars")
GOLDEN = (5**0.5 - 1) / 2
Array = Any  # of numpy, of float64


@dataclass
class DrawnSeries:
    """A series ready to draw. Points that cannot be shown are left out, or are nan along a line and its band."""

    label: str
    kind: str
    colour: str
    number: int  # index of its label among those of the plot, which decides the symbol
    dashed: bool
    in_legend: bool
    x: Array
    y: Array
    low: Array | None
    high: Array | None
    width: float = 0.0  # of a bar
    medians: list[tuple[float, float, float]] = field(default_factory=list)  # of clouds: from x, to x, y


def lay_out(plot: Plot, colours: Mapping[str, str] | None = None) -> tuple[list[DrawnSeries], str]:
    """The series to draw, and a sentence about points that cannot be shown."""
    check(plot)
    colours = palette([plot]) if colours is None else colours
    labels = list(dict.fromkeys(series.label for series in plot.series))
    places, width = slots(plot)
    floor = smallest_positive(plot)
    drawn: list[DrawnSeries] = []
    hidden = total = 0
    for series in plot.series:
        x, y = as_array(series.x), as_array(series.y)
        shown = np.isfinite(x) & np.isfinite(y) & ((x > 0) | (not plot.log_x)) & ((y > 0) | (not plot.log_y))
        hidden, total = hidden + int((~shown).sum()), total + len(y)
        low, high = (None if ends is None else as_array(ends) for ends in (series.low, series.high))
        if plot.log_y:
            low, high = (None if ends is None else np.where(ends <= 0, floor, ends) for ends in (low, high))
        if series.kind == "line":
            y = np.where(shown, y, np.nan)
            low, high = (None if ends is None else np.where(shown, ends, np.nan) for ends in (low, high))
        else:
            x, y = x[shown], y[shown]
            low, high = (None if ends is None else ends[shown] for ends in (low, high))
        is_first = all(mark.label != series.label for mark in drawn)
        mark = DrawnSeries(
            label=series.label,
            kind=series.kind,
            colour=to_hex(series.colour or colours[series.label]),
            number=labels.index(series.label),
            dashed=series.dashed,
            in_legend=is_first and has_legend(plot),
            x=x,
            y=y,
            low=low,
            high=high,
            width=width,
        )
        if series.kind == "bars":
            mark.x = mark.x + places[series.label]
        elif is_cloud(plot, series):
            spread(mark, places[series.label])
        drawn.append(mark)
    why = "not finite" + (", or not positive on a logarithmic axis," if plot.log_x or plot.log_y else "")
    return drawn, f"{hidden} of {total} points are {why} and not drawn." if hidden else ""


def palette(plots: Sequence[Plot]) -> dict[str, str]:
    """A colour for each label, the same in all plots while there are enough of them."""
    labels = list(dict.fromkeys(series.label for plot in plots for series in plot.series))
    return {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(labels)}


def has_legend(plot: Plot) -> bool:
    """Whether a plot has a legend: not if it would repeat the axis."""
    labels = {series.label for series in plot.series}
    return len(labels) > 1 and not labels <= set(plot.categories)


def check(item: Plot | Heat | Table) -> None:
    """Raise ValueError if an item cannot be drawn."""
    if isinstance(item, Table):
        if any(len(row) != len(item.header) for row in item.rows):
            raise ValueError(f"table {item.name}: every row needs {len(item.header)} cells, as the header has")
    elif isinstance(item, Heat):
        if not item.panels or any(as_array(values).ndim != 2 or as_array(values).size == 0 for _, values in item.panels):
            raise ValueError(f"heat map {item.name}: every panel needs a matrix")
    else:
        for series in item.series:
            check_series(item, series)


def check_series(plot: Plot, series: Series) -> None:
    where = f"plot {plot.name}, series {series.label}"
    if series.kind not in KINDS:
        raise ValueError(f"{where}: kind {series.kind!r} is none of {', '.join(KINDS)}")
    if (series.low is None) != (series.high is None):
        raise ValueError(f"{where}: low and high come together")
    lengths = {len(values) for values in (series.x, series.y, series.low, series.high) if values is not None}
    if len(lengths) > 1:
        raise ValueError(f"{where}: x, y, low and high differ in length")
    if series.low is not None and (as_array(series.low) > as_array(series.high)).any():
        raise ValueError(f"{where}: low is above high")
    if plot.categories and not ((as_array(series.x) >= -0.5) & (as_array(series.x) <= len(plot.categories) - 0.5)).all():
        raise ValueError(f"{where}: x is not within a category, 0 to {len(plot.categories) - 1}")
    if series.kind == "bars" and plot.log_x:
        raise ValueError(f"{where}: bars have no width on a logarithmic axis; give them categories")


def is_cloud(plot: Plot, series: Series) -> bool:
    """Whether dots are to be spread around their categories, since all have whole numbers; other dots stay where they are."""
    return series.kind == "dots" and bool(plot.categories) and not (as_array(series.x) % 1).any()


def slots(plot: Plot) -> tuple[dict[str, float], float]:
    """The offsets of labels that share an x, and the width of each."""
    beside = [series for series in plot.series if series.kind == "bars" or is_cloud(plot, series)]
    labels = list(dict.fromkeys(series.label for series in beside))
    at: dict[float, set[str]] = {}
    for series in beside:
        for x in as_array(series.x).tolist():
            at.setdefault(x, set()).add(series.label)
    gaps: Array = np.diff(sorted(at))
    spacing = 1.0 if plot.categories or not len(gaps) else float(gaps.min())
    if all(len(found) == 1 for found in at.values()):
        return dict.fromkeys((series.label for series in plot.series), 0.0), 0.7 * spacing
    width = 0.84 * spacing / len(labels)
    middle = (len(labels) - 1) / 2
    places = {label: (number - middle) * width for number, label in enumerate(labels)}
    return {series.label: places.get(series.label, 0.0) for series in plot.series}, 0.9 * width


def spread(mark: DrawnSeries, offset: float) -> None:
    """Spread clouds over the width of their slots, evenly and always in the same way."""
    x = mark.x + offset
    for category in np.unique(mark.x):
        (cloud,) = np.nonzero(mark.x == category)
        if len(cloud) > 1:
            x[cloud] += 0.75 * mark.width * ((0.5 + GOLDEN * np.arange(len(cloud))) % 1 - 0.5)
        if len(cloud) > 2:
            middle, half = category + offset, 0.48 * mark.width
            mark.medians.append((middle - half, middle + half, float(np.median(mark.y[cloud]))))
    mark.x = x


def smallest_positive(plot: Plot) -> float:
    """The smallest positive number, at which bars and bands end on a logarithmic axis."""
    found = [values for series in plot.series for values in (series.y, series.low, series.high) if values is not None]
    numbers = np.concatenate([as_array(values) for values in found] or [as_array([])])
    return float(min(numbers[np.isfinite(numbers) & (numbers > 0)], default=1.0))


def few_values(plot: Plot) -> list[float]:
    """The values along a logarithmic x axis, if there are few enough to label each."""
    found = {x for series in plot.series for x in as_array(series.x).tolist() if x > 0 and np.isfinite(x)}
    return sorted(found) if plot.log_x and len(found) <= 10 else []


def limits(heat: Heat) -> list[tuple[str, float, float]]:
    """The colour map of each panel and the values at its ends: diverging around zero if there are negative values."""
    values = [as_array(matrix) for _, matrix in heat.panels]
    groups = [np.concatenate([matrix.ravel() for matrix in values])] * len(values) if heat.shared else values
    found = []
    for group in groups:
        finite = group[np.isfinite(group)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        if low < 0:
            low, high = -max(-low, high), max(-low, high)
        found.append(("RdBu_r" if low < 0 else "viridis", low, high if high > low else low + 1.0))
    return found


def as_array(values: Any) -> Array:
    return np.asarray(values, dtype=np.float64)
