"""Draw plots and heat maps as PNG and SVG files with matplotlib. The page of a report contains the SVG files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from .compact import rounded, tick
from .files import write_whole
from .plots import Heat, Plot
from .series_layout import DrawnSeries, as_array, check, few_values, lay_out, limits

SYMBOLS = "os^DvPX<>p"
WIDTH, HEIGHT = 5.4, 3.5  # inches
LETTERS = 76  # of a line of the legend; each entry takes 6 more for its symbol
MANY = 40  # lines with at least this many points have no symbols
INK, SOFT_INK, GRID, PAPER = "#222222", "#444444", "#e4e4e4", "#ffffff"
TICK = FuncFormatter(lambda value, _: tick(float(f"{value:.6g}")))
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT_INK,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": PAPER,
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "path.simplify": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hesscale",
    "text.color": INK,
    "xtick.color": SOFT_INK,
    "xtick.labelcolor": INK,
    "ytick.color": SOFT_INK,
    "ytick.labelcolor": INK,
}


UNWANTED = {"png": ["Software"], "svg": ["Date", "Creator"]}  # metadata that change even if the numbers do not


def save_figure(
    item: Plot | Heat, stem: Path, colours: Mapping[str, str] | None = None, kinds: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """Write ``stem``.svg and, with its title, ``stem``.png. The same numbers give the same bytes."""
    check(item)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    with matplotlib.rc_context(STYLE):
        figure = draw_heat(item) if isinstance(item, Heat) else draw_plot(item, colours)
        for kind, path in zip(kinds, paths, strict=True):
            if kind == "png":
                figure.suptitle(plain(fill(item.title, 70)), fontsize="medium")
            metadata = dict.fromkeys(UNWANTED[kind])
            write_whole(path, partial(figure.savefig, format=kind, dpi=160, metadata=metadata))
    return paths


def draw_plot(plot: Plot, colours: Mapping[str, str] | None) -> Figure:
    found = lay_out(plot, colours)
    slot = min((mark.width for mark in found.marks), default=1.0)
    width = 1.6 + len(plot.categories) * max(0.4, 0.2 / slot)
    figure = Figure(figsize=(min(9.0, max(WIDTH, width)), HEIGHT), layout="constrained")
    axes = figure.subplots()
    clouds = {mark.label for mark in found.marks if mark.kind == "dots"}
    for mark in found.marks:
        draw_mark(axes, mark, is_faint=mark.kind == "bars" and mark.label in clouds)
    axes.set_xlabel(plain(plot.x_label))
    axes.set_ylabel(plain(plot.y_label))
    if plot.log_y:
        axes.set_yscale("log")
    if plot.log_x:
        axes.set_xscale("log")
    if found.low is not None or found.high is not None:
        axes.set_ylim(found.low, found.high)
    if plot.categories:
        name_categories(axes, plot)
    elif values := few_values(plot):
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_minor_locator(NullLocator())
        names = [tick(value) for value in values]
        axes.set_xticklabels(names, **turned(names))
    else:
        number_ticks(axes.xaxis, plot.log_x, axes.get_xlim())
    number_ticks(axes.yaxis, plot.log_y, axes.get_ylim())
    if named := [mark for mark in found.marks if mark.in_legend]:
        draw_legend(figure, named)
    note_limits(axes, plot)
    return figure


def draw_mark(axes: Axes, mark: DrawnSeries, is_faint: bool) -> None:
    name = f"series {mark.label}"  # the page shows it with the values under the pointer
    if mark.kind == "line":
        (line,) = axes.plot(mark.x, mark.y, linestyle=mark.dash, color=mark.colour, **symbol(mark), linewidth=1.6, zorder=3)
        line.set_gid(name)
        if mark.low is not None and len(mark.x) > 1:
            axes.fill_between(mark.x, mark.low, mark.high, color=mark.colour, alpha=0.2, linewidth=0)
        elif mark.low is not None:
            axes.vlines(mark.x, mark.low, mark.high, color=mark.colour, linewidth=1.1)
        return
    if mark.kind == "bars":
        axes.bar(mark.x, mark.y, mark.width, color=mark.colour, alpha=0.45 if is_faint else 1.0)
    else:
        look: dict[str, Any] = {"s": 9, "alpha": 0.6} if mark.low is None else {"s": 22}  # a cloud, or points with whiskers
        axes.scatter(mark.x, mark.y, color=mark.colour, linewidths=0, zorder=3, gid=name, **look)
    if mark.low is not None:
        colour = INK if mark.kind == "bars" else mark.colour
        axes.vlines(mark.x, mark.low, mark.high, color=colour, linewidth=1.1, zorder=4)
    for left, right, y in mark.medians:
        axes.plot((left, right), (y, y), color=INK, linewidth=1.6, solid_capstyle="butt", zorder=5)


def symbol(mark: DrawnSeries) -> dict[str, Any]:
    return {"marker": SYMBOLS[mark.number % len(SYMBOLS)] if len(mark.x) < MANY else "", "markersize": 3.6}


def draw_legend(figure: Figure, marks: Sequence[DrawnSeries]) -> None:
    """Draw the legend below the axes, in as many columns as fit."""
    handles = [
        Line2D([], [], ls=mark.dash, color=mark.colour, **symbol(mark))
        if mark.kind == "line"
        else Line2D([], [], linestyle="", marker="s" if mark.kind == "bars" else "o", color=mark.colour)
        for mark in marks
    ]
    labels = [plain(mark.label) for mark in marks]
    columns = min(len(labels), max(1, LETTERS // (6 + max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, columnspacing=1.2, handletextpad=0.5)


def number_ticks(axis: Any, is_log: bool, ends: tuple[float, float]) -> None:
    """Label ticks as 20k or 0.5, without powers or offsets."""
    axis.set_major_formatter(TICK)
    if not is_log:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    elif ends[1] / ends[0] < 5000:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[1] / ends[0] < 50 else (1, 3)))
        axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def note_limits(axes: Axes, plot: Plot) -> None:
    """Store the limits of the axes in the SVG file, so that the page can compute values under the pointer."""
    scales = {"x": [*axes.get_xlim(), plot.log_x], "y": [*axes.get_ylim(), plot.log_y]}
    ends = {name: [*rounded([low, high]), is_log] for name, (low, high, is_log) in scales.items()}
    axes.set_gid(f"axes {json.dumps(ends | {'categories': list(plot.categories)})}")


def name_categories(axes: Axes, plot: Plot) -> None:
    names = [plain(name) for name in plot.categories]
    axes.set_xticks(range(len(names)), names, **turned(plot.categories))
    axes.set_xlim(-0.6, len(plot.categories) - 0.4)
    axes.grid(visible=False, axis="x")


def turned(names: Sequence[str], room: int = 52) -> dict[str, Any]:
    """The rotation of category names along an axis with room for this many letters."""
    is_tight = sum(len(name) + 2 for name in names) > room
    return {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_tight else {}


def draw_heat(heat: Heat) -> Figure:
    columns = min(2, len(heat.panels))
    rows = -(-len(heat.panels) // columns)
    figure = Figure(figsize=(0.4 + 2.3 * columns, 0.3 + 2.1 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in grid[len(heat.panels) :]:
        axes.remove()
    for axes, (title, values), (colours, low, high) in zip(grid, heat.panels, limits(heat), strict=False):
        image = axes.imshow(as_array(values), cmap=colours, vmin=low, vmax=high, interpolation="nearest")
        axes.set_title(plain(title), fontsize="medium")
        axes.grid(visible=False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        if not heat.shared:
            figure.colorbar(image, ax=axes, shrink=0.85, format=TICK).ax.tick_params(labelsize=7.5)
    if heat.shared:
        figure.colorbar(image, ax=list(grid[: len(heat.panels)]), shrink=0.85, format=TICK)
    return figure


def plain(text: str) -> str:
    """Text with escaped dollar signs, between which matplotlib would read mathematics."""
    return text.replace("$", r"\$")
