"""Hessian diagonals under DistributedDataParallel (DDP).

DDP minimizes the mean of the processes' losses. A Hessian diagonal is linear in the loss, so the diagonal of this mean is the
mean of the processes' diagonals. It is computed in every backward pass in which DDP averages the gradients. It includes all that
``hess_diag`` has accumulated by then, as DDP does with ``.grad``.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from ..errors import CurvatureWarning, UnsupportedOperator
from .buckets import all_reduce_mean
from .draws import seeds_sent
from .overlap import PlannedPass, make_plan, plan_of
from .replicas import taking_part
from .sharding import is_gathered
from .shards import is_sharded

UNKNOWN = (
    "the processes have run a collective during this backward pass, but none of the parameters belongs to a "
    "DistributedDataParallel module, so hess_diag is not averaged. If the gradients were averaged, average hess_diag as well"
)
# For each DDP module, the gradients that parameters had when a pass computed their diagonals without averaging them, and the
# number of collectives that its process group had run by then
_unsent: weakref.WeakKeyDictionary[DistributedDataParallel, tuple[dict[int, tuple[int, int]], int | None]]
_unsent = weakref.WeakKeyDictionary()
_thread = threading.local()  # .outermost: the open block that averages, if there is one
Also = Callable[[], list[tuple[Tensor, Tensor]]]


def averaged_with_gradients(
    leaves: Callable[[], Iterable[Tensor]],
    dtype: torch.dtype | None = None,
    also: Also | None = None,
    *,
    changes_later: bool = False,
) -> AbstractContextManager[AveragedPass | None]:
    """A context around a backward pass. If DDP averages gradients inside it, the Hessian diagonals are averaged too.

    These contexts may be nested. ``__enter__`` returns the outermost one, which averages.

    Args:
        leaves: returns the leaves that the loss depends on. It is called only if this process has DDP modules.
        dtype: send the diagonals in this dtype, if it is smaller than their own.
        also: returns pairs of a parameter and another tensor, to average if the parameter's diagonal is averaged.
        changes_later: whether diagonals change after the pass has filled them. They are then sent at the end of the context.
    """
    return AveragedPass(leaves, dtype, also, changes_later) if is_distributed() else ONE_PROCESS


ONE_PROCESS = nullcontext()  # shared by all passes, to save the time of creating one at every step


class AveragedPass(AbstractContextManager["AveragedPass | None"]):
    """The context of :func:`averaged_with_gradients` if there are several processes."""

    def __init__(
        self, leaves: Callable[[], Iterable[Tensor]], dtype: torch.dtype | None, also: Also | None, changes_later: bool
    ) -> None:
        self.leaves, self.dtype, self.changes_later = leaves, dtype, changes_later
        self.also = [] if also is None else [also]
        self.replicas: list[Replica] = []
        self.is_outermost = False
        self.collectives: int | None = None  # of the default process group, if no DDP module takes part

    def __enter__(self) -> AveragedPass:
        outermost: AveragedPass | None = getattr(_thread, "outermost", None)
        if outermost is not None:
            outermost.also += self.also
            outermost.changes_later |= self.changes_later
            return outermost
        modules = taking_part(self.leaves())
        for module in modules:
            check_supported(module)
        self.replicas = [Replica(module) for module in modules]
        self.collectives = None if modules else count_collectives(distributed.group.WORLD)
        self.is_outermost, _thread.outermost = True, self
        return self

    def replica_to_tell(self) -> Replica | None:
        """The DDP module whose :meth:`Replica.filled` and :meth:`Replica.advance` a pass must call; None if there is none.

        These calls let diagonals be sent during the pass.
        """
        if self.changes_later or len(self.replicas) != 1:  # several modules may fill their parameters in any order
            return None
        replica = self.replicas[0]
        return replica if replica.begin(self.dtype) else None

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if not self.is_outermost:
            return
        _thread.outermost = None
        if error is None:
            with torch.no_grad():
                communicated = [replica for replica in self.replicas if replica.has_communicated()]
                for replica in self.replicas:
                    replica.note_unsent(is_sent=replica in communicated)
                for replica in communicated:
                    replica.average(self.dtype)
                    held = {id(p) for p in replica.params}
                    others = [tensor for also in self.also for p, tensor in also() if id(p) in held]
                    all_reduce_mean(others, replica.group, None)
            if self.collectives in (None, count_collectives(distributed.group.WORLD)) or not self.is_foreign():
                return  # no collective has run, or FSDP or a DTensor has run it
            warnings.warn(UNKNOWN, CurvatureWarning, stacklevel=3)

    def is_foreign(self) -> bool:
        """Whether neither fully_shard nor tensor parallelism explains collectives of this pass."""
        leaves = list(self.leaves())
        return not is_gathered(leaves) and not any(is_sharded(leaf) for leaf in leaves)


def is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def check_supported(module: Any) -> None:
    """Raise for settings of DDP with which diagonals would not be averaged correctly, or a process would wait forever."""
    found = {
        "join(), for uneven inputs": getattr(getattr(module, "_join_config", None), "enable", False),
        "mixed_precision=": getattr(module, "mixed_precision", None) is not None,
        "the Python reducer of compiled autograd": getattr(module, "_use_python_reducer", False),
        "delay_all_reduce_named_params=": bool(getattr(module, "_delay_all_reduce_params", None)),
        "device_mesh=, over tensor parallelism": any(hasattr(p, "_st_info") for p in module._module_parameters),
    }
    if used := [name for name, is_used in found.items() if is_used]:
        raise UnsupportedOperator(
            f"DistributedDataParallel with {used[0]} is not supported with Hessian diagonals. Leave it out. For mixed precision, "
            "use autocast; for uneven inputs, use a sampler that gives every process the same number of batches; over tensor "
            "parallelism, use fully_shard"
        )


class Replica:
    """A DDP module in a backward pass."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module, self.group = module, module.process_group
        self.params: list[Any] = [p for p in module._module_parameters if p.requires_grad]
        self.before = [(p.grad is None, *state(p)) for p in self.params]
        self.gradients = [(p.grad, version(p.grad)) for p in self.params]
        self.collectives = self.count_collectives()
        self.order: list[Any] = []  # the order in which the pass fills diagonals, if there is no plan yet
        self.planned: PlannedPass | None = None

    def begin(self, dtype: torch.dtype | None) -> bool:
        """Prepare for calls of :meth:`filled` and :meth:`advance` during the pass. False if they are not needed."""
        plan = plan_of(self.module)
        if plan is not None:
            self.planned = PlannedPass(plan, self.has_communicated, dtype)
        return self.collectives is not None

    def filled(self, p: Tensor) -> None:
        """Call this when the pass has filled a parameter's diagonal."""
        if self.planned is not None:
            self.planned.filled(p)
        else:
            self.order.append(p)

    def advance(self) -> None:
        """Call this when the pass reaches a parameter. Sends the diagonals that can be sent."""
        if self.planned is not None:
            self.planned.advance()

    def has_communicated(self) -> bool:
        """Whether DDP has averaged gradients in this pass. It does not inside no_sync, or if the pass bypasses the DDP module."""
        if not self.module.require_backward_grad_sync and not self.module.require_forward_param_sync:
            return False  # if the group has run collectives, another module was averaged
        return self.collectives is None or self.count_collectives() != self.collectives

    def count_collectives(self) -> int | None:
        """How many collectives the groups in which DDP may send gradients have run. A communication hook may use any group."""
        groups = distributed.distributed_c10d._world.pg_map if self.module._comm_hooks else [self.group]
        counts = [count_collectives(group) for group in groups]
        return None if None in counts else sum([count or 0 for count in counts])

    def average(self, dtype: torch.dtype | None) -> None:
        own = [self.own_diagonal(p, before) for p, before in zip(self.params, self.before, strict=True)]
        is_sent = [diagonal is not None for diagonal in own]
        if self.module.find_unused_parameters or self.module.static_graph:  # processes may have used different parameters
            device = self.params[0].device
            counts = torch.tensor(is_sent, dtype=torch.int32, device=device)
            distributed.all_reduce(counts, group=self.group)
            is_sent = [count > 0 for count in counts.tolist()]
        else:
            self.check_all_reached()
        for p, diagonal, sent in zip(self.params, own, is_sent, strict=True):
            if sent and diagonal is None:
                p.hess_diag = torch.zeros_like(p, requires_grad=False)
        found = [p for p, sent in zip(self.params, is_sent, strict=True) if sent]
        if self.planned is None:  # also if this pass was not told of its progress: another process's may have been
            plan = plan_of(self.module) or make_plan(self.module, self.params, self.order)
            self.planned = None if plan is None else PlannedPass(plan, self.has_communicated, dtype)
        if self.planned is not None:
            self.planned.finish(found)
        else:
            all_reduce_mean([p.hess_diag for p in found], self.group, dtype)

    def check_all_reached(self) -> None:
        """Raise if the pass has not reached some parameters that DDP waits for. DDP has not averaged all gradients then.

        The other processes wait for this one's gradients. DDP raises its own error only in the next forward pass. This process
        would not reach it, since it would wait for the other processes' diagonals.
        """
        pairs = zip(self.params, self.gradients, strict=True)
        left_out = {id(p) for p, (gradient, before) in pairs if p.grad is gradient and version(p.grad) == before}
        if left_out:
            names = [name for name, p in self.module.module.named_parameters() if id(p) in left_out]
            raise RuntimeError(
                f"DistributedDataParallel has not averaged all gradients: this pass has not reached {', '.join(names[:3])}"
                f"{f' and {len(names) - 3} more' if len(names) > 3 else ''}. Pass find_unused_parameters=True to "
                "DistributedDataParallel if the loss does not use all parameters; if several losses do, call backward once, for "
                "their sum"
            )

    def note_unsent(self, *, is_sent: bool) -> None:
        """Record the diagonals that a pass inside no_sync has not averaged, for :func:`check_averaged`."""
        _unsent.pop(self.module, None)
        if not is_sent and not self.module.require_forward_param_sync:
            noted = {id(p): gradient_state(p) for p in self.params if getattr(p, "hess_diag", None) is not None}
            _unsent[self.module] = noted, count_collectives(self.group)

    def own_diagonal(self, p: Any, before: tuple[bool, Tensor | None, int]) -> Tensor | None:
        """This process's accumulated diagonal; None if the parameter had no gradient and the pass has not reached it."""
        had_no_gradient, *earlier = before
        diagonal, version = state(p)
        is_filled = diagonal is not earlier[0] or version != earlier[1]
        return None if had_no_gradient and not is_filled else diagonal


def check_averaged(groups: Iterable[dict[str, Any]]) -> None:
    """Raise if diagonals of an optimizer's groups were not averaged, but a later pass averaged the gradients."""
    params = [p for group in groups for p in group["params"] if getattr(p, "hess_diag", None) is not None] if _unsent else []
    for module, (noted, count) in _unsent.items():
        is_behind = any(id(p) in noted and noted[id(p)] != gradient_state(p) for p in params)
        # the flag is False again after a forward pass without gradients
        if is_behind and (module.require_forward_param_sync or count_collectives(module.process_group) != count):
            raise RuntimeError(
                "a pass inside no_sync() has computed Hessian diagonals, and a later pass averaged the gradients without them, "
                "so hess_diag differs between the processes. Compute diagonals in the pass that averages the gradients as well"
            )


def gradient_state(p: Tensor) -> tuple[int, int]:
    """Numbers that change whenever a parameter's gradient does."""
    return id(p.grad), version(p.grad)


def state(p: Any) -> tuple[Tensor | None, int]:
    """A parameter's Hessian diagonal, and how often it has been changed in place."""
    diagonal: Tensor | None = getattr(p, "hess_diag", None)
    return diagonal, version(diagonal)


def version(tensor: Tensor | None) -> int:
    """How often a tensor has been changed in place."""
    return 0 if tensor is None else tensor._version


def count_collectives(group: Any) -> int | None:
    """How many collectives a process group has run, besides those that send seeds; None if its backend does not count them."""
    try:
        return int(group._get_sequence_number_for_group()) - seeds_sent.get(group, 0)
    except RuntimeError:
        return None
