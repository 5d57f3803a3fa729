"""Loops that call loss.backward() themselves."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from training import assert_same, batches, make_model, train, weight

import hesscale
from hesscale.optim import GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

ORIGINAL = torch.autograd.backward


@pytest.fixture(autouse=True)
def _undone():
    yield
    assert torch.autograd.backward is ORIGINAL


def plain_loop(model, optimizer, count=10, backward=lambda loss: loss.backward()):
    """A training loop without code for curvature."""
    for x, y in batches(count):
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), y))
        optimizer.step()


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss])])
@pytest.mark.parametrize("options", [{}, {"trust_radius": 1e-3}, {"curvature_every": 3}])
@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHesScaleGN, Adam])
def test_a_captured_loop_equals_one_of_ours(optimizer, options, backward):
    model, other = make_model(), make_model()
    opt = optimizer(model.parameters(), lr=0.01, **options)
    with hesscale.capture(opt):
        plain_loop(model, opt, backward=backward)
    train(other, optimizer(other.parameters(), lr=0.01, **options), 10)
    assert_same(model, [p.detach() for p in other.parameters()])


def test_random_estimates_are_captured_too():
    model, other = make_model(), make_model()
    opt, theirs = (AdaHessian(m.parameters(), lr=0.01, generator=torch.Generator().manual_seed(3)) for m in (model, other))
    with hesscale.capture(opt):
        plain_loop(model, opt)
    train(other, theirs, 10)
    assert_same(model, [p.detach() for p in other.parameters()])


def test_only_parameters_of_captured_optimizers_receive_curvature():
    actor, critic, bystander = make_model(), make_model(), make_model()
    one, two = AdaHesScale(actor.parameters()), AdaHesScaleGN(critic.parameters())
    x, y = next(batches(1))
    with hesscale.capture(one, two):
        (F.cross_entropy(actor(x), y) + critic(x).square().mean() + bystander(x).exp().mean()).backward()
    (expected,) = hesscale.grad(F.cross_entropy(actor(x), y), actor[0].weight)[1]
    torch.testing.assert_close(actor[0].weight.hess_diag, expected)
    (expected,) = hesscale.grad(critic(x).square().mean(), critic[0].weight, method="hesscale_gn")[1]
    torch.testing.assert_close(critic[0].weight.hess_diag, expected)
    assert all(p.grad is not None and getattr(p, "hess_diag", None) is None for p in bystander.parameters())
    one.step()
    two.step()


def test_losses_without_captured_parameters_are_unchanged():
    """Not even an operator without a rule matters where no captured parameter is."""
    model, other = make_model(), make_model()
    opt = AdaHesScale(model.parameters())
    x, _ = next(batches(1))
    with hesscale.capture(opt):
        torch.linalg.solve(torch.eye(3, dtype=x.dtype) + other(x[:3]), torch.ones(3, dtype=x.dtype)).sum().backward()
    assert all(getattr(p, "hess_diag", None) is None for p in [*model.parameters(), *other.parameters()])


def test_other_ways_to_call_backward_still_work():
    model = make_model()
    opt = AdaHesScale(model.parameters())
    x, _ = next(batches(1))
    with hesscale.capture(opt):
        model(x).backward(torch.ones(6, 3, dtype=x.dtype))
        model(x).sum().backward(create_graph=True)
        model(x).sum().backward(inputs=[model[0].weight])
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert model[0].weight.hess_diag is not None


def test_blocks_nest():
    first, second = make_model(), make_model()
    one, two = AdaHesScale(first.parameters()), AdaHesScale(second.parameters())
    x, y = next(batches(1))
    with hesscale.capture(one):
        with hesscale.capture(two):
            (F.cross_entropy(first(x), y) + F.cross_entropy(second(x), y)).backward()
        assert first[0].weight.hess_diag is not None
        assert second[0].weight.hess_diag is not None
        two.zero_grad()
        F.cross_entropy(second(x), y).backward()
        assert second[0].weight.hess_diag is None


def test_undone_on_error():
    opt = AdaHesScale(make_model().parameters())
    with pytest.raises(KeyError), hesscale.capture(opt):
        raise KeyError


def test_other_threads_are_not_captured():
    model = make_model()
    opt = AdaHesScale(model.parameters())
    x, y = next(batches(1))
    with hesscale.capture(opt):
        thread = threading.Thread(target=lambda: F.cross_entropy(model(x), y).backward())
        thread.start()
        thread.join()
    assert model[0].weight.grad is not None
    assert getattr(model[0].weight, "hess_diag", None) is None


def test_blocks_of_two_threads_that_overlap():
    """Each thread's loop computes curvature, whichever block closes first."""
    models = [make_model() for _ in range(2)]
    inside, errors = threading.Barrier(2), []

    def work(model, count):
        try:
            opt = AdaHesScale(model.parameters(), lr=0.01)
            with hesscale.capture(opt):
                inside.wait()
                plain_loop(model, opt, count)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(model, count)) for model, count in zip(models, (3, 12), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model, count in zip(models, (3, 12), strict=True):
        reference = make_model()
        train(reference, AdaHesScale(reference.parameters(), lr=0.01), count)
        assert_same(model, [p.detach() for p in reference.parameters()])


def test_gradient_scaler_that_unscales_first():
    model, other = make_model(torch.float32), make_model(torch.float32)
    opt = AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with hesscale.capture(opt, scaler=scaler):
        for x, y in batches(5, torch.float32):
            opt.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(opt)
            scaler.update()
    train(other, AdaHesScale(other.parameters(), lr=0.01), 5, torch.float32)
    assert_same(model, [p.detach() for p in other.parameters()], rtol=1e-4, atol=1e-6)


def test_only_our_optimizers_are_taken():
    with pytest.raises(TypeError, match=r"hesscale\.optim"), hesscale.capture(torch.optim.Adam(make_model().parameters())):
        pass


@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHessian, GGNMC])
def test_our_own_passes_are_not_captured_again(optimizer):
    def run(model, block):
        options = {} if optimizer is AdaHesScale else {"generator": torch.Generator().manual_seed(0)}
        opt = optimizer(model.parameters(), **options)
        with hesscale.capture(opt) if block else contextlib.nullcontext():
            for _ in range(2):
                opt.backward(F.cross_entropy(model(x), y))

    x, y = next(batches(1))
    model, other = make_model(), make_model()
    run(model, block=True)
    run(other, block=False)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert torch.equal(p.hess_diag, q.hess_diag)


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


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="typo"), hesscale.capture(AdaHesScale([weight()]), typo=1):
        pass
