"""Algorithm 3: η, one trust region or one per group, and the fraction of steps that it shortens."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from training import assert_same, make_model, paper, pseudocode, train, weight

from hesscale.optim import AdaHesScale, AdaHesScaleGN, Adam, adapt_trust_radius


@pytest.mark.parametrize(("optimizer", "squares"), [(AdaHesScale, "curvature"), (AdaHesScaleGN, "curvature"), (Adam, "gradient")])
@pytest.mark.parametrize("radius", [1e-4, 1e-2])
def test_algorithm_3_and_scaled_adam(optimizer, squares, radius):
    model = make_model()
    reference, etas = pseudocode(copy.deepcopy(model), optimizer.method, 0.05, radius=radius, squares=squares)
    opt = paper(optimizer)(model.parameters(), lr=0.05, trust_radius=radius)
    train(model, opt)
    assert_same(model, reference)
    assert any(eta < 1 for eta in etas) == (radius == 1e-4)
    torch.testing.assert_close(opt.eta[0], torch.tensor(etas[-1], dtype=torch.float64))
    assert float(opt.scaled_share[0]) == pytest.approx(sum(eta < 1 for eta in etas) / len(etas))


def test_eta_by_hand():
    """One weight 1 with L = ½ w², α = 0.5: U = 0.5, h = 0.25, so Δ = 0.02 gives η = √(0.04/0.25) = 0.4."""
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale.paper([w], lr=0.5, eps=0, trust_radius=0.02)
    opt.backward(0.5 * (w * w).sum())
    opt.step()
    torch.testing.assert_close(opt.eta[0], torch.tensor(0.4, dtype=torch.float64))
    torch.testing.assert_close(w.detach(), torch.tensor([0.8], dtype=torch.float64))


def test_without_bias_correction_the_region_is_measured_by_the_raw_average():
    w = torch.ones(1, dtype=torch.float64, requires_grad=True)
    opt = AdaHesScale.paper([w], lr=0.5, eps=0, trust_radius=1e-3, bias_correction=False)
    opt.backward(0.5 * (w * w).sum())
    opt.step()
    h = math.sqrt(0.001) * 0.25  # √V = √((1 − β₂) 1²)
    torch.testing.assert_close(opt.eta[0], torch.tensor(math.sqrt(2e-3 / h), dtype=torch.float64))


def test_one_region_per_group():
    a, b = (torch.full((1,), value, dtype=torch.float64, requires_grad=True) for value in (1.0, 1.0))
    opt = AdaHesScale.paper([{"params": [a]}, {"params": [b]}], lr=0.5, eps=0, trust_radius=0.02, trust_region="group")
    opt.backward((0.5 * a * a + 50 * b * b).sum())
    opt.step()
    torch.testing.assert_close(torch.stack(opt.eta), torch.tensor([0.4, 0.04], dtype=torch.float64))
    assert opt.scaled_share == {0: 1, 1: 1}


def test_one_optimizer_has_one_radius():
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    groups = [{"params": [a], "trust_radius": 1.0}, {"params": [b], "trust_radius": 2.0}]
    with pytest.raises(ValueError, match="trust_region='group'"):
        AdaHesScale.paper(groups)
    AdaHesScale.paper(groups, trust_region="group")


def test_one_optimizer_keeps_one_radius():
    """A radius that differs later, or in a state that is loaded, is refused before a step is made."""
    p, q = (torch.ones(1, requires_grad=True) for _ in range(2))
    groups = [{"params": [p]}, {"params": [q]}]
    optimizer = AdaHesScale.paper(groups, lr=0.5, trust_radius=1e-6)
    optimizer.param_groups[0]["trust_radius"] = 1e3
    optimizer.backward((p**2 + q**2).sum())
    with pytest.raises(ValueError, match="one trust region has one trust_radius"):
        optimizer.step()
    assert (p, q) == (1, 1)
    saved = AdaHesScale.paper(copy.deepcopy(groups), trust_region="group").state_dict()
    saved["param_groups"][1]["trust_radius"] = 1e-3
    with pytest.raises(ValueError, match="one trust region has one trust_radius"):
        AdaHesScale.paper(groups).load_state_dict(saved)


def test_each_group_measures_with_its_own_decay_rates():
    def etas(order):
        a, b = (torch.ones(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
        groups = [{"params": [a], "betas": (0.9, 0.5)}, {"params": [b], "betas": (0.9, 0.999), "bias_correction": False}]
        opt = AdaHesScale.paper(groups[::order], lr=0.5, eps=0, trust_radius=1e-4)
        for scale in (1, 3):
            opt.zero_grad()
            opt.backward((0.5 * scale * a * a + 5 * scale * b * b).sum())
            opt.step()
        return opt.eta[0]

    torch.testing.assert_close(etas(1), etas(-1))


def test_groups_without_a_step_keep_their_scaled_share():
    a, b = weight(), weight()
    opt = AdaHesScale.paper([{"params": [a]}, {"params": [b]}], lr=0.5, eps=0, trust_radius=1e-3, trust_region="group")
    for parts in ([a], [a, b], [b]):
        opt.zero_grad()
        opt.backward(sum((part**2).sum() for part in parts))
        opt.step()
        assert [eta is not None for eta in opt.eta] == [any(part is each for part in parts) for each in (a, b)][: len(opt.eta)]
    assert [int(opt.counters[f"measured {region}"]) for region in (0, 1)] == [2, 2]


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


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize(
    ("measured", "factor"), [(0.02, 0.5), (0.005, 2.0), (0.008, 1.25), (1.0, 0.25), (0.0, 4.0), (-1e-9, 4.0), (math.inf, 0.25)]
)
def test_a_radius_adapts_to_a_measured_change(measured, factor, is_tensor):
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    radius = torch.tensor(1e-3) if is_tensor else 1e-3
    opt = AdaHesScale.paper([{"params": [a]}, {"params": [b]}], trust_radius=radius, trust_region="group")  # one tensor for both
    adapt_trust_radius(opt.param_groups[:1], measured, target=0.01, max_factor=4.0)
    radii = [group["trust_radius"] for group in opt.param_groups]
    assert float(radii[0]) == pytest.approx(factor * 1e-3)
    assert radii[1] is radius
    assert float(radius) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measured": math.nan}, "measured=nan"),
        ({"target": 0.0}, "target=0.0"),
        ({"max_factor": 0.5}, "max_factor=0.5"),
    ],
)
def test_adapt_trust_radius_refuses_invalid_arguments(options, message):
    opt = AdaHesScale.paper([torch.ones(1, requires_grad=True)], trust_radius=1e-3)
    with pytest.raises(ValueError, match=message):
        adapt_trust_radius(opt.param_groups, **{"measured": 0.1, "target": 0.1, **options})
    opt = AdaHesScale.paper([torch.ones(1, requires_grad=True)])
    with pytest.raises(ValueError, match="no trust_radius to adapt"):
        adapt_trust_radius(opt.param_groups, 0.1, 0.1)
