"""Steps with non-finite numbers change nothing; they are counted, and reported unless told otherwise."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import batches, make_model, train, weight

import hesscale
from hesscale.optim import AdaHesScale


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


def test_the_error_names_the_parameters():
    model = make_model()
    named, unnamed = AdaHesScale(model.named_parameters()), AdaHesScale(model.parameters())
    for opt, name in ((named, "2.weight"), (unnamed, "parameter 2 of group 0")):
        opt.zero_grad()
        opt.backward(model(torch.ones(1, 4, dtype=torch.float64)).square().sum())
        model[2].weight.grad[0, 0] = math.nan
        with pytest.raises(hesscale.NonFiniteError, match=rf"is not finite \(grad of {name}\)\. The step was skipped"):
            opt.step()


def test_a_long_list_of_parameters_is_cut():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)])
    opt = AdaHesScale(model.named_parameters())
    opt.backward(model(torch.full((1, 2), math.nan)).square().sum())
    found = r"\(grad and hess_diag of 0.weight, grad of 0.bias, grad and hess_diag of 1.weight, and 3 more\)"
    with pytest.raises(hesscale.NonFiniteError, match=found):
        opt.step()


def test_a_square_that_overflows_counts_as_not_finite():
    w = weight(dtype=torch.float32)
    opt = AdaHesScale([w], lr=0.1)
    w.grad, w.hess_diag = torch.ones(1), torch.full((1,), 1e25)
    with pytest.raises(hesscale.NonFiniteError):
        opt.step()
    assert w.hess_diag is None


def test_the_step_after_a_skipped_first_step_equals_a_first_step():
    """Curvature stays due until a step has used it, so that no later step divides by zero."""
    model = make_model()
    opt = AdaHesScale(model.parameters(), curvature_every=3, on_nonfinite="skip")
    opt.backward(model(torch.full((1, 4), math.nan, dtype=torch.float64)).square().sum())
    opt.step()
    assert opt.is_curvature_due
    train(model, opt, 4)
    assert all(p.isfinite().all() for p in model.parameters())


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


def bad_step(opt, w):
    opt.zero_grad()
    opt.backward((w * math.nan).square().sum())
    opt.step()


def test_without_nonfinite_errors_counts_but_never_reports():
    w = weight()
    opt = AdaHesScale([w])
    with opt.without_nonfinite_errors():
        bad_step(opt, w)
    assert (opt.nonfinite_steps, opt.on_nonfinite) == (1, "raise")
    train_one(opt, w)
    with pytest.raises(hesscale.NonFiniteError):
        bad_step(opt, w)


def train_one(opt, w):
    opt.zero_grad()
    opt.backward((w**2).sum())
    opt.step()


@pytest.mark.parametrize("report", [True, False])
def test_compiled_steps_are_reported_where_asked_for(report):
    """A graph counts a non-finite step in place, and leaves it to the optimizer to report."""
    w = weight()
    opt = AdaHesScale([w], trust_radius=1.0)
    train_one(opt, w)
    eta = torch.tensor(0.5)
    opt.record_compiled_step([eta], report=report)
    assert opt.eta == [eta]
    assert opt.param_groups[0]["step_count"] == 2
    opt.counters["nonfinite"] += 1
    with pytest.raises(hesscale.NonFiniteError) if report else contextlib.nullcontext():
        opt.record_compiled_step([eta], report=report)
    opt.record_compiled_step([eta])
    assert opt.nonfinite_steps == 1
    assert opt.param_groups[0]["step_count"] == 3  # a step that was left out does not count


def test_counts_of_a_saved_run_are_not_reported_again():
    w = weight()
    opt = AdaHesScale([w])
    train_one(opt, w)
    opt.counters["nonfinite"].fill_(5)
    opt.acknowledge_nonfinite_steps()
    train_one(opt, w)
    opt.record_compiled_step([])
    with pytest.raises(hesscale.NonFiniteError):
        bad_step(opt, w)
    assert opt.nonfinite_steps == 6


@pytest.mark.parametrize("make", [AdaHesScale, AdaHesScale.paper, hesscale.Adam])
def test_steps_on_a_cpu_do_not_call_cuda(make, monkeypatch):
    """A torch that was built for CUDA, on a machine without a driver: asking whether a graph is captured is an error there."""

    def insufficient_driver():
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", insufficient_driver)
    model = make_model()
    train(model, make(model.parameters(), lr=0.01), count=3)
