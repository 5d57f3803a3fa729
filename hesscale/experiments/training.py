"""How optimizers learn: a tanh network on images, each optimizer at its best step size, by steps and by seconds."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..bench.command import choose
from ..errors import NonFiniteError
from ..lab.data import names
from ..lab.experiment import Experiment, option
from ..lab.plots import Heat, Plot, Section, Series, Table
from ..lab.store import Result, Run
from ._learning import OPTIMIZERS, Splits, batches, measure, network, splits, take_step

TARGETS = (0.3, 0.1)  # training losses whose first step is reported
MOST_MEASURED = 2000  # images that losses along the way are taken over
CHECKPOINT_SECONDS = 3.0


@dataclass(frozen=True)
class Settings:
    dataset: str = option("digits", f"one of {', '.join(names())}")
    optimizers: str = option("adahesscale,adahesscale-gn,adam,adahessian", f"separated by commas: {', '.join(OPTIMIZERS)}")
    step_sizes: str = option("0.001,0.003,0.01,0.03,0.1,0.3,1", "to choose from by the loss on a validation split")
    seeds: int = option(2, "of initial network and batches, the same for every optimizer")
    steps: int = option(300, "of each run")
    batch: int = option(64, "images in a batch")
    width: int = option(32, "of hidden layers")
    layers: int = option(2, "hidden, of tanh")
    measure_every: int = option(10, "steps")


@dataclass(frozen=True)
class Task:
    """One network trained."""

    dataset: str
    optimizer: str
    step_size: float
    seed: int
    steps: int
    batch: int
    width: int
    layers: int
    measure_every: int


PRESETS = {
    "smoke": Settings(step_sizes="0.003,0.01", seeds=1, steps=30),
    "small": Settings(),
    "paper": Settings(  # which has no such figure: all optimizers, at length
        optimizers=",".join(OPTIMIZERS), step_sizes="1e-5,3e-5,1e-4,3e-4,0.001,0.003,0.01,0.03,0.1,0.3,1", seeds=10
    ),
}


def tasks(settings: Settings) -> list[Task]:
    if settings.dataset not in names():
        raise ValueError(f"no data set is called {settings.dataset!r}; there are {', '.join(names())}")
    kinds = choose(settings.optimizers, {name: name for name in OPTIMIZERS}, "optimizer")
    try:
        sizes = [float(size) for size in settings.step_sizes.split(",")]
    except ValueError:
        raise ValueError(f"step_sizes are numbers separated by commas, not {settings.step_sizes!r}") from None
    shared = {name: getattr(settings, name) for name in ("steps", "batch", "width", "layers", "measure_every")}
    if min(settings.seeds, *shared.values()) < 1 or not all(0 < size < math.inf for size in sizes):
        raise ValueError("seeds, steps, batch, width, layers, measure_every and step sizes must be positive")
    cells = itertools.product(range(settings.seeds), kinds, dict.fromkeys(sizes))
    return [Task(settings.dataset, kind, size, seed, **shared) for seed, kind, size in cells]


def work(settings: Settings) -> str:
    asked = tasks(settings)
    kinds, sizes = len({task.optimizer for task in asked}), len({task.step_size for task in asked})
    return f"{kinds} optimizers, {sizes} step sizes, {settings.seeds} seeds, {settings.steps} steps on {settings.dataset}"


def run(task: Task, run: Run, data: Path | None) -> Mapping[str, Any]:
    """Train; a loss or diagonal that is not finite ends the run as diverged."""
    on = splits(task.dataset, data)
    model = network_of(task, on)
    optimizer, draws = optimizer_of(task, model)
    done, seconds = 0, 0.0

    def log() -> bool:
        """Whether the loss is still finite."""
        loss, _ = measure(model, on.train, MOST_MEASURED)
        _, accuracy = measure(model, on.validation, MOST_MEASURED)
        run.log(done, training_loss=loss, validation_accuracy=accuracy, seconds=seconds)
        return math.isfinite(loss)

    if run.state:
        model.load_state_dict(run.state["model"])
        optimizer.load_state_dict(run.state["optimizer"])
        draws.set_state(run.state["draws"])
        done, seconds = run.state["done"], run.state["seconds"]
    else:
        log()
    warm_up(task, on)
    saved = time.monotonic()
    for batch in itertools.islice(batches(len(on.train[1]), task.batch, task.seed), done, task.steps):
        images, labels = on.train[0][batch], on.train[1][batch]
        began = time.process_time()  # other runs may keep the machine busy
        try:
            take_step(model, optimizer, images, labels)
        except NonFiniteError:
            return {"diverged_at": done}
        seconds += time.process_time() - began
        done += 1
        if done % task.measure_every == 0 or done == task.steps:
            if not log():
                return {"diverged_at": done}
            run.progress(done, task.steps)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "draws": draws.get_state()}
                run.checkpoint({**held, "done": done, "seconds": seconds})
                saved = time.monotonic()
    validation_loss, _ = measure(model, on.validation)
    if not math.isfinite(validation_loss):
        return {"diverged_at": done}
    _, test_accuracy = measure(model, on.test)
    return {"diverged_at": None, "validation_loss": validation_loss, "test_accuracy": test_accuracy, "seconds": seconds}


def network_of(task: Task, on: Splits) -> nn.Sequential:
    return network(on.train[0].shape[1], task.width, task.layers, on.classes, task.seed)


def optimizer_of(task: Task, model: nn.Module) -> tuple[Any, torch.Generator]:
    """It, and where its random numbers come from if it draws any."""
    optimizer: Any = OPTIMIZERS[task.optimizer].make(model.parameters(), lr=task.step_size)
    draws = torch.Generator().manual_seed(task.seed)
    if hasattr(optimizer, "generator"):
        optimizer.generator = draws
    return optimizer, draws


def warm_up(task: Task, on: Splits) -> None:
    """A step of another network, so that what a process does only once is not counted as training."""
    model = network_of(task, on)
    take_step(model, optimizer_of(task, model)[0], on.train[0][: task.batch], on.train[1][: task.batch])


# ----------------------------------------------------------------------------------------------------------- what it shows


class Summary(NamedTuple):
    """Mean of some numbers and its standard error, which one number has not."""

    mean: float
    error: float | None

    def text(self, form: str, factor: float = 1) -> str:
        mean = f"{factor * self.mean:{form}}"
        return mean if self.error is None else f"{mean} ± {factor * self.error:{form}}"


def summary(values: Sequence[float]) -> Summary:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Summary(statistics.fmean(values), error)


def comparable(by_size: Mapping[float, list[Result]]) -> dict[float, list[Result]]:
    """Of the seeds that most step sizes have, and the step sizes that have them: not all may be done."""
    seeds = {size: {result.task.seed for result in results} for size, results in by_size.items()}
    counts = Counter(itertools.chain.from_iterable(seeds.values()))
    shared = {seed for seed, count in counts.items() if count == max(counts.values())}
    kept = {size: results for size, results in by_size.items() if shared <= seeds[size]}
    return {size: [result for result in results if result.task.seed in shared] for size, results in kept.items()}


@dataclass
class Trained:
    """An optimizer's runs by step size."""

    label: str
    by_size: dict[float, list[Result]]

    def __post_init__(self) -> None:
        self.by_size = comparable(self.by_size)

    def loss(self, size: float) -> float:
        """On the validation split at the end, mean over seeds; infinite if one diverged."""
        return statistics.fmean(result.values.get("validation_loss", math.inf) for result in self.by_size[size])

    @property
    def best(self) -> float:
        """The step size with the lowest loss."""
        return min(self.by_size, key=self.loss)

    @property
    def runs(self) -> list[Result]:
        """At the best step size; none if all step sizes diverged."""
        return self.by_size[self.best] if math.isfinite(self.loss(self.best)) else []

    def curve(self, metric: str) -> dict[int, Summary]:
        """Over seeds, by step."""
        columns = [dict(result.metrics[metric]) for result in self.runs]
        return {step: summary([column[step] for column in columns]) for step in (columns[0] if columns else ())}


def sections(results: list[Result]) -> list[Section]:
    """One for each data set, network and length of training."""
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        setting = {name: value for name, value in asdict(result.task).items() if name not in ("optimizer", "step_size", "seed")}
        groups.setdefault(tuple(setting.items()), []).append(result)
    return [section(found, f"-{k}" if k > 1 else "") for k, found in enumerate(groups.values(), start=1)]


def section(results: list[Result], end: str) -> Section:
    """``end`` tells the files of several sections apart."""
    task = results[0].task
    trained: list[Trained] = []
    for name, kind in OPTIMIZERS.items():
        by_size: dict[float, list[Result]] = {}
        for result in sorted((r for r in results if r.task.optimizer == name), key=lambda r: (r.task.step_size, r.task.seed)):
            by_size.setdefault(result.task.step_size, []).append(result)
        if by_size:
            trained.append(Trained(kind.label, by_size))
    seeds = len({result.task.seed for result in results})
    text = (
        f"A network with {task.layers} hidden layers of {task.width} tanh units on {task.dataset}, cross-entropy, batches of "
        f"{task.batch}. Every optimizer takes {task.steps} steps at every step size, from the same initial networks and with the "
        f"same batches ({seeds} seeds). Shown is the step size with the lowest loss on a validation split at the end, with mean "
        "and standard error over seeds. Seconds are those of the processor in training steps alone, on one thread."
    )
    items: list[Plot | Heat | Table] = [table(trained, f"optimizers{end}")]
    for metric, against in itertools.product(("training loss", "validation accuracy"), ("steps", "seconds")):
        items.append(curves(trained, metric, against, end))
    return Section(f"Training on {task.dataset}", text, [*items, sensitivity(trained, f"step-sizes{end}")])


def curves(trained: list[Trained], metric: str, against: str, end: str) -> Plot:
    series = []
    for found in trained:
        if points := found.curve(metric.replace(" ", "_")):
            x = [at.mean for at in found.curve("seconds").values()] if against == "seconds" else list(points)
            low, high = ([at.mean + sign * (at.error or 0) for at in points.values()] for sign in (-1, 1))
            series.append(Series(found.label, x, [at.mean for at in points.values()], low, high))
    name, title = f"{metric.replace(' ', '-')}-{against}{end}", f"{metric.capitalize()} by {against}"
    caption = "At the best step size; mean and standard error over seeds."
    return Plot(name, title, series, against, metric, log_y=metric == "training loss", caption=caption)


def sensitivity(trained: list[Trained], name: str) -> Plot:
    losses = {found.label: {size: loss for size in found.by_size if math.isfinite(loss := found.loss(size))} for found in trained}
    series = [Series(label, list(points), list(points.values())) for label, points in losses.items()]
    title, caption = "Validation loss by step size", "At the end, mean over seeds; no point where a seed diverged."
    return Plot(name, title, series, "step size", "validation loss", log_x=True, log_y=True, caption=caption)


def table(trained: list[Trained], name: str) -> Table:
    header = [
        *("optimizer", "step size", *(f"steps to {target:g}" for target in TARGETS)),
        *("training loss at the end", "test accuracy, %", "ms a step", "diverged"),
    ]
    body: list[Sequence[str]] = [[found.label, *cells(found)] for found in trained]
    caption = (
        "Steps to a training loss: the first measured, mean of the seeds that reached it. Diverged: how many seeds, by step size."
        f" Training losses are taken over the first {MOST_MEASURED} images."
    )
    return Table(name, "Optimizers at their best step sizes", header, body, caption)


def cells(found: Trained) -> list[str]:
    counts = {size: sum(r.values["diverged_at"] is not None for r in runs) for size, runs in found.by_size.items()}
    diverged = ", ".join(f"{size:g}: {count} of {len(found.by_size[size])}" for size, count in counts.items() if count) or "none"
    if not found.runs:
        return ["diverged at every one", *["–"] * (len(TARGETS) + 3), diverged]
    edge = " (edge of the grid)" if len(found.by_size) > 1 and found.best in (min(found.by_size), max(found.by_size)) else ""
    losses = [result.metrics["training_loss"] for result in found.runs]
    accuracy = summary([result.values["test_accuracy"] for result in found.runs])
    pace = summary([1e3 * result.values["seconds"] / result.task.steps for result in found.runs])
    return [
        f"{found.best:g}{edge}",
        *(steps_to(target, losses) for target in TARGETS),
        summary([loss[-1][1] for loss in losses]).text(".2g"),
        accuracy.text(".1f", 100),
        pace.text(".2f"),
        diverged,
    ]


def steps_to(target: float, losses: Sequence[Sequence[tuple[int, float]]]) -> str:
    first = [next((step for step, value in loss if value <= target), None) for loss in losses]
    reached = [step for step in first if step is not None]
    if not reached:
        return "not reached"
    text = summary(reached).text(".0f")
    return text if len(reached) == len(first) else f"{text} ({len(reached)} of {len(first)} seeds)"


EXPERIMENT = Experiment(
    "training", "How optimizers learn, by steps and by seconds.", Settings, PRESETS, Task, tasks, work, run, sections
)
