"""Autograd's graph as PyTorch builds it: nodes in order, and the tensors between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node, whose saved attributes no type checker knows
LEAF = "torch::autograd::AccumulateGrad"
# Backward functions, by the name of a node, that can be differentiated again where the node's own cannot; see rules.written_out.
# Each is called with the node, the cotangents at its outputs, and the cotangents at its inputs that the node itself returned.
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


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """The leaves that a loss depends on."""
    return (node.variable for node in topological(edge_of(loss)[0]) if node.name() == LEAF)


def gradient_edge(edge: Edge) -> GradientEdge:
    return GradientEdge(*edge)


def metadata(edge: Edge) -> Any:
    """Shape, dtype and device of the tensor at an edge."""
    return edge[0]._input_metadata[edge[1]]


def topological(*roots: Node, stops: Collection[Node] = ()) -> list[Node]:
    """The nodes that can be reached from the roots, each before the nodes that made its inputs; nothing below a stop."""
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
    """Whether the graph below a node has one of these leaves, given by the ids of their tensors. Stops at the first one found."""
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
    """Jᵀv at a node's inputs, one per edge. Calls the node's backward function from Python, so that no hook runs."""
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
    """The values that a custom function's backward returns, without those for arguments that are not tensors: one per edge."""
    given = iter([value for value, needed in zip(values, node.needs_input_grad, strict=True) if needed])
    return [None if child is None else next(given) for child, _ in node.next_functions]


def vjp(seeds: dict[Edge, Tensor], targets: Sequence[Edge], stops: Collection[Node]) -> dict[Edge, Tensor]:
    """A vector-Jacobian product from ``seeds`` to ``targets`` that ends at ``stops``, by calling nodes from Python.

    Unlike autograd's backward pass, it runs no hooks, retains no gradients, and treats the tensors where it stops as independent
    of each other.
    """
    return vjp_along(path_to(targets, *(node for node, _ in seeds), stops=stops), seeds, targets, {})


Path = Sequence[tuple[Node, Sequence[Edge]]]  # nodes in topological order, each with its next_functions, which are slow to read


def path_to(targets: Iterable[Edge], *roots: Node, stops: Collection[Node]) -> Path:
    """The nodes that lead from the roots to these tensors without passing a stop."""
    path: list[tuple[Node, Sequence[Edge]]] = []
    needed = {node for node, _ in targets}
    edges_of: dict[Node, Sequence[Edge]] = {}
    stack = [root for root in roots if root not in stops]
    while stack:
        node = stack.pop()
        if node is None:  # everything below the next entry is done
            node = stack.pop()
            edges = edges_of[node]
            for child, _ in edges:
                if child in needed:
                    needed.add(node)
                    path.append((node, edges))
                    break
        elif node not in edges_of:
            edges = edges_of[node] = node.next_functions
            stack += (node, None)
            stack += [child for child, _ in edges if child is not None and child not in edges_of and child not in stops]
    path.reverse()
    return path


def vjp_along(path: Path, seeds: dict[Edge, Tensor], targets: Iterable[Edge], metas: dict[Node, Any]) -> dict[Edge, Tensor]:
    """:func:`vjp` along a path that is already known to lead from ``seeds`` to ``targets``.

    ``metas`` caches the metadata of the nodes' outputs; missing entries are added.
    """
    at: dict[Node, list[Tensor | None]] = {}

    def cotangents_of(node: Node) -> list[Tensor | None]:
        if node not in metas:
            metas[node] = node._input_metadata
        return at.setdefault(node, [None] * len(metas[node]))

    for (node, index), seed in seeds.items():
        cotangents_of(node)[index] = seed
    for node, edges in path:
        if node not in at:
            continue
        for (child, index), share in zip(edges, call(node, at[node]), strict=True):
            if child is None or share is None:
                continue
            cotangents = at.get(child) or cotangents_of(child)
            meta, present = metas[child][index], cotangents[index]
            share = share.to(meta.dtype) if share.dtype != meta.dtype else share
            share = share.sum_to_size(meta.shape) if list(share.shape) != meta.shape else share
            cotangents[index] = share if present is None else present + share
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
    """∂(g·v)/∂x for a gradient g that a node returned and one of its inputs x, with its other inputs held fixed.

    This may be called during a backward pass. If that pass does not need the gradients of some tensors, a node called from Python
    during the pass does not compute them either. So the derivative is computed in a separate pass.
    """
    found: dict[Edge, Tensor] = {}
    with torch.enable_grad():
        source, anchor = edge_of(gradient), torch.zeros((), device=gradient.device, requires_grad=True)
        passing = SeparatePass.apply(anchor, lambda: found.update(vjp({source: vector}, [edge], inputs_of(node))))  # type: ignore[no-untyped-call]
    torch.autograd.backward(passing)
    return found.get(edge)


def inputs_of(node: Node) -> set[Node]:
    """The nodes that made a node's inputs."""
    return {child for child, _ in node.next_functions if child is not None}


def is_once_differentiable(gradient: Tensor) -> bool:
    """Whether the graph of this gradient contains an operator that PyTorch cannot differentiate twice.

    Autograd marks it by a node that raises an error when it runs. If the derivative is asked for given inputs only, autograd may
    skip that node and report the inputs as unused. This must not be mistaken for a derivative of zero.
    """
    return gradient.requires_grad and any(
        node.name() in ("Error", "NotImplemented", "torch::autograd::Error", "torch::autograd::NotImplemented")
        for node in topological(edge_of(gradient)[0])
    )
