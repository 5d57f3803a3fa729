"""Hundreds of steps with flat memory: no hook, graph or diagonal outlives its step."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale

PAGE = 4096


def live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def cross_entropy(logits, y):
    return F.cross_entropy(logits, y)


def entropy(logits, y):
    """Needs double backward through the head."""
    return F.cross_entropy(logits, y) + 0.1 * (logits.softmax(1) * logits.log_softmax(1)).sum()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident memory from /proc")
@pytest.mark.parametrize("loss", [cross_entropy, entropy])
def test_many_steps_take_no_memory(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 5))
    x, y = torch.randn(512, 64), torch.randint(5, (512,))

    def steps(count: int) -> None:
        for _ in range(count):
            model.zero_grad()
            hesscale.backward(loss(model(x), y))

    steps(30)
    gc.collect()
    tensors, resident = live_tensors(), resident_bytes()
    steps(150)
    gc.collect()
    assert live_tensors() == tensors
    # one activation kept at every step would take 20 MB
    assert resident_bytes() - resident < 8e6


def test_memory_is_flat_without_the_garbage_collector():
    """The engine creates no reference cycles, which would hold GPU memory until the garbage collector runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    x, y = torch.randn(32, 64), torch.randint(5, (32,))
    hesscale.backward(cross_entropy(model(x), y))
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        for _ in range(50):
            model.zero_grad()
            hesscale.backward(cross_entropy(model(x), y))
        assert live_tensors() <= before
    finally:
        gc.enable()
