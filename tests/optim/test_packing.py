"""Small parameters share one tensor per average: the numbers must be those of parameters that are updated one by one."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import hesscale
from hesscale.optim import BL89, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "trust": {"trust_radius": 1e-4},
    "no eps": {"eps": 0.0},
    "seldom": {"curvature_every": 3},
    "maximize": {"maximize": True},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (16,), generator=generator)


def train(model: nn.Module, optimizer: hesscale.optim.CurvatureOptimizer, steps: range) -> None:
    for i in steps:
        x, y = batch(i)
        optimizer.zero_grad()
        torch.manual_seed(i)  # AdaHessian draws
        optimizer.backward(F.cross_entropy(model(x), y))
        optimizer.step()


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", [AdaHesScale, AdaHesScaleGN, BL89, Adam, AdaHessian])
def test_the_numbers_are_those_of_single_parameters(kind, options):
    packed, single = network(), network()
    optimizer = kind(packed.parameters(), lr=0.01, **options)
    train(packed, optimizer, range(7))
    train(single, kind(single.parameters(), lr=0.01, foreach=False, **options), range(7))
    assert optimizer.is_packed
    assert_same(packed, single)


def test_groups_are_packed_separately():
    models = [network(), network()]
    for model, foreach in zip(models, (None, False), strict=True):
        groups = [{"params": model[:2].parameters(), "lr": 0.1}, {"params": model[2:].parameters(), "weight_decay": 0.1}]
        optimizer = AdaHesScale(groups, lr=0.01, trust_radius=1e-3, foreach=foreach)
        train(model, optimizer, range(5))
    assert_same(*models)


def test_a_parameter_without_a_gradient_lags_behind():
    """Its counters differ from then on, so that one counter is not enough for the group."""
    models = [network(), network()]
    for model, foreach in zip(models, (None, False), strict=True):
        optimizer = AdaHesScale(model.parameters(), lr=0.01, foreach=foreach)
        train(model, optimizer, range(3))
        x, _ = batch(9)
        optimizer.zero_grad()
        optimizer.backward(model[:3](x).square().mean())  # not the last layer
        optimizer.step()
        train(model, optimizer, range(3, 6))
        steps = [float(optimizer.state[p]["step"]) for p in model.parameters()]
        assert steps == [7, 7, 7, 7, 6, 6]
    assert_same(*models)


def test_state_dicts_hold_a_tensor_per_parameter():
    model, other = network(), network()
    optimizer = AdaHesScale(model.parameters(), lr=0.01)
    train(model, optimizer, range(4))
    saved = optimizer.state_dict()
    for i, p in enumerate(model.parameters()):
        assert saved["state"][i]["exp_avg"].shape == saved["state"][i]["exp_hess_sq"].shape == p.shape
        assert saved["state"][i]["step"].shape == ()
    other.load_state_dict(model.state_dict())
    resumed = AdaHesScale(other.parameters(), lr=0.01)
    resumed.load_state_dict(copy.deepcopy(saved))
    train(model, optimizer, range(4, 8))
    train(other, resumed, range(4, 8))
    assert_same(model, other)


@pytest.mark.parametrize("kind", [AdaHesScale, AdaHesScaleGN, Adam])
def test_a_resumed_run_is_bitwise_equal(kind):
    model, other = network(), network()
    optimizer, resumed = kind(model.parameters()), kind(other.parameters())
    train(model, optimizer, range(20))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for k in range(20, 40):
        train(model, optimizer, range(k, k + 1))
        train(other, resumed, range(k, k + 1))
        assert resumed.is_packed
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_loading_into_a_packed_optimizer_replaces_its_averages():
    model, other = network(), network()
    optimizer = AdaHesScale(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 9))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    train(other, AdaHesScale(other.parameters(), lr=0.01, foreach=False), range(6))
    assert_same(model, other)


def test_an_average_that_is_replaced_is_used():
    model, other = network(), network()
    for net, foreach in ((model, None), (other, False)):
        optimizer = AdaHesScale(net.parameters(), lr=0.01, foreach=foreach)
        train(net, optimizer, range(3))
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        train(net, optimizer, range(3, 6))
    assert_same(model, other)


@pytest.mark.parametrize("name", ["exp_hess_sq", "step", "curvature_step"])
def test_any_entry_that_is_replaced_is_used(name):
    model, other = network(), network()
    for net, foreach in ((model, None), (other, False)):
        optimizer = AdaHesScale(net.parameters(), lr=0.01, foreach=foreach)
        train(net, optimizer, range(3))
        for state in optimizer.state.values():
            state[name] = state[name] * 0 + 5
        train(net, optimizer, range(3, 6))
    assert_same(model, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_copies_do_not_share_state(copied):
    model = network()
    optimizer = AdaHesScale(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    twin, its_optimizer = copied((model, optimizer))
    before = [p.detach().clone() for p in model.parameters()]
    train(twin, its_optimizer, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    train(model, optimizer, range(3, 6))
    assert_same(model, twin)


def test_large_parameters_are_not_packed():
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))
    optimizer = AdaHesScale(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(torch.randn(2, 300)).square().mean())
        optimizer.step()
    assert not optimizer.is_packed


def test_unpacked_state_is_not_packed_again():
    model, other = network(), network()
    optimizer = AdaHesScale(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    optimizer.unpack()
    assert len({state["exp_avg"].untyped_storage().data_ptr() for state in optimizer.state.values()}) == len(optimizer.state)
    train(model, optimizer, range(3, 6))
    assert not optimizer.is_packed
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(6, 7))
    assert not optimizer.is_packed
    train(other, AdaHesScale(other.parameters(), lr=0.01, foreach=False), range(7))
    assert_same(model, other)


def test_a_packed_step_checks_what_it_is_given():
    model = network()
    optimizer = AdaHesScale(model.parameters())
    train(model, optimizer, range(2))
    x, y = batch(2)
    optimizer.backward(F.cross_entropy(model(x), y))
    model[0].weight.hess_diag = model[0].weight.hess_diag.t().contiguous()
    with pytest.raises(RuntimeError, match="hess_diag has shape"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(F.cross_entropy(model(x), y))
    model[0].weight.hess_diag = None
    with pytest.raises(RuntimeError, match="1 of 6 parameters"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(F.cross_entropy(model(x), y))
    before = [p.detach().clone() for p in model.parameters()]
    model[0].weight.grad[0, 0] = torch.inf
    with pytest.raises(hesscale.NonFiniteError):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    assert optimizer.nonfinite_steps == 1


def test_parameters_may_join_a_group():
    model, other = network(), network()
    for net, foreach in ((model, None), (other, False)):
        optimizer = AdaHesScale(net[:2].parameters(), lr=0.01, foreach=foreach)
        train(net, optimizer, range(3))
        optimizer.param_groups[0]["params"] += list(net[2:].parameters())
        train(net, optimizer, range(3, 6))
    assert_same(model, other)


def test_a_trust_region_may_come_later():
    model, other = network(), network()
    for net, foreach in ((model, None), (other, False)):
        optimizer = Adam(net.parameters(), lr=0.01, foreach=foreach)
        train(net, optimizer, range(3))
        optimizer.param_groups[0]["trust_radius"] = 1e-4
        train(net, optimizer, range(3, 6))
    assert_same(model, other)


def test_memory_of_an_average_that_is_replaced_is_used():
    model, other = network(), network()
    for net, foreach in ((model, None), (other, False)):
        optimizer = AdaHesScale(net.parameters(), lr=0.01, foreach=foreach)
        train(net, optimizer, range(3))
        for state in optimizer.state.values():
            state["exp_avg"].data = torch.zeros_like(state["exp_avg"])
        train(net, optimizer, range(3, 6))
    assert_same(model, other)


def test_a_missing_entry_is_recreated():
    model, other = network(), network()
    for net, foreach in ((model, None), (other, False)):
        optimizer = AdaHesScale(net.parameters(), lr=0.01, foreach=foreach)
        train(net, optimizer, range(3))
        for state in optimizer.state.values():
            del state["exp_avg"]
        train(net, optimizer, range(3, 6))
    assert_same(model, other)


def test_step_hooks_run():
    model = network()
    optimizer = AdaHesScale(model.parameters())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, optimizer, range(2))
    assert calls == ["before", "after"] * 2


def test_global_step_hooks_run():
    calls = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        model = network()
        train(model, AdaHesScale(model.parameters()), range(2))
    finally:
        handle.remove()
    assert len(calls) == 2


def test_the_profiler_sees_steps():
    model = network()
    optimizer = AdaHesScale(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(model, optimizer, range(2))
    names = {event.key for event in profiler.key_averages()}
    assert any("Optimizer.step#AdaHesScale" in name for name in names)
    assert any("Optimizer.zero_grad#AdaHesScale" in name for name in names)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model = network()
    optimizer = AdaHesScale(model.parameters())
    x, y = batch(0)
    optimizer.backward(F.cross_entropy(model(x), y))
    optimizer.zero_grad(set_to_none)
    for p in model.parameters():
        assert p.hess_diag is None
        assert p.grad is None if set_to_none else not p.grad.any()
