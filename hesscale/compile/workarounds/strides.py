"""Graphs whose views do not depend on strides.

Seen in torch 2.13: a fake tensor may have other strides than the real one. If gradient and input have different memory
formats, the result of elu_backward and similar operators has the strides of the gradient, but its fake tensor has those
of the input. A view that was possible in the trace may then be impossible when the graph runs.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import GraphModule, Node

from ..fx_graphs import arguments_in_place

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


def without_strides(graph: GraphModule) -> GraphModule:
    """The same graph with reshapes in place of views, which copy if the strides do not allow a view.

    A view is kept if a later in-place change must be visible through it. Views of arguments are kept too, since their strides are
    known.
    """
    memory = Memory(graph)
    for node in graph.graph.nodes:
        if node.target in VIEWS and not memory.is_shared(node):
            node.target = torch.ops.aten.reshape.default
    graph.recompile()
    return graph


class Memory:
    """Which results of a graph share memory, and when that memory is written to and used."""

    def __init__(self, graph: GraphModule) -> None:
        self.place = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.chain: dict[Node, list[Node]] = {}  # the node, its base if it is a view, the base of that …
        self.family: dict[Node, list[Node]] = defaultdict(list)  # all views of a node, itself included
        self.writes: dict[Node, list[int]] = defaultdict(list)
        for node, i in self.place.items():
            base, written = arguments_in_place(node)
            self.chain[node] = [node, *(self.chain[base] if base else [])]
            self.family[self.chain[node][-1]].append(node)
            for one in written:
                self.writes[one].append(i)

    def is_shared(self, view: Node) -> bool:
        """Whether an in-place change of the view is visible elsewhere, or a change elsewhere is visible in the view."""
        origin = self.chain[view][-1]
        if origin.op == "placeholder":
            return True
        sides: tuple[list[Node], list[Node]] = [], []
        for node in self.family[origin]:
            sides[view in self.chain[node]].append(node)
        return any(self.is_seen(view, one, other) for one, other in (sides, sides[::-1]))

    def is_seen(self, view: Node, written: list[Node], used: list[Node]) -> bool:
        writes = [i for node in written for i in self.writes[node] if i > self.place[view]]
        uses = [self.place[user] for node in used for user in node.users]
        return bool(writes and uses) and min(writes) < max(uses)
