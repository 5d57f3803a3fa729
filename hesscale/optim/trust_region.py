"""Algorithm 3 of the paper: a trust region of radius Δ shortens the update U by a factor η.

    h = Σ √V̂ ∘ U²              curvature_along_update
    η = min(1, √(2Δ/h))        step_scale

The sum runs over all parameters of the region: those of the optimizer, or of one group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..distributed.shards import sum_over
from .batches import Batch
from .options import check_range
from .scalars import Number, counter, each, materialize
from .update import bias_corrections


def check_radii(groups: list[dict[str, Any]], trust_region: str) -> None:
    """Raise if one trust region is given different radii. Radii that are tensors are not compared."""
    radii = [group["trust_radius"] for group in groups if "trust_radius" in group]
    is_plain = not any(isinstance(radius, Tensor) for radius in radii)
    if trust_region == "optimizer" and is_plain and len(set(radii)) > 1:
        raise ValueError("one trust region has one trust_radius; pass trust_region='group' to give each group its own")


def step_scales(
    batches: list[Batch], updates: list[list[Tensor]], trust_region: str, counters: dict[str, Tensor], mask: Tensor | None
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """η of each trust region, None if it has no gradients in this step; and η of each batch, None outside all trust regions.

    Counts the step in ``counters``, unless ``mask`` is 0.
    """
    regions = batches_by_region(batches, trust_region)
    by_region: list[Tensor | None] = [None] * (max(regions) + 1 if regions else 0)
    by_batch: list[Tensor | None] = [None] * len(batches)
    for region, members in regions.items():
        parts = [curvature_along_update(batches[i], updates[i]) for i in members]
        h = torch.stack([part.to(parts[0].device) for part in parts]).sum()
        eta = step_scale(h, batches[members[0]].group["trust_radius"])
        count_scaled_step(counters, region, eta, mask)
        by_region[region] = eta
        for i in members:
            by_batch[i] = eta
    return by_region, by_batch


def batches_by_region(batches: list[Batch], trust_region: str) -> dict[int, list[int]]:
    """The positions of the batches in each trust region: region 0 for the whole optimizer, else the index of the group."""
    regions: dict[int, list[int]] = {}
    for i, batch in enumerate(batches):
        if batch.group["trust_radius"] is not None:
            regions.setdefault(batch.group_index if trust_region == "group" else 0, []).append(i)
    return regions


def curvature_along_update(batch: Batch, updates: list[Tensor]) -> Tensor:
    """h = Σ √V̂ ∘ U², this batch's part of it."""
    terms = list(torch._foreach_mul(updates, updates))
    torch._foreach_mul_(terms, root_of_curvature(batch))
    dtype = torch.float32 if terms[0].dtype == torch.bfloat16 else None
    h = torch.stack([term.nan_to_num_(0.0, math.inf).sum(dtype=dtype) for term in terms]).sum()  # 0·∞: no curvature
    return sum_over(batch.mesh, h)


def root_of_curvature(batch: Batch) -> list[Tensor]:
    """√V̂ of the Hessian diagonal in new tensors, or √V without ``bias_correction``."""
    roots = list(torch._foreach_sqrt(batch.curvature_squares))
    if batch.group["bias_correction"]:
        corrections = bias_corrections(batch.group["betas"][1], batch.curvature_steps)
        torch._foreach_div_(roots, materialize(each(lambda c: c**0.5 + (c == 0), corrections)))
    return roots


def step_scale(h: Tensor, radius: Number) -> Tensor:
    """η = min(1, √(2Δ/h)): 1 where h = 0, and 0 where h is infinite."""
    return (2 * radius / h).sqrt().clamp_max(1)


def count_scaled_step(counters: dict[str, Tensor], region: int, eta: Tensor, mask: Tensor | None) -> None:
    """Count a step of a trust region, and whether η shortened it."""
    counts = 1 if mask is None else (mask > 0).to(eta.device)
    counter(counters, f"measured {region}", eta.device).add_(counts)
    counter(counters, f"scaled {region}", eta.device).add_((eta < 1) * counts)


def scaled_shares(counters: dict[str, Tensor]) -> dict[int, Tensor]:
    """The share of steps with η < 1, by trust region."""
    regions = [name.removeprefix("scaled ") for name in counters if name.startswith("scaled ")]
    return {int(region): counters[f"scaled {region}"] / counters[f"measured {region}"] for region in regions}


def adapt_trust_radius(groups: Iterable[dict[str, Any]], measured: float, target: float, *, max_factor: float = 2.0) -> None:
    """Adapt the trust radius of parameter groups, so that the effect of their steps comes closer to a target.

    The effect may be any number that grows with the square of the steps' length, as Δ does. An example is the KL divergence
    between the policies before and after an update. So Δ is multiplied by target / measured, within limits.

    Args:
        groups: entries of ``optimizer.param_groups``. If one trust region has all groups, pass all of them.
        measured: the effect since the radius was last adapted.
        target: the desired effect.
        max_factor: Δ grows and shrinks by at most this factor.

    Raises:
        ValueError: if ``measured`` is NaN, an option is out of range, or a group has no trust radius.

    Example:
        >>> import torch, hesscale
        >>> w = torch.ones(2, requires_grad=True)
        >>> optimizer = hesscale.AdaHesScale.paper([w], lr=1.0, trust_radius=1e-7)
        >>> hesscale.optim.adapt_trust_radius(optimizer.param_groups, measured=0.015, target=0.02)
        >>> optimizer.param_groups[0]["trust_radius"]
        1.3333333333333334e-07
    """
    groups = list(groups)
    check_range("measured", measured, not math.isnan(measured), "a number")
    check_range("target", target, target > 0, "positive")
    check_range("max_factor", max_factor, max_factor >= 1, "at least 1")
    if any(group["trust_radius"] is None for group in groups):
        raise ValueError("a parameter group has no trust_radius to adapt; create the optimizer with an initial trust_radius")
    factor = min(max(target / measured, 1 / max_factor), max_factor) if measured > 0 else max_factor
    for group in groups:
        group["trust_radius"] = group["trust_radius"] * factor  # a new tensor, since other groups may have the old one
