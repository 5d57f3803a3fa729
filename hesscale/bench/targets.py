"""The targets, and whether the measured records reach them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .measure import quartiles
from .methods import COMPILED, EAGER, GRAPH, METHODS, MODES
from .workloads import CPU, CUDA, SWEEPS

Record = dict[str, Any]
Row = dict[str, Any]

NOT_MEASURED = "not measured"
ROUNDS = 30  # the fewest that a target is judged by
SLOPE_MARGIN = 0.05
PAPER_GN = 1.25  # AdaHesScaleGN's cost in the paper, relative to Adam


@dataclass(frozen=True)
class Target:
    """A method's time or memory, at most ``limit`` times that of Adam, in the same mode unless the quantity says otherwise."""

    device: str
    workload: str
    mode: str
    method: str
    limit: float
    quantity: str = "ratio"


QUANTITIES = {"ratio": "the same Adam", "ratio_to_eager_adam": "eager Adam", "memory_ratio": "the same Adam, peak memory"}
TARGETS = [
    Target(CPU, "mlp-64", EAGER, "adahesscale", 1.20),
    Target(CPU, "mlp-64", COMPILED, "adahesscale", 0.38, "ratio_to_eager_adam"),
    Target(CPU, "mlp-64", COMPILED, "adahesscale", 1.05),
    Target(CPU, "mlp-4x512", COMPILED, "adahesscale", 1.60),
    Target(CPU, "3c3d", EAGER, "adahesscale", 1.70),
    Target(CUDA, "mlp-64", GRAPH, "adahesscale", 1.35),
    Target(CUDA, "mlp-4x4096", GRAPH, "adahesscale", 1.67),
    Target(CUDA, "mlp-4x4096", GRAPH, "adahesscale-bf16", 1.07),
    Target(CUDA, "3c3d", GRAPH, "adahesscale", 1.70),
    Target(CUDA, "3c3d", GRAPH, "adahesscale-bf16", 1.20),
    *(Target(CUDA, name, GRAPH, "adahesscale-every10", 1.08) for name in ("mlp-64", "mlp-4x4096", "3c3d")),
    *(Target(CUDA, "3c3d", mode, "adahesscale", 1.30, "memory_ratio") for mode in (EAGER, GRAPH)),
]
GAUSS_NEWTON = {"adahesscale": "adahesscale-gn", "adahesscale-bf16": "adahesscale-gn-bf16"}  # each to cost no more than its pair
ENSEMBLE_AT_LEAST = 4.0


@dataclass(frozen=True)
class Verdict:
    """A target beside what was measured; ``reached`` is None where nothing was, or too little."""

    text: str
    target: str
    measured: str
    reached: bool | None


def verdicts(records: Sequence[Record]) -> list[Verdict]:
    """Every target, judged by the last record that measured it."""
    found = [judge(target, records) for target in TARGETS]
    timed = [t for t in TARGETS if t.quantity == "ratio" and t.method in GAUSS_NEWTON]
    found += [judge_gauss_newton(target, records) for target in timed]
    found.append(judge_ensemble(records))
    return found + [verdict for kind in SWEEPS for verdict in judge_sweep(kind, records)]


def judge(target: Target, records: Sequence[Record]) -> Verdict:
    text = f"{name(target)}, {METHODS[target.method].label} / {QUANTITIES[target.quantity]}"
    row = find(records, target.device, target.workload, target.mode, target.method)
    value = None if row is None else row.get(target.quantity)
    if value is None or row is None:
        return Verdict(text, f"≤ {target.limit:.2f}", why_not(row), None)
    middle = value["median"] if isinstance(value, dict) else value
    return Verdict(
        text, f"≤ {target.limit:.2f}", spread(value) + doubts(row), middle <= target.limit if not doubts(row) else None
    )


def judge_gauss_newton(target: Target, records: Sequence[Record]) -> Verdict:
    """AdaHesScaleGN against AdaHesScale, round by round, and against the paper's 1.25."""
    other = GAUSS_NEWTON[target.method]
    text = f"{name(target)}, {METHODS[other].label} / {METHODS[target.method].label}"
    full, gn = (find(records, target.device, target.workload, target.mode, m) for m in (target.method, other))
    if full is None or gn is None or "times_ms" not in full or "times_ms" not in gn:
        return Verdict(text, "≤ 1.00", why_not(gn if gn is None or "error" in gn else full), None)
    value = quartiles(a / b for a, b in zip(gn["times_ms"], full["times_ms"], strict=True))
    measured = spread(value) + doubts(gn)
    if gn.get("ratio"):
        meets = "meets" if gn["ratio"]["median"] <= PAPER_GN else "does not meet"
        measured += f"; {gn['ratio']['median']:.2f} to Adam {meets} the paper's {PAPER_GN}"
    return Verdict(text, "≤ 1.00", measured, value["median"] <= 1 if not doubts(gn) else None)


def judge_ensemble(records: Sequence[Record]) -> Verdict:
    text = "CPU, ensemble of 32 tanh MLPs 64-64, batch 64, member-steps per second / 32 single compiled runs in turn"
    target = f"≥ {ENSEMBLE_AT_LEAST:g}"
    for record in reversed(records):
        found = record.get("ensemble")
        if found and record["machine"]["device"] == CPU and "ratio" in found:
            doubt = doubts({"mode": COMPILED, "times_ms": found["single_ms"], **found})
            reached = found["ratio"]["median"] >= ENSEMBLE_AT_LEAST
            return Verdict(text, target, spread(found["ratio"]) + doubt, None if doubt else reached)
    return Verdict(text, target, NOT_MEASURED, None)


def judge_sweep(kind: str, records: Sequence[Record]) -> list[Verdict]:
    """Slopes of the two methods of this library, on every device that was measured."""
    target = f"≤ Adam's + {SLOPE_MARGIN}"
    found = []
    measured = {r["machine"]["device"]: (slopes(r), r["rounds"]) for r in records if r["sweep"] == kind}
    for device, (fitted, rounds) in (measured or {"": ({}, 0)}).items():
        where = {CPU: "CPU, ", CUDA: "GPU, ", "": ""}[device]
        for method in ("adahesscale", "adahesscale-gn"):
            text = f"{where}time against {kind}, slope of the log-log fit, {METHODS[method].label}"
            slope = fitted.get((method, EAGER))
            if slope is None or slope.above_adam is None:
                found.append(Verdict(text, target, NOT_MEASURED, None))
            else:
                value = f"{slope.slope:.3f}, that is Adam's {slope.above_adam:+.3f}{too_few(rounds)}"
                found.append(Verdict(text, target, value, None if too_few(rounds) else slope.above_adam <= SLOPE_MARGIN))
    return found


@dataclass(frozen=True)
class Slope:
    """d log time / d log size, and how much more that is than Adam's, by the ratios to Adam at each size."""

    slope: float
    above_adam: float | None
    sizes: int


def slopes(record: Record) -> dict[tuple[str, str], Slope]:
    """By method and mode, where at least two sizes were measured."""
    points: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for workload in record["workloads"]:
        for row in workload["rows"]:
            if "ms" in row:
                points.setdefault((row["method"], row["mode"]), []).append((workload["size"], row))
    result = {}
    for key, found in points.items():
        if len(found) > 1:
            relative = [(size, row["ratio"]["median"]) for size, row in found if row["ratio"]]
            above = fit(relative) if len(relative) == len(found) else None
            result[key] = Slope(fit([(size, row["ms"]["median"]) for size, row in found]), above, len(found))
    return result


def fit(points: Iterable[tuple[float, float]]) -> float:
    logs = [(math.log(x), math.log(y)) for x, y in points]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def find(records: Sequence[Record], device: str, workload: str, mode: str, method: str) -> Row | None:
    for record in reversed(records):
        if record["machine"]["device"] == device:
            for found in record["workloads"]:
                for row in found["rows"]:
                    if (found["name"], row["mode"], row["method"]) == (workload, mode, method):
                        result: Row = row
                        return result
    return None


def name(target: Target) -> str:
    return f"{'GPU' if target.device == CUDA else 'CPU'}, {target.workload}, {MODES[target.mode]}"


def spread(value: dict[str, float] | float) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.2f} ({value['q1']:.2f}–{value['q3']:.2f})"
    return f"{value:.2f}"


def why_not(row: Row | None) -> str:
    return f"{NOT_MEASURED}: {row['error']}" if row and "error" in row else NOT_MEASURED


def doubts(row: Row) -> str:
    """Why a measured row cannot be held against a target."""
    found = "" if row["ran_as"] == MODES[row["mode"]] else f"; ran as {row['ran_as']}"
    return found + too_few(len(row["times_ms"]))


def too_few(rounds: int) -> str:
    return "" if rounds >= ROUNDS else f"; {rounds} rounds, {ROUNDS} are needed"
