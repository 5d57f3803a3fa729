"""Overlap of communication with the backward pass: diagonals are sent during the pass, as DDP sends gradients.

A plan divides a module's parameters into buckets. A bucket is sent when the pass has filled the last of its diagonals. The
remaining buckets are sent at the end of the pass. This cannot deadlock, whatever the timing of the processes:

- Diagonals have a separate process group. In this group, every process sends the buckets in the plan's order, so the n-th
  all-reduce is the same bucket in all processes. The order in which a pass fills diagonals may differ between processes; it only
  changes when a bucket is sent.
- Nothing waits during the pass. A process waits for the means after it has sent all buckets.
- A pass sends nothing before DDP has sent gradients in this pass, since only then all processes take part. This excludes passes
  inside no_sync and passes that bypass the DDP module.
- Where processes may use different parameters (find_unused_parameters, static_graph), they have to agree first on which
  diagonals exist. There is no plan for these modules, and all diagonals are sent after the pass.

The first pass makes the plan, in the order in which it filled the diagonals in the first process. It sends them at its end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from .buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, Reduction, buckets

# NCCL requires that all processes launch the collectives of several groups in the same order. They do if they run the same graph,
# but this has not been tested on GPUs.
BACKENDS = {"gloo"}

_plans: weakref.WeakKeyDictionary[DistributedDataParallel, Plan] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # for each group of DDP, the one for diagonals


class Plan:
    """The buckets of a module's parameters, in the order in which they are sent."""

    def __init__(self, module: DistributedDataParallel, params: Sequence[Tensor], group: Any) -> None:
        size = int(getattr(module, "bucket_bytes_cap", BUCKET_BYTES))
        self.buckets = buckets(params, min(FIRST_BUCKET_BYTES, size), size)
        self.bucket_of = {id(p): index for index, bucket in enumerate(self.buckets) for p in bucket}
        self.group = group


def plan_of(module: DistributedDataParallel) -> Plan | None:
    return _plans.get(module)


def make_plan(module: DistributedDataParallel, params: Sequence[Tensor], filled: Sequence[Tensor]) -> Plan | None:
    """A plan for this module, after a pass that has filled these parameters in this order. All processes call this together."""
    if module.find_unused_parameters or module.static_graph or distributed.get_backend(module.process_group) not in BACKENDS:
        return None
    group = group_like(module.process_group, params[0].device)
    if group is None:
        return None
    index_of = {id(p): index for index, p in enumerate(params)}
    found = dict.fromkeys([index_of[id(p)] for p in filled if id(p) in index_of])
    order = torch.tensor([*found, *[i for i in reversed(range(len(params))) if i not in found]], device=params[0].device)
    distributed.broadcast(order, distributed.get_global_rank(group, 0), group=group)
    _plans[module] = Plan(module, [params[i] for i in order.tolist()], group)
    return _plans[module]


def group_like(group: Any, device: torch.device) -> Any:
    """Another process group of the same processes, with the same timeout. All of them call this together.

    It is None if these processes belong to different numbers of groups. PyTorch includes this number in the new group's name,
    so each process would wait for a group that the others do not create.
    """
    if group not in _groups:
        counts: list[Any] = [None] * group.size()
        distributed.all_gather_object(counts, len(distributed.distributed_c10d._world.pg_names), group=group)
        _groups[group] = None
        if len(set(counts)) == 1:
            _groups[group] = distributed.new_group(
                distributed.get_process_group_ranks(group),
                timeout=group._get_backend(device).options._timeout,
                backend=distributed.get_backend(group),
                use_local_synchronization=True,
                group_desc="Hessian diagonals",
            )
    return _groups[group]


class PlannedPass:
    """The buckets of a plan in one backward pass."""

    def __init__(self, plan: Plan, may_send: Callable[[], bool], dtype: torch.dtype | None) -> None:
        self.plan, self.may_send, self.dtype = plan, may_send, dtype
        self.missing = [{id(p) for p in bucket} for bucket in plan.buckets]
        self.pending: list[Reduction] = []
        self.sent: list[tuple[Any, Tensor, int]] = []  # parameters with their diagonals, and the diagonals' versions
        self.stream = current_stream(plan.buckets[0][0])

    def filled(self, p: Tensor) -> None:
        """Note that the pass has filled a parameter's diagonal."""
        index = self.plan.bucket_of.get(id(p))
        if index is not None and current_stream(p) == self.stream:  # on another stream, wait for the end of the pass
            self.missing[index].discard(id(p))

    def advance(self) -> None:
        """Send the next buckets that are filled."""
        while len(self.pending) < len(self.missing) and not self.missing[len(self.pending)] and self.may_send():
            self.send(self.plan.buckets[len(self.pending)])

    def send(self, params: Sequence[Any]) -> None:
        self.sent += [(p, p.hess_diag, p.hess_diag._version) for p in params]
        self.pending.append(Reduction([p.hess_diag for p in params], self.plan.group, self.dtype))

    def finish(self, params: Sequence[Tensor]) -> None:
        """Send those diagonals of these parameters that have not been sent yet, and replace all diagonals by their means.

        Raises:
            RuntimeError: if a diagonal has changed since it was sent.
        """
        wanted = {id(p) for p in params}
        for bucket in self.plan.buckets[len(self.pending) :]:
            if present := [p for p in bucket if id(p) in wanted]:
                self.send(present)
        if any(p.hess_diag is not sent or sent._version != version for p, sent, version in self.sent):
            raise RuntimeError(
                "a hess_diag has changed during the backward pass, after it was sent to the other processes. Change hess_diag "
                "after the pass"
            )
        for reduction in self.pending:
            reduction.finish()


def current_stream(tensor: Tensor) -> Any:
    """The stream that computes a tensor on a GPU; None on a CPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
