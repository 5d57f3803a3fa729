"""The bounded cache: what it keeps, what it drops, and that threads may share it."""

from __future__ import annotations

import threading
import time

from hesscale.engine.cache import BoundedCache


def test_setdefault_keeps_an_existing_value():
    cache: BoundedCache[str] = BoundedCache(max_entries=2)
    assert cache.get("key") is None
    assert cache.setdefault("key", "first") == "first"
    assert cache.setdefault("key", "second") == "first"
    assert cache.get("key") == "first"


def test_the_oldest_entry_goes_first():
    cache: BoundedCache[int] = BoundedCache(max_entries=3)
    for number in range(5):
        cache.setdefault(number, number)
    assert [cache.get(number) for number in range(5)] == [None, None, 2, 3, 4]


def test_an_existing_key_evicts_nothing():
    cache: BoundedCache[int] = BoundedCache(max_entries=2)
    for number in (1, 2, 2, 1):
        cache.setdefault(number, number)
    assert [cache.get(1), cache.get(2)] == [1, 2]


class Slow(str):
    """A key that lets other threads run in the middle of a lookup."""

    def __hash__(self) -> int:
        time.sleep(0)
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        time.sleep(0)
        return str.__eq__(self, other)


def test_threads_may_share_it():
    cache: BoundedCache[str] = BoundedCache(max_entries=2)
    wrong: list[object] = []

    def work(name: int) -> None:
        try:
            for number in range(300):
                key = f"{(number + name) % 7}"
                wrong.extend({cache.setdefault(Slow(key), key)} - {key})
                wrong.extend({cache.get(Slow(key))} - {key, None})
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
