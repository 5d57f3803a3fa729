"""Fused losses of torch.nn.functional, with their reductions.

A mean over n entries divides f' and f'' by n, so the share of an entry is s (f'/n)² + g f''/n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..engine.nodes import derivative
from .registry import REFUSED, Node, Share, chain, linear, needs, rule, saved

Pair = tuple[Any, Any]
NONE, MEAN, SUM = range(3)  # at::Reduction


def elementwise_loss(*names: str, **facts: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a loss that sums or averages f(x, t). ``function(node, x, t)`` returns one pair (f', f'') for each input."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def apply(node: Node, g: Share, s: Share) -> list[Share]:
            x, reduction = saved(node, "self"), saved(node, "reduction")
            if reduction == MEAN:
                g = None if g is None else g / x.numel()
                s = None if s is None else s / x.numel() ** 2
            pairs = function(node, x, saved(node, "target"))
            shares = [chain(first, second, g, s) if needs(node, i) else None for i, (first, second) in enumerate(pairs)]
            return shares if reduction == NONE else [None if share is None else share.expand(x.shape) for share in shares]

        apply.__doc__, apply.__module__ = function.__doc__, function.__module__
        rule(*names, **{"separable": True, "fan_out": False, "same": input_is_target, "refuse": unequal_shapes, **facts})(apply)
        return function

    return register


def input_is_target(node: Node, g: Share, s: Share) -> list[Share]:
    """The same tensor as input and target: f' is the sum of both derivatives, and f'' its derivative by autograd."""
    y, share = node._input_metadata[0], None
    with torch.enable_grad():
        if s is not None:
            first = sum(node(torch.ones(y.shape, dtype=y.dtype, device=y.device))).detach()
            share = s * first.to(s.dtype) ** 2
        if g is not None:
            gradient = sum(node(g.to(y.dtype)))
            term = derivative(gradient, node.next_functions[0], torch.ones_like(gradient), node)
            share = term if share is None or term is None else share + term
    return [share, None]


def unequal_shapes(node: Node) -> str | None:
    """Refuse unequal shapes, over which PyTorch averages wrongly. torch.nn.functional broadcasts them first."""
    shapes = tuple(node._saved_self.shape), tuple(node._saved_target.shape)
    return None if shapes[0] == shapes[1] else f"input and target have shapes {shapes[0]} and {shapes[1]}; broadcast them first."


@elementwise_loss("MseLossBackward0")
def squared_error(node: Node, x: Tensor, t: Tensor) -> list[Pair]:
    """f = (x − t)²: f' = ±2 (x − t), f'' = 2"""
    return [(2 * (x - t), 2)] * 2


@elementwise_loss("HuberLossBackward0")
def huber(node: Node, x: Tensor, t: Tensor) -> list[Pair]:
    """f' = ±(x − t) clipped to ±δ, f'' = 1 inside"""
    error, delta = x - t, saved(node, "delta")
    return [(error.clamp(-delta, delta), (error.abs() < delta).to(error.dtype))] * 2


@elementwise_loss("SmoothL1LossBackward0")
def smooth_l1(node: Node, x: Tensor, t: Tensor) -> list[Pair]:
    """f' = ±(x − t)/β clipped to ±1, f'' = 1/β inside"""
    error, beta = x - t, saved(node, "beta")
    if beta == 0:
        return [(error.sign(), None)] * 2
    return [((error / beta).clamp(-1, 1), (error.abs() < beta).to(error.dtype) / beta)] * 2


@elementwise_loss("SoftMarginLossBackward0", refuse=None)
def soft_margin(node: Node, x: Tensor, t: Tensor) -> list[Pair]:
    """f = log(1 + exp(−t x)): f' = −t σ(−t x), f'' = t² σ(t x) σ(−t x)"""
    first = -t * torch.sigmoid(-t * x)
    return [(first, -t * first * torch.sigmoid(t * x))]


@elementwise_loss("BinaryCrossEntropyBackward0", curved=(True, False))
def binary_cross_entropy(node: Node, x: Tensor, t: Tensor) -> list[Pair]:
    """f' = w (x − t) / (x − x²), f'' = w (x² − 2 x t + t) / (x − x²)²; in t: f' = −w logit x, f'' = 0"""
    tiny = 1e-12  # PyTorch bounds denominators from below by this number, and logarithms by −100
    weight = saved(node, "weight")
    weight = 1 if weight is None else weight
    first = weight * (x - t) / (x - x * x).clamp_min(tiny)
    second = weight * (x * x - 2 * x * t + t) / ((x + tiny) * (1 - x + tiny)) ** 2
    in_target = weight * ((1 - x).log().clamp_min(-100) - x.log().clamp_min(-100)) if needs(node, 1) else None
    return [(first, second), (in_target, None)]


@elementwise_loss("BinaryCrossEntropyWithLogitsBackward0", curved=(True, False))
def binary_cross_entropy_with_logits(node: Node, x: Tensor, t: Tensor) -> list[Pair]:
    """q = σ(x), c = 1 + (p − 1) t: f' = w (c q − p t), f'' = w c (q − q²); in t: f' = w ((p − 1) softplus(−x) − x), f'' = 0"""
    weight, positive = saved(node, "weight"), saved(node, "pos_weight")
    weight = 1 if weight is None else weight
    positive = 1 if positive is None else positive
    q, total = torch.sigmoid(x), 1 + (positive - 1) * t
    in_target = weight * ((positive - 1) * functional.softplus(-x) - x) if needs(node, 1) else None
    return [(weight * (total * q - positive * t), weight * total * (q - q * q)), (in_target, None)]


def squared_jacobian(node: Node, s: Tensor) -> Tensor:
    """s J² for losses where each entry of the input reaches one entry of y: that of its sample, or the only one."""
    y = node._input_metadata[0]
    jacobian = node(torch.ones(y.shape, dtype=y.dtype, device=y.device)).to(s.dtype)
    return (s.unsqueeze(1) if s.dim() else s) * jacobian**2


@linear("NllLossBackward0", "NllLoss2DBackward0", fan_out=False)
def negative_log_likelihood(node: Node, s: Tensor) -> Tensor:
    """∂y/∂x = −w at the target class, over Σw for a mean"""
    return squared_jacobian(node, s)


@linear("MultilabelMarginLossBackward0", fan_out=False)
def multilabel_margin(node: Node, s: Tensor) -> Tensor:
    """piecewise linear: its own backward at 1, squared"""
    return squared_jacobian(node, s)


@rule("MultiMarginLossBackward0", fan_out=False)
def multi_margin(node: Node, g: Share, s: Share) -> Share:
    """Σ_{j≠t} w max(0, m − x_t + x_j)ᵖ / C: for p = 2, f'' = 2 w / C for positive terms, and 2 w / C times their number at t"""
    share = None if s is None else squared_jacobian(node, s)
    if g is None or saved(node, "p") == 1:
        return share
    x, weight = saved(node, "self"), saved(node, "weight")
    rows = x.reshape(-1, x.shape[-1])
    target = saved(node, "target").reshape(-1, 1)
    active = (rows - rows.gather(1, target) + saved(node, "margin") > 0).to(g.dtype).scatter(1, target, 0)
    second = active.scatter(1, target, active.sum(1, keepdim=True)) * (2 / rows.shape[1])
    if weight is not None:
        second = second * weight[target]
    if saved(node, "reduction") == MEAN:
        second = second / rows.shape[0]
    term = (g.reshape(-1, 1) * second).reshape(x.shape)
    return term if share is None else share + term


@rule("CtcLossBackward0", "CtcLossBackward1", fan_out=False)
def ctc(node: Node, g: Share, s: Share) -> Share:
    """p = exp x, q the posterior probability of each symbol: f' = p − q, f'' = p − q + q²

    This follows PyTorch, whose gradient is that of −log P + Σ p. If x are log-probabilities, Σ p is constant. P is linear in
    every p.
    """
    log_p, y = saved(node, "log_probs"), node._input_metadata[0]
    first = node(torch.ones(y.shape, dtype=y.dtype, device=y.device)).to(log_p.dtype)
    q = torch.where(ctc_counts(node, log_p), log_p.exp() - first, 0)
    return chain(first, first + q * q, *(None if v is None else v.unsqueeze(-1) for v in (g, s)))


def ctc_counts(node: Node, log_p: Tensor) -> Tensor:
    """Which time steps count, as (time, batch, 1). With ``zero_infinity``, none of a sample without an alignment."""
    lengths = torch.as_tensor(saved(node, "input_lengths"), device=log_p.device)
    counts = torch.arange(len(log_p), device=log_p.device).unsqueeze(1) < lengths
    if saved(node, "zero_infinity"):
        counts = counts & ~saved(node, "result0").isposinf()
    return counts.unsqueeze(-1)


REFUSED["CudnnCtcLoss"] = "cuDNN's CTC loss has no curvature rule. Compute it under torch.backends.cudnn.flags(enabled=False)"
