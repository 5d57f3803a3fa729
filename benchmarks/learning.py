"""Steps to a stated loss on scikit-learn's digits: every optimizer at its best step size, whoever wins.

A tanh network 64-32-32-10, cross-entropy, batches of 64. Each optimizer is first run at every step size of one grid; the one
with the lowest loss on a validation split at the end is then run again with other seeds, and those runs alone are reported. A
seed sets the network and the batches, the same for every optimizer.

    python benchmarks/learning.py --seeds 10 --steps 300 --out results/learning
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.errors import NonFiniteError
from hesscale.experiments.bench.workloads import mlp
from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.lab.store import seeded
from hesscale.experiments.optimizers import COLOURS
from hesscale.optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

Maker = Callable[..., torch.optim.Optimizer]  # of parameters, a step size and, where it draws, a generator

STEP_SIZES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TARGETS = (0.3, 0.1)  # mean training losses whose first step is reported
BATCH, TRAIN, VALIDATION = 64, 1088, 354  # 17 whole batches an epoch; the other 355 images are for testing
MEASURE_EVERY = 5
FIRST_TUNING_SEED = 1000  # apart from the seeds that are reported

some = functools.partial
OPTIMIZERS: dict[str, Maker] = {
    "AdaHesScale": AdaHesScale.paper,
    "AdaHesScaleGN": AdaHesScaleGN.paper,
    "Adam": torch.optim.Adam,
    "AdaHessian": AdaHessian,
    "GGN-MC, 1 draw": GGNMC,
    "GGN-MC, 16 draws": some(GGNMC, num_samples=16),
    "BL89": BL89,
    "Scaled Adam, Δ = 1e-4": some(Adam, trust_radius=1e-4),
    "Scaled Adam, Δ = 1e-8": some(Adam, trust_radius=1e-8),
    "Scaled AdaHesScale, Δ = 1e-4": some(AdaHesScale.paper, trust_radius=1e-4),
    "Scaled AdaHesScale, Δ = 1e-8": some(AdaHesScale.paper, trust_radius=1e-8),
}
DRAWING = ("AdaHessian", "GGN-MC, 1 draw", "GGN-MC, 16 draws")
STYLES = {
    "AdaHesScale": (COLOURS["adahesscale"], "-"),
    "AdaHesScaleGN": (COLOURS["adahesscale-gn"], "-"),
    "Adam": (COLOURS["adam"], "-"),
    "AdaHessian": (COLOURS["adahessian"], "-"),
    "GGN-MC, 1 draw": (COLOURS["ggnmc"], ":"),
    "GGN-MC, 16 draws": (COLOURS["ggnmc"], "-"),
    "BL89": (COLOURS["bl89"], "-"),
    "Scaled Adam, Δ = 1e-4": (COLOURS["adam"], "--"),
    "Scaled Adam, Δ = 1e-8": (COLOURS["adam"], ":"),
    "Scaled AdaHesScale, Δ = 1e-4": (COLOURS["adahesscale"], "--"),
    "Scaled AdaHesScale, Δ = 1e-8": (COLOURS["adahesscale"], ":"),
}


@dataclass(frozen=True)
class Data:
    """Images in [0, 1] and labels, split once, whatever the seed."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """One training run; losses are infinite from where it diverged."""

    losses: list[float]  # over the training images, every MEASURE_EVERY steps, step 0 first
    validation_loss: float
    test_accuracy: float

    def steps_to(self, target: float) -> int | None:
        """The first measured step with a training loss of at most ``target``."""
        return next((i * MEASURE_EVERY for i, loss in enumerate(self.losses) if loss <= target), None)


def network(inputs: int, width: int, layers: int, outputs: int, seed: int) -> nn.Sequential:
    """A tanh network as nn.Linear initializes it, by ``seed`` alone."""
    with seeded(seed):
        return mlp(inputs, width, layers, outputs)


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches without end, each of ``count`` images at most once in an epoch."""
    if count < size:
        raise ValueError(f"a batch of {size} cannot be had from {count} images")
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from (batch for batch in torch.randperm(count, generator=generator).split(size) if len(batch) == size)


def take_step(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), labels)
    if hasattr(optimizer, "backward"):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()


@torch.no_grad()
def measure(model: nn.Module, split: tuple[Tensor, Tensor], most: int | None = None) -> tuple[float, float]:
    """Loss, infinite if it is not a number, and accuracy, on the first ``most`` images or all."""
    images, labels = split[0][:most], split[1][:most]
    outputs = model(images)
    loss = float(F.cross_entropy(outputs, labels))
    return loss if math.isfinite(loss) else math.inf, float((outputs.argmax(1) == labels).double().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs to report for each optimizer")
    parser.add_argument("--tuning-seeds", type=int, default=3, help="runs per step size to choose it by")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("results/learning"))
    options = parser.parse_args(arguments)
    if min(options.seeds, options.tuning_seeds, options.steps) < 1:
        parser.error("--seeds, --tuning-seeds and --steps must be at least 1")
    started = time.perf_counter()
    torch.set_num_threads(1)  # fastest for a network this small, and reproducible
    data = digits()
    results = {}
    for i, (name, maker) in enumerate(OPTIMIZERS.items(), start=1):
        results[name] = compare(functools.partial(train, maker, data, steps=options.steps, draws=name in DRAWING), options)
        best, final = results[name]["step_size"], results[name]["final_training_loss"]["mean"]
        elapsed = time.perf_counter() - started
        print(f"[{i}/{len(OPTIMIZERS)}] {name}: step size {best:g}, final loss {number(final)} ({elapsed:.0f} s)", flush=True)
    record = {"command": command(options), "torch": torch.__version__, "measure_every": MEASURE_EVERY, "results": results}
    save(options.out, record)
    print(markdown(record))
    print(f"Wrote {options.out}/learning.json, .md and .png in {time.perf_counter() - started:.0f} s.")


def command(options: argparse.Namespace) -> str:
    return (
        f"python benchmarks/learning.py --seeds {options.seeds} --tuning-seeds {options.tuning_seeds} "
        f"--steps {options.steps} --out {options.out}"
    )


def digits() -> Data:
    bunch = load_digits()
    order = torch.randperm(len(bunch.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(bunch.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(bunch.target)[order]
    ends = (0, TRAIN, TRAIN + VALIDATION, len(order))
    return Data(*((images[a:b], labels[a:b]) for a, b in itertools.pairwise(ends)))


def train(maker: Maker, data: Data, seed: int, step_size: float, *, steps: int, draws: bool = False) -> Run:
    """Train one network; a loss or diagonal that is not finite ends the run as diverged."""
    model = network(64, 32, 2, 10, seed)
    drawing = {"generator": torch.Generator().manual_seed(seed)} if draws else {}
    optimizer = maker(model.parameters(), lr=step_size, **drawing)
    losses = [loss_on(model, data.train)]
    try:
        for step, batch in enumerate(itertools.islice(batches(len(data.train[0]), BATCH, seed), steps), start=1):
            take_step(model, optimizer, data.train[0][batch], data.train[1][batch])
            if step % MEASURE_EVERY == 0:
                losses.append(loss_on(model, data.train))
    except NonFiniteError:
        losses += [math.inf] * (steps // MEASURE_EVERY + 1 - len(losses))
        return Run(losses, math.inf, measure(model, data.test)[1])
    return Run(losses, loss_on(model, data.validation), measure(model, data.test)[1])


def loss_on(model: nn.Module, split: tuple[Tensor, Tensor]) -> float:
    return measure(model, split)[0]


def compare(run: Callable[[int, float], Run], options: argparse.Namespace) -> dict[str, Any]:
    """Choose the step size on some seeds, report on others."""
    tuning_seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + options.tuning_seeds)
    validation = {size: statistics.fmean(run(seed, size).validation_loss for seed in tuning_seeds) for size in STEP_SIZES}
    best = min(validation, key=lambda size: validation[size])
    runs = [run(seed, best) for seed in range(options.seeds)]
    return {
        "step_size": best,
        "step_size_is_at_the_edge": best in (STEP_SIZES[0], STEP_SIZES[-1]),
        "validation_loss_by_step_size": {f"{size:g}": finite(loss) for size, loss in validation.items()},
        "steps_to": {f"{target:g}": [r.steps_to(target) for r in runs] for target in TARGETS},
        "final_training_loss": summary([r.losses[-1] for r in runs]),
        "test_accuracy": summary([r.test_accuracy for r in runs]),
        "training_loss": [summary(column) for column in zip(*(r.losses for r in runs), strict=True)],
    }


def summary(values: Iterable[float]) -> dict[str, float | None]:
    """Mean and standard error; None where a value is infinite, or for the error of one value."""
    values = list(values)
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return {"mean": None, "se": None}
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": float(f"{mean:.5g}"), "se": None if error is None else float(f"{error:.3g}")}


def finite(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def save(folder: Path, record: dict[str, Any]) -> None:
    """The record, its table and its figure, each whole or not at all."""
    write_whole(folder / "learning.json", lambda path: path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8"))
    write_whole(folder / "learning.md", lambda path: path.write_text(markdown(record), encoding="utf-8"))
    write_whole(folder / "learning.png", lambda path: FigureCanvasAgg(figure(record)).print_png(path))


def markdown(record: dict[str, Any]) -> str:
    """The table, fastest first: by the seeds that reached the lowest target, then by the steps they took."""
    results = record["results"]
    seeds = len(next(iter(results.values()))["steps_to"][f"{TARGETS[0]:g}"])
    header = [
        "optimizer",
        "step size",
        *(f"steps to {target:g}" for target in TARGETS),
        "final training loss",
        "test accuracy, %",
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for name, result in sorted(results.items(), key=lambda item: rank(item[1])):
        size = f"{result['step_size']:g}" + (" (edge of the grid)" if result["step_size_is_at_the_edge"] else "")
        steps = [steps_cell(result["steps_to"][f"{target:g}"]) for target in TARGETS]
        cells = [name, size, *steps, cell(result["final_training_loss"], ".2g"), cell(result["test_accuracy"], ".1f", 100)]
        lines.append("| " + " | ".join(cells) + " |")
    return (
        "# Learning digits\n\n"
        f"Written by `{record['command']}`\n(torch {record['torch']}). Mean ± standard error of {seeds} seeds, at the step size "
        "with the lowest validation loss. Steps to a training loss:\nover all training images, measured every "
        f"{record['measure_every']} steps, mean of the seeds that reached it. Steps differ in cost.\n\n"
        + "\n".join(lines)
        + "\n\n"
        "![Training loss against steps, and validation loss against the step size](learning.png)\n"
    )


def rank(result: dict[str, Any]) -> tuple[Any, ...]:
    """Who reached the hardest target on how many seeds, and how soon; ties by the easier targets, then by the loss."""
    key: list[float] = []
    for target in sorted(TARGETS):
        reached = [steps for steps in result["steps_to"][f"{target:g}"] if steps is not None]
        key += [-len(reached), statistics.fmean(reached) if reached else 0]
    final = result["final_training_loss"]["mean"]
    return (*key, math.inf if final is None else final)


def steps_cell(steps: Sequence[int | None]) -> str:
    reached = [s for s in steps if s is not None]
    if not reached:
        return "not reached"
    text = cell(summary(map(float, reached)), ".0f")
    return text if len(reached) == len(steps) else f"{text} ({len(reached)} of {len(steps)} seeds)"


def cell(found: dict[str, float | None], form: str, factor: float = 1) -> str:
    if found["mean"] is None:
        return "diverged"
    mean = f"{factor * found['mean']:{form}}"
    return mean if found["se"] is None else f"{mean} ± {factor * found['se']:{form}}"


def number(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.3g}"


def figure(record: dict[str, Any]) -> Figure:
    """Left: training loss by step. Right: validation loss at the end by step size, where the choice was made."""
    result = Figure(figsize=(12, 5.5), layout="constrained", dpi=90)
    curves, sensitivity = result.subplots(1, 2)
    for name, found in record["results"].items():
        colour, dash = STYLES[name]
        curve = enumerate(found["training_loss"])
        points = [(i * record["measure_every"], p["mean"], p["se"] or 0) for i, p in curve if p["mean"] is not None]
        steps, means, errors = zip(*points, strict=True)
        low = [max(m - e, m / 10) for m, e in zip(means, errors, strict=True)]
        high = [m + e for m, e in zip(means, errors, strict=True)]
        curves.plot(steps, means, dash, color=colour, linewidth=1.5, label=f"{name} ({found['step_size']:g})")
        curves.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        sizes = [(float(size), loss) for size, loss in found["validation_loss_by_step_size"].items() if loss is not None]
        sensitivity.plot(*zip(*sizes, strict=True), dash, color=colour, marker=".", linewidth=1.5)
    for target in TARGETS:
        curves.axhline(target, color="black", linewidth=0.6)
    curves.set(
        yscale="log",
        ylim=(0.005, 20),
        xlabel="step",
        ylabel="training loss",
        title="at the best step size (in brackets), mean ± s.e.",
    )
    sensitivity.set(xscale="log", yscale="log", ylim=(0.05, 20), xlabel="step size", ylabel="validation loss at the end")
    sensitivity.set_title("over the grid of step sizes, mean of the tuning seeds")
    result.legend(*curves.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return result


if __name__ == "__main__":
    main()
