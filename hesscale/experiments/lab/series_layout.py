"""The layout of a plot's series: colours, dashes, positions within categories, and points that are left out or cut off."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from .compact import tick
from .plots import Heat, Plot, Series, Table

# ten colours that can be told apart with any kind of colour vision (M. Petroff, arXiv:2107.02270)
COLOURS = ("#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#717581", "#e76300", "#a96b59", "#92dadd", "#b9ac70", "#94a4a2")
KINDS = ("line", "dots", "bars")
GOLDEN = (5**0.5 - 1) / 2
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 1.5)), (0, (4, 1, 1, 1, 1, 1)))
ROOM, LOG_ROOM = 1.5, 0.5  # room for worse values on an axis, relative to the range of the better half of the series
Array = Any  # of numpy, of float64


@dataclass
class DrawnSeries:
    """A series that is ready to draw. Points that cannot be drawn are left out, or are NaN along a line and its band."""

    label: str
    kind: str
    colour: str
    number: int  # index of its label among those of the plot, which determines the symbol
    dash: Any  # of matplotlib
    in_legend: bool
    x: Array
    y: Array
    low: Array | None
    high: Array | None
    width: float = 0.0  # of a bar
    medians: list[tuple[float, float, float]] = field(default_factory=list)  # of clouds of points: from x, to x, y


@dataclass
class Layout:
    """The layout of a plot.

    Attributes:
        marks: the series.
        low, high: the limits of the y axis; None for matplotlib's choice.
        notes: sentences about values that are not shown.
    """

    marks: list[DrawnSeries]
    low: float | None
    high: float | None
    notes: list[str]


def lay_out(plot: Plot, colours: Mapping[str, str] | None = None) -> Layout:
    check(plot)
    colours = palette([plot]) if colours is None else colours
    dashes = dashes_of(plot, colours)
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
            colour=colours[series.label],
            number=labels.index(series.label),
            dash=dashes[series.label],
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
    notes = ["Dashes are medians."] if any(mark.medians for mark in drawn) else []
    notes += [f"{hidden} of {total} points are {why} and not drawn."] if hidden else []
    low, high = ends_of_axis(plot, drawn)
    return Layout(drawn, low, high, [*notes, *cut_off(drawn, low, high)])


def own_colours(plots: Sequence[Plot]) -> dict[str, str]:
    return {series.label: to_hex(series.colour) for plot in plots for series in plot.series if series.colour}


def dashes_of(plot: Plot, colours: Mapping[str, str]) -> dict[str, Any]:
    """The dash of each label. Lines of the same colour have different dashes, as long as there are enough."""
    lines = {series.label for series in plot.series if series.kind == "line"}
    found = {series.label: DASHES[0] for series in plot.series if series.label not in lines}
    for series in plot.series:
        if series.label in lines and series.label not in found:
            taken = {dash for label, dash in found.items() if label in lines and colours[label] == colours[series.label]}
            order = [*DASHES[series.dashed :], *DASHES[: series.dashed]]
            found[series.label] = next((dash for dash in order if dash not in taken), order[0])
    return found


def ends_of_axis(plot: Plot, drawn: Sequence[DrawnSeries]) -> tuple[float | None, float | None]:
    """The limits of the y axis. Methods that diverged, and their bands, do not determine the scale.

    The axis shows the range of the better half of the series, without outliers, and some room on the worse side. On a logarithmic
    axis, bands are cut off below half of the smallest value. A limit is None if nothing is cut off.
    """
    scale = np.log10 if plot.log_y else as_array
    lines = [found for mark in drawn if len(found := scale(mark.y[np.isfinite(mark.y)]))]
    ends = [scale(end[np.isfinite(end)]) for mark in drawn for end in (mark.low, mark.high) if end is not None]
    if not lines:
        return None, None
    everything = np.concatenate([*lines, *ends])
    low, high = uncut = float(everything.min()), float(everything.max())
    if plot.worse == "up":
        high = worst_shown(lines, everything, scale(plot.kept), plot.log_y)
    elif plot.worse == "down":
        low = -worst_shown([-line for line in lines], -everything, -scale(plot.kept), plot.log_y)
    if plot.log_y:
        low = max(low, min(float(line.min()) for line in lines) - math.log10(2))
    if (low, high) == uncut:
        return None, None
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin
    return (10**low, 10**high) if plot.log_y else (low, high)


def worst_shown(lines: Sequence[Array], everything: Array, kept: Array, is_log: bool) -> float:
    """The largest value to show, if smaller values are better: one that is not too far above the better half of the lines.

    It is the largest of all values, unless the others would then take less than half of the axis.
    """
    better = np.concatenate(sorted(lines, key=np.median)[: (len(lines) + 1) // 2])
    first, third = np.quantile(better, [0.25, 0.75])
    better = np.append(better[better <= third + max(3 * (third - first), 2.0 if is_log else 0.0)], kept)
    span = max(float(better.max() - better.min()), 1.0 if is_log else 0.0)
    shown = float(everything[everything <= better.max() + (LOG_ROOM if is_log else ROOM) * span].max())
    is_worth_it = span and shown - everything.min() < 0.5 * (everything.max() - everything.min())
    return shown if is_worth_it else float(everything.max())


def cut_off(drawn: Sequence[DrawnSeries], low: float | None, high: float | None) -> list[str]:
    """Sentences about values beyond the limits of the y axis."""
    notes = []
    for end, side, sign in ((high, "above", 1), (low, "below", -1)):
        if end is None:
            continue
        lines, beginnings, bands = [], [], []
        for mark in drawn:
            band = mark.high if sign > 0 else mark.low
            worst, of_band = (-np.inf if v is None else np.nanmax(sign * v, initial=-np.inf) for v in (mark.y, band))
            if worst > sign * end and sign * mark.y[np.isfinite(mark.y)][-1] <= sign * end and mark.kind == "line":
                beginnings.append(mark.label)
            elif worst > sign * end:
                lines.append(f"{mark.label} (to {tick(float(f'{sign * worst:.2g}'))})")
            elif of_band > sign * end:
                bands.append(mark.label)
        parts = [", ".join(lines)] if lines else []
        if beginnings:
            parts.append(f"the beginning of {'every line' if len(drawn) == len(beginnings) > 1 else ', '.join(beginnings)}")
        parts += [f"{'bands' if len(bands) > 1 else 'the band'} of {', '.join(bands)}"] if bands else []
        if parts:
            notes.append(f"Cut off {side} the axis: {'; '.join(parts)}.")
    return notes


def palette(plots: Sequence[Plot]) -> dict[str, str]:
    """A colour for each label, the same in all plots: its own colour, or one of COLOURS as long as there are enough."""
    own = own_colours(plots)
    others = dict.fromkeys(series.label for plot in plots for series in plot.series if series.label not in own)
    return own | {label: COLOURS[number % len(COLOURS)] for number, label in enumerate(others)}


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
        raise ValueError(f"{where}: kind {series.kind!r} is not one of {', '.join(KINDS)}")
    if (series.low is None) != (series.high is None):
        raise ValueError(f"{where}: low needs high, and high needs low")
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
    """Whether dots are spread around their categories: they are if all x are whole numbers. Otherwise, they keep their x."""
    return series.kind == "dots" and bool(plot.categories) and not (as_array(series.x) % 1).any()


def slots(plot: Plot) -> tuple[dict[str, float], float]:
    """The offset of each label from an x that several labels share, and their width."""
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
    """Spread the dots of a cloud over the width of its slot, evenly and deterministically."""
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
    """The values along a logarithmic x axis, if there are few enough to label all of them."""
    found = {x for series in plot.series for x in as_array(series.x).tolist() if x > 0 and np.isfinite(x)}
    return sorted(found) if plot.log_x and len(found) <= 10 else []


def limits(heat: Heat) -> list[tuple[str, float, float]]:
    """The colour map and limits of each panel. If there are negative values, the map diverges around zero."""
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
