"""The update that all optimizers share: Algorithm 2 of the paper, and Adam, over lists of tensors.

    M ← β₁M + (1 − β₁)F        V ← β₂V + (1 − β₂)S²        update_averages
    M̂ = M/(1 − β₁ᵗ)            V̂ = V/(1 − β₂ᵗ)             bias_corrections
    U = α M̂ ⊘ (√V̂ + ε)                                     updates_of
    W ← W − ηU                                             apply_update

F is the gradient, and S the Hessian diagonal. In Adam, V averages F² instead; its trust region needs an average of S² too.
:mod:`hesscale.optim.bounds` may enlarge the denominator. η is 1, or less where :mod:`hesscale.optim.trust_region` shortens the
step.

A ``mask`` is a 0-d tensor: 1 for a step that counts, 0 for one that must change nothing. It is None if it is known to be 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import bounds
from .batches import Batch
from .scalars import Number, each, is_nonzero, is_on_host, step_numbers


def regularize(batch: Batch, mask: Tensor | None) -> None:
    """Negate the derivatives for ``maximize``, add those of the L2 penalty, and set them to 0 if the step is masked out."""
    group = batch.group
    if group["maximize"]:
        batch.gradients = list(torch._foreach_neg(batch.gradients))
        batch.curvatures = list(torch._foreach_neg(batch.curvatures)) if batch.curvatures else []
    if is_nonzero(group["weight_decay"]) and not group["decoupled_weight_decay"]:
        penalty = list(torch._foreach_mul(batch.pack_like(batch.params), group["weight_decay"]))
        torch._foreach_add_(penalty, batch.gradients)
        batch.gradients = penalty
        if batch.curvatures:
            batch.curvatures = list(torch._foreach_add(batch.curvatures, group["weight_decay"]))
    if mask is not None:
        counts = mask.to(batch.params[0].device) > 0
        batch.gradients = [torch.where(counts, t, 0) for t in batch.gradients]
        batch.curvatures = [torch.where(counts, t, 0) for t in batch.curvatures]


def update_averages(batch: Batch, mask: Tensor | None) -> None:
    """M ← β₁M + (1 − β₁)F and V ← β₂V + (1 − β₂)S², and count the step; V only when there is new curvature."""
    beta1, beta2 = batch.group["betas"]
    if mask is not None:
        mask = mask.to(batch.params[0].device)
    count_step(batch.steps, mask)
    if batch.curvatures:
        count_step(batch.curvature_steps, mask)
    if mask is not None and batch.momenta[0].dtype is torch.float64:
        mask = mask.double()  # in float32, β would lose digits
    decay2 = masked_decay(beta2, mask)
    if mask is None:
        torch._foreach_lerp_(batch.momenta, batch.gradients, float(1 - beta1))
    else:
        torch._foreach_mul_(batch.momenta, masked_decay(beta1, mask))
        add(batch.momenta, batch.gradients, 1 - beta1)
    if batch.gradient_squares:
        torch._foreach_mul_(batch.gradient_squares, decay2)
        add_squares(batch.gradient_squares, batch.gradients, 1 - beta2)
    if batch.curvatures:
        torch._foreach_mul_(batch.curvature_squares, decay2)
        add_squares(batch.curvature_squares, batch.curvatures, 1 - beta2)


def masked_decay(beta: Number, mask: Tensor | None) -> Number:
    """β, or 1 where the step is masked out."""
    return beta if mask is None else 1 - (1 - beta) * mask


def count_step(steps: list[Tensor], mask: Tensor | None) -> None:
    if mask is None:
        torch._foreach_add_(steps, 1)
    else:
        torch._foreach_add_(steps, [mask] * len(steps))  # a single tensor for all of them would be read on the host


def add(totals: list[Tensor], values: list[Tensor], factor: Number) -> None:
    if isinstance(factor, Tensor):
        torch._foreach_add_(totals, torch._foreach_mul(values, factor))
    else:
        torch._foreach_add_(totals, values, alpha=factor)


def add_squares(totals: list[Tensor], values: list[Tensor], factor: Number) -> None:
    if isinstance(factor, Tensor):
        add(totals, list(torch._foreach_mul(values, values)), factor)
    else:
        torch._foreach_addcmul_(totals, values, values, factor)


def bias_corrections(beta: Number, steps: list[Tensor]) -> list[Any]:
    """1 − βᵗ: numbers on a CPU; tensors elsewhere, since reading a number would wait for the device."""
    if not steps or is_on_host(steps[0]):
        return [1 - beta**t for t in step_numbers(steps)]
    rate = beta.clamp_min(1e-30).log() if isinstance(beta, Tensor) else math.log(max(beta, 1e-30))
    if torch.compiler.is_compiling():  # the compiler fuses these into the kernels that use them
        return [-torch.expm1(step * rate) for step in steps]
    found = torch._foreach_mul(steps, rate)
    torch._foreach_expm1_(found)  # in float32, 1 − 0.999 would lose four digits
    torch._foreach_neg_(found)
    return list(found)


def updates_of(batch: Batch) -> list[Tensor]:
    """U = α M̂ ⊘ (√V̂ + ε), written as factor · M ⊘ (√V + ε√(1 − β₂ᵗ)).

    U is zero until V has averaged a first square, and more than ``curvature_warmup`` Hessian diagonals.
    """
    group = batch.group
    if bounds.needs_adam(group):  # first, so that its tensors are gone when the others are made
        adam, adam_roots = denominators_of(batch, batch.gradient_squares, batch.steps, damped=False)
        adam_lengths = bounds.norms(batch, divide(batch, adam))
        del adam
    if batch.squares_gradient:
        squares, steps = batch.gradient_squares, batch.steps
    else:
        squares, steps = batch.curvature_squares, batch.curvature_steps
    denominators, roots = denominators_of(batch, squares, steps, damped=True)
    firsts = bias_corrections(group["betas"][0], batch.steps)
    if group["update_clip"] is not None:
        bounds.clip_entries(batch, denominators, each(ratio, roots, firsts))
    updates = divide(batch, denominators)
    factors = each(lambda root, first: group["lr"] * ratio(root, first), roots, firsts)
    if batch.curvature_steps and is_nonzero(group["curvature_warmup"]):
        seen = step_numbers(batch.curvature_steps)
        factors = each(lambda factor, count: factor * (count > group["curvature_warmup"]), factors, seen)
    if bounds.needs_adam(group):
        lengths = bounds.norms(batch, updates)
        if not isinstance(lengths[0], Tensor) and math.inf in lengths:  # for tensors, apply_update does this
            for u in updates:
                u.nan_to_num_(0.0, 0.0, 0.0)  # an infinite length makes the factor 0, and 0 · ∞ is NaN
        factors = bounds.match_adam(batch, factors, (lengths, roots), (adam_lengths, adam_roots))
    torch._foreach_mul_(updates, bounds.for_entries(batch, factors))
    return updates


def ratio(root: Number, first: Number) -> Number:
    """√(1 − β₂ᵗ)/(1 − β₁ᵗ), by which M ⊘ √V is multiplied for M̂ ⊘ √V̂."""
    return root / (first + (first == 0))


def denominators_of(batch: Batch, squares: list[Tensor], steps: list[Tensor], *, damped: bool) -> tuple[list[Tensor], list[Any]]:
    """√V + ε√(1 − β₂ᵗ) in new tensors, and √(1 − β₂ᵗ)."""
    eps, beta2 = batch.group["eps"], batch.group["betas"][1]
    roots = each(lambda correction: correction**0.5, bias_corrections(beta2, steps))
    denominators = list(torch._foreach_sqrt(squares))
    if damped and is_nonzero(batch.group["damping"]):
        terms = bounds.damped(batch, denominators, roots)
    else:
        terms = each(lambda root: eps * root + (root == 0), roots)
    torch._foreach_add_(denominators, bounds.for_entries(batch, terms))
    if isinstance(eps, Tensor) or eps == 0:  # a weight does not change where V is 0
        denominators = [d.masked_fill_(d == 0, torch.inf) for d in denominators]
    return denominators, roots


def divide(batch: Batch, denominators: list[Tensor]) -> list[Tensor]:
    """M ⊘ D. On a CPU, it is written over D or into the pack, since new memory costs more there than the division."""
    if not is_on_host(denominators[0]):
        return list(torch._foreach_div(batch.momenta, denominators))
    memory = denominators if batch.pack is None else [batch.pack.update]
    return [torch.div(m, d, out=out) for m, d, out in zip(batch.momenta, denominators, memory, strict=True)]


def longest_entry(batch: Batch, updates: list[Tensor], eta: Tensor | None) -> float:
    """The largest entry of |ηU|/α. It waits for the device."""
    lr = float(batch.group["lr"])
    if lr == 0:
        return 0.0
    updates = [u for u in updates if u.numel()]
    longest = float(torch.stack(list(torch._foreach_norm(updates, math.inf))).max()) if updates else 0.0
    return longest * (1.0 if eta is None else float(eta)) / lr


def apply_update(batch: Batch, updates: list[Tensor], eta: Tensor | None, mask: Tensor | None) -> None:
    """W ← W − ηU, after decoupled weight decay; η is 1 where it is None. It changes U."""
    scale = eta if mask is None else mask if eta is None else eta * mask
    if scale is not None:
        scale = scale.to(batch.params[0].device)
    decay_weights(batch, scale)
    if scale is not None:
        torch._foreach_mul_(updates, scale)
        for u in updates:
            u.nan_to_num_(0.0, 0.0, 0.0)  # ∞ · 0
    torch._foreach_sub_(batch.params, updates if batch.pack is None else batch.pack.update_views)


def decay_weights(batch: Batch, scale: Tensor | None) -> None:
    """W ← (1 − αλ)W if weight decay is decoupled, unless ``scale`` is 0."""
    group = batch.group
    if group["decoupled_weight_decay"] and is_nonzero(group["weight_decay"]):
        decay = group["lr"] * group["weight_decay"]
        if scale is not None:
            decay = decay * (scale > 0).to(batch.params[0].dtype)
        torch._foreach_mul_(batch.params, 1 - decay)
