"""Gradient scalers: the curvature is unscaled along with the gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from training import assert_same, batches, make_model, train, weight

import hesscale
from hesscale.optim import AdaHesScale, SophiaG


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("unscale", ["in step", "before", "by backward"])
def test_gradient_scaler(enabled, unscale):
    """Scaling the loss changes no weight: the curvature is unscaled along with the gradient."""
    model, other = make_model(torch.float32), make_model(torch.float32)
    opt = AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    for x, y in batches(5, torch.float32):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if unscale == "in step":
            hesscale.backward(scaler.scale(loss))
        else:
            opt.backward(loss, scaler=scaler)
        if unscale == "before":
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
    train(other, AdaHesScale(other.parameters(), lr=0.01), 5, torch.float32)
    assert_same(model, [p.detach() for p in other.parameters()], rtol=1e-4, atol=1e-6)


def test_scaled_curvature_is_refused():
    model = make_model(torch.float32)
    opt = AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(batches(1, torch.float32))
    hesscale.backward(scaler.scale(F.cross_entropy(model(x), y)))
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="scaler=scaler"):
        scaler.step(opt)


def test_overflow_found_by_a_scaler_skips_the_step_silently():
    model = make_model(torch.float32)
    opt = AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    before = copy.deepcopy(model.state_dict())
    x, y = next(batches(1, torch.float32))
    opt.backward(F.cross_entropy(100 * model(x), y), scaler=scaler)
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() < 3e38
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_step_that_raises_removes_the_scalers_attributes():
    model, other = make_model(torch.float32), make_model(torch.float32)
    opt = AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    (x, y), *_ = batches(1, torch.float32)
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    with pytest.raises(RuntimeError, match="needs hess_diag"):
        scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    opt.backward(F.cross_entropy(model(x), y), scaler=scaler)
    scaler.step(opt)
    train(other, AdaHesScale(other.parameters(), lr=0.01), 1, torch.float32)
    assert_same(model, [p.detach() for p in other.parameters()], rtol=1e-4, atol=1e-6)


def test_clearing_forgets_that_the_curvature_was_unscaled():
    w = weight(dtype=torch.float32)
    opt = AdaHesScale([w], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    opt.backward((w**2).sum(), scaler=scaler)
    opt.zero_grad()
    hesscale.backward(scaler.scale((w**2).sum()))
    scaler.step(opt)
    torch.testing.assert_close(opt.state[w]["exp_hess_sq"], torch.tensor([0.004]))


def test_an_error_with_a_scaler_loses_nothing():
    w = weight(dtype=torch.float32)
    opt = AdaHesScale([w])
    scaler = torch.amp.GradScaler("cpu")
    opt.backward((w**2).sum(), scaler=scaler)
    before = w.hess_diag.clone()
    with pytest.raises(hesscale.UnsupportedOperator):
        opt.backward(torch.linalg.matrix_exp(w * torch.eye(2)).sum(), scaler=scaler)
    assert torch.equal(w.hess_diag, before)


@pytest.mark.parametrize("how", ["capture", "backward"])
def test_sophia_averages_the_unscaled_curvature(how):
    """It averages the diagonal itself and not its square, so a scale has to be taken out before."""
    found = []
    for scale in (1.0, 1024.0):
        model = make_model()
        optimizer = SophiaG(model.parameters(), generator=torch.Generator().manual_seed(0))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        ((x, y),) = batches(1)
        loss = scaler.scale(F.cross_entropy(model(x), y))
        if how == "capture":
            with hesscale.capture(optimizer):
                loss.backward()
        else:
            optimizer.backward(loss)
        scaler.step(optimizer)
        found.append([optimizer.state[p]["exp_hess_sq"] for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])
