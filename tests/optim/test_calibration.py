"""Calibration of HesScaleGN: one number per parameter tensor, from a Monte-Carlo estimate of the exact diagonal."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import assert_same, batches, make_model, train

import hesscale
from hesscale.optim import AdaHesScaleGN


def averaging_cnn():
    """A convolution and a mean over pixels: between pixels, HesScaleGN leaves out part of the curvature."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).double()


def test_the_calibrated_sum_is_unbiased():
    model = averaging_cnn()
    params = list(model.parameters())
    x, y = torch.randn(8, 1, 5, 5, dtype=torch.float64), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model(x), y)
    exact = hesscale.estimators.estimate("ggn", loss, params, retain_graph=True)
    recursive = hesscale.grad(loss, params, method="hesscale_gn", retain_graph=True)[1]
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        optimizer = AdaHesScaleGN(params, calibrate_every=1, generator=generator)
        optimizer.calibrate(loss)
        pairs = zip(params, recursive, strict=True)
        found.append([float(optimizer.prepare(diagonal, p).sum()) for p, diagonal in pairs])
    draws = torch.tensor(found, dtype=torch.float64)
    target = torch.stack([diagonal.sum() for diagonal in exact])
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - target).abs() < 4 * error).all()
    assert abs(float(recursive[0].sum()) - target[0]) > 0.1 * target[0]  # what there is to calibrate


def test_calibration_multiplies_each_tensor_by_one_number():
    """By hand: the same draws, averaged at steps 0 and 3."""
    model, other = make_model(), make_model()
    options = {"lr": 0.01, "damping": 0.0, "graft": None}
    train(model, AdaHesScaleGN(model.parameters(), calibrate_every=3, generator=torch.Generator().manual_seed(5), **options), 5)
    generator, params = torch.Generator().manual_seed(5), list(other.parameters())
    plain = AdaHesScaleGN(params, **options)
    sums = torch.zeros(2, len(params), dtype=torch.float64)
    for t, (x, y) in enumerate(batches(5)):
        loss = F.cross_entropy(other(x), y)
        if t % 3 == 0:
            drawn = hesscale.estimators.estimate("ggn_mc", loss, params, generator=generator, retain_graph=True)
            found = hesscale.grad(loss, params, method="hesscale_gn", retain_graph=True)[1]
            sums = 0.9 * sums + 0.1 * torch.tensor([[float(d.sum()) for d in part] for part in (drawn, found)])
        plain.zero_grad()
        plain.backward(loss)
        for l, p in enumerate(params):
            p.hess_diag *= float(sums[0, l] / sums[1, l])
        plain.step()
    assert_same(model, [p.detach() for p in params], rtol=1e-6, atol=1e-9)


def test_calibration_survives_saving():
    model = make_model()
    optimizer = AdaHesScaleGN(model.parameters(), lr=0.01, calibrate_every=5, generator=torch.Generator().manual_seed(0))
    train(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = AdaHesScaleGN(other.parameters(), calibrate_every=5, generator=optimizer.generator)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2)
    train(other, resumed, 2)
    assert_same(other, [p.detach() for p in model.parameters()])


def test_calibration_in_a_compiled_step():
    model = make_model()
    optimizer = AdaHesScaleGN(model.parameters(), lr=0.01, calibrate_every=2)
    step = hesscale.compile_step(model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer, backend="traced")
    seen = []
    for x, y in batches(8):
        before = optimizer.state[model[0].weight].get("calibration_sums", torch.zeros(2)).clone()
        step(x, y)
        seen.append(not torch.equal(optimizer.state[model[0].weight]["calibration_sums"], before))
    assert seen == [True, False] * 4
    assert step.mode == "traced", step.reason


def test_a_diagonal_that_was_not_calibrated_is_refused():
    model = make_model()
    optimizer = AdaHesScaleGN(model.parameters(), calibrate_every=10)
    x, y = next(batches(1))
    hesscale.backward(F.cross_entropy(model(x), y), method="hesscale_gn")
    with pytest.raises(RuntimeError, match=r"not calibrated for this step; call optimizer.backward"):
        optimizer.step()


def test_calibrations_are_steps_with_curvature():
    with pytest.raises(ValueError, match="multiple of curvature_every=3"):
        AdaHesScaleGN(make_model().parameters(), calibrate_every=4, curvature_every=3)
    with pytest.raises(ValueError, match="calibrate_every=0 is out of range"):
        AdaHesScaleGN(make_model().parameters(), calibrate_every=0)


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_step_that_is_not_finite_leaves_the_calibration_as_it_was(factor):
    model = make_model()
    optimizer = AdaHesScaleGN(model.parameters(), calibrate_every=1, on_nonfinite="skip")
    train(model, optimizer, 1)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    ((x, y),) = batches(1)
    optimizer.zero_grad()
    optimizer.backward(factor * F.cross_entropy(model(x), y))
    optimizer.step()
    assert optimizer.nonfinite_steps == 1
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["calibration_sums"], before[key]["calibration_sums"])


def test_a_second_captured_optimizer_is_calibrated_too():
    found = []
    for is_second in (False, True):
        model, other = make_model(), make_model()
        optimizer = AdaHesScaleGN(model.parameters(), calibrate_every=1, generator=torch.Generator().manual_seed(0))
        first = [hesscale.AdaHesScale(other.parameters())] if is_second else []
        ((x, y),) = batches(1)
        with hesscale.capture(*first, optimizer):
            loss = F.cross_entropy(model(x), y)
            (loss + F.cross_entropy(other(x), y) if is_second else loss).backward()
        found.append([optimizer.state[p]["calibration_sums"] for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one[1], two[1])  # of HesScaleGN, which is not drawn
        assert float(two[0]) > 0


def test_a_loss_without_the_optimizers_parameters():
    optimizer = AdaHesScaleGN(make_model().parameters(), calibrate_every=1)
    w = torch.ones(2, requires_grad=True)
    optimizer.backward((w**2).sum())
    assert w.grad.tolist() == [2, 2]


def test_calibration_of_a_loss_that_is_maximized():
    """Both diagonals are negative then, and their ratio is the same."""
    found = []
    for sign in (1, -1):
        model = averaging_cnn()
        options = {"calibrate_every": 1, "generator": torch.Generator().manual_seed(0), "maximize": sign < 0}
        optimizer = AdaHesScaleGN.paper(model.parameters(), lr=0.01, **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            x, y = torch.randn(8, 1, 5, 5, dtype=torch.float64, generator=generator), torch.arange(8) % 3
            optimizer.zero_grad()
            optimizer.backward(sign * F.cross_entropy(model(x), y))
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])
