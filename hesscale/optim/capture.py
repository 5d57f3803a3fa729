"""Loops that are not ours: Hessian diagonals for code that calls ``loss.backward()`` itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.backward import is_own_pass, own_pass
from ..engine.nodes import edge_of, topological
from . import CurvatureOptimizer

_lock = threading.Lock()
_original: Callable[..., None] = torch.autograd.backward  # what torch.autograd.backward is outside all blocks
_wrapper: Callable[..., None] | None = None  # somebody's replacement of ours, which outlived the block it was made in
_blocks = 0  # capture blocks that are open, in all threads
_local = threading.local()  # .captures: this thread's open blocks, innermost last


@contextmanager
def capture(*optimizers: CurvatureOptimizer, scaler: torch.amp.GradScaler | None = None, **options: Any) -> Iterator[None]:
    """Let every ``loss.backward()`` inside the block, in this thread, fill what these optimizers need.

    Curvature goes to the parameters of these optimizers alone, by each one's own method, and only where it is due
    (``curvature_every``); any other backward pass runs as if the block were not there, and so do passes that are given gradients,
    inputs or several losses, or that were started by a ``backward`` imported from torch.autograd by name before. The rest of the
    loop pays nothing.

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
            raise TypeError(f"capture(*optimizers) serves optimizers of hesscale.optim, not {type(optimizer).__name__}")
    if unknown := options.keys() - {"outputs", "head", "fallback"}:
        raise TypeError(f"capture takes no option {', '.join(sorted(unknown))}")
    captures = _local.__dict__.setdefault("captures", [])
    entry = Capture(optimizers, scaler, options)
    check_apart([optimizer for open_block in [*captures, entry] for optimizer in open_block.optimizers])
    install()
    captures.append(entry)
    try:
        yield
    finally:
        captures[:] = [other for other in captures if other is not entry]
        uninstall()


@dataclass(frozen=True, eq=False)
class Capture:
    """An open block."""

    optimizers: tuple[CurvatureOptimizer, ...]
    scaler: torch.amp.GradScaler | None
    options: dict[str, Any]


def check_apart(optimizers: list[CurvatureOptimizer]) -> None:
    """Two optimizers of one parameter would add their curvature up, or overwrite it."""
    owner: dict[int, CurvatureOptimizer] = {}
    for optimizer in optimizers:
        for p in optimizer.parameters():
            if owner.setdefault(id(p), optimizer) is not optimizer:
                raise ValueError("two captured optimizers share a parameter; each parameter has one hess_diag")


def install() -> None:
    """Replace torch.autograd.backward, which every way to start a backward pass calls, when the first block opens."""
    global _original, _blocks
    with _lock:
        if _blocks == 0 and torch.autograd.backward not in (captured_backward, _wrapper):
            _original, torch.autograd.backward = torch.autograd.backward, captured_backward
        _blocks += 1


def uninstall() -> None:
    global _wrapper, _blocks
    with _lock:
        _blocks -= 1
        if _blocks == 0:
            if torch.autograd.backward is captured_backward:
                torch.autograd.backward = _original
            else:
                _wrapper = torch.autograd.backward


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
    jobs = due(loss, getattr(_local, "captures", [])) if plain and not is_own_pass() else []
    if not jobs:
        _original(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    with own_pass():
        serve(loss, jobs, bool(retain_graph))


def due(loss: Tensor, captures: list[Capture]) -> list[tuple[CurvatureOptimizer, dict[str, Any]]]:
    """The captured optimizers that wait for curvature and have a parameter in this loss's graph."""
    reached: set[Any] = set()
    found: dict[CurvatureOptimizer, dict[str, Any]] = {}
    for block in captures:
        for optimizer in block.optimizers:
            if not optimizer.is_curvature_due:
                continue
            reached = reached or set(topological(edge_of(loss)[0]))
            if any(edge_of(p)[0] in reached for p in optimizer.parameters()):
                scaler = block.scaler
                scale = {} if scaler is None else {"scale": scaler.scale(torch.ones((), device=loss.device))}
                found[optimizer] = {**block.options, **scale}
    return list(found.items())


def serve(loss: Tensor, jobs: list[tuple[CurvatureOptimizer, dict[str, Any]]], retain_graph: bool) -> None:
    """One pass for gradients and the first optimizer's curvature, one more per further optimizer for its curvature alone."""
    (first, options), *others = jobs
    for optimizer, own_options in others:
        optimizer.fill_curvature_alone(loss, **own_options)
    first.fill_curvature(loss, retain_graph=retain_graph, **options)
