"""Mixed-precision quantization: costs are exact for quadratic losses, and the budget is respected."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale
from hesscale.uses.quantization import allocate, costs, quantize, rounded


def test_rounding_is_to_the_nearest_value():
    w = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    for bits in (2, 3, 8):
        found, step = rounded(w, bits), w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert ((found - w).abs() <= step / 2 * (1 + 1e-5)).all()
        torch.testing.assert_close((found / step).round() * step, found)
        assert max(len(row.unique()) for row in found) <= 2**bits - 1
    assert torch.equal(rounded(torch.zeros(2, 3), 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"at least 2 bits.* not 1"):
        rounded(w, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_in_half_precision(dtype):
    """As in single precision, but for the last rounding to the type."""
    w = torch.randn(5, 700, generator=torch.Generator().manual_seed(0)).to(dtype)
    for bits in (2, 8, 10):
        found = rounded(w, bits)
        assert found.dtype == dtype
        assert torch.equal(found, rounded(w.float(), bits).to(dtype))
    assert rounded(w[:, :0], 4).shape == (5, 0)


def test_costs_of_small_weights_in_half_precision():
    """The squares of their changes are below the smallest number of float16."""
    w = (1e-3 * torch.randn(5, 70, generator=torch.Generator().manual_seed(0))).to(torch.float16)
    found, single = (costs({"weight": w.to(dtype)}, {"weight": torch.ones(5, 70)}, (4,)) for dtype in (w.dtype, torch.float32))
    assert found["weight"][4] == pytest.approx(single["weight"][4], rel=0.01)


def test_costs_are_the_true_rise_of_a_separable_quadratic_loss():
    """Squared error of a linear layer on one-hot inputs, in the minimum."""
    layer, x = nn.Linear(4, 3, bias=False).double(), torch.eye(4, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0, 4.0])
    target = layer(x).detach()
    hesscale.backward(F.mse_loss(layer(x), target), method="hesscale_gn")
    found = costs({"weight": layer.weight}, {"weight": layer.weight.hess_diag}, bits=(2, 4))
    weight = layer.weight.detach().clone()
    for bits in (2, 4):
        quantize(layer, {"weight": bits})
        assert torch.equal(layer.weight, rounded(weight, bits))
        assert found["weight"][bits] == pytest.approx(float(F.mse_loss(layer(x), target).detach()))
        with torch.no_grad():
            layer.weight.copy_(weight)


@pytest.mark.parametrize("budget", [2.0, 2.5, 4.0, 5.1])
def test_no_choice_under_the_budget_is_better_if_sizes_are_equal(budget):
    """Costs that fall by ever smaller steps of one bit: there, the best step each time leads to the best choice."""
    table = {name: {b: scale * 4.0**-b for b in range(2, 7)} for name, scale in (("a", 1), ("b", 30), ("c", 5000))}
    sizes = dict.fromkeys(table, 10)
    chosen = allocate(table, sizes, budget)
    assert sum(chosen.values()) <= 3 * budget
    options = [c for c in itertools.product(range(2, 7), repeat=3) if sum(c) <= 3 * budget]
    best = min(sum(table[name][b] for name, b in zip(table, c, strict=True)) for c in options)
    assert sum(table[name][b] for name, b in chosen.items()) == pytest.approx(best)


def test_steps_that_do_not_help_or_do_not_fit_are_not_taken():
    table = {"plateau": {2: 1.0, 3: 1.0, 4: 0.1}, "flat": {2: 0.0, 3: 0.0, 4: 0.0}, "large": {2: 9.0, 3: 8.9, 4: 0.0}}
    sizes = {"plateau": 10, "flat": 10, "large": 100}
    assert allocate(table, sizes, 8) == {"plateau": 4, "flat": 2, "large": 4}
    assert allocate(table, sizes, (4 * 10 + 2 * 10 + 3 * 100) / 120) == {"plateau": 4, "flat": 2, "large": 3}
    with pytest.raises(ValueError, match="the smallest numbers of bits need 2"):
        allocate(table, sizes, 1.5)


def test_mismatched_arguments_are_refused():
    with pytest.raises(ValueError, match=r"weight has shape \(2, 3\) .* there is one of shape \(1, 3\)"):
        costs({"weight": torch.ones(2, 3)}, {"weight": torch.ones(1, 3)})
    with pytest.raises(ValueError, match="there is none"):
        costs({"weight": torch.ones(2, 3)}, {"bias": torch.ones(3)})
    for bad in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match="no sizes, for a"):
            allocate({"a": {2: bad, 4: 1.0}}, {"b": 3}, 8)
        with pytest.raises(ValueError, match="costs of a must be finite and not negative"):
            allocate({"a": {2: bad, 4: 1.0}}, {"a": 3}, 8)


def test_quantize_changes_nothing_if_it_raises():
    for bits, value, words in ((1, 0.0, "at least 2 bits"), (4, float("inf"), "not finite"), (4, float("nan"), "not finite")):
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        model[1].weight.data[0, 0] = value
        before = model[0].weight.detach().clone()
        with pytest.raises(ValueError, match=words):
            quantize(model, {"0.weight": 4, "1.weight": bits})
        assert torch.equal(model[0].weight, before)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"no parameters 1\.weight"):
        quantize(nn.Linear(2, 2), {"1.weight": 4})
