"""Linear maps with constant Jacobian entries: s_x = (J∘J)ᵀ s.

Where the entries are 0 and 1, J∘J = J and the node's own backward does it. Otherwise each entry is squared.
"""

from __future__ import annotations

from torch import Tensor

from .registry import Node, Share, linear, saved, zero_one

zero_one(
    "ViewBackward0",
    "TBackward0",
    "TransposeBackward0",
    summary="the same entries in another place",
)
zero_one("ExpandBackward0", summary="one entry repeated: its shares add up", fan_out=True)


@linear("SumBackward0", fan_out=False)
def sum_all(node: Node, s: Tensor) -> Share:
    """J = 1"""
    return s.expand(saved(node, "self_sym_sizes"))
