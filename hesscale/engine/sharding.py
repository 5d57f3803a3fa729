"""Parameters that FSDP has sharded: their gradients are moved to other tensors after the pass, and no diagonal would follow."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, distributed

from ..errors import UnsupportedOperator
from .nodes import LEAF, Node

FSDP = (
    "{} has sharded a parameter of this model. Their Hessian diagonals are not supported: they would be lost when "
    "the gradients are sharded again. Nothing has changed. Train the model without FSDP, or under DistributedDataParallel"
)


def check_unsharded(nodes: Iterable[Node]) -> None:
    """Raise if the tensor of a leaf among these nodes belongs to FSDP."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    leaves: list[Any] = [node.variable for node in nodes if node.name() == LEAF]
    if any(getattr(leaf, "_is_flat_param", False) for leaf in leaves):
        raise UnsupportedOperator(FSDP.format("FullyShardedDataParallel (FSDP)"))
    gathered = {id(parameter) for parameter in gathered_parameters()}
    if gathered and any(id(leaf) in gathered for leaf in leaves):
        raise UnsupportedOperator(FSDP.format("fully_shard (FSDP2)"))


def gathered_parameters() -> Iterator[Tensor]:
    """What fully_shard hands to the modules of this process during a pass, in place of their shards.

    Nothing about such a parameter itself tells. The modules' states do, of which PyTorch keeps a table.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(states, "_module_state_mapping", {}).values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                if hasattr(parameter, "_unsharded_param"):
                    yield parameter._unsharded_param
