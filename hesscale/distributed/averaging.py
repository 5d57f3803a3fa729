"""Hessian diagonals under DistributedDataParallel (DDP).

DDP minimizes the mean of the processes' losses. A Hessian diagonal is linear in the loss, so the diagonal of this mean is the
mean of the processes' diagonals. It is computed after a backward pass in which DDP has averaged the gradients. It includes all
that ``hess_diag`` has accumulated by then, as DDP does with ``.grad``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ..errors import CurvatureWarning, UnsupportedOperator
from .replicas import replicated_modules
from .sharding import is_gathered

if TYPE_CHECKING:
    from torch.distributed import Work

UNKNOWN = (
    "the processes have run a collective during this backward pass, but none of the parameters belongs to a "
    "DistributedDataParallel module, so hess_diag is not averaged. If the gradients were averaged, average hess_diag as well"
)
BUCKET_BYTES = 25 * 2**20  # as much as DDP sends at once
_thread = threading.local()  # .outermost: the open block that averages, if there is one
Also = Callable[[], list[tuple[Tensor, Tensor]]]


def averaged_with_gradients(
    leaves: Callable[[], Iterable[Tensor]], dtype: torch.dtype | None = None, also: Also | None = None
) -> AbstractContextManager[None]:
    """A block around a backward pass: if DDP averages gradients in it, average the Hessian diagonals too.

    Blocks may be nested; the outermost one averages.

    Args:
        leaves: returns the leaves that the loss depends on. It is called only if this process has DDP modules.
        dtype: send the diagonals in this dtype, if it is smaller than their own.
        also: returns pairs of a parameter and another tensor, to average if the parameter's diagonal is averaged.
    """
    return AveragedPass(leaves, dtype, also) if is_distributed() else ONE_PROCESS


ONE_PROCESS = nullcontext()  # one for all passes, since even making it takes time at every step


class AveragedPass(AbstractContextManager[None]):
    """A block of :func:`averaged_with_gradients` where there are several processes."""

    def __init__(self, leaves: Callable[[], Iterable[Tensor]], dtype: torch.dtype | None, also: Also | None) -> None:
        self.leaves, self.dtype = leaves, dtype
        self.also = [] if also is None else [also]
        self.replicas: list[Replica] = []
        self.is_outermost = False
        self.collectives: int | None = None  # of the default process group, if no DDP module takes part

    def __enter__(self) -> None:
        outermost: AveragedPass | None = getattr(_thread, "outermost", None)
        if outermost is not None:
            outermost.also += self.also
            return
        modules = list(replicated_modules())
        if modules:
            touched = {id(leaf) for leaf in self.leaves()}
            modules = [module for module in modules if any(id(p) in touched for p in module._module_parameters)]
        for module in modules:
            check_supported(module)
        self.replicas = [Replica(module) for module in modules]
        self.collectives = None if modules else count_collectives(distributed.group.WORLD)
        self.is_outermost, _thread.outermost = True, self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if not self.is_outermost:
            return
        _thread.outermost = None
        if error is None:
            with torch.no_grad():
                for replica in [replica for replica in self.replicas if replica.has_communicated()]:
                    replica.average(self.dtype)
                    held = {id(p) for p in replica.params}
                    others = [tensor for also in self.also for p, tensor in also() if id(p) in held]
                    all_reduce_mean(others, replica.group, None)
            if self.collectives in (None, count_collectives(distributed.group.WORLD)) or is_gathered(self.leaves()):
                return  # there were none, or they are FSDP's
            warnings.warn(UNKNOWN, CurvatureWarning, stacklevel=3)


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def check_supported(module: Any) -> None:
    """Raise for settings of DDP under which diagonals would not be averaged correctly, or a process would wait forever."""
    found = {
        "join(), for uneven inputs": getattr(getattr(module, "_join_config", None), "enable", False),
        "mixed_precision=": getattr(module, "mixed_precision", None) is not None,
        "the Python reducer of compiled autograd": getattr(module, "_use_python_reducer", False),
        "delay_all_reduce_named_params=": bool(getattr(module, "_delay_all_reduce_params", None)),
    }
    if used := [name for name, is_used in found.items() if is_used]:
        raise UnsupportedOperator(
            f"DistributedDataParallel with {used[0]} is not supported with Hessian diagonals. Leave it out. For mixed precision, "
            "use autocast; for uneven inputs, use a sampler that gives every process the same number of batches"
        )


class Replica:
    """A DDP module at the start of a backward pass."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module, self.group = module, module.process_group
        self.params: list[Any] = [p for p in module._module_parameters if p.requires_grad]
        self.before = [(p.grad is None, *state(p)) for p in self.params]
        self.collectives = count_collectives(self.group)

    def has_communicated(self) -> bool:
        """Whether DDP has averaged gradients in this pass. It does not inside no_sync, or if the pass bypasses the DDP module."""
        if self.collectives is None:
            return bool(self.module.require_backward_grad_sync or self.module.require_forward_param_sync)
        return count_collectives(self.group) != self.collectives

    def average(self, dtype: torch.dtype | None) -> None:
        own = [self.own_diagonal(p, before) for p, before in zip(self.params, self.before, strict=True)]
        is_sent = [diagonal is not None for diagonal in own]
        if self.module.find_unused_parameters or self.module.static_graph:  # processes may have used different parameters
            device = self.params[0].device
            counts = torch.tensor(is_sent, dtype=torch.int32, device=device)
            distributed.all_reduce(counts, group=self.group)
            is_sent = [count > 0 for count in counts.tolist()]
        for p, diagonal, sent in zip(self.params, own, is_sent, strict=True):
            if sent and diagonal is None:
                p.hess_diag = torch.zeros_like(p, requires_grad=False)
        all_reduce_mean([p.hess_diag for p, sent in zip(self.params, is_sent, strict=True) if sent], self.group, dtype)

    def own_diagonal(self, p: Any, before: tuple[bool, Tensor | None, int]) -> Tensor | None:
        """This process's accumulated diagonal; None if the parameter had no gradient and the pass has not reached it."""
        starts_afresh, *earlier = before
        diagonal, version = state(p)
        is_filled = diagonal is not earlier[0] or version != earlier[1]
        return None if starts_afresh and not is_filled else diagonal


def state(p: Any) -> tuple[Tensor | None, int]:
    """A parameter's Hessian diagonal, and how often it has been changed in place."""
    diagonal: Tensor | None = getattr(p, "hess_diag", None)
    return diagonal, 0 if diagonal is None else diagonal._version


def count_collectives(group: Any) -> int | None:
    """How many collectives a process group has run; None if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return None


def all_reduce_mean(tensors: Sequence[Tensor], group: Any, dtype: torch.dtype | None) -> None:
    """Replace tensors by their means over all processes, with one all-reduce per bucket."""
    under_way: list[tuple[list[Tensor], Tensor, Work]] = []
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        if dtype is not None and dtype.itemsize < flat.dtype.itemsize:
            flat = flat.to(dtype)
        flat.div_(group.size())
        under_way.append((bucket, flat, distributed.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in under_way:
        work.wait()
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view(tensor.shape))


def buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split tensors into buckets of one device and dtype and limited size; the last parameters come first, as in DDP."""
    found: list[list[Tensor]] = []
    latest: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], int]] = {}
    for tensor in reversed(tensors):
        key, size = (tensor.device, tensor.dtype), tensor.numel() * tensor.itemsize
        bucket, filled = latest.get(key, ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES or not bucket:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(tensor)
        latest[key] = bucket, filled + size
    return found
