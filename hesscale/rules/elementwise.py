"""Elementwise maps y = f(x): Eq. (4) with a diagonal Jacobian, s_x = f'(x)² s + f''(x) g."""

from __future__ import annotations

from typing import Any

from .registry import Node, Share, Shares, elementwise, elementwise_auto, needs, rule, saved

Pair = tuple[Any, Any]


@rule("TanhBackward0", fan_in=False, fan_out=False, broadcast=True)
def tanh(node: Node, g: Share, s: Share) -> Share:
    """f' = 1 − y², f'' = −2 y f'"""
    y = saved(node, "result")
    first = 1 - y * y
    if g is None:
        return None if s is None else s * first * first
    if s is None:
        return g * y * first * -2
    return (s * first).addcmul_(y, g, value=-2).mul_(first)


@elementwise("MulBackward0")
def mul(node: Node) -> list[Pair | None]:
    """f' = the other factor, f'' = 0"""
    return [(saved(node, "other"), None) if needs(node, 0) else None, (saved(node, "self"), None) if needs(node, 1) else None]


@elementwise("AddBackward0", curved=False)
def add(node: Node) -> list[Pair | None]:
    """f' = 1 and alpha"""
    return [(1, None), (saved(node, "alpha"), None)]


@elementwise("PowBackward0")
def power(node: Node) -> Pair:
    """f' = n xⁿ⁻¹, f'' = n (n − 1) xⁿ⁻²"""
    x, n = saved(node, "self"), saved(node, "exponent")
    return n * x ** (n - 1), n * (n - 1) * x ** (n - 2)


@rule("ErfinvBackward0", fan_in=False, fan_out=False, broadcast=True)
def differentiated(node: Node, g: Share, s: Share) -> Shares:
    """f' = node(1), f'' = its derivative by autograd"""
    return elementwise_auto(node, g, s)
