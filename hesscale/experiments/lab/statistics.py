"""Means with their standard errors; the interquartile mean of normalized scores and stratified bootstrap intervals.

The last two follow Agarwal et al. (2021), as in rliable.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of numpy, of float64


class Summary(NamedTuple):
    """The mean of some numbers and its standard error (None for a single number)."""

    mean: float
    error: float | None

    def text(self, form: str, factor: float = 1) -> str:
        """
        >>> summary([1.0, 3.0]).text(".1f")
        '2.0 ± 1.0'
        """
        mean = f"{factor * self.mean:{form}}"
        return mean if self.error is None else f"{mean} ± {factor * self.error:{form}}"


def summary(values: Sequence[float]) -> Summary:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Summary(statistics.fmean(values), error)


def iqm(scores: Array) -> Array:
    """The interquartile mean over the last two axes, runs and environments: without the lowest and the highest quarter.

    The number of scores in a quarter is rounded down.

    >>> float(iqm([[1.0, 2.0], [3.0, 100.0]]))
    2.5
    """
    scores = np.asarray(scores, dtype=np.float64)
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    count = ordered.shape[-1]
    return ordered[..., count // 4 : count - count // 4].mean(axis=-1)


def bootstrap_interval(
    scores: Array,
    statistic: Callable[[Array], Array] = iqm,
    *,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """A stratified bootstrap interval: percentiles of a statistic over resamples of the runs of each environment.

    Args:
        scores: (runs, environments).
        statistic: maps (resamples, runs, environments) to one number per resample.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or not scores.size:
        raise ValueError(f"scores has the shape {scores.shape}, expected (runs, environments) of at least one each")
    if not np.isfinite(scores).all():
        raise ValueError("scores has numbers that are not finite")
    if resamples < 1 or not 0 < level < 1:
        raise ValueError(f"resamples={resamples} must be positive and level={level} between 0 and 1")
    draws = np.random.default_rng(seed).integers(len(scores), size=(resamples, *scores.shape))
    found = statistic(np.take_along_axis(scores[None], draws, axis=1))
    ends: list[float] = np.quantile(found, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return ends[0], ends[1]
