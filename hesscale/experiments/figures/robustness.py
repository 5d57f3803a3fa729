"""Robustness to the step size: returns of A2C and PPO by step size, with and without a trust region (Fig. 6, Appendix H)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..lab.compact import compact
from ..lab.experiment import option
from ..lab.plots import Finding, Plot, Section, Series, Table, mean_line
from ..lab.statistics import summary
from ..lab.store import Result
from ..optimizers import AGENT_OPTIMIZERS, HELP, UNTRAINED
from ..rl.config import Config
from . import rl
from ._findings import divergence_findings, listed
from ._normalised import (
    RESAMPLES,
    Estimate,
    Method,
    Scores,
    aggregate,
    aggregate_tuned,
    definition,
    in_order,
    methods_of,
    scores_of,
)
from ._radius import ADAM, beside_adam, by_radius
from ._rl_figures import by_environment, by_way, conditions, divergence_counts, lengths

GRID = "3e-6,1e-5,3e-5,1e-4,3e-4,1e-3,3e-3,1e-2,1"


@dataclass(frozen=True)
class Settings(rl.Settings):
    optimizer: str = option("adam,scaled-adam,scaled-adahesscale", f"{HELP}: {', '.join(AGENT_OPTIMIZERS)}")
    step_size: str = option(GRID, "step sizes of optimizers without @, separated by commas")


PRESETS = {
    "smoke": Settings(algo="a2c", optimizer="adam,scaled-adam", step_size="1e-4,1e-2", steps=300, backend="eager"),
    "small": Settings(env="InvertedPendulum-v5", step_size="1e-5,3e-4,1e-2,1", steps=8192, backend="eager"),
    "paper": Settings(algo="a2c,ppo", env=",".join(rl.MUJOCO), seeds=10, steps=2_000_000, humanoid_steps=10_000_000),
}


def tasks(settings: Settings) -> list[Config]:
    """The agents of these settings, and untrained agents, whose return has the score 0."""
    trained = rl.tasks(settings)
    unused: dict[str, Any] = {name: getattr(Config, name) for name in ("trust_radius", "target_kl", "radius_decay")}
    floor = [dataclasses.replace(task, optimizer=UNTRAINED, step_size=0.0, **unused) for task in trained]
    return list(dict.fromkeys([*trained, *floor]))


# ----------------------------------------------------------------------------------------------------------- what it shows


def sections(results: list[Result]) -> list[Section]:
    """A section for each algorithm and each combination of training settings."""
    return [section(found, end) for found, end in by_way(results)]


def section(results: list[Result], end: str) -> Section:
    """A section. ``end`` is a suffix that distinguishes its files from those of other sections."""
    task, by_env, methods = results[0].task, by_environment(results), methods_of(results)
    known = [scores for env, found in by_env.items() if (scores := scores_of(env, found, methods)) is not None]
    kinds = in_order(methods.values())
    cells = {(methods[r.task], r.task.step_size) for r in results}
    whole = len(by_env) * len(cells) * len({r.task.seed for r in results})
    has_floor = {env for env, found in by_env.items() if any(r.task.optimizer == UNTRAINED for r in found)}
    paragraphs = [
        f"{task.algo.upper()} trained with these settings: {conditions(results)}. {lengths(results)}.",
        definition(results),
        "The paper finds both scaled optimizers insensitive to the step size with PPO, except on Humanoid.",
    ]
    if len(results) < whole:
        paragraphs.append(f"Some runs are missing: this report has {len(results)} of {whole}.")
    if has_floor and (without := by_env.keys() - has_floor):
        paragraphs.append(
            f"These environments have no untrained agents, so there 0 is the lowest average: {', '.join(sorted(without))}."
        )
    if left_out := by_env.keys() - {scores.env for scores in known}:
        reason = "because no average is above that of untrained agents, all are the same, or no episode ended"
        paragraphs.append(f"These environments are left out, {reason}: {', '.join(sorted(left_out))}.")
    items: list[Any] = []
    found: list[Finding] = []
    if known:
        over_all = {method: aggregate(known, method) for method in kinds}
        items += [sensitivity(known, kinds, task.algo, end), overall(known, over_all, task.algo, end)]
        items += [aggregate_plot(over_all, len(known), task.algo, end)]
        items += [*beside_adam(known, over_all, task.algo, end), *by_radius(known, over_all, task.algo, end)]
        found = findings(known, over_all, task.algo, end)
        items += [environment_plot(scores, kinds, task.algo, end) for scores in known]
    found += divergence_findings(divergence_counts(results, methods), f"{task.algo.upper()}: ")
    return Section(f"{task.algo.upper()}: return by step size, {task.protocol} protocol", "\n\n".join(paragraphs), items, found)


def findings(known: list[Scores], over_all: dict[Method, dict[float, Estimate]], algo: str, end: str) -> list[Finding]:
    """The range of scores of each method over all step sizes, and how close a single step size comes to a tuned Adam."""
    where = f"over {len(known)} environments" if len(known) > 1 else f"on {known[0].env}"
    spans: dict[tuple[float, float], list[tuple[float, str]]] = {}  # by smallest and largest step size
    for method, points in over_all.items():
        if len(points) > 2:
            best, worst, _ = extremes(points, lambda at: at.iqm)
            text = f"{points[worst].iqm:.2f} to {points[best].iqm:.2f} for {method.name}"
            spans.setdefault((min(points), max(points)), []).append((points[worst].iqm, text))
    found = []
    for (low, high), texts in spans.items():
        if len(texts) > 1:
            start = f"{algo.upper()}, scores {where} at step sizes {compact(low)} to {compact(high)}"
            ordered = [text for _, text in sorted(texts, reverse=True)]
            found.append(Finding(f"{start}: {listed(ordered)}.", f"{algo}-all{end}"))
    tuned_adam = aggregate_tuned(known, ADAM)
    if tuned_adam is not None and tuned_adam.interval is not None and tuned_adam.interval[0] > 0:
        shares: dict[str, tuple[float, str]] = {}  # the best of each optimizer, over step sizes and trust radii
        for method, points in over_all.items():
            if method != ADAM and points:
                best = max(points, key=lambda size: points[size].iqm)
                share = points[best].iqm / tuned_adam.iqm, f"{method.name}, step size {compact(best)}"
                shares[method.optimizer] = max(share, shares.get(method.optimizer, share))
        parts = [f"{100 * share:.0f} % ({label})" for share, label in sorted(shares.values(), reverse=True)]
        start = f"one step size for all {len(known)} environments" if len(known) > 1 else f"the best step size on {known[0].env}"
        adam = "an Adam that is tuned in each" if len(known) > 1 else "Adam at its best step size"
        if shares:
            text = f"{algo.upper()}: {start} reaches {listed(parts)} of the score of {adam}."
            found.append(Finding(text, f"{algo}-all{end}"))
    return found


def environment_plot(scores: Scores, kinds: Sequence[Method], algo: str, end: str) -> Plot:
    series = []
    for method in kinds:
        points = scores.means(method)
        series.append(mean_line(method.label, points, method.colour, method.is_variant))
    title = f"{algo.upper()} on {scores.env}"
    caption = (
        f"The score 0 is a return of {scores.low:.1f}, and 1 is a return of {scores.high:.1f}. Lines are means over seeds, "
        "bands are standard errors."
    )
    name, labels = f"{algo}-{scores.env}{end}", ("step size", "normalized return")
    return Plot(name, title, series, *labels, log_x=True, caption=caption, worse="down", kept=(0, 1))


def aggregate_plot(over_all: dict[Method, dict[float, Estimate]], count: int, algo: str, end: str) -> Plot:
    series = []
    for method, points in over_all.items():
        ends = [at.interval or (at.iqm, at.iqm) for at in points.values()]
        low, high = [low for low, _ in ends], [high for _, high in ends]
        middle, colour = [at.iqm for at in points.values()], method.colour
        series.append(Series(method.label, list(points), middle, low, high, colour=colour, dashed=method.is_variant))
    title = f"{algo.upper()} over {count} environment{'s' if count > 1 else ''}"
    caption = (
        "Lines are interquartile means over seeds and environments. Bands are 95 % intervals of a stratified bootstrap "
        f"({RESAMPLES} resamples of seeds within environments)."
    )
    labels = "step size", "IQM of normalized returns"
    return Plot(f"{algo}-all{end}", title, series, *labels, log_x=True, caption=caption, worse="down", kept=(0, 1))


def sensitivity(known: list[Scores], kinds: Sequence[Method], algo: str, end: str) -> Table:
    rows: list[Sequence[str]] = []
    for scores in known:
        for method in kinds:
            if means := scores.means(method):
                best, worst, span = extremes(means, lambda at: at.mean)
                cells = [f"{means[size].text('.2f')} at {compact(size)}" for size in (best, worst)]
                rows.append([scores.env, method.label, *cells, f"{span:.2f}", divergences([scores], method)])
    header = ["environment", "optimizer", "best score", "worst score", "sensitivity", "diverged"]
    caption = (
        "Means and standard errors over seeds, at the best and at the worst step size. “Sensitivity” is the difference "
        "between the two; noise between seeds makes it larger. “Diverged” counts runs, by step size."
    )
    return Table(f"{algo}-sensitivity{end}", f"{algo.upper()}: sensitivity to the step size", header, rows, caption)


def overall(known: list[Scores], over_all: dict[Method, dict[float, Estimate]], algo: str, end: str) -> Table:
    rows: list[Sequence[str]] = []
    for method, points in over_all.items():
        spans = [extremes(means, lambda at: at.mean)[2] for scores in known if (means := scores.means(method))]
        cells = ["–"] * 3  # if no seed has all environments
        if points:
            best, worst, span = extremes(points, lambda at: at.iqm)
            cells = [*[f"{points[size].text()} at {compact(size)}" for size in (best, worst)], f"{span:.2f}"]
        mean = summary(spans).text(".2f") if spans else "–"
        rows.append([method.label, *cells, mean, divergences(known, method)])
    header = ["optimizer", "best IQM", "worst IQM", "difference", "mean sensitivity", "diverged"]
    caption = (
        "Interquartile means (IQM) with 95 % intervals, at one step size for all environments. “Mean sensitivity” is "
        "averaged over environments, with its standard error."
    )
    return Table(f"{algo}-overall{end}", f"{algo.upper()}: all environments together", header, rows, caption)


def extremes(points: dict[float, Any], value: Callable[[Any], float]) -> tuple[float, float, float]:
    """The step sizes with the highest and the lowest value, and the difference between the two values."""
    values = {size: value(at) for size, at in points.items()}
    best, worst = max(values, key=values.__getitem__), min(values, key=values.__getitem__)
    return best, worst, values[best] - values[worst]


def divergences(known: list[Scores], method: Method) -> str:
    cells = [(scores, cell) for scores in known for cell in scores.returns if cell[0] == method]
    by_size: Counter[float] = Counter()
    for scores, cell in cells:
        by_size[cell[1]] += scores.diverged[cell]
    where = ", ".join(f"{compact(size)}: {count}" for size, count in sorted(by_size.items()) if count)
    runs = sum(len(scores.returns[cell]) for scores, cell in cells)
    return f"{by_size.total()} of {runs}" + (f" ({where})" if where else "")


EXPERIMENT = dataclasses.replace(
    rl.EXPERIMENT,
    name="robustness",
    title="The returns of A2C and PPO by step size, with and without a trust region (Fig. 6).",
    settings=Settings,
    presets=PRESETS,
    tasks=tasks,
    work=lambda settings: rl.work_of(tasks(settings)),
    sections=sections,
    examples=("--optimizer adam,scaled-adahesscale --step-size 3e-4,1e-2,1",),
)
