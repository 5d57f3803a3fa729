"""Reading and rewriting flat graphs of operators."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def replace_node(node: Node, function: Callable[[Tensor], Tensor]) -> None:
    """Replace a node by the operators of a function, applied to the node's first argument."""
    like = node.meta["val"]
    piece = make_fx(function, tracing_mode="fake")(torch.empty(like.shape, dtype=like.dtype, device=like.device)).graph
    argument: Any = node.args[0]
    with node.graph.inserting_before(node):
        found: Any = node.graph.graph_copy(piece, {next(iter(piece.nodes)): argument})
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)


def arguments_in_place(node: Node) -> tuple[Node | None, list[Node]]:
    """The argument that a node's result is a view of, and the arguments that the node writes to."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0], []
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None, []
    given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs
    aliased = [(argument.alias_info, given[argument.name]) for argument in schema.arguments if argument.name in given]
    nodes = [(info, leaf) for info, value in aliased if info for leaf in pytree.tree_leaves(value) if isinstance(leaf, Node)]
    gives_view = any(result.alias_info for result in schema.returns)
    return nodes[0][1] if gives_view and nodes else None, [leaf for info, leaf in nodes if info.is_write]


def mutated_arguments(graph: GraphModule) -> set[int]:
    """The indices of the arguments that a graph changes in place, directly or through views."""
    base: dict[Node, Node] = {}
    mutated: set[Node] = set()
    for node in graph.graph.nodes:
        viewed, written = arguments_in_place(node)
        base[node] = node if viewed is None else base[viewed]
        mutated.update(base[one] for one in written)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return {i for i, node in enumerate(placeholders) if node in mutated}
