"""Figures as data: what a report shows, drawn by matplotlib for files and by plotly for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Series:
    """Points with one name and colour."""

    label: str
    x: Sequence[float]  # with Plot.categories, their indices 0, 1, …
    y: Sequence[float]
    low: Sequence[float] | None = None  # the lower end of a band, or of the whiskers of bars
    high: Sequence[float] | None = None  # the upper end
    kind: str = "line"  # "line", "dots" (a cloud, no line) or "bars"
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


@dataclass
class Heat:
    """Matrices side by side, each on a colour scale of its own unless ``shared``."""

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
class Section:
    """A part of an experiment's report: a claim of the paper, and what was found."""

    title: str
    text: str = ""  # paragraphs, with blank lines between them
    items: list[Plot | Heat | Table] = field(default_factory=list)
