"""Scores of agents: mean returns normalised within an environment, and their interquartile mean over environments."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from ..lab.statistics import Summary, bootstrap_interval, iqm, summary
from ..lab.store import Result

RESAMPLES = 2000
Cell = tuple[str, float]  # an optimizer and a step size

DEFINITION = (
    "The return of a run is its mean undiscounted return: that of the episode that a step belongs to, over all steps. A seed "
    "that diverged, or finished no episode, counts as the worst of all runs in its environment. Scores are returns normalised "
    "for each environment, to 0 for the lowest and 1 for the highest of all optimizers' and step sizes' averages over seeds, as "
    "in the paper: averages span [0, 1], and single runs may lie outside."
)


@dataclass
class Scores:
    """The scores of all runs in one environment.

    Attributes:
        returns: mean returns by optimizer and step size, then by seed; a run that diverged has the worst of all returns.
        low, high: returns whose scores are 0 and 1.
        diverged: how many runs diverged, by optimizer and step size.
    """

    env: str
    returns: dict[Cell, dict[int, float]]
    low: float
    high: float
    diverged: Counter[Cell]

    def of(self, cell: Cell) -> dict[int, float]:
        """The scores of a cell, by seed."""
        return {seed: (found - self.low) / (self.high - self.low) for seed, found in self.returns.get(cell, {}).items()}

    def means(self, optimizer: str) -> dict[float, Summary]:
        """Mean scores of an optimizer over seeds, by step size."""
        found, scale = {}, self.high - self.low
        for (name, size), seeds in self.returns.items():
            if name == optimizer:
                mean, error = summary([*seeds.values()])
                found[size] = Summary((mean - self.low) / scale, None if error is None else error / scale)
        return found


def scores_of(env: str, results: list[Result]) -> Scores | None:
    """The scores in an environment; None if all mean returns are the same or there are none."""
    known = [r.values["mean_return"] for r in results if r.values["mean_return"] is not None]
    if not known:
        return None
    returns: dict[Cell, dict[int, float]] = {}
    diverged: Counter[Cell] = Counter()
    for result in sorted(results, key=lambda r: (r.task.step_size, r.task.seed)):
        cell = result.task.optimizer, result.task.step_size
        has_diverged, found = result.values["diverged_at"] is not None, result.values["mean_return"]
        returns.setdefault(cell, {})[result.task.seed] = min(known) if has_diverged or found is None else found
        diverged[cell] += has_diverged
    means = [summary([*seeds.values()]).mean for seeds in returns.values()]
    return Scores(env, returns, min(means), max(means), diverged) if min(means) < max(means) else None


class Estimate(NamedTuple):
    """An interquartile mean and its 95 % interval, which a single seed does not have."""

    iqm: float
    interval: tuple[float, float] | None

    def text(self) -> str:
        return f"{self.iqm:.2f}" if self.interval is None else f"{self.iqm:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"


def aggregate(known: list[Scores], optimizer: str) -> dict[float, Estimate]:
    """Interquartile means over all environments, by step size, from the seeds that every environment has."""
    points = {}
    for size in sorted({size for scores in known for name, size in scores.returns if name == optimizer}):
        columns = [scores.of((optimizer, size)) for scores in known]
        if seeds := sorted(set.intersection(*[set(column) for column in columns])):
            matrix = [[column[seed] for column in columns] for seed in seeds]  # (runs, environments)
            interval = bootstrap_interval(matrix, iqm, resamples=RESAMPLES) if len(seeds) > 1 else None
            points[size] = Estimate(float(iqm(matrix)), interval)
    return points
