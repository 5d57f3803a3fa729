"""Writes into part of a tensor (y[0] = x, y[:, 1].mul_(2)).

The node does not show which operator it applies, so the calls of its backward are recorded first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..engine.nodes import derivative, is_once_differentiable
from .registry import Node, Share, rule

aten = torch.ops.aten


class WriteRecorder(TorchDispatchMode):
    """Records which operators the backward of a write applies to the gradient of the written part, to find the kind of write.

    ``moves``: an operator selects or moves entries. Otherwise, all operators are elementwise, and so is the write. ``sums``: the
    gradients of single numbers that were written everywhere. ``other``: the first operator of any other kind.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.followed: list[Tensor] = []  # the gradient of the written part, and all tensors that depend on it
        self.sums: list[Tensor] = []
        self.moves = False
        self.other: str | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self.followed:
            if function is aten.clone.default:
                self.followed.append(result)
            return result
        sources = [t for t in tree_leaves((args, kwargs)) if is_one_of(t, self.followed)]
        if not sources or function in ONLY_THE_SHAPE or not any(isinstance(t, Tensor) for t in tree_leaves(result)):
            return result
        picks = function in PICKS and sources[0] is args[0]
        elementwise = torch.Tag.pointwise in function.tags or function in ELEMENTWISE
        self.moves = self.moves or picks or getattr(result, "shape", None) != self.followed[0].shape
        if function is aten.sum.default and sources[0] is self.followed[0]:
            self.sums.append(result)
        elif not (picks or elementwise) or (self.moves and len(sources) > 1) or any(is_one_of(t, self.sums) for t in sources):
            self.other = self.other or str(function)
        self.followed.append(result)
        return result


def is_one_of(tensor: Any, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is t for t in tensors)


ONLY_THE_SHAPE = {aten.zeros_like.default, aten.new_zeros.default}
ELEMENTWISE = {  # and all that PyTorch tags as pointwise
    aten._to_copy.default,
    aten.copy_.default,
    aten.detach.default,
    aten.elu_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.mish_backward.default,
    aten.rrelu_with_noise_backward.default,
}
PICKS = {
    aten.expand.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_fill.int_Scalar,
    aten.index_put.default,
    aten.index_select.default,
    aten.masked_scatter_backward.default,
    aten.put.default,
    aten.scatter.value,
    aten.take.default,
    aten.view.default,
}


class Write(NamedTuple):
    """What :class:`WriteRecorder` has found about a write. It is stored in the node's metadata, for the rule."""

    numbers: frozenset[int]  # the inputs that are a single number, written everywhere
    curved: bool


def hidden_write(node: Node) -> str | None:
    """Why a write is refused: it is neither elementwise nor moves entries, or cannot be differentiated twice; otherwise None."""
    y = node._input_metadata[0]
    ones = torch.ones(tuple(y.shape), dtype=y.dtype, device=y.device)
    with torch.enable_grad(), WriteRecorder() as recorder:
        given = pulled(node, ones)
    curved = any(t is not None and t.requires_grad for t in given)
    if recorder.other is not None:
        return f"a write into part of a tensor does something unknown (its backward calls {recorder.other}). {OUT_OF_PLACE}"
    if recorder.moves and curved:
        return f"a write into part of a tensor moves entries and is not linear. {OUT_OF_PLACE}"
    for t, (source, number) in zip(given, node.next_functions, strict=True):
        if recorder.moves and t is not None and t.numel() != math.prod(source._input_metadata[number].shape):
            return "a write into part of a tensor moves entries and broadcasts them. Expand the value before you assign it"
    if any(t is not None and is_once_differentiable(t) for t in given):
        return f"a write into part of a tensor cannot be differentiated twice. {OUT_OF_PLACE}"
    node.metadata["hesscale"] = Write(frozenset(i for i, t in enumerate(given) if is_one_of(t, recorder.sums)), curved)
    return None


OUT_OF_PLACE = "Compute it out of place, z = f(y[...]), and then assign y[...] = z"


@rule("torch::autograd::CopySlices", broadcast=True, fan_out=False, refuse=hidden_write)
def write_into_view(node: Node, g: Share, s: Share) -> list[Share]:
    """the write is elementwise, or moves entries: s_x = J² s + ∂(Jᵀg)/∂x with J = node(1)"""
    write: Write = node.metadata["hesscale"]
    shares: list[Share] = [None] * len(node.next_functions) if s is None else squares(node, s, write.numbers)
    if g is None or not write.curved:
        return shares
    for i, term in enumerate(gradient_terms(node, g)):
        share = shares[i]
        if term is not None:
            shares[i] = term if share is None else share.sum_to_size(term.shape) + term
    return shares


def squares(node: Node, s: Tensor, numbers: frozenset[int]) -> list[Share]:
    """J² s, as J times Jᵀs. An entry reaches at most one entry of y, unless it is a number that is written everywhere (J = 1)."""
    dtype = node._input_metadata[0].dtype
    scale: Any = 1
    if s.numel() and torch.float16 in (dtype, *(e[0]._input_metadata[e[1]].dtype for e in node.next_functions if e[0])):
        scale = s.abs().amax().clamp_min(torch.finfo(s.dtype).tiny)  # s may overflow in float16, but s / max s does not
    jacobians = pulled(node, torch.ones_like(s, dtype=dtype))
    shares = [None if t is None else t.to(s) * scale for t in pulled(node, (s / scale).to(dtype))]
    return [
        share if j is None or share is None or i in numbers else share * j.to(s)
        for i, (j, share) in enumerate(zip(jacobians, shares, strict=True))
    ]


def gradient_terms(node: Node, g: Tensor) -> list[Share]:
    """∂(Jᵀg)/∂x by autograd, for inputs x that J depends on."""
    with torch.enable_grad():
        gradients = pulled(node, g.to(node._input_metadata[0].dtype))
    return [
        None if gradient is None or not gradient.requires_grad else derivative(gradient, edge, torch.ones_like(gradient), node)
        for edge, gradient in zip(node.next_functions, gradients, strict=True)
    ]


def pulled(node: Node, cotangent: Tensor) -> Sequence[Share]:
    given = node(cotangent)
    return given if isinstance(given, tuple) else (given,)
