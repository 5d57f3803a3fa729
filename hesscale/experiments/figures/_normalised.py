"""Scores of agents: mean returns normalized per environment, and their interquartile mean over environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..lab.compact import compact
from ..lab.statistics import Summary, bootstrap_interval, iqm, summary
from ..lab.store import Result
from ..optimizers import AGENT_OPTIMIZERS, UNTRAINED
from ..rl.config import Config

RESAMPLES = 2000

RETURNS = (
    "The return of a run is its mean undiscounted return over all steps, where each step counts with the return of its episode. "
    "A seed that diverged, or finished no episode, counts as the worst of all runs in its environment."
)
FROM_UNTRAINED = (
    "Scores are returns normalized for each environment: 0 is the return of untrained agents, and 1 is the highest average over "
    "seeds, of all optimizers and step sizes. A score below 0 is worse than not learning."
)
FROM_LOWEST = (
    "Scores are returns normalized for each environment, as in the paper: 0 is the lowest and 1 the highest average over seeds, "
    "of all optimizers and step sizes. Single runs may lie outside."
)


def definition(results: Iterable[Result]) -> str:
    """Sentences that define the scores of these results."""
    has_floor = any(result.task.optimizer == UNTRAINED for result in results)
    return f"{RETURNS} {FROM_UNTRAINED if has_floor else FROM_LOWEST}"


class Method(NamedTuple):
    """An optimizer, with its trust radius and the decay of the radius if several are compared, and with the target KL."""

    optimizer: str
    trust_radius: float | None = None
    target_kl: float = 0.0
    radius_decay: int = 0

    @property
    def label(self) -> str:
        radius = "" if self.trust_radius is None else f", Δ = {compact(self.trust_radius)}"
        if self.radius_decay:
            radius = f"{radius or ', Δ'}/(1 + t/{compact(self.radius_decay)})"
        target = f", KL = {compact(self.target_kl)}" if self.target_kl else ""
        return AGENT_OPTIMIZERS[self.optimizer].label + radius + target

    @property
    def name(self) -> str:
        """The label as part of a sentence."""
        label, comma, details = self.label.partition(", ")
        return f"{label} with {details.replace(', ', ' and ')}" if comma else label

    @property
    def colour(self) -> str:
        return AGENT_OPTIMIZERS[self.optimizer].colour

    @property
    def is_variant(self) -> bool:
        return AGENT_OPTIMIZERS[self.optimizer].is_variant


Cell = tuple[Method, float]  # a method and a step size


def methods_of(results: Iterable[Result]) -> dict[Config, Method]:
    """The method of each task. It includes the trust radius and its decay only if scaled optimizers have several."""
    tasks = [result.task for result in results]
    is_scaled = {name: spec.is_scaled for name, spec in AGENT_OPTIMIZERS.items()}
    radii = {(task.trust_radius, task.radius_decay) for task in tasks if is_scaled[task.optimizer]}
    found = {}
    for task in tasks:
        has_own = len(radii) > 1 and is_scaled[task.optimizer]
        own = (task.trust_radius, task.radius_decay) if has_own else (None, 0)
        found[task] = Method(task.optimizer, own[0], task.target_kl, own[1])
    return found


def in_order(methods: Iterable[Method]) -> list[Method]:
    """Methods in the order of the registry, then by radius, without duplicates and untrained agents."""
    order = list(AGENT_OPTIMIZERS)
    known = {method for method in methods if method.optimizer != UNTRAINED}
    return sorted(known, key=lambda method: (order.index(method.optimizer), method.trust_radius or 0, *method[2:]))


@dataclass
class Scores:
    """The scores of all runs in one environment.

    Attributes:
        returns: mean returns by method and step size, then by seed. A run that diverged has the worst of all returns.
        low, high: the returns with the scores 0 and 1.
        diverged: how many runs diverged, by method and step size.
        scaled: the fraction of steps that the trust region shortened, averaged over networks, for each run with trust regions.
    """

    env: str
    returns: dict[Cell, dict[int, float]]
    low: float
    high: float
    diverged: Counter[Cell]
    scaled: dict[Cell, list[float]] = field(default_factory=dict)

    def of(self, cell: Cell) -> dict[int, float]:
        """The scores of a cell, by seed."""
        return {seed: (found - self.low) / (self.high - self.low) for seed, found in self.returns.get(cell, {}).items()}

    def means(self, method: Method) -> dict[float, Summary]:
        """Mean scores of a method over seeds, by step size."""
        found, scale = {}, self.high - self.low
        for (other, size), seeds in self.returns.items():
            if other == method:
                mean, error = summary([*seeds.values()])
                found[size] = Summary((mean - self.low) / scale, None if error is None else error / scale)
        return found


def scores_of(env: str, results: list[Result], methods: dict[Config, Method]) -> Scores | None:
    """The scores in an environment. Untrained agents have the score 0; if there are none, the lowest average has.

    None if no average is higher than that.
    """
    known = [r.values["mean_return"] for r in results if r.values["mean_return"] is not None]
    if not known:
        return None
    returns: dict[Cell, dict[int, float]] = {}
    diverged: Counter[Cell] = Counter()
    scaled: dict[Cell, list[float]] = {}
    for result in sorted(results, key=lambda r: (r.task.step_size, r.task.seed)):
        cell = methods[result.task], result.task.step_size
        has_diverged, found = result.values["diverged_at"] is not None, result.values["mean_return"]
        returns.setdefault(cell, {})[result.task.seed] = min(known) if has_diverged or found is None else found
        diverged[cell] += has_diverged
        if shares := result.values.get("scaled_share"):
            scaled.setdefault(cell, []).append(sum(shares.values()) / len(shares))
    means = {cell: summary([*seeds.values()]).mean for cell, seeds in returns.items()}
    floors = [mean for (method, _), mean in means.items() if method.optimizer == UNTRAINED]
    low, high = floors[0] if floors else min(means.values()), max(means.values())
    trained = {cell: seeds for cell, seeds in returns.items() if cell[0].optimizer != UNTRAINED}
    return Scores(env, trained, low, high, diverged, scaled) if low < high else None


class Estimate(NamedTuple):
    """An interquartile mean and its 95 % interval (None for a single seed)."""

    iqm: float
    interval: tuple[float, float] | None

    def text(self) -> str:
        return f"{self.iqm:.2f}" if self.interval is None else f"{self.iqm:.2f} [{self.interval[0]:.2f}, {self.interval[1]:.2f}]"


def aggregate(known: list[Scores], method: Method) -> dict[float, Estimate]:
    """Interquartile means over all environments, by step size, over the seeds that all environments have."""
    sizes = sorted({size for scores in known for other, size in scores.returns if other == method})
    found = {size: estimate([scores.of((method, size)) for scores in known]) for size in sizes}
    return {size: at for size, at in found.items() if at is not None}


def tuned(known: list[Scores], method: Method) -> dict[str, float]:
    """The step size with the highest mean score, for each environment in which the method has runs."""
    means = {scores.env: scores.means(method) for scores in known}
    return {env: max(found, key=lambda size: found[size].mean) for env, found in means.items() if found}


def aggregate_tuned(known: list[Scores], method: Method) -> Estimate | None:
    """The interquartile mean over all environments, with the best step size of each; None if one of them has no runs."""
    sizes = tuned(known, method)
    return estimate([scores.of((method, sizes[scores.env])) for scores in known]) if len(sizes) == len(known) else None


def estimate(columns: list[dict[int, float]]) -> Estimate | None:
    """The interquartile mean of scores. ``columns`` has the scores by seed, for each environment. None if they share no seed."""
    seeds = sorted(set.intersection(*[set(column) for column in columns])) if columns else []
    if not seeds:
        return None
    matrix = [[column[seed] for column in columns] for seed in seeds]  # (runs, environments)
    return Estimate(float(iqm(matrix)), bootstrap_interval(matrix, iqm, resamples=RESAMPLES) if len(seeds) > 1 else None)
