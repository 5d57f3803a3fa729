"""A run that saves every step and goes on from what is saved. In its first life, a process may kill itself in a backward pass.

Usage: killed.py FOLDER STEPS [STEP AT WHICH THE SECOND PROCESS KILLS ITSELF]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from test_ddp import GPT, TINY, batch, loss_of, part, recorded
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hesscale


def main(folder: Path, steps: int, last: int | None = None) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    rank, life = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # a store for each life: torchrun's own still holds the addresses of the processes that have died
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{life}", rank=rank, world_size=2)
    model = DistributedDataParallel(GPT(), **TINY)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, trust_radius=0.05)
    path, begun = folder / "checkpoint", 0
    if path.exists():
        saved = torch.load(path)
        begun = saved["step"]
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(begun, steps):
        if step == last and rank == 1 and life == "0":
            model.module.qkv.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.backward(loss_of(model, *part(batch(None, step), rank)))
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            torch.save({"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)
        dist.barrier()
    if rank == 0:
        found = {key: value for key, value in recorded(model, optimizer).items() if key != "scaled"}
        torch.save({"begun": begun, "found": found}, folder / "end")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
