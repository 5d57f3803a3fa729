"""Runs a function in several processes that talk to each other, or in this one alone."""

from __future__ import annotations

import faulthandler
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MAX_SECONDS = 400  # much longer than any test takes on a busy machine: only for a process that waits for ever
# Processes are forked from one that has imported this, since the import takes most of the time that the tests do. That process
# has run no operator, so it has no threads.
PRELOADED = ["pytest", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "hesscale"]


def run(function: Callable[..., Any], *args: Any, world_size: int = 2, backend: str = "gloo") -> list[Any]:
    """What ``function(rank, *args)`` returns in each of the processes. An error in one of them is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        if world_size == 1:
            work(0, function, args, 1, folder, backend)
        else:
            multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
            settings = function, args, world_size, folder, backend
            mp.start_processes(work, settings, nprocs=world_size, start_method="forkserver")
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world_size)]


def work(rank: int, function: Callable[..., Any], args: tuple[Any, ...], world_size: int, folder: str, backend: str) -> None:
    if world_size > 1:
        faulthandler.enable()
        faulthandler.dump_traceback_later(MAX_SECONDS, exit=True)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), Path(folder) / f"result{rank}")
        dist.barrier()  # a process that leaves early closes connections on which another one may still receive
    finally:
        dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
