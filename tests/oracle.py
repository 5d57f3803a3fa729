"""The reference: what double backward says, in float64, entry by entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def hessian_diagonal(loss: Tensor, x: Tensor) -> Tensor:
    """diag ∂²L/∂x², one double backward per entry."""
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True, retain_graph=True, allow_unused=True)
    diagonal = torch.zeros(x.shape, dtype=x.dtype)
    if gradient is None or not gradient.requires_grad:
        return diagonal
    for i in range(x.numel()):
        (row,) = torch.autograd.grad(gradient.reshape(-1)[i], x, retain_graph=True, allow_unused=True)
        if row is not None:
            diagonal.view(-1)[i] = row.reshape(-1)[i]
    return diagonal


def hessian_diagonals(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same for every input of ``function``."""
    loss = function(*inputs)
    return [hessian_diagonal(loss, x) for x in inputs]


class Separable(torch.autograd.Function):
    """L = Σ g·y (+ ½ s·(y − y₀)², which at y = y₀ has no value and no gradient): gradient g and Hessian diag(s) at y."""

    @staticmethod
    def forward(ctx, y, g, s):
        ctx.save_for_backward(g)
        ctx.curvature = s
        return (y * g).sum()

    @staticmethod
    def backward(ctx, grad_output):
        (g,) = ctx.saved_tensors
        return grad_output * g, None, None

    @staticmethod
    def hess_diag(ctx, g, s):
        """s at y, whatever arrives"""
        return ctx.curvature, None, None


def separable_loss(y: Tensor, g: Tensor | None, s: Tensor | None) -> Tensor:
    """The same loss in plain PyTorch, for the oracle."""
    shift = y - y.detach()
    return (0 if g is None else (g * shift).sum()) + (0 if s is None else 0.5 * (s * shift * shift).sum())


def finite_differences(function: Callable[..., Tensor], inputs: Sequence[Tensor], i: int, h: float = 1e-5) -> Tensor:
    """∂g_j/∂x_j of input i, from gradients on both sides: for what PyTorch differentiates twice wrongly."""
    found = torch.zeros(inputs[i].numel(), dtype=inputs[i].dtype)
    for j in range(found.numel()):
        ends = []
        for sign in (-1, 1):
            moved = [x.detach().clone().requires_grad_() for x in inputs]
            with torch.no_grad():
                moved[i].view(-1)[j] += sign * h
            ends.append(torch.autograd.grad(function(*moved), moved[i])[0].flatten()[j])
        found[j] = (ends[1] - ends[0]) / (2 * h)
    return found.view_as(inputs[i])
