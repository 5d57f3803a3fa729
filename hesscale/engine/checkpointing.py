"""Activation checkpointing hands out each saved tensor once in a pass, but here two read it: the rule, and then the node."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils.checkpoint import _Holder

_lock = threading.Lock()
_passes = 0


class PersistentHandles(dict[Any, Any]):
    """Handles to recomputed tensors, which stay when checkpointing sets them to None. They go with the node's saved tensor."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def read(holder: Any) -> PersistentHandles:
    present = holder.__dict__.get("handles", {})
    if not isinstance(present, PersistentHandles):
        present = holder.__dict__["handles"] = PersistentHandles(present)
    return present


def write(holder: Any, handles: dict[Any, Any]) -> None:
    holder.__dict__["handles"] = PersistentHandles(handles)


handles = property(read, write)


class SavedTensorsStay:
    """Let tensors that torch.utils.checkpoint (not its reentrant variant) recomputes be read more than once in a pass."""

    def __enter__(self) -> None:
        global _passes
        with _lock:
            _passes += 1
            if _passes == 1:
                _Holder.handles = handles  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        global _passes
        with _lock:
            _passes -= 1
            if not _passes:
                del _Holder.handles  # type: ignore[misc]


saved_tensors_stay = SavedTensorsStay()
