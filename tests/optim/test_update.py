"""Algorithm 2 and Adam against the paper's pseudocode, line by line in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from training import DETERMINISTIC, assert_same, batches, make_model, paper, pseudocode, train, weight

import hesscale
from hesscale.optim import GGNMC, AdaHesScale, AdaHessian, Adam


@pytest.mark.parametrize("optimizer", DETERMINISTIC)
def test_algorithm_2(optimizer):
    model = make_model()
    reference, _ = pseudocode(copy.deepcopy(model), optimizer.method, 0.01)
    train(model, paper(optimizer)(model.parameters(), lr=0.01))
    assert_same(model, reference)


@pytest.mark.parametrize("optimizer", [AdaHessian, GGNMC])
def test_algorithm_2_with_sampled_curvature(optimizer):
    """The same draws, averaged as the pseudocode averages."""
    model, written = make_model(), make_model()
    train(model, paper(optimizer)(model.parameters(), lr=0.01, num_samples=2, generator=torch.Generator().manual_seed(5)))
    generator, params = torch.Generator().manual_seed(5), list(written.parameters())
    M, V = ([torch.zeros_like(p) for p in params] for _ in range(2))
    for t, (x, y) in enumerate(batches(20), start=1):
        loss = F.cross_entropy(written(x), y)
        S = hesscale.estimators.estimate(optimizer.method, loss, params, num_samples=2, generator=generator, retain_graph=True)
        gradients = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for l, p in enumerate(params):
                M[l] = 0.9 * M[l] + 0.1 * gradients[l]
                V[l] = 0.999 * V[l] + 0.001 * S[l] ** 2
                p -= 0.01 * M[l] / (1 - 0.9**t) / ((V[l] / (1 - 0.999**t)).sqrt() + 1e-8)
    assert_same(model, [p.detach() for p in params], rtol=1e-7, atol=1e-9)


def test_adam_is_torchs_adam():
    model, other = make_model(), make_model()
    train(model, Adam(model.parameters(), lr=0.01, weight_decay=0.1))
    theirs = torch.optim.Adam(other.parameters(), lr=0.01, weight_decay=0.1)
    for x, y in batches(20):
        theirs.zero_grad()
        F.cross_entropy(other(x), y).backward()
        theirs.step()
    assert_same(model, [p.detach() for p in other.parameters()], rtol=1e-8, atol=1e-10)


def test_plain_adam_asks_for_no_curvature():
    model = make_model()
    opt = Adam(model.parameters())
    opt.backward(model(torch.ones(1, 4, dtype=torch.float64)).sum())
    assert all(getattr(p, "hess_diag", None) is None for p in model.parameters())
    opt.step()
    assert not opt.eta
    assert opt.scaled_share == {}


def test_first_step_on_a_quadratic_bowl():
    """L = ½ Σ a w²: gradient a w, curvature a; the first update is α w whatever a is."""
    a = torch.tensor([1e-2, 1.0, 1e4], dtype=torch.float64)
    w = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    start = w.detach().clone()
    opt = AdaHesScale.paper([w], lr=0.1, eps=0)
    opt.backward(0.5 * (a * w * w).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), 0.9 * start)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("radius", [None, 1e-4])
@pytest.mark.parametrize(("optimizer", "squares"), [(AdaHesScale, "curvature"), (Adam, "gradient")])
def test_weights_do_not_change_during_curvature_warmup(optimizer, squares, radius, foreach):
    if optimizer is Adam and radius is None:
        radius = 1e-3  # no curvature otherwise
    count = 7
    how = {"radius": radius, "squares": squares, "warmup": count}
    for steps in (count, count + 1, 20):
        reference, etas = pseudocode(make_model(), optimizer.method, 0.05, count=steps, **how)
        model = make_model()
        opt = paper(optimizer)(model.parameters(), lr=0.05, trust_radius=radius, curvature_warmup=count, foreach=foreach)
        train(model, opt, steps)
        assert_same(model, reference)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), make_model().parameters(), strict=True)) == (
            steps == count
        )
        if radius is not None:
            assert float(opt.scaled_share[0]) == pytest.approx(sum(eta < 1 for eta in etas) / len(etas))


def test_plain_adam_has_no_curvature_to_warm_up():
    waiting, plain = make_model(), make_model()
    train(waiting, Adam(waiting.parameters(), curvature_warmup=5))
    train(plain, Adam(plain.parameters()))
    assert_same(waiting, list(plain.parameters()))


def test_weight_decay_is_an_l2_penalty():
    model, other = make_model(), make_model()
    train(model, AdaHesScale.paper(model.parameters(), lr=0.01, weight_decay=0.3))
    opt = AdaHesScale.paper(other.parameters(), lr=0.01)
    for x, y in batches(20):
        opt.zero_grad()
        opt.backward(F.cross_entropy(other(x), y) + 0.15 * sum((p * p).sum() for p in other.parameters()))
        opt.step()
    assert_same(model, [p.detach() for p in other.parameters()])


def test_decoupled_decay_shrinks_outside_the_update():
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale.paper([w], lr=0.5, eps=0, trust_radius=0.02, weight_decay=0.1, decoupled_weight_decay=True)
    opt.backward(0.5 * (w * w).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.95 - 0.2], dtype=torch.float64))


def test_decoupled_decay_keeps_its_digits_under_a_trust_region():
    w = weight()
    opt = AdaHesScale.paper([w], lr=1e-4, weight_decay=1e-4, decoupled_weight_decay=True, trust_radius=1e-30)
    opt.backward((w**2).sum())
    opt.step()
    assert float(1 - w) == pytest.approx(1e-8, rel=1e-3)


def test_maximize():
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale.paper([w], lr=0.1, eps=0, maximize=True)
    opt.backward(-0.5 * (w * w).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.9], dtype=torch.float64))


def test_maximize_with_weight_decay_is_the_negated_loss_with_a_penalty():
    w, v = (torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    up, down = AdaHesScale.paper([w], lr=0.1, weight_decay=0.3, maximize=True), AdaHesScale.paper([v], lr=0.1)
    for _ in range(3):
        up.zero_grad()
        down.zero_grad()
        up.backward(w.sin().sum())
        down.backward(-v.sin().sum() + 0.15 * (v * v).sum())
        up.step()
        down.step()
    torch.testing.assert_close(w, v)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [AdaHesScale, Adam])
def test_foreach_changes_nothing(optimizer, foreach):
    model, other = make_model(), make_model()
    train(model, paper(optimizer)(model.parameters(), lr=0.01, trust_radius=1e-3, foreach=foreach))
    train(other, paper(optimizer)(other.parameters(), lr=0.01, trust_radius=1e-3))
    assert_same(model, [p.detach() for p in other.parameters()])


@pytest.mark.parametrize("case", [(0, 1.0, 0.0), (1e-16, 1e4, 0.0), (1e-8, 1e12, 0.0)])
def test_zero_curvature_does_not_affect_other_weights(case):
    """U is infinite where V is zero, and 0·∞ must not affect η."""
    eps, gradient, curvature = case
    w = weight(size=2, dtype=torch.float32)
    opt = AdaHesScale.paper([w], lr=1, eps=eps, trust_radius=1e-3)
    w.grad, w.hess_diag = torch.tensor([gradient, 1.0]), torch.tensor([curvature, 1.0])
    opt.step()
    assert w.isfinite().all()
