"""The optimizers against the paper's pseudocode, line by line in float64, and as citizens of torch.optim."""

from __future__ import annotations

import copy
import io
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

OURS = [AdaHesScale, AdaHesScaleGN, BL89, Adam, AdaHessian, GGNMC]
DETERMINISTIC = [AdaHesScale, AdaHesScaleGN, BL89]


def make_model(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def batches(count: int, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(6, 4, generator=generator, dtype=dtype), torch.randint(0, 3, (6,), generator=generator)


def train(model, optimizer, count=20, dtype=torch.float64):
    for x, y in batches(count, dtype):
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def assert_same(model, reference, **tolerance):
    for p, q in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(p.detach(), q, **(tolerance or {"rtol": 1e-10, "atol": 1e-12}))


def pseudocode(model, method, alpha, beta1=0.9, beta2=0.999, epsilon=1e-8, radius=None, squares="curvature", count=20, warmup=0):
    """Algorithms 2 and 3 written out, one parameter at a time; ``squares`` says what V averages. Returns weights and every η."""
    W = [p.detach().clone() for p in model.parameters()]
    M, V, C = ([torch.zeros_like(w) for w in W] for _ in range(3))
    etas = []
    for t, (x, y) in enumerate(batches(count), start=1):
        with torch.no_grad():
            for p, w in zip(model.parameters(), W, strict=True):
                p.copy_(w)
        gradients, diagonals = hesscale.grad(F.cross_entropy(model(x), y), list(model.parameters()), method=method)
        U, h = [], 0.0
        for l in range(len(W)):
            S = diagonals[l] if squares == "curvature" else gradients[l]
            M[l] = beta1 * M[l] + (1 - beta1) * gradients[l]
            V[l] = beta2 * V[l] + (1 - beta2) * S**2
            C[l] = beta2 * C[l] + (1 - beta2) * diagonals[l] ** 2
            m_hat, v_hat, c_hat = M[l] / (1 - beta1**t), V[l] / (1 - beta2**t), C[l] / (1 - beta2**t)
            U.append(alpha * (t > warmup) * m_hat / (v_hat.sqrt() + epsilon))
            h += float((c_hat.sqrt() * U[l] ** 2).sum())
        eta = 1.0 if radius is None or h == 0 else min(1.0, math.sqrt(2 * radius / h))
        etas.append(eta)
        W = [w - eta * u for w, u in zip(W, U, strict=True)]
    return W, etas


@pytest.mark.parametrize("optimizer", DETERMINISTIC)
def test_algorithm_2(optimizer):
    model = make_model()
    reference, _ = pseudocode(copy.deepcopy(model), optimizer.method, 0.01)
    train(model, optimizer(model.parameters(), lr=0.01))
    assert_same(model, reference)


@pytest.mark.parametrize(("optimizer", "squares"), [(AdaHesScale, "curvature"), (AdaHesScaleGN, "curvature"), (Adam, "gradient")])
@pytest.mark.parametrize("radius", [1e-4, 1e-2])
def test_algorithm_3_and_scaled_adam(optimizer, squares, radius):
    model = make_model()
    reference, etas = pseudocode(copy.deepcopy(model), optimizer.method, 0.05, radius=radius, squares=squares)
    opt = optimizer(model.parameters(), lr=0.05, trust_radius=radius)
    train(model, opt)
    assert_same(model, reference)
    assert any(eta < 1 for eta in etas) == (radius == 1e-4)
    torch.testing.assert_close(opt.eta[0], torch.tensor(etas[-1], dtype=torch.float64))
    assert float(opt.scaled_share[0]) == pytest.approx(sum(eta < 1 for eta in etas) / len(etas))


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("radius", [None, 1e-4])
@pytest.mark.parametrize(("optimizer", "squares"), [(AdaHesScale, "curvature"), (Adam, "gradient")])
def test_weights_wait_while_curvature_warms_up(optimizer, squares, radius, foreach):
    if optimizer is Adam and radius is None:
        radius = 1e-3  # no curvature otherwise
    count = 7
    how = {"radius": radius, "squares": squares, "warmup": count}
    for steps in (count, count + 1, 20):
        reference, etas = pseudocode(make_model(), optimizer.method, 0.05, count=steps, **how)
        model = make_model()
        opt = optimizer(model.parameters(), lr=0.05, trust_radius=radius, curvature_warmup=count, foreach=foreach)
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


@pytest.mark.parametrize("optimizer", [AdaHessian, GGNMC])
def test_algorithm_2_with_sampled_curvature(optimizer):
    """The same draws, averaged as the pseudocode averages."""
    model, written = make_model(), make_model()
    train(model, optimizer(model.parameters(), lr=0.01, num_samples=2, generator=torch.Generator().manual_seed(5)))
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
    opt = AdaHesScale([w], lr=0.1, eps=0)
    opt.backward(0.5 * (a * w * w).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), 0.9 * start)


def test_eta_by_hand():
    """One weight 1 with L = ½ w², α = 0.5: U = 0.5, h = 0.25, so Δ = 0.02 gives η = √(0.04/0.25) = 0.4."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale([w], lr=0.5, eps=0, trust_radius=0.02)
    opt.backward(0.5 * (w * w).sum())
    opt.step()
    torch.testing.assert_close(opt.eta[0], torch.tensor(0.4, dtype=torch.float64))
    torch.testing.assert_close(w.detach(), torch.tensor([0.8], dtype=torch.float64))


def test_without_bias_correction_the_region_is_measured_by_the_raw_average():
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale([w], lr=0.5, eps=0, trust_radius=1e-3, bias_correction=False)
    opt.backward(0.5 * (w * w).sum())
    opt.step()
    h = math.sqrt(0.001) * 0.25  # √V = √((1 − β₂) 1²)
    torch.testing.assert_close(opt.eta[0], torch.tensor(math.sqrt(2e-3 / h), dtype=torch.float64))


@pytest.mark.parametrize("name", ["curvature_every", "curvature_dtype", "on_nonfinite", "trust_region", "num_samples"])
def test_options_of_the_whole_optimizer_are_no_groups(name):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hesscale.AdaHessian([first])
    with pytest.raises(ValueError, match=f"{name} holds for the whole optimizer"):
        optimizer.add_param_group({"params": [second], name: None})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second], "name": "mine"})


def test_one_region_per_group():
    a, b = (torch.full((1,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 1.0))
    opt = AdaHesScale([{"params": [a]}, {"params": [b]}], lr=0.5, eps=0, trust_radius=0.02, trust_region="group")
    opt.backward((0.5 * a * a + 50 * b * b).sum())
    opt.step()
    torch.testing.assert_close(torch.stack(opt.eta), torch.tensor([0.4, 0.04], dtype=torch.float64))
    assert opt.scaled_share == {0: 1, 1: 1}


def test_one_optimizer_has_one_radius():
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    groups = [{"params": [a], "trust_radius": 1.0}, {"params": [b], "trust_radius": 2.0}]
    with pytest.raises(ValueError, match="trust_region='group'"):
        AdaHesScale(groups)
    AdaHesScale(groups, trust_region="group")


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [AdaHesScale, Adam])
def test_foreach_changes_nothing(optimizer, foreach):
    model, other = make_model(), make_model()
    train(model, optimizer(model.parameters(), lr=0.01, trust_radius=1e-3, foreach=foreach))
    train(other, optimizer(other.parameters(), lr=0.01, trust_radius=1e-3))
    assert_same(model, [p.detach() for p in other.parameters()])


def test_weight_decay_is_an_l2_penalty():
    model, other = make_model(), make_model()
    train(model, AdaHesScale(model.parameters(), lr=0.01, weight_decay=0.3))
    opt = AdaHesScale(other.parameters(), lr=0.01)
    for x, y in batches(20):
        opt.zero_grad()
        opt.backward(F.cross_entropy(other(x), y) + 0.15 * sum((p * p).sum() for p in other.parameters()))
        opt.step()
    assert_same(model, [p.detach() for p in other.parameters()])


def test_decoupled_decay_shrinks_outside_the_update():
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale([w], lr=0.5, eps=0, trust_radius=0.02, weight_decay=0.1, decoupled_weight_decay=True)
    opt.backward(0.5 * (w * w).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.95 - 0.2], dtype=torch.float64))


def test_maximize():
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale([w], lr=0.1, eps=0, maximize=True)
    opt.backward(-0.5 * (w * w).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), torch.tensor([0.9], dtype=torch.float64))


@pytest.mark.parametrize("optimizer", OURS)
def test_state_survives_saving(optimizer):
    """Ten steps, saved and loaded (weights only), and ten more equal twenty in one go."""
    options = {"lr": 0.01, "trust_radius": 1e-3, "curvature_every": 3}
    whole, parts = make_model(), make_model()
    first = optimizer(whole.parameters(), **seeded(optimizer, 0), **options)
    train(whole, first, 20)
    second = optimizer(parts.parameters(), **seeded(optimizer, 0), **options)
    data = list(batches(20))
    run(parts, second, data[:10])
    buffer = io.BytesIO()
    torch.save({"model": parts.state_dict(), "optimizer": second.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed = make_model()
    third = optimizer(resumed.parameters(), **options)
    if hasattr(second, "generator"):
        third.generator = second.generator
    resumed.load_state_dict(saved["model"])
    third.load_state_dict(saved["optimizer"])
    run(resumed, third, data[10:])
    assert_same(resumed, [p.detach() for p in whole.parameters()])


def seeded(optimizer, seed):
    return {"generator": torch.Generator().manual_seed(seed)} if optimizer in (AdaHessian, GGNMC) else {}


def run(model, opt, data):
    for x, y in data:
        opt.zero_grad()
        opt.backward(F.cross_entropy(model(x), y))
        opt.step()


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


def test_a_step_without_curvature_names_the_remedy():
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


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["grad", "hess_diag"])
def test_nonfinite_numbers_never_reach_the_weights(bad, where):
    model = make_model()
    opt = AdaHesScale(model.parameters(), on_nonfinite="skip")
    train(model, opt, 3)
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(opt.state_dict()["state"])
    x, y = next(batches(1))
    opt.backward(F.cross_entropy(model(x), y))
    getattr(model[2].weight, where)[0, 0] = bad
    opt.step()
    assert opt.nonfinite_steps == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for i, entries in opt.state_dict()["state"].items():
        for key, value in entries.items():
            assert torch.equal(value, state[i][key]), key
    opt.zero_grad()
    train(model, opt, 3)
    assert all(p.isfinite().all() for p in model.parameters())


def test_nonfinite_numbers_are_reported_by_default():
    model = make_model()
    opt = AdaHesScale(model.parameters())
    before = copy.deepcopy(model.state_dict())
    opt.backward(model(torch.full((1, 4), math.nan, dtype=torch.float64)).square().sum())
    with pytest.raises(hesscale.NonFiniteError, match="on_nonfinite='skip'"):
        opt.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_zero_curvature_warns_once():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    opt = AdaHesScale(model.parameters())
    for expected in (1, 0):
        opt.backward(F.l1_loss(model(torch.ones(2, 4)), torch.zeros(2, 1)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        assert sum(issubclass(w.category, hesscale.CurvatureWarning) for w in caught) == expected
        opt.zero_grad()


def test_adahessian_averages_over_a_kernels_window():
    p = torch.randn(4, 3, 2, 2)
    averaged = AdaHessian([nn.Parameter(p)], spatial_average=True).prepare(p)
    torch.testing.assert_close(averaged, p.abs().mean((2, 3), keepdim=True).expand(4, 3, 2, 2))
    assert AdaHessian([nn.Parameter(p)]).prepare(p) is p


@pytest.mark.parametrize("optimizer", [AdaHessian, GGNMC])
def test_sampled_curvature_follows_its_generator(optimizer):
    models = [make_model() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        train(model, optimizer(model.parameters(), lr=0.01, generator=torch.Generator().manual_seed(seed)), 5)
    assert torch.equal(models[0][0].weight, models[1][0].weight)
    assert not torch.equal(models[0][0].weight, models[2][0].weight)


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


def test_curvature_that_a_scaler_left_scaled_is_refused():
    model = make_model(torch.float32)
    opt = AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    x, y = next(batches(1, torch.float32))
    hesscale.backward(scaler.scale(F.cross_entropy(model(x), y)))
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="scaler=scaler"):
        scaler.step(opt)


def test_a_scalers_overflow_leaves_the_step_out_quietly():
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


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1},
        {"weight_decay": -1},
        {"trust_radius": 0},
        {"curvature_every": 0},
        {"curvature_every": 1.5},
        {"curvature_warmup": -1},
        {"curvature_warmup": 2.5},
        {"curvature_warmup": True},
        {"curvature_warmup": None},
        {"curvature_warmup": math.inf},
        {"trust_region": "layer"},
        {"on_nonfinite": "ignore"},
    ],
)
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaHesScale([torch.ones(1, requires_grad=True)], **options)


def test_counts_may_be_numpys():
    optimizer = AdaHesScale([torch.ones(1, requires_grad=True)], curvature_every=np.int64(3), curvature_warmup=np.int32(2))
    assert (optimizer.curvature_every, optimizer.param_groups[0]["curvature_warmup"]) == (3, 2)


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="complex"):
        AdaHesScale([torch.ones(1, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(ValueError, match="num_samples"):
        AdaHessian([torch.ones(1, requires_grad=True)], num_samples=0)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([0, 1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        Adam(embedding.parameters()).step()


def test_a_first_step_left_out_is_made_up_for():
    """Curvature stays due until it has arrived, so that no later step divides by nothing."""
    model = make_model()
    opt = AdaHesScale(model.parameters(), curvature_every=3, on_nonfinite="skip")
    opt.backward(model(torch.full((1, 4), math.nan, dtype=torch.float64)).square().sum())
    opt.step()
    assert opt.is_curvature_due
    train(model, opt, 4)
    assert all(p.isfinite().all() for p in model.parameters())


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


def test_maximize_with_weight_decay_is_the_negated_loss_with_a_penalty():
    w, v = (torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    up, down = AdaHesScale([w], lr=0.1, weight_decay=0.3, maximize=True), AdaHesScale([v], lr=0.1)
    for _ in range(3):
        up.zero_grad()
        down.zero_grad()
        up.backward(w.sin().sum())
        down.backward(-v.sin().sum() + 0.15 * (v * v).sum())
        up.step()
        down.step()
    torch.testing.assert_close(w, v)


def test_each_group_measures_with_its_own_decay_rates():
    def etas(order):
        a, b = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
        groups = [{"params": [a], "betas": (0.9, 0.5)}, {"params": [b], "betas": (0.9, 0.999), "bias_correction": False}]
        opt = AdaHesScale(groups[::order], lr=0.5, eps=0, trust_radius=1e-4)
        for scale in (1, 3):
            opt.zero_grad()
            opt.backward((0.5 * scale * a * a + 5 * scale * b * b).sum())
            opt.step()
        return opt.eta[0]

    torch.testing.assert_close(etas(1), etas(-1))
