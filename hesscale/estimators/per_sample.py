"""GGN-MC with per-sample gradients, whose squares are computed from one backward pass for the whole batch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..engine.dispatch import diagonal_dtype
from ..engine.nodes import Node, metadata
from ..rules.bilinear import squared
from ..rules.registry import saved
from .layers import PRODUCTS, TRANSPOSES, Use, input_of_product, is_of_layer, to_parameter, uses_of
from .outputs import describe, refuse_leaves
from .rows import MAX_NUMBERS, Diagonals, add_to
from .samples import check_apart

if TYPE_CHECKING:
    from . import Request

COLUMNS = 128  # of a matrix product, approximately: with few channels, it computes several kernel positions at once


def ggn_mc_per_sample(request: Request) -> Diagonals:
    """The paper's GGN-MC: the mean of Σ_n J_nᵀa_n ∘ J_nᵀb_n over the draws of ``ggn_mc``, with J_n the Jacobian of sample n.

    ``ggn_mc`` is (Σ_n J_nᵀa_n) ∘ (Σ_n J_nᵀb_n). The two agree for one sample, and in expectation, but ``ggn_mc`` is noisier for
    several samples. Samples are the first dimension of the outputs. With δ the draw backpropagated to a layer's output, x the
    layer's input and p the positions,

        W_ji: Σ_n (Σ_p x_npj δᵃ_npi) (Σ_p x_npj δᵇ_npi),      b_i: Σ_n (Σ_p δᵃ_npi) (Σ_p δᵇ_npi).

    Parameters that have several uses, or are not weights or biases of linear layers and convolutions, raise an error. So do
    operators that may mix samples, such as batch norm in training mode.
    """
    outputs, uses = request.model_outputs, uses_of(request, (*TRANSPOSES, "ToCopyBackward0"))
    check_uses(request, uses)
    refuse_leaves(outputs, "its gradient cannot be split by sample")
    check_apart(outputs, uses)
    total: list[Tensor | None] = [None] * len(request.params)
    layers = list(dict.fromkeys([(use.node, 0) for use in uses]))
    for pulled, other in outputs.draws_at(layers):
        at = dict(zip(layers, zip(pulled, other, strict=True), strict=True))
        for use in uses:
            a, b = at[(use.node, 0)]
            if a is not None and b is not None and outputs.sample_count:
                vectors = [v.to(diagonal_dtype(v.dtype)) for v in ([a] if a is b else [a, b])]
                share = share_of(use, vectors, outputs.sample_count) / request.num_samples
                add_to(total, use.param, to_parameter(share, use.node, use.place, request.edges[use.param]))
    return total


def check_uses(request: Request, uses: Sequence[Use]) -> None:
    """Raise unless every parameter is the weight or bias of one layer."""
    for use in uses:
        if not is_of_layer(use):
            raise ValueError(
                f"{describe(request, use.param)} is input {use.place} of {use.node.name()}, but per-sample gradients are "
                "supported for weights and biases of linear layers and convolutions only. Leave it out of params, or use 'ggn_mc'"
            )
    for k, count in sorted(Counter(use.param for use in uses).items()):
        if count > 1:
            raise ValueError(
                f"{describe(request, k)} has {count} uses, but per-sample gradients are supported for one use only. "
                "Leave it out of params, or use 'ggn_mc'"
            )


def share_of(use: Use, vectors: Sequence[Tensor], samples: int) -> Tensor:
    """Σ_n G_n ∘ G_n at a layer's weight or bias, with G_n the gradient of sample n for a vector at the layer's output.

    ``vectors`` are rows a and b, whose products are summed, or a single tensor for both.
    """
    name = use.node.name()
    if name == "ConvolutionBackward0" and use.place == 1:
        return of_kernel(use.node, vectors, samples)
    if PRODUCTS.get(name) == use.place:
        return of_matrix(use.node, vectors, samples)
    return of_bias(use, [v.flatten(3).sum(3) for v in vectors] if name == "ConvolutionBackward0" else vectors, samples)


def of_bias(use: Use, vectors: Sequence[Tensor], samples: int) -> Tensor:
    """Σ_n (Σ_p δ)², times the square of the factor by which the operator multiplies the bias"""
    shape, name = metadata(use.node.next_functions[use.place]).shape, use.node.name()
    factor = saved(use.node, "beta") if name == "AddmmBackward0" else 1
    if name == "AddBackward0" and use.place == 1:
        factor = saved(use.node, "alpha")
    sums = [v.reshape(len(v), samples, -1, v.shape[-1]).sum(2).sum_to_size(len(v), samples, *shape) for v in vectors]
    return square(sums) * factor**2


def of_matrix(node: Node, vectors: Sequence[Tensor], samples: int) -> Tensor:
    """Σ_n (Σ_p x_npj δ_npi)² at W_ji of y = x W"""
    x = input_of_product(node)
    if len(x) == samples:
        s = (vectors[0] * vectors[-1]).sum(0)
        return squared(x, s).mT @ s
    x = x.to(vectors[0].dtype).reshape(1, samples, 1, -1, x.shape[1]).mT
    return sum_of_squares([v.reshape(len(v), samples, 1, -1, v.shape[2]).mT for v in vectors], [x])[0].mT


def of_kernel(node: Node, vectors: Sequence[Tensor], samples: int) -> Tensor:
    """Σ_n (Σ_p δ_np x_n,p+k)² at position k of a kernel; a transposed convolution swaps δ and x"""
    weight, groups = saved(node, "weight").shape, saved(node, "groups")
    x = [saved(node, "input").to(vectors[0].dtype).unsqueeze(0)]
    fixed, moving = (x, vectors) if saved(node, "transposed") else (vectors, x)
    size = fixed[0].shape[3:]
    fixed = [by_sample(v, samples, groups) for v in fixed]
    around = [pad for pad in reversed(saved(node, "padding")) for _ in range(2)]
    moving = [F.pad(v, around) for v in moving]
    steps = list(zip(size, saved(node, "stride"), saved(node, "dilation"), strict=True))
    places = list(itertools.product(*map(range, weight[2:])))
    at_once = max(1, COLUMNS * groups // moving[0].shape[2])
    found = []
    for start in range(0, len(places), at_once):
        windows = [window(place, steps) for place in places[start : start + at_once]]
        shifted = [torch.stack([v[part] for part in windows], 3).flatten(2, 3) for v in moving]
        squares = sum_of_squares(fixed, [by_sample(v, samples, groups) for v in shifted])
        found.append(squares.reshape(*weight[:2], len(windows)))
    return torch.cat(found, 2).reshape(weight)


def window(place: Sequence[int], steps: Sequence[tuple[int, int, int]]) -> tuple[Any, ...]:
    """The slice of the input that a position of the kernel reads, given output size, stride and dilation of each dimension."""
    return ..., *[slice(k * d, k * d + (n - 1) * s + 1, s) for k, (n, s, d) in zip(place, steps, strict=True)]


def by_sample(x: Tensor, samples: int, groups: int) -> Tensor:
    """(row, batch, channel, …) as (row, sample, group, channel, position)."""
    rows, batch, channels = x.shape[:3]
    apart = x.reshape(rows, samples, batch // samples, groups, channels // groups, math.prod(x.shape[3:]))
    return apart.permute(0, 1, 3, 4, 2, 5).flatten(4)


def sum_of_squares(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Σ_rn (Σ_p l_rngop r_rngcp)², of shape (g, o, c), computed for some samples at a time."""
    pairs = [(left[0], right[0]), (left[-1], right[-1])][: max(len(left), len(right))]
    samples, numbers = left[0].shape[1], math.prod(left[0].shape[2:4]) * right[0].shape[3] * max(len(left[0]), len(right[0]))
    at_once = max(1, MAX_NUMBERS // numbers)
    found = []
    for some in (slice(start, start + at_once) for start in range(0, samples, at_once)):
        found.append(square([torch.einsum("rngop,rngcp->rngoc", a[:, some], b[:, some]) for a, b in pairs]))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def square(gradients: Sequence[Tensor]) -> Tensor:
    """Σ_rn G ∘ G"""
    return (gradients[0] * gradients[-1]).sum((0, 1))
