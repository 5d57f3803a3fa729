"""UR-Reacher: PPO on a simulated UR5 with Adam and Scaled Adam, and how much the return drops after its peak (Fig. 7)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from ...compile.step import BACKENDS
from ..lab.experiment import option
from ..lab.plots import Finding, Heat, Plot, Section, Series, Table, mean_line
from ..lab.statistics import Summary, summary
from ..lab.store import Result
from ..optimizers import AGENT_OPTIMIZERS
from ..rl.config import Config
from . import rl
from ._findings import listed
from ._normalised import Method, in_order, methods_of
from ._rl_figures import averaged, beginnings, conditions, curve

ENV = "hesscale/UR-Reacher-2D-v0"
STANDING_STILL = -74.1  # the mean return of the policy that does nothing, over 1.4 million targets
GOAL = 380  # 95 % of the gain of the scripted controller over standing still
WINDOW = 0.1  # the fraction of a run's steps over which returns are averaged: 250 episodes for 250,000 steps
MUCH = 0.1  # a run has deteriorated if it lost more than this fraction of the gain


@dataclass(frozen=True)
class Settings:
    optimizer: str = option("adam,scaled-adam", f"optimizers, separated by commas: {', '.join(AGENT_OPTIMIZERS)}")
    step_size: str = option("3e-4", "step sizes, separated by commas")
    seeds: int = option(5, "number of runs of each optimizer")
    steps: int = option(250_000, "number of environment steps of 40 ms each, rounded up to whole rollouts")
    eps: float = option(1e-5, "ε of the optimizers; it is 1e-8 in the paper's text and 1e-5 in the authors' code")
    trust_radius: str = option("1e-8", "trust radius Δ of the scaled optimizers, for each network")
    half_value_loss: bool = option(False, "train the critic with ½ (v − R)², whose second derivative is 1, instead of (v − R)²")
    truncation: str = option(
        "bootstrap", "value of the last state of a truncated episode: bootstrap uses the critic's estimate, terminate uses 0"
    )
    backend: str = option("inductor", f"backend of hesscale.compile_step: {', '.join(BACKENDS)}")
    video: bool = option(False, "save a video of one episode of each agent with seed 0, as video.mp4 in the folder of its run")


PRESETS = {
    "smoke": Settings(seeds=1, steps=2048, backend="eager"),
    "small": Settings(seeds=2, steps=30_000, backend="eager"),
    "paper": Settings(),
}


def tasks(settings: Settings) -> list[Config]:
    if "@" in settings.optimizer:
        raise ValueError("all optimizers are compared at the step sizes of step_size, so names with @ are not allowed")
    return rl.tasks(rl.Settings(algo="ppo", env=ENV, **asdict(settings)))


def work(settings: Settings) -> str:
    return rl.work(rl.Settings(algo="ppo", env=ENV, **asdict(settings)))


# ----------------------------------------------------------------------------------------------------------- what it shows


class Course(NamedTuple):
    """The largest smoothed return of a run, its step, and the last smoothed return (None if the run diverged)."""

    peak: Summary
    peak_step: int
    end: Summary | None

    @property
    def drop(self) -> Summary | None:
        if self.end is None:
            return None
        errors = [at.error for at in (self.peak, self.end) if at.error is not None]
        return Summary(self.peak.mean - self.end.mean, math.hypot(*errors) if len(errors) == 2 else None)

    @property
    def part(self) -> float | None:
        """The drop as a fraction of the gain over standing still; None if there was no gain."""
        gain = self.peak.mean - STANDING_STILL
        return self.drop.mean / gain if self.drop is not None and gain > 0 else None


def smoothed(result: Result) -> dict[int, Summary]:
    """A moving average of returns: the mean over the window before each logged step, from the first full window."""
    points, window = curve(result), WINDOW * result.task.steps
    inside = {step: [value for at, value in points if step - window < at <= step] for step, _ in points if step >= window}
    return {step: summary(values) for step, values in inside.items()}


def course(result: Result) -> Course | None:
    """The course of a run; None if no returns were logged for a full window."""
    points = smoothed(result)
    if not points:
        return None
    peak = max(points, key=lambda step: points[step].mean)
    return Course(points[peak], peak, points[max(points)] if result.values["diverged_at"] is None else None)


def step_at_goal(result: Result) -> int | None:
    """The first step at which the smoothed return is at least ``GOAL``; None if it never is."""
    return min([step for step, at in smoothed(result).items() if at.mean >= GOAL], default=None)


def is_deteriorated(result: Result) -> bool:
    found = course(result)
    return result.values["diverged_at"] is not None or bool(found and found.part and found.part > MUCH)


def sections(results: list[Result]) -> list[Section]:
    """A section for each combination of training settings."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        same = {name: value for name, value in asdict(result.task).items() if name not in ("optimizer", "trust_radius", "seed")}
        groups.setdefault(tuple(same.items()), []).append(result)
    return [section(found, f"-{k}" if k > 1 else "") for k, found in enumerate(groups.values(), start=1)]


def section(results: list[Result], end: str) -> Section:
    """A section. ``end`` is a suffix that distinguishes its files from those of other sections."""
    task = results[0].task
    ordered = sorted(results, key=lambda result: result.task.seed)
    methods = methods_of(results)
    kinds = in_order(methods.values())
    runs = {kind: [result for result in ordered if methods[result.task] == kind] for kind in kinds}
    text = (
        f"PPO trained on {task.env} for {task.steps:,} steps, with these settings: α = {task.step_size:g}, "
        f"{conditions(results)}. Returns are undiscounted. An episode is 4 s, or 100 steps. An arm that stands "
        f"still has a return of −{-STANDING_STILL:g} on average.\n\n"
        "In the paper, on a real UR5, the policy that Adam learns deteriorates in many of five runs, after a peak at about "
        "80,000 steps. The policy of Scaled Adam deteriorates in none.\n\n"
        f"Smoothed returns are means over a window of {WINDOW:.0%} of all steps, or {WINDOW * task.steps / 100:,.0f} episodes. A "
        "run's peak is the largest of them, its end is the last, and its gain is the peak minus the return of standing still. A "
        f"run deteriorated if it lost more than {MUCH:.0%} of its gain from peak to end, or diverged. Noise alone makes the peak "
        "higher than the end, so a small drop need not be a loss."
    )
    items: list[Plot | Heat | Table] = [
        optimizers_table(runs, end),
        *differences_table(runs, end),
        runs_table(runs, end),
        mean_plot(runs, end),
        runs_plot(runs, end),
    ]
    limit = ", truncation counts as termination" if task.truncation == "terminate" else ""
    return Section(f"UR-Reacher with PPO, α = {task.step_size:g}{limit}", text, items, findings(runs, end))


def findings(runs: dict[Method, list[Result]], end: str) -> list[Finding]:
    """How many runs deteriorated, and how much of its gain each optimizer lost, if every run had a gain."""

    def has_gained(result: Result) -> bool:
        found = course(result)
        return found is not None and found.peak.mean > STANDING_STILL

    if not all(has_gained(result) or result.values["diverged_at"] is not None for each in runs.values() for result in each):
        return []
    courses = {method: list(map(course, each)) for method, each in runs.items()}
    counts = [f"{sum(map(is_deteriorated, each))} of {len(each)} runs of {method.label}" for method, each in runs.items()]
    text = f"{listed(counts)} deteriorated: they lost more than {MUCH:.0%} of what they had gained at their peak, or diverged."
    parts = {m.label: [each.part for each in found if each and each.part is not None] for m, found in courses.items()}
    texts = [f"{label} {summary(values).text('.1f', 100)} %" for label, values in parts.items() if len(values) > 1]
    losses = [Finding(f"Loss from the peak to the end, in percent of the gain: {listed(texts)}.", f"mean{end}")] if texts else []
    return [Finding(text, f"mean{end}"), *losses]


def optimizers_table(runs: dict[Method, list[Result]], end: str) -> Table:
    rows: list[Sequence[str]] = []
    for method, found in runs.items():
        courses = [each for each in map(course, found) if each is not None]
        columns = [
            ([each.peak.mean for each in courses], 1),
            ([each.end.mean for each in courses if each.end is not None], 1),
            ([each.drop.mean for each in courses if each.drop is not None], 1),
            ([each.part for each in courses if each.part is not None], 100),
        ]
        cells = [summary(column).text(".1f", factor) if column else "–" for column, factor in columns]
        steps = [step for step in map(step_at_goal, found) if step is not None]
        cells.append(f"{median(steps):,.0f}" + f" ({len(steps)} of {len(found)})" * (len(steps) < len(found)) if steps else "–")
        bad, diverged = sum(map(is_deteriorated, found)), sum(result.values["diverged_at"] is not None for result in found)
        rows.append([method.label, *cells, f"{bad} of {len(found)}", f"{diverged} of {len(found)}"])
    header = ["optimizer", "peak", "end", "drop", "drop, % of gain", f"steps to {GOAL}", "deteriorated", "diverged"]
    caption = (
        "Smoothed returns: means and standard errors over runs. End and drop leave out the runs that diverged. "
        f"“Steps to {GOAL}” is the median step at which the smoothed return first gets there, of the runs that do."
    )
    return Table(f"drops{end}", "Peak, end and drop of the return", header, rows, caption)


def differences_table(runs: dict[Method, list[Result]], end: str) -> list[Table]:
    """Differences between each method and the first one, over seeds that diverged with neither. No table for a single seed."""
    known = {method: {r.task.seed: c for r in found if (c := course(r)) and c.end} for method, found in runs.items()}
    rows: list[Sequence[str]] = []
    first = next(iter(known))
    for method in [method for method in known if method != first]:
        seeds = sorted(known[first].keys() & known[method].keys())
        if len(seeds) > 1:
            pairs = [(values(known[method][seed]), values(known[first][seed])) for seed in seeds]
            columns = zip(*[[own - other for own, other in zip(*pair, strict=True)] for pair in pairs], strict=True)
            cells = [summary(column).text(".1f") for column in columns]
            rows.append([f"{method.label} − {first.label}", *cells, str(len(seeds))])
    caption = "Means and standard errors of the differences between two runs with the same seed."
    header = ["optimizers", "peak", "end", "drop", "seeds"]
    return [Table(f"differences{end}", "Differences between optimizers, by seed", header, rows, caption)] if rows else []


def values(found: Course) -> tuple[float, float, float]:
    """Peak, end and drop of a run that did not diverge."""
    assert found.end is not None
    return found.peak.mean, found.end.mean, found.peak.mean - found.end.mean


def runs_table(runs: dict[Method, list[Result]], end: str) -> Table:
    rows: list[Sequence[str]] = []
    for method, found in runs.items():
        for result in found:
            each, diverged_at = course(result), result.values["diverged_at"]
            cells = ["–"] * 5
            if each is not None:
                cells[:2] = each.peak.text(".1f"), f"{each.peak_step:,}"
            if each is not None and each.end is not None and each.drop is not None:
                cells[2:] = each.end.text(".1f"), each.drop.text(".1f"), "–" if each.part is None else f"{100 * each.part:.1f}"
            diverged = "no" if diverged_at is None else f"at {diverged_at:,}"
            rows.append([method.label, str(result.task.seed), *cells, diverged])
    header = ["optimizer", "seed", "peak", "at step", "end", "drop", "drop, % of gain", "diverged"]
    caption = "Peak and end are smoothed returns, with standard errors over the returns that were logged in the window."
    return Table(f"each-run{end}", "Each run", header, rows, caption)


def mean_plot(runs: dict[Method, list[Result]], end: str) -> Plot:
    worst = min((value for found in runs.values() for result in found for _, value in curve(result)), default=0.0)
    series = []
    for method, found in runs.items():
        points = averaged(found, worst)
        series.append(mean_line(method.label, points, method.colour, method.is_variant))
    caption = (
        "Each point averages the episodes since the previous point. Lines are means over runs, bands are standard errors. Runs "
        "that diverged count as the worst."
    )
    labels = "steps", "return"
    return Plot(f"mean{end}", "Return on UR-Reacher", series, *labels, caption=caption, worse="down", kept=beginnings(series))


def runs_plot(runs: dict[Method, list[Result]], end: str) -> Plot:
    series = [
        Series(method.label, list(points), [at.mean for at in points.values()], colour=method.colour, dashed=method.is_variant)
        for method, found in runs.items()
        for points in map(smoothed, found)
    ]
    caption = "Smoothed returns, one line for each run. The line of a run that diverged ends there."
    return Plot(f"runs{end}", "Return on UR-Reacher, each run", series, "steps", "return", caption=caption)


EXPERIMENT = dataclasses.replace(
    rl.EXPERIMENT,
    name="robot",
    title="The returns of PPO on a simulated UR5 and their drop after the peak, with and without a trust region (Fig. 7).",
    settings=Settings,
    presets=PRESETS,
    tasks=tasks,
    work=work,
    sections=sections,
    examples=("--seeds 3 --steps 100000",),
)
