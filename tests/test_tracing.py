"""Compiled code is held against the graph that it was made from."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import _inductor, nn

import hesscale
from hesscale import tracing
from hesscale.tracing import is_same, trace, twin


def double_in_place(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(2)
    return [(x * y).sum()]


def test_code_that_does_what_the_graph_does_is_used():
    x, y = torch.randn(20), torch.randn(20)
    before = x.clone()
    graph = trace(double_in_place, [x, y])
    compiled = tracing.checked(lambda graph, tensors, options: graph, graph, [x, y], {})
    assert torch.equal(x, before)  # it was tried on copies
    compiled(x, y)
    assert torch.equal(x, 2 * before)


@pytest.mark.parametrize("wrong", ["value", "argument", "nan"])
def test_code_that_does_something_else_is_refused(wrong):
    def compiler(graph, tensors, options):
        def run(x, y):
            (value,) = graph(x, y)
            if wrong == "argument":
                x.add_(1)
            return [value * 1.1 if wrong == "value" else value * torch.nan if wrong == "nan" else value]

        return run

    tensors = [torch.randn(20), torch.randn(20)]
    with pytest.raises(RuntimeError, match="other numbers"):
        tracing.checked(compiler, trace(double_in_place, tensors), tensors, {})


def test_a_step_whose_code_is_wrong_runs_as_the_graph(monkeypatch):
    def compiler(graph, tensors, options):
        return lambda *given: [value + 1 for value in graph(*given)]

    monkeypatch.setattr(_inductor, "compile", compiler)
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    step = hesscale.compile_step(model, lambda m, x: F.mse_loss(m(x), x[:, :2]), hesscale.AdaHesScale(model.parameters()))
    x = torch.randn(4, 3)
    step(x)
    with pytest.warns(hesscale.CompileWarning, match="other numbers"):
        step(x)
    assert step.mode == "traced"


def test_random_numbers_are_the_same_for_both():
    def noisy(x):
        return [F.dropout(x, 0.5).sum()]

    x = torch.ones(1000)
    tracing.checked(lambda graph, tensors, options: lambda *given: graph(*given), trace(noisy, [x]), [x], {})


def test_rounding_is_no_difference():
    a = torch.tensor([1.0, 2.0, 1e-12])
    assert is_same(a, a + torch.tensor([1e-6, 1e-6, 1e-9]), 2.0)
    assert not is_same(a, a * 1.5, 2.0)
    assert is_same(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), 1.0)
    assert not is_same(torch.tensor(1.0), torch.tensor(torch.nan), 1.0)
    assert not is_same(torch.tensor([3]), torch.tensor([4]), 1.0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3).t(),
        torch.randn(5, 6)[1:3, ::2],
        torch.randn(2, 1, 3).expand(2, 4, 3),
        torch.randn(0, 2),
        torch.tensor(1.0),
    ],
    ids=["transposed", "sliced", "expanded", "empty", "a number"],
)
def test_a_twin_has_the_same_strides(tensor):
    assert torch.equal(twin(tensor), tensor)
    assert twin(tensor).stride() == tensor.stride()
