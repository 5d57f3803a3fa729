"""A problem: examples in three splits, and a network that classifies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lab.store import seeded


@dataclass(frozen=True, eq=False)
class Split:
    """Examples, identified by indices.

    Attributes:
        count: batches are drawn from the indices below this number.
        evaluated: the indices of the examples for evaluation.
        take: returns inputs and classes of the examples with given indices.
    """

    count: int
    evaluated: Tensor
    take: Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Splits:
    """Disjoint splits on a device, which do not depend on the seed."""

    train: Split
    validation: Split
    test: Split
    classes: int


@dataclass(frozen=True)
class Problem:
    """A data set and a network.

    Attributes:
        name: on command lines and in records.
        title: in figures and tables.
        dataset: its name, which determines the fingerprint of the data.
        load: reads the splits, given the folder of data sets and a device.
        build: returns the network for a given number of classes.
        steps, batch: the default number of training steps and batch size.
        metric: "accuracy" or "loss", by which step sizes are chosen and optimizers are compared.
    """

    name: str
    title: str
    dataset: str
    load: Callable[[Path | None, torch.device], Splits]
    build: Callable[[int], nn.Module]
    steps: int
    batch: int
    metric: str = "accuracy"

    def network(self, classes: int, seed: int) -> nn.Module:
        """The network. Its initial weights depend only on ``seed``."""
        with seeded(seed):
            return self.build(classes)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross-entropy of all predictions: one for an image, and one for every character of a text."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())
