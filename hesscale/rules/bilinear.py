"""Products of two inputs: the operator's own backward with the other operand squared (Eq. 3, and the sums of Eq. 4)."""

from __future__ import annotations

from torch import Tensor

from .registry import Node, Share, linear, needs, saved


@linear("AddmmBackward0", contraction=True)
def addmm(node: Node, s: Tensor) -> list[Share]:
    """y = β b + α A B: s_b = β² s, s_A = α² s (B²)ᵀ, s_B = α² (A²)ᵀ s"""
    alpha, beta = saved(node, "alpha"), saved(node, "beta")
    bias = s if beta == 1 else s * beta**2
    if alpha != 1:
        s = s * alpha**2
    left = s @ saved(node, "mat2").square().t() if needs(node, 1) else None
    # the weight of a Linear arrives transposed: computed this way its share has the weight's own layout
    right = (s.t() @ saved(node, "mat1").square()).t() if needs(node, 2) else None
    return [bias, left, right]
