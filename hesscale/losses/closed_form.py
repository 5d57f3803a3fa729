"""Functions whose first and second derivatives are known, as nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # ∂y/∂x and ∂²y/∂x², entry by entry


class Known(NamedTuple):
    """A function's value, one number per sample, and its derivatives with respect to each input (None if not needed)."""

    value: Tensor
    derivatives: list[Pair | None]


Formula = Callable[..., Known]  # (needed, *inputs, *constants), in operators that autograd can differentiate


class ClosedForm(torch.autograd.Function):
    """y = f(x₁ …). The forward pass also computes the derivatives, so that the backward pass and the rule only multiply.

    There is one subclass per formula, since hesscale caches schedules by the classes of custom functions.
    """

    generate_vmap_rule = True

    @classmethod
    def evaluate(cls, formula: Formula, inputs: Sequence[Tensor], *constants: Tensor) -> Tensor:
        """f(inputs, constants), differentiable in the inputs."""
        inputs = [wide(x) for x in inputs]
        with torch.no_grad():
            value, pairs = formula([x.requires_grad for x in inputs], *inputs, *constants)
        derivatives = [d for pair in pairs for d in pair or (None, None)]
        result: Tensor = cls.apply(formula, len(inputs), value, *inputs, *constants, *derivatives)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(formula: Formula, count: int, value: Tensor, *rest: Tensor | None) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.formula, ctx.count, _, *rest = inputs
        ctx.save_for_backward(*rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """∂y/∂x · g. If it will be differentiated again, ∂y/∂x is recomputed with a graph."""
        inputs, constants, pairs = unpack(ctx)
        if torch.is_grad_enabled():
            pairs = ctx.formula(ctx.needs_input_grad[3 : 3 + ctx.count], *inputs, *constants).derivatives
        return per_argument(ctx, [spread(g, pair[0]) * pair[0] for pair in pairs if pair])

    @staticmethod
    def hess_diag(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor | None, ...]:
        """closed form: (∂y/∂x)² s + ∂²y/∂x² g"""
        return per_argument(ctx, [curvature(pair, g, s) for pair in unpack(ctx)[2] if pair])


def unpack(ctx: Any) -> tuple[Sequence[Tensor], Sequence[Tensor], list[Pair | None]]:
    """The inputs, the constants, and the derivatives with respect to each input (None if not needed)."""
    saved, count = ctx.saved_tensors, ctx.count
    firsts, seconds = saved[-2 * count :: 2], saved[1 - 2 * count :: 2]
    pairs = [None if first is None else (first, second) for first, second in zip(firsts, seconds, strict=True)]
    return saved[:count], saved[count : -2 * count], pairs


def per_argument(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """One value per argument of ``forward``: the given values for inputs that need one, and None for all others."""
    remaining = iter(given)
    return tuple([next(remaining) if needed else None for needed in ctx.needs_input_grad])


def curvature(pair: Pair, g: Tensor | None, s: Tensor | None) -> Tensor | None:
    """(∂y/∂x)² s + ∂²y/∂x² g. None stands for zero."""
    first, second = pair
    bent = None if g is None else spread(g, first) * second
    if s is None:
        return bent
    scaled = spread(s, first) * first.square()
    return scaled if bent is None else scaled + bent


def spread(per_sample: Tensor, like: Tensor) -> Tensor:
    """One number per sample, in a shape that broadcasts to the entries of each sample."""
    return per_sample.unsqueeze(-1) if per_sample.dim() < like.dim() else per_sample


def wide(x: Tensor) -> Tensor:
    """Convert half precision to float32, as autocast does for losses."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
