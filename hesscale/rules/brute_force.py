"""``fallback="exact"``: the share of any operator, by differentiating it twice, entry by entry."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.checkpointing import keep_recomputed_tensors
from ..engine.nodes import Node, call, derivative, is_once_differentiable
from ..errors import CurvatureWarning, UnsupportedOperator
from .registry import Rule, Share

MAX_ENTRIES = 4096


def brute_force(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> list[Share]:
    """s_x = Σ_k s_k (∂y_k/∂x)² + Σ_k g_k ∂²y_k/∂x², one backward call per entry of y and of x"""
    shares: list[Share] = [None] * len(node.next_functions)
    add_squares(shares, node, s)
    if any(gradient is not None for gradient in g):
        add_second_derivatives(shares, node, g)
    return shares


def add_squares(shares: list[Share], node: Node, s: tuple[Share, ...]) -> None:
    """Σ_k s_k (∂y_k/∂x)²"""
    zeros = zero_cotangents(node)
    for k, s_k in enumerate(s):
        for j in range(0 if s_k is None else s_k.numel()):
            assert s_k is not None
            unit = zeros[k].clone()
            unit.view(-1)[j] = 1
            for i, row in vjp_distinct(node, [*zeros[:k], unit, *zeros[k + 1 :]]).items():
                add(shares, i, row.detach() ** 2 * s_k.reshape(-1)[j])


def add_second_derivatives(shares: list[Share], node: Node, g: tuple[Share, ...]) -> None:
    """Σ_k g_k ∂²y_k/∂x², by differentiating Jᵀg entry by entry"""
    with torch.enable_grad():
        pulled = vjp_distinct(node, [z if v is None else v.to(z.dtype) for z, v in zip(zero_cotangents(node), g, strict=True)])
    for i, gradient in pulled.items():
        if not gradient.requires_grad:
            continue
        second = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
        for j in range(len(second)):
            unit = torch.zeros_like(second)
            unit[j] = 1
            column = derivative(gradient, node.next_functions[i], unit.reshape(gradient.shape), node)
            if column is not None:
                second[j] = column.reshape(-1)[j]
        add(shares, i, second.reshape(gradient.shape))


def check_second_derivatives(node: Node) -> None:
    """Raise unless PyTorch can differentiate a node twice. This is checked before the backward pass changes anything."""
    try:
        with torch.enable_grad(), keep_recomputed_tensors:
            is_custom = hasattr(node, "_forward_cls")
            pulled = vjp_distinct(node, [zeros.requires_grad_(is_custom) for zeros in zero_cotangents(node)])
            for i, gradient in pulled.items():
                if is_once_differentiable(gradient) or (is_custom and not gradient.requires_grad):
                    raise RuntimeError("its backward leaves no graph")
                if gradient.requires_grad:
                    derivative(gradient, node.next_functions[i], torch.zeros_like(gradient), node)
    except RuntimeError as error:
        raise UnsupportedOperator(
            f"PyTorch cannot differentiate {node.name()} twice, so fallback='exact' cannot either: {error}"
        ) from error


def vjp_distinct(node: Node, cotangents: Sequence[Share]) -> dict[int, Tensor]:
    """Jᵀv for each distinct input, by its first position, in the input's shape and summed over all its positions."""
    total: dict[int, Tensor] = {}
    for edge, value in zip(node.next_functions, call(node, cotangents), strict=True):
        if edge[0] is not None and value is not None:
            value = value.sum_to_size(edge[0]._input_metadata[edge[1]].shape)
            i = node.next_functions.index(edge)
            total[i] = value if i not in total else total[i] + value
    return total


def zero_cotangents(node: Node) -> list[Tensor]:
    return [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata]


def add(shares: list[Share], i: int, share: Tensor) -> None:
    present = shares[i]
    shares[i] = share if present is None else present + share


def too_large(node: Node) -> int:
    """The number of entries of the largest input or output of a node, if it is above the limit."""
    edges = [(node, i) for i in range(len(node._input_metadata))] + [e for e in node.next_functions if e[0] is not None]
    largest = max(math.prod(n._input_metadata[i].shape) for n, i in edges)
    return largest if largest > MAX_ENTRIES else 0


def rule_for(node: Node, reason: str) -> Rule:
    """The brute-force rule for a node that has none, if it is small enough."""
    if size := too_large(node):
        raise UnsupportedOperator(f"{reason} (fallback='exact' takes at most {MAX_ENTRIES} entries; a tensor here has {size}.)")
    warnings.warn(f"computing the curvature of {node.name()} by brute force: {reason}", CurvatureWarning, stacklevel=2)
    return RULE


RULE = Rule(brute_force, "brute_force", "double backward, entry by entry", many=True, same=brute_force)
