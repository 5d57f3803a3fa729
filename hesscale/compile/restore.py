"""Undo training steps: restore models, optimizers and the state of random number generators."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import CurvatureOptimizer


@contextlib.contextmanager
def restored(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Restore parameters, buffers, the optimizers' state and options, and the random number generators after the block."""
    buffers = [module._buffers for model in models for module in model.modules()]
    buffers_before = [dict(named) for named in buffers]
    parameters = [p for model in models for p in model.parameters()]
    parameters += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    held = [tensor for named in buffers for tensor in named.values() if tensor is not None]
    values = {id(tensor): (tensor, tensor.detach().clone()) for tensor in (*parameters, *held)}
    devices = {p.device for p in parameters if p.is_cuda}
    with contextlib.ExitStack() as stack:
        try:
            for optimizer in optimizers:
                stack.enter_context(restored_optimizer(optimizer))
            stack.enter_context(torch.random.fork_rng(devices))
            yield
        finally:
            for named, before in zip(buffers, buffers_before, strict=True):
                named.update(before)
            with torch.no_grad():
                for tensor, value in values.values():
                    tensor.copy_(value)


@contextlib.contextmanager
def restored_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore an optimizer after the block. State that was created in the block stays, with its initial values."""
    counters: dict[str, Tensor] = getattr(optimizer, "counters", {})
    groups = [dict(group) for group in optimizer.param_groups]
    beginning = {p: copies(entries) for p, entries in optimizer.state.items()}
    counts = copies(counters)
    init_group = getattr(optimizer, "_init_group", None)  # creates the state of torch's optimizers

    def init_and_note(*args: Any, **options: Any) -> Any:
        assert init_group is not None
        result = init_group(*args, **options)
        for p, entries in optimizer.state.items():
            beginning.setdefault(p, copies(entries))
        return result

    if init_group is not None:
        optimizer._init_group = init_and_note  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if init_group is not None:
            del optimizer._init_group  # type: ignore[attr-defined]
        is_ours = isinstance(optimizer, CurvatureOptimizer)  # the initial state of our optimizers is zero
        for p, entries in optimizer.state.items():
            put_back(entries, beginning.get(p, {}), zero=is_ours)
        put_back(counters, counts, zero=True)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)


def copies(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in entries.items()}


def put_back(entries: dict[str, Any], before: dict[str, Any], zero: bool) -> None:
    """Restore the values that entries had before, tensors in place. Entries that are new become zero, or are removed."""
    for name, value in list(entries.items()):
        if name in before and isinstance(value, Tensor) and isinstance(before[name], Tensor):
            value.copy_(before[name])
        elif name in before:
            entries[name] = before[name]
        elif zero:
            value.zero_()
        else:
            del entries[name]
