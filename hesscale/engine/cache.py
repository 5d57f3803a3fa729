"""A cache of bounded size, for decisions that the engine makes once and uses at every step."""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """At most ``max_entries`` values by key. A new entry evicts the oldest one. Threads may share a cache.

    Example:
        >>> cache = BoundedCache(max_entries=2)
        >>> [cache.setdefault(key, key.upper()) for key in "abc"]
        ['A', 'B', 'C']
        >>> cache.get("a"), cache.get("c")
        (None, 'C')
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[Hashable, Value] = {}  # oldest first
        self._lock = Lock()

    def get(self, key: Hashable) -> Value | None:
        with self._lock:
            return self._entries.get(key)

    def setdefault(self, key: Hashable, value: Value) -> Value:
        """Store ``value`` and return it. If another thread has stored a value first, return that one."""
        with self._lock:
            if key not in self._entries and len(self._entries) >= self._max_entries:
                del self._entries[next(iter(self._entries))]
            return self._entries.setdefault(key, value)
