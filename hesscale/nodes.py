"""Autograd's graph as PyTorch builds it: nodes in order, and the tensors between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node, whose saved attributes no type checker knows
Edge = tuple[Node, int]  # a tensor: the node that made it, and which of that node's outputs it is


def edge_of(tensor: Tensor) -> Edge:
    node, index = get_gradient_edge(tensor)[:2]
    return node, index


def gradient_edge(edge: Edge) -> GradientEdge:
    return GradientEdge(*edge)


def metadata(edge: Edge) -> Any:
    """Shape, dtype and device of the tensor at an edge."""
    return edge[0]._input_metadata[edge[1]]


def topological(*roots: Node, stops: Collection[Node] = ()) -> list[Node]:
    """Every node at or below the roots, each before the nodes it takes its inputs from; what lies below a stop is left out."""
    order, seen, stack = [], set(), list(roots)
    while stack:
        node = stack.pop()
        if node is None:  # everything below the next entry is done
            order.append(stack.pop())
        elif node not in seen:
            seen.add(node)
            stack += (node, None)
            if node not in stops:
                stack += [child for child, _ in node.next_functions if child is not None and child not in seen]
    order.reverse()
    return order


def leading_to(order: list[Node], targets: Iterable[Edge]) -> list[Node]:
    """The nodes of ``order`` that take an input from these tensors, or from a node that leads to them."""
    needed = {node for node, _ in targets}
    leading = []
    for node in reversed(order):
        if any(child in needed for child, _ in node.next_functions):
            needed.add(node)
            leading.append(node)
    leading.reverse()
    return leading


@contextmanager
def cut_at(nodes: Iterable[Node]) -> Iterator[None]:
    """Let no gradient pass below these nodes, so that the tensors they made count as independent of each other."""
    handles = [node.register_prehook(lambda gradients: (None,) * len(gradients)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def inputs_of(node: Node) -> set[Node]:
    """The nodes that made a node's inputs."""
    return {child for child, _ in node.next_functions if child is not None}


def is_once_differentiable(gradient: Tensor) -> bool:
    """Whether differentiating this gradient again would stop at an operator that PyTorch cannot differentiate twice.

    Autograd marks such a place by a node that raises when it is run, and does not run it on the way to a given tensor: asked for
    the derivative there, it answers "unused", which must not be taken for zero.
    """
    return gradient.requires_grad and any(
        node.name() in ("Error", "NotImplemented", "torch::autograd::Error", "torch::autograd::NotImplemented")
        for node in topological(edge_of(gradient)[0])
    )
