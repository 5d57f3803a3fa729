"""Hessian diagonals for training loops that call ``loss.backward()`` themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..distributed.averaging import averaged_with_gradients
from ..distributed.sharding import check_unsharded, leaf_ids
from ..distributed.shards import is_sharded
from ..engine.backward import is_own_pass, own_pass
from ..engine.nodes import edge_of, leaves_of, reaches
from . import CurvatureOptimizer

_lock = threading.Lock()
_original: Callable[..., None] = torch.autograd.backward  # torch.autograd.backward as it is outside all blocks
_foreign_patch: Callable[..., None] | None = None  # another library's wrapper of our patch, still installed after the block
_open_blocks = 0  # in all threads
_local = threading.local()  # .captures: this thread's open blocks, innermost last


@contextmanager
def capture(*optimizers: CurvatureOptimizer, scaler: torch.amp.GradScaler | None = None, **options: Any) -> Iterator[None]:
    """Make every ``loss.backward()`` inside the block also compute the Hessian diagonals that these optimizers need.

    This applies to the thread that opens the block, and only the parameters of these optimizers receive curvature. Each optimizer
    uses its own method, and only at steps that need curvature (``curvature_every``). All other backward passes are unchanged.
    So are calls with the argument ``gradient`` or ``inputs`` or with several losses, and calls of a ``backward`` that was
    imported by name from torch.autograd before the block.

    Args:
        optimizers: optimizers of ``hesscale.optim``.
        scaler: the loop's gradient scaler, if the loop calls ``scaler.unscale_``, for example to clip gradients.
        options: ``outputs``, ``head`` and ``fallback`` of :func:`hesscale.backward`.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        >>> with hesscale.capture(optimizer):
        ...     model(torch.ones(2, 3)).square().mean().backward()
        ...     optimizer.step()
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, CurvatureOptimizer):
            raise TypeError(f"capture(*optimizers) takes optimizers of hesscale.optim, not {type(optimizer).__name__}")
    if unknown := options.keys() - {"outputs", "head", "fallback"}:
        raise TypeError(f"capture takes no option {', '.join(sorted(unknown))}")
    captures = _local.__dict__.setdefault("captures", [])
    block = Capture(optimizers, scaler, options)
    check_disjoint([optimizer for open_block in [*captures, block] for optimizer in open_block.optimizers])
    install_patch()
    captures.append(block)
    try:
        yield
    finally:
        captures[:] = [other for other in captures if other is not block]
        remove_patch()


@dataclass(frozen=True, eq=False)
class Capture:
    """An open block of :func:`capture`."""

    optimizers: tuple[CurvatureOptimizer, ...]
    scaler: torch.amp.GradScaler | None
    options: dict[str, Any]


def check_disjoint(optimizers: list[CurvatureOptimizer]) -> None:
    """Refuse two optimizers that share a parameter: they would add to or overwrite each other's curvature."""
    owner: dict[int, CurvatureOptimizer] = {}
    for optimizer in optimizers:
        for p in optimizer.parameters():
            if owner.setdefault(id(p), optimizer) is not optimizer:
                raise ValueError("two captured optimizers share a parameter, which has only one hess_diag; capture one of them")


def install_patch() -> None:
    """When the first block opens, replace torch.autograd.backward, which every way to start a backward pass calls."""
    global _original, _open_blocks
    with _lock:
        if _open_blocks == 0 and torch.autograd.backward not in (captured_backward, _foreign_patch):
            _original, torch.autograd.backward = torch.autograd.backward, captured_backward
        _open_blocks += 1


def remove_patch() -> None:
    """When the last block closes, restore torch.autograd.backward, unless other code has replaced it since."""
    global _foreign_patch, _open_blocks
    with _lock:
        _open_blocks -= 1
        if _open_blocks == 0:
            if torch.autograd.backward is captured_backward:
                torch.autograd.backward = _original
            else:
                _foreign_patch = torch.autograd.backward


def captured_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Replaces torch.autograd.backward inside a block. Also computes curvature for captured optimizers for which it is due."""
    loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
    is_plain = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and not create_graph
    is_plain = is_plain and grad_tensors is None and grad_variables is None and inputs is None
    jobs = due_optimizers(loss, getattr(_local, "captures", [])) if is_plain and not is_own_pass() else []
    if not jobs:
        _original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    with own_pass():
        run_backward(loss, jobs, bool(retain_graph))


def due_optimizers(loss: Tensor, captures: list[Capture]) -> list[tuple[CurvatureOptimizer, dict[str, Any]]]:
    """The captured optimizers whose curvature is due and that have a parameter in this loss's graph, with their options."""
    found: dict[CurvatureOptimizer, dict[str, Any]] = {}
    for block in captures:
        for optimizer in block.optimizers:
            if not optimizer.is_curvature_due:
                continue
            if not reaches(edge_of(loss)[0], leaf_ids(optimizer.parameters())):
                if not any(is_sharded(p) for p in optimizer.parameters()):
                    check_unsharded(leaves_of(loss))  # the optimizer may hold the parameters from before the sharding
            else:
                scaler = block.scaler
                scale = {} if scaler is None else {"scale": scaler.scale(torch.ones((), device=loss.device))}
                found[optimizer] = {**block.options, **scale}
    return list(found.items())


def run_backward(loss: Tensor, jobs: list[tuple[CurvatureOptimizer, dict[str, Any]]], retain_graph: bool) -> None:
    """One pass for gradients and the first optimizer's curvature, and one for the curvature of each further optimizer."""
    (first, options), *others = jobs
    dtypes = {optimizer.curvature_dtype for optimizer, _ in jobs}
    with averaged_with_gradients(partial(leaves_of, loss), first.curvature_dtype if len(dtypes) == 1 else None):
        for optimizer, own_options in others:
            optimizer.fill_curvature_alone(loss, **own_options)
        first.fill_curvature(loss, retain_graph=retain_graph, **options)
