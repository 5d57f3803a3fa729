"""The optimizers in a training loop: closures, schedulers, frozen parameters, and when curvature is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import OURS, assert_same, batches, make_model, train, weight

import hesscale
from hesscale.optim import GGNMC, AdaHesScale, AdaHessian, SophiaG


@pytest.mark.parametrize("optimizer", OURS)
def test_closure_scheduler_and_tensor_step_size(optimizer):
    model = make_model()
    opt = optimizer(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    x, y = next(batches(1))

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        opt.backward(loss)
        return loss

    losses = [float(opt.step(closure).detach()) for _ in range(3)]
    scheduler.step()
    assert len(set(losses)) == 3
    assert losses[-1] < losses[0] or optimizer is GGNMC  # whose first steps divide by noise
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(0.009)


def test_frozen_and_unused_parameters_are_left_alone():
    model = make_model()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    before = model[0].weight.clone()
    train(model, AdaHesScale([*model.parameters(), unused], lr=0.01))
    assert torch.equal(model[0].weight, before)
    assert torch.equal(unused, torch.ones(2, dtype=torch.float64))


def test_step_consumes_and_zero_grad_clears():
    model = make_model()
    opt = AdaHesScale(model.parameters())
    x, y = next(batches(1))
    opt.backward(F.cross_entropy(model(x), y))
    assert all(p.hess_diag is not None for p in model.parameters())
    opt.step()
    assert all(p.hess_diag is None for p in model.parameters())
    opt.backward(F.cross_entropy(model(x), y))
    opt.zero_grad()
    assert all(p.hess_diag is None and p.grad is None for p in model.parameters())


def test_the_error_for_missing_curvature_says_what_to_do():
    model = make_model()
    opt = AdaHesScale(model.parameters())
    x, y = next(batches(1))
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"optimizer\.backward"):
        opt.step()
    model[0].bias.hess_diag = torch.ones(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="3 of 4 parameters"):
        opt.step()


def test_curvature_every_third_step():
    model = make_model()
    opt = AdaHesScale(model.parameters(), lr=0.01, curvature_every=3, trust_radius=1e-3)
    seen = []
    for x, y in batches(7):
        opt.zero_grad()
        opt.backward(F.cross_entropy(model(x), y))
        seen.append(model[0].weight.hess_diag is not None)
        opt.step()
    assert seen == [True, False, False, True, False, False, True]
    state = opt.state[model[0].weight]
    assert float(state["step"]) == 7
    assert float(state["curvature_step"]) == 3


def test_a_parameter_that_joins_between_curvature_updates_waits_for_the_next():
    model = make_model()
    model[0].weight.requires_grad_(False)
    opt = AdaHesScale(model.parameters(), lr=0.01, curvature_every=3, trust_radius=1e-3)
    train(model, opt, 1)
    model[0].weight.requires_grad_(True)
    before = model[0].weight.detach().clone()
    train(model, opt, 1)
    assert torch.equal(model[0].weight.detach(), before)
    train(model, opt, 2)
    assert not torch.equal(model[0].weight.detach(), before)
    assert all(p.isfinite().all() for p in model.parameters())


def test_gradients_accumulate_over_several_losses():
    whole, parts = make_model(), make_model()
    (x, y), (x2, y2) = batches(2)
    one, two = (AdaHesScale(m.parameters(), lr=0.01) for m in (whole, parts))
    one.backward(F.cross_entropy(whole(x), y))
    one.backward(F.cross_entropy(whole(x2), y2))
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        first = hesscale.grad(F.cross_entropy(parts(x), y), q)[1][0]
        second = hesscale.grad(F.cross_entropy(parts(x2), y2), q)[1][0]
        torch.testing.assert_close(p.hess_diag, first + second)
    two.backward(F.cross_entropy(parts(x), y))
    one.step()


def test_curvature_is_this_optimizers_alone():
    actor, critic = make_model(), make_model()
    opt = AdaHesScale(actor.parameters())
    x, y = next(batches(1))
    opt.backward(F.cross_entropy(actor(x), y) + critic(x).square().mean())
    assert all(p.hess_diag is not None for p in actor.parameters())
    assert all(p.grad is not None and getattr(p, "hess_diag", None) is None for p in critic.parameters())


def test_a_loss_without_its_parameters_does_nothing():
    opt = AdaHessian([weight()])
    opt.backward((weight() ** 2).sum())
    opt.step()


def test_adahessian_averages_over_a_kernels_window():
    p = torch.randn(4, 3, 2, 2)
    averaged = AdaHessian([nn.Parameter(p)], spatial_average=True).prepare(p, p)
    torch.testing.assert_close(averaged, p.abs().mean((2, 3), keepdim=True).expand(4, 3, 2, 2))
    assert AdaHessian([nn.Parameter(p)]).prepare(p, p) is p


@pytest.mark.parametrize("optimizer", [AdaHessian, GGNMC])
def test_sampled_curvature_follows_its_generator(optimizer):
    models = [make_model() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        train(model, optimizer(model.parameters(), lr=0.01, generator=torch.Generator().manual_seed(seed)), 5)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


def test_sophia_by_hand():
    """H = ρ-weighted average of the estimate; entries are clipped at ±1, and the estimate is drawn at every tenth step."""
    model, other = make_model(), make_model()
    optimizer = SophiaG(model.parameters(), lr=0.01, rho=20.0, weight_decay=0.1, generator=torch.Generator().manual_seed(5))
    train(model, optimizer)
    generator, params = torch.Generator().manual_seed(5), list(other.parameters())
    M, H = ([torch.zeros_like(p) for p in params] for _ in range(2))
    clipped = total = 0
    for t, (x, y) in enumerate(batches(20)):
        loss = F.cross_entropy(other(x), y)
        if t % 10 == 0:
            S = hesscale.estimators.estimate("ggn_mc", loss, params, generator=generator, retain_graph=True)
            H = [0.99 * h + 0.01 * s for h, s in zip(H, S, strict=True)]
        for l, (p, gradient) in enumerate(zip(params, torch.autograd.grad(loss, params), strict=True)):
            M[l] = 0.96 * M[l] + 0.04 * gradient
            ratio = M[l] / (20.0 * H[l]).clamp_min(1e-12)
            clipped, total = clipped + int((ratio.abs() > 1).sum()), total + ratio.numel()
            with torch.no_grad():
                p.mul_(1 - 0.01 * 0.1).sub_(0.01 * ratio.clamp(-1, 1))
    assert 0 < clipped < total
    assert_same(model, [p.detach() for p in params], rtol=1e-7, atol=1e-9)


def test_sophia_has_no_bounds_or_trust_region():
    with pytest.raises(TypeError, match="SophiaG takes no option trust_radius"):
        SophiaG([weight()], trust_radius=1.0)
    with pytest.raises(ValueError, match="rho=0 is out of range"):
        SophiaG([weight()], rho=0)


def test_sophia_maximizes():
    found = []
    for sign in (1, -1):
        model = make_model()
        optimizer = SophiaG(model.parameters(), lr=0.01, maximize=sign < 0, generator=torch.Generator().manual_seed(0))
        for x, y in batches(3):
            optimizer.zero_grad()
            optimizer.backward(sign * F.cross_entropy(model(x), y))
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])
