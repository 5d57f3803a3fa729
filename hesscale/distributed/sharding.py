"""Errors for parameters that are sharded over processes.

FSDP moves their gradients to other tensors after the pass, but would not move their Hessian diagonals.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, distributed

from ..errors import UnsupportedOperator

FSDP = (
    "{} has sharded a parameter of this model. Hessian diagonals of sharded parameters are not supported: they would be lost "
    "when the gradients are sharded again. No .grad or .hess_diag has changed. Train the model without FSDP, for example under "
    "DistributedDataParallel"
)

DTENSOR = (
    "a parameter is a DTensor, as under tensor parallelism. Its Hessian diagonal is not supported. No .grad or .hess_diag has "
    "changed. Train the model under DistributedDataParallel"
)


def check_unsharded(leaves: Iterable[Tensor]) -> None:
    """Raise if one of these leaves of a graph is a DTensor or belongs to FSDP."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    leaves = list(leaves)
    if any(getattr(leaf, "_is_flat_param", False) for leaf in leaves):
        raise UnsupportedOperator(FSDP.format("FullyShardedDataParallel (FSDP)"))
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None and any(isinstance(leaf, kind) for leaf in leaves):
        raise UnsupportedOperator(DTENSOR)
    gathered = {id(parameter) for parameter in gathered_parameters()}
    if gathered and any(id(leaf) in gathered for leaf in leaves):
        raise UnsupportedOperator(FSDP.format("fully_shard (FSDP2)"))


def gathered_parameters() -> Iterator[Tensor]:
    """The unsharded parameters that fully_shard gives to the modules of this process during a pass.

    Such a parameter has no mark of its own. PyTorch keeps a table of the modules' states, which refer to it.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(states, "_module_state_mapping", {}).values()):
        state: Any = reference()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in getattr(group, "fsdp_params", ()):
                if hasattr(parameter, "_unsharded_param"):
                    yield parameter._unsharded_param
