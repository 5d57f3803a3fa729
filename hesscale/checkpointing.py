"""Activation checkpointing: it gives each saved tensor once in a pass, but here the rule and then the node read it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import _Holder

_lock = threading.Lock()
_passes = 0


class Kept(dict[Any, Any]):
    """Handles to recomputed tensors, which stay when checkpointing crosses them out; they go with the node's saved tensor."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def read(holder: Any) -> Kept:
    present = holder.__dict__.get("handles", {})
    if not isinstance(present, Kept):
        present = holder.__dict__["handles"] = Kept(present)
    return present


def write(holder: Any, handles: dict[Any, Any]) -> None:
    holder.__dict__["handles"] = Kept(handles)


@contextmanager
def saved_tensors_stay() -> Iterator[None]:
    """Let tensors that torch.utils.checkpoint (not its reentrant variant) recomputes be read more than once in a pass."""
    global _passes
    with _lock:
        _passes += 1
        setattr(_Holder, "handles", property(read, write))  # noqa: B010
    try:
        yield
    finally:
        with _lock:
            _passes -= 1
            if not _passes:
                delattr(_Holder, "handles")
