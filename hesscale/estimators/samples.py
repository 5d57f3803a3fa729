"""Check that samples are independent: a layer's output for a sample may affect only the model's outputs for that sample.

A tensor stores its samples one after the other, as equal parts of its entries. Its shape is (samples, …), or
(samples · positions, …) after the flattening that a Linear does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.head_values import agree
from ..engine.nodes import Edge, Node, leading_to, metadata, topological
from ..rules import RULES
from ..rules.registry import dimension, saved
from .outputs import Outputs, describe

if TYPE_CHECKING:
    from .layers import Use

ENTRYWISE = ("elementwise", "activations", "special_functions")  # families of rules
ENTRYWISE_TOO = ("ExpandBackward0", "MaskedFillBackward0", "NativeDropoutBackward0", "WhereBackward0")
IN_ORDER = (
    *("AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "ToCopyBackward0", "UnsafeViewBackward0", "ViewBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "UnsqueezeBackward0"),
)
ALONG = (
    *("AmaxBackward0", "AminBackward0", "LogSoftmaxBackward0", "LogsumexpBackward0", "MeanBackward1", "SoftmaxBackward0"),
    *("CatBackward0", "GluBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0", "SumBackward1"),
)
BATCHED = {  # and at which inputs
    "AddmmBackward0": (0, 1),
    "BmmBackward0": (0, 1),
    "ConvolutionBackward0": (0,),
    "MmBackward0": (0,),
    "NativeGroupNormBackward0": (0,),
}


def check_apart(outputs: Outputs, uses: Sequence[Use]) -> None:
    """Raise unless every layer's output divides into samples, and H is block diagonal with one block per sample."""
    count = outputs.sample_count
    if count < 2:
        return
    for use in uses:
        shape = metadata((use.node, 0)).shape
        rows = shape[0] if use.node.name() == "ConvolutionBackward0" else math.prod(shape[:-1])
        if rows % count:
            raise ValueError(
                f"{describe(outputs.request, use.param)} belongs to a layer whose output, of shape {tuple(shape)}, does not "
                f"divide into {count} samples, the outputs' first dimension. Pass outputs= whose first dimension is the sample, "
                "or use 'ggn_mc'"
            )
    refuse_mixing(topological(*[node for node, _ in outputs.edges]), [(use.node, 0) for use in uses], count)
    if outputs.draws_labels:
        below = topological(*[softmax.edge[0] for softmax in outputs.softmaxes], stops=outputs.stops)
        refuse_mixing([node for node in below if node not in outputs.stops], outputs.edges, count)
        apart = all(leading(softmax.q.shape, count) <= softmax.dim for softmax in outputs.softmaxes)
    else:
        apart = outputs.diagonal is not None or has_blocks(outputs, count)
    if not apart:
        raise ValueError(
            "the loss couples the outputs of different samples, so its curvature is not a sum of squares of single samples. "
            "Use 'ggn_mc'"
        )


def refuse_mixing(order: list[Node], targets: Sequence[Edge], count: int) -> None:
    """Raise if a node on the way to the targets may mix samples."""
    path = leading_to(order, targets)
    needed = {*path, *[node for node, _ in targets]}
    for node in path:
        for place, (child, _) in enumerate(node.next_functions):
            if child in needed and not keeps_apart(node, place, count):
                raise ValueError(
                    f"{node.name()} lies between a layer and the outputs, and may mix the samples of its input {place}, so "
                    "per-sample gradients cannot be computed. Use 'ggn_mc'; if the samples are not the first dimension of the "
                    "outputs, pass outputs= whose first dimension is the sample"
                )


def keeps_apart(node: Node, place: int, count: int) -> bool:
    """Whether each sample's part of a node's output depends only on that sample's part of the input."""
    name, rule = node.name(), RULES.get(node.name())
    shape, outer = tuple(metadata(node.next_functions[place]).shape), tuple(metadata((node, 0)).shape)
    lead, rank = leading(shape, count), len(shape)
    if name in IN_ORDER:
        return lead <= rank
    if lead > rank or any(tuple(meta.shape[:lead]) != shape[:lead] for meta in node._input_metadata):
        return False
    if name in ALONG:
        dims = saved(node, "dim")
        return all(dimension(dim, rank) >= lead for dim in (dims if isinstance(dims, Sequence) else [dims]))
    if name in ("TransposeBackward0", "PermuteBackward0"):
        return [new_place(node, dim, rank) for dim in range(lead)] == list(range(lead))
    if rank != len(outer):
        return False
    if name in ENTRYWISE_TOO or (rule and rule.family in ENTRYWISE and rule.broadcast and not (rule.fan_in or rule.fan_out)):
        return True
    if name == "ConstantPadNdBackward0":
        return len(saved(node, "pad")) // 2 <= rank - lead
    if place == 0 and "BatchNorm" in name:
        return getattr(node, "_saved_training", True) is False
    if place == 0 and name in ("NativeLayerNormBackward0", "FusedRmsNormBackward0"):
        return len(saved(node, "normalized_shape")) <= rank - lead
    if place == 0 and rule and rule.family == "pooling":
        return lead <= 1
    return place in BATCHED.get(name, ()) and lead <= 1


def leading(shape: Sequence[int], count: int) -> int:
    """The number of leading dimensions that index samples. If entries do not divide into samples, it is ``len(shape) + 1``."""
    return next((k for k in range(len(shape) + 1) if math.prod(shape[:k]) % count == 0), len(shape) + 1)


def new_place(node: Node, dim: int, rank: int) -> int:
    """The dimension of the input that a transposition or permutation moves to dimension ``dim`` of its result."""
    if node.name() == "PermuteBackward0":
        return dimension(saved(node, "dims")[dim], rank)
    pair = [dimension(saved(node, name), rank) for name in ("dim0", "dim1")]
    return pair[1 - pair.index(dim)] if dim in pair else dim


def has_blocks(outputs: Outputs, count: int) -> bool:
    """Whether H is block diagonal, with one block per sample: H (c ∘ v) = c ∘ (H v) if c has one number per sample."""
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64, device="cpu").to(outputs.like) + 0.5

    v, of_sample = draw(len(outputs.like)), draw(count)
    sizes = [math.prod(shape) // count for shape in outputs.shapes]
    c = torch.cat([of_sample.repeat_interleave(size) for size in sizes])
    product, scaled = outputs.products(torch.stack([v, c * v]))[0]
    return bool(agree(scaled, c * product, (c * product).abs()))
