"""The small GPT of ddp_gpt.py, with its parameters, gradients and Hessian diagonals sharded over the processes by fully_shard.

torchrun --nproc_per_node 2 examples/fsdp_gpt.py --steps 200
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from ddp_gpt import GPT, tunes
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hesscale


def train(steps: int, seed: int) -> float:
    torch.manual_seed(seed)
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=3e-3, trust_radius=1e-2)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())  # every process has its own data
    for _ in range(steps):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)  # accumulate, and send once
            tune = tunes(8, generator)
            loss = F.cross_entropy(model(tune[:, :-1]).flatten(0, 1), tune[:, 1:].flatten()) / 2
            optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    tune = tunes(64, torch.Generator().manual_seed(-1))
    with torch.no_grad():
        found = model(tune[:, :-1]).argmax(-1)
    return float((found == tune[:, 1:])[:, 8:].float().mean())


def main(steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    accuracy = train(steps, seed)
    if dist.get_rank() == 0:
        print(f"after {steps} steps on {dist.get_world_size()} processes: {accuracy:.1%} of the repeated notes are right")
    dist.barrier()  # a process that ends early may disturb another
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
