"""Softmax and log_softmax: dense Jacobians whose rules take linear time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import kernels
from .registry import BL89, Node, Share, chain, dimension, rule, saved


@rule("SoftmaxBackward0", "SafeSoftmaxBackward0")
def softmax(node: Node, g: Share, s: Share) -> Share:
    """q = y: w_i − 2 q_i w_i + q_i² Σ_k s_k q_k² with w_i = s_i q_i² + q_i (g_i − Σ_k g_k q_k)"""
    q = saved(node, "result")
    dim = dimension(saved(node, "dim"), q.dim())
    term = None if g is None else through_softmax(q, g, dim)
    if s is None:
        return None if term is None else term * (1 - 2 * q)
    w = (s * q).mul_(q)
    share = q * w.sum(dim, keepdim=True)
    if term is not None:
        w += term
    return share.sub_(w, alpha=2).mul_(q).add_(w)


def through_softmax(q: Tensor, g: Tensor, dim: int) -> Tensor:
    """q_i (g_i − Σ_k g_k q_k)"""
    weighted = g * q
    return weighted.addcmul_(q, weighted.sum(dim, keepdim=True), value=-1)


@rule("LogSoftmaxBackward0")
def log_softmax(node: Node, g: Share, s: Share) -> Share:
    """q = exp y: s_i (1 − 2 q_i) + q_i² Σ_k s_k − (q_i − q_i²) Σ_k g_k"""
    y = saved(node, "result")
    dim = dimension(saved(node, "dim"), y.dim())
    is_fit = dim == y.dim() - 1 and y.shape[-1] >= kernels.MIN_SOFTMAX_SIZE and not (g is None and s is None)
    if is_fit and kernels.can_replace(y):
        rows: list[Any] = [None if t is None else t.reshape(-1, y.shape[-1]).contiguous() for t in (y, s, g)]
        return kernels.log_softmax_share(*rows).reshape(y.shape)
    q = y.exp()
    if g is None:
        return None if s is None else (q * s.sum(dim, keepdim=True)).sub_(s, alpha=2).mul_(q).add_(s)
    slope = g.sum(dim, keepdim=True)
    if s is None:
        return (q * q).sub_(q).mul_(slope)
    return (q * (s.sum(dim, keepdim=True) + slope)).sub_(slope).sub_(s, alpha=2).mul_(q).add_(s)


@rule("SoftmaxBackward0", "SafeSoftmaxBackward0", table=BL89)
def softmax_bl89(node: Node, g: Share, s: Share) -> Share:
    """as if elementwise: f' = q (1 − q), f'' = f' (1 − 2 q)"""
    q = saved(node, "result")
    first = q - q * q
    return chain(first, first * (1 - 2 * q), g, s)


@rule("LogSoftmaxBackward0", table=BL89)
def log_softmax_bl89(node: Node, g: Share, s: Share) -> Share:
    """as if elementwise: f' = 1 − q, f'' = q² − q"""
    q = saved(node, "result").exp()
    return chain(1 - q, q * q - q, g, s)
