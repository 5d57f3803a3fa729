"""What the matrix of tasks and optimizers shows: each optimizer at its best step size and at Adam's default, beside Adam."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..lab.plots import Plot, Section, Series, Table
from ..lab.statistics import Summary, summary
from ..lab.store import Result
from ..optimizers import IMAGE_OPTIMIZERS
from ..tasks.registry import PROBLEMS
from ._supervised_figures import comparable, finished, is_finished, styles_of

OF_METHODS = ("optimizer", "step_size", "seed")  # settings that may differ within a comparison
DEFAULT_STEP_SIZE = 1e-3  # Adam's
ERRORS = 2  # standard errors of a difference, from which on an optimizer is ahead of Adam or behind it


class Method:
    """An optimizer's runs on one task.

    Attributes:
        by_size: results of the seeds that all step sizes have, by step size.
        best: the step size with the best mean score on the validation split.
        all_runs: all results, whichever seeds other step sizes have.
    """

    def __init__(self, name: str, results: Sequence[Result], metric: str) -> None:
        self.name, self.metric, self.all_runs = name, metric, results
        by_size: dict[float, list[Result]] = {}
        for result in sorted(results, key=lambda each: (each.task.step_size, each.task.seed)):
            by_size.setdefault(result.task.step_size, []).append(result)
        self.by_size = comparable(by_size)
        self.best = max(self.by_size, key=lambda size: statistics.fmean(self.scores("validation", size)))

    @property
    def label(self) -> str:
        return IMAGE_OPTIMIZERS[self.name].label

    def scores(self, split: str, size: float) -> list[float]:
        """By seed, where more is better: accuracies, 0 for a seed that diverged, or minus the losses, −∞ for such a seed."""
        if self.metric == "accuracy":
            return [result.values.get(f"{split}_accuracy", 0.0) for result in self.by_size[size]]
        return [-result.values.get(f"{split}_loss", math.inf) for result in self.by_size[size]]

    def accuracy(self, size: float) -> Summary | None:
        """On the test split, where a seed that diverged counts as 0; None if there is no run at the step size."""
        results = self.by_size.get(size)
        return summary([result.values.get("test_accuracy", 0.0) for result in results]) if results else None

    def loss(self, size: float) -> Summary | None:
        """On the test split, over the seeds that did not diverge; None if there are none."""
        alive = finished(self.by_size.get(size, []))
        return summary([result.values["test_loss"] for result in alive]) if alive else None


class Comparison:
    """All optimizers on one task; ``label`` is its name, with the settings in which it differs from others of that name."""

    def __init__(self, label: str, results: Sequence[Result]) -> None:
        self.label, self.task = label, results[0].task
        self.problem = PROBLEMS[self.task.problem]
        by_name: dict[str, list[Result]] = {}
        for result in results:
            by_name.setdefault(result.task.optimizer, []).append(result)
        ordered = [name for name in IMAGE_OPTIMIZERS if name in by_name]
        self.methods = {name: Method(name, by_name[name], self.problem.metric) for name in ordered}

    @property
    def adam(self) -> Method | None:
        return self.methods.get("adam")

    def share(self, method: Method) -> float | None:
        """The accuracy at Adam's default step size as a share of tuned Adam's; None if one of the two is unknown."""
        untuned = method.accuracy(DEFAULT_STEP_SIZE)
        tuned = self.adam.accuracy(self.adam.best) if self.adam else None
        return untuned.mean / tuned.mean if untuned and tuned and tuned.mean else None

    def lead(self, method: Method) -> float | None:
        """How many standard errors of the difference a tuned optimizer is ahead of tuned Adam; None without two seeds each."""
        if self.adam is None:
            return None
        own, others = (found.scores("test", found.best) for found in (method, self.adam))
        if min(len(own), len(others)) < 2:
            return None
        has_diverged, adam_has_diverged = -math.inf in own, -math.inf in others  # losses
        if has_diverged or adam_has_diverged:
            return 0.0 if has_diverged and adam_has_diverged else math.inf if adam_has_diverged else -math.inf
        (mean, error), (other_mean, other_error) = summary(own), summary(others)
        difference, deviation = mean - other_mean, math.hypot(error or 0, other_error or 0)
        return difference / deviation if deviation else math.copysign(math.inf, difference) if difference else 0.0

    def cost(self, method: Method) -> float | None:
        """Seconds of a step relative to Adam's, in the median run; None if they ran on other machines, or in another mode."""
        if self.adam is None or conditions(method) != conditions(self.adam):
            return None
        return median_seconds(method) / median_seconds(self.adam)


def conditions(method: Method) -> object:
    """What must be the same for seconds to be compared."""
    facts = [result.facts for result in method.all_runs]
    machines = [machine for each in facts for machine in (each.get("machine", {}), *each.get("earlier_machines", ()))]
    return {tuple(sorted(machine.items())) for machine in machines}, {result.values["mode"] for result in method.all_runs}


def median_seconds(method: Method) -> float:
    return statistics.median([float(result.values["step_seconds"]) for result in method.all_runs])


def sections(results: list[Result]) -> list[Section]:
    """The summary over all tasks, and a section for each."""
    if not results:
        return []
    comparisons = compared(results)
    names = {name: None for comparison in comparisons for name in comparison.methods}
    ordered = [name for name in IMAGE_OPTIMIZERS if name in names]
    by_label = styles_of({IMAGE_OPTIMIZERS[name].label: name for name in ordered})
    styles = {name: by_label[IMAGE_OPTIMIZERS[name].label] for name in ordered}
    text = f"Tasks: {', '.join(comparison.label for comparison in comparisons)}."
    first = Section("All tasks", text, [overall(comparisons, ordered)])
    return [first, *[section(comparison, styles) for comparison in comparisons]]


def compared(results: Sequence[Result]) -> list[Comparison]:
    """One comparison for each combination of settings other than OF_METHODS."""
    groups: dict[tuple[tuple[str, Any], ...], list[Result]] = {}
    for result in results:
        setting = {name: value for name, value in asdict(result.task).items() if name not in OF_METHODS}
        groups.setdefault(tuple(setting.items()), []).append(result)
    comparisons = []
    for pairs, members in groups.items():
        same = [set(others) for others, found in groups.items() if found[0].task.problem == members[0].task.problem]
        own = [pair for pair in pairs if pair not in set.intersection(*same)]
        label = ", ".join([members[0].task.problem, *[f"{name.replace('_', ' ')} {value}" for name, value in own]])
        comparisons.append(Comparison(label, members))
    return comparisons


def section(comparison: Comparison, styles: Mapping[str, tuple[str, bool]]) -> Section:
    task, runs = comparison.task, [result for method in comparison.methods.values() for result in method.all_runs]
    seeds, modes = len({result.task.seed for result in runs}), sorted({result.values["mode"] for result in runs})
    text = (
        f"{comparison.problem.title}: {task.steps} steps with batches of {task.batch}, {task.schedule} step sizes, "
        f"{seeds} seed{'s' * (seeds > 1)}, with the same initial network and batches for every optimizer; on {task.device}, "
        f"how steps ran: {', '.join(modes)}. Tuned: the step size with the best {comparison.problem.metric} on the validation "
        f"split at the end. Untuned: the step size {DEFAULT_STEP_SIZE:g}, Adam's default."
    )
    name = comparison.label.replace(", ", "-").replace(" ", "-")
    title = comparison.problem.title + comparison.label.removeprefix(task.problem)
    return Section(title, text, [table(comparison, f"{name}-optimizers"), by_step_size(comparison, styles, f"{name}-step-sizes")])


def table(comparison: Comparison, name: str) -> Table:
    columns: dict[str, Callable[[Method], str]] = {
        "step size": step_size,
        "seeds": lambda method: str(len(method.by_size[method.best])),
        "test accuracy, %": lambda method: text(method.accuracy(method.best), ".1f", 100),
        "test loss": lambda method: text(method.loss(method.best), ".3g"),
        "untuned: accuracy, %": lambda method: text(method.accuracy(DEFAULT_STEP_SIZE), ".1f", 100),
        "untuned: loss": lambda method: text(method.loss(DEFAULT_STEP_SIZE), ".3g"),
        "untuned / tuned Adam, %": lambda method: number(comparison.share(method), ".1f", 100),
        "diverged": diverged,
        "largest jump": jump,
        "seconds / Adam's": lambda method: number(comparison.cost(method), ".2f"),
    }
    rows: list[Sequence[str]] = [[m.label, *[cell(m) for cell in columns.values()]] for m in comparison.methods.values()]
    caption = (
        "Mean and standard error over seeds. A seed that diverged has accuracy 0, and is left out of the losses. Untuned / tuned "
        "Adam: the ratio of the two accuracies. Diverged: runs whose loss, gradient or curvature was not finite, and at which "
        "step sizes. Largest jump: the largest loss of a batch divided by the first, over all runs. Seconds: of a step, in the "
        "median run, without evaluation, on the same kind of machine."
    )
    return Table(name, f"{comparison.label}: optimizers, tuned and untuned", ["optimizer", *columns], rows, caption)


def step_size(method: Method) -> str:
    sizes = method.by_size
    return f"{method.best:g}" + (" (edge of the grid)" if len(sizes) > 1 and method.best in (min(sizes), max(sizes)) else "")


def diverged(method: Method) -> str:
    by_size = Counter(result.task.step_size for result in method.all_runs if not is_finished(result))
    where = ", ".join(f"{size:g}: {count}" for size, count in sorted(by_size.items()))
    return f"{by_size.total()} of {len(method.all_runs)}" + (f" ({where})" if where else "")


def jump(method: Method) -> str:
    found = [(result.values["worst"], result.task.step_size) for result in method.all_runs if result.values["worst"] is not None]
    return "{:.3g} at {:g}".format(*max(found)) if found else "–"


def by_step_size(comparison: Comparison, styles: Mapping[str, tuple[str, bool]], name: str) -> Plot:
    """Test accuracy by step size, or test loss, where a step size at which all seeds diverged breaks the line."""
    is_loss = comparison.problem.metric == "loss"
    series = []
    for method in comparison.methods.values():
        found = [(method.loss if is_loss else method.accuracy)(size) or Summary(math.nan, None) for size in method.by_size]
        low, high = ([at.mean + sign * (at.error or 0) for at in found] for sign in (-1, 1))
        colour, is_dashed = styles[method.name]
        points = list(method.by_size), [at.mean for at in found]
        series.append(Series(method.label, *points, low, high, colour=colour, dashed=is_dashed))
    what = f"test {comparison.problem.metric}"
    over = "the seeds that did not diverge" if is_loss else "seeds, where one that diverged counts as 0"
    caption = f"After the last step; mean and standard error over {over}."
    return Plot(name, f"{comparison.label}: {what} by step size", series, "step size", what, True, is_loss, caption=caption)


def overall(comparisons: Sequence[Comparison], names: Sequence[str]) -> Table:
    rows: list[Sequence[str]] = []
    for name in names:
        pairs = [(comparison, comparison.methods[name]) for comparison in comparisons if name in comparison.methods]
        shares = [(share, found.label) for found, method in pairs if (share := found.share(method)) is not None]
        leads = [(lead, found.label) for found, method in pairs if (lead := found.lead(method)) is not None]
        runs = [result for _, method in pairs for result in method.all_runs]
        worst, where = min(shares, default=(None, "–"))
        ahead = [label for lead, label in leads if lead > ERRORS]
        behind = [label for lead, label in leads if lead < -ERRORS]
        cells = [listed(ahead), listed(behind)] if leads and name != "adam" else ["–", "–"]
        dead = len(runs) - len(finished(runs))
        label = IMAGE_OPTIMIZERS[name].label
        rows.append([label, number(worst, ".1f", 100), where, *cells, str(len(leads)), f"{dead} of {len(runs)}"])
    header = ["optimizer", "worst untuned, %", "in", "ahead of Adam", "behind Adam", "tasks compared", "diverged"]
    caption = (
        f"Worst untuned: the lowest accuracy at the step size {DEFAULT_STEP_SIZE:g}, in percent of that of tuned Adam, and in "
        f"which task. Ahead, behind: tasks in which the tuned optimizer differs from tuned Adam by more than {ERRORS} standard "
        "errors of the difference, by accuracy, or by loss for texts. Tasks compared: those with at least two seeds."
    )
    return Table("summary", "Optimizers over all tasks", header, rows, caption)


def listed(labels: Sequence[str]) -> str:
    return f"{len(labels)}: {', '.join(labels)}" if labels else "0"


def text(found: Summary | None, form: str, factor: float = 1) -> str:
    return found.text(form, factor) if found is not None else "–"


def number(value: float | None, form: str, factor: float = 1) -> str:
    return f"{factor * value:{form}}" if value is not None else "–"
