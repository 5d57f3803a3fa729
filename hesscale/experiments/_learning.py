"""What training consists of: optimizers by name, data in three splits, a tanh network, batches, and a step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..bench.workloads import mlp
from ..lab.data import load
from ..lab.store import seeded
from ..optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

MOST_VALIDATION = 10_000  # a fifth of the images for training, and no more than this

Split = tuple[Tensor, Tensor]  # images as rows in [0, 1], and labels


class Kind(NamedTuple):
    """An optimizer, of parameters and a step size ``lr``."""

    label: str
    make: Callable[..., torch.optim.Optimizer]


def some(optimizer: Any, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(optimizer, **options)


OPTIMIZERS = {
    "adahesscale": Kind("AdaHesScale", AdaHesScale),
    "adahesscale-gn": Kind("AdaHesScaleGN", AdaHesScaleGN),
    "adam": Kind("Adam", torch.optim.Adam),
    "adahessian": Kind("AdaHessian", AdaHessian),
    "ggnmc": Kind("GGN-MC, 1 draw", GGNMC),
    "ggnmc-16": Kind("GGN-MC, 16 draws", some(GGNMC, num_samples=16)),
    "bl89": Kind("BL89", BL89),
    "scaled-adam-1e-4": Kind("Scaled Adam, Δ = 1e-4", some(Adam, trust_radius=1e-4)),
    "scaled-adam-1e-8": Kind("Scaled Adam, Δ = 1e-8", some(Adam, trust_radius=1e-8)),
    "scaled-adahesscale-1e-4": Kind("Scaled AdaHesScale, Δ = 1e-4", some(AdaHesScale, trust_radius=1e-4)),
    "scaled-adahesscale-1e-8": Kind("Scaled AdaHesScale, Δ = 1e-8", some(AdaHesScale, trust_radius=1e-8)),
}


class Splits(NamedTuple):
    """The same whatever the seed; those for validation are taken from the images for training."""

    train: Split
    validation: Split
    test: Split
    classes: int


@functools.lru_cache(maxsize=1)
def splits(name: str, root: Path | None) -> Splits:
    dataset = load(name, root)
    images, labels = dataset.inputs("train"), dataset.labels("train")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, kept = order.tensor_split([min(len(labels) // 5, MOST_VALIDATION)])
    test = dataset.inputs("test"), dataset.labels("test")
    return Splits((images[kept], labels[kept]), (images[held_out], labels[held_out]), test, dataset.classes)


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
def measure(model: nn.Module, split: Split, most: int | None = None) -> tuple[float, float]:
    """Loss, infinite if it is not a number, and accuracy, on the first ``most`` images or all."""
    images, labels = split[0][:most], split[1][:most]
    outputs = model(images)
    loss = float(F.cross_entropy(outputs, labels))
    return loss if math.isfinite(loss) else math.inf, float((outputs.argmax(1) == labels).double().mean())
