"""What a hostile reader found in optimizers, capture and estimators, each as small as it can be said."""

from __future__ import annotations

import asyncio
import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from oracle import hessian_diagonal
from test_optim import OURS, assert_same, batches, make_model, train
from torch import nn

import hesscale
from hesscale.estimators import estimate
from hesscale.optim import GGNMC, AdaHesScale, AdaHessian, Adam


def weight(value=1.0, size=1, dtype=torch.float64):
    return torch.full((size,), value, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHessian, GGNMC])
def test_our_own_passes_are_not_captured_again(optimizer):
    model, other = make_model(), make_model()
    x, y = next(batches(1))
    one, two = (optimizer(m.parameters(), generator=torch.Generator().manual_seed(0)) if optimizer is not AdaHesScale
                else optimizer(m.parameters()) for m in (model, other))  # fmt: skip
    with hesscale.capture(one):
        one.backward(F.cross_entropy(model(x), y))
        one.backward(F.cross_entropy(model(x), y))
    two.backward(F.cross_entropy(other(x), y))
    two.backward(F.cross_entropy(other(x), y))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert torch.equal(p.hess_diag, q.hess_diag)


def test_a_step_that_raises_leaves_no_scale_behind():
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


@pytest.mark.parametrize("options", [{"head": "Exact"}, {"fallback": "exakt"}])
def test_unknown_choices_are_refused(options):
    opt = AdaHesScale([weight()])
    with pytest.raises(ValueError, match=next(iter(options))):
        opt.backward((opt.param_groups[0]["params"][0] ** 2).sum(), **options)
    with pytest.raises(TypeError, match="typo"), hesscale.capture(opt, typo=1):
        pass


def test_groups_that_take_no_part_keep_their_own_share():
    a, b = weight(), weight()
    opt = AdaHesScale([{"params": [a]}, {"params": [b]}], lr=0.5, eps=0, trust_radius=1e-3, trust_region="group")
    for parts in ([a], [a, b], [b]):
        opt.zero_grad()
        opt.backward(sum((part**2).sum() for part in parts))
        opt.step()
        assert [eta is not None for eta in opt.eta] == [any(part is each for part in parts) for each in (a, b)][: len(opt.eta)]
    assert [int(opt.counters[f"measured {region}"]) for region in (0, 1)] == [2, 2]


@pytest.mark.parametrize("optimizer", OURS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_go_on_training(optimizer, how):
    model = make_model()
    opt = optimizer(model.parameters(), lr=0.01, trust_radius=1e-3, curvature_every=2)
    train(model, opt, 3)
    twin, other = how((model, opt))
    state = torch.get_rng_state()
    train(model, opt, 3)
    torch.set_rng_state(state)
    train(twin, other, 3)
    assert_same(twin, [p.detach() for p in model.parameters()])


def test_counters_keep_counting_in_bfloat16():
    w = weight(dtype=torch.bfloat16)
    opt = AdaHesScale([w], lr=0.01)
    opt.backward((w**2).sum())
    opt.step()
    opt.state[w]["curvature_step"].fill_(300)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.backward((w**2).sum())
    opt.step()
    assert float(opt.state[w]["curvature_step"]) == 301


@pytest.mark.parametrize("case", [(0, 1.0, 0.0), (1e-16, 1e4, 0.0), (1e-8, 1e12, 0.0)])
def test_zero_curvature_never_ruins_the_other_weights(case):
    """U is infinite where nothing is known, and 0·∞ must not reach η."""
    eps, gradient, curvature = case
    w = weight(size=2, dtype=torch.float32)
    opt = AdaHesScale([w], lr=1, eps=eps, trust_radius=1e-3)
    w.grad, w.hess_diag = torch.tensor([gradient, 1.0]), torch.tensor([curvature, 1.0])
    opt.step()
    assert w.isfinite().all()


def test_a_square_that_overflows_counts_as_not_finite():
    w = weight(dtype=torch.float32)
    opt = AdaHesScale([w], lr=0.1)
    w.grad, w.hess_diag = torch.ones(1), torch.full((1,), 1e25)
    with pytest.raises(hesscale.NonFiniteError):
        opt.step()
    assert w.hess_diag is None


def test_decoupled_decay_keeps_its_digits_under_a_trust_region():
    w = weight()
    opt = AdaHesScale([w], lr=1e-4, weight_decay=1e-4, decoupled_weight_decay=True, trust_radius=1e-30)
    opt.backward((w**2).sum())
    opt.step()
    assert float(1 - w) == pytest.approx(1e-8, rel=1e-3)


def test_two_captured_optimizers_may_not_share_a_parameter():
    w = weight()
    with pytest.raises(ValueError, match="share a parameter"), hesscale.capture(AdaHesScale([w]), AdaHesScale([w])):
        pass


def test_capture_survives_another_patch():
    original = torch.autograd.backward
    w = weight()
    opt = AdaHesScale([w])
    calls = []
    with hesscale.capture(opt):
        ours = torch.autograd.backward

        def wrapper(*args, **options):
            calls.append(1)
            ours(*args, **options)

        torch.autograd.backward = wrapper
        (w**2).sum().backward()
    assert torch.autograd.backward is wrapper
    (w**2).sum().backward()
    with hesscale.capture(opt):
        (w**2).sum().backward()
    torch.autograd.backward = original
    assert len(calls) >= 3
    assert w.hess_diag is not None


def test_blocks_may_close_in_any_order():
    async def job(opt, w, first: float, second: float):
        with hesscale.capture(opt):
            await asyncio.sleep(first)
            opt.zero_grad()
            (w**2).sum().backward()
            await asyncio.sleep(second)
        return w.hess_diag is not None

    async def both():
        a, b = weight(), weight()
        return await asyncio.gather(job(AdaHesScale([a]), a, 0, 0), job(AdaHesScale([b]), b, 0.05, 0))

    original = torch.autograd.backward
    assert asyncio.run(both()) == [True, True]
    assert torch.autograd.backward is original


def test_states_of_other_optimizers():
    w = weight()
    theirs = torch.optim.Adam([w], lr=0.5)
    (w**2).sum().backward()
    theirs.step()
    ours = Adam([w], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert float(ours.state[w]["step"]) == 2
    curvature = AdaHesScale([w])
    curvature.backward((w**2).sum())
    curvature.step()
    w.grad = torch.ones(1, dtype=torch.float64)
    wrong = Adam([w])
    wrong.load_state_dict(curvature.state_dict())
    with pytest.raises(RuntimeError, match="exp_avg_sq"):
        wrong.step()


def test_a_trust_radius_may_come_later():
    w = weight()
    opt = Adam([w], lr=0.1)
    opt.backward((w**2).sum())
    opt.step()
    opt.param_groups[0]["trust_radius"] = 1e-3
    opt.zero_grad()
    opt.backward((w**2).sum())
    opt.step()
    assert opt.eta[0] is not None


def test_an_error_with_a_scaler_loses_nothing():
    w = weight(dtype=torch.float32)
    opt = AdaHesScale([w])
    scaler = torch.amp.GradScaler("cpu")
    opt.backward((w**2).sum(), scaler=scaler)
    before = w.hess_diag.clone()
    with pytest.raises(hesscale.UnsupportedOperator):
        opt.backward(torch.linalg.eigvalsh(w * torch.eye(2)).sum(), scaler=scaler)
    assert torch.equal(w.hess_diag, before)


def test_parameters_without_room_are_refused():
    with pytest.raises(ValueError, match="float16"):
        AdaHesScale([weight(dtype=torch.float16)])
    with pytest.raises(ValueError, match="betas"):
        AdaHesScale([{"params": [weight()], "betas": (1.0, 1.0)}])
    opt = AdaHesScale([w := weight()])
    w.grad, w.hess_diag = torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shape"):
        opt.step()


def test_a_loss_without_its_parameters_does_nothing():
    opt = AdaHessian([weight()])
    opt.backward((weight() ** 2).sum())
    opt.step()


@pytest.mark.parametrize("name", ["exact", "ggn", "ggn_mc", "hesscale"])
def test_estimates_of_a_single_number(name):
    """A temperature: 0-d, and a leaf of the head."""
    torch.manual_seed(0)
    scale, z = torch.tensor(0.7, dtype=torch.float64, requires_grad=True), torch.randn(4, 3, dtype=torch.float64)
    loss = F.cross_entropy(nn.Linear(3, 3, dtype=torch.float64)(z) * scale, torch.tensor([0, 1, 2, 0]))
    (got,) = estimate(name, loss, [scale], retain_graph=True)
    torch.testing.assert_close(got, hessian_diagonal(loss, scale))


def test_a_small_softmax_beside_a_large_square_is_not_lost():
    """float32: the actor's curvature is a thousandth of the critic's."""
    torch.manual_seed(0)
    actor, critic, x = nn.Linear(4, 3), nn.Linear(4, 1), torch.randn(16, 4)
    advantage = 2e-3 * torch.rand(16)
    log_prob = F.log_softmax(actor(x), 1)[torch.arange(16), torch.arange(16) % 3]
    loss = -(log_prob * advantage).mean() + 0.5 * F.mse_loss(critic(x).squeeze(1), torch.ones(16))
    params = [actor.weight, critic.weight]
    truth = estimate("ggn", loss, params, retain_graph=True)
    generator = torch.Generator().manual_seed(0)
    drawn = estimate("ggn_mc", loss, params, num_samples=4000, generator=generator, retain_graph=True)
    for mine, exact in zip(drawn, truth, strict=True):
        assert float((mine - exact).abs().sum() / exact.abs().sum()) < 0.2


def test_a_log_likelihood_has_negative_curvature():
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 3, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    loss = F.log_softmax(layer(x), 1).mean()
    (truth,) = estimate("ggn", loss, [layer.weight], retain_graph=True)
    (drawn,) = estimate(
        "ggn_mc", loss, [layer.weight], num_samples=4000, generator=torch.Generator().manual_seed(0), retain_graph=True
    )
    assert (truth < 0).all()
    assert float((drawn - truth).abs().sum() / truth.abs().sum()) < 0.2


def test_saving_is_weights_only():
    model = make_model()
    opt = AdaHesScale(model.parameters(), trust_radius=1e-3)
    train(model, opt, 2)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    assert not math.isnan(float(torch.load(buffer, weights_only=True)["state"][0]["curvature_step"]))
