"""Autograd's graph as PyTorch builds it: nodes in order, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node, whose saved attributes no type checker knows
LEAF = "torch::autograd::AccumulateGrad"
# Replacements for what a node of this name gives, in operators that can be differentiated in turn; see rules.written_out.
# Each is called with the node, the cotangents at its outputs, and what the node itself gives.
BACKWARD_OVERRIDES: dict[str, Callable[[Any, Sequence[Tensor | None], list[Tensor | None]], list[Tensor | None]]] = {}
Edge = tuple[Node, int]  # a tensor: the node that made it, and which of that node's outputs it is


def edge_of(tensor: Tensor) -> Edge:
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    node, index = get_gradient_edge(tensor)[:2]
    return node, index


def leaf_nodes(order: Iterable[Node]) -> dict[int, Node]:
    """The leaves among these nodes, by the id of their tensor."""
    return {id(node.variable): node for node in order if node.name() == LEAF}


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


def reaches(root: Node, tensors: Collection[int]) -> bool:
    """Whether any of these leaves, given by the ids of their tensors, is below a node. Stops at the first that it meets."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if node.name() == LEAF and id(node.variable) in tensors:
            return True
        new = [child for child, _ in node.next_functions if child is not None and child not in seen]
        seen.update(new)
        stack += new
    return False


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


def call(node: Node, cotangents: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Jᵀv of a node's inputs, one per edge, as its backward computes it; called from Python, so that no hook runs."""
    if not is_custom_function(node):
        pulled = node(*cotangents)
        pulled = pulled if isinstance(pulled, tuple) else (pulled,)
        override = BACKWARD_OVERRIDES.get(node.name())
        return pulled if override is None else override(node, cotangents, list(pulled))
    zeros = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata]
    pulled = node.apply(*[z if v is None else v for v, z in zip(cotangents, zeros, strict=True)])
    return per_edge(node, pulled if isinstance(pulled, tuple) else (pulled,))


def is_custom_function(node: Node) -> bool:
    """Whether a node belongs to a torch.autograd.Function that is written in Python."""
    return isinstance(node, BackwardCFunction)


def per_edge(node: Node, values: Sequence[Tensor | None]) -> list[Tensor | None]:
    """What a custom function returns, one value per argument of its forward, as one per edge: edges exist for tensors only."""
    given = iter([value for value, needed in zip(values, node.needs_input_grad, strict=True) if needed])
    return [None if child is None else next(given) for child, _ in node.next_functions]


def pull(seeds: dict[Edge, Tensor], targets: Sequence[Edge], stops: Collection[Node]) -> dict[Edge, Tensor]:
    """A backward pass from ``seeds`` to ``targets`` that ends at ``stops``, by calling nodes from Python.

    Unlike autograd's own, it runs no hooks that users put on tensors, retains no gradients, and treats the tensors where it
    stops as independent of each other.
    """
    order = topological(*(node for node, _ in seeds), stops=stops)
    return pull_through(leading_to([node for node in order if node not in stops], targets), seeds, targets)


def pull_through(path: Iterable[Node], seeds: dict[Edge, Tensor], targets: Iterable[Edge]) -> dict[Edge, Tensor]:
    """:func:`pull` through nodes that are known to lead from ``seeds`` to ``targets``, in topological order."""
    metas: dict[Node, Any] = {}  # of what a node has made; to read them takes as long as a small operator
    at: dict[Node, list[Tensor | None]] = {}
    for (node, index), seed in seeds.items():
        metas[node] = node._input_metadata
        at.setdefault(node, [None] * len(metas[node]))[index] = seed
    for node in path:
        cotangents = at.get(node)
        if cotangents is None:
            continue
        for (child, index), share in zip(node.next_functions, call(node, cotangents), strict=True):
            if child is None or share is None:
                continue
            if child not in at:
                metas[child] = child._input_metadata
                at[child] = [None] * len(metas[child])
            meta, present = metas[child][index], at[child][index]
            share = share.to(meta.dtype) if share.dtype != meta.dtype else share
            share = share.sum_to_size(meta.shape) if list(share.shape) != meta.shape else share
            at[child][index] = share if present is None else present + share
    found = {(node, index): at[node][index] for node, index in targets if node in at}
    return {target: value for target, value in found.items() if value is not None}


class SeparatePass(torch.autograd.Function):
    """Runs a function in a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.function()
        return None, None


def derivative(gradient: Tensor, edge: Edge, vector: Tensor, node: Node) -> Tensor | None:
    """∂(g·v)/∂x for a gradient g that a node gave and one of its inputs x, with its other inputs held fixed.

    May be called while a backward pass is under way. That pass may leave out tensors, and a node that is called from Python
    during it leaves them out too. So the derivative is taken in a pass of its own.
    """
    found: dict[Edge, Tensor] = {}
    with torch.enable_grad():
        source, anchor = edge_of(gradient), torch.zeros((), device=gradient.device, requires_grad=True)
        passing = SeparatePass.apply(anchor, lambda: found.update(pull({source: vector}, [edge], inputs_of(node))))  # type: ignore[no-untyped-call]
    torch.autograd.backward(passing)
    return found.get(edge)


def inputs_of(node: Node) -> set[Node]:
    """The nodes that made a node's inputs."""
    return {child for child, _ in node.next_functions if child is not None}


def is_once_differentiable(gradient: Tensor) -> bool:
    """Whether differentiating this gradient again would stop at an operator that PyTorch cannot differentiate twice.

    Autograd marks such a place by a node that raises when it runs. On the way to a given tensor it does not run that node: asked
    for the derivative there, it answers "unused", which must not be taken for zero.
    """
    return gradient.requires_grad and any(
        node.name() in ("Error", "NotImplemented", "torch::autograd::Error", "torch::autograd::NotImplemented")
        for node in topological(edge_of(gradient)[0])
    )
