"""Plots and heat maps as figures of plotly.js, for the page of a report."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_hex, to_rgb

from .matplotlib_files import MANY
from .plots import Heat, Plot
from .series_layout import Array, DrawnSeries, as_array, check, few_values, lay_out, limits

DIGITS = 5
INK, GRID = "#444444", "#e4e4e4"
SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "triangle-left", "triangle-right", "star"]
FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "#222222"}
AXIS = {
    "automargin": True,
    "zeroline": False,
    "showline": True,
    "linecolor": INK,
    "ticks": "outside",
    "tickcolor": INK,
    "gridcolor": GRID,
    "exponentformat": "power",
    "autotickangles": [0, -35, -90],
}
Figure = dict[str, Any]  # data and layout


def figures(item: Plot | Heat, colours: Mapping[str, str] | None = None) -> list[Figure]:
    """The plotly figures of an item: one for a plot, and one for each panel of a heat map."""
    check(item)
    return panels(item) if isinstance(item, Heat) else [plot_figure(item, colours)]


def plot_figure(plot: Plot, colours: Mapping[str, str] | None) -> Figure:
    drawn, _ = lay_out(plot, colours)
    x_axis = axis(plot.x_label, [mark.x for mark in drawn] if plot.log_x else None)
    y_axis = axis(plot.y_label, [mark.y for mark in drawn] if plot.log_y else None)
    if plot.categories:
        x_axis |= named_ticks(range(len(plot.categories)), plot.categories)
        x_axis |= {"range": [-0.6, len(plot.categories) - 0.4], "showgrid": False}
    elif values := few_values(plot):
        x_axis |= named_ticks(values, [f"{value:g}" for value in values])
    layout = {
        "xaxis": x_axis,
        "yaxis": y_axis,
        "font": FONT,
        "barmode": "overlay",
        "hovermode": "closest",
        "plot_bgcolor": "white",
        "paper_bgcolor": "white",
        "showlegend": False,
        "margin": {"l": 8, "r": 8, "t": 24, "b": 8},
    }
    return {"data": [trace for mark in drawn for trace in traces(mark, bool(plot.categories))], "layout": layout}


def traces(mark: DrawnSeries, has_categories: bool) -> list[Figure]:
    """The traces of a mark (its points, band, whiskers …), all with one name."""
    name = text(mark.label)
    silent: Figure = {"name": name, "type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    hover = "%{y:.4~g}" if has_categories else "%{x:.4~g}, %{y:.4~g}"
    main: Figure = {
        "name": name,
        "type": "bar" if mark.kind == "bars" else "scatter",
        "x": numbers(mark.x),
        "y": numbers(mark.y),
        "hovertemplate": f"{hover}<extra>{name}</extra>",
    }
    if mark.kind == "line":
        line = {"color": mark.colour, "width": 2, "dash": "dash" if mark.dashed else "solid"}
        symbol = {"symbol": SYMBOLS[mark.number % len(SYMBOLS)], "size": 6, "color": mark.colour}
        main |= {"mode": "lines+markers" if len(mark.x) < MANY else "lines", "line": line, "marker": symbol}
        if mark.low is None or mark.high is None:
            return [main]
        band = outline(mark.x, mark.low, mark.high)
        return [silent | band | {"fill": "toself", "fillcolor": faint(mark.colour), "line": {"width": 0}}, main]
    if mark.kind == "bars":
        main |= {"width": number(mark.width), "marker": {"color": mark.colour}}
    else:
        main |= {"mode": "markers", "marker": {"color": mark.colour, "opacity": 0.6, "size": 5}}
    found = [main]
    if mark.low is not None and mark.high is not None:
        whiskers = segments(zip(mark.x, mark.x, mark.low, mark.high, strict=True))
        found.append(silent | whiskers | {"line": {"color": INK, "width": 1.5}})
    if mark.medians:
        dashes = segments((left, right, y, y) for left, right, y in mark.medians)
        found.append(silent | dashes | {"line": {"color": "#222222", "width": 2.5}})
    return found


def outline(x: Array, low: Array, high: Array) -> Figure:
    """The outline of a band, which may have several pieces."""
    known = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
    around: Figure = {"x": [], "y": []}
    for piece in np.split(np.arange(len(known)), np.nonzero(~known)[0]):
        there = piece[known[piece]]
        back = there[::-1]
        if len(there):
            around["x"] += [*numbers(x[there]), *numbers(x[back]), None]
            around["y"] += [*numbers(high[there]), *numbers(low[back]), None]
    return around


def segments(ends: Iterable[tuple[float, float, float, float]]) -> Figure:
    """Separate lines, each from (x₀, y₀) to (x₁, y₁)."""
    lines: Figure = {"x": [], "y": []}
    for x0, x1, y0, y1 in ends:
        lines["x"] += [number(x0), number(x1), None]
        lines["y"] += [number(y0), number(y1), None]
    return lines


def panels(heat: Heat) -> list[Figure]:
    found = []
    hidden = {"visible": False, "constrain": "domain"}
    for (title, values), (name, low, high) in zip(heat.panels, limits(heat), strict=True):
        colours = matplotlib.colormaps[name]
        trace = {
            "type": "heatmap",
            "z": packed(as_array(values)),
            "zmin": low,
            "zmax": high,
            "colorscale": [[step / 10, to_hex(colours(step / 10))] for step in range(11)],
            "colorbar": {"thickness": 10, "outlinewidth": 0, "exponentformat": "power", "tickfont": {"size": 11}},
            "hovertemplate": "row %{y}, column %{x}: %{z:.4~g}<extra></extra>",
        }
        layout = {
            "title": {"text": text(title), "font": {"size": 13}, "x": 0.02, "y": 0.98, "yanchor": "top"},
            "xaxis": hidden,
            "yaxis": hidden | {"scaleanchor": "x", "autorange": "reversed"},
            "font": FONT,
            "margin": {"l": 4, "r": 4, "t": 30, "b": 4},
        }
        found.append({"data": [trace], "layout": layout})
    return found


def packed(values: Array) -> Figure:
    """A matrix as bytes, which plotly.js 2.28 and later unpack; in single precision if that can represent the values."""
    fits = np.nanmax(np.abs(values), initial=0.0, where=np.isfinite(values)) < 1e38
    kind = "f4" if fits else "f8"
    data = base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()
    return {"dtype": kind, "bdata": data, "shape": f"{values.shape[0]}, {values.shape[1]}"}


def numbers(values: Array) -> list[float | None]:
    return [number(value) for value in values]


def number(value: float) -> float | None:
    """A number, rounded to keep files small; None if it is not finite, since JSON has no such numbers."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def named_ticks(values: Iterable[float], names: Iterable[str]) -> Figure:
    return {"tickmode": "array", "tickvals": list(values), "ticktext": [text(name) for name in names]}


def axis(label: str, logarithmic: list[Array] | None) -> Figure:
    """An axis; ``logarithmic`` holds the numbers along it if it is logarithmic."""
    found = AXIS | {"type": "linear", "title": {"text": text(label), "standoff": 8}}
    if logarithmic is not None:
        shown = [value for values in logarithmic for value in values if value > 0]  # leaves out nan too
        powers = math.ceil(1.12 * math.log10(max(shown) / min(shown))) if shown else 0  # including the margins at both ends
        found |= {"type": "log", "nticks": min(9, max(4, powers))}  # with more, the labels between powers overlap
    return found


def faint(colour: str) -> str:
    red, green, blue = (round(255 * part) for part in to_rgb(colour))
    return f"rgba({red}, {green}, {blue}, 0.2)"


def text(plain: str) -> str:
    """Text for plotly, which would interpret HTML tags and entities."""
    return html.escape(plain, quote=False)
