"""Means over processes: tensors are sent in buckets, one all-reduce each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed import Work

BUCKET_BYTES = 25 * 2**20  # as much as DDP sends at once
FIRST_BUCKET_BYTES = 2**20  # so that the first all-reduce starts early, as in DDP


class Reduction:
    """An asynchronous all-reduce of a bucket. The constructor starts it, and :meth:`finish` waits for it."""

    def __init__(self, tensors: Sequence[Tensor], group: Any, dtype: torch.dtype | None) -> None:
        self.tensors = tensors
        self.flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if dtype is not None and dtype.itemsize < self.flat.dtype.itemsize:
            self.flat = self.flat.to(dtype)
        self.flat.div_(group.size())
        self.work: Work | None = distributed.all_reduce(self.flat, group=group, async_op=True)

    def finish(self) -> None:
        """Replace the tensors by their means."""
        if self.work is not None:
            self.work.wait()
        for tensor, mean in zip(self.tensors, self.flat.split([tensor.numel() for tensor in self.tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def all_reduce_mean(tensors: Sequence[Tensor], group: Any, dtype: torch.dtype | None) -> None:
    """Replace tensors by their means over all processes. The last tensors are sent first, as in DDP."""
    under_way = [Reduction(bucket, group, dtype) for bucket in buckets(list(reversed(tensors)), BUCKET_BYTES, BUCKET_BYTES)]
    for reduction in under_way:
        reduction.finish()


def buckets(tensors: Sequence[Tensor], first_bytes: int, other_bytes: int) -> list[list[Tensor]]:
    """Split tensors, in their order, into buckets of one device and dtype. A bucket is full once it has reached its size."""
    found: list[list[Tensor]] = []
    latest: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        key = tensor.device, tensor.dtype
        bucket, room = latest.get(key, ([], 0))
        if room <= 0:
            bucket, room = [], other_bytes if found else first_bytes
            found.append(bucket)
        bucket.append(tensor)
        latest[key] = bucket, room - tensor.numel() * tensor.itemsize
    return found
