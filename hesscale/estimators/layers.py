"""Layers and their weights: which nodes of the graph use each parameter, and how."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..engine.nodes import Edge, Node, metadata, vjp
from ..engine.propagate import fit
from ..rules.registry import saved
from .rows import unit_rows, zeros_at

if TYPE_CHECKING:
    from . import Request


class Use(NamedTuple):
    """One use of a parameter: it, or its transpose, is input number ``place`` of a node."""

    param: int
    node: Node
    place: int


TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
PRODUCTS = {"MmBackward0": 1, "AddmmBackward0": 2}  # the input that is the weight


def uses_of(request: Request, through: Sequence[str] = TRANSPOSES) -> list[Use]:
    """All uses of each parameter, directly or through nodes of the types in ``through``."""
    known: dict[Edge, list[int]] = {}
    for k, edge in enumerate(request.edges):
        known.setdefault(edge, []).append(k)
    uses = []
    for node in reversed(request.order):
        for index, edge in enumerate(node.next_functions):
            if edge in known and node.name() in through and (node.name() not in TRANSPOSES or len(metadata(edge).shape) == 2):
                known[(node, 0)] = known[edge]
            else:
                uses += [Use(k, node, index) for k in known.get(edge, ())]
    return uses


def is_of_layer(use: Use) -> bool:
    """Whether the parameter is used as the weight or the bias of a linear layer or a convolution."""
    name, edges = use.node.name(), use.node.next_functions
    if name == "ConvolutionBackward0":
        return use.place in (1, 2)
    if PRODUCTS.get(name) == use.place:
        return True
    if len(metadata(edges[use.place]).shape) != 1:
        return False
    return (name == "AddmmBackward0" and use.place == 0) or (name == "AddBackward0" and is_product(edges[1 - use.place][0]))


def is_product(node: Node | None) -> bool:
    """Whether a node is a matrix product, or a view of one."""
    while node is not None and node.name() in ("UnsafeViewBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "MmBackward0"


def input_of_product(node: Node) -> Tensor:
    """x of y = x W."""
    x: Tensor = saved(node, "mat1") * saved(node, "alpha") if PRODUCTS[node.name()] == 2 else saved(node, "self")
    return x


def mean_over_rows(node: Node, square: Tensor) -> Tensor:
    """The mean over samples and positions at a layer's output, expanded to its shape."""
    channel = 1 if node.name() == "ConvolutionBackward0" else square.dim() - 1
    return square.mean([d for d in range(square.dim()) if d != channel], keepdim=True).expand_as(square)


def to_parameter(share: Tensor, node: Node, index: int, param: Edge) -> Tensor:
    """Convert the diagonal at an input of a node, which is the parameter or its transpose, to the shape of the parameter."""
    edge = node.next_functions[index]
    return vjp({edge: fit(share, metadata(edge))}, [param], set())[param]


def products_of_weights(request: Request) -> dict[int, Node]:
    """The matrix product y = x W of each parameter W that has no other use, where y has fewer entries than W."""
    uses: dict[int, list[Use]] = {}
    for use in uses_of(request):
        uses.setdefault(use.param, []).append(use)
    return {
        k: used[0].node
        for k, used in uses.items()
        if len(used) == 1
        and PRODUCTS.get(used[0].node.name()) == used[0].place
        and math.prod(metadata((used[0].node, 0)).shape) < request.params[k].numel()
    }


def through_product(products: Callable[[Tensor], Tensor], node: Node, param: Edge, at_once: int) -> Tensor:
    """Σ_nm x_nj x_mj ∂²L/∂y_ni∂y_mi at W_ji, for y = x W."""
    index, x = PRODUCTS[node.name()], input_of_product(node)
    like = zeros_at((node, 0))
    total = torch.zeros(like.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    for entries, rows in unit_rows(like.flatten(), at_once):
        n, i = entries // like.shape[1], entries % like.shape[1]
        column = products(rows).reshape(-1, *like.shape)[torch.arange(len(n), device=n.device), :, i]  # ∂²L/∂y_ni∂y_mi for all m
        total.index_add_(0, i, x[n] * (column.to(x.dtype) @ x))
    return to_parameter(total.T, node, index, param)
