"""Bounds on the update U = factor · M ⊘ D. They are not in the paper, and each of them only changes the denominator D.

    damping δ       D ← D + δ mean(D)                      damp
    update_clip γ   D ← max(D, |M̂|/γ)                      clip_entries: no entry of M̂ ⊘ D exceeds γ
    graft           D ← D ‖M̂ ⊘ D‖ / ‖A‖                    match_adam: U is as long as Adam's update αA
    graft_cap c     D ← D max(1, ‖M̂ ⊘ D‖ / (c‖A‖))         match_adam: U is at most c times as long

Means and lengths are those of one parameter tensor, and A = M̂ ⊘ (√V̂ of the gradient + ε).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .scalars import is_nonzero, materialize

if TYPE_CHECKING:
    from .batches import Batch

NEUTRAL: dict[str, Any] = {"damping": 0.0, "update_clip": None, "graft": False, "graft_cap": None}  # no bounds, as in the paper
LONG_ENTRY = 100  # times the step size; a longer entry among the first WATCHED_STEPS steps draws a warning
WATCHED_STEPS = 10
SAFE_DAMPING, SAFE_GRAFT_CAP = 0.03, 3.0  # the defaults of AdaHesScale and AdaHesScaleGN


def needs_adam(group: dict[str, Any]) -> bool:
    """Whether the length of Adam's update is needed, and with it an average of squared gradients."""
    return bool(group["graft"]) or group["graft_cap"] is not None


def damp(batch: Batch, denominators: list[Tensor]) -> None:
    """D ← D + δ mean(D), for D = √V before ε is added."""
    damping = batch.group["damping"]
    if not is_nonzero(damping):
        return
    parts = batch.split(denominators)
    sums = norms(parts, 1)
    torch._foreach_mul_(sums, [damping / max(1, part.numel()) for part in parts])
    torch._foreach_add_(parts, materialize([total.to(part.dtype) for total, part in zip(sums, parts, strict=True)]))


def clip_entries(batch: Batch, denominators: list[Tensor], ratios: list[Any]) -> None:
    """D ← max(D, |M̂|/γ). The update without its step size is ratio · M ⊘ D."""
    limit = batch.group["update_clip"]
    if limit is None:
        return
    least = list(torch._foreach_abs(batch.momenta))
    torch._foreach_mul_(least, materialize([ratio / limit for ratio in ratios]))
    torch._foreach_maximum_(denominators, least)


def match_adam(batch: Batch, denominators: list[Tensor], ratios: list[Any], adam: list[Tensor], adam_ratios: list[Any]) -> None:
    """Give each tensor's update the length of Adam's, or with ``graft_cap=c`` at most c times that length.

    The updates without their step size are ratio · M ⊘ D, and for Adam adam_ratio · M ⊘ ``adam``.
    """
    lengths = update_lengths(batch, denominators, ratios)
    longest = update_lengths(batch, adam, adam_ratios)
    cap = 1 if batch.group["graft"] else batch.group["graft_cap"]
    pairs = zip(lengths, longest, strict=True)
    scales = [torch.where(length > 0, length / (cap * target), 1.0) for length, target in pairs]
    if not batch.group["graft"]:
        torch._foreach_clamp_min_(scales, 1.0)
    parts = batch.split(denominators)
    torch._foreach_mul_(parts, materialize([scale.to(part.dtype) for scale, part in zip(scales, parts, strict=True)]))


def update_lengths(batch: Batch, denominators: list[Tensor], ratios: list[Any]) -> list[Tensor]:
    """‖ratio · M ⊘ D‖ of each parameter."""
    lengths = norms(batch.split(list(torch._foreach_div(batch.momenta, denominators))), 2)
    torch._foreach_mul_(lengths, materialize(ratios if batch.pack is None else ratios * len(lengths)))
    return lengths


def norms(tensors: list[Tensor], order: int) -> list[Tensor]:
    """The norm of each tensor, at least in single precision."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    return list(torch._foreach_norm(tensors, order, dtype=dtype))
