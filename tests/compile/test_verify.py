"""Which differences between compiled code and its graph count, and which are rounding."""

from __future__ import annotations

import pytest
import torch

from hesscale.compile.inductor import checked
from hesscale.compile.make_fx import trace
from hesscale.compile.verify import is_close, is_close_in_16_bits


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
def test_errors_of_a_small_step_are_detected(wrong, dtype):
    """Even if it hardly changes the weights."""

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
        checked(compiler, graph, tensors, {})
    else:
        with pytest.raises(RuntimeError, match=r"other numbers than the graph itself, changes in a tensor of shape \(8, 8\)"):
            checked(compiler, graph, tensors, {})


def by_signs(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    gradient = (x - x.mean(0)).sum(0)  # nothing but rounding
    weight.sub_(0.1 * gradient.sign())
    return [x.sum()]


def test_a_step_dominated_by_rounding_passes():
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
    checked(compiler, trace(by_signs, tensors), tensors, {})

    def lost(graph, tensors, options):
        return lambda weight, x: [graph(weight, x)[0], weight.fill_(torch.nan)][:1]

    with pytest.raises(RuntimeError, match="40 of 40"):  # which no rounding does
        checked(lost, trace(by_signs, tensors), tensors, {})
    with pytest.raises(RuntimeError, match="changes in a tensor"):
        checked(compiler, trace(small_step, [tensors[0], tensors[0]]), [tensors[0], tensors[0].exp()], {})


def test_rounding_to_16_bits_passes_but_a_wrong_factor_fails():
    def coarse(x):
        return [(x.bfloat16() * 1.7).float()]

    def compiler(factor):
        return lambda graph, tensors, options: lambda x: [x * 1.7 * factor]

    x = torch.randn(1000)
    graph = trace(coarse, [x])
    checked(compiler(1), graph, [x], {})
    for factor in (1.2, torch.nan):
        with pytest.raises(RuntimeError, match="other numbers"):
            checked(compiler(factor), graph, [x], {})
    assert not is_close_in_16_bits(torch.tensor([3]), torch.tensor([4]), 1.0)
    outlier = torch.where(torch.arange(1000) == 7, 1e6, 0.0)  # of a step by a curvature that is rounding alone
    assert is_close_in_16_bits(x + outlier, x - outlier, 1.0)
    assert not is_close_in_16_bits(x + outlier, -x - outlier, 1.0)
    far, some = torch.linspace(-1e3, 1e3, 1000), torch.arange(1000)  # large steps, whose signs are rounding for some
    assert is_close_in_16_bits(torch.where(some % 5 < 1, far, x), torch.where(some % 5 < 1, -far, x), 1.0)
    assert not is_close_in_16_bits(torch.where(some % 5 < 2, far, x), torch.where(some % 5 < 2, -far, x), 1.0)
    assert not is_close_in_16_bits(x, torch.where(torch.arange(1000) < 50, torch.nan, x), 1.0)
    for factor in (-1, 0, 3):  # though the margin of 16 bits would hold all that is small beside another tensor
        assert not is_close_in_16_bits(x.bfloat16() / 20, factor * x.bfloat16() / 20, 4.0)


def test_rounding_passes():
    a = torch.tensor([1.0, 2.0, 1e-12])
    assert is_close(a, a + torch.tensor([1e-6, 1e-6, 1e-9]), 2.0)
    assert not is_close(a, a * 1.5, 2.0)
    assert is_close(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), 1.0)
    assert not is_close(torch.tensor(1.0), torch.tensor(torch.nan), 1.0)
    assert not is_close(torch.tensor([3]), torch.tensor([4]), 1.0)
