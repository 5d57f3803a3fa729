"""Nodes of tensor parallelism: they convert between local tensors and DTensors, or between two placements of a DTensor.

A DTensor is one tensor whose parts are in several processes. These nodes move its entries between processes without changing
them, so s is treated like g. If processes hold terms of a sum, the node's backward adds them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..distributed.shards import is_sharded
from ..engine.nodes import call
from ..errors import UnsupportedOperator
from .registry import Final, Node, Rule, Share

FROM_LOCAL, TO_LOCAL, REDISTRIBUTE = "_FromTorchTensor", "_ToTorchTensor", "Redistribute"
# Operators whose rules have been compared with a single process. Others are refused, since their rules may use local tensors.
OPERATORS = {
    "AddBackward0",
    "AddmmBackward0",
    "EmbeddingBackward0",
    "GeluBackward0",
    "MmBackward0",
    "NativeLayerNormBackward0",
    "ReluBackward0",
    "SiluBackward0",
    "TBackward0",
    "TanhBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
}


def redistribute(node: Node, g: Share, s: Share) -> Sequence[Share]:
    """the same entries in other processes, or their sum over the processes"""
    return call(node, [s])


def refuse(node: Node) -> str | None:
    kept = [getattr(value, "placements", value) for value in vars(node).values()]
    placements = [one for values in kept if isinstance(values, (tuple, list)) for one in values if hasattr(one, "is_partial")]
    is_sum = all(placement.reduce_op == "sum" for placement in placements if placement.is_partial())
    return None if is_sum else Final("partial values of a DTensor are reduced other than by a sum, which has no curvature rule")


RULE = Rule(
    redistribute,
    "tensor_parallel",
    redistribute.__doc__ or "",
    curved=False,
    joint=False,
    mixed=False,
    fan_in=False,
    fan_out=False,
    refuse=refuse,
)


def rule_of(function: Any) -> Rule | None:
    """The rule of a torch.autograd.Function, if it is one of these nodes."""
    is_placement = function.__module__.startswith("torch.distributed.tensor.")
    return RULE if is_placement and function.__name__ in (FROM_LOCAL, TO_LOCAL, REDISTRIBUTE) else None


def check_operators(steps: Iterable[Any]) -> None:
    """Raise for an operator on DTensors whose rule has not been tested on them. ``steps`` are in topological order."""
    inside: set[Node] = set()
    for node, rule, edges, _ in reversed(list(steps)):
        if rule is None:
            is_inside = is_sharded(node.variable)
        elif rule is RULE:
            is_inside = node._forward_cls.__name__ != TO_LOCAL
        else:
            is_inside = any(child in inside for child, _ in edges)
            if is_inside and node.name() not in OPERATORS:
                raise UnsupportedOperator(
                    f"{node.name()} takes a DTensor, as under tensor parallelism, where its curvature rule has not been tested. "
                    "Let the layers before it return local tensors (use_local_output=True), or train under fully_shard or "
                    "DistributedDataParallel"
                )
        if is_inside:
            inside.add(node)
