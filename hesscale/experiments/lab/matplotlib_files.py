"""Plots and heat maps as PNG and SVG files, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

from .compact import compact
from .files import write_whole
from .plots import Heat, Plot
from .series_layout import DrawnSeries, as_array, check, few_values, lay_out, limits

SYMBOLS = "os^DvPX<>p"
SHORT = 44  # letters of a label, of which two stand side by side
THOUSANDS = 10_000  # from here on, an axis has 20k in place of 20000
MANY = 40  # lines with this many points or more have no symbols
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.facecolor": "white",
    "font.size": 9.5,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "svg.hashsalt": "hesscale",
}


UNWANTED = {"png": ["Software"], "svg": ["Date", "Creator"]}  # metadata that change although the numbers do not


def save_figure(
    item: Plot | Heat, stem: Path, colours: Mapping[str, str] | None = None, kinds: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Write ``stem``.png and ``stem``.svg, the same bytes for the same numbers."""
    check(item)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context(STYLE):
        figure = draw_heat(item) if isinstance(item, Heat) else draw_plot(item, colours)
        for kind, path in zip(kinds, paths, strict=True):
            metadata = dict.fromkeys(UNWANTED[kind])
            write_whole(path, partial(figure.savefig, format=kind, dpi=160, metadata=metadata))
    return paths


def draw_plot(plot: Plot, colours: Mapping[str, str] | None) -> Figure:
    drawn, _ = lay_out(plot, colours)
    slot = min((mark.width for mark in drawn), default=1.0)
    width = 2.5 + len(plot.categories) * max(0.75, 0.2 / slot)
    figure = Figure(figsize=(min(11.0, max(6.4, width)), 4.1), layout="constrained")
    axes = figure.subplots()
    for mark in drawn:
        draw_mark(axes, mark)
    axes.set_title(plain(plot.title))
    axes.set_xlabel(plain(plot.x_label))
    axes.set_ylabel(plain(plot.y_label))
    if plot.log_y:
        axes.set_yscale("log")
    if plot.log_x:
        axes.set_xscale("log")
    if plot.categories:
        name_categories(axes, plot)
    elif values := few_values(plot):
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_minor_locator(NullLocator())
        names = [compact(value) for value in values]
        axes.set_xticklabels(names, **turned(names, 50))
    elif not plot.log_x and axes.get_xlim()[1] >= THOUSANDS:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if named := [mark for mark in drawn if mark.in_legend]:
        handles, labels = [handle(mark) for mark in named], [plain(mark.label) for mark in named]
        columns = 2 if len(labels) > 2 and max(map(len, labels)) <= SHORT else 1
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def draw_mark(axes: Any, mark: DrawnSeries) -> None:
    if mark.kind == "line":
        symbol = SYMBOLS[mark.number % len(SYMBOLS)] if len(mark.x) < MANY else ""
        style = "--" if mark.dashed else "-"
        axes.plot(mark.x, mark.y, style, color=mark.colour, marker=symbol, markersize=4, linewidth=1.6, zorder=3)
        if mark.low is not None:
            axes.fill_between(mark.x, mark.low, mark.high, color=mark.colour, alpha=0.2, linewidth=0)
        return
    if mark.kind == "bars":
        axes.bar(mark.x, mark.y, mark.width, color=mark.colour)
    else:
        look = {"s": 11, "alpha": 0.6} if mark.low is None else {"s": 26}  # a cloud, or points with whiskers
        axes.scatter(mark.x, mark.y, color=mark.colour, linewidths=0, zorder=3, **look)
    if mark.low is not None:
        colour = "#222222" if mark.kind == "bars" else mark.colour
        axes.vlines(mark.x, mark.low, mark.high, color=colour, linewidth=1.1, zorder=4)
    for left, right, y in mark.medians:
        axes.plot((left, right), (y, y), color="#222222", linewidth=1.6, solid_capstyle="butt", zorder=5)


def handle(mark: DrawnSeries) -> Line2D:
    """The legend entry of a mark."""
    if mark.kind != "line":
        return Line2D([], [], linestyle="", marker="s" if mark.kind == "bars" else "o", color=mark.colour)
    symbol = SYMBOLS[mark.number % len(SYMBOLS)] if len(mark.x) < MANY else ""
    return Line2D([], [], linestyle="--" if mark.dashed else "-", marker=symbol, markersize=4, color=mark.colour)


def name_categories(axes: Any, plot: Plot) -> None:
    names = [plain(name) for name in plot.categories]
    axes.set_xticks(range(len(names)), names, **turned(plot.categories, 70))
    axes.set_xlim(-0.6, len(plot.categories) - 0.4)
    axes.grid(visible=False, axis="x")


def turned(names: Sequence[str], room: int) -> dict[str, Any]:
    """The rotation of names along an axis that has room for this many letters."""
    is_tight = sum(len(name) + 2 for name in names) > room
    return {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_tight else {}


def draw_heat(heat: Heat) -> Figure:
    columns = min(4, len(heat.panels))
    rows = -(-len(heat.panels) // columns)
    figure = Figure(figsize=(0.4 + 2.6 * columns, 0.5 + 2.35 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(heat.panels) :]:
        axes.remove()
    for axes, (title, values), (colours, low, high) in zip(grid, heat.panels, limits(heat), strict=False):
        image = axes.imshow(as_array(values), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axes.set_title(plain(title))
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        if not heat.shared:
            figure.colorbar(image, ax=axes, shrink=0.85).ax.tick_params(labelsize=7.5)
    if heat.shared:
        figure.colorbar(image, ax=list(grid[: len(heat.panels)]), shrink=0.85)
    figure.suptitle(plain(heat.title))
    return figure


def plain(text: str) -> str:
    """Text for matplotlib, which would read the text between two dollar signs as mathematics."""
    return text.replace("$", r"\$")
