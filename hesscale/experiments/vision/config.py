"""The settings of one network's training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..optimizers import IMAGE_OPTIMIZERS
from .problems import trained_parameters


@dataclass(frozen=True)
class Task:
    """One network to train."""

    problem: str
    dataset: str
    optimizer: str
    step_size: float
    seed: int
    epochs: int
    times: int  # the number of epochs is multiplied by this
    batch: int
    activation: str
    padding: str
    l2: float
    augment: bool
    eps: float
    trust_radius: float  # 0 for none
    evaluate_every: int
    precision: str
    device: str
    backend: str

    @property
    def all_epochs(self) -> int:
        return self.epochs * self.times

    @property
    def label(self) -> str:
        spec = IMAGE_OPTIMIZERS[self.optimizer]
        longer = f", {self.times} times as long" if self.times > 1 else ""
        return spec.label + (f", Δ = {self.trust_radius:g}" if spec.is_scaled else "") + longer


def group_key(task: Task) -> Task:
    """A key that is equal for tasks that can be done together. These may differ in step size and seed."""
    return replace(task, step_size=0.0, seed=0)


def optimizer_of(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    spec = IMAGE_OPTIMIZERS[task.optimizer]
    options: dict[str, Any] = {}
    if (spec.family or spec.name) != "sgd":
        options["eps"] = task.eps
    if spec.is_scaled:
        options["trust_radius"] = task.trust_radius
    if not task.l2:
        return spec.make(trained_parameters(model), task.step_size, **options)
    weights = [p for p in trained_parameters(model) if p.dim() > 1]
    biases = [p for p in trained_parameters(model) if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": task.l2}, {"params": biases}]
    return spec.make(groups, task.step_size, **options)
