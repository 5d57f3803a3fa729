"""Errors for parameters that are sharded over processes in a way that is not supported.

FSDP moves the gradients of such parameters to other tensors after the pass. Under ``fully_shard``,
:mod:`hesscale.distributed.fully_sharded` moves their Hessian diagonals in the same way. FSDP1 is not supported. Under tensor
parallelism, parameters and activations are DTensors, and :mod:`hesscale.rules.tensor_parallel` has rules for the nodes that
PyTorch inserts around them.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, distributed

from ..errors import UnsupportedOperator
from .shards import is_sharded

FSDP1 = (
    "FullyShardedDataParallel (FSDP) has sharded a parameter of this model. Its Hessian diagonals are not supported: they would "
    "be lost when the gradients are sharded again. No .grad or .hess_diag has changed. Shard the model with "
    "torch.distributed.fsdp.fully_shard, or train it under DistributedDataParallel"
)

SUPPORTED = (
    "hesscale.backward without inputs=, and optimizer.backward of AdaHesScale, AdaHesScaleGN, BL89 and Adam compute Hessian "
    "diagonals of such parameters. hesscale.grad, the estimators, AdaHessian, GGNMC, SophiaG, calibrate_every and a second "
    "optimizer in hesscale.capture are not supported. No .grad or .hess_diag has changed"
)
FSDP2 = f"fully_shard (FSDP2) has sharded a parameter of this model. {SUPPORTED}"
DTENSOR = f"a parameter is a DTensor, as under tensor parallelism. {SUPPORTED}"
SEVERAL = (
    "a parameter is a DTensor on a mesh of several dimensions. Its Hessian diagonal is not supported. No .grad or .hess_diag has "
    "changed. Parallelize the model over one dimension of the mesh. fully_shard may take another"
)
DIVIDED = (
    "ZeroRedundancyOptimizer gives each process an optimizer for some of the parameters, so the trust region and the check for "
    "non-finite numbers would not see the whole model. No parameter has changed. Train the model under fully_shard"
)
LOSS = (
    "the loss is a DTensor, and so are the model's outputs. No .grad or .hess_diag has changed. Let the last layer return local "
    "tensors (use_local_output=True) that are replicated, or call full_tensor() on the outputs"
)


def check_unsharded(leaves: Iterable[Tensor]) -> None:
    """Raise if one of these leaves of a graph is a DTensor or belongs to FSDP."""
    if not distributed.is_available() or not distributed.is_initialized():
        return
    leaves = list(leaves)
    check_plain(leaves)
    if any(is_sharded(leaf) for leaf in leaves):
        raise UnsupportedOperator(DTENSOR)
    if is_gathered(leaves):
        raise UnsupportedOperator(FSDP2)


def check_plain(leaves: list[Any]) -> None:
    """Raise if one of these leaves belongs to FSDP1, or is a DTensor on a mesh of several dimensions."""
    if any(is_sharded(leaf) and leaf.device_mesh.ndim > 1 for leaf in leaves):
        raise UnsupportedOperator(SEVERAL)
    if any(getattr(leaf, "_is_flat_param", False) for leaf in leaves):
        raise UnsupportedOperator(FSDP1)


def check_local(loss: Tensor) -> None:
    """Raise if a loss is a DTensor."""
    if is_sharded(loss):
        raise UnsupportedOperator(LOSS)


def check_undivided(optimizer: object) -> None:
    """Raise if an optimizer is the local part of a ZeroRedundancyOptimizer. This searches through all objects."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None:  # PyTorch imports this module only when it is used
        return
    for thing in gc.get_objects():
        if issubclass(type(thing), module.ZeroRedundancyOptimizer) and getattr(thing, "optim", None) is optimizer:
            raise UnsupportedOperator(DIVIDED)


def is_gathered(leaves: Iterable[Tensor]) -> bool:
    """Whether fully_shard has gathered one of these leaves."""
    gathered = {id(param._unsharded_param) for _, _, param in gathered_parameters()}
    return bool(gathered) and any(id(leaf) in gathered for leaf in leaves)


def gathered_parameters() -> Iterator[tuple[Any, Any, Any]]:
    """The state, group and parameter of FSDP for each parameter that a module in this process has used.

    During a pass, fully_shard replaces the parameters of its modules by unsharded ones. Nothing marks these, but the states of
    the modules, of which PyTorch keeps a table, refer to them.
    """
    states = sys.modules.get("torch.distributed._composable_state")
    for reference in list(getattr(states, "_module_state_mapping", {}).values()):
        state: Any = reference()
        for group in groups_of(state):
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    yield state, group, param


def groups_of(state: Any) -> list[Any]:
    """A state's groups of parameters that are communicated together. In earlier versions of PyTorch, there is one group."""
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if hasattr(group, "fsdp_params")]


def leaf_ids(params: Iterable[Tensor]) -> set[int]:
    """The ids of these parameters, and of the unsharded parameters by which fully_shard replaces them."""
    ids = {id(p) for p in params}
    return ids | {id(param._unsharded_param) for _, _, param in gathered_parameters() if id(param.sharded_param) in ids}
