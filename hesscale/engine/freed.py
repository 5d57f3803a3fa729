"""Detect graphs that an earlier backward pass has partly freed, for example if two losses share layers.

PyTorch notices this only when it reaches the freed part, after it has filled ``.grad`` of other parameters. So the nodes that
save the largest tensors are checked before the pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .dispatch import Step
from .nodes import Node

# A tensor that these nodes always save. A product of two factors saves a factor only if the other one needs a gradient.
ALWAYS_SAVED = {
    "ConvolutionBackward0": "weight",
    "EmbeddingBackward0": "indices",
    "ScaledDotProductFlashAttentionForCpuBackward0": "query",
    "ScaledDotProductFlashAttentionBackward0": "query",
    "ScaledDotProductEfficientAttentionBackward0": "query",
    "MkldnnRnnLayerBackward0": "input",
    "CudnnRnnBackward0": "input",
}
Saved = tuple[int, str]  # the index of a node, and the attribute that holds a tensor it has saved


def saved_attributes(steps: Iterable[Step], indices: Iterable[int]) -> list[Saved]:
    """The saved tensors to check in all graphs of one structure."""
    found = []
    for (node, rule, edges, _), index in zip(steps, indices, strict=True):
        name = ALWAYS_SAVED.get(node.name())
        if rule is not None and rule.factors is not None and len(edges) > 1:
            needed = [other for (child, _), other in zip(edges[-2:], reversed(rule.factors), strict=True) if child is not None]
            name = needed[0] if needed else None  # None if only a bias needs a gradient
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
