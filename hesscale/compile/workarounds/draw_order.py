"""Random numbers are drawn in the order of the graph.

Seen in torch 2.11, and fixed in 2.12: TorchInductor moves draws that depend on nothing, such as AdaHessian's signs, before
the masks of dropout layers. Each draw then gets the random numbers of another. This file can be removed when torch 2.11 is no
longer supported.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph
from torch.torch_version import TorchVersion


def options() -> dict[str, Any]:
    """TorchInductor's options with which each draw waits for the draw before it, as torch 2.12 does by itself."""
    if TorchVersion(torch.__version__) >= "2.12":
        return {}
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    class ChainedDraws(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            draws = [node for node in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
            preserve_node_ordering(graph, {later: OrderedSet([earlier]) for earlier, later in pairwise(draws)})

        def uuid(self) -> str:
            return "hesscale: chained draws"

    return {"reorder_for_locality": False, "post_grad_custom_post_pass": ChainedDraws()}
