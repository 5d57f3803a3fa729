"""Processes that torchrun starts train as one process does: the main cases, all in one launch for each number of processes."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import test_ddp
import test_fsdp
import test_tensor_parallel
import torch
from torch import distributed as dist

MODELS = ("perceptron", "convolutional", "GPT")


def cases(world_size):
    """Functions of the rank, which is None in one process alone."""
    found = {}
    for name in MODELS:
        found[f"DDP, {name}"] = partial(test_ddp.trained, name=name, count=world_size)
        found[f"fully_shard, {name}"] = partial(test_fsdp.trained, name=name, count=world_size, **test_fsdp.TRUST)
    for name in test_tensor_parallel.FOUR:
        function, options = test_tensor_parallel.EQUAL[name]
        found[f"tensor parallel, {name}"] = partial(function, **options)
    return found


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_of_torchrun_train_like_one(world_size, tmp_path):
    before = torch.get_default_dtype()
    test_ddp.torchrun(Path(__file__), str(tmp_path), world_size=world_size)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(world_size)]
    for name, case in cases(world_size).items():
        expected = case(None)
        for rank in ranks:
            message = partial("{}: {}".format, name)
            torch.testing.assert_close(rank[name], expected, rtol=1e-9, atol=1e-12, msg=message)
    torch.set_default_dtype(before)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert world_size == int(os.environ["LOCAL_WORLD_SIZE"])
    torch.save({name: case(rank) for name, case in cases(world_size).items()}, Path(folder) / str(rank))
    dist.barrier()  # gloo's threads may abort a process that ends first
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
