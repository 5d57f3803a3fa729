"""The cost of an update (Appendix D): the time of backward pass and update by network size, and its ratio to Adam's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..bench.command import prepare_cuda
from ..bench.measure import Case, Stopwatch, digits, interleave, message, prepare, quartiles, ratios
from ..bench.methods import BASELINE, EAGER, METHODS, Step
from ..bench.settings import IN_THE_PAPER
from ..bench.sweeps import Key, Row, Sweep
from ..bench.targets import spread
from ..bench.workloads import CPU, CUDA, SWEEPS, Workload, sweep
from ..lab.choices import check_least, check_numbers, choose, named
from ..lab.experiment import Experiment, option
from ..lab.machine import machine
from ..lab.plots import Finding, Plot, Section, Table
from ..lab.store import Result, Run

PUBLISHED = {"adahessian": 3.0, "adahesscale": 2.0, "adahesscale-gn": 1.25}  # average cost relative to Adam
ROUNDS_AT_ONCE = 5  # the number of rounds between reports of progress
CHECKPOINT_SECONDS = 5.0
STEADY = 1.5  # findings require that the upper quartile is less than this many times the lower one
BY_DESIGN = ("too slow", "left out")  # reasons for which a method may be missing; any other reason is a failure


@dataclass(frozen=True)
class Settings:
    sweeps: str = option("outputs,layers", "dimensions that grow, separated by commas: outputs, layers")
    most_outputs: int = option(512, "largest number of outputs; the networks have 16, 32 … 512")
    most_layers: int = option(128, "largest number of hidden layers; the networks have 1, 2 … 128")
    methods: str = option(IN_THE_PAPER, f"methods, separated by commas; Adam is always included: {', '.join(METHODS)}")
    rounds: int = option(30, "number of rounds; in each, every method runs a block of updates, in a new random order")
    block: float = option(20.0, "milliseconds that a block of updates should take; a block has at least one update")
    limit: float = option(10.0, "seconds that a step may take; slower methods are skipped at that size, and the tables say so")
    threads: int = option(1, "number of CPU threads for torch")
    device: str = option(CPU, "where to measure: cpu or cuda")


@dataclass(frozen=True)
class Task:
    """One network: a point of a sweep."""

    sweep: str
    size: int
    methods: str
    rounds: int
    block: float
    limit: float
    threads: int
    device: str


PRESETS = {
    "smoke": Settings(most_outputs=32, most_layers=2, rounds=3, block=1.0),
    "small": Settings(most_layers=16, rounds=10, block=10.0),
    "paper": Settings(),
}


def tasks(settings: Settings) -> list[Task]:
    if settings.device not in (CPU, CUDA):
        raise ValueError(f"no device is called {settings.device!r}; there are cpu, cuda")
    check_least(settings, {"rounds": 1, "threads": 1})
    check_numbers(settings, positive=("block", "limit"))
    methods = [method.name for method in choose(settings.methods, METHODS, "method")]
    names = ",".join(methods if BASELINE in methods else [BASELINE, *methods])
    shared = {name: getattr(settings, name) for name in ("rounds", "block", "limit", "threads", "device")}
    most = {"outputs": settings.most_outputs, "layers": settings.most_layers}
    kinds = choose(settings.sweeps, named(SWEEPS), "sweep")
    sizes = {kind: [w.size for w in sweep(kind) if w.size is not None and w.size <= most[kind]] for kind in kinds}
    for kind, found in sizes.items():
        if not found:
            raise ValueError(f"the smallest network of the sweep over {kind} has more than {most[kind]} {kind}")
    return [Task(kind, size, names, **shared) for kind, found in sizes.items() for size in found]


def work(settings: Settings) -> str:
    asked = tasks(settings)
    methods = len(asked[0].methods.split(","))
    rounds = f"{settings.rounds} rounds of {settings.block:g} ms or one update"
    return f"{len(asked)} networks, {methods} methods, {rounds}, which need an otherwise idle machine"


def run(task: Task, run: Run, data: Path | None) -> Mapping[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(task.threads)
    try:
        return measure(task, run)
    finally:
        torch.set_num_threads(before)


def measure(task: Task, run: Run) -> Mapping[str, Any]:
    """A row for each method, as in :mod:`hesscale.experiments.bench`, except that ``ms`` and ``ratio`` are only of the update."""
    device, methods = torch.device(task.device), task.methods.split(",")
    if device.type == CUDA:
        prepare_cuda(device, tf32=False)
    here = str(machine())
    state = run.state if run.state and run.state["machine"] == here else {"times": {name: [] for name in methods}, "errors": {}}
    times: dict[str, list[list[float]]] = state["times"]  # times of a step and of its update, by round
    errors: dict[str, str] = state["errors"]
    workload = workload_of(task)
    cases: dict[str, Case] = {}
    for name in methods:
        if name not in errors:
            try:
                cases[name] = prepared(task, workload, name, device)
            except Exception as error:
                errors[name] = message(error)
        run.progress(len(cases) + len(errors), len(methods) + task.rounds)
    saved, done = time.monotonic(), max(len(found) for found in times.values())
    while done < task.rounds:
        names, count = [name for name in methods if name not in errors], min(ROUNDS_AT_ONCE, task.rounds - done)
        found, failed = interleave([cases[name] for name in names], count, device, seed=done)
        errors.update({names[k]: text for k, text in failed.items()})
        for k, steps in found.items():
            watch = cases[names[k]].step
            assert isinstance(watch, Stopwatch)
            times[names[k]] += [[whole, update] for whole, update in zip(steps, watch.update_ms[-count:], strict=True)]
        done += count
        run.progress(len(methods) + done, len(methods) + task.rounds)
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            by_design = {name: text for name, text in errors.items() if text.startswith(BY_DESIGN)}
            run.checkpoint({"machine": here, "times": times, "errors": by_design})
            saved = time.monotonic()
    if faults := [f"{name}: {text}" for name, text in errors.items() if not text.startswith(BY_DESIGN)]:
        raise RuntimeError("; ".join(faults))
    parameters = sum(p.numel() for p in workload.network().parameters())
    return {"parameters": parameters, "rows": [row(name, times, errors) for name in methods]}


def workload_of(task: Task) -> Workload:
    return next(workload for workload in sweep(task.sweep) if workload.size == task.size)


def prepared(task: Task, workload: Workload, name: str, device: torch.device) -> Case:
    case = prepare(workload, METHODS[name], EAGER, workload.data(device), block=task.block / 1e3, limit=task.limit)
    assert isinstance(case.step, Step)
    return Case(Stopwatch(case.step), case.calls)


def row(name: str, times: Mapping[str, list[list[float]]], errors: Mapping[str, str]) -> Row:
    about = {"method": name, "label": METHODS[name].label, "mode": EAGER}
    if name in errors:
        return {**about, "error": errors[name]}
    steps, updates = zip(*times[name], strict=True)
    base_steps, base_updates = zip(*times[BASELINE], strict=True) if BASELINE not in errors else (None, None)
    return {
        **about,
        "ms": quartiles(updates),
        "ratio": ratios(updates, base_updates),
        "step_ms": quartiles(steps),
        "step_ratio": ratios(steps, base_steps),
        "times_ms": [digits(value) for value in updates],
    }


# ----------------------------------------------------------------------------------------------------------- what it shows


def sections(results: list[Result]) -> list[Section]:
    """A section for each machine and each combination of settings."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        here = result.facts["machine"]
        way = {name: value for name, value in asdict(result.task).items() if name not in ("sweep", "size", "methods", "limit")}
        where = here["gpu"] if result.task.device == CUDA else here["cpu"]
        groups.setdefault((where, here["torch"], *way.items()), []).append(result)
    return [section(found, f"-{k}" if k > 1 else "") for k, found in enumerate(groups.values(), start=1)]


def section(results: list[Result], end: str) -> Section:
    """A section. ``end`` is a suffix that distinguishes its files from those of other sections."""
    task, here = results[0].task, results[0].facts["machine"]
    sweeps = [swept(kind, results) for kind in SWEEPS if any(result.task.sweep == kind for result in results)]
    where = f"{here['gpu']}, CUDA" if task.device == CUDA else f"{here['cpu']}, {threads(task.threads)}"
    text = (
        "In the paper, AdaHessian, AdaHesScale and AdaHesScaleGN cost 3, 2 and 1.25 times as much as Adam on average.\n\n"
        "An update consists of the backward pass of gradients and curvature, and the change of the parameters. Only whole steps "
        f"include the forward pass. All times are for batch size 1 in eager mode, on {where}, with torch {here['torch']}. In "
        f"each of {task.rounds} rounds, every method runs a block of updates of about {task.block:g} ms, or one update if that "
        "takes longer. Ratios to Adam are computed within a round. The figures show their medians and quartiles."
    )
    items: list[Any] = [averages(sweeps, end)]
    for found in sweeps:
        items += [
            plot(found, "ms", f"{found.kind}-time{end}", f"Time of an update by number of {found.kind}", "ms per update"),
            plot(found, "ratio", f"{found.kind}-ratio{end}", relative_title(found), "ratio to Adam"),
            times_table(found, end),
            ratios_table(found, end),
        ]
    return Section("Cost of an update (Appendix D)", text, items, findings(sweeps, end))


def findings(sweeps: Sequence[Sweep], end: str) -> list[Finding]:
    """The average cost of each of the paper's optimizers, if it was measured at all sizes with little noise."""
    found = []
    sizes = sum(len(each.rows) for each in sweeps)
    for name, published in PUBLISHED.items():
        ratios = [at for each in sweeps for at in each.of((name, EAGER), "ratio").values()]
        medians = [at["median"] for at in ratios]
        if len(medians) == sizes > 1 and all(at["q3"] < STEADY * at["q1"] for at in ratios):
            text = (
                f"An update of {METHODS[name].label} takes {statistics.fmean(medians):.2f} times as long as Adam's, on average "
                f"over {sizes} networks ({min(medians):.2f} to {max(medians):.2f}). The paper has {published:g}."
            )
            found.append(Finding(text, f"{sweeps[0].kind}-ratio{end}"))
    return found


def swept(kind: str, results: list[Result]) -> Sweep:
    """The points of a sweep. Later runs of the same network replace measurements of the same methods."""
    rows: dict[int, dict[Key, Row]] = {}
    for result in sorted((r for r in results if r.task.sweep == kind), key=lambda result: result.task.size):
        at = rows.setdefault(result.task.size, {})
        at.update({key_of(row): row for row in result.values["rows"] if "error" not in row or key_of(row) not in at})
    return Sweep(kind, rows)


def key_of(row: Row) -> Key:
    return row["method"], row["mode"]


def missing(found: Sweep) -> str:
    """Why methods have no numbers at some sizes."""
    failed = [(size, row) for size, rows in found.rows.items() for row in rows.values() if "error" in row]
    notes = [f"{row['label']} at {size}: {row['error']}" for size, row in failed]
    return f" Not measured: {'; '.join(notes)}." if notes else ""


def threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def averages(sweeps: Sequence[Sweep], end: str) -> Table:
    """Means of the medians over sizes, and the published averages."""
    header = ["method", *(f"update, {s.kind}" for s in sweeps), "update, all", "lowest – highest", "published", "whole step, all"]
    body: list[Sequence[str]] = []
    for key in dict.fromkeys(key for found in sweeps for key in found.keys):
        each = [list(found.of(key, "ratio").values()) for found in sweeps]
        whole = [value for found in sweeps for value in found.of(key, "step_ratio").values()]
        together = [value for values in each for value in values]
        medians = [value["median"] for value in together]
        span = f"{min(medians):.2f} – {max(medians):.2f}" if medians else "–"
        cells = [mean(values, len(found.rows)) for values, found in zip(each, sweeps, strict=True)]
        count = sum(len(found.rows) for found in sweeps)
        published = f"{PUBLISHED[key[0]]:g}" if key[0] in PUBLISHED else "–"
        body.append([METHODS[key[0]].label, *cells, mean(together, count), span, published, mean(whole, count)])
    return Table(f"averages{end}", "Time relative to Adam's, mean over network sizes", header, body)


def mean(values: Sequence[Mapping[str, float]], points: int) -> str:
    if not values:
        return "–"
    text = f"{statistics.fmean(value['median'] for value in values):.2f}"
    return text if len(values) == points else f"{text} ({len(values)} of {points} sizes)"


def relative_title(found: Sweep) -> str:
    return f"Time of an update relative to Adam's, by number of {found.kind}"


def plot(found: Sweep, quantity: str, name: str, title: str, label: str) -> Plot:
    caption = f"{SWEEPS[found.kind]}. Points are medians over rounds, with quartiles.{missing(found)}"
    return found.plot(quantity, name, title, label, caption)


def times_table(found: Sweep, end: str) -> Table:
    """Milliseconds at every size, and the slope of log time against log size."""
    header = ["method", *map(str, found.rows), "slope", "slope − Adam's"]
    body: list[Sequence[str]] = [[found.label(key), *found.time_cells(key), *found.slope_cells(key)] for key in found.keys]
    caption = f"{SWEEPS[found.kind]}. “Slope” is that of log time against log size, by least squares.{missing(found)}"
    return Table(f"{found.kind}-time-table{end}", f"Milliseconds per update, by number of {found.kind}", header, body, caption)


def ratios_table(found: Sweep, end: str) -> Table:
    body: list[Sequence[str]] = []
    for key in found.keys:
        points = found.of(key, "ratio")
        body.append([found.label(key), *(spread(points[size]) if size in points else "–" for size in found.rows)])
    header, title = ["method", *map(str, found.rows)], relative_title(found)
    return Table(f"{found.kind}-ratio-table{end}", title, header, body, "Medians and quartiles over rounds, for each size.")


def always(task: Task) -> bool:
    return True


EXPERIMENT = Experiment(
    "cost",
    "The time of an update relative to Adam's (Appendix D).",
    Settings,
    PRESETS,
    Task,
    tasks,
    work,
    run,
    sections,
    alone=always,
    unit="rounds",
    amount=lambda task: task.rounds * task.size * len(task.methods.split(",")),
    examples=("--sweeps outputs --most-outputs 64", "--methods adam,adahesscale,adahessian --rounds 10"),
)
