"""Activations y = f(x): s_x = f'(x)² s + f''(x) g, in as few kernels as possible.

A call of a node multiplies by f' in one fused kernel, so node(s) = f' s and node(node(s)) = f'² s. For parts of a large tensor,
the same kernel is called directly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .elementwise import Pair
from .parts import entrywise
from .registry import ONE_TO_ONE, Node, Share, Shares, chain, dimension, elementwise, linear, needs, rule, saved

First = Callable[[Tensor, Tensor], Tensor]
Second = Callable[[Tensor], Tensor]
Kernels = TypeVar("Kernels", bound=Callable[[Node], tuple[First, Second]])
aten = torch.ops.aten


def curved(*names: str) -> Callable[[Kernels], Kernels]:
    """Register y = f(x). ``function(node)`` returns two functions: (v, x) ↦ f'(x) v, and x ↦ f''(x) as a new tensor."""

    def register(function: Kernels) -> Kernels:
        def apply(node: Node, g: Share, s: Share) -> Share:
            if g is None and s is None:
                return None
            first, second = function(node)

            def of_part(x: Tensor, g: Share, s: Share) -> Tensor:
                share = None if s is None else first(first(s, x), x)
                if g is None:
                    assert share is not None
                    return share
                return second(x).mul_(g) if share is None else share.addcmul_(second(x), g)

            return entrywise(of_part, saved(node, "self"), g, s)

        apply.__doc__, apply.__module__ = function.__doc__, function.__module__
        rule(*names, **ONE_TO_ONE)(apply)
        return function

    return register


def factored(node: Node, s: Share, term: Share, rate: float = 1) -> Share:
    """f' (f' s + rate · term), for f'' g = rate · f' · term. A term without other references is freed before the last product."""
    if s is None:
        return None if term is None else node(term if rate == 1 else term * rate)
    inner = node(s)
    if term is not None:
        inner.add_(term, alpha=rate)
    del term
    return node(inner)


@linear(
    *("ReluBackward0", "HardtanhBackward0", "HardshrinkBackward0", "SoftshrinkBackward0"),
    *("ThresholdBackward0", "ThresholdBackward1"),
    **ONE_TO_ONE,
)
def piecewise(node: Node, s: Tensor) -> Share:
    """f' = 0 or 1"""
    return node(s)


@linear("HardsigmoidBackward0", **ONE_TO_ONE)
def hardsigmoid(node: Node, s: Tensor) -> Share:
    """f' = ⅙ where |x| < 3, else 0"""
    return aten.hardtanh_backward(s / 36, saved(node, "self"), -3, 3)


@linear("LeakyReluBackward0", "LeakyReluBackward1", **ONE_TO_ONE)
def leaky_relu(node: Node, s: Tensor) -> Share:
    """f' = 1 where x > 0, else the slope"""
    x = saved(node, "self" if node.name() == "LeakyReluBackward0" else "result")  # x and y have the same sign
    return aten.leaky_relu_backward(s, x, saved(node, "negative_slope") ** 2, False)


@linear("RreluWithNoiseBackward0", "RreluWithNoiseBackward1", "RreluWithNoiseFunctionalBackward0", **ONE_TO_ONE)
def rrelu(node: Node, s: Tensor) -> Share:
    """f' = 1 where x > 0, else the slope that was drawn (in evaluation their mean)"""
    return node(node(s))


@elementwise("PreluKernelBackward0", curved=False)
def prelu(node: Node) -> list[Pair | None]:
    """f'_x = 1 where x > 0, else the weight; f'_w = min(x, 0)"""
    x = saved(node, "self")
    of_input = (torch.where(x > 0, 1, saved(node, "weight")), None) if needs(node, 0) else None
    return [of_input, (x.clamp(max=0), None) if needs(node, 1) else None]


@rule("TanhBackward0", **ONE_TO_ONE)
def tanh(node: Node, g: Share, s: Share) -> Share:
    """f' = 1 − y², f'' = −2y f': f' (f' s − 2y g)"""
    if g is None:
        return factored(node, s, None)
    y = saved(node, "result")
    if s is None:
        return node(y * g * -2)
    return node(node(s).addcmul_(y, g, value=-2))


@rule("SigmoidBackward0", **ONE_TO_ONE)
def sigmoid(node: Node, g: Share, s: Share) -> Share:
    """f' = y (1 − y), f'' = (1 − 2y) f': f' (f' s + (1 − 2y) g)"""
    return factored(node, s, None if g is None else torch.addcmul(g, saved(node, "result"), g, value=-2))


@elementwise("LogSigmoidBackward0")
def logsigmoid(node: Node) -> Pair:
    """f' = σ(−x), f'' = −f' (1 − f')"""
    first = torch.sigmoid(-saved(node, "self"))
    return first, torch.addcmul(-first, first, first)


@rule("EluBackward0", "EluBackward1", **ONE_TO_ONE)
def elu(node: Node, g: Share, s: Share) -> Share:
    """y = λα (e^{κx} − 1) where x < 0, with f'' = κ f'; else λx (SELU: its λ and α)"""
    return exponential_tail(node, g, s, saved(node, "input_scale"))


@rule("CeluBackward0", "CeluBackward1", **ONE_TO_ONE)
def celu(node: Node, g: Share, s: Share) -> Share:
    """y = α (e^{x/α} − 1) where x < 0, with f'' = f'/α; else x"""
    return exponential_tail(node, g, s, 1 / saved(node, "alpha"))


def exponential_tail(node: Node, g: Share, s: Share, rate: float) -> Share:
    """f' (f' s + κ g) where x < 0, else f'² s."""
    if g is None:
        return factored(node, s, None)
    x = saved(node, "result" if node.name().endswith("1") else "self")  # x and y have the same sign
    return factored(node, s, aten.hardtanh_backward(g, x, -math.inf, 0), rate)


@curved("GeluBackward0")
def gelu(node: Node) -> tuple[First, Second]:
    """f' = Φ(x) + x φ(x), f'' = (2 − x²) φ(x); or of its approximation by tanh"""
    kind = saved(node, "approximate")
    return partial(aten.gelu_backward, approximate=kind), gelu_by_tanh if kind == "tanh" else gelu_second


def gelu_second(x: Tensor) -> Tensor:
    square = x * x
    scale = 1 / math.sqrt(2 * math.pi)
    return (square * -0.5).exp_().mul_(square.mul_(-scale).add_(2 * scale))


def gelu_by_tanh(x: Tensor) -> Tensor:
    """f'' of y = ½ x (1 + t), t = tanh u, u = k (x + c x³): (1 − t²) (u' + ½ x u'' − x t u'²)."""
    k, c = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    t = (square * (k * c)).add_(k).mul_(x).tanh_()
    cubic = square * (3 * k * c)  # u' = k + cubic, x u'' = 2 cubic
    second = torch.addcmul(2 * cubic + k, cubic.add_(k).square_().mul_(x), t, value=-1)
    return aten.tanh_backward(second, t)


@curved("SiluBackward0")
def silu(node: Node) -> tuple[First, Second]:
    """p = σ(x): f' = p (1 + x (1 − p)), f'' = p (1 − p) (2 + x − 2xp)"""
    return aten.silu_backward, silu_second


def silu_second(x: Tensor) -> Tensor:
    p = torch.sigmoid(x)
    return aten.sigmoid_backward(torch.addcmul(x, x, p, value=-2).add_(2), p)


@curved("MishBackward0")
def mish(node: Node) -> tuple[First, Second]:
    """p = σ(x), t = tanh(log(1 + eˣ)): f' = t + x p (1 − t²), f'' = p (1 − t²) (2 + x (1 − p − 2tp))"""
    return aten.mish_backward, mish_second


def mish_second(x: Tensor) -> Tensor:
    p, t = torch.sigmoid(x), F.softplus(x).tanh_()
    second = (1 - p).addcmul_(t, p, value=-2).mul_(x).add_(2)
    return aten.tanh_backward(second.mul_(p), t)


@curved("HardswishBackward0")
def hardswish(node: Node) -> tuple[First, Second]:
    """f' = x/3 + ½ and f'' = ⅓ where |x| < 3; else f' = 0 or 1"""
    return aten.hardswish_backward, lambda x: aten.hardtanh_backward(torch.full_like(x, 1 / 3), x, -3, 3)


@curved("SoftplusBackward0")
def softplus(node: Node) -> tuple[First, Second]:
    """f' = σ(βx), f'' = β f' (1 − f'); beyond the threshold f' = 1"""
    first = partial(aten.softplus_backward, beta=saved(node, "beta"), threshold=saved(node, "threshold"))

    def second(x: Tensor) -> Tensor:
        slope = first(torch.ones_like(x), x)
        return torch.addcmul(slope, slope, slope, value=-1).mul_(saved(node, "beta"))

    return first, second


@rule("GluBackward0", fan_out=False)
def glu(node: Node, g: Share, s: Share) -> Shares:
    """y = a σ(b) for the halves a, b of x, p = σ(b): f'_a = p; f'_b = a p (1 − p), f''_b = (1 − 2p) f'_b"""
    x = saved(node, "self")
    dim = dimension(saved(node, "dim"), x.dim())
    a, b = x.chunk(2, dim)
    p = torch.sigmoid(b)
    first = a * p * (1 - p)
    right = chain(first, (1 - 2 * p) * first, g, s)
    left = chain(p, None, g, s)
    return None if right is None else torch.cat([torch.zeros_like(right) if left is None else left, right], dim)
