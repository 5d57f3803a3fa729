"""Hessian diagonals under ``fully_shard`` (FSDP2).

FSDP gathers a module's parameters before the module runs, and reduce-scatters their gradients afterwards: every process keeps
its shard of the mean. The leaves of a graph are the gathered parameters. Their Hessian diagonals are reduce-scattered after the
pass, and ``hess_diag`` of a sharded parameter is a DTensor like its ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from ..errors import UnsupportedOperator
from .sharding import check_plain, gathered_parameters, groups_of

REFUSED = (
    "fully_shard (FSDP2) with {} is not supported with Hessian diagonals. No .grad or .hess_diag has changed. Leave it out, or "
    "train the model under DistributedDataParallel"
)

# PyTorch 2.13 has renamed it
REDUCE_SCATTER: Any = getattr(distributed, "reduce_scatter_single", None) or getattr(distributed, "reduce_scatter_tensor", None)


def sharded_pass(leaves: Iterable[Tensor]) -> ShardedPass | None:
    """The part that fully_shard has in a backward pass to these leaves; None if it has gathered none of them.

    Raises:
        UnsupportedOperator: for parameters that are sharded in another way.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    leaves = list(leaves)
    check_plain(leaves)
    ids = {id(leaf) for leaf in leaves}
    contexts = {}
    for state, _, param in gathered_parameters():
        if id(param._unsharded_param) in ids:
            contexts[id(state._state_ctx)] = state._state_ctx
    if not contexts:
        return None
    groups = [group for context in contexts.values() for state in context.all_states for group in groups_of(state)]
    for group in groups:
        check_supported(group)
    return ShardedPass(groups)


def check_supported(group: Any) -> None:
    """Raise for settings of FSDP under which diagonals would not be reduced like the gradients."""
    params = group.fsdp_params
    found = {
        "a mesh of two dimensions (HSDP), or replicate": type(group.mesh_info).__name__ != "FSDPMeshInfo",
        "tensor parallelism": any(param.is_dtensor for param in params),
        "CPUOffloadPolicy": any(param.offload_to_cpu for param in params),
        "an all-reduce hook": group._all_reduce_hook is not None,
        "parameters that define their own all-gather": any(
            hasattr(param._sharded_local_tensor, "fsdp_post_all_gather") for param in params
        ),
    }
    if used := [name for name, is_used in found.items() if is_used]:
        raise UnsupportedOperator(REFUSED.format(used[0]))


class ShardedPass:
    """A backward pass to parameters that fully_shard has gathered.

    Until they are reduced, diagonals are kept in ``hess_diag`` of the gathered parameters. They accumulate there while
    ``set_requires_gradient_sync(False)`` holds, as the gradients do.
    """

    def __init__(self, groups: list[Any]) -> None:
        self.groups = groups
        self.wanted: set[int] | None = None  # the ids of the parameters to fill; None for all
        self.by_leaf = {
            id(param._unsharded_param): param
            for group in groups
            for param in group.fsdp_params
            if hasattr(param, "_unsharded_param")
        }
        self.starts_afresh: dict[int, bool] = {}

    def begin(self) -> None:
        """Note which diagonals start afresh, and drop those whose gradients have been reduced without them."""
        for key, param in self.by_leaf.items():
            self.starts_afresh[key] = param.sharded_param.grad is None
            if param.unsharded_accumulated_grad is None and param._unsharded_param.grad is None:
                param._unsharded_param.hess_diag = None

    def takes(self, leaf: Any, diagonal: Tensor | None) -> bool:
        """Add a diagonal to a gathered parameter's. Returns False for another leaf, which the caller has to fill."""
        param = self.by_leaf.get(id(leaf))
        if param is None:
            return self.wanted is not None and id(leaf) not in self.wanted
        if self.is_wanted(param):
            present = getattr(leaf, "hess_diag", None)
            total = torch.zeros(leaf.shape, dtype=param.orig_dtype, device=leaf.device) if present is None else present
            leaf.hess_diag = total if diagonal is None else total.add_(diagonal)
        return True

    def is_wanted(self, param: Any) -> bool:
        return self.wanted is None or id(param.sharded_param) in self.wanted

    def finish(self, dtype: torch.dtype | None) -> None:
        """Reduce the diagonals of all groups whose gradients FSDP has reduced. All processes do so in the same order."""
        for group in self.groups:
            if not group.reduce_grads:
                continue
            members = []
            for param in group.fsdp_params:
                leaf = getattr(param, "_unsharded_param", None)
                if leaf is None or not leaf.requires_grad or not self.is_wanted(param):
                    continue
                if getattr(group, "reduce_scatter_unused_params", False):
                    self.takes(leaf, None)
                if getattr(leaf, "hess_diag", None) is not None:
                    members.append(param)
            if members:
                self.reduce(group, members, dtype)

    def reduce(self, group: Any, params: list[Any], dtype: torch.dtype | None) -> None:
        """Replace the diagonals of gathered parameters by this process's shards of their mean."""
        process_group = group.mesh_info.shard_process_group
        leaves = [param._unsharded_param for param in params]
        divisor = group.gradient_divide_factor or process_group.size()
        rows = [rows_of(leaf.hess_diag, param, process_group.size()) for leaf, param in zip(leaves, params, strict=True)]
        flat = reduce_scatter(torch.cat(rows, 1).div_(divisor), process_group, dtype)
        for leaf, param, part in zip(leaves, params, flat.split([row.shape[1] for row in rows]), strict=True):
            shard, leaf.hess_diag = param.to_sharded_dtensor(shard_of(part, param)), None
            sharded = param.sharded_param
            if self.starts_afresh[id(leaf)] or getattr(sharded, "hess_diag", None) is None:
                sharded.hess_diag = shard
            else:
                sharded.hess_diag._local_tensor.add_(shard._local_tensor)


def rows_of(diagonal: Tensor, param: Any, count: int) -> Tensor:
    """A diagonal in one row per process: the part that belongs to its shard, and zeros up to equal length."""
    moved = diagonal.movedim(param.fsdp_placement.dim, 0)
    length = -(-moved.shape[0] // count)
    padded = moved.new_zeros(count * length, *moved.shape[1:])
    padded[: moved.shape[0]] = moved
    return padded.view(count, -1)


def shard_of(row: Tensor, param: Any) -> Tensor:
    """The diagonal of this process's shard: the inverse of :func:`rows_of`."""
    dim, size = param.fsdp_placement.dim, list(param.sharded_size)
    length = size.pop(dim)
    shard = row[: length * torch.Size(size).numel()].view(length, *size).movedim(0, dim)
    return torch.empty(param.sharded_size, dtype=param.orig_dtype, device=row.device).copy_(shard)


def reduce_scatter(rows: Tensor, group: Any, dtype: torch.dtype | None) -> Tensor:
    """The sum over the processes of the row that belongs to this one."""
    if dtype is not None and dtype.itemsize < rows.dtype.itemsize:
        rows = rows.to(dtype)
    if group.size() == 1:
        return rows[0]
    total = torch.empty_like(rows[0])
    REDUCE_SCATTER(total, rows.view(-1), group=group)
    return total
