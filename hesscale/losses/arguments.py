"""Arguments that the losses have in common, and their checks."""

from __future__ import annotations

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


def reduce(per_sample: Tensor, reduction: str) -> Tensor:
    check_reduction(reduction)
    return per_sample.mean() if reduction == "mean" else per_sample.sum() if reduction == "sum" else per_sample


def check_constants(of: str, parameter: Tensor, shape: torch.Size, **constants: Tensor) -> None:
    """Raise if the shape of a constant does not match, or if it requires a gradient, which the loss would ignore."""
    for name, constant in constants.items():
        if constant.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(constant.shape)}, which does not match {of} with shape {tuple(parameter.shape)}. "
                f"Expected {tuple(shape)}"
            )
        if constant.requires_grad:
            raise ValueError(f"{name} requires a gradient, but this loss treats it as a constant. Pass {name}.detach()")


def check_clip(clip: float) -> float:
    if not clip >= 0:
        raise ValueError(f"clip must not be negative, but is {clip}")
    return clip


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(map(repr, REDUCTIONS))}")
