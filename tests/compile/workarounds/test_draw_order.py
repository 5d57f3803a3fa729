"""Compiled code draws the random numbers that its graph draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from steps import has_compiler
from torch import Tensor, _inductor, nn

import hesscale
from hesscale.compile.inductor import compile_graph
from hesscale.compile.make_fx import trace

slow = pytest.mark.slow


def dropped(x: Tensor) -> list[Tensor]:
    return [F.dropout(x, 0.5), F.dropout(x + 1, 0.2)]


def of_many_kinds(x: Tensor) -> list[Tensor]:
    signs = torch.rand(3, device=x.device) < 0.5
    kept, mask = torch.native_dropout(x.t(), 0.3, True)
    noise = torch.empty_like(x).normal_(2.0, 3.0) + torch.empty(6, dtype=x.dtype).uniform_(-1, 1)
    whole = [torch.randint_like(x, 5), torch.randint_like(x, 2, 5), torch.randint(3, (2,)), torch.randperm(4)]
    filled = [torch.empty(5).exponential_(2.0), torch.zeros(3).normal_(), torch.full((2, 2), 9.0).bernoulli_(0.5)]
    return [signs, kept * 2, mask, noise, torch.randn_like(x), torch.bernoulli(x, 0.7), *whole, *filled]


def nothing_left(x: Tensor) -> list[Tensor]:
    return [*torch.native_dropout(x, 1.0, True), torch.native_dropout(x, 0.5, None)[0]]


def in_place(x: Tensor) -> list[Tensor]:
    x.mul_(torch.rand_like(x))
    return [F.dropout(x, 0.5).mul_(2)]


def by_values(x: Tensor) -> list[Tensor]:
    return [torch.bernoulli(x.sigmoid()), *dropped(x)]


def over_numbers(x: Tensor) -> list[Tensor]:
    return [x.clone().uniform_(), *dropped(x)]


def into_what_is_used(x: Tensor) -> list[Tensor]:
    place = torch.empty_like(x)
    before = place.view(-1)
    place.uniform_()
    return [before, *dropped(x)]


def with_numbers_that_depend_on_nothing(x: Tensor) -> list[Tensor]:
    """As in a step by AdaHessian, whose signs depend on nothing, with dropout."""
    return [F.dropout(x, 0.5), torch.rand(3), F.dropout(x + 1, 0.2)]


@slow
@has_compiler
def test_pytorch_bug_draws_are_reordered_before_2_12():
    """TorchInductor of torch 2.11 draws ``rand``, which depends on nothing, where it likes: other draws get its numbers.

    torch 2.13 draws in order. The file ``draw_order.py`` can go when torch 2.11 is no longer supported.
    """
    x = torch.randn(4, 4)
    compiled = _inductor.compile(trace(with_numbers_that_depend_on_nothing, [x]), [x], options={"fallback_random": True})
    torch.manual_seed(0)
    expected = with_numbers_that_depend_on_nothing(x)
    torch.manual_seed(0)
    found = compiled(x)
    is_ordered = all(torch.allclose(one, other) for one, other in zip(found, expected, strict=True))
    assert is_ordered == (torch.torch_version.TorchVersion(torch.__version__) >= (2, 12))


FUNCTIONS = [dropped, of_many_kinds, nothing_left, in_place, by_values, over_numbers, into_what_is_used]


@slow
@has_compiler
@pytest.mark.parametrize("function", [*FUNCTIONS, with_numbers_that_depend_on_nothing])
def test_compiled_code_has_the_numbers_of_the_graph(function):
    torch.manual_seed(0)
    x = torch.rand(4, 6)
    graph = trace(function, [x])
    state = torch.get_rng_state()
    compiled = compile_graph(graph, [x])
    assert torch.equal(torch.get_rng_state(), state)  # compiling draws nothing
    outcomes = []
    for run in (graph, compiled):
        given = x.clone()
        torch.manual_seed(3)
        outcomes.append([*run(given), given, torch.rand(())])  # and what is drawn next is the same
    torch.testing.assert_close(*outcomes)


@slow
@has_compiler
@pytest.mark.parametrize("make", [hesscale.AdaHesScale, hesscale.AdaHessian])
def test_steps_with_dropout_are_compiled(make):
    """AdaHessian draws signs too, which depend on nothing: some versions of TorchInductor would draw these first."""

    def steps(backend: str) -> tuple[hesscale.CompiledStep, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 8), nn.ELU(), nn.Dropout(0.5), nn.Linear(8, 3))
        step = hesscale.compile_step(
            model, lambda m, x, y: F.cross_entropy(m(x), y), make(model.parameters(), lr=1e-3), backend=backend
        )
        x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
        return step, [step(x, y).item() for _ in range(6)]

    step, losses = steps("inductor")
    assert step.mode == "compiled"
    assert losses == pytest.approx(steps("traced")[1], rel=1e-4)
