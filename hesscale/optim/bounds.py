"""Bounds on the update U = factor · M ⊘ D. They are not in the paper. Each of them changes only the denominator D.

    damping δ       D ← D + δ mean(D)                      damp
    update_clip γ   D ← max(D, |M̂|/γ)                      clip_entries: no entry of M̂ ⊘ D exceeds γ, before graft
    graft (a, b)    D ← D r / clip(r, a, b)                match_adam: U is a to b times as long as Adam's update αA

Means and lengths are those of one parameter tensor. A = M̂ ⊘ (√V̂ of the gradient + ε), and r = ‖M̂ ⊘ D‖ / ‖A‖.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed.shards import sum_over
from .scalars import each, is_nonzero, materialize

if TYPE_CHECKING:
    from .batches import Batch

NEUTRAL: dict[str, Any] = {"damping": 0.0, "update_clip": None, "graft": None}  # the paper's optimizers, without bounds
SAFE_DAMPING, SAFE_GRAFT = 0.03, (1.0, 1.0)  # the defaults of AdaHesScale and AdaHesScaleGN
LONG_ENTRY = 100  # times the step size; a larger entry of one of the first WATCHED_STEPS updates causes a warning
WATCHED_STEPS = 10


def needs_adam(group: dict[str, Any]) -> bool:
    """Whether the length of Adam's update is needed, which takes an average of squared gradients."""
    return group["graft"] is not None


def damp(batch: Batch, denominators: list[Tensor]) -> None:
    """D ← D + δ mean(D), for D = √V before ε is added."""
    damping = batch.group["damping"]
    if is_nonzero(damping):
        damped = each(lambda norm: norm * damping, norms(batch, denominators, 1))
        torch._foreach_add_(denominators, for_entries(batch, list(torch._foreach_div(damped, batch.sizes()))))


def clip_entries(batch: Batch, denominators: list[Tensor], ratios: list[Any]) -> None:
    """D ← max(D, |M̂|/γ). Without the step size, the update is ratio · M ⊘ D."""
    limit = batch.group["update_clip"]
    if limit is not None:
        least = list(torch._foreach_abs(batch.momenta))
        torch._foreach_mul_(least, materialize(each(lambda ratio: ratio / limit, ratios)))
        torch._foreach_maximum_(denominators, least)


def match_adam(batch: Batch, denominators: list[Tensor], adam: list[Tensor], adam_ratios: list[Any]) -> None:
    """Keep the length of each tensor's update between two multiples of the length of Adam's update.

    The updates are M ⊘ D and M ⊘ ``adam``. The second is multiplied by its ``adam_ratios`` before their lengths are compared.
    """
    low, high = batch.group["graft"]
    lengths = norms(batch, list(torch._foreach_div(batch.momenta, denominators)), 2)
    targets = norms(batch, list(torch._foreach_div(batch.momenta, adam)), 2)
    torch._foreach_mul_(targets, materialize(adam_ratios))
    relative = list(torch._foreach_div(lengths, targets))
    excess = each(lambda length, r: torch.where(length > 0, r / r.clamp(low, high), 1.0), lengths, relative)
    excess = each(lambda ratio: ratio.nan_to_num(1.0, torch.inf), excess)  # ∞/∞: the length overflows and b = ∞
    torch._foreach_mul_(denominators, for_entries(batch, excess))


def norms(batch: Batch, tensors: list[Tensor], order: int) -> list[Tensor]:
    """The norm of each parameter's part, at least in single precision. A pack has one tensor with the norms of all its parts."""
    dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    if batch.pack is not None:
        powers = tensors[0].to(dtype)  # segment_reduce adds in the dtype of its input
        powers = powers if order == 1 else powers.square()  # a denominator is not negative
        sums = torch.segment_reduce(powers, "sum", lengths=batch.pack.sizes)
        return [sums if order == 1 else sums.sqrt_()]
    found = list(torch._foreach_norm(tensors, order, dtype=dtype))
    if batch.mesh is None:
        return found
    sums = sum_over(batch.mesh, torch.stack(found) ** order)
    return list((sums if order == 1 else sums.sqrt()).unbind())


def for_entries(batch: Batch, numbers: list[Tensor]) -> list[Tensor]:
    """One number per parameter, in a form that can be multiplied with the parameter's entries."""
    dtype = batch.momenta[0].dtype
    if batch.pack is not None:
        return [numbers[0].to(dtype).repeat_interleave(batch.pack.sizes, output_size=batch.pack.update.numel())]
    return materialize([number.to(dtype) for number in numbers])
