"""Steps that leave no trace: models, optimizers and random numbers are put back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..optim import CurvatureOptimizer


@contextlib.contextmanager
def restored(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Undo what happens in the block to parameters, buffers, the optimizers' state and options, and random numbers."""
    modules = [module for model in models for module in model.modules()]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    parameters = [p for model in models for p in model.parameters()]
    parameters += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    held = [tensor for _, named in buffers for tensor in named.values() if tensor is not None]
    held += [tensor for optimizer in optimizers for tensor in state_tensors(optimizer)]
    saved = [(tensor, tensor.detach().clone()) for tensor in {id(t): t for t in (*parameters, *held)}.values()]
    known = [{id(p) for p in optimizer.state} for optimizer in optimizers]
    options = [[dict(group) for group in optimizer.param_groups] for optimizer in optimizers]
    devices = {p.device for p in parameters if p.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        with torch.no_grad():
            for named, before in buffers:
                named.update(before)
            for tensor, value in saved:
                tensor.copy_(value)
            for optimizer, had_state, groups in zip(optimizers, known, options, strict=True):
                forget_new_state(optimizer, had_state, {id(tensor) for tensor, _ in saved})
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.update(before)


def forget_new_state(optimizer: torch.optim.Optimizer, had_state: set[int], saved: set[int]) -> None:
    """Bring state that was made meanwhile to where it begins: ours at zero, that of other optimizers as they make it."""
    if isinstance(optimizer, CurvatureOptimizer):
        for tensor in state_tensors(optimizer):
            if id(tensor) not in saved:
                tensor.zero_()
    else:
        for p in [p for p in optimizer.state if id(p) not in had_state]:
            del optimizer.state[p]


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    entries: list[dict[str, Any]] = [*optimizer.state.values(), getattr(optimizer, "counters", {})]
    return [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
