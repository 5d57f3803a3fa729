"""The report of ``supervised``: each optimizer at its best step size, by epochs and by seconds, and results by step size."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..lab.compact import compact
from ..lab.plots import Finding, Heat, Plot, Section, Table, mean_line
from ..lab.statistics import Summary, summary
from ..lab.store import Result
from ..optimizers import IMAGE_OPTIMIZERS
from ..vision.problems import PROBLEMS
from ._findings import divergence_findings, highest, listed

OF_METHODS = ("optimizer", "step_size", "seed", "times", "trust_radius")  # settings that may differ within a section
IN_TITLE = ("problem", "dataset", "epochs")
SPLITS = ("test", "validation", "train")
CLOSE = 0.02  # accuracies that differ by less are close


class Trained:
    """An optimizer's runs by step size.

    Attributes:
        best: the step size with the highest accuracy on the validation split, over seeds that all step sizes have.
        by_size: the results of these seeds, and of all seeds at the best step size.
        style: the colour of its lines, and whether they are dashed.
    """

    def __init__(self, label: str, by_size: Mapping[float, list[Result]], style: tuple[str, bool]) -> None:
        self.label, self.by_size, self.style = label, comparable(dict(sorted(by_size.items()))), style
        self.best = max(self.by_size, key=self.accuracy)
        self.by_size[self.best] = by_size[self.best]

    def accuracy(self, size: float) -> float:
        """The final accuracy on the validation split, averaged over seeds. A seed that diverged counts as 0."""
        return statistics.fmean(result.values.get("validation_accuracy", 0.0) for result in self.by_size[size])

    @property
    def runs(self) -> list[Result]:
        """The runs at the best step size, without those that diverged."""
        return finished(self.by_size[self.best])

    def final(self, value: str) -> Summary:
        return summary([result.values[value] for result in self.runs])

    def curve(self, metric: str) -> dict[int, Summary]:
        """Means over seeds, by epoch."""
        columns = [dict(result.metrics[metric]) for result in self.runs]
        return {epoch: summary([column[epoch] for column in columns]) for epoch in (columns[0] if columns else ())}


def finished(results: list[Result]) -> list[Result]:
    return [result for result in results if is_finished(result)]


def is_finished(result: Result) -> bool:
    """Whether a run did not diverge."""
    return result.values["diverged_at"] is None


def comparable(by_size: Mapping[float, list[Result]]) -> dict[float, list[Result]]:
    """The results of seeds that most step sizes have, at the step sizes that have all of them. Some runs may be missing."""
    seeds = {size: {result.task.seed for result in results} for size, results in by_size.items()}
    counts = Counter(itertools.chain.from_iterable(seeds.values()))
    shared = {seed for seed, count in counts.items() if count == max(counts.values())}
    if not any(shared <= own for own in seeds.values()):
        shared = max(seeds.values(), key=len)
    kept = {size: results for size, results in by_size.items() if shared <= seeds[size]}
    return {size: [result for result in results if result.task.seed in shared] for size, results in kept.items()}


def sections(results: list[Result]) -> list[Section]:
    """A section for each combination of settings other than OF_METHODS."""
    groups: dict[tuple[tuple[str, Any], ...], list[Result]] = {}
    for result in results:
        setting = {name: value for name, value in asdict(result.task).items() if name not in OF_METHODS}
        groups.setdefault(tuple(setting.items()), []).append(result)
    shared = set.intersection(*[set(setting) for setting in groups]) if groups else set()
    return [section(found, [pair for pair in setting if pair not in shared]) for setting, found in groups.items()]


def section(results: list[Result], own: Sequence[tuple[str, Any]]) -> Section:
    """A section. ``own`` are the settings in which it differs from other sections."""
    by_label: dict[str, dict[float, list[Result]]] = {}
    for result in sorted(results, key=order_of):
        by_label.setdefault(result.task.label, {}).setdefault(result.task.step_size, []).append(result)
    trained = [
        Trained(label, by_size, style_of(label, next(iter(by_size.values()))[0].task.optimizer))
        for label, by_size in by_label.items()
    ]
    task = results[0].task
    end = "".join(f"-{name}-{value}" for name, value in own)
    items: list[Plot | Heat | Table] = [accuracies(trained, f"optimizers{end}"), speeds(trained, f"speed{end}")]
    for what, split, against in itertools.product(("accuracy", "loss"), SPLITS, ("epochs", "seconds")):
        items.append(curves(trained, split, what, against, end))
    if any(len(found.by_size) > 1 for found in trained):
        items += [sensitivity(trained, "test_accuracy", end), sensitivity(trained, "test_loss", end)]
    others = "".join(f", {name.replace('_', ' ')} {value}" for name, value in own if name not in IN_TITLE)
    title = f"{PROBLEMS[task.problem].title} on {task.dataset}, {task.epochs} epochs{others}"
    return Section(title, describe(results), items, findings(trained, title.split(",")[0], end))


def order_of(result: Result) -> tuple[float, ...]:
    """A sort key: optimizers in the order of the registry, and the runs of each by trust radius, length and seed."""
    task = result.task
    number = list(IMAGE_OPTIMIZERS).index(IMAGE_OPTIMIZERS[task.optimizer].name)
    return number, task.trust_radius, task.times, task.seed


def describe(results: list[Result]) -> str:
    task = results[0].task
    seeds = len({result.task.seed for result in results})
    together = sorted({result.values["together"] for result in results})
    changes = "shifted, flipped and changed in colour" if task.augment else "not augmented"
    machines = sorted({str(result.facts.get("machine", {}).get("gpu") or "") for result in results} - {""})
    where = f"{', '.join(machines) or task.device}, {task.precision}; steps ran in this mode: {', '.join(modes(results))}"
    parts = [
        f"The task is {task.problem}, with activation {task.activation}, padding {task.padding}, an L2 penalty of {task.l2:g}, "
        f"batches of {task.batch} and {task.epochs} epochs. Training images are {changes}. There {'are' if seeds > 1 else 'is'} "
        f"{seeds} seed{'s' * (seeds > 1)}. With the same seed, all optimizers have the same initial network, batches and images.",
        "Each optimizer is shown at the step size with the highest final accuracy on the validation split, where seeds that "
        "diverged count as 0. Means and standard errors are over the seeds that did not diverge. A seed diverged if its loss was "
        "not finite, or if more than half of the steps of an epoch were skipped because gradients were not finite.",
        f"Seconds are those of training, without evaluation, compilation and checkpoints ({where}).",
    ]
    if task.device == "cpu":
        parts.append("They are CPU seconds, summed over cores.")
    if together != [1]:
        parts.append(
            f"{' or '.join(map(str, together))} networks trained together, and each counts an equal share of the seconds."
        )
    return " ".join(parts)


def curves(trained: list[Trained], split: str, what: str, against: str, end: str) -> Plot:
    series = []
    for found in trained:
        if points := found.curve(f"{split}_{what}"):
            x = [at.mean for at in found.curve("seconds").values()] if against == "seconds" else list(points)
            series.append(mean_line(found.label, dict(zip(x, points.values(), strict=True)), *found.style))
    caption = "Each optimizer is shown at its best step size. Lines are means over seeds, bands are standard errors."
    title = f"{split.capitalize()} {what} by {against}"
    return Plot(
        f"{split}-{what}-{against}{end}",
        title,
        series,
        against,
        f"{split} {what}",
        log_y=what == "loss",
        caption=caption,
        worse="up" if what == "loss" else "down",
        group=f"{what}{end}",
        view=(split, against),
    )


def style_of(label: str, optimizer: str) -> tuple[str, bool]:
    """The colour of an optimizer's lines, and whether they are dashed, as for variants."""
    spec = IMAGE_OPTIMIZERS[optimizer]
    return spec.colour, spec.is_variant or label != spec.label


def sensitivity(trained: list[Trained], value: str, end: str) -> Plot:
    """Final values by step size. A network that diverged has accuracy 0, and is left out of losses."""
    is_loss = value == "test_loss"
    series = []
    for found in trained:
        columns = [finished(results) if is_loss else results for results in found.by_size.values()]
        done = [[result.values[value] if is_finished(result) else 0.0 for result in results] for results in columns]
        points = [summary(values) if values else Summary(math.nan, None) for values in done]
        series.append(mean_line(found.label, dict(zip(found.by_size, points, strict=True)), *found.style))
    diverged_ones = "are left out" if is_loss else "count as 0"
    caption = (
        "Values at the end of training. Lines are means over seeds, bands are standard errors. Runs that diverged "
        f"{diverged_ones}."
    )
    name = value.replace("_", " ")
    title = f"{name.capitalize()} by step size"
    return Plot(
        f"step-sizes-{name.replace(' ', '-')}{end}",
        title,
        series,
        "step size",
        name,
        True,
        is_loss,
        caption=caption,
        worse="up" if is_loss else "",
        group=f"step-sizes{end}",
        view=(name.removeprefix("test "),),
    )


def findings(trained: list[Trained], where: str, end: str) -> list[Finding]:
    """Which optimizer is best, how sensitive optimizers are to the step size, which ones diverge, and how fast they are."""
    finals = {found.label: found.final("test_accuracy") for found in trained if found.runs}
    sizes = {found.label: found.best for found in trained}
    best = highest(
        "test accuracy",
        finals,
        lambda label, at: f"{at.text('.1f', 100)} % at step size {compact(sizes[label])}",
        f"test-accuracy-epochs{end}",
        f"{where}: ",
    )
    counts = {
        found.label: (len(results) - len(finished(results)), len(results))
        for found in trained
        if (results := [result for of_size in found.by_size.values() for result in of_size])
    }
    return [*best, *insensitive(trained, end), *divergence_findings(counts), *slower(trained)]


def insensitive(trained: list[Trained], end: str) -> list[Finding]:
    """The optimizer that is close to its best accuracy at the most step sizes, compared with Adam; none if Adam has as many."""
    near: dict[str, tuple[int, int]] = {}
    for found in trained:
        means = [
            statistics.fmean(result.values["test_accuracy"] if is_finished(result) else 0.0 for result in results)
            for results in found.by_size.values()
        ]
        near[found.label] = sum(mean >= max(means) - CLOSE for mean in means), len(means)
    adam = near.pop("Adam", None)
    others = {label: counts for label, counts in near.items() if adam is not None and counts[1] == adam[1] > 2}
    if adam is None or not others:
        return []
    most = max(others, key=lambda label: others[label][0])
    count, of = others[most]
    if count <= adam[0]:
        return []
    text = (
        f"{most} comes within {100 * CLOSE:g} percentage points of its best test accuracy at {count} of {of} step sizes, "
        f"Adam at {adam[0]}."
    )
    return [Finding(text, f"step-sizes-test-accuracy{end}")]


def slower(trained: list[Trained]) -> list[Finding]:
    """The speed of the paper's optimizers and of AdaHessian relative to Adam, if they ran under the same conditions."""
    adam = next((found for found in trained if found.label == "Adam" and found.runs), None)
    others = [found for found in trained if found.label in ("AdaHesScale", "AdaHesScaleGN", "AdaHessian") and found.runs]
    if adam is None:
        return []
    paces = [
        f"{found.label} {pace_of(found.runs) / pace_of(adam.runs):.2f}"
        for found in others
        if comparable_settings(found) == comparable_settings(adam)
    ]
    return [Finding(f"Images per second relative to Adam: {listed(paces)}.")] if paces else []


Columns = dict[str, Callable[[Trained], str]]


def accuracies(trained: list[Trained], name: str) -> Table:
    columns: Columns = {
        "step size": lambda found: f"{found.best:g}{edge(found)}",
        "seeds": lambda found: str(len(found.by_size[found.best])),
        **{f"{split} accuracy, %": percentage(split) for split in SPLITS},
        "test loss": lambda found: found.final("test_loss").text(".3g"),
    }
    runs, notes = [result.values for found in trained for result in found.runs], []
    if any("scaled_share" in values for values in runs):
        columns["shortened, %"] = noted("scaled_share", ".3g", 100)
        notes.append("“Shortened” is the percentage of steps that the trust region made shorter.")
    if any(values.get("nonfinite_steps") for values in runs):
        columns["left out"] = noted("nonfinite_steps", ".3g")
        notes.append("“Left out” counts the steps that were skipped because gradients or curvature were not finite.")
    caption = " ".join([*notes, "“Diverged” counts seeds by step size. Accuracies are means over the other seeds."])
    rows: list[Sequence[str]] = [[*row, diverged(found)] for row, found in zip(rows_of(trained, columns), trained, strict=True)]
    return Table(name, "Optimizers at their best step sizes", ["optimizer", *columns, "diverged"], rows, caption)


def speeds(trained: list[Trained], name: str) -> Table:
    adam = next((found for found in trained if found.label == "Adam" and found.runs), None)

    def ratio(found: Trained) -> str:
        if adam is None or comparable_settings(found) != comparable_settings(adam):
            return "–"
        return f"{pace_of(found.runs) / pace_of(adam.runs):.2f}"

    columns: Columns = {
        "networks at once": at_once,
        "seconds": lambda found: f"{found.final('seconds').mean:.3g}",
        "images/s": lambda found: f"{pace_of(found.runs):,.0f}",
        "relative to Adam": ratio,
        "outside steps, %": lambda found: f"{100 * found.final('outside_steps').mean:.1f}",
    }
    if len(modes(result for found in trained for result in found.runs)) > 1:
        columns["steps"] = lambda found: ", ".join(modes(found.runs))
    caption = (
        "Images per second are those of all networks that train together, in the median epoch. They are compared with Adam's "
        "only if the same number of networks trained together, with the same commit on the same kind of machine. “Outside "
        "steps” is the percentage of the seconds that is spent on making batches."
    )
    return Table(name, "Speed of training", ["optimizer", *columns], rows_of(trained, columns), caption)


def rows_of(trained: list[Trained], columns: Columns) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = []
    for found in trained:
        rows.append([found.label, *([cell(found) for cell in columns.values()] if found.runs else ["–"] * len(columns))])
    return rows


def percentage(split: str) -> Callable[[Trained], str]:
    def text(found: Trained) -> str:
        alive, asked = len(found.runs), len(found.by_size[found.best])
        return found.final(f"{split}_accuracy").text(".1f", 100) + (f" ({alive} of {asked} seeds)" if alive < asked else "")

    return text


def noted(value: str, form: str, factor: float = 1) -> Callable[[Trained], str]:
    """A column for a value that only some optimizers record."""

    def text(found: Trained) -> str:
        values = [result.values[value] for result in found.runs if value in result.values]
        return summary(values).text(form, factor) if values else "–"

    return text


def comparable_settings(found: Trained) -> object:
    """The conditions that must be equal to compare speeds."""
    facts = [result.facts for result in found.runs]
    machines = [machine for each in facts for machine in (each.get("machine", {}), *each.get("earlier_machines", ()))]
    commits = {commit for each in facts for commit in each.get("commits", ())}
    return at_once(found), commits, {tuple(sorted(machine.items())) for machine in machines}


def modes(results: Iterable[Result]) -> list[str]:
    """The modes in which steps ran. :func:`hesscale.compile_step` may have used a slower mode than the settings chose."""
    return sorted({result.values.get("mode", "not recorded") for result in results})


def at_once(found: Trained) -> str:
    return " or ".join(map(str, sorted({result.values["together"] for result in found.runs})))


def pace_of(runs: list[Result]) -> float:
    return statistics.fmean(result.values["images_per_second"] for result in runs)


def edge(found: Trained) -> str:
    sizes = found.by_size
    return " (edge of the grid)" if len(sizes) > 1 and found.best in (min(sizes), max(sizes)) else ""


def diverged(found: Trained) -> str:
    counts = {size: (len(results) - len(finished(results)), len(results)) for size, results in found.by_size.items()}
    return ", ".join(f"{size:g}: {count} of {asked}" for size, (count, asked) in counts.items() if count) or "none"
