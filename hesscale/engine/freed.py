"""Graphs of which an earlier backward pass has freed a part, as where two losses share a trunk.

PyTorch finds out when it reaches that part, after it has filled the ``.grad`` of other parameters. The nodes that hold most of
what a pass frees are asked beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .dispatch import Step
from .nodes import Node

# What these nodes save whatever inputs need a gradient. Products of two factors save those factors that they need.
ALWAYS_SAVED = {
    "ConvolutionBackward0": "weight",
    "EmbeddingBackward0": "indices",
    "ScaledDotProductFlashAttentionForCpuBackward0": "query",
    "ScaledDotProductFlashAttentionBackward0": "query",
    "ScaledDotProductEfficientAttentionBackward0": "query",
    "MkldnnRnnLayerBackward0": "input",
    "CudnnRnnBackward0": "input",
}
Saved = tuple[int, str]  # the index of a node, and the attribute with what it has saved


def saved_attributes(steps: Iterable[Step], indices: Iterable[int]) -> list[Saved]:
    """Where to look in graphs of one structure."""
    found = []
    for (node, rule, edges, _), index in zip(steps, indices, strict=True):
        name = ALWAYS_SAVED.get(node.name())
        if rule is not None and rule.factors is not None and len(edges) > 1:
            needed = [other for (child, _), other in zip(edges[-2:], reversed(rule.factors), strict=True) if child is not None]
            name = needed[0] if needed else None  # none of them if it is a bias alone that needs a gradient
        if name is not None and hasattr(node, f"_raw_saved_{name}"):
            found.append((index, f"_raw_saved_{name}"))
    return found


def check_not_freed(nodes: Sequence[Node], attributes: Iterable[Saved]) -> None:
    for index, attribute in attributes:
        if getattr(nodes[index], attribute).data is None:
            raise RuntimeError(
                f"trying to backward through the graph a second time: an earlier pass has freed the tensors that "
                f"{nodes[index].name()} saved. Pass retain_graph=True to that pass, or add up the losses"
            )
