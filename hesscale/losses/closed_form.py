"""Functions whose first and second derivatives are known, as nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # ∂y/∂x and ∂²y/∂x², entry by entry


class Known(NamedTuple):
    """A function's value, one number per sample, and its derivatives by each input (None where they are not needed)."""

    value: Tensor
    derivatives: list[Pair | None]


Formula = Callable[..., Known]  # (needed, *inputs, *constants), in operators that autograd can differentiate


class ClosedForm(torch.autograd.Function):
    """y = f(x₁ …), whose derivatives are computed along with y, so that backward and curvature only multiply.

    One subclass per formula: what hesscale remembers of a graph from step to step, it remembers by class.
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
        """∂y/∂x · g; with ∂y/∂x evaluated anew where it will be differentiated in turn."""
        inputs, constants, pairs = unpack(ctx)
        if torch.is_grad_enabled():
            pairs = ctx.formula(ctx.needs_input_grad[3 : 3 + ctx.count], *inputs, *constants).derivatives
        return per_argument(ctx, [spread(g, pair[0]) * pair[0] for pair in pairs if pair])

    @staticmethod
    def hess_diag(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor | None, ...]:
        """closed form: (∂y/∂x)² s + ∂²y/∂x² g"""
        return per_argument(ctx, [curvature(pair, g, s) for pair in unpack(ctx)[2] if pair])


def unpack(ctx: Any) -> tuple[Sequence[Tensor], Sequence[Tensor], list[Pair | None]]:
    """Inputs, constants, and for each input that needs them its derivatives."""
    saved, count = ctx.saved_tensors, ctx.count
    firsts, seconds = saved[-2 * count :: 2], saved[1 - 2 * count :: 2]
    pairs = [None if first is None else (first, second) for first, second in zip(firsts, seconds, strict=True)]
    return saved[:count], saved[count : -2 * count], pairs


def per_argument(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What belongs to the inputs that need it, with None for every other argument of forward."""
    remaining = iter(given)
    return tuple([next(remaining) if needed else None for needed in ctx.needs_input_grad])


def curvature(pair: Pair, g: Tensor | None, s: Tensor | None) -> Tensor | None:
    """(∂y/∂x)² s + ∂²y/∂x² g, where None stands for zero."""
    first, second = pair
    bent = None if g is None else spread(g, first) * second
    if s is None:
        return bent
    scaled = spread(s, first) * first.square()
    return scaled if bent is None else scaled + bent


def spread(per_sample: Tensor, like: Tensor) -> Tensor:
    """A number per sample, against the entries of each sample."""
    return per_sample.unsqueeze(-1) if per_sample.dim() < like.dim() else per_sample


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, as autocast does for losses."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
