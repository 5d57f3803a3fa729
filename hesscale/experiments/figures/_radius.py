"""Scaled optimizers compared with Adam at its best step size, and their scores by trust radius."""

from __future__ import annotations

from collections.abc import Sequence

from ..lab.compact import compact
from ..lab.plots import Plot, Series, Table
from ..optimizers import AGENT_OPTIMIZERS
from ._normalised import Estimate, Method, Scores, aggregate_tuned, tuned

ADAM = Method("adam")
OverAll = dict[Method, dict[float, Estimate]]  # estimates by method and step size


def beside_adam(known: list[Scores], over_all: OverAll, algo: str, end: str) -> list[Table]:
    """All other methods and step sizes, in percent of Adam with the best step size of each environment."""
    best, sizes = aggregate_tuned(known, ADAM), tuned(known, ADAM)
    if best is None or best.iqm <= 0:
        return []
    highest = {scores.env: scores.means(ADAM)[sizes[scores.env]].mean for scores in known}
    has_shares = any(scores.scaled for scores in known)
    rows: list[Sequence[str]] = [[ADAM.label, "best of each environment", best.text(), "100", "–", *["–"] * has_shares, "–"]]
    for method, points in over_all.items():
        if method == ADAM:
            continue
        for size, at in points.items():
            shares = {s.env: s.means(method)[size].mean / highest[s.env] for s in known if highest[s.env] > 0}
            lowest = min(shares.items(), key=lambda share: share[1], default=None)
            diverged = sum(scores.diverged[method, size] for scores in known)
            where = "–" if lowest is None else f"{100 * lowest[1]:.0f}, {lowest[0]}"
            shortened = [shortened_share([share for s in known for share in s.scaled.get((method, size), ())])] * has_shares
            percent = f"{100 * at.iqm / best.iqm:.0f}"
            rows.append([method.label, compact(size), at.text(), percent, where, *shortened, str(diverged)])
    if len(rows) == 1:
        return []
    columns = ["lowest in one environment, %", *["steps shortened, %"] * has_shares, "diverged"]
    header = ["optimizer", "step size", "IQM", "% of tuned Adam", *columns]
    caption = (
        "Adam has the step size with the highest mean score in each environment. Every other row has one step size in all of "
        "them. Interquartile means (IQM) are over seeds and environments, with 95 % intervals. “Lowest” is the mean score "
        "over seeds, divided by Adam's, in the environment where this ratio is lowest."
    ) + (" “Steps shortened” is the percentage of updates that the trust region shortened, over networks and runs." * has_shares)
    title = f"{algo.upper()}: a single step size, compared with a tuned Adam"
    return [Table(f"{algo}-beside-adam{end}", title, header, rows, caption)]


def shortened_share(shares: Sequence[float]) -> str:
    """The mean of shares in percent; a dash if there are none."""
    return f"{100 * sum(shares) / len(shares):.0f}" if shares else "–"


def by_radius(known: list[Scores], over_all: OverAll, algo: str, end: str) -> list[Plot]:
    """IQM by trust radius, with a line for each scaled optimizer and step size, if there are several radii."""
    lines: dict[tuple[Method, float], dict[float, Estimate]] = {}  # by the method without its radius, and the step size
    for method, points in over_all.items():
        for size, at in points.items():
            if method.trust_radius is not None:
                lines.setdefault((method._replace(trust_radius=None), size), {})[method.trust_radius] = at
    radii = sorted({radius for line in lines.values() for radius in line})
    if len(radii) < 2:
        return []
    series = []
    for (method, size), line in lines.items():
        line = dict(sorted(line.items()))
        ends = [at.interval or (at.iqm, at.iqm) for at in line.values()]
        label = f"{method.label}, α = {compact(size)}"
        middle, low, high = [at.iqm for at in line.values()], [e[0] for e in ends], [e[1] for e in ends]
        changes = bool(method.target_kl or method.radius_decay)
        series.append(Series(label, list(line), middle, low, high, colour=method.colour, dashed=changes))
    if best := aggregate_tuned(known, ADAM):
        series.append(
            Series(
                "Adam, tuned in each environment",
                [radii[0], radii[-1]],
                [best.iqm, best.iqm],
                dashed=True,
                colour=AGENT_OPTIMIZERS["adam"].colour,
            )
        )
    title = f"{algo.upper()} over {len(known)} environment{'s' if len(known) > 1 else ''}, by trust radius"
    caption = (
        "Lines are interquartile means (IQM) over seeds and environments. Bands are 95 % intervals of a stratified bootstrap."
    )
    labels = "trust radius Δ", "IQM of normalized returns"
    return [Plot(f"{algo}-by-radius{end}", title, series, *labels, log_x=True, caption=caption, worse="down", kept=(0, 1))]
