"""A sweep in worker processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path

import torch

from .experiment import Experiment
from .store import Store, Task
from .sweep import POLL_SECONDS, Keys, Sweep, attempt

STOP_SECONDS = 5.0


class Worker:
    """A process that does groups of tasks, one after another."""

    def __init__(self, context: SpawnContext, sweep: Sweep) -> None:
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, sweep.experiment, sweep.store, sweep.data, sweep.command))
        self.process.start()
        other.close()

    def begin(self, tasks: Sequence[Task]) -> None:
        with suppress(OSError):  # if the worker has died, this is detected while waiting for it
            self.connection.send(tasks)

    def errors(self) -> list[str] | None:
        """The error of each of its tasks, "" if there was none; None if the process died."""
        try:
            return list(self.connection.recv()) if self.connection.poll() else None
        except (EOFError, OSError):
            return None

    def exit_code(self) -> int | None:
        self.process.join()
        self.connection.close()
        return self.process.exitcode


def serve(connection: Connection, experiment: Experiment, store: Store, data: Path | None, command: str) -> None:
    """Do tasks until there is a request to stop, or until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=follow_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # otherwise each worker starts its own pool of processes
    with suppress(EOFError):
        while True:
            connection.send(attempt(experiment, store, connection.recv(), data, command))


def follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def run_in_processes(sweep: Sweep, workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    idle: list[Worker] = []
    busy: dict[Worker, Keys] = {}
    try:
        while sweep.left or busy:
            while sweep.left and len(busy) < workers:
                worker = idle.pop() if idle else Worker(context, sweep)
                busy[worker] = sweep.left.popleft()
                worker.begin([sweep.tasks[key] for key in busy[worker]])
            sweep.show(key for keys in busy.values() for key in keys)
            ready = wait([worker.connection for worker in busy], POLL_SECONDS)
            for worker in [worker for worker in busy if worker.connection in ready or not worker.process.is_alive()]:
                keys, errors = busy.pop(worker), worker.errors()
                if errors is None:
                    sweep.again(keys, f"exit code {worker.exit_code()}")
                else:
                    sweep.settle(keys, errors)
                    idle.append(worker)
    finally:
        stop([*idle, *busy])


def stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.process.terminate()
    for worker in workers:
        worker.process.join(STOP_SECONDS)
        worker.process.kill()
        worker.exit_code()
