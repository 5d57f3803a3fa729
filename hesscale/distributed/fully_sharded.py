"""Hessian diagonals under ``fully_shard`` (FSDP2).

FSDP all-gathers a module's parameters before the module runs, and reduce-scatters their gradients afterwards, so that every
process keeps its shard of the mean. The leaves of a graph are the gathered parameters. Their Hessian diagonals are
reduce-scattered when the pass has filled all diagonals of a module. ``hess_diag`` of a sharded parameter is a DTensor like its
``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed

from ..errors import UnsupportedOperator
from .sharding import check_plain, gathered_parameters, groups_of
from .shards import is_sharded, local_parts, placed_like

REFUSED = (
    "fully_shard (FSDP2) with {} is not supported with Hessian diagonals. No .grad or .hess_diag has changed. Leave it out, or "
    "train the model under DistributedDataParallel"
)

# PyTorch 2.13 renamed this function
REDUCE_SCATTER: Any = getattr(distributed, "reduce_scatter_single", None) or getattr(distributed, "reduce_scatter_tensor", None)


def sharded_pass(leaves: Iterable[Tensor]) -> ShardedPass | None:
    """A :class:`ShardedPass` to these leaves; None if fully_shard has gathered none of them.

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
        "replicate": type(group.mesh_info).__name__ not in ("FSDPMeshInfo", "HSDPMeshInfo"),
        "set_requires_all_reduce(False)": replicas_of(group) is not None and group.reduce_grads and not group.all_reduce_grads,
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

    Until they are reduced, diagonals are stored in ``hess_diag`` of the gathered parameters. With
    ``set_requires_gradient_sync(False)``, they accumulate there, as the gradients do.
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
        self.overwrites: dict[int, bool] = {}
        self.dtype: torch.dtype | None = None  # send diagonals in this dtype, if it is smaller than their own
        self.group_of = {id(param): group for group in groups for param in group.fsdp_params}
        self.missing = {id(group): {id(p) for p in group.fsdp_params if p.sharded_param.requires_grad} for group in groups}
        self.pending: ShardReduction | None = None  # at most one, since its buffers have the size of a whole module
        self.reduced: set[int] = set()  # ids of groups
        self.shards: list[tuple[Any, Any]] = []  # parameters, each with this process's shard of its mean

    def begin(self, dtype: torch.dtype | None) -> None:
        """Record which diagonals the pass overwrites, and drop those whose gradients were reduced without them."""
        self.dtype = dtype
        for key, param in self.by_leaf.items():
            self.overwrites[key] = param.sharded_param.grad is None
            if param.unsharded_accumulated_grad is None and param._unsharded_param.grad is None:
                param._unsharded_param.hess_diag = None

    def takes(self, leaf: Any, diagonal: Tensor | None) -> bool:
        """Add to the diagonal of a gathered parameter. Returns False for any other leaf, which the caller has to fill."""
        param = self.by_leaf.get(id(leaf))
        if param is None:
            return self.wanted is not None and id(leaf) not in self.wanted
        if self.is_wanted(param):
            self.add(param, diagonal)
        group = self.group_of[id(param)]
        missing = self.missing[id(group)]
        missing.discard(id(param))
        if not missing and group.reduce_grads and not reduces_unused(group):
            self.reduce(group)  # all processes run the same modules, so they do this in the same order
        return True

    def add(self, param: Any, diagonal: Tensor | None) -> None:
        leaf = param._unsharded_param
        if is_sharded(leaf):  # with tensor parallelism as well, fully_shard shards this process's part of the leaf
            (part,) = local_parts([leaf])
            diagonal = None if diagonal is None else local_parts([placed_like(diagonal, leaf)])[0]
        else:
            part = leaf
        present = getattr(leaf, "hess_diag", None)
        total = torch.zeros(part.shape, dtype=param.orig_dtype, device=part.device) if present is None else present
        leaf.hess_diag = total if diagonal is None else total.add_(diagonal)

    def is_wanted(self, param: Any) -> bool:
        return self.wanted is None or id(param.sharded_param) in self.wanted

    def reduce(self, group: Any) -> None:
        """Start to reduce the diagonals of a group."""
        members = []
        for param in group.fsdp_params:
            leaf = getattr(param, "_unsharded_param", None)
            if leaf is None or not leaf.requires_grad or not self.is_wanted(param):
                continue
            if reduces_unused(group):
                self.add(param, None)
            if getattr(leaf, "hess_diag", None) is not None:
                members.append(param)
        self.reduced.add(id(group))
        if members:
            self.wait()
            self.pending = ShardReduction(group, members, self.dtype)

    def wait(self) -> None:
        if self.pending is not None:
            self.shards += self.pending.finish()
            self.pending = None

    def finish(self) -> None:
        """Reduce the diagonals of all other groups whose gradients FSDP has reduced. All processes do so in the same order."""
        for group in self.groups:
            if group.reduce_grads and id(group) not in self.reduced:
                self.reduce(group)
        self.wait()
        for param, shard in self.shards:
            sharded = param.sharded_param
            if self.overwrites[id(param._unsharded_param)] or getattr(sharded, "hess_diag", None) is None:
                sharded.hess_diag = shard
            else:
                sharded.hess_diag._local_tensor.add_(shard._local_tensor)


def replicas_of(group: Any) -> Any:
    """The process group of the processes with the same shard, on a mesh of two dimensions; otherwise None."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def reduces_unused(group: Any) -> bool:
    """Whether processes may use different parameters of a group."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


class ShardReduction:
    """An asynchronous reduce-scatter of the diagonals of gathered parameters. Sets their ``hess_diag`` to None."""

    def __init__(self, group: Any, params: list[Any], dtype: torch.dtype | None) -> None:
        self.params, process_group = params, group.mesh_info.shard_process_group
        self.replicas = replicas_of(group)
        leaves = [param._unsharded_param for param in params]
        count = process_group.size() * (1 if self.replicas is None else self.replicas.size())
        divisor = group.gradient_divide_factor or count
        rows = [rows_of(leaf.hess_diag, param, process_group.size()) for leaf, param in zip(leaves, params, strict=True)]
        for leaf in leaves:
            leaf.hess_diag = None  # frees memory as large as the whole parameter
        self.lengths = [row.shape[1] for row in rows]
        whole = torch.cat(rows, 1).div_(divisor)
        if dtype is not None and dtype.itemsize < whole.dtype.itemsize:
            whole = whole.to(dtype)
        self.total, self.work = whole[0], None
        if process_group.size() > 1:
            self.total = torch.empty_like(self.total)
            self.work = REDUCE_SCATTER(self.total, whole.view(-1), group=process_group, async_op=True)

    def finish(self) -> list[tuple[Any, Any]]:
        """The parameters, each with this process's shard of its mean."""
        if self.work is not None:
            self.work.wait()
        if self.replicas is not None and self.replicas.size() > 1:
            distributed.all_reduce(self.total, group=self.replicas)
        parts = zip(self.params, self.total.split(self.lengths), strict=True)
        return [(param, param.to_sharded_dtensor(shard_of(part, param))) for param, part in parts]


def rows_of(diagonal: Tensor, param: Any, count: int) -> Tensor:
    """A diagonal as a matrix with one row per process: the entries of its shard, padded with zeros."""
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
