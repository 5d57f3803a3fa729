"""Draws random numbers outside of compiled code, in the order of the graph.

Seen in torch 2.11, and fixed in 2.13: TorchInductor moves draws that depend on nothing, such as AdaHessian's signs, before
the masks of dropout layers. Each draw then gets the random numbers of another. This file can be removed when torch 2.11 is no
longer supported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten
NEW = {
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default),
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.full.default, aten.full_like.default),
    *(aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.new_full.default),
}
FILLED = {aten.bernoulli_.float, aten.uniform_.default, aten.normal_.default, aten.exponential_.default}
LIKE = {  # only the shape and dtype of their tensor matter
    *(aten.rand_like.default, aten.randn_like.default, aten.bernoulli.p),
    *(aten.randint_like.default, aten.randint_like.low_dtype),
}


class Place(NamedTuple):
    """A tensor's shape, strides, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Draw(NamedTuple):
    """A draw of random numbers that does not depend on computed values.

    Attributes:
        function: draws the numbers. If there is a ``place``, it fills an empty tensor.
        result: the shape, strides, dtype and device of what it returns.
    """

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    place: Place | None
    result: Place

    def __call__(self) -> Tensor:
        given = () if self.place is None else (self.place.empty(),)
        return self.function(*given, *self.arguments, **self.options)


def separate_draws(graph: GraphModule) -> tuple[GraphModule, list[Draw]]:
    """A graph that takes its random numbers as additional arguments, and the draws that produce them, in order.

    The graph is returned unchanged if it draws only once, or if a draw depends on values that it computes.
    """
    if sum(map(is_draw, graph.graph.nodes)) < 2:
        return graph, []
    found = copy.deepcopy(graph)
    nodes = [node for node in found.graph.nodes if is_draw(node)]
    draws = [draw_of(node) for node in nodes]
    known = [draw for draw in draws if draw is not None]
    if len(known) < len(nodes):
        return graph, []
    last = [node for node in found.graph.nodes if node.op == "placeholder"][-1]
    for number, node in enumerate(nodes):
        with found.graph.inserting_after(last):
            last = found.graph.placeholder(f"drawn_{number}")
        if node.target is aten.native_dropout.default:
            last.meta["val"] = node.meta["val"][1]
            drop(node, last)
        else:
            last.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(last)
        found.graph.erase_node(node)
        for unused in [source for source in node.all_input_nodes if source.target in NEW and not source.users]:
            found.graph.erase_node(unused)
    found.recompile()
    return found, known


def is_draw(node: Node) -> bool:
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draw_of(node: Node) -> Draw | None:
    """The draw of a node; None if it may depend on values."""
    target: Any = node.target
    sources = node.all_input_nodes
    if not sources:
        return Draw(target, node.args, node.kwargs, None, Place.of(node.meta["val"]))
    source, arguments = sources[0], node.args[1:]
    if len(sources) > 1 or node.args[0] is not source:
        return None
    place = Place.of(source.meta["val"])
    if target in LIKE or (target in FILLED and source.target in NEW and len(source.users) == 1):
        return Draw(target, arguments, node.kwargs, place, Place.of(node.meta["val"]))
    if target is aten.native_dropout.default and arguments[1] is not False:
        return Draw(mask, arguments, {}, place, Place.of(node.meta["val"][1]))
    return None


def mask(place: Tensor, p: float, is_training: bool | None) -> Tensor:
    return torch.native_dropout(place, p, is_training)[1]


def drop(node: Node, kept: Node) -> None:
    """Replace ``native_dropout`` by a multiplication with a given mask."""
    x, p = node.args[:2]
    with node.graph.inserting_before(node):
        left = node.graph.call_function(aten.mul.Tensor, (x, kept))
        value = node.graph.call_function(aten.mul.Tensor, (left, 0.0 if p == 1 else 1 / (1 - float(p))))  # type: ignore[arg-type]
    for user in list(node.users):  # each takes the value or the mask
        user.replace_all_uses_with((value, kept)[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
