"""Bounds on the update: damping, clipping, and lengths taken from Adam, by hand and against the formulas written out."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training import assert_same, batches, make_model, train, weight

import hesscale
from hesscale.optim import AdaHesScale, AdaHesScaleGN, Adam

BOUNDS = {
    "damped": {"damping": 0.3},
    "clipped": {"update_clip": 0.7},
    "grafted": {"graft": (1.0, 1.0)},
    "capped": {"graft": (0.0, 1.5)},
    "damped, grafted": {"damping": 0.03, "graft": (1.0, 3.0)},
    "all": {"damping": 0.1, "update_clip": 2.0, "graft": (0.2, 0.5)},
}


def bowl(curvature, **options):
    """The first update of L = ½ Σ a w² at w = 1, divided by the step size: gradient and curvature are both a."""
    a = torch.tensor(curvature, dtype=torch.float64)
    w = weight(size=len(curvature))
    optimizer = AdaHesScale.paper([w], lr=0.1, eps=0)
    optimizer.param_groups[0].update(options)
    optimizer.backward(0.5 * (a * w * w).sum())
    optimizer.step()
    return ((1 - w.detach()) / 0.1).tolist()


def test_damping_by_hand():
    """The mean curvature is 2, so the denominators are 1 + ½·2 and 3 + ½·2."""
    assert bowl([1.0, 3.0], damping=0.5) == pytest.approx([1 / 2, 3 / 4])


def test_clipping_by_hand():
    assert bowl([1.0, 3.0], damping=0.5, update_clip=0.6) == pytest.approx([0.5, 0.6])


def test_a_grafted_update_is_as_long_as_adams_by_hand():
    """Adam's first update is the sign, of length √2. The update (1/2, 3/4) has the length √13/4."""
    factor = 2**0.5 / (13**0.5 / 4)
    assert bowl([1.0, 3.0], damping=0.5, graft=(1.0, 1.0)) == pytest.approx([factor / 2, factor * 3 / 4])


@pytest.mark.parametrize(("graft", "multiple"), [((0.0, 0.1), 0.1), ((0.0, 3.0), 13**0.5 / 4 / 2**0.5), ((2.0, 3.0), 2.0)])
def test_the_length_stays_between_two_multiples_of_adams_by_hand(graft, multiple):
    """The update (1/2, 3/4) is 0.64 times as long as Adam's."""
    factor = multiple * 2**0.5 / (13**0.5 / 4)
    assert bowl([1.0, 3.0], damping=0.5, graft=graft) == pytest.approx([factor / 2, factor * 3 / 4])


def written_out(model, method="hesscale", lr=0.01, damping=0.0, update_clip=None, graft=None, count=20):
    """Algorithm 2 with bounds, one parameter at a time."""
    params = list(model.parameters())
    M, V, G = ([torch.zeros_like(p) for p in params] for _ in range(3))
    for t, (x, y) in enumerate(batches(count), start=1):
        gradients, diagonals = hesscale.grad(F.cross_entropy(model(x), y), params, method=method)
        for l, p in enumerate(params):
            M[l] = 0.9 * M[l] + 0.1 * gradients[l]
            V[l] = 0.999 * V[l] + 0.001 * diagonals[l] ** 2
            G[l] = 0.999 * G[l] + 0.001 * gradients[l] ** 2
            first, second = 1 - 0.9**t, 1 - 0.999**t
            root = (V[l] / second).sqrt()
            U = M[l] / first / (root + damping * root.mean() + 1e-8)
            if update_clip is not None:
                U = U.clamp(-update_clip, update_clip)
            adam = M[l] / first / ((G[l] / second).sqrt() + 1e-8)
            if graft is not None:
                relative = float(U.norm() / adam.norm())
                U = U * min(max(relative, graft[0]), graft[1]) / relative
            with torch.no_grad():
                p -= lr * U
    return [p.detach() for p in params]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHesScaleGN])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_bounded_updates_follow_the_formulas(bounds, optimizer, foreach):
    model, other = make_model(), make_model()
    options = {"damping": 0.0, "graft": None, **BOUNDS[bounds]}
    train(model, optimizer(model.parameters(), lr=0.01, foreach=foreach, **options))
    assert_same(model, written_out(other, optimizer.method, **BOUNDS[bounds]))


def test_the_defaults_are_bounded():
    model, other = make_model(), make_model()
    train(model, AdaHesScale(model.parameters(), lr=0.01))
    assert_same(model, written_out(other, damping=0.03, graft=(1.0, 1.0)))


@pytest.mark.parametrize("bounds", BOUNDS)
def test_bounds_in_a_traced_step_and_in_an_ensemble(bounds):
    options = {"damping": 0.0, "graft": None, **BOUNDS[bounds]}
    models = [make_model() for _ in range(2)]
    optimizers = [AdaHesScale(model.parameters(), lr=lr, **options) for model, lr in zip(models, (0.01, 0.02), strict=True)]

    def loss_fn(model, x, y):
        return F.cross_entropy(model(x), y)

    alone = copy.deepcopy(models[0])
    single = hesscale.compile_step(alone, loss_fn, AdaHesScale(alone.parameters(), lr=0.01, **options), backend="traced")
    together = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None, backend="traced")
    for x, y in batches(20):
        single(x, y)
        together(x, y)
    assert (single.mode, together.mode) == ("traced", "traced")
    for model, lr in ((alone, 0.01), (models[0], 0.01), (models[1], 0.02)):
        assert_same(model, written_out(make_model(), lr=lr, **BOUNDS[bounds]))


def test_a_graft_may_have_no_upper_bound():
    model, other = make_model(), make_model()
    train(model, AdaHesScale(model.parameters(), lr=0.01, damping=0.0, graft=(0.0, float("inf"))))
    assert_same(model, written_out(other))


def test_each_group_has_its_own_bounds():
    model = make_model()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    groups = [{"params": first, "graft": (1.0, 1.0)}, {"params": second, "damping": 0.5}]
    train(model, AdaHesScale.paper(groups, lr=0.01), count=1)
    grafted, damped = written_out(make_model(), graft=(1.0, 1.0), count=1), written_out(make_model(), damping=0.5, count=1)
    assert_same(model, grafted[:2] + damped[2:])


def test_the_trust_region_measures_the_bounded_update():
    w = weight()
    optimizer = AdaHesScale([w], lr=0.5, eps=0, damping=0.0, update_clip=0.5, graft=None, trust_radius=0.0002)
    optimizer.backward((0.5 * w * w).sum())
    optimizer.step()  # U = 0.25 and h = 0.0625, so η = √(0.0004/0.0625)
    assert float(optimizer.eta[0]) == pytest.approx(0.08)


def test_weights_without_curvature_move_as_far_as_adam_lets_them():
    """Where the diagonal of a whole tensor is zero, ε alone divides, and the length is bounded."""
    w = weight(size=4)
    optimizer = AdaHesScale([w], lr=0.1)
    optimizer.backward((2 * w).sum())
    with pytest.warns(hesscale.CurvatureWarning, match="zero for every parameter"):
        optimizer.step()
    assert (1 - w.detach()).tolist() == pytest.approx([0.1] * 4)


@pytest.mark.parametrize("options", [{"graft": (1.0, 1.0)}, {"graft": (0.0, 2.0)}, {"graft": (2.0, 3.0)}])
def test_no_step_without_a_gradient(options):
    """0/0 would be the length of nothing relative to nothing."""
    w = weight(size=2)
    optimizer = AdaHesScale([w], lr=0.1, eps=0, **options)
    optimizer.backward((0.5 * (w - 1) ** 2).sum())
    optimizer.step()
    assert w.tolist() == [1.0, 1.0]


def test_bfloat16_lengths_are_measured_in_single_precision():
    w = torch.ones(4096, dtype=torch.bfloat16, requires_grad=True)
    optimizer = AdaHesScale([w], lr=0.5, damping=0.0, graft=(1.0, 1.0))
    optimizer.backward(w.float().square().sum())
    optimizer.step()
    assert w.detach().float().mean() == pytest.approx(0.5, abs=0.01)


def test_states_saved_without_bounds_go_on_without():
    model, other = make_model(), make_model()
    optimizer = AdaHesScale.paper(model.parameters(), lr=0.01)
    train(model, optimizer, count=3)
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        for name in ("damping", "update_clip", "graft"):
            del group[name]
    other.load_state_dict(model.state_dict())
    loaded = AdaHesScale(other.parameters())
    loaded.load_state_dict(saved)
    train(model, optimizer)
    train(other, loaded)
    assert_same(other, [p.detach() for p in model.parameters()])


def test_grafting_cannot_be_added_in_the_middle_of_training():
    model = make_model()
    optimizer = AdaHesScale.paper(model.parameters(), lr=0.01)
    train(model, optimizer, count=2)
    optimizer.param_groups[0]["graft"] = (0.0, 3.0)
    with pytest.raises(RuntimeError, match="no exp_avg_sq"):
        train(model, optimizer, count=1)


@pytest.mark.parametrize(
    "options",
    [
        {"damping": -1.0},
        {"damping": float("nan")},
        {"update_clip": 0.0},
        {"graft": (1.0,)},
        {"graft": (2.0, 1.0)},
        {"graft": (0.0, 0.0)},
    ],
)
def test_bounds_out_of_range(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}=.* is out of range"):
        AdaHesScale([weight()], **options)


def test_bounds_on_adam_too():
    model, other = make_model(), make_model()
    train(model, Adam(model.parameters(), lr=0.01, graft=(1.0, 1.0)))
    train(other, Adam(other.parameters(), lr=0.01))
    assert_same(model, [p.detach() for p in other.parameters()])


# --- steps that are far too long ---


def small_cnn():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(1, 8, 3),
        nn.GELU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.GELU(),
    ]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def losses_of(make, count=30):
    model = small_cnn()
    optimizer = make(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 1, 9, 9, generator=generator)
    y = torch.randint(0, 4, (32,), generator=generator)
    found = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_the_paper_jumps_and_warns_once_while_the_default_learns():
    with pytest.warns(hesscale.CurvatureWarning, match="more than 100 times the step size.*graft=") as caught:
        jumping = losses_of(AdaHesScale.paper)
    assert len([w for w in caught if "step size" in str(w.message)]) == 1
    assert max(jumping) > 3 * jumping[0]
    for optimizer in AdaHesScale, AdaHesScaleGN:
        with warnings.catch_warnings():
            warnings.simplefilter("error", hesscale.CurvatureWarning)
            learning = losses_of(optimizer)
        assert max(learning) < 1.1 * learning[0]
        assert learning[-1] < 0.5 * learning[0]


@pytest.mark.parametrize("options", [{"damping": 1.0, "graft": None}, {"damping": 0.0, "graft": (1.0, 1.0)}])
def test_means_and_lengths_of_packed_bfloat16_parameters(options):
    """A sum of thousands of numbers has to be taken in single precision, packed or not."""
    found = []
    for is_packed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(100, 200), nn.Tanh(), nn.Linear(200, 3)).bfloat16()
        before = model[0].weight.detach().float()
        optimizer = AdaHesScale(model.parameters(), lr=0.1, **options)
        if not is_packed:
            optimizer.unpack()
        x, y = torch.randn(6, 100).bfloat16(), torch.tensor([0, 1, 2, 0, 1, 2])
        for _ in range(2):
            optimizer.zero_grad()
            optimizer.backward(F.cross_entropy(model(x).float(), y))
            optimizer.step()
        assert optimizer.is_packed == is_packed
        found.append(float((model[0].weight.detach().float() - before).norm()))
    assert found[0] == pytest.approx(found[1], rel=0.02)


def test_squared_gradients_that_missed_steps_are_not_used_again():
    model = make_model()
    optimizer = AdaHesScale(model.parameters(), lr=0.01)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["graft"] = None
    train(model, optimizer, 2)
    optimizer.param_groups[0]["graft"] = (1.0, 3.0)
    with pytest.raises(RuntimeError, match="exp_avg_sq"):
        train(model, optimizer, 1)


def test_scaled_gradients_change_the_length_no_more_than_with_adam():
    """A gradient that is clipped at every step, to a hundredth of its length."""
    lengths = []
    for factor in (1.0, 0.01):
        w = weight(size=3)
        optimizer = AdaHesScale([w], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.backward((torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * w**4).sum())
            w.grad *= factor
            optimizer.step()
        lengths.append(float((1 - w.detach()).norm()))
    assert lengths[1] == pytest.approx(lengths[0], rel=0.05)


def test_parameters_without_entries():
    model = [torch.nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)), weight(size=2)]
    optimizer = AdaHesScale(model, lr=0.1, foreach=False)
    optimizer.backward(sum((w**2).sum() for w in model))
    optimizer.step()
    assert (model[1] < 1).all()


@pytest.mark.parametrize("foreach", [True, False])
def test_an_infinite_entry_is_no_step(foreach):
    """M ⊘ √V overflows in one entry, so the update has no finite length to match with Adam's."""
    weights = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    optimizer = AdaHesScale(weights, lr=1.0, eps=0.0, damping=0.0, graft=(1.0, 1.0), foreach=foreach)
    for _ in range(2):
        for w in weights:
            w.grad, w.hess_diag = torch.tensor([1e17, 1.0]), torch.tensor([1.2e-21, 1.0])
        optimizer.step()
    assert all(w.tolist() == [0.0, 0.0] for w in weights)
