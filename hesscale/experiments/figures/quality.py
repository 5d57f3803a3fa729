"""The approximation quality of each method (the paper's Fig. 2): errors of Hessian diagonals during training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..lab.choices import check_least, check_numbers
from ..lab.data import Dataset, load, names
from ..lab.experiment import Experiment, Watched, option
from ..lab.store import Run
from . import _quality_methods as methods
from ._quality_figures import sections

HIDDEN = (32, 32, 32)
BLOCK = 5  # networks in a run
CHECKPOINT_SECONDS = 5.0
INITIAL, ANOTHER, ORDER, DRAWS = range(4)  # purposes of random numbers


@dataclass(frozen=True)
class Settings:
    dataset: str = option("mnist", f"data set: {', '.join(names()[:-1])} or {names()[-1]}")
    seeds: int = option(40, "number of networks, each with its own initialization")
    examples: int = option(1000, "number of SGD steps, each on one example; errors are measured before each step, on its example")
    step_size: float = option(0.01, "step size of SGD")
    standardize: bool = option(
        True, "scale pixels to mean 0 and variance 1 over the training set, as in the authors' code, or else to [0, 1]"
    )
    quirks: str = option("", f"'{methods.AUTHORS}' computes BL89 and AdaHessian as the authors' code does")
    seed: int = option(0, "seed of all random numbers")


@dataclass(frozen=True)
class Task:
    """Networks ``first`` to ``first + count − 1``. A network is the same in any run."""

    dataset: str
    first: int
    count: int
    examples: int
    step_size: float
    standardize: bool
    quirks: str
    seed: int


def tasks(settings: Settings) -> list[Task]:
    check(settings)
    shared = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings) if field.name != "seeds"}
    firsts = range(0, settings.seeds, BLOCK)
    return [Task(first=first, count=min(BLOCK, settings.seeds - first), **shared) for first in firsts]


def check(settings: Settings) -> None:
    check_least(settings, {"seeds": 1, "examples": 1, "seed": 0})
    check_numbers(settings, positive=["step_size"])
    if settings.dataset not in names():
        raise ValueError(f"dataset must be one of {', '.join(names())}, not {settings.dataset!r}")
    if settings.quirks not in ("", methods.AUTHORS):
        raise ValueError(f"quirks must be {methods.AUTHORS!r} or empty, not {settings.quirks!r}")


def work(settings: Settings) -> str:
    count = f"{settings.seeds} networks × {settings.examples} examples of {settings.dataset}"
    return f"{count}, {len(methods.METHODS)} methods at each"


def run(task: Task, run: Run, data: Path | None) -> Mapping[str, Any]:
    """Mean errors of these networks by layer and method, and distances to diag(G)."""
    inputs, labels, sizes = examples_of(task, load(task.dataset, data))
    state = run.state or beginning(task, sizes)
    saved = time.monotonic()
    for step in range(state["step"], task.examples):
        state = advance(task, state, inputs[:, step : step + 1], labels[:, step])
        run.log(step + 1, loss=state["loss"].item())
        run.progress(step + 1, task.examples)
        if time.monotonic() - saved >= CHECKPOINT_SECONDS:
            run.checkpoint(state)
            saved = time.monotonic()
    return {"errors": state["errors"] / task.examples, "to_ggn": state["to_ggn"] / task.examples, "sizes": sizes}


def examples_of(task: Task, dataset: Dataset) -> tuple[Tensor, Tensor, list[int]]:
    """The examples of each network in order, (networks, examples, inputs), their labels, and the sizes of the layers."""
    images, labels = dataset.images("train"), dataset.labels("train")
    if task.examples > len(images):
        raise ValueError(f"{dataset.title} has {len(images)} training examples, fewer than the {task.examples} asked for")
    orders = [random.permutation(len(images))[: task.examples] for random in generators(task, ORDER)]
    order = torch.from_numpy(numpy.stack(orders))
    mean, deviation = brightness(images) if task.standardize else (0.0, float(dataset.scale))
    inputs = (images[order].flatten(2).double() - mean) / deviation
    return inputs, labels[order], [inputs.shape[2], *HIDDEN, dataset.classes]


def brightness(images: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of all bytes."""
    counts = torch.bincount(images.flatten()).double()
    values = torch.arange(len(counts), dtype=torch.float64)
    mean = (counts * values).sum() / counts.sum()
    return mean.item(), ((counts * (values - mean).square()).sum() / counts.sum()).sqrt().item()


def generators(task: Task, purpose: int, step: int = 0) -> methods.Generators:
    """A random generator for each network. It depends only on the seed, the network, the purpose and the step."""
    keys = [[task.seed, network, purpose, step] for network in range(task.first, task.first + task.count)]
    return [numpy.random.Generator(numpy.random.SFC64(key)) for key in keys]


def beginning(task: Task, sizes: list[int]) -> dict[str, Any]:
    layers = len(sizes) - 1
    return {
        "step": 0,
        "layers": methods.initial(sizes, generators(task, INITIAL)),
        "others": methods.initial(sizes, generators(task, ANOTHER)) if task.quirks else [],
        "errors": torch.zeros(task.count, layers, len(methods.METHODS), dtype=torch.float64),
        "to_ggn": torch.zeros(task.count, layers, len(methods.TO_GGN), dtype=torch.float64),
    }


def advance(task: Task, state: dict[str, Any], inputs: Tensor, labels: Tensor) -> dict[str, Any]:
    """Measure errors on these examples, and then train on them."""
    at = methods.propagate(state["layers"], inputs, labels)
    check_finite(task, state["step"], at.q)
    another = methods.propagate(state["others"], inputs, labels) if task.quirks else at  # the network for BL89
    random = generators(task, DRAWS, state["step"])
    truth = methods.exact(at)
    found = methods.structured(at, methods.bl89(another, task.quirks), methods.draw_labels(at, random))
    errors = torch.cat([methods.distances(at, found, truth), adahessian_errors(task, at, truth, random)], 2)
    check_finite(task, state["step"], errors)
    ggn, compared = [methods.STRUCTURED.index("diag(G)")], [methods.STRUCTURED.index(name) for name in methods.TO_GGN]
    return {
        "step": state["step"] + 1,
        "layers": methods.descend(at, task.step_size),
        "others": methods.descend(another, task.step_size) if task.quirks else [],
        "errors": state["errors"] + errors,
        "to_ggn": state["to_ggn"] + methods.distances(at, [t[:, compared] for t in found], [t[:, ggn] for t in found]),
        "loss": methods.loss(at).mean(),
    }


def check_finite(task: Task, step: int, values: Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"a network diverged at example {step + 1} with step size {task.step_size}; use a smaller step size")


def adahessian_errors(task: Task, at: methods.Pass, truth: methods.Rows, random: methods.Generators) -> Tensor:
    """Errors as (networks, layers, methods), computed for one network at a time, whose draws fit into the cache."""
    errors = []
    for k in range(task.count):
        one, t = at.of(k), [rows[k : k + 1] for rows in truth]
        errors.append(torch.stack([methods.distance(one, d, t) for d in methods.adahessian(one, [random[k]], task.quirks)], 2))
    return torch.cat(errors)


EXPERIMENT = Experiment(
    name="quality",
    title="The errors of HesScale and other estimates of the Hessian diagonal during training (Fig. 2).",
    settings=Settings,
    presets={
        "smoke": Settings(dataset="digits", seeds=2, examples=10),
        "small": Settings(dataset="digits", seeds=10, examples=200),
        "paper": Settings(),
    },
    task=Task,
    tasks=tasks,
    work=work,
    run=run,
    sections=sections,
    unit="examples",
    amount=lambda task: task.examples * task.count,
    watched=Watched("loss", "loss"),
    examples=("--seeds 5 --examples 500", "--preset paper --data DATA"),
)
