"""Gradient clipping by norm as a part of the optimizer's step, so that it is compiled with the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...optim import CurvatureOptimizer

MAX_NORM = 0.5  # of gradients in CleanRL's protocol


class ClipsGradients(CurvatureOptimizer):
    """A mixin for optimizers, whose steps then begin with :func:`clip_gradients`."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        clip_gradients(self)
        return super().step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # as in CurvatureOptimizer


def clip_gradients(optimizer: torch.optim.Optimizer) -> None:
    """g ← g min(1, MAX_NORM / ‖g‖), where ‖g‖ is the norm of all gradients together.

    The results are those of ``torch.nn.utils.clip_grad_norm_`` up to rounding. With a non-finite norm, gradients become
    non-finite.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.stack([p.grad.square().sum() for p in weights]).sum().sqrt()
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for p in weights:
        p.grad = p.grad * scale


def with_clipped_gradients(optimizer: CurvatureOptimizer) -> CurvatureOptimizer:
    """Let an optimizer clip gradients from now on. Returns the same object."""
    kind = type(optimizer)
    if kind not in CLASSES:
        CLASSES[kind] = type(kind.__name__, (ClipsGradients, kind), {"__module__": kind.__module__})
    optimizer.__class__ = CLASSES[kind]
    return optimizer


CLASSES: dict[type, type] = {}  # classes with clipping, by the class without; the members of an ensemble must share one
