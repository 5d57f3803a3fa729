"""Targets for the cost of a step, and whether the measurements reach them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .measure import quartiles
from .methods import BASELINE, COMPILED, EAGER, GRAPH, METHODS, MODES
from .sweeps import Record, Row, sweep_of
from .workloads import CPU, CUDA, SWEEPS

NOT_MEASURED = "not measured"
ROUNDS = 30  # the minimum to check a target
SIZES = 4  # the minimum to check a slope
SLOPE_MARGIN = 0.05
PAPER_GN = 1.25  # AdaHesScaleGN's cost in the paper, relative to Adam


@dataclass(frozen=True)
class Target:
    """A method's time or memory should be at most ``limit`` times that of Adam, by default in the same mode."""

    device: str
    workload: str
    mode: str
    method: str
    limit: float
    quantity: str = "ratio"


QUANTITIES = {
    "ratio": "Adam in the same mode",
    "ratio_to_eager_adam": "eager Adam",
    "memory_ratio": "Adam in the same mode, peak memory",
    "backward_ratio": "loss.backward(), the backward pass alone",
}
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
    *(Target(CPU, name, EAGER, "adahesscale", 2.50, "backward_ratio") for name in ("vit", "gpt")),
    *(Target(CUDA, name, GRAPH, "adahesscale-every10", 1.08) for name in ("mlp-64", "mlp-4x4096", "3c3d")),
    *(Target(CUDA, "3c3d", mode, "adahesscale", 1.30, "memory_ratio") for mode in (EAGER, GRAPH)),
    Target(CUDA, "gpt2", EAGER, "adahesscale-gn-bf16", 1.45),
    Target(CUDA, "gpt2", EAGER, "adahesscale-gn-bf16-every10", 1.06),
    Target(CUDA, "gpt2", EAGER, "adahesscale-gn-bf16", 1.35, "memory_ratio"),
]
GAUSS_NEWTON = {"adahesscale": "adahesscale-gn", "adahesscale-bf16": "adahesscale-gn-bf16"}  # the second must not cost more
ENSEMBLE_AT_LEAST = 4.0


@dataclass(frozen=True)
class TargetResult:
    """A target and its measurement. ``reached`` is None if there are no or not enough measurements."""

    text: str
    target: str
    measured: str
    reached: bool | None


def target_results(records: Sequence[Record]) -> list[TargetResult]:
    """Every target, with the last record that measured it."""
    found = [check_target(target, records) for target in TARGETS]
    timed = [t for t in TARGETS if t.quantity == "ratio" and t.method in GAUSS_NEWTON]
    found += [check_gauss_newton(target, records) for target in timed]
    found.append(check_ensemble(records))
    return found + [result for kind in SWEEPS for result in check_sweep(kind, records)]


def check_target(target: Target, records: Sequence[Record]) -> TargetResult:
    text = f"{name(target)}, {METHODS[target.method].label} / {QUANTITIES[target.quantity]}"
    limit, failed = f"≤ {target.limit:.2f}", ""
    for rows in runs(records, target):
        row = rows.get((target.method, target.mode), {})
        if (value := row.get(target.quantity)) is not None:
            adam = rows.get((BASELINE, EAGER if target.quantity == "ratio_to_eager_adam" else target.mode))
            caveat = caveats(row, adam)
            middle = value["median"] if isinstance(value, dict) else value
            measured = spread(value, decimals(middle, target.limit)) + caveat + later(failed)
            return TargetResult(text, limit, measured, None if caveat else middle <= target.limit)
        failed = failed or row.get("error", "")
    return TargetResult(text, limit, not_measured(failed), None)


def check_gauss_newton(target: Target, records: Sequence[Record]) -> TargetResult:
    """Compare AdaHesScaleGN with AdaHesScale, round by round in the same run, and with the paper's 1.25."""
    other = GAUSS_NEWTON[target.method]
    text, failed = f"{name(target)}, {METHODS[other].label} / {METHODS[target.method].label}", ""
    for rows in runs(records, target):
        gn, full = (rows.get((method, target.mode), {}) for method in (other, target.method))
        times, base = gn.get("times_ms"), full.get("times_ms")
        if times and base and len(times) == len(base):
            value = quartiles(a / b for a, b in zip(times, base, strict=True))
            caveat = caveats(gn, full)
            measured = spread(value, decimals(value["median"], 1, least=3)) + caveat
            if gn.get("ratio") and not caveats(gn, rows.get((BASELINE, target.mode))):
                middle = gn["ratio"]["median"]
                where = "within" if middle <= PAPER_GN else "above"
                measured += f"; {middle:.{decimals(middle, PAPER_GN)}f} times Adam's time, {where} the paper's {PAPER_GN}"
            return TargetResult(text, "≤ 1.00", measured + later(failed), None if caveat else value["median"] <= 1)
        failed = failed or gn.get("error", "") or full.get("error", "")
    return TargetResult(text, "≤ 1.00", not_measured(failed), None)


def check_ensemble(records: Sequence[Record]) -> TargetResult:
    text = "CPU, ensemble of 32 tanh MLPs 64-64, batch 64, member-steps per second / 32 single compiled runs in turn"
    target = f"≥ {ENSEMBLE_AT_LEAST:g}"
    for record in reversed(records):
        found = record.get("ensemble")
        if found and record["machine"]["device"] == CPU and "ratio" in found:
            caveat = caveats({"mode": COMPILED, "times_ms": found["single_ms"], **found})
            middle = found["ratio"]["median"]
            measured = spread(found["ratio"], decimals(-middle, -ENSEMBLE_AT_LEAST)) + caveat
            return TargetResult(text, target, measured, None if caveat else middle >= ENSEMBLE_AT_LEAST)
    return TargetResult(text, target, NOT_MEASURED, None)


def check_sweep(kind: str, records: Sequence[Record]) -> list[TargetResult]:
    """The slopes of AdaHesScale and AdaHesScaleGN, on every device that was measured."""
    target = f"≤ Adam's + {SLOPE_MARGIN}"
    found = []
    swept = [record for record in records if record["sweep"] == kind]
    for device in dict.fromkeys([record["machine"]["device"] for record in swept] or [""]):
        where = {CPU: "CPU, ", CUDA: "GPU, ", "": ""}[device]
        measured_there = [record for record in reversed(swept) if record["machine"]["device"] == device]
        fits = [(sweep_of(record).slopes, record["rounds"]) for record in measured_there]
        for method in ("adahesscale", "adahesscale-gn"):
            text = f"{where}time against {kind}, slope of the log-log fit, {METHODS[method].label}"
            measured = [(fitted[method, EAGER], rounds) for fitted, rounds in fits if (method, EAGER) in fitted]
            slope, rounds = next(((s, rounds) for s, rounds in measured if s.above_adam is not None), (None, 0))
            if slope is None or slope.above_adam is None:
                found.append(TargetResult(text, target, NOT_MEASURED, None))
                continue
            caveat = too_few(rounds) + ("" if slope.sizes >= SIZES else f"; {slope.sizes} sizes, {SIZES} are needed")
            difference = f"{abs(slope.above_adam):.{decimals(slope.above_adam, SLOPE_MARGIN, least=3)}f}"
            value = f"{slope.slope:.3f}, {difference} {'below' if slope.above_adam < 0 else 'above'} Adam's{caveat}"
            found.append(TargetResult(text, target, value, None if caveat else slope.above_adam <= SLOPE_MARGIN))
    return found


def runs(records: Sequence[Record], target: Target) -> Iterator[dict[tuple[str, str], Row]]:
    """The rows of a target's workload by method and mode, for each run, the last run first."""
    for record in reversed(records):
        for workload in record["workloads"]:
            if (record["machine"]["device"], workload["name"]) == (target.device, target.workload):
                yield {(row["method"], row["mode"]): row for row in workload["rows"]}


def name(target: Target) -> str:
    return f"{'GPU' if target.device == CUDA else 'CPU'}, {target.workload}, {MODES[target.mode]}"


def spread(value: dict[str, float] | float, places: int = 2) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.{places}f} ({value['q1']:.{places}f}–{value['q3']:.{places}f})"
    return f"{value:.{places}f}"


def decimals(value: float, limit: float, least: int = 2) -> int:
    """The number of decimals for which the rounded value is on the same side of the limit as the value."""
    return next((n for n in range(least, 9) if (round(value, n) <= limit) == (value <= limit)), 9)


def not_measured(failed: str) -> str:
    return f"{NOT_MEASURED}: {failed}" if failed else NOT_MEASURED


def later(failed: str) -> str:
    return f"; a later run failed: {failed}" if failed else ""


def caveats(row: Row, other: Row | None = None) -> str:
    """Why a row, or the row that it is compared with, cannot be used for a target."""
    found = "" if row["ran_as"] == MODES[row["mode"]] else f"; ran as {row['ran_as']}"
    if other and other["ran_as"] != MODES[other["mode"]]:
        found += f"; {METHODS[other['method']].label} ran as {other['ran_as']}"
    return found + too_few(len(row["times_ms"]))


def too_few(rounds: int) -> str:
    return "" if rounds >= ROUNDS else f"; {rounds} rounds, {ROUNDS} are needed"
