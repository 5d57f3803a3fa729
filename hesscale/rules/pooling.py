"""Pooling, interpolation, padding with entries of the input (such as reflection), and dropout: linear maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .registry import Node, Share, linear, needs, rule, saved, signed, zero_one

aten = torch.ops.aten

# A node that saves its input needs s in the input's dtype. In float16, where s is float32, the backward operator is called in
# place of the node, with the arguments that the node saved.
Operator = tuple[Any, str]
MAX_POOLED = "self kernel_size stride padding dilation ceil_mode result1"
MAX_POOLS: dict[str, Operator] = {
    "MaxPool2DWithIndicesBackward0": (aten.max_pool2d_with_indices_backward, MAX_POOLED),
    "MaxPool3DWithIndicesBackward0": (aten.max_pool3d_with_indices_backward, MAX_POOLED),
    "AdaptiveMaxPool2DBackward0": (aten.adaptive_max_pool2d_backward, "self result1"),
    "AdaptiveMaxPool3DBackward0": (aten.adaptive_max_pool3d_backward, "self result1"),
    "FractionalMaxPool2DBackward0": (aten.fractional_max_pool2d_backward, "self kernel_size output_size result1"),
    "FractionalMaxPool3DBackward0": (aten.fractional_max_pool3d_backward, "self kernel_size output_size result1"),
}
PADS: dict[str, Operator] = {
    "ReflectionPad1DBackward0": (aten.reflection_pad1d_backward, "self padding"),
    "ReflectionPad2DBackward0": (aten.reflection_pad2d_backward, "self padding"),
    "ReflectionPad3DBackward0": (aten.reflection_pad3d_backward, "self padding"),
    "ReplicationPad1DBackward0": (aten.replication_pad1d_backward, "self padding"),
    "ReplicationPad2DBackward0": (aten.replication_pad2d_backward, "self padding"),
    "ReplicationPad3DBackward0": (aten.replication_pad3d_backward, "self padding"),
}
AVERAGED = "self kernel_size stride padding ceil_mode count_include_pad divisor_override"
AVERAGE_POOLS: dict[str, Operator] = {
    "AvgPool2DBackward0": (aten.avg_pool2d_backward, AVERAGED),
    "AvgPool3DBackward0": (aten.avg_pool3d_backward, AVERAGED),
}
ADAPTIVE_AVERAGE_POOLS: dict[str, Operator] = {
    "AdaptiveAvgPool2DBackward0": (aten._adaptive_avg_pool2d_backward, "self"),
    "AdaptiveAvgPool3DBackward0": (aten._adaptive_avg_pool3d_backward, "self"),
}
OPERATORS = MAX_POOLS | PADS | AVERAGE_POOLS | ADAPTIVE_AVERAGE_POOLS


def own_backward(node: Node, s: Tensor) -> Tensor:
    """Jᵀ s by the node's own backward, with saved tensors upcast from float16."""
    if s.dtype == node._input_metadata[0].dtype:
        return node(s)
    operator, fields = OPERATORS[node.name()]
    return operator(s, *(as_given(saved(node, field)) for field in fields.split()))


def as_given(value: Any) -> Any:
    """A saved size or list of sizes, as it was passed to the operator."""
    if isinstance(value, tuple):
        return [signed(size) for size in value]
    return signed(value) if type(value) is int else value


@linear(*MAX_POOLS, fan_in=False)
def max_pool(node: Node, s: Tensor) -> Share:
    """J = 1 at the maximum of each window (at one of them in a tie)"""
    return own_backward(node, s)


@linear(*PADS, fan_in=False)
def pad(node: Node, s: Tensor) -> Share:
    """J = 1 at the entry that is repeated"""
    return own_backward(node, s)


zero_one("MaxUnpool2DBackward0", "MaxUnpool3DBackward0", summary="the same entries in other positions")
zero_one(
    "UpsampleNearest1DBackward0",
    "UpsampleNearest2DBackward0",
    "UpsampleNearest3DBackward0",
    "UpsampleNearestExact1DBackward0",
    "UpsampleNearestExact2DBackward0",
    "UpsampleNearestExact3DBackward0",
    summary="repeated entries: each gets the sum of its shares",
    fan_out=True,
)


@linear(*AVERAGE_POOLS)
def average_pool(node: Node, s: Tensor) -> Share:
    """J = 1 / divisor, one divisor per window"""
    divisor = as_given(saved(node, "divisor_override"))
    if divisor is None:
        rank = rank_of(node)
        kernel = each(saved(node, "kernel_size"), rank)
        stride = each(saved(node, "stride") or kernel, rank)
        padding = each(saved(node, "padding"), rank)
        padded = saved(node, "count_include_pad")
        windows = zip(input_sizes(node, rank), s.shape[-rank:], kernel, stride, padding, strict=True)
        divisor = outer([window_lengths(*window, padded, s.device) for window in windows])
    return own_backward(node, s / divisor)


def window_lengths(
    size: int, count: int, kernel: int, stride: int, padding: int, padded: bool, device: torch.device
) -> int | Tensor:
    """The length of each window along one dimension. With ``padded``, it includes padding, but nothing beyond the padding."""
    margin = padding if padded else 0
    if margin == padding and (count - 1) * stride - padding + kernel <= size + margin:
        return kernel
    start = torch.arange(count, device=device) * stride - padding
    return (start + kernel).clamp(max=size + margin) - start.clamp(min=-margin)


@linear(*ADAPTIVE_AVERAGE_POOLS)
def adaptive_average_pool(node: Node, s: Tensor) -> Share:
    """J = 1 / number of entries of the window"""
    rank = rank_of(node)
    windows = zip(input_sizes(node, rank), s.shape[-rank:], strict=True)
    return own_backward(node, s / outer([adaptive_lengths(*window, s.device) for window in windows]))


def adaptive_lengths(size: int, count: int, device: torch.device) -> int | Tensor:
    """Window k reaches from ⌊k·size/count⌋ to ⌈(k+1)·size/count⌉."""
    if size % count == 0:
        return size // count
    k = torch.arange(count, device=device)
    return ((k + 1) * size + count - 1) // count - k * size // count


def outer(lengths: Sequence[int | Tensor]) -> int | Tensor:
    """The sizes of all windows from their lengths along each dimension."""
    total: int | Tensor = 1
    for i, length in enumerate(reversed(lengths)):
        total = total * (length.view(-1, *[1] * i) if isinstance(length, Tensor) else length)
    return total


def each(values: Sequence[int], rank: int) -> Sequence[int]:
    """One value per dimension. A single value is repeated."""
    return values if len(values) == rank else [values[0]] * rank


def rank_of(node: Node) -> int:
    """The number of spatial dimensions of an operator: ``AvgPool2DBackward0`` → 2."""
    return int(node.name().partition("D")[0][-1])


def input_sizes(node: Node, rank: int) -> Sequence[int]:
    child, index = node.next_functions[0]
    return child._input_metadata[index].shape[-rank:]


INTERPOLATIONS = {
    "UpsampleLinear1DBackward0": "upsample_linear1d_backward",
    "UpsampleBilinear2DBackward0": "upsample_bilinear2d_backward",
    "UpsampleTrilinear3DBackward0": "upsample_trilinear3d_backward",
    "UpsampleBicubic2DBackward0": "upsample_bicubic2d_backward",
    "UpsampleBilinear2DAaBackward0": "_upsample_bilinear2d_aa_backward",
    "UpsampleBicubic2DAaBackward0": "_upsample_bicubic2d_aa_backward",
    "UpsampleLanczos2DAaBackward0": "_upsample_lanczos2d_aa_backward",
}
SCALES = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}


@linear(*INTERPOLATIONS)
def interpolate(node: Node, s: Tensor) -> Share:
    """J is a Kronecker product of one (out, in) matrix per dimension, and J∘J that of the squared matrices"""
    sizes, targets = saved(node, "self_sym_sizes")[2:], s.shape[2:]
    # An operator that changes no size may just copy, whatever its scales. So it must not seem to keep the size of a dimension.
    other = 1 if sizes == targets else 2
    for size, target, name in zip(sizes, targets, SCALES[len(sizes)], strict=True):
        weights = interpolation_weights(node, s, size, target, saved(node, name), [other] * (len(sizes) - 1))
        s = torch.tensordot(s, weights.square().to(s.dtype), dims=([2], [0]))  # moves the dimension to the end
    return s


def interpolation_weights(node: Node, like: Tensor, size: int, target: int, scale: float | None, others: list[int]) -> Tensor:
    """The (out, in) matrix of one dimension: the operator's backward of the identity. ``others`` are the other target sizes."""
    ones, unscaled = [1] * len(others), [None] * len(others)
    identity = torch.eye(target, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    identity = identity.view(target, 1, target, *ones)
    first = functional.pad(identity, [margin for other in others for margin in (0, other - 1)])
    backward, aligned = getattr(aten, INTERPOLATIONS[node.name()]), saved(node, "align_corners")
    weights: Tensor = backward(first, [target, *others], [target, 1, size, *ones], aligned, scale, *unscaled)
    return weights.view(target, size)


@linear("NativeDropoutBackward0", "FusedDropoutBackward0", fan_in=False, fan_out=False)
def dropout(node: Node, s: Tensor) -> Share:
    """J = mask / (1 − p) on the diagonal: the node's own backward, twice"""
    return node(node(s))


@linear("AffineGridGeneratorBackward0")
def affine_grid(node: Node, s: Tensor) -> Share:
    """y = B θᵀ with a constant B of coordinates: s_θ = sᵀ (B∘B)"""
    size, rank = saved(node, "size"), s.shape[-1]
    dtype = torch.promote_types(s.dtype, torch.float32)
    identity = torch.eye(rank + 1, dtype=dtype, device=s.device)
    basis = identity.unsqueeze(1).expand(-1, rank, -1)  # every row of θ picks one column of B
    columns = aten.affine_grid_generator(basis, [rank + 1, *size[1:]], saved(node, "align_corners"))[..., 0]
    return torch.einsum("jp,npi->nij", columns.flatten(1).square().to(s.dtype), s.flatten(1, -2))


BILINEAR, NEAREST, BICUBIC = range(3)  # as torch numbers the modes of grid_sample
ZEROS, BORDER, REFLECTION = range(3)


def refuse_bicubic(node: Node) -> str | None:
    if saved(node, "interpolation_mode") == BICUBIC:
        return "bicubic grid sampling has no curvature rule. Sample with mode='bilinear' or 'nearest'."
    return None


@rule("GridSampler2DBackward0", "GridSampler3DBackward0", curved=(False, True), refuse=refuse_bicubic)
def grid_sample(node: Node, g: Share, s: Share) -> list[Share]:
    """J = the bilinear weights for the input, and one slope per channel for the grid; y is linear along each coordinate"""
    settings = [saved(node, name) for name in ("interpolation_mode", "padding_mode", "align_corners")]
    return [None, None] if s is None else grid_sample_shares(node, saved(node, "input"), settings, s)


@rule("CudnnGridSamplerBackward0", curved=(False, True))
def cudnn_grid_sample(node: Node, g: Share, s: Share) -> list[Share]:
    """as grid_sample"""
    return [None, None] if s is None else grid_sample_shares(node, saved(node, "self"), [BILINEAR, ZEROS, True], s)


def grid_sample_shares(node: Node, x: Tensor, settings: list[Any], s: Tensor) -> list[Share]:
    """Shares of the input (batch, channel, *sizes) and of the grid (batch, *points, coordinate)."""
    mode, padding, aligned = settings
    wide = torch.promote_types(s.dtype, torch.float32)
    x, grid, s = x.to(wide), saved(node, "grid").to(wide), s.to(wide)
    backward = aten.grid_sampler_2d_backward if x.dim() == 4 else aten.grid_sampler_3d_backward
    of_input: Share = None
    of_grid: Share = None
    if needs(node, 0) and mode == NEAREST:
        of_input = backward(s, x, grid, *settings, [True, False])[0]
    elif needs(node, 0):
        along = zip(grid.unbind(-1), reversed(x.shape[2:]), strict=True)  # a grid's first coordinate is the last dimension's
        moved, factors = zip(*(squared_weights(c, size, padding, aligned) for c, size in along), strict=True)
        scaled = s * math.prod(factors).unsqueeze(1)
        of_input = backward(scaled, x, torch.stack(moved, -1), BILINEAR, ZEROS, False, [True, False])[0]
    if needs(node, 1) and mode == BILINEAR:
        channels = x.shape[1]
        ones = torch.ones_like(s).flatten(0, 1).unsqueeze(1)  # each channel as a separate sample
        slopes = backward(ones, x.flatten(0, 1).unsqueeze(1), grid.repeat_interleave(channels, 0), *settings, [False, True])[1]
        of_grid = (s.unsqueeze(-1) * slopes.unflatten(0, (-1, channels)).square()).sum(1)
    return [of_input, of_grid]


def squared_weights(coordinate: Tensor, size: int, padding: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """A coordinate at which to sample, and a factor, that give the squares of the weights 1 − f and f.

    With q = (1 − f)² + f², the squares are q times the weights of the fraction f² / q. The coordinate is for
    ``align_corners=False`` and zero padding.
    """
    low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
    span = high - low
    position = low + (coordinate + 1) / 2 * span
    if padding == REFLECTION and span:
        position = high - ((position - low) % (2 * span) - span).abs()
    position = position.clamp(-1, size) if padding == ZEROS else position.clamp(0, size - 1)
    cell = position.floor()
    f = position - cell
    q = (1 - f) ** 2 + f**2
    return (2 * (cell + f * f / q) + 1) / size - 1, q
