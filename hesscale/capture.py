"""Loops that are not ours: Hessian diagonals for code that calls ``loss.backward()`` itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .nodes import edge_of, topological
from .optim import CurvatureOptimizer

_lock = threading.Lock()
_original: Callable[..., None] | None = None  # torch.autograd.backward, while it is replaced
_blocks = 0  # capture blocks that are open, in all threads
_local = threading.local()  # .captures: this thread's open blocks, innermost last; .busy: a captured pass is under way


@contextmanager
def capture(*optimizers: CurvatureOptimizer, scaler: torch.amp.GradScaler | None = None, **options: Any) -> Iterator[None]:
    """Let every ``loss.backward()`` inside the block, in this thread, fill what these optimizers need.

    Curvature goes to the parameters of these optimizers alone, by each one's own method, and only where it is due
    (``curvature_every``); any other backward pass runs as if the block were not there. The rest of the loop pays nothing.

    Args:
        optimizers: optimizers of ``hesscale.optim``.
        scaler: the loop's gradient scaler, if the loop calls ``scaler.unscale_`` (to clip gradients, say).
        options: for :func:`hesscale.backward`: ``outputs``, ``head``, ``fallback``.

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
            raise TypeError(f"capture serves optimizers of hesscale.optim, not {type(optimizer).__name__}")
    captures = _local.__dict__.setdefault("captures", [])
    install()
    captures.append((optimizers, scaler, options))
    try:
        yield
    finally:
        captures.pop()
        uninstall()


def install() -> None:
    """Replace torch.autograd.backward, which every way to start a backward pass calls, when the first block opens."""
    global _original, _blocks
    with _lock:
        if _blocks == 0:
            _original, torch.autograd.backward = torch.autograd.backward, captured_backward
        _blocks += 1


def uninstall() -> None:
    global _original, _blocks
    with _lock:
        _blocks -= 1
        if _blocks == 0:
            assert _original is not None
            torch.autograd.backward, _original = _original, None


def captured_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """What stands in for torch.autograd.backward: the same, and curvature where a captured optimizer is due."""
    loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
    plain = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad and not create_graph
    plain = plain and grad_tensors is None and grad_variables is None and inputs is None
    jobs = due(loss, getattr(_local, "captures", [])) if plain and not getattr(_local, "busy", False) else []
    if not jobs:
        original = _original or torch.autograd.backward
        original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    _local.busy = True
    try:
        serve(loss, jobs, bool(retain_graph))
    finally:
        _local.busy = False


def due(loss: Tensor, captures: list[Any]) -> list[tuple[CurvatureOptimizer, dict[str, Any]]]:
    """The captured optimizers that wait for curvature and have a parameter in this loss's graph."""
    reached: set[Any] = set()
    found: dict[CurvatureOptimizer, dict[str, Any]] = {}
    for optimizers, scaler, options in captures:
        for optimizer in optimizers:
            if not optimizer.is_curvature_due:
                continue
            reached = reached or set(topological(edge_of(loss)[0]))
            if any(edge_of(p)[0] in reached for p in optimizer.parameters()):
                scale = {} if scaler is None else {"scale": scaler.scale(torch.ones((), device=loss.device))}
                found[optimizer] = {**options, **scale}
    return list(found.items())


def serve(loss: Tensor, jobs: list[tuple[CurvatureOptimizer, dict[str, Any]]], retain_graph: bool) -> None:
    """One pass for gradients and the first optimizer's curvature, one more per further optimizer for its curvature alone."""
    (first, options), *others = jobs
    for optimizer, own_options in others:
        optimizer.fill_curvature_alone(loss, **own_options)
    first.fill_curvature(loss, retain_graph=retain_graph, **options)
