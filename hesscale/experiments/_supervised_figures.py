"""What trained networks show: each optimizer at its best step size by epochs and seconds, and what other step sizes give."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..lab.plots import Heat, Plot, Section, Series, Table
from ..lab.store import Result
from ..vision.problems import PROBLEMS
from .training import Summary, comparable, summary

OF_METHODS = ("optimizer", "step_size", "seed", "times", "trust_radius")  # what may differ within a section
SPLITS = ("test", "validation", "train")


@dataclass
class Trained:
    """An optimizer's runs by step size."""

    label: str
    by_size: dict[float, list[Result]]

    def __post_init__(self) -> None:
        self.by_size = comparable(dict(sorted(self.by_size.items())))

    def accuracy(self, size: float) -> float:
        """On the validation split at the end, mean over seeds; 0 for one that diverged."""
        return statistics.fmean(result.values.get("validation_accuracy", 0.0) for result in self.by_size[size])

    @property
    def best(self) -> float:
        return max(self.by_size, key=self.accuracy)

    @property
    def runs(self) -> list[Result]:
        """At the best step size, without those that diverged."""
        return finished(self.by_size[self.best])

    def final(self, value: str) -> Summary:
        return summary([result.values[value] for result in self.runs])

    def curve(self, metric: str) -> dict[int, Summary]:
        """Over seeds, by epoch."""
        columns = [dict(result.metrics[metric]) for result in self.runs]
        return {epoch: summary([column[epoch] for column in columns]) for epoch in (columns[0] if columns else ())}


def finished(results: list[Result]) -> list[Result]:
    return [result for result in results if result.values["diverged_at"] is None]


def sections(results: list[Result]) -> list[Section]:
    """One for each task, and for whatever else differs but optimizers, step sizes and seeds."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        setting = {name: value for name, value in asdict(result.task).items() if name not in OF_METHODS}
        groups.setdefault(tuple(setting.items()), []).append(result)
    return [section(found, f"-{k}" if k > 1 else "") for k, found in enumerate(groups.values(), start=1)]


def section(results: list[Result], end: str) -> Section:
    """``end`` tells the files of several sections apart."""
    by_label: dict[str, dict[float, list[Result]]] = {}
    for result in results:
        by_label.setdefault(result.task.label, {}).setdefault(result.task.step_size, []).append(result)
    trained = [Trained(label, by_size) for label, by_size in by_label.items()]
    task = results[0].task
    items: list[Plot | Heat | Table] = [table(trained, f"optimizers{end}")]
    for what, split, against in itertools.product(("accuracy", "loss"), SPLITS, ("seconds", "epochs")):
        items.append(curves(trained, split, what, against, end))
    if any(len(found.by_size) > 1 for found in trained):
        items += [sensitivity(trained, "test_loss", end), sensitivity(trained, "test_accuracy", end)]
    title = f"{PROBLEMS[task.problem].title} on {task.dataset}, {task.epochs} epochs"
    return Section(title, describe(results), items)


def describe(results: list[Result]) -> str:
    task = results[0].task
    seeds = len({result.task.seed for result in results})
    together = sorted({result.values["together"] for result in results})
    changes = "shifted, flipped and recoloured" if task.augment else "as they are"
    machines = sorted({str(result.facts.get("machine", {}).get("gpu") or "") for result in results} - {""})
    where = f"{', '.join(machines) or task.device}, {task.precision}, {task.backend}"
    longer = sorted({result.task.times for result in results} - {1})
    parts = [
        f"Task {task.problem}, activation {task.activation}, padding {task.padding}, L2 {task.l2:g}, batches of {task.batch}, "
        f"{task.epochs} epochs, images for training {changes}; {seeds} seeds, each with the same initial network, batches and "
        "images for every optimizer.",
        *[f"SGD trains {times} times as long." for times in longer],
        "Shown is the step size with the highest accuracy on the validation split at the end, where a seed that diverged counts "
        "as 0, with mean and standard error over the seeds that did not.",
        f"Seconds are those of training alone, without evaluation, compilation and checkpoints ({where}).",
    ]
    if together != [1]:
        parts.append(f"Networks trained {' or '.join(map(str, together))} at a time, of whose seconds each has an equal share.")
    return " ".join(parts)


def curves(trained: list[Trained], split: str, what: str, against: str, end: str) -> Plot:
    series = []
    for found in trained:
        if points := found.curve(f"{split}_{what}"):
            x = [at.mean for at in found.curve("seconds").values()] if against == "seconds" else list(points)
            series.append(Series(found.label, x, *band(list(points.values()))))
    caption = "At the best step size; mean and standard error over seeds."
    title = f"{split.capitalize()} {what} by {against}"
    return Plot(
        f"{split}-{what}-{against}{end}", title, series, against, f"{split} {what}", log_y=what == "loss", caption=caption
    )


def band(points: Sequence[Summary]) -> tuple[list[float], list[float], list[float]]:
    """Means, and a standard error below and above."""
    low, high = ([at.mean + sign * (at.error or 0) for at in points] for sign in (-1, 1))
    return [at.mean for at in points], low, high


def sensitivity(trained: list[Trained], value: str, end: str) -> Plot:
    series = []
    for found in trained:
        done = {size: runs for size, results in found.by_size.items() if (runs := finished(results))}
        points = [summary([result.values[value] for result in runs]) for runs in done.values()]
        series.append(Series(found.label, list(done), *band(points)))
    name, caption = value.replace("_", " "), "At the end; mean and standard error over the seeds that did not diverge."
    title = f"{name.capitalize()} by step size"
    is_loss = value == "test_loss"
    return Plot(f"step-sizes-{name.replace(' ', '-')}{end}", title, series, "step size", name, True, is_loss, caption=caption)


def table(trained: list[Trained], name: str) -> Table:
    adam = next((pace_of(found.runs) for found in trained if found.label == "Adam" and found.runs), math.nan)
    columns: dict[str, Callable[[Trained], str]] = {
        "step size": lambda found: f"{found.best:g}{edge(found)}",
        **{f"{split} accuracy, %": percentage(split) for split in SPLITS},
        "test loss": lambda found: found.final("test_loss").text(".3g"),
        "seconds": lambda found: found.final("seconds").text(".3g"),
        "images/s": lambda found: f"{pace_of(found.runs):,.0f}",
        "relative to Adam": lambda found: f"{pace_of(found.runs) / adam:.2f}" if math.isfinite(adam) else "–",
        "outside steps, %": lambda found: found.final("outside_steps").text(".1f", 100),
    }
    rows: list[Sequence[str]] = []
    for found in trained:
        filled = [cell(found) for cell in columns.values()] if found.runs else ["none", *["–"] * (len(columns) - 1)]
        rows.append([found.label, *filled, diverged(found)])
    caption = (
        "Relative to Adam: images a second. Outside steps: the share of the seconds that went into making batches. "
        "Diverged: how many seeds, by step size."
    )
    return Table(name, "Optimizers at their best step sizes", ["optimizer", *columns, "diverged"], rows, caption)


def percentage(split: str) -> Callable[[Trained], str]:
    return lambda found: found.final(f"{split}_accuracy").text(".1f", 100)


def pace_of(runs: list[Result]) -> float:
    return statistics.fmean(result.values["images_per_second"] for result in runs)


def edge(found: Trained) -> str:
    sizes = found.by_size
    return " (edge of the grid)" if len(sizes) > 1 and found.best in (min(sizes), max(sizes)) else ""


def diverged(found: Trained) -> str:
    counts = {size: len(results) - len(finished(results)) for size, results in found.by_size.items()}
    return ", ".join(f"{size:g}: {count} of {len(found.by_size[size])}" for size, count in counts.items() if count) or "none"
