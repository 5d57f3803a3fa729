"""Compare compiled steps with eager ones, on copies of a model."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale
from hesscale.errors import CompileWarning

has_compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")

# float64 throughout, but a graph counts whether a step is alive in float32
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def mse(model, x, y):
    return F.mse_loss(model(x), F.one_hot(y, 3).to(x.dtype))


def batches(count, size=8):
    torch.manual_seed(1)
    return [(torch.randn(size, 4), torch.randint(0, 3, (size,))) for _ in range(count)]


def ada(params, **options):
    return hesscale.AdaHesScale(params, **{"lr": 0.01, **options})


def two_of(model, make=ada, loss_fn=cross_entropy, backend="traced"):
    """An eager step and a compiled one, on two copies of a model."""
    steps = []
    for mode in ("eager", backend):
        own = copy.deepcopy(model)
        steps.append(hesscale.compile_step(own, loss_fn, make(own.parameters()), backend=mode))
    return steps


def tensors_of(step):
    """Everything that a step changes, in the model and in the optimizer, by name."""
    model, optimizer = step.model, step.optimizer
    found = dict(model.state_dict())
    for i, entries in optimizer.state_dict()["state"].items():
        found.update({f"state {i} {name}": value for name, value in entries.items() if isinstance(value, torch.Tensor)})
    return {**found, **{f"counter {name}": value for name, value in getattr(optimizer, "counters", {}).items()}}


def check_equal(eager, other, **tolerance):
    torch.testing.assert_close(tensors_of(other), tensors_of(eager), **(tolerance or CLOSE))
    counts = [[g.get("step_count") for g in step.optimizer.param_groups] for step in (eager, other)]
    assert counts[0] == counts[1]


def train(step, data, each=None):
    torch.manual_seed(2)
    losses = []
    for i, batch in enumerate(data):
        losses.append(step(*batch))
        if each is not None:
            each(step, i)
    return losses


def check_training(model, data, make=ada, loss_fn=cross_entropy, each=None, mode="traced", **tolerance):
    """Both steps give the same losses and leave the same tensors; returns the compiled one."""
    eager, other = two_of(model, make, loss_fn)
    expected, found = train(eager, data, each), train(other, data, each)
    torch.testing.assert_close(found, expected, **(tolerance or CLOSE))
    check_equal(eager, other, **tolerance)
    assert other.mode == mode, other.reason
    return other


def check_eager(model, data, saying, loss_fn=cross_entropy, make=ada):
    """Check that the step runs in eager mode, gives the reason, and is correct."""
    eager, other = two_of(model, make, loss_fn)
    expected = train(eager, data)
    with pytest.warns(CompileWarning, match=saying) as record:
        found = train(other, data)
    assert [w.filename for w in record if w.category is CompileWarning] == [__file__]
    torch.testing.assert_close(found, expected)
    check_equal(eager, other)
    assert other.mode == "eager"
    assert saying in other.reason
    return other


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(3, 3)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.view(-1, 1, 2, 2))
