"""Parameters, gradients and averages that are DTensors: this process's shard, and sums over all shards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. If DTensors have not been imported, there are none."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def shard_mesh(tensor: Tensor) -> tuple[Any, tuple[int, ...]] | None:
    """The mesh of a DTensor and the dimensions along which it is sharded; None for any other tensor."""
    if not is_sharded(tensor):
        return None
    found: Any = tensor
    dims = tuple([dim for dim, placement in enumerate(found.placements) if not placement.is_replicate()])
    if any(found.placements[dim].is_partial() for dim in dims):
        raise RuntimeError(f"a parameter has the placements {found.placements}; hesscale's optimizers take shards and replicas")
    return found.device_mesh, dims


def placed_like(tensor: Any, like: Any) -> Any:
    """A DTensor, redistributed to the placements of ``like``. Any other tensor is returned unchanged."""
    if tensor is None or not is_sharded(like) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(placements=like.placements)


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """This process's parts of DTensors. They share the DTensors' memory."""
    parts: list[Any] = list(tensors)
    return [part.to_local() for part in parts]


def sum_over(mesh: Any, value: Tensor) -> Tensor:
    """The sum of a value over the processes with different shards; the value itself if nothing is sharded."""
    for dim in () if mesh is None else mesh[1]:
        if mesh[0].size(dim) > 1:
            value = value.clone()
            distributed.all_reduce(value, group=mesh[0].get_group(dim))
    return value


def holds_everywhere(meshes: Iterable[Any], is_true: Tensor) -> Tensor:
    """Whether something is true in all processes."""
    for mesh in meshes:
        is_true = sum_over(mesh, (~is_true).to(torch.int32)) == 0
    return is_true
