"""Bounds on the update U = factor · M ⊘ D. They are not in the paper.

    damping δ       D ← D + δ mean(D)                      damped
    update_clip γ   D ← max(D, |M̂|/γ)                      clip_entries: no entry of M̂ ⊘ D exceeds γ, before graft
    graft (a, b)    factor ← factor · clip(r, a, b) / r    match_adam: U is a to b times as long as Adam's update αA

Means and lengths are those of one parameter tensor. A = M̂ ⊘ (√V̂ of the gradient + ε), and r = ‖M̂ ⊘ D‖ / ‖A‖.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed.shards import sum_over
from .scalars import Number, clamp, each, is_on_host, materialize, on_host

if TYPE_CHECKING:
    from .batches import Batch

NEUTRAL: dict[str, Any] = {"damping": 0.0, "update_clip": None, "graft": None}  # the paper's optimizers, without bounds
SAFE_DAMPING, SAFE_GRAFT = 0.03, (1.0, 1.0)  # the defaults of AdaHesScale and AdaHesScaleGN
LONG_ENTRY = 100  # times the step size; a larger entry of one of the first WATCHED_STEPS updates causes a warning
WATCHED_STEPS = 10
LARGEST = 1e30  # in place of an infinite b of ``graft``, since ∞ times a length of 0 would not be a number

Lengths = tuple[list[Any], list[Any]]  # of M ⊘ D, and what they are multiplied by for M ⊘ (√V̂ + ε)


def needs_adam(group: dict[str, Any]) -> bool:
    """Whether the length of Adam's update is needed, which takes an average of squared gradients."""
    return group["graft"] is not None


def damped(batch: Batch, denominators: list[Tensor], roots: list[Any]) -> list[Any]:
    """What to add to each parameter's √V: δ mean(√V) + ε√(1 − β₂ᵗ), whose last factor is in ``roots``."""
    damping, eps = batch.group["damping"], batch.group["eps"]
    return each(lambda mean, root: damping * mean + eps * root + (root == 0), means(batch, denominators), roots)


def clip_entries(batch: Batch, denominators: list[Tensor], ratios: list[Any]) -> None:
    """D ← max(D, |M̂|/γ). Without the step size, the update is ratio · M ⊘ D."""
    limit = batch.group["update_clip"]
    least = list(torch._foreach_abs(batch.momenta))
    torch._foreach_mul_(least, materialize(each(lambda ratio: ratio / limit, ratios)))
    torch._foreach_maximum_(denominators, least)


def match_adam(batch: Batch, factors: list[Any], own: Lengths, adam: Lengths) -> list[Any]:
    """Bring the length of each parameter's update between two multiples of the length of Adam's update."""
    low, high = batch.group["graft"]
    high = clamp(high, 0.0, LARGEST)

    def matched(factor: Number, length: Number, root: Number, adam_length: Number, adam_root: Number) -> Any:
        target = adam_length * adam_root / (root + (root == 0))
        return factor * clamp(length, low * target, high * target) / (length + (length == 0))

    return each(matched, factors, *own, *adam)


def norms(batch: Batch, tensors: list[Tensor]) -> list[Any]:
    """The Euclidean norm of each parameter's part, at least in single precision."""
    dtype = sum_dtype(tensors)
    if batch.pack is not None:
        return [total**0.5 for total in batch.pack.sums(tensors[0].to(dtype).square())]
    found = list(torch._foreach_norm(tensors, 2, dtype=dtype))
    if batch.mesh is not None:
        found = list(sum_over(batch.mesh, torch.stack(found).square()).sqrt().unbind())
    return on_host(found)


def means(batch: Batch, tensors: list[Tensor]) -> list[Any]:
    """The mean of each parameter's part, at least in single precision, of tensors without negative entries."""
    dtype = sum_dtype(tensors)
    if batch.pack is not None:
        return [total / size for total, size in zip(batch.pack.sums(tensors[0].to(dtype)), batch.sizes(), strict=True)]
    if is_on_host(tensors[0]):  # where a norm takes ten times as long as a sum
        found = [tensor.sum(dtype=dtype) for tensor in tensors]
    else:
        found = list(torch._foreach_norm(tensors, 1, dtype=dtype))
    if batch.mesh is not None:
        found = list(sum_over(batch.mesh, torch.stack(found)).unbind())
    return on_host(list(torch._foreach_div(found, batch.sizes())))


def sum_dtype(tensors: list[Tensor]) -> torch.dtype:
    return torch.float64 if tensors[0].dtype == torch.float64 else torch.float32


def for_entries(batch: Batch, numbers: list[Any]) -> list[Any]:
    """One number per parameter, or one for all, in a form that can be multiplied with the entries of the batch's tensors."""
    return materialize(numbers) if batch.pack is None or len(numbers) == 1 else [batch.pack.for_entries(numbers)]
