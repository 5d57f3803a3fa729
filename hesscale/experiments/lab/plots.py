"""Figures, tables and findings of a report, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .statistics import Summary


@dataclass
class Series:
    """Points with one name and colour."""

    label: str
    x: Sequence[float]  # with Plot.categories, their indices 0, 1, …
    y: Sequence[float]
    low: Sequence[float] | None = None  # the lower end of a band, or of the whiskers of bars
    high: Sequence[float] | None = None  # the upper end
    kind: str = "line"  # "line", "dots" (points without a line) or "bars"
    colour: str | None = None
    dashed: bool = False


@dataclass
class Plot:
    """One pair of axes."""

    name: str  # used for its files
    title: str
    series: list[Series]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    categories: Sequence[str] = ()  # names along the x axis, in place of numbers
    caption: str = ""
    worse: str = ""  # "up" or "down": the direction of worse values, which may be cut off if methods diverge
    kept: Sequence[float] = ()  # values of y that must not be cut off, such as the return of an untrained agent
    group: str = ""  # the plots of a group are one figure of the page, with controls that switch between them
    view: Sequence[str] = ()  # the options of these controls that select this plot


@dataclass
class Heat:
    """Matrices side by side, each with its own colour scale unless ``shared``."""

    name: str
    title: str
    panels: list[tuple[str, Sequence[Sequence[float]]]]
    shared: bool = False
    caption: str = ""


@dataclass
class Table:
    """Rows of text."""

    name: str
    title: str
    header: Sequence[str]
    rows: list[Sequence[str]]
    caption: str = ""


@dataclass
class Finding:
    """A result of the runs, in one or two sentences with numbers."""

    text: str
    figure: str = ""  # the name of the plot that supports it


@dataclass
class Section:
    """A section of an experiment's report: a claim of the paper, and the results."""

    title: str
    text: str = ""  # paragraphs, with blank lines between them
    items: list[Plot | Heat | Table] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)  # the most important first


def mean_line(label: str, points: Mapping[Any, Summary], colour: str | None = None, dashed: bool = False) -> Series:
    """A line of means, with a band of one standard error below and above."""
    low, high = ([at.mean + sign * (at.error or 0) for at in points.values()] for sign in (-1, 1))
    return Series(label, list(points), [at.mean for at in points.values()], low, high, colour=colour, dashed=dashed)
