"""Allow two reads of each tensor that activation checkpointing recomputes.

Checkpointing drops a recomputed tensor after its first read. Here, the rule reads it first, and then the node's own backward.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.utils.checkpoint import _Holder

_lock = threading.Lock()
_passes = 0


class PersistentHandles(dict[Any, Any]):
    """A dict of handles to recomputed tensors that ignores assignments of None, by which checkpointing would drop a tensor.

    The tensors are freed together with the tensors that the node saved.
    """

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


class KeepRecomputedTensors:
    """Keep tensors that non-reentrant torch.utils.checkpoint recomputes, so that they can be read more than once in a pass."""

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


keep_recomputed_tensors = KeepRecomputedTensors()
