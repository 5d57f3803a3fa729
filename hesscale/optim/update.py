"""The update that all optimizers share: Algorithms 2 and 3 of the paper, and Adam, over lists of tensors.

    M ← β₁M + (1 − β₁)F        V ← β₂V + (1 − β₂)S²        U = α M̂ ⊘ (√V̂ + ε)                (Algorithm 2)
    h = Σ √V̂ ∘ U²              η = min(1, √(2Δ/h))          W ← W − ηU                        (Algorithm 3)

F is the gradient; S the Hessian diagonal, or F for Adam, whose trust region keeps an average of the diagonal beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

if TYPE_CHECKING:
    from .packing import Pack

Number = float | Tensor  # a tensor while a step is traced for :func:`hesscale.compile_step`, so that it may change later


@dataclass
class Batch:
    """Parameters of one group on one device with one dtype, and what their update needs."""

    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    curvatures: list[Tensor] = field(default_factory=list)  # empty between curvature updates
    momenta: list[Tensor] = field(default_factory=list)
    gradient_squares: list[Tensor] = field(default_factory=list)  # Adam's V
    curvature_squares: list[Tensor] = field(default_factory=list)
    steps: list[Tensor] = field(default_factory=list)
    curvature_steps: list[Tensor] = field(default_factory=list)
    pack: Pack | None = None  # the lists but the first then hold one tensor each, for all parameters

    def whole(self, tensors: list[Tensor]) -> list[Tensor]:
        """One tensor per parameter, as the other lists of the batch have them."""
        return tensors if self.pack is None else [_flatten_dense_tensors(tensors)]

    def move(self, denominators: list[Tensor], factors: list[Any], scale: Tensor | None) -> None:
        """W ← W − scale · factor · M ⊘ denominator."""
        if self.pack is not None:
            torch.div(self.momenta[0], denominators[0], out=self.pack.moves)
            steps, own = [self.pack.moves], self.pack.moves_of
        elif scale is None and not isinstance(factors[0], Tensor):
            torch._foreach_addcdiv_(self.params, self.momenta, denominators, [-factor for factor in factors])
            return
        else:
            steps = own = list(torch._foreach_div(self.momenta, denominators))
        torch._foreach_mul_(steps, factors)
        if scale is not None:
            torch._foreach_mul_(steps, scale)
            for step in steps:
                step.nan_to_num_(0.0, 0.0, 0.0)  # ∞ · 0
        torch._foreach_sub_(self.params, own)


def average(batch: Batch, betas: tuple[Number, Number], alive: Tensor | None) -> None:
    """Move the averages on; ``alive`` is a 0-d tensor that is 0 where this step must leave no trace."""
    beta1, beta2 = betas
    count(batch.steps, alive)
    if batch.curvatures:
        count(batch.curvature_steps, alive)
    if alive is not None and batch.momenta[0].dtype is torch.float64:
        alive = alive.double()  # so that β keeps its digits
    keep2 = kept(beta2, alive)
    if alive is None:
        torch._foreach_lerp_(batch.momenta, batch.gradients, float(1 - beta1))
    else:
        torch._foreach_mul_(batch.momenta, kept(beta1, alive))
        add(batch.momenta, batch.gradients, 1 - beta1)
    if batch.gradient_squares:
        torch._foreach_mul_(batch.gradient_squares, keep2)
        add_squares(batch.gradient_squares, batch.gradients, 1 - beta2)
    if batch.curvatures:
        torch._foreach_mul_(batch.curvature_squares, keep2)
        add_squares(batch.curvature_squares, batch.curvatures, 1 - beta2)


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


def count(steps: list[Tensor], alive: Tensor | None) -> None:
    if alive is None:
        torch._foreach_add_(steps, 1)
    else:
        torch._foreach_add_(steps, [alive] * len(steps))  # one tensor for all would be read on the host


def kept(beta: Number, alive: Tensor | None) -> Number:
    return beta if alive is None else 1 - (1 - beta) * alive


def quotient(batch: Batch, lr: Number, betas: tuple[Number, Number], eps: Number, warmup: Number) -> tuple[list[Tensor], Any]:
    """U = factor · M ⊘ denominator, with √V + ε√(1 − β₂ᵗ) as denominator, in new tensors.

    Zero before V has seen anything, and until the average of curvatures has seen more than ``warmup``.
    """
    beta1, beta2 = betas
    by_gradient = bool(batch.gradient_squares)
    squares, steps = (batch.gradient_squares, batch.steps) if by_gradient else (batch.curvature_squares, batch.curvature_steps)
    scales = [c**0.5 for c in corrections(beta2, steps)]
    denominators = list(torch._foreach_sqrt(squares))
    torch._foreach_add_(denominators, computed_once([eps * scale + (scale == 0) for scale in scales]))
    if isinstance(eps, Tensor) or eps == 0:  # an entry that has seen nothing stays
        denominators = [torch.where(d == 0, torch.inf, d) for d in denominators]
    firsts = corrections(beta1, batch.steps)
    factors = [lr * s / (first + (first == 0)) for s, first in zip(scales, firsts, strict=True)]
    if batch.curvature_steps and (isinstance(warmup, Tensor) or warmup):
        factors = [factor * (count > warmup) for factor, count in zip(factors, counts(batch.curvature_steps), strict=True)]
    return denominators, computed_once(factors)


def root(squares: list[Tensor], steps: list[Tensor], beta2: Number, bias_correction: bool) -> list[Tensor]:
    """√V̂, in new tensors."""
    roots = list(torch._foreach_sqrt(squares))
    if bias_correction:
        torch._foreach_div_(roots, computed_once([c**0.5 + (c == 0) for c in corrections(beta2, steps)]))
    return roots


def corrections(beta: Number, steps: list[Tensor]) -> list[Any]:
    """1 − βᵗ: numbers on a CPU, tensors elsewhere, where reading a number would stall."""
    if not steps or is_on_host(steps[0]):
        return [1 - beta**count for count in counts(steps)]
    rate = beta.clamp_min(1e-30).log() if isinstance(beta, Tensor) else math.log(max(beta, 1e-30))
    if torch.compiler.is_compiling():  # which puts these into the kernels that use them
        return [-torch.expm1(step * rate) for step in steps]
    found = torch._foreach_mul(steps, rate)
    torch._foreach_expm1_(found)  # in float32, 1 − 0.999 would lose four digits
    torch._foreach_neg_(found)
    return list(found)


def counts(steps: list[Tensor]) -> list[Any]:
    """Numbers on a CPU, tensors elsewhere."""
    return [float(step if step.dim() == 0 else step.tolist()[0]) if is_on_host(step) else step for step in steps]


def computed_once(numbers: list[Any]) -> list[Any]:
    """Numbers in memory of their own where a step is traced for a CPU: a compiler would compute them again for every entry."""
    is_traced = torch.compiler.is_compiling() and numbers[0].device.type == "cpu"
    return list(torch.stack(numbers).unbind()) if is_traced else numbers


def is_on_host(tensor: Tensor) -> bool:
    """Whether the value of a tensor can be read at no cost: on a CPU, unless the step is being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def quadratic(batch: Batch, denominators: list[Tensor], factors: Any, beta2: Number, bias_correction: bool) -> Tensor:
    """Σ √V̂ ∘ U², the curvature along the update."""
    weighted = list(torch._foreach_div(batch.momenta, denominators))
    torch._foreach_mul_(weighted, factors)
    torch._foreach_mul_(weighted, weighted)
    torch._foreach_mul_(weighted, root(batch.curvature_squares, batch.curvature_steps, beta2, bias_correction))
    dtype = torch.float32 if weighted[0].dtype == torch.bfloat16 else None
    return torch.stack([w.nan_to_num_(0.0, math.inf).sum(dtype=dtype) for w in weighted]).sum()  # 0·∞: no curvature


def trust(h: Tensor, radius: Number) -> Tensor:
    """η = min(1, √(2Δ/h)), 1 where h = 0 and 0 where it is infinite."""
    return (2 * radius / h).sqrt().clamp_max(1)
