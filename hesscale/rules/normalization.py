"""Normalization over groups of m entries: y = γ x̂ + β, where x̂ = (x − x̄)/σ with σ² = var x + ε, or x̂ = x/σ with σ² = mean x² + ε.

All rules compute the same few sums over a group, in linear time. With a = γ g and t = γ² s, the input's share is

    (t_i − 2 x̂_i (t_i x̂_i + a_i)/m + c₀ + c₁ x̂_i + c₂ x̂_i²)/σ²
    c₀ = −Σ a x̂/m        c₁ = 0        c₂ = Σ (t x̂² + 3 a x̂)/m²

If the mean is subtracted, t_i becomes (1 − 2/m) t_i, c₀ gains Σ (t + a x̂)/m², and c₁ = 2 Σ (t x̂ + a)/m². The weight's share is
Σ s x̂², and the bias's is Σ s. These sums are over all entries that the weight multiplies or the bias shifts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .parts import by_parts
from .reductions import plus
from .registry import Node, Share, chain, dimension, needs, rule, saved

AFFINE = (True, False, False)  # y is linear in weight and bias


def of_input(
    normed: Tensor, scale: Tensor, a: Share, t: Share, dims: tuple[int, ...], m: int, *, centred: bool = True, whole: bool = True
) -> Share:
    """The input's share, for x̂ = ``normed`` and 1/σ = ``scale``. The term with 2 x̂_i/m is included only if ``whole``."""
    slope = a if t is None else t * normed if a is None else (t * normed).add_(a)
    if slope is None:
        return None
    both = (slope * normed).sum(dims, keepdim=True)
    tilt = torch.zeros_like(both) if a is None else both if t is None else (a * normed).sum(dims, keepdim=True)
    constant = tilt * ((1 / m - 1) / m if centred else -1 / m)
    share = normed * (torch.add(both, tilt, alpha=2) / m**2)
    if whole:
        share.add_(slope, alpha=-2 / m)
    if centred:
        share.add_(slope.sum(dims, keepdim=True), alpha=2 / m**2)
        if t is not None:
            constant.add_(t.sum(dims, keepdim=True), alpha=1 / m**2)
    share.mul_(normed).add_(constant)
    if t is not None:
        share.add_(t, alpha=1 - 2 / m if centred else 1)
    return share.mul_(scale * scale)


def of_weight(normed: Tensor, s: Share, dims: tuple[int, ...]) -> Share:
    """Σ s x̂² over all entries that one entry of the weight multiplies."""
    return None if s is None else (s * normed).mul_(normed).sum(dims)


def times(value: Share, weight: Share) -> Share:
    return value if value is None or weight is None else value * weight


def squared(weight: Share) -> Share:
    return None if weight is None else weight * weight


def shaped(value: Any, *shape: int) -> Any:
    return None if value is None else value.reshape(shape)


def has_kernel(node: Node) -> bool:
    """Whether a kernel replaces the rule of a norm over the last dimensions."""
    return kernels.can_replace(saved(node, "input")) and math.prod(saved(node, "normalized_shape")) <= kernels.MAX_NORM_SIZE


def shares_by_kernel(node: Node, mean: Share, scale: Tensor, g: Share, s: Share) -> list[Share]:
    """The shares of input, weight and bias. ``mean`` is None if the norm does not subtract it."""
    if g is None and s is None:
        return [None, None, None]
    x, shape, weight = saved(node, "input"), saved(node, "normalized_shape"), saved(node, "weight")
    rows: list[Any] = [None if t is None else t.reshape(-1, math.prod(shape)).contiguous() for t in (x, s, g)]
    vectors: list[Any] = [
        None if t is None else t.reshape(-1).contiguous() for t in (scale if mean is None else mean, scale, weight)
    ]
    share, to_weight, to_bias = kernels.norm_shares(rows[0], *vectors, *rows[1:], is_centred=mean is not None)
    of_vectors = [None if s is None else share.reshape(tuple(shape)) for share in (to_weight, to_bias)]
    return [share.reshape(x.shape), *of_vectors]


@rule("NativeLayerNormBackward0", curved=AFFINE, fresh=True)
def layer_norm(node: Node, g: Share, s: Share) -> list[Share]:
    """over the last dimensions; weight Σ s x̂², bias Σ s"""
    if has_kernel(node):
        return shares_by_kernel(node, saved(node, "result1"), saved(node, "result2"), g, s)
    shape, scale, weight = saved(node, "normalized_shape"), saved(node, "result2"), saved(node, "weight")
    operands: tuple[Any, ...] = saved(node, "input"), saved(node, "result1"), scale, g, s
    dims, m = tuple(range(-len(shape), 0)), math.prod(shape)
    if operands[0].dim() == len(shape):  # one row
        operands = tuple([None if t is None else t.unsqueeze(0) for t in operands])
    rows = tuple(range(operands[0].dim() - len(shape)))

    def of_rows(x: Tensor, mean: Tensor, scale: Tensor, g: Share, s: Share) -> tuple[Share, Share]:
        normed = (x - mean).mul_(scale)
        share = of_input(normed, scale, times(g, weight), times(s, squared(weight)), dims, m) if needs(node, 0) else None
        return share, of_weight(normed, s, rows) if needs(node, 1) else None

    share, (to_weight, *further) = by_parts(of_rows, 0, *operands)
    for part in further:
        to_weight = plus(to_weight, part)
    return [share, to_weight, s]


@rule("FusedRmsNormBackward0", curved=AFFINE[:2], fresh=True)
def rms_norm(node: Node, g: Share, s: Share) -> list[Share]:
    """over the last dimensions, without a mean; not whole, to agree with x · rsqrt(mean x² + ε) as separate operators"""
    if has_kernel(node):
        return shares_by_kernel(node, None, saved(node, "result1"), g, s)[:2]
    x, shape, weight = saved(node, "input"), saved(node, "normalized_shape"), saved(node, "weight")
    dims, m = tuple(range(-len(shape), 0)), math.prod(shape)
    scale = saved(node, "result1").reshape(*x.shape[: -len(shape)], *[1] * len(shape))
    normed, a, t = x * scale, times(g, weight), times(s, squared(weight))
    return [
        of_input(normed, scale, a, t, dims, m, centred=False, whole=False) if needs(node, 0) else None,
        times(s, normed * normed) if needs(node, 1) else None,
    ]


@rule("WeightNormInterfaceBackward0", curved=AFFINE[:2], fresh=True)
def weight_norm(node: Node, g: Share, s: Share) -> list[Share]:
    """w = γ v/‖v‖: no mean is subtracted, and ‖v‖² is a sum in place of a mean (m = 1)"""
    v, weight = saved(node, "v"), saved(node, "g")
    kept = dimension(saved(node, "dim"), v.dim())
    dims = tuple(d for d in range(v.dim()) if d != kept)
    scale = 1 / saved(node, "result1")
    normed = v * scale
    return [
        of_input(normed, scale, times(g, weight), times(s, squared(weight)), dims, 1, centred=False) if needs(node, 0) else None,
        times(s, normed * normed) if needs(node, 1) else None,
    ]


@rule("NativeGroupNormBackward0", many=True, curved=AFFINE, fresh=True)
def group_norm(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> list[Share]:
    """over the channels of a group and all positions; weight Σ s x̂², bias Σ s"""
    x, weight, groups = saved(node, "input"), saved(node, "weight"), saved(node, "group")
    batch, channels = x.shape[:2]
    shape = batch, groups, channels // groups, math.prod(x.shape[2:])
    g_y, s_y = (shaped(v, *shape) for v in (g[0], s[0]))
    s_mean, g_scale, s_scale = (shaped(v, batch, groups, 1, 1) for v in (s[1], g[2], s[2]))
    mean, scale = (shaped(saved(node, name), batch, groups, 1, 1) for name in ("result1", "result2"))
    weight = shaped(weight, groups, -1, 1)
    normed = (shaped(x, *shape) - mean).mul_(scale)
    m = normed.shape[2] * normed.shape[3]
    share = of_input(normed, scale, times(g_y, weight), times(s_y, squared(weight)), (2, 3), m) if needs(node, 0) else None
    if not (s_mean is None and g_scale is None and s_scale is None):
        share = of_statistics(normed, scale, m, s_mean, g_scale, s_scale).add_(0 if share is None else share)
    return [
        shaped(share, *x.shape),
        None if s_y is None or not needs(node, 1) else (s_y * normed * normed).sum((0, 3)).reshape(-1),
        None if s_y is None or not needs(node, 2) else s_y.sum((0, 3)).reshape(-1),
    ]


def of_statistics(normed: Tensor, scale: Tensor, m: int, s_mean: Share, g_scale: Share, s_scale: Share) -> Tensor:
    """The input's share through x̄ and 1/σ: ∂x̄ = 1/m, ∂(1/σ) = −x̂/(m σ²), ∂²(1/σ) = (3 x̂²/m − 1 + 1/m)/(m σ³)"""
    share = torch.zeros_like(normed) if s_mean is None else (s_mean / m**2).expand_as(normed).clone()
    second = (3 / m * normed**2 - 1 + 1 / m) * scale**3 / m
    by_scale = chain(normed * scale**2 / m, second, g_scale, s_scale)
    return share if by_scale is None else share.add_(by_scale)


@rule(
    "NativeBatchNormBackward0",
    "NativeBatchNormLegitBackward0",
    "NativeBatchNormLegitBackward1",
    "BatchNormWithUpdateBackward0",
    "CudnnBatchNormBackward0",
    "MiopenBatchNormBackward0",
    curved=AFFINE,
    fresh=True,
)
def batch_norm(node: Node, g: Share, s: Share) -> list[Share]:
    """over batch and positions in training; by constant statistics in evaluation: (γ/σ)² s"""
    if node.name() != "BatchNormWithUpdateBackward0" and not saved(node, "training"):
        return batch_norm_in_evaluation(node, g, s)
    x = saved(node, "input")
    mean, scale, weight = per_channel(x, saved(node, "result1"), saved(node, "result2"), saved(node, "weight"))
    dims, m = positions(x), x.numel() // max(x.shape[1], 1)

    def of_channels(x: Tensor, mean: Tensor, scale: Tensor, weight: Share, g: Share, s: Share) -> tuple[Share, Share]:
        normed = (x - mean).mul_(scale)
        share = of_input(normed, scale, times(g, weight), times(s, squared(weight)), dims, m) if needs(node, 0) else None
        return share, of_weight(normed, s, dims) if needs(node, 1) else None

    share, by_part = by_parts(of_channels, 1 - x.dim(), x, mean, scale, weight, g, s)
    return [
        share,
        None if by_part[0] is None else torch.cat(by_part),
        None if s is None or not needs(node, 2) else s.sum(dims),
    ]


@rule("NativeBatchNormLegitNoTrainingBackward0", "BatchNormNoUpdateBackward0", curved=False, fan_in=False, fresh=True)
def batch_norm_in_evaluation(node: Node, g: Share, s: Share) -> list[Share]:
    """by constant statistics: (γ/σ)² s"""
    if s is None:
        return [None, None, None]
    x, epsilon = saved(node, "input"), saved(node, "eps" if hasattr(node, "_saved_eps") else "epsilon")
    scale = (saved(node, "running_var") + epsilon).rsqrt()
    mean, scale, weight = per_channel(x, saved(node, "running_mean"), scale, saved(node, "weight"))
    dims = positions(x)
    return [
        s * (scale if weight is None else scale * weight).square() if needs(node, 0) else None,
        (s * ((x - mean) * scale).square()).sum(dims) if needs(node, 1) else None,
        s.sum(dims) if needs(node, 2) else None,
    ]


def positions(x: Tensor) -> tuple[int, ...]:
    """All dimensions except that of the channels."""
    return (0, *range(2, x.dim()))


def per_channel(x: Tensor, *vectors: Any) -> list[Any]:
    """Vectors over the channels of x, in a shape that broadcasts with it."""
    return [shaped(vector, -1, *[1] * (x.dim() - 2)) for vector in vectors]
