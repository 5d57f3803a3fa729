"""The report of ``optimizers``: each optimizer at its best step size and at Adam's default step size, compared with Adam."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ..lab.plots import Finding, Plot, Section, Table, mean_line
from ..lab.statistics import Summary, summary
from ..lab.store import Result
from ..optimizers import IMAGE_OPTIMIZERS
from ..tasks.registry import PROBLEMS
from ._findings import ERRORS, divergence_findings
from ._supervised_figures import comparable, finished, is_finished, style_of

OF_METHODS = ("optimizer", "step_size", "seed")  # settings that may differ within a comparison
DEFAULT_STEP_SIZE = 1e-3  # Adam's


class Method:
    """An optimizer's runs on one task.

    Attributes:
        by_size: results of the seeds that all step sizes have, by step size.
        best: the step size with the best mean score on the validation split.
        all_runs: all results, including seeds that other step sizes lack.
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
        """Scores by seed; more is better: accuracies (0 for a diverged seed), or negative losses (−∞ for such a seed)."""
        if self.metric == "accuracy":
            return [result.values.get(f"{split}_accuracy", 0.0) for result in self.by_size[size]]
        return [-result.values.get(f"{split}_loss", math.inf) for result in self.by_size[size]]

    def accuracy(self, size: float) -> Summary | None:
        """Accuracy on the test split. A diverged seed counts as 0. None if there is no run at this step size."""
        results = self.by_size.get(size)
        return summary([result.values.get("test_accuracy", 0.0) for result in results]) if results else None

    def loss(self, size: float) -> Summary | None:
        """Loss on the test split, over the seeds that did not diverge; None if there are none."""
        alive = finished(self.by_size.get(size, []))
        return summary([result.values["test_loss"] for result in alive]) if alive else None


class Comparison:
    """All optimizers on one task. ``label`` is the task's name, with the settings that distinguish tasks of the same name."""

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
        """The accuracy at Adam's default step size, relative to that of tuned Adam; None if one of the two is unknown."""
        untuned = method.accuracy(DEFAULT_STEP_SIZE)
        tuned = self.adam.accuracy(self.adam.best) if self.adam else None
        return untuned.mean / tuned.mean if untuned and tuned and tuned.mean else None

    def lead(self, method: Method) -> float | None:
        """The lead of a tuned optimizer over tuned Adam, in standard errors of the difference; None without two seeds each."""
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
        """The time of a step relative to Adam's, in the median run; None if machine or mode differ."""
        if self.adam is None or conditions(method) != conditions(self.adam):
            return None
        return median_seconds(method) / median_seconds(self.adam)


def conditions(method: Method) -> object:
    """The conditions that must be equal to compare times."""
    facts = [result.facts for result in method.all_runs]
    machines = [machine for each in facts for machine in (each.get("machine", {}), *each.get("earlier_machines", ()))]
    return {tuple(sorted(machine.items())) for machine in machines}, {result.values["mode"] for result in method.all_runs}


def median_seconds(method: Method) -> float:
    return statistics.median([float(result.values["step_seconds"]) for result in method.all_runs])


def sections(results: list[Result]) -> list[Section]:
    """A summary over all tasks, and a section for each task."""
    if not results:
        return []
    comparisons = compared(results)
    names = {name: None for comparison in comparisons for name in comparison.methods}
    ordered = [name for name in IMAGE_OPTIMIZERS if name in names]
    text = f"Tasks: {', '.join(comparison.label for comparison in comparisons)}."
    first = Section("All tasks", text, [overall(comparisons, ordered)], findings(comparisons, ordered))
    return [first, *map(section, comparisons)]


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


def section(comparison: Comparison) -> Section:
    task, runs = comparison.task, [result for method in comparison.methods.values() for result in method.all_runs]
    seeds, modes = len({result.task.seed for result in runs}), sorted({result.values["mode"] for result in runs})
    text = (
        f"{comparison.problem.title}: {task.steps} steps with batches of {task.batch} and {task.schedule} step sizes, on "
        f"{task.device} in the mode {', '.join(modes)}. There {'are' if seeds > 1 else 'is'} {seeds} seed{'s' * (seeds > 1)}. "
        "With the same seed, all optimizers have the same initial network and batches. A tuned optimizer has the step size with "
        f"the best {comparison.problem.metric} on the validation split at the end. An untuned one has the step size "
        f"{DEFAULT_STEP_SIZE:g}, Adam's default."
    )
    name = file_name(comparison)
    title = comparison.problem.title + comparison.label.removeprefix(task.problem)
    return Section(title, text, [table(comparison, f"{name}-optimizers"), by_step_size(comparison, f"{name}-step-sizes")])


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
        "Means and standard errors are over seeds. A seed that diverged has accuracy 0 and is left out of the losses. “Untuned / "
        "tuned Adam” is the ratio of the two accuracies. A run diverged if its loss, gradient or curvature was not finite. "
        "“Largest jump” is the largest loss of a batch divided by the first, over all runs. “Seconds” are those of a step in the "
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


def by_step_size(comparison: Comparison, name: str) -> Plot:
    """Test accuracy or test loss by step size. For losses, the line has a gap where all seeds diverged."""
    is_loss = comparison.problem.metric == "loss"
    series = []
    for method in comparison.methods.values():
        found = [(method.loss if is_loss else method.accuracy)(size) or Summary(math.nan, None) for size in method.by_size]
        points = dict(zip(method.by_size, found, strict=True))
        series.append(mean_line(method.label, points, *style_of(method.label, method.name)))
    what = f"test {comparison.problem.metric}"
    diverged_ones = "are left out" if is_loss else "count as 0"
    caption = (
        f"Values after the last step. Lines are means over seeds, bands are standard errors. Runs that diverged {diverged_ones}."
    )
    title, worse = f"{comparison.label}: {what} by step size", "up" if is_loss else ""
    return Plot(name, title, series, "step size", what, True, is_loss, caption=caption, worse=worse)


def file_name(comparison: Comparison) -> str:
    return comparison.label.replace(", ", "-").replace(" ", "-")


class Record:
    """The results of an optimizer on all tasks for which it has runs.

    Attributes:
        worst, where: the lowest accuracy at Adam's default step size, relative to tuned Adam, and its task; None if unknown.
        tasks: the number of tasks with at least two seeds of this optimizer and of Adam.
        ahead, behind: the tasks in which it is, after tuning, better or worse than tuned Adam.
    """

    def __init__(self, comparisons: Sequence[Comparison], name: str) -> None:
        pairs = [(comparison, comparison.methods[name]) for comparison in comparisons if name in comparison.methods]
        shares = [(share, found.label) for found, method in pairs if (share := found.share(method)) is not None]
        leads = [(lead, found.label) for found, method in pairs if (lead := found.lead(method)) is not None]
        runs = [result for _, method in pairs for result in method.all_runs]
        self.name, self.label = name, IMAGE_OPTIMIZERS[name].label
        self.worst: float | None
        self.worst, self.where = min(shares, default=(None, "–"))
        self.untuned, self.tasks = len(shares), len(leads)
        self.ahead = [label for lead, label in leads if lead > ERRORS]
        self.behind = [label for lead, label in leads if lead < -ERRORS]
        self.dead, self.runs = len(runs) - len(finished(runs)), len(runs)


def findings(comparisons: Sequence[Comparison], names: Sequence[str]) -> list[Finding]:
    """Which optimizers are better or worse than Adam if all are tuned, and which come closest to tuned Adam without tuning."""
    records = [Record(comparisons, name) for name in names]
    found, compared_ones = [], [record for record in records if record.tasks and record.name != "adam"]
    figure = f"{file_name(comparisons[0])}-step-sizes"
    if compared_ones:
        first = max(compared_ones, key=lambda record: len(record.ahead) - len(record.behind))
        last = min(compared_ones, key=lambda record: len(record.ahead) - len(record.behind))
        texts = [
            f"{record.label} is better than Adam in {len(record.ahead)} of {record.tasks} task{'s' * (record.tasks > 1)} and "
            f"worse in {len(record.behind)}"
            for record in dict.fromkeys((first, last))
        ]
        text = f"Tuned, {'; '.join(texts)}, by more than {ERRORS} standard errors of the difference."
        if not any(record.ahead or record.behind for record in compared_ones):
            most = max(record.tasks for record in compared_ones)
            tasks = f"any of the {most} tasks" if most > 1 else "the task"
            text = f"Tuned, no optimizer differs from Adam by more than {ERRORS} standard errors in {tasks}."
        found.append(Finding(text, figure))
    shares = {record.label: record for record in records if record.worst is not None}
    adam = shares.pop(IMAGE_OPTIMIZERS["adam"].label, None)
    if adam is not None and shares:
        best = max(shares.values(), key=lambda record: record.worst or 0.0)
        tasks = f"in every one of {best.untuned} tasks" if best.untuned > 1 else f"in {best.where}"
        text = (
            f"At the step size {DEFAULT_STEP_SIZE:g}, without tuning, {best.label} has at least "
            f"{number(best.worst, '.1f', 100)} % of the accuracy of tuned Adam {tasks}; Adam itself has "
            f"{number(adam.worst, '.1f', 100)} % or more."
        )
        found.append(Finding(text, figure))
    return [*found, *divergence_findings({record.label: (record.dead, record.runs) for record in records})]


def overall(comparisons: Sequence[Comparison], names: Sequence[str]) -> Table:
    rows: list[Sequence[str]] = []
    for found in [Record(comparisons, name) for name in names]:
        cells = [counted(found.ahead), counted(found.behind)] if found.tasks and found.name != "adam" else ["–", "–"]
        worst = number(found.worst, ".1f", 100)
        rows.append([found.label, worst, found.where, *cells, str(found.tasks), f"{found.dead} of {found.runs}"])
    header = ["optimizer", "worst untuned, %", "in", "ahead of Adam", "behind Adam", "tasks compared", "diverged"]
    caption = (
        f"“Worst untuned” is the lowest accuracy at the step size {DEFAULT_STEP_SIZE:g}, in percent of tuned Adam's, and “in” "
        "names its task. “Ahead” and “behind” list the tasks in which the tuned optimizer differs from tuned Adam by more "
        f"than {ERRORS} standard errors of the difference, by accuracy for images and by loss for texts. Tasks are compared "
        "if they have two seeds."
    )
    return Table("summary", "Optimizers over all tasks", header, rows, caption)


def counted(labels: Sequence[str]) -> str:
    return f"{len(labels)}: {', '.join(labels)}" if labels else "0"


def text(found: Summary | None, form: str, factor: float = 1) -> str:
    return found.text(form, factor) if found is not None else "–"


def number(value: float | None, form: str, factor: float = 1) -> str:
    return f"{factor * value:{form}}" if value is not None else "–"
