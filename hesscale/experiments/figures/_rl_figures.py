"""The report of ``rl``: returns by environment steps for each environment and optimizer, and scores over all environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ..lab.compact import compact
from ..lab.plots import Finding, Plot, Section, Series, Table, mean_line
from ..lab.statistics import Summary, summary
from ..lab.store import Result
from ..optimizers import AGENT_OPTIMIZERS, UNTRAINED
from ..rl.config import Config
from ._findings import divergence_findings, highest, listed
from ._normalised import Cell, Method, aggregate, definition, in_order, methods_of, scores_of


def sections(results: list[Result]) -> list[Section]:
    """A section for each algorithm and each combination of training settings."""
    return [section(found, end) for found, end in by_way(results)]


def by_way(results: list[Result]) -> Iterator[tuple[list[Result], str]]:
    """Groups of results, with a suffix for their files.

    Within a group, only environment, optimizer, trust radius and what changes it, step size, seed and number of steps differ.
    """
    apart = ("env", "optimizer", "trust_radius", "target_kl", "radius_decay", "step_size", "seed", "steps")
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        groups.setdefault(tuple((k, v) for k, v in asdict(result.task).items() if k not in apart), []).append(result)
    number: Counter[str] = Counter()  # number of groups, by algorithm
    for found in groups.values():
        number[algo := found[0].task.algo] += 1
        yield found, f"-{number[algo]}" if number[algo] > 1 else ""


def section(results: list[Result], end: str) -> Section:
    """A section. ``end`` is a suffix that distinguishes its files from those of other sections."""
    task = results[0].task
    networks = "separate networks for mean, variance (or logits) and value" if task.protocol == "paper" else "CleanRL's protocol"
    text = (
        f"{task.algo.upper()} trained with {networks}, and these settings: {conditions(results)}. {lengths(results)}. "
        "Returns are undiscounted. A seed that diverged counts as the worst of all runs in its environment."
    )
    groups: dict[str, dict[Cell, list[Result]]] = {}
    methods = methods_of(results)
    order = {name: k for k, name in enumerate(AGENT_OPTIMIZERS)}

    def place(result: Result) -> tuple[float, ...]:
        task, method = result.task, methods[result.task]
        return order[task.optimizer], method.trust_radius or 0, *method[2:], task.step_size, task.seed

    for env, found in sorted(by_environment(results).items()):
        for result in sorted(found, key=place):
            groups.setdefault(env, {}).setdefault((methods[result.task], result.task.step_size), []).append(result)
    rows: list[Sequence[str]] = []
    plots: list[Plot] = []
    findings: list[Finding] = []
    for env, cells in groups.items():
        known = [r.values["mean_return"] for found in cells.values() for r in found if r.values["mean_return"] is not None]
        scores = {cell: score_of(found, min(known)) for cell, found in cells.items()} if known else {}
        rows += [row(env, *cell, found, scores.get(cell)) for cell, found in cells.items()]
        plots.append(plot(env, cells, scores, f"return-{task.algo}-{env.replace('/', '-')}{end}"))
        findings += best_optimizer(f"{task.algo.upper()} on {env}: ", scores, plots[-1].name)
    header = ["environment", "optimizer", "step size", "mean return", "return at the end", "diverged", "steps/s"]
    caption = (
        "“Mean return” averages over all steps of a run, where each step counts with the return of its episode. “Return at the "
        "end” is the mean over the last tenth of the steps, for the seeds that did not diverge. Means and standard errors are "
        "over seeds. “Steps/s” counts the steps of all agents that learned together. Do not compare optimizers by it, since "
        "machines and their load may differ."
    )
    table = Table(
        f"returns-{task.algo}{end}", f"{task.algo.upper()}: mean undiscounted return over the run", header, rows, caption
    )
    tables, over_all = overall(results, end)
    findings = [*over_all, *findings, *divergence_findings(divergence_counts(results, methods), f"{task.algo.upper()}: ")]
    return Section(f"{task.algo.upper()}, {task.protocol} protocol", text, [table, *tables, *plots], findings)


def best_optimizer(start: str, scores: dict[Cell, Summary], figure: str) -> list[Finding]:
    best = {cell[0].label: cell for cell in best_cells(scores).values() if cell[0].optimizer != UNTRAINED}

    def text(label: str, at: Summary) -> str:
        return f"{at.text('.1f')} at step size {compact(best[label][1])}"

    return highest("mean return", {label: scores[cell] for label, cell in best.items()}, text, figure, start)


def divergence_counts(results: Sequence[Result], methods: dict[Config, Method]) -> dict[str, tuple[int, int]]:
    """The number of diverged runs and of all runs, by method."""
    return {
        method.label: (sum(found.values["diverged_at"] is not None for found in runs), len(runs))
        for method in in_order(methods.values())
        if (runs := [result for result in results if methods[result.task] == method])
    }


def overall(results: list[Result], end: str) -> tuple[list[Table], list[Finding]]:
    """A comparison of optimizers over all environments, if there are several."""
    by_env = by_environment(results)
    if len(by_env) > len({result.task.env for result in results}):  # an environment has runs of several lengths
        return [], []
    methods = methods_of(results)
    found = [scores_of(env, runs, methods) for env, runs in sorted(by_env.items())]
    known = [scores for scores in found if scores is not None]
    estimates = {method: aggregate(known, method) for method in in_order(methods.values())}
    rows: list[Sequence[str]] = [
        [method.label, compact(size), at.text()] for method, sizes in estimates.items() for size, at in sizes.items()
    ]
    if len(known) < 2 or not rows:
        return [], []
    algo = results[0].task.algo
    title = f"{algo.upper()}: {len(known)} environments together"
    caption = (
        "Interquartile means of the scores, over environments and seeds, with 95 % intervals of a stratified bootstrap. They "
        f"include only seeds and step sizes that all environments have. {definition(results)}"
    )
    table = Table(f"overall-{algo}{end}", title, ["optimizer", "step size", "IQM"], rows, caption)
    bests = {method: max(sizes, key=lambda size: sizes[size].iqm) for method, sizes in estimates.items() if sizes}
    ranked = sorted(bests, key=lambda method: -estimates[method][bests[method]].iqm)
    parts = [f"{method.label} {estimates[method][bests[method]].text()} at {compact(bests[method])}" for method in ranked]
    text = (
        f"{algo.upper()}: interquartile mean of the scores over {len(known)} environments, at one step size for all of them: "
        f"{listed(parts)}."
    )
    return [table], [Finding(text)] if len(parts) > 1 else []


def by_environment(results: list[Result]) -> dict[str, list[Result]]:
    """Results by environment. The key includes the number of steps if an environment has runs of several lengths."""
    counts = Counter(env for env, _ in {(result.task.env, result.task.steps) for result in results})
    groups: dict[str, list[Result]] = {}
    for result in results:
        env = result.task.env
        groups.setdefault(env if counts[env] == 1 else f"{env}, {result.task.steps:,} steps", []).append(result)
    return groups


def conditions(results: Sequence[Result]) -> str:
    """The training settings, as part of a sentence."""
    task: Config = results[0].task
    radii = sorted({r.task.trust_radius for r in results if AGENT_OPTIMIZERS[r.task.optimizer].is_scaled})
    is_changing = any(r.task.target_kl or r.task.radius_decay for r in results)
    first = " (at first, where it adapts to a KL divergence or decays)" if is_changing else ""
    trust = f"Δ = {', '.join(map(compact, radii))} for scaled optimizers{first}, " if radii else ""
    return (
        f"ε = {compact(task.eps)}, {trust}{'½ ' if task.half_value_loss else ''}(v − R)² for "
        f"the critic, observations and rewards {'normalized' if task.normalize else 'not normalized'}, truncated episodes "
        f"{'bootstrapped with the value of their last state' if task.truncation == 'bootstrap' else 'treated as terminated'}"
    )


def lengths(results: list[Result]) -> str:
    envs: dict[int, dict[str, None]] = {}
    for result in results:
        envs.setdefault(result.task.steps, {})[result.task.env] = None
    return "; ".join(f"{steps:,} environment steps on {', '.join(names)}" for steps, names in envs.items())


def score_of(found: list[Result], worst: float) -> Summary:
    """The mean return over seeds. A seed that diverged, or finished no episode, counts as ``worst``."""
    values = [r.values["mean_return"] if r.values["diverged_at"] is None else None for r in found]
    return summary([worst if value is None else value for value in values])


def row(env: str, method: Method, size: float, found: list[Result], score: Summary | None) -> list[str]:
    alive = [r for r in found if r.values["diverged_at"] is None]
    ends = [[v for step, v in curve(r) if step > 0.9 * r.task.steps] for r in alive]
    last = [sum(values) / len(values) for values in ends if values]
    paces = [r.values["steps_per_second"] for r in found if r.values["steps_per_second"] is not None]
    return [
        env,
        method.label,
        compact(size),
        score.text(".1f") if score else "–",
        summary(last).text(".1f") if last else "–",
        f"{len(found) - len(alive)} of {len(found)}",
        f"{summary(paces).mean:,.0f}" if paces else "–",
    ]


def curve(result: Result) -> list[tuple[int, float]]:
    return list(result.metrics.get("charts/episodic_return", []))


def plot(env: str, cells: dict[Cell, list[Result]], scores: dict[Cell, Summary], name: str) -> Plot:
    """Return by steps, for each optimizer at the step size with the best score."""
    best = best_cells(scores)
    everything = [value for found in cells.values() for result in found for _, value in curve(result)]
    series = []
    for method, cell in best.items():
        points = averaged(cells[cell], min(everything, default=0.0))
        label = f"{method.label}, α = {compact(cell[1])}"
        series.append(mean_line(label, points, method.colour, method.is_variant))
    caption = (
        "Each point averages the episodes since the previous point. Lines are means over seeds, bands are standard errors. Each "
        "optimizer is shown at its best step size."
    )
    return Plot(name, f"Return on {env}", series, "steps", "return", caption=caption, worse="down", kept=beginnings(series))


def beginnings(curves: Sequence[Series]) -> list[float]:
    """The first values of curves: returns of agents that are hardly trained."""
    return [curve.y[0] for curve in curves if len(curve.y)]


def best_cells(scores: dict[Cell, Summary]) -> dict[Method, Cell]:
    """Each method, at the step size with its highest score."""
    best: dict[Method, Cell] = {}
    for cell in scores:
        if cell[0] not in best or scores[cell].mean > scores[best[cell[0]]].mean:
            best[cell[0]] = cell
    return best


def averaged(found: list[Result], worst: float) -> dict[int, Summary]:
    """Means over seeds, by step, of the latest return of each seed. After divergence, ``worst`` is used."""
    curves = [dict(curve(result)) for result in found]
    latest: list[float | None] = [None] * len(found)
    points = {}
    for step in sorted({step for points in curves for step in points}):
        for k, result in enumerate(found):
            gone = result.values["diverged_at"]
            latest[k] = worst if gone is not None and step >= gone else curves[k].get(step, latest[k])
        known = [value for value in latest if value is not None]
        if len(known) == len(found):
            points[step] = summary(known)
    return points
