"""Training steps that once went wrong without a word."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.compile.aliasing import overlapping_group
from hesscale.errors import CompileWarning

pytestmark = pytest.mark.usefixtures("double_precision")


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batch():
    torch.manual_seed(0)
    return torch.randn(8, 3), torch.randint(0, 2, (8,))


def test_a_copy_of_an_optimizer_with_a_scheduler_moves_its_own_parameters():
    model, (x, y) = nn.Linear(3, 2), batch()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.1)
    lr_scheduler.StepLR(optimizer, 10)
    other_model, other = copy.deepcopy((model, optimizer))
    before = model.weight.detach().clone()
    other.backward(loss_fn(other_model, x, y))
    other.step()
    assert torch.equal(model.weight, before)
    assert not torch.equal(other_model.weight, before)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1


def dropped(model, x):
    return checkpoint(lambda w: F.dropout(w, 0.5) ** 2, model[0], use_reentrant=False).sum() * x


def seeded(model, x):
    torch.manual_seed(7)
    return (F.dropout(model[0], 0.5) ** 2).sum() * x


@pytest.mark.parametrize("loss", [dropped, seeded])
def test_random_numbers_that_are_drawn_twice_alike_are_not_traced(loss):
    """The loss is ½ g·w, if forward and backward pass have the same masks."""
    model = nn.ParameterList([torch.ones(16)])
    step = hesscale.compile_step(model, loss, torch.optim.SGD(model.parameters(), lr=1 / 16), backend="traced")

    def check():
        before = model[0].detach().clone()
        value = step(torch.tensor(1.0))
        assert value == pytest.approx(float(((before - model[0].detach()) * 16 * before).sum() / 2))

    check()
    with pytest.warns(CompileWarning, match="sets the state that its random numbers come from"):
        check()
    check()
    assert step.mode == "eager"


def test_checkpoints_without_random_numbers_are_traced():
    def loss(model, x, y):
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = hesscale.compile_step(model, loss, hesscale.AdaHesScale(model.parameters()), backend="traced")
    for _ in range(3):
        step(*batch())
    assert step.mode == "traced"


@pytest.mark.parametrize("how", ["vmap", "abreast"])
def test_members_that_load_one_state_do_not_share_it(how):
    model, (x, y) = nn.Linear(3, 2), batch()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_fn(model, x, y))
        optimizer.step()
    saved = optimizer.state_dict()
    models = [copy.deepcopy(model) for _ in range(3)]
    optimizers = [hesscale.AdaHesScale(each.parameters()) for each in models]
    for each in optimizers:
        each.load_state_dict(saved)
    step = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None, how=how, backend="traced")
    for _ in range(3):
        step(x, y)
    assert [o.state[m.weight]["step"].item() for m, o in zip(models, optimizers, strict=True)] == [5.0] * 3
    for other in models[1:]:
        torch.testing.assert_close(other.weight, models[0].weight)


@pytest.mark.parametrize("what", ["state", "weights", "buffers"])
@pytest.mark.parametrize("how", ["vmap", "abreast"])
def test_members_that_share_memory_are_refused(how, what):
    models = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    step = hesscale.func.ensemble(
        models, lambda m, x: m(x).square().mean(), optimizers, batch_dims=None, how=how, backend="traced"
    )
    if what == "state":
        models[0](torch.randn(4, 3)).sum().backward()
        optimizers[0].step()
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    elif what == "weights":
        models[1].weight.data = models[0].weight.data
    else:
        models[1].running_mean = models[0].running_mean
    with pytest.raises(ValueError, match="member 1 shares memory"):
        step(torch.randn(4, 3))


def square(model, x):
    return model(x).square().mean()


def test_which_groups_overlap():
    whole = torch.zeros(10)
    assert overlapping_group([[whole[:5]], [whole[5:]], [torch.zeros(0)]]) is None
    assert overlapping_group([[whole[:6]], [whole[5:]]]) == 1
    assert overlapping_group([[whole, whole[:2]], [torch.zeros(3)]]) is None  # of one group
    assert overlapping_group([[torch.zeros(3)], [whole], [whole[3:4]]]) == 2
    assert overlapping_group([[whole], [whole[2:3]], [whole[8:]]]) in (1, 2)


class Counting(nn.Linear):
    """Has a buffer that is a view of another."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("last", self.counts[-1:])

    def forward(self, x):
        self.counts.add_(1)
        return super().forward(x) * self.last


def test_buffers_that_are_views_of_others_are_not_taken_apart():
    models, (x, y) = [Counting(), Counting()], batch()
    optimizers = [hesscale.AdaHesScale(model.parameters()) for model in models]
    step = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None, backend="traced")
    step(x, y)
    with pytest.warns(CompileWarning, match="tensors of a member share memory"):
        step(x, y)
    step(x, y)
    step(x, y)
    assert (models[0].counts[-1], models[0].last) == (4, 4)


CRITERION = nn.CrossEntropyLoss()


class Tagged(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.tags = []

    def forward(self, x):
        return super().forward(x) * (1 + len(self.tags))


def criterion(model, x, y):
    return CRITERION(model(x), y)


@pytest.mark.parametrize("name", ["a list", "a criterion", "an empty list"])
def test_numbers_that_a_step_must_not_freeze(name, monkeypatch):
    model, (x, y), weights = Tagged(), batch(), [1.0]

    def weighted(model, x, y):
        return weights[0] * F.cross_entropy(model(x), y)

    loss = {"a list": weighted, "a criterion": criterion}.get(name, loss_fn)
    step = hesscale.compile_step(model, loss, hesscale.AdaHesScale(model.parameters(), lr=0.0), backend="traced")
    for _ in range(3):
        before = step(x, y)
    assert step.mode == "traced"
    if name == "a list":
        weights[0] = 100.0
    elif name == "a criterion":
        monkeypatch.setattr(CRITERION, "label_smoothing", 0.9)
    else:
        model.tags.append(1)
    after = step(x, y)
    assert after != before
    torch.testing.assert_close(after, loss(model, x, y).detach())


def test_traced_steps_keep_the_digits_of_double_precision():
    model, (x, y) = nn.Linear(3, 2), batch()
    other = copy.deepcopy(model)
    optimizers = [hesscale.AdaHesScale(each.parameters(), lr=1e-2) for each in (model, other)]
    step = hesscale.compile_step(model, loss_fn, optimizers[0], backend="traced")
    for _ in range(20):
        step(x, y)
        optimizers[1].zero_grad()
        optimizers[1].backward(loss_fn(other, x, y))
        optimizers[1].step()
    assert step.mode == "traced"
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-11, atol=1e-11)


def test_one_region_with_two_radii():
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [p]}, {"params": [q]}]
    optimizer = hesscale.AdaHesScale(groups, lr=0.5, trust_radius=1e-6)
    optimizer.param_groups[0]["trust_radius"] = 1e3
    optimizer.backward((p**2 + q**2).sum())
    with pytest.raises(ValueError, match="one trust region has one trust_radius"):
        optimizer.step()
    assert (p, q) == (1, 1)
    saved = hesscale.AdaHesScale(copy.deepcopy(groups), trust_region="group").state_dict()
    saved["param_groups"][1]["trust_radius"] = 1e-3
    with pytest.raises(ValueError, match="one trust region has one trust_radius"):
        hesscale.AdaHesScale(groups).load_state_dict(saved)


def test_one_region_with_two_radii_in_a_compiled_step():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = hesscale.AdaHesScale(groups, trust_radius=1e-3)
    step = hesscale.compile_step(model, loss_fn, optimizer, backend="traced")
    for radius in (1e-3, 2e-3):  # an argument of the graph from the second on
        for group in optimizer.param_groups:
            group["trust_radius"] = radius
        for _ in range(3):
            step(*batch())
    assert step.mode == "traced"
    optimizer.param_groups[1]["trust_radius"] = 1e3
    with pytest.raises(ValueError, match="one trust region has one trust_radius"):
        step(*batch())


def test_the_true_reason_is_given_for_eager_mode():
    """An empty parameter leaves the head to be found out by eager steps, again and again."""

    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return super().forward(x) + self.empty.sum()

    model = Odd()
    step = hesscale.compile_step(model, loss_fn, hesscale.AdaHesScale(model.parameters()), backend="traced")
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(130):
            step(*batch())
    (found,) = record
    assert "again and again" not in str(found.message)


@pytest.mark.parametrize("how", ["alone", "vmap", "abreast"])
def test_weights_that_wait_are_compared_as_if_they_moved(how, monkeypatch):
    """A compiler that turns their update around is seen, though weights stand still while curvature warms up."""

    def wrong(graph, tensors, options=None):
        def run(*given):
            before = [tensor.clone() for tensor in given[:2]]
            found = graph(*given)
            for tensor, old in zip(given, before, strict=False):
                tensor.copy_(2 * old - tensor)
            return found

        return run

    monkeypatch.setattr("torch._inductor.compile", wrong)
    models = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [hesscale.AdaHesScale(model.parameters(), lr=0.5, curvature_warmup=10) for model in models]
    if how == "alone":
        step = hesscale.compile_step(models[0], loss_fn, optimizers[0])
    else:
        step = hesscale.func.ensemble(models, loss_fn, optimizers, how=how, batch_dims=None)
    step(*batch())
    with pytest.warns(CompileWarning, match="other numbers"):
        step(*batch())
    assert step.mode == "traced"


def test_an_optimizer_pickled_by_a_version_without_warming_up():
    model, (x, y) = nn.Linear(3, 2), batch()
    optimizer = hesscale.AdaHesScale(model.parameters())
    del optimizer.defaults["curvature_warmup"], optimizer.param_groups[0]["curvature_warmup"]
    optimizer.option_names = tuple(optimizer.defaults)
    model, found = copy.deepcopy((model, optimizer))
    found.backward(loss_fn(model, x, y))
    found.step()
    assert found.param_groups[0]["curvature_warmup"] == 0
    assert "curvature_warmup" in found.option_names


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x)[0][:, -1])


@pytest.mark.parametrize("make", [torch.optim.Adam, hesscale.AdaHessian])
def test_recurrent_layers_are_traced_by_their_operators(make):
    """On a CPU they run in one piece, whose workspace a graph cannot hold: the graph raised when it ran."""

    def losses(backend: str) -> list[float]:
        torch.manual_seed(0)
        model = Recurrent()
        optimizer = make(model.parameters(), lr=1e-2)
        step = hesscale.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, backend=backend)
        x, y = torch.randn(8, 5, 4), torch.randint(0, 3, (8,))
        found = [step(x, y).item() for _ in range(5)]
        assert backend == "eager" or step.mode == "traced"
        return found

    assert losses("traced") == pytest.approx(losses("eager"), rel=1e-4)
    assert torch.backends.mkldnn.enabled
