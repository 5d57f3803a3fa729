"""Distances between all pairs of rows, in any norm: the rule of the norm for each pair, summed over the pairs of each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reductions import norm_curvature, norm_slopes, plus
from .registry import Node, Share, chain, needs, rule, saved


def euclidean_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y_ij = ‖x_i − x_j‖: one share as the left row and one as the right"""
    return [plus(*euclidean(node, g, s)), None]


@rule("EuclideanDistBackward0", same=euclidean_same)
def euclidean(node: Node, g: Share, s: Share) -> list[Share]:
    """y_ij = ‖x_i − z_j‖, a = (s − g/y)/y²: s_x at i is Σ_j a_ij (x_i − z_j)² + g_ij/y_ij; likewise for z; zero at y = 0

    The square is expanded, as in the forward pass, so that only matrix products are needed. A y that is zero up to rounding
    counts as zero.
    """
    x, z, y = saved(node, "x1"), saved(node, "x2"), saved(node, "result")
    scale = (x * x).sum(-1).unsqueeze(-1) + (z * z).sum(-1).unsqueeze(-2)
    rounding = (2 + x.shape[-1] ** 0.5) * torch.finfo(node._input_metadata[0].dtype).eps * scale
    inverse = torch.where(y * y <= rounding, 0, 1 / y)
    second = None if g is None else g * inverse
    slope = plus(s, None if second is None else -second)
    if slope is None:
        return [None, None]
    slope = slope * inverse**2
    center = z.mean(-2, keepdim=True)

    def share(x: Tensor, z: Tensor, slope: Tensor, second: Share) -> Tensor:
        squares = x * x * slope.sum(-1, keepdim=True) - 2 * x * (slope @ z) + slope @ (z * z)
        return squares if second is None else squares + second.sum(-1, keepdim=True)

    left = share(x - center, z - center, slope, second) if needs(node, 0) else None
    right = share(z - center, x - center, slope.mT, None if second is None else second.mT) if needs(node, 1) else None
    return [left, right]


def cdist_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y_ij = ‖x_i − x_j‖ in any norm: one share as the left row and one as the right"""
    return [plus(*cdist(node, g, s)), None]


@rule("CdistBackward0", same=cdist_same)
def cdist(node: Node, g: Share, s: Share) -> list[Share]:
    """y_ij = ‖x_i − z_j‖ in any norm: the rule of the norm for every pair, with all differences in memory"""
    pairs = distance(saved(node, "x1").unsqueeze(-2) - saved(node, "x2").unsqueeze(-3), node, g, s)
    return [None if pairs is None or not needs(node, i) else pairs.sum(dim) for i, dim in enumerate((-2, -3))]


@rule("PdistBackward0")
def pdist(node: Node, g: Share, s: Share) -> Share:
    """y = ‖x_i − x_j‖ for i < j, in any norm: the rule of the norm for every pair, with the same share for both rows"""
    x = saved(node, "self")
    first, second = torch.triu_indices(len(x), len(x), 1, device=x.device)
    pairs = distance(x[first] - x[second], node, g, s)
    return None if pairs is None else torch.zeros_like(x).index_add(0, first, pairs).index_add(0, second, pairs)


def distance(difference: Tensor, node: Node, g: Share, s: Share) -> Share:
    """The shares of the differences, by the rule of their norm along the last dimension."""
    p, y = saved(node, "p"), saved(node, "result").unsqueeze(-1)
    g, s = (None if t is None else t.unsqueeze(-1) for t in (g, s))
    if math.isinf(p):
        return chain(difference.sgn() * (difference.abs() == y), None, g, s)
    slope, ratio = norm_slopes(difference, y, p, (-1,))
    return chain(slope, norm_curvature(slope, ratio, y, p), g, s)
