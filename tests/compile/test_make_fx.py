"""Compiled code is held against the graph that it was made from."""

from __future__ import annotations

import copy
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import _inductor, nn

import hesscale
from hesscale.compile import inductor as tracing
from hesscale.compile.inductor import twin
from hesscale.compile.make_fx import trace
from hesscale.compile.verify import is_roughly_same, is_same


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
    where = "20 of 20 in a tensor of shape (20,)" if wrong == "argument" else "1 of 1 in a tensor of shape ()"
    with pytest.raises(RuntimeError, match=f"other numbers than the graph itself, {re.escape(where)}"):
        tracing.checked(compiler, trace(double_in_place, tensors), tensors, {})


def small_step(weight: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
    weight.sub_(1e-4 * gradient)
    return [gradient.bfloat16().sum() if gradient.dtype == torch.float32 else gradient.sum()]


WRONG_STEPS = {
    "none": lambda change: 0 * change,
    "back": lambda change: -change,
    "turned": lambda change: change.t(),
    "a quarter lost": lambda change: change.where(torch.arange(8)[:, None] >= 2, 0),
    "twice": lambda change: 2 * change,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["with 16 bits", "float64"])
@pytest.mark.parametrize("wrong", [*WRONG_STEPS, None])
def test_a_small_step_is_seen(wrong, dtype):
    """Though it changes next to nothing of the weights."""

    def compiler(graph, tensors, options):
        def run(weight, gradient):
            before = weight.clone()
            returned = graph(weight, gradient)
            if wrong is not None:
                weight.copy_(before + WRONG_STEPS[wrong](weight - before))
            return returned

        return run

    torch.manual_seed(0)
    tensors = [torch.randn(8, 8, dtype=dtype), torch.randn(8, 8, dtype=dtype)]
    graph = trace(small_step, tensors)
    if wrong is None:
        tracing.checked(compiler, graph, tensors, {})
    else:
        with pytest.raises(RuntimeError, match=r"other numbers than the graph itself, changes in a tensor of shape \(8, 8\)"):
            tracing.checked(compiler, graph, tensors, {})


def by_signs(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    gradient = (x - x.mean(0)).sum(0)  # nothing but rounding
    weight.sub_(0.1 * gradient.sign())
    return [x.sum()]


def test_a_step_that_rounding_decides_is_no_difference():
    """As those of a bias before batch norm are."""

    def compiler(graph, tensors, options):
        def run(weight, x):
            step = weight.clone()
            returned = graph(weight, x)
            weight.copy_(step + (weight - step) * torch.tensor([1.0, -1.0]).repeat(20))
            return returned

        return run

    torch.manual_seed(0)
    tensors = [torch.randn(40), torch.randn(33, 40)]
    tracing.checked(compiler, trace(by_signs, tensors), tensors, {})

    def lost(graph, tensors, options):
        return lambda weight, x: [graph(weight, x)[0], weight.fill_(torch.nan)][:1]

    with pytest.raises(RuntimeError, match="40 of 40"):  # which no rounding does
        tracing.checked(lost, trace(by_signs, tensors), tensors, {})
    with pytest.raises(RuntimeError, match="changes in a tensor"):
        tracing.checked(compiler, trace(small_step, [tensors[0], tensors[0]]), [tensors[0], tensors[0].exp()], {})


def test_results_of_another_shape_are_refused():
    def compiler(graph, tensors, options):
        return lambda *given: [value[None] for value in graph(*given)]

    tensors = [torch.randn(20), torch.randn(20)]
    with pytest.raises(RuntimeError, match=r"shape \(1,\) in place of \(\)"):
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


def test_tf32_is_off_while_code_is_checked_and_comes_back(monkeypatch):
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
        tracing.checked(compiler, trace(double_in_place, tensors), tensors, {})
        assert seen == ["ieee"] * 3
        assert [kind.fp32_precision for kind in kinds] == ["tf32", *before[1:]]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]


def test_rounding_to_16_bits_is_no_difference_and_a_factor_is():
    def coarse(x):
        return [(x.bfloat16() * 1.7).float()]

    def compiler(factor):
        return lambda graph, tensors, options: lambda x: [x * 1.7 * factor]

    x = torch.randn(1000)
    graph = trace(coarse, [x])
    tracing.checked(compiler(1), graph, [x], {})
    for factor in (1.2, torch.nan):
        with pytest.raises(RuntimeError, match="other numbers"):
            tracing.checked(compiler(factor), graph, [x], {})
    assert not is_roughly_same(torch.tensor([3]), torch.tensor([4]), 1.0)
    outlier = torch.where(torch.arange(1000) == 7, 1e6, 0.0)  # of a step by a curvature that is rounding alone
    assert is_roughly_same(x + outlier, x - outlier, 1.0)
    assert not is_roughly_same(x + outlier, -x - outlier, 1.0)
    far, some = torch.linspace(-1e3, 1e3, 1000), torch.arange(1000)  # large steps, whose signs are rounding for some
    assert is_roughly_same(torch.where(some % 5 < 1, far, x), torch.where(some % 5 < 1, -far, x), 1.0)
    assert not is_roughly_same(torch.where(some % 5 < 2, far, x), torch.where(some % 5 < 2, -far, x), 1.0)
    assert not is_roughly_same(x, torch.where(torch.arange(1000) < 50, torch.nan, x), 1.0)
    for factor in (-1, 0, 3):  # though the margin of 16 bits would hold all that is small beside another tensor
        assert not is_roughly_same(x.bfloat16() / 20, factor * x.bfloat16() / 20, 4.0)


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


# -------------------------------------------------------------------------------------------- strides other than in the trace


def mixed_strides() -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient and input of an ELU; what torch expects of elu_backward has the strides of the input."""
    return torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 4)


def gradient_of_elu(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.elu_backward(g, 1.0, 1.0, 1.0, False, x)


def flattened(g, x):
    return [gradient_of_elu(g, x).reshape(2, -1) * 1]


def flattened_and_written_to_alone(g, x):
    y = gradient_of_elu(g, x).reshape(2, -1)
    y.add_(1)
    return [y * 1]


@pytest.mark.parametrize("function", [flattened, flattened_and_written_to_alone])
def test_views_do_not_depend_on_strides(function):
    given = mixed_strides()
    graph = trace(function, given)
    expected = function(*(tensor.contiguous() for tensor in given))
    torch.testing.assert_close(graph(*given), expected)


def written_through_the_view(g, x):
    y = gradient_of_elu(g, x)
    y.view(2, -1).add_(1)
    return [y * 1]


def read_through_the_view(g, x):
    y = gradient_of_elu(g, x)
    view = y.view(2, -1)
    y.add_(1)
    return [view * 1]


@pytest.mark.parametrize("function", [written_through_the_view, read_through_the_view])
def test_views_through_which_a_change_is_seen_stay(function):
    contiguous = [tensor.contiguous() for tensor in mixed_strides()]
    graph = trace(function, contiguous)
    torch.testing.assert_close(graph(*contiguous), function(*contiguous))
    with pytest.raises(RuntimeError, match="view"):  # rather than other numbers
        trace(function, mixed_strides())(*mixed_strides())


ACTIVATIONS = (nn.ELU, nn.Softplus, nn.SELU, nn.CELU, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_step_with_gradients_in_another_order_than_inputs(activation):
    torch.manual_seed(0)
    layers = nn.Linear(5, 32), nn.Unflatten(1, (2, 4, 4)), activation(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 3)
    models = [nn.Sequential(*layers).to(memory_format=torch.channels_last) for layers in (layers, copy.deepcopy(layers))]

    def step_of(model, backend):
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, eps=1e-4)
        return hesscale.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, backend=backend)

    traced, eager = step_of(models[0], "traced"), step_of(models[1], "eager")
    for _ in range(5):
        x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
        torch.testing.assert_close(traced(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    assert traced.mode == "traced", traced.reason


# -------------------------------------------------------------------------------------------------- tanh and expm1 on a CPU

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
AROUND_0 = torch.logspace(-44.8, 2, 100_000, dtype=torch.float64).float()  # from the smallest number on
GRID = torch.cat([AROUND_0, -AROUND_0, torch.linspace(-1, 1, 300_001), torch.linspace(-100, 100, 100_001)])
SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, -1e-45, 1e-40, -1e-40, 20, -20, 100, -100, 3e38, -3e38])


def units_in_the_last_place(y: torch.Tensor, exact: torch.Tensor) -> float:
    nearest = exact.float().abs()
    unit = (torch.nextafter(nearest, torch.tensor(torch.inf)) - nearest).double()
    return float(((y.double() - exact).abs() / unit).max())


@pytest.mark.parametrize(("function", "most"), [(torch.tanh, 4), (torch.expm1, 5)])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_functions_on_a_cpu(function, most, is_compiled):
    x = torch.cat([GRID, SPECIAL, torch.tensor([torch.nan])])
    graph = trace(lambda x: [function(x)], [x])
    assert any(node.target is getattr(torch.ops.aten, function.__name__).default for node in graph.graph.nodes)
    run = tracing.compile_graph(graph, [x]) if is_compiled else tracing.for_cpu(graph)
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


@needs_compiler
def test_derivatives_of_tanh_on_a_cpu():
    """They are computed from its result: f' = 1 − y² ≥ 0, f'' = −2yf'."""

    def derivatives(x):
        with torch.enable_grad():
            x.requires_grad_()
            y = torch.tanh(x)
            (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        return [first.detach(), second]

    run = tracing.compile_graph(trace(derivatives, [GRID]), [GRID])
    first, second = run(GRID.clone())
    y = torch.tanh(GRID.double())
    exact = 1 - y * y
    assert first.min() == 0
    torch.testing.assert_close(first.double(), exact, rtol=0, atol=4e-7)
    torch.testing.assert_close(second.double(), -2 * y * exact, rtol=0, atol=8e-7)


def test_only_float32_has_functions_of_its_own():
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    graph = trace(lambda x: [torch.tanh(x)], [x])
    assert torch.equal(tracing.for_cpu(graph)(x)[0], torch.tanh(x))
