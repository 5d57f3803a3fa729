"""Compiled code is compared with its graph, and used only if the results agree."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from steps import cross_entropy
from torch import _inductor, nn

import hesscale
from hesscale.compile.inductor import checked
from hesscale.compile.make_fx import trace
from hesscale.errors import CompileWarning


def double_in_place(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    x.mul_(2)
    return [(x * y).sum()]


def test_correct_code_is_used():
    x, y = torch.randn(20), torch.randn(20)
    before = x.clone()
    graph = trace(double_in_place, [x, y])
    compiled = checked(lambda graph, tensors, options: graph, graph, [x, y], {})
    assert torch.equal(x, before)  # it was tried on copies
    compiled(x, y)
    assert torch.equal(x, 2 * before)


@pytest.mark.parametrize("wrong", ["value", "argument", "nan"])
def test_wrong_code_is_refused(wrong):
    def compiler(graph, tensors, options):
        def run(x, y):
            (value,) = graph(x, y)
            if wrong == "argument":
                x.add_(1)
            return [value * 1.1 if wrong == "value" else value * torch.nan if wrong == "nan" else value]

        return run

    tensors = [torch.randn(20), torch.randn(20)]
    where = "20 of 20 in a tensor of shape (20,)" if wrong == "argument" else "1 of 1 in a tensor of shape ()"
    with pytest.raises(RuntimeError, match=f"other numbers than the graph itself, {re.escape(where)}"):
        checked(compiler, trace(double_in_place, tensors), tensors, {})


def test_results_of_another_shape_are_refused():
    def compiler(graph, tensors, options):
        return lambda *given: [value[None] for value in graph(*given)]

    tensors = [torch.randn(20), torch.randn(20)]
    with pytest.raises(RuntimeError, match=r"shape \(1,\) in place of \(\)"):
        checked(compiler, trace(double_in_place, tensors), tensors, {})


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
    checked(lambda graph, tensors, options: lambda *given: graph(*given), trace(noisy, [x]), [x], {})


def test_tf32_is_off_only_during_the_check(monkeypatch):
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before, seen = [kind.fp32_precision for kind in kinds], []
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:

        def compiler(graph, tensors, options):
            def run(*given):
                seen.extend(kind.fp32_precision for kind in kinds)
                return graph(*given)

            return run

        tensors = [torch.randn(20), torch.randn(20)]
        checked(compiler, trace(double_in_place, tensors), tensors, {})
        assert seen == ["ieee"] * 3
        assert [kind.fp32_precision for kind in kinds] == ["tf32", *before[1:]]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]


@pytest.mark.parametrize("how", ["alone", "vmap", "abreast"])
def test_the_check_skips_curvature_warmup(how, monkeypatch):
    """A compiler that turns their update around is seen, though weights stand still while curvature warms up."""

    def wrong(graph, tensors, options=None):
        def run(*given):
            before = [tensor.clone() for tensor in given[:2]]
            found = graph(*given)
            for tensor, old in zip(given, before, strict=False):
                tensor.copy_(2 * old - tensor)
            return found

        return run

    monkeypatch.setattr("torch._inductor.compile", wrong)
    x, y = torch.randn(8, 3), torch.randint(0, 2, (8,))
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [hesscale.AdaHesScale(model.parameters(), lr=0.5, curvature_warmup=10) for model in models]
    if how == "alone":
        step = hesscale.compile_step(models[0], cross_entropy, optimizers[0])
    else:
        step = hesscale.func.ensemble(models, cross_entropy, optimizers, how=how, batch_dims=None)
    step(x, y)
    with pytest.warns(CompileWarning, match="other numbers"):
        step(x, y)
    assert step.mode == "traced"


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
def test_the_check_restores_arguments(tensor):
    def step(weight, other):
        weight.add_(other.sum())
        return [weight.sum()]

    given = [torch.randn(3), tensor]
    before = [argument.clone() for argument in given]
    checked(lambda graph, tensors, options: graph, trace(step, given), given, {})
    for argument, value in zip(given, before, strict=True):
        assert torch.equal(argument, value)
