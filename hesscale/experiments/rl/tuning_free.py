"""Tuning-free optimizers of other packages, to compare with the trust region.

As usual for these packages, each optimizer has all weights of an agent in one group, and the package's default ε. Steps run in
eager mode.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..install import how_to_install
from .clipping import clip_gradients

PACKAGES = {  # by name on command lines: the module, the class, and the package to install
    "prodigy": ("prodigyopt", "Prodigy", "prodigyopt"),
    "dog": ("dog", "DoG", "dog-optimizer"),
    "schedule-free": ("schedulefree", "AdamWScheduleFree", "schedulefree"),
}


class TuningFree:
    """An optimizer of another package with the interface that agents need. Steps that are not finite are skipped and counted.

    Schedule-free AdamW has two sets of weights: those at which gradients are computed, and the average of the iterates. Agents
    act with the first, since A2C and PPO need actions of the policy that is updated. :meth:`averaged` gives the second.
    """

    def __init__(self, name: str, params: Iterable[Any], lr: float) -> None:
        module, kind, package = PACKAGES[name]
        try:
            build = getattr(importlib.import_module(module), kind)
        except ModuleNotFoundError:
            raise ModuleNotFoundError(f"the optimizer {name} needs {package}: {how_to_install('experiments')}") from None
        groups = [group["params"] if isinstance(group, dict) else [group] for group in params]
        self.own: torch.optim.Optimizer = build([p for group in groups for p in group], lr=lr)
        self.clips_gradients = False
        self.nonfinite_steps = 0
        self.eta: list[Tensor | None] = []  # no trust region
        self.scaled_share: dict[int, Tensor] = {}
        self.counters: dict[str, Tensor] = {}
        self.train()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.own.param_groups

    @property
    def weights(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        self.own.zero_grad()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        if self.clips_gradients:
            clip_gradients(self.own)
        if all(bool(p.grad.isfinite().all()) for p in self.weights if p.grad is not None):
            self.own.step()
        else:
            self.nonfinite_steps += 1

    def train(self) -> None:
        if hasattr(self.own, "train"):
            self.own.train()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the weights for evaluation inside the block: the average of the iterates, if there is one."""
        if hasattr(self.own, "eval"):
            self.own.eval()
        yield
        self.train()

    def state_dict(self) -> dict[str, Any]:
        return {"state": {}, "own": copy.deepcopy(self.own.state_dict()), "nonfinite_steps": self.nonfinite_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.load_state_dict(state["own"])
        self.nonfinite_steps = state["nonfinite_steps"]
