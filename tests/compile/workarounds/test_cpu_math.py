"""tanh and expm1 in compiled code on a CPU, to a few units in the last place."""

from __future__ import annotations

import pytest
import torch
from steps import has_compiler
from torch import _inductor

from hesscale.compile.inductor import compile_graph
from hesscale.compile.make_fx import trace
from hesscale.compile.workarounds.cpu_math import with_own_math

AROUND_0 = torch.logspace(-44.8, 2, 100_000, dtype=torch.float64).float()  # from the smallest number on
GRID = torch.cat([AROUND_0, -AROUND_0, torch.linspace(-1, 1, 300_001), torch.linspace(-100, 100, 100_001)])
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 1e-40, -1e-40, 20, -20, 100, -100, 3e38, -3e38])


def units_in_the_last_place(y: torch.Tensor, exact: torch.Tensor) -> float:
    nearest = exact.float().abs()
    unit = (torch.nextafter(nearest, torch.tensor(torch.inf)) - nearest).double()
    return float(((y.double() - exact).abs() / unit).max())


@pytest.mark.parametrize(("function", "most"), [(torch.tanh, 4), (torch.expm1, 5)])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=[has_compiler, pytest.mark.slow])])
def test_functions_on_a_cpu(function, most, is_compiled):
    x = torch.cat([GRID, SPECIAL, torch.tensor([torch.nan])])
    graph = trace(lambda x: [function(x)], [x])
    assert any(node.target is getattr(torch.ops.aten, function.__name__).default for node in graph.graph.nodes)
    run = compile_graph(graph, [x]) if is_compiled else with_own_math(graph)
    (y,) = run(x)
    exact = function(x.double())
    assert y[-1].isnan()
    at_special = slice(len(GRID), -1)
    assert torch.equal(y[at_special], function(SPECIAL))
    assert torch.equal(y[at_special].signbit(), SPECIAL.signbit())
    is_in_range = exact.float().isfinite()
    assert units_in_the_last_place(y[is_in_range], exact[is_in_range]) <= most
    if function is torch.tanh:
        assert y[:-1].abs().max() == 1


@pytest.mark.slow
@has_compiler
def test_derivatives_of_tanh_on_a_cpu():
    """They are computed from its result: f' = 1 − y² ≥ 0, f'' = −2yf'."""

    def derivatives(x):
        with torch.enable_grad():
            x.requires_grad_()
            y = torch.tanh(x)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        return [first.detach(), second]

    run = compile_graph(trace(derivatives, [GRID]), [GRID])
    first, second = run(GRID.clone())
    y = torch.tanh(GRID.double())
    exact = 1 - y * y
    assert first.min() == 0
    torch.testing.assert_close(first.double(), exact, rtol=0, atol=4e-7)
    torch.testing.assert_close(second.double(), -2 * y * exact, rtol=0, atol=8e-7)


def test_only_float32_functions_are_replaced():
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    graph = trace(lambda x: [torch.tanh(x)], [x])
    assert torch.equal(with_own_math(graph)(x)[0], torch.tanh(x))


@pytest.mark.slow
@has_compiler
def test_pytorch_bug_expm1_loses_digits_near_0():
    """TorchInductor's C++ code computes expm1(x) as exp(x) - 1, so expm1(1e-9) is 0.

    Once it does not, :func:`expm1` of ``cpu_math.py`` can go.
    """
    x = torch.full((64,), 1e-9)
    (y,) = _inductor.compile(trace(lambda x: [torch.expm1(x)], [x]), [x])(x)
    assert torch.equal(torch.expm1(x), x)
    assert not torch.allclose(y, x, rtol=1e-2, atol=0)
