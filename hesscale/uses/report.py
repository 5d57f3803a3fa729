"""The result of :func:`hesscale.inspect`: rows as plain dictionaries, printed as tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

QUANTILES = (0.05, 0.5, 0.95)
WIDTH, NAME_WIDTH = 80, 20  # of a printed report, and of a parameter's name in it
MANY_LONG = 0.1  # the fraction of a parameter's entries with too long steps above which there is a remark
FAR_OFF = 3.0  # the ratio of the Gauss-Newton diagonal to HesScaleGN above which there is a remark
MAX_NAMED = 10  # parameters in a remark


@dataclass(frozen=True)
class CurvatureReport:
    """The Hessian diagonal h and the gradient g of the mean loss, parameter by parameter.

    Attributes:
        rows: one dictionary per parameter: ``parameter``, ``module``, ``shape``; ``mean``, ``quantile_0.05``, ``quantile_0.5``
            and ``quantile_0.95`` of h, and the fractions ``negative`` and ``zero`` of entries; ``gradient_norm``; ``units``
            (outputs of a weight, entries of a vector) and ``dead_units``, which have neither gradient nor curvature on any batch;
            ``median_step``, the median of |g/h| over entries with g ≠ 0, and ``long_steps``, the fraction of entries with
            |g| > ``max_step`` |h|; ``ggn_ratio``, the sum of the Gauss-Newton diagonal divided by the sum of HesScaleGN, and
            ``ggn_ratio_error``, its standard error.
        largest: for each parameter the entry with the largest h, largest first: ``parameter``, ``index``, ``diagonal``,
            ``gradient`` and ``value``.
        method: the estimator of the diagonal.
        max_step: steps longer than this count as too long.
        loss: the mean loss.
        examples: the number of examples.
        batches: the number of batches.
    """

    rows: tuple[dict[str, Any], ...]
    largest: tuple[dict[str, Any], ...]
    method: str
    max_step: float
    loss: float
    examples: int
    batches: int

    @property
    def remarks(self) -> list[str]:
        """Sentences that point out unusual parameters."""
        dead = [
            (row["dead_units"] / row["units"], f"{row['parameter']} ({row['dead_units']} of {row['units']})")
            for row in self.rows
            if row["dead_units"]
        ]
        long = [
            (row["long_steps"], f"{row['parameter']} ({row['long_steps']:.0%})")
            for row in self.rows
            if row["long_steps"] > MANY_LONG
        ]
        off = [
            (abs(math.log(ratio)) if ratio > 0 else math.inf, f"{row['parameter']} ({ratio_text(ratio, row['ggn_ratio_error'])})")
            for row in self.rows
            if (ratio := row["ggn_ratio"]) is not None and not 1 / FAR_OFF < ratio < FAR_OFF
        ]
        found = []
        if dead:
            found.append(f"Units with neither gradient nor curvature on any batch: {worst(dead)}.")
        if long:
            found.append(f"Parameters with a step g/|h| longer than {self.max_step:g} for many of their entries: {worst(long)}.")
        if off:
            found.append(f"The Gauss-Newton diagonal as a multiple of HesScaleGN, where it is far from 1: {worst(off)}.")
        return found

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Title, header and cells of each table."""
        diagonals = [
            (
                row["parameter"],
                *(number(row[key]) for key in ("mean", *(f"quantile_{q:g}" for q in QUANTILES))),
                *(f"{row[key]:.1%}" for key in ("negative", "zero")),
            )
            for row in self.rows
        ]
        steps = [
            (
                row["parameter"],
                number(row["gradient_norm"]),
                number(row["median_step"]),
                f"{row['long_steps']:.1%}",
                f"{row['dead_units']}/{row['units']}",
                ratio_text(row["ggn_ratio"], row["ggn_ratio_error"]),
            )
            for row in self.rows
        ]
        entries = [
            (e["parameter"], str(list(e["index"])), *(number(e[key]) for key in ("diagonal", "gradient", "value")))
            for e in self.largest
        ]
        quantiles = [f"{q:.0%}" for q in QUANTILES]
        return [
            ("The diagonal h", ("parameter", "mean", *quantiles, "h < 0", "h = 0"), diagonals),
            ("Gradients and steps", ("parameter", "‖g‖", "|g/h|", "too long", "dead", "GGN ÷ HesScaleGN"), steps),
            ("Largest entry of h of each parameter", ("parameter", "index", "h", "g", "value"), entries),
        ]

    def __str__(self) -> str:
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        lines = [f"method {self.method}, {self.examples} examples in {batches}, mean loss {self.loss:.4g}"]
        for title, header, cells in self.tables():
            lines += ["", title, *text_table(header, [(shortened(row[0]), *row[1:]) for row in cells])]
        for remark in self.remarks:
            lines += ["", *textwrap.wrap(remark, WIDTH, break_long_words=False)]
        return "\n".join(lines)


def worst(found: Sequence[tuple[float, str]]) -> str:
    """The texts with the highest numbers, highest first."""
    texts = [text for _, text in sorted(found, key=lambda pair: -pair[0])]
    more = len(texts) - MAX_NAMED
    return ", ".join(texts[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def number(value: float) -> str:
    return f"{value:.2g}"


def ratio_text(ratio: float | None, error: float | None) -> str:
    if ratio is None:
        return "–"
    return f"{ratio:.3g}" if error is None else f"{ratio:.3g} ± {float(f'{error:.1g}'):g}"


def shortened(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"…{name[1 - NAME_WIDTH :]}"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with names on the left and numbers aligned right."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(width) for c, width in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:]]
