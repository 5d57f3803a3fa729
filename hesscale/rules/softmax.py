"""Softmax and its relatives: dense Jacobians whose rules take linear time."""

from __future__ import annotations

from .registry import BL89, Node, Share, chain, dimension, rule, saved


@rule("LogSoftmaxBackward0")
def log_softmax(node: Node, g: Share, s: Share) -> Share:
    """q = softmax: s_i (1 − 2 q_i) + q_i² Σ_k s_k − (q_i − q_i²) Σ_k g_k"""
    q = saved(node, "result").exp()
    dim = dimension(saved(node, "dim"), q.dim())
    share = None if s is None else s * (1 - 2 * q) + q * q * s.sum(dim, keepdim=True)
    if g is None:
        return share
    bend = (q * q - q) * g.sum(dim, keepdim=True)
    return bend if share is None else share + bend


@rule("LogSoftmaxBackward0", table=BL89)
def log_softmax_bl89(node: Node, g: Share, s: Share) -> Share:
    """as if elementwise: f' = 1 − q, f'' = q² − q"""
    q = saved(node, "result").exp()
    return chain(1 - q, q * q - q, g, s)
