"""A lock on a directory. The operating system releases it when the process ends, even if it is killed."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

LOCK_SECONDS = 2.0  # the time to wait; a process that was killed, or that only reads, releases the lock sooner


class BusyRun(Exception):
    """Another process works on a run."""


def lock(directory: Path) -> io.TextIOWrapper:
    """Acquire the lock, which is held until the file is closed. Raises BusyRun if another process holds it."""
    import fcntl

    file = (directory / "lock").open("a+", encoding="utf-8")
    patience = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > patience:
                file.seek(0)
                owner = file.read().strip() or "another process"
                file.close()
                raise BusyRun(f"{directory} is in use by {owner}") from None
            time.sleep(0.05)
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


def is_locked(directory: Path) -> bool:
    import fcntl

    try:
        with (directory / "lock").open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_same_file(file: io.TextIOWrapper, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
