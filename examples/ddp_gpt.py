"""A small GPT on two processes under DistributedDataParallel: it learns to continue a tune of eight notes.

torchrun --nproc_per_node 2 examples/ddp_gpt.py --steps 200
"""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hesscale

NOTES, LENGTH, WIDTH = 16, 24, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.notes, self.positions = nn.Embedding(NOTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(Block(), Block()), nn.Linear(WIDTH, NOTES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.notes(x) + self.positions.weight))


def tunes(count: int, generator: torch.Generator) -> Tensor:
    """Eight random notes, again and again."""
    return torch.randint(NOTES, (count, 8), generator=generator).repeat(1, LENGTH // 8 + 1)[:, : LENGTH + 1]


def train(steps: int, seed: int) -> float:
    torch.manual_seed(seed)
    model = DistributedDataParallel(GPT())
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=3e-3, trust_radius=1e-2)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())  # every process has its own data
    for _ in range(steps):
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():  # accumulate, and send once
                tune = tunes(8, generator)
                loss = F.cross_entropy(model(tune[:, :-1]).flatten(0, 1), tune[:, 1:].flatten()) / 2
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    check_equal(model)
    tune = tunes(64, torch.Generator().manual_seed(-1))
    with torch.no_grad():
        found = model.module(tune[:, :-1]).argmax(-1)
    return float((found == tune[:, 1:])[:, 8:].float().mean())


def check_equal(model: nn.Module) -> None:
    """All processes have taken the same steps."""
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    assert torch.equal(weights, first)


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
