"""What decides one training: the settings of a network's run, and its optimizers by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ...optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

WARM_UP = 10  # Hessian diagonals averaged before weights move


class Kind(NamedTuple):
    label: str
    make: Callable[..., torch.optim.Optimizer]
    is_scaled: bool = False  # has a trust region


OPTIMIZERS = {
    "sgd": Kind("SGD", torch.optim.SGD),
    "adam": Kind("Adam", torch.optim.Adam),
    "adahessian": Kind("AdaHessian", AdaHessian),
    "bl89": Kind("BL89", BL89),
    "ggnmc": Kind("GGN-MC", functools.partial(GGNMC, per_sample=True)),
    "ggnmc-batch": Kind("GGN-MC, batch", GGNMC),
    "adahesscale": Kind("AdaHesScale", AdaHesScale),
    "adahesscale-gn": Kind("AdaHesScaleGN", AdaHesScaleGN),
    "adahessian-spatial": Kind("AdaHessian, averaged over kernels", functools.partial(AdaHessian, spatial_average=True)),
    "adahessian-warm": Kind("AdaHessian, curvature warmed up", functools.partial(AdaHessian, curvature_warmup=WARM_UP)),
    "adahesscale-warm": Kind("AdaHesScale, curvature warmed up", functools.partial(AdaHesScale, curvature_warmup=WARM_UP)),
    "adahesscale-gn-warm": Kind("AdaHesScaleGN, curvature warmed up", functools.partial(AdaHesScaleGN, curvature_warmup=WARM_UP)),
    "adahesscale-bf16": Kind("AdaHesScale, curvature in bf16", functools.partial(AdaHesScale, curvature_dtype=torch.bfloat16)),
    "adahesscale-10th": Kind("AdaHesScale, curvature every 10th step", functools.partial(AdaHesScale, curvature_every=10)),
    "scaled-adam": Kind("Scaled Adam", Adam, True),
    "scaled-adahesscale": Kind("Scaled AdaHesScale", AdaHesScale, True),
    "scaled-adahesscale-gn": Kind("Scaled AdaHesScaleGN", AdaHesScaleGN, True),
}


@dataclass(frozen=True)
class Task:
    """One network trained."""

    problem: str
    dataset: str
    optimizer: str
    step_size: float
    seed: int
    epochs: int
    times: int  # as many epochs as that
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
        kind = OPTIMIZERS[self.optimizer]
        longer = f", {self.times} times as long" if self.times > 1 else ""
        return kind.label + (f", Δ = {self.trust_radius:g}" if kind.is_scaled else "") + longer


def companions(task: Task) -> Task:
    """The same for tasks that can be done together: they may differ in their step sizes and seeds."""
    return replace(task, step_size=0.0, seed=0)


def optimizer_of(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    kind = OPTIMIZERS[task.optimizer]
    options: dict[str, Any] = {"lr": task.step_size}
    if task.optimizer != "sgd":
        options["eps"] = task.eps
    if kind.is_scaled:
        options["trust_radius"] = task.trust_radius
    if not task.l2:
        return kind.make(model.parameters(), **options)
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return kind.make([{"params": weights, "weight_decay": task.l2}, {"params": biases}], **options)
