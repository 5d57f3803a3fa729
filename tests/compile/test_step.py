"""A compiled step equals the eager step: for the model, for the optimizer, and in case of errors."""

from __future__ import annotations

import copy
import functools
import gc
import warnings

import numpy as np
import pytest
import torch
from steps import (
    CLOSE,
    Convolutional,
    ada,
    batches,
    check_eager,
    check_equal,
    check_training,
    cross_entropy,
    has_compiler,
    mlp,
    mse,
    tensors_of,
    train,
    two_of,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.compile import dynamo
from hesscale.errors import CompileWarning, NonFiniteError

pytestmark = pytest.mark.usefixtures("double_precision")

# ---------------------------------------------------------------------------------------------------------------- optimizers


def grouped(params, **options):
    params = list(params)
    return ada([{"params": params[:2]}, {"params": params[2:], "lr": 0.02, "trust_radius": 1e-3}], **options)


OPTIMIZERS = {
    "AdaHesScale": ada,
    "AdaHesScale, trust radius": lambda p: ada(p, trust_radius=1e-4),
    "AdaHesScaleGN": lambda p: hesscale.AdaHesScaleGN(p, lr=0.01),
    "BL89": lambda p: hesscale.BL89(p, lr=0.01, eps=1e-3),
    "Adam": lambda p: hesscale.Adam(p, lr=0.01),
    "Adam, trust radius": lambda p: hesscale.Adam(p, lr=0.01, trust_radius=1e-4),
    "AdaHessian": lambda p: hesscale.AdaHessian(p, lr=0.01),
    "GGNMC": lambda p: hesscale.GGNMC(p, lr=0.01, num_samples=16),
    "curvature every 3": lambda p: ada(p, curvature_every=3),
    "curvature warms up": lambda p: ada(p, curvature_warmup=5, curvature_every=2, trust_radius=1e-4),
    "weight decay": lambda p: ada(p, weight_decay=0.1),
    "decoupled weight decay": lambda p: ada(p, weight_decay=0.1, decoupled_weight_decay=True),
    "groups": lambda p: grouped(p, trust_radius=1e-4, trust_region="group"),
    "maximize": lambda p: ada(p, lr=0.001, maximize=True),
    "one by one": lambda p: ada(p, foreach=False),
    "eps 0, no bias correction": lambda p: ada(p, eps=0.0, trust_radius=1e-4, bias_correction=False),
    "curvature in bfloat16": lambda p: ada(p, curvature_dtype=torch.bfloat16),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "torch Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "torch Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "torch SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "torch RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "torch ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=2),
}


ALIKE = {  # run as others of the table do
    *("AdaHesScale", "AdaHesScaleGN", "Adam", "weight decay", "maximize", "one by one", "eps 0, no bias correction"),
    *("torch Adam, amsgrad", "torch AdamW", "torch SGD", "torch RMSprop"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in OPTIMIZERS])
def test_every_optimizer_equals_its_eager_mode(name):
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if "bfloat16" in name else CLOSE
    step = check_training(mlp(), batches(20), OPTIMIZERS[name], **tolerance)
    assert all(p.grad is None and getattr(p, "hess_diag", None) is None for p in step.model.parameters())


@pytest.mark.parametrize("name", ["groups", "AdaHessian", "curvature every 3", "torch Adam"])
def test_again_equals_normal_steps(name):
    eager, other = two_of(mlp(), OPTIMIZERS[name])
    data = [*batches(8), *batches(3, size=5), *batches(4)]
    expected = train(eager, data)
    torch.manual_seed(2)
    torch.testing.assert_close([other.again(*batch) for batch in data], expected, **CLOSE)
    check_equal(eager, other)
    assert other.mode == "traced"


def test_again_does_not_check_for_changes():
    step = hesscale.compile_step(model := mlp(), cross_entropy, optimizer := ada(model.parameters()), backend="traced")
    train(step, batches(4))
    step.again(*batches(1)[0])
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    step.again(*batches(1)[0])
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    before = copy.deepcopy(model.state_dict())
    step(*batches(1)[0])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_again_without_a_graph_runs_the_current_step(monkeypatch):
    monkeypatch.setattr(dynamo, "MAX_GRAPHS", 1)
    (model := mlp()).scale = 1.0
    eager, other = two_of(model, loss_fn=lambda model, x, y: model.scale * cross_entropy(model, x, y))
    for step, again in ((eager, eager), (other, other.again)):
        train(step, batches(3))
        step.model.scale = 3.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(*batches(1)[0])
            again(*batches(1)[0])
    check_equal(eager, other)


def test_eta_is_that_of_the_step():
    eager, other = two_of(mlp(), OPTIMIZERS["groups"])
    for step in (eager, other):
        train(step, batches(5))
    torch.testing.assert_close(other.optimizer.eta, eager.optimizer.eta, **CLOSE)
    torch.testing.assert_close(other.optimizer.scaled_share, eager.optimizer.scaled_share)


# ------------------------------------------------------------------------------------------------------- networks and losses


class Tied(nn.Module):
    """Embedding, encoder layer, and the embedding's weights once more."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.decoder = nn.Linear(4, 3)
        self.decoder.weight = self.embedding.weight

    def forward(self, y):
        return self.decoder(self.encoder(self.embedding(y.view(2, -1)))).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.cells, self.out = kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.cells(x.reshape(-1, 2, 4))[0]).flatten(0, 1)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log_std = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return Normal(self.mean(x), self.log_std.exp())


def ppo(model, x, actions, old, advantages):
    ratio = (model(x).log_prob(actions).sum(1) - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def with_entropy(model, x, y):
    policy = Categorical(logits=model(x))
    return -policy.log_prob(y).mean() - 0.1 * policy.entropy().mean()


def in_bfloat16(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("loss_fn", [cross_entropy, mse, with_entropy], ids=lambda f: f.__name__)
def test_losses(loss_fn):
    check_training(mlp(), batches(10), loss_fn=loss_fn)


@pytest.mark.parametrize("network", [Convolutional, Recurrent, lambda: Recurrent(nn.LSTM)], ids=["convolutional", "GRU", "LSTM"])
def test_networks(network):
    check_training(network(), batches(10))


def test_a_transformer_with_tied_weights_and_dropout():
    check_training(Tied(), batches(10), loss_fn=lambda model, _, y: F.cross_entropy(model(y), y), rtol=1e-4, atol=1e-5)


def test_a_loss_whose_head_is_exact_by_double_backward():
    data = [(x, torch.randn(8, 3), torch.full((8,), -4.0), torch.randn(8)) for x, _ in batches(10)]
    check_training(Policy(), data, loss_fn=ppo)


@pytest.mark.parametrize("make", [torch.optim.Adam, pytest.param(hesscale.AdaHessian, marks=pytest.mark.slow)])
def test_recurrent_layers_are_traced_by_their_operators(make):
    """In float32 on a CPU, they are one fused operator, whose workspace a graph cannot contain."""
    model = Recurrent(functools.partial(nn.LSTM, num_layers=2, dropout=0.3)).float()
    data = [(x.float(), y) for x, y in batches(4)]
    check_training(model, data, lambda p: make(p, lr=1e-2), rtol=1e-3, atol=1e-4)
    assert torch.backends.mkldnn.enabled


def test_double_precision_is_kept():
    check_training(nn.Linear(4, 3), batches(10), rtol=1e-11, atol=1e-11)


def test_autocast_inside_the_loss():
    data = [(x.float(), y) for x, y in batches(10)]
    check_training(mlp().float(), data, loss_fn=in_bfloat16, rtol=2e-2, atol=1e-3)


def test_autocast_around_the_step():
    eager, other = two_of(mlp().float())
    data = [(x.float(), y) for x, y in batches(6)]
    for step in (eager, other):
        train(step, data[:3])
        for batch in data[3:]:
            with torch.autocast("cpu", torch.bfloat16):  # which keeps the weights that it has cast to its end
                step(*batch)
    check_equal(eager, other, rtol=2e-2, atol=1e-3)
    assert other.compilations == 2


def test_parametrizations():
    norm = nn.utils.parametrizations
    check_training(nn.Sequential(norm.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), norm.weight_norm(nn.Linear(6, 3))), batches(6))


# ---------------------------------------------------------------------------------------------------- the compiler, in earnest


@has_compiler
@pytest.mark.parametrize("make", [lambda p: ada(p, trust_radius=1e-3), torch.optim.Adam], ids=["ours", "torch's"])
def test_compiled_steps(make):
    """Batch norm, dropout, schedules and loading work as in eager mode."""
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))
    eager, other = two_of(model, make, backend="inductor")
    saved = {}
    for step in (eager, other):
        scheduler = lr_scheduler.StepLR(step.optimizer, 10, 0.5)
        torch.manual_seed(2)
        for i, batch in enumerate(batches(60)):
            step(*batch)
            scheduler.step()
            if i == 20:
                saved[step] = copy.deepcopy((step.model.state_dict(), step.optimizer.state_dict()))
            if i == 30:
                step.model.load_state_dict(saved[step][0])
                step.optimizer.load_state_dict(saved[step][1])
    check_equal(eager, other)
    assert (other.mode, other.compilations) == ("compiled", 1)


def test_without_a_compiler_the_graph_runs_as_it_is(monkeypatch):
    def cannot(*_):
        raise RuntimeError("No working C++ compiler found\nand more")

    monkeypatch.setattr("hesscale.compile.program.compile_graph", cannot)
    eager, other = two_of(mlp(), backend="inductor")
    train(eager, batches(4))
    torch.manual_seed(2)
    with pytest.warns(CompileWarning, match="No working C\\+\\+ compiler found") as record:
        [other(*batch) for batch in batches(4)]
    assert record[0].filename == __file__
    check_equal(eager, other)
    assert other.mode == "traced"
    assert "and more" not in other.reason


# ------------------------------------------------------------------------------------------------- what changes between steps


class Averaging(nn.Module):
    """Replaces its buffers instead of changing them, and holds a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))
        self.scale = torch.tensor(2.0)

    def forward(self, x):
        h = self.layers(x)
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        self.average, self.other = self.other, self.average
        return self.scale * h + self.average


def test_buffers_that_the_model_replaces():
    check_training(Averaging(), batches(10))


def test_a_buffer_that_is_the_batch_does_not_write_into_the_batch():
    class Remembering(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = mlp()
            self.register_buffer("last", torch.zeros(8, 4))

        def forward(self, x):
            h = self.layers(x + self.last)
            self.last = x
            return h

    data = batches(6)
    before = copy.deepcopy(data)
    step = check_training(Remembering(), data)
    torch.testing.assert_close(data, before)
    torch.testing.assert_close(step.model.last, data[-1][0])


def test_new_batch_sizes_and_back():
    data = [batches(1, size)[0] for size in (8, 8, 8, 5, 5, 5, 8, 5, 8)]
    step = check_training(Convolutional(), data)
    assert step.compilations == 2


def test_strides_are_part_of_the_signature():
    data = [(torch.randn(4, 8).T, y) if i % 2 else (x, y) for i, (x, y) in enumerate(batches(8))]
    assert check_training(mlp(), data).compilations == 2


def test_training_and_evaluation_mode():
    def each(step, i):
        step.model.train(i % 6 < 3)

    assert check_training(Convolutional(), batches(18), each=each).compilations == 2


def test_changed_attributes_of_modules_are_noticed():
    def each(step, i):
        step.model.layers[3].p = 0.1 if i < 5 else 0.5

    assert check_training(Convolutional(), batches(12), each=each).compilations == 2


def test_a_layer_is_frozen_and_unfrozen():
    def each(step, i):
        step.model[0].requires_grad_(not 3 <= i < 7)

    assert check_training(mlp(), batches(12), each=each).compilations == 2


def test_a_layer_is_replaced():
    def each(step, i):
        if i == 4:
            step.model[1] = nn.Sigmoid()

    check_training(mlp(), batches(10), each=each)


def test_a_group_is_added():
    def make(params):
        return ada(list(params)[:2])

    def each(step, i):
        if i == 4:
            step.optimizer.add_param_group({"params": list(step.model[2].parameters()), "lr": 0.1})

    check_training(mlp(), batches(10), make, each=each)


class Remembering(nn.Module):
    """The stored tensor is an input."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(7, 3), None

    def forward(self, x):
        result = torch.tanh(self.layer(torch.cat([x, x.new_zeros(len(x), 3) if self.last is None else self.last], 1)))
        self.last = result.detach()
        return result


def test_a_state_that_is_sometimes_deleted():
    def each(step, i):
        if i % 4 == 3:
            step.model.last = None

    eager, other = two_of(Remembering())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first step after that cannot be traced
        expected, found = train(eager, batches(19), each), train(other, batches(19), each)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert (other.compilations, other.mode) == (2, "traced")


class Twins(nn.Module):
    """Two buffers in one memory, the first of which changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", self.a[:])

    def forward(self, x):
        h = self.layer(x)
        self.a.mul_(0.5).add_(h.detach().mean())
        return h * self.b


def test_buffers_that_share_memory_are_not_compiled():
    model = Twins()
    step = hesscale.compile_step(model, cross_entropy, ada(model.parameters()))
    with pytest.warns(CompileWarning, match="share memory with others, which its code would change in another order"):
        train(step, batches(3))
    assert step.mode == "traced"


def test_existing_gradients_are_cleared():
    step = two_of(mlp())[1]
    train(step, batches(3))
    hesscale.backward(cross_entropy(step.model, *batches(1)[0]))
    train(step, batches(1))
    assert step.mode == "traced"
    assert all(p.grad is None and p.hess_diag is None for p in step.model.parameters())


def test_hooks_of_all_optimizers():
    calls = []
    step = two_of(mlp())[1]
    train(step, batches(3))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        with pytest.warns(CompileWarning, match="hooks"):
            train(step, batches(2))
    finally:
        handle.remove()
    assert len(calls) == 2
    train(step, batches(2))
    assert step.mode == "traced"


def test_hooks_of_all_modules():
    eager, other = two_of(mlp())
    for step in (eager, other):
        train(step, batches(3))
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: 0.5 * output)
        try:
            train(step, batches(3))
        finally:
            handle.remove()
        train(step, batches(3))
    check_equal(eager, other)


def test_a_generator_that_is_set_later():
    step = two_of(mlp(), hesscale.AdaHessian)[1]
    train(step, batches(3))
    generator = step.optimizer.generator = torch.Generator()
    before = generator.get_state()
    with pytest.warns(CompileWarning, match="generator"):
        train(step, batches(1))
    assert not torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("make", [ada, torch.optim.SGD])
def test_the_model_changes_its_dtype(make):
    def loss_fn(model, x, y):
        return cross_entropy(model, x.to(model[0].weight.dtype), y)

    eager, other = two_of(mlp(), make, loss_fn)
    for step in (eager, other):
        train(step, batches(4))
        step.model.float()
        step.optimizer.state.clear()
        assert step(*batches(1)[0]).dtype == torch.float32
        assert step.mode == "eager"
        train(step, batches(4))
    check_equal(eager, other, rtol=1e-4, atol=1e-5)
    assert other.mode == "traced"


@pytest.mark.parametrize("make", [ada, lambda p: ada(p, trust_radius=1e-3), torch.optim.Adam, torch.optim.SGD])
def test_schedulers_need_no_new_graph(make):
    schedulers = {}

    def each(step, i):
        if i == 0:
            schedulers[step] = lr_scheduler.StepLR(step.optimizer, 2, 0.9)
        else:
            schedulers[step].step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()" too
        step = check_training(mlp(), batches(20), make, each=each)
    assert step.compilations == 1
    assert step.optimizer.param_groups[0]["lr"] < 0.9 * step.optimizer.defaults["lr"]


@pytest.mark.parametrize("make", [ada, torch.optim.Adam], ids=["ours", "torch's"])
def test_a_schedule_of_betas_too(make):
    """Options become arguments when they first change."""
    schedulers = {}

    def each(step, i):
        if i == 0:
            schedulers[step] = lr_scheduler.OneCycleLR(step.optimizer, 0.1, total_steps=30)
        else:
            schedulers[step].step()

    step = check_training(mlp(), batches(20), make, each=each)
    assert step.compilations == 1
    assert step.optimizer.param_groups[0]["betas"][0] != 0.9


def test_a_step_size_of_numpy():
    def each(step, i):
        step.optimizer.param_groups[0]["lr"] = np.float32(0.01 * 0.9**i)

    assert check_training(mlp(), batches(20), each=each).compilations == 1


def test_an_option_of_torchs_optimizers_that_changes():
    step = two_of(mlp(), lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1))[1]
    train(step, batches(3))
    step.optimizer.param_groups[0]["weight_decay"] = 0.2
    with pytest.warns(CompileWarning, match=r"perhaps because weight_decay changed"):
        train(step, batches(3))


def test_a_scheduler_made_after_the_first_steps():
    step = two_of(mlp())[1]
    train(step, batches(3))
    scheduler = lr_scheduler.StepLR(step.optimizer, 1)
    train(step, batches(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_step_size_that_is_a_tensor():
    def each(step, i):
        step.optimizer.param_groups[0]["lr"].fill_(0.01 + 0.01 * i)

    step = check_training(mlp(), batches(8), lambda p: ada(p, lr=torch.tensor(0.01)), each=each)
    assert step.compilations == 1


def test_options_change():
    def each(step, i):
        group = step.optimizer.param_groups[0]
        group.update(trust_radius=1e-3 / (1 + i), eps=1e-8 * (1 + i // 4), weight_decay=0.01 * (i // 6))
        group["curvature_warmup"] = 12 if i == 9 else 2

    step = check_training(mlp(), batches(20), lambda p: ada(p, trust_radius=1e-2), each=each)
    assert step.compilations <= 4


@pytest.mark.parametrize("make", [ada, lambda p: grouped(p, trust_region="group")])
def test_a_trust_region_is_added_and_removed(make):
    def each(step, i):
        step.optimizer.param_groups[0]["trust_radius"] = (None, 1e-3)[i // 4 % 2]

    step = check_training(mlp(), batches(18), make, each=each)
    groups = step.optimizer.param_groups
    assert [eta.numel() for eta in step.optimizer.eta] == [1] * (len(groups) if len(groups) > 1 else 0)


def test_one_region_with_two_radii_is_refused():
    model = mlp()
    groups = [{"params": list(layer.parameters())} for layer in (model[0], model[2])]
    optimizer = ada(groups, trust_radius=1e-3)
    step = hesscale.compile_step(model, cross_entropy, optimizer, backend="traced")
    for radius in (1e-3, 2e-3):  # an argument of the graph from the second on
        for group in optimizer.param_groups:
            group["trust_radius"] = radius
        train(step, batches(3))
    assert step.mode == "traced"
    optimizer.param_groups[1]["trust_radius"] = 1e3
    with pytest.raises(ValueError, match="one trust region has one trust_radius"):
        step(*batches(1)[0])


def test_options_in_lists():
    def each(step, i):
        step.optimizer.param_groups[0]["betas"][0] = 0.5 if i > 4 else 0.9

    check_training(mlp(), batches(12), lambda p: ada(p, betas=[0.9, 0.99]), each=each)


def test_a_resumed_run_equals_an_uninterrupted_one():
    data = batches(12)
    whole, first, second = (two_of(Convolutional(), lambda p: ada(p, curvature_every=3))[1] for _ in range(3))
    second.model.load_state_dict(first.model.state_dict())
    whole.model.load_state_dict(first.model.state_dict())
    for step in (whole, first, second):
        step.model.layers[3].p = 0.0
    train(second, batches(5))
    train(whole, data)
    train(first, data[:7])
    state = first.optimizer.state_dict()
    state["state"] = {i: dict(reversed(entries.items())) for i, entries in reversed(state["state"].items())}
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(state))
    train(second, data[7:])
    found, expected = tensors_of(second), tensors_of(whole)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, check_dtype=False, **CLOSE)


def test_a_state_that_is_emptied():
    def each(step, i):
        if i in (4, 8):
            step.optimizer.state.clear()

    check_training(mlp(), batches(12), lambda p: ada(p, eps=1e-2), each=each)


# ---------------------------------------------------------------------------------------------------------------- the batch


def test_batches_of_dicts_and_constants():
    def loss_fn(model, batch, factor, nothing, *, kinds=(None,)):
        assert nothing in kinds
        return factor * F.cross_entropy(model(batch["x"]), batch["y"])

    data = [({"x": x, "y": y}, 2 if i < 5 else 3, None) for i, (x, y) in enumerate(batches(10))]
    assert check_training(mlp(), data, loss_fn=loss_fn).compilations == 2


def test_true_and_1_are_different_constants():
    def loss_fn(model, x, y, flag):
        return cross_entropy(model, x, y) * (1 if flag is True else 2)

    check_training(mlp(), [(x, y, True if i % 2 else 1) for i, (x, y) in enumerate(batches(8))], loss_fn=loss_fn)


def test_nan_is_always_the_same_constant():
    def ignoring(model, x, y, _):
        return cross_entropy(model, x, y)

    data = [(x, y, float("nan")) for x, y in batches(4)]
    assert check_training(mlp(), data, loss_fn=ignoring).compilations == 1


def test_many_kinds_of_batches():
    """Numbers that change at every step are no arguments: eager mode, and a warning."""

    def loss_fn(model, x, y, factor):
        return factor * cross_entropy(model, x, y)

    eager, other = two_of(mlp(), loss_fn=loss_fn)
    data = [(x, y, 1 + i / 100) for i, (x, y) in enumerate(batches(30))]
    train(eager, data)
    with pytest.warns(CompileWarning, match="pass numbers that change as tensors") as record:
        train(other, data)
    assert len(record) == 1
    check_equal(eager, other)
    assert other.compilations <= dynamo.MAX_GRAPHS
    train(other, [data[-1]] * 40)  # graphs of long ago have given way
    assert (other.mode, other.reason) == ("traced", "")


@pytest.mark.parametrize(
    ("change", "loss_fn", "saying"),
    [
        (lambda x: x.requires_grad_(), cross_entropy, "requires a gradient"),
        (lambda x: x.to_sparse(), lambda m, x, y: cross_entropy(m, x.to_dense(), y), "sparse"),
        (
            lambda x: torch.complex(x, x).conj(),
            lambda m, x, y: cross_entropy(m, x.imag, y),
            "conjugated",
        ),
    ],
    ids=["requires grad", "sparse", "conjugated"],
)
def test_batches_that_no_graph_can_take(change, loss_fn, saying):
    check_eager(mlp(), [(change(x), y) for x, y in batches(4)], saying, loss_fn)


# --------------------------------------------------------------------------------------------- what cannot be traced, and why

FACTOR, NOISE, ARRAY = torch.tensor(2.0), torch.zeros(8, 3), np.ones((8, 3))
LOOKS = "reads the values"


def branching(model, x, y):
    loss = cross_entropy(model, x, y)
    return 2 * loss if loss > 1 else loss


CANNOT = {
    "control flow": (branching, "Data-dependent branching"),
    "item": (lambda m, x, y: cross_entropy(m, x, y) * x.sum().item(), LOOKS),
    "numpy of the batch": (lambda m, x, y: cross_entropy(m, x, y) * float(np.sum(x.numpy())), LOOKS),
    "masked": (lambda m, x, y: m(x)[y > 0].square().sum(), "shape of one of its tensors"),
    "outside, item": (lambda m, x, y: cross_entropy(m, x, y) * FACTOR.item(), LOOKS),
    "outside, list": (lambda m, x, y: cross_entropy(m, x, y) * FACTOR.tolist(), "tolist"),
    "outside, numpy": (lambda m, x, y: cross_entropy(m, x, y) * FACTOR.numpy().item(), LOOKS),
    "outside, condition": (lambda m, x, y: cross_entropy(m, x, y) * (2 if FACTOR > 1 else 1), "Data-dependent branching"),
    "generator": (lambda m, x, y: cross_entropy(m, x + torch.randn(x.shape, generator=torch.Generator()), y), "TorchDynamo"),
    "print": (lambda m, x, y: (print("step"), cross_entropy(m, x, y))[1], "TorchDynamo"),
}
CAN = {
    "a tensor from outside": lambda m, x, y: cross_entropy(m, x, y) * FACTOR.to(x),
    "a matrix from outside": lambda m, x, y: F.mse_loss(m(x), NOISE.to(x)),
    "an array": lambda m, x, y: F.mse_loss(m(x), torch.tensor(ARRAY)),
    "an array, shared": lambda m, x, y: F.mse_loss(m(x), torch.from_numpy(ARRAY)),
}


@pytest.mark.parametrize("name", CAN)
def test_global_tensors_are_inputs(name):
    check_training(mlp(), batches(5), loss_fn=CAN[name])


def test_batches_of_arrays():
    data = [(x.numpy(), y) for x, y in batches(5)]
    check_training(mlp(), data, loss_fn=lambda m, x, y: cross_entropy(m, torch.from_numpy(x), y))


@pytest.mark.parametrize("name", CANNOT)
def test_steps_that_cannot_be_traced_run_in_eager_mode(name):
    loss_fn, saying = CANNOT[name]
    check_eager(mlp(), batches(5), saying, loss_fn)


def dropped(model, x):
    return checkpoint(lambda w: F.dropout(w, 0.5) ** 2, model[0], use_reentrant=False).sum() * x


def seeded(model, x):
    torch.manual_seed(7)
    return (F.dropout(model[0], 0.5) ** 2).sum() * x


@pytest.mark.parametrize(
    ("loss_fn", "saying"),
    [(dropped, "it uses activation checkpoints"), (seeded, "manual_seed")],
)
def test_steps_that_set_the_state_of_a_generator_run_in_eager_mode(loss_fn, saying):
    """The loss is ½ g·w, if forward and backward pass have the same masks."""
    model = nn.ParameterList([torch.ones(16)])
    step = hesscale.compile_step(model, loss_fn, torch.optim.SGD(model.parameters(), lr=1 / 16), backend="traced")

    def check():
        before = model[0].detach().clone()
        value = step(torch.tensor(1.0))
        assert value == pytest.approx(float(((before - model[0].detach()) * 16 * before).sum() / 2))
        assert step.mode == "eager"
        assert saying in step.reason

    with pytest.warns(CompileWarning, match=saying):
        check()
    check()


def test_checkpoints_without_random_numbers():
    def loss_fn(model, x, y):
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    check_eager(mlp(), batches(4), "it uses activation checkpoints", loss_fn)


def test_global_tensors_are_not_constants():
    factor = torch.tensor(1.0)

    def each(step, i):
        factor.fill_(1.0 + i)

    eager, other = two_of(mlp(), loss_fn=lambda m, x, y: cross_entropy(m, x, y) * factor.item())
    train(eager, batches(6), each)
    factor.fill_(1.0)
    with pytest.warns(CompileWarning):
        train(other, batches(6), each)
    check_equal(eager, other)


def test_the_reason_for_eager_mode_is_correct():
    """An empty parameter leaves the head to be found out by eager steps, again and again."""

    class Odd(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.empty = nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return super().forward(x) + self.empty.sum()

    step = two_of(Odd())[1]
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        train(step, batches(130))
    (found,) = record
    assert "again and again" not in str(found.message)


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_step_hooks(kind):
    calls = []

    def make(params):
        optimizer = ada(params)
        getattr(optimizer, f"register_step_{kind}_hook")(lambda *_: calls.append(1))
        return optimizer

    check_eager(mlp(), batches(4), "step hooks", make=make)
    assert len(calls) == 8


def test_hooks_of_the_model():
    eager, other = two_of(mlp())
    for step in (eager, other):
        train(step, batches(4))
        step.model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            train(step, batches(4))
    assert "hooks" in str(record[0].message)
    check_equal(eager, other)


def test_an_optimizer_with_a_generator():
    def make(params):
        return hesscale.AdaHessian(params, lr=0.01, generator=torch.Generator().manual_seed(0))

    check_eager(mlp(), batches(4), "generator", make=make)


class Counting(torch.optim.SGD):
    """Keeps the number of its steps as a number."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.grad.div_(count)
        super().step()


def test_a_custom_optimizer():
    check_eager(mlp(), batches(5), "your own code", make=lambda p: Counting(p, lr=0.1))


class Keeping(nn.Module):
    """Stores a tensor of its forward pass."""

    def __init__(self, keep):
        super().__init__()
        self.layers, self.keep, self.kept = mlp(), keep, None
        self.history = []

    def forward(self, x):
        h = self.layers(x)
        self.keep(self, h.detach())
        return h


class Box:
    kept = None


@pytest.mark.parametrize(
    "keep",
    [
        lambda module, h: module.log["h"].append(h),
        lambda module, h: module.log.update(x=h),
        lambda module, h: setattr(module.box, "kept", h),
        lambda module, h: setattr(module, "kept", [h]),
    ],
    ids=["list in a dict", "dict", "object", "new list"],
)
def test_models_that_store_tensors(keep):
    """A model stores the same tensors as in eager mode."""
    model = Keeping(keep)
    model.log, model.box, model.kept = {"h": []}, Box(), []
    eager, other = two_of(model)
    train(eager, batches(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a list that grows, each length has its graph
        train(other, batches(4))
    kept = [[*m.kept, *m.log["h"], m.log.get("x"), m.box.kept] for m in (eager.model, other.model)]
    torch.testing.assert_close(*[[t for t in own if t is not None] for own in kept], **CLOSE)
    check_equal(eager, other)


@pytest.mark.parametrize(
    "keep",
    [lambda module, h: setattr(module, "kept", h), lambda module, h: module.register_buffer("new", h)],
    ids=["attribute", "buffer"],
)
def test_tensors_stored_in_the_same_attribute_are_buffers(keep):
    eager, other = two_of(Keeping(keep))
    for step in (eager, other):
        train(step, batches(6))
    check_equal(eager, other)
    torch.testing.assert_close(other.model.kept, eager.model.kept, **CLOSE)
    assert other.mode == "traced"


def test_a_failed_trace_changes_nothing(monkeypatch):
    apply = hesscale.AdaHesScale.apply

    def failing(self, *args):
        is_taken = apply(self, *args)
        if torch.compiler.is_compiling():
            raise RuntimeError("not while tracing")
        return is_taken

    monkeypatch.setattr(hesscale.AdaHesScale, "apply", failing)

    def everything(step):
        model, optimizer = step.model, step.optimizer
        held = [*model.parameters(), *model.buffers(), *optimizer.counters.values(), *optimizer.param_groups[0]["params"]]
        state = [(p, *entries.values()) for p, entries in optimizer.state.items()]
        return [id(tensor) for tensor in held] + [id(tensor) for entries in state for tensor in entries]

    eager, other = two_of(Convolutional())
    train(eager, batches(2))
    other(*batches(2)[0])
    before = everything(other)
    with pytest.warns(CompileWarning, match="not while tracing"):
        train(other, batches(2)[1:])
    assert everything(other) == before


def test_an_exception_in_the_loss_changes_nothing():
    def loss_fn(model, x, y, fails):
        loss = cross_entropy(model, x, y)
        if fails == "value":
            raise KeyError("x")
        return model(x) if fails == "matrix" else loss

    step = two_of(mlp(), loss_fn=loss_fn)[1]
    train(step, [(*batch, "") for batch in batches(4)])
    before = copy.deepcopy(tensors_of(step))
    with pytest.raises(KeyError):
        step(*batches(1)[0], "value")
    with pytest.raises(ValueError, match="must be a scalar"):
        step(*batches(1)[0], "matrix")
    torch.testing.assert_close(tensors_of(step), before, rtol=0, atol=0)
    step(*batches(1)[0], "")
    assert step.mode == "traced"


# --------------------------------------------------------------------------------------------------------- non-finite numbers


@pytest.mark.parametrize("backend", ["eager", "traced"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_nonfinite_step_raises_and_changes_nothing(backend, decay):
    model = mlp()
    optimizer = ada(model.parameters(), trust_radius=1e-2, curvature_every=2, weight_decay=decay)
    step = hesscale.compile_step(model, mse, optimizer, backend=backend)
    data = batches(6)
    train(step, data)
    before = {name: value.clone() for name, value in tensors_of(step).items() if "counter" not in name}
    with pytest.raises(NonFiniteError):
        step(data[0][0] * torch.inf, data[0][1])
    torch.testing.assert_close({name: tensors_of(step)[name] for name in before}, before, rtol=0, atol=0)
    assert optimizer.nonfinite_steps == 1
    assert optimizer.param_groups[0]["step_count"] == 6
    step(*data[0])
    assert optimizer.param_groups[0]["step_count"] == 7


def test_a_nonfinite_step_made_by_again_raises_once():
    step = hesscale.compile_step(model := mlp(), mse, ada(model.parameters()), backend="traced")
    data = batches(4)
    train(step, data)
    for _ in range(2):
        step.again(*data[0])
        with pytest.raises(NonFiniteError):
            step.again(data[0][0] * torch.inf, data[0][1])
    step.again(*data[0])
    assert step.optimizer.nonfinite_steps == 2


@pytest.mark.parametrize("radius", [None, 1e-6])
def test_skipped_steps_are_counted(radius):
    def make(params):
        return ada(params, on_nonfinite="skip", curvature_every=3, weight_decay=0.1, trust_radius=radius)

    data = [(x * torch.inf if i in (5, 6, 11) else x, y) for i, (x, y) in enumerate(batches(20))]
    eager, other = two_of(mlp(), make, mse)
    for step in (eager, other):
        train(step, data)
    check_equal(eager, other)  # with counters
    assert other.optimizer.nonfinite_steps == 3
    assert other.optimizer.param_groups[0]["step_count"] == 17


# -------------------------------------------------------------------------------------------------------------- other models


def test_parameters_that_the_loss_does_not_use():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.unused = mlp(), nn.Linear(3, 3)

        def forward(self, x):
            return self.layers(x)

    for make in (ada, torch.optim.AdamW):
        check_training(Unused(), batches(6), make)


@pytest.mark.filterwarnings("ignore::hesscale.errors.CompileWarning")
def test_sparse_gradients_are_refused():
    model = nn.EmbeddingBag(5, 3, sparse=True)
    step = hesscale.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), ada(model.parameters()), backend="traced")
    for _ in range(3):
        with pytest.raises((RuntimeError, ValueError), match="sparse"):
            step(torch.zeros(8, 2, dtype=torch.long), batches(1)[0][1])


def test_a_model_under_torch_compile():
    model = mlp()
    whole = torch.compile(model, backend="aot_eager")
    step = hesscale.compile_step(whole, cross_entropy, ada(whole.parameters()), backend="traced")
    losses = train(step, batches(1) * 10)
    assert losses[-1] < losses[0]
    assert step.mode == "traced"


def test_a_layer_under_torch_compile():
    plain = mlp()
    parts = copy.deepcopy(plain)
    parts[1] = torch.compile(parts[1], backend="aot_eager")
    steps = [hesscale.compile_step(m, cross_entropy, ada(m.parameters()), backend="traced") for m in (plain, parts)]
    losses = [train(step, batches(5)) for step in steps]
    torch.testing.assert_close(*losses)
    assert steps[1].mode == "traced"


def test_two_steps_on_one_model():
    """An actor and a critic in one module, each with its optimizer, the critic in the actor's loss."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 3), nn.Linear(3, 1)

    def actor_loss(model, x, y):
        return model.critic(model.actor(x).tanh()).square().mean()

    def critic_loss(model, x, y):
        return (model.critic(model.actor(x).detach()) - y.unsqueeze(1)).square().mean()

    model = Both()
    for backend in ("eager", "traced"):
        own = copy.deepcopy(model)
        actor = hesscale.compile_step(own, actor_loss, ada(own.actor.parameters()), backend=backend)
        critic = hesscale.compile_step(own, critic_loss, torch.optim.Adam(own.critic.parameters()), backend=backend)
        for batch in batches(10):
            critic(*batch)
            actor(*batch)
            assert all(p.grad is None for p in own.parameters())
        if backend == "eager":
            expected = own.state_dict()
    torch.testing.assert_close(own.state_dict(), expected, **CLOSE)
    assert (actor.mode, critic.mode) == ("traced", "traced")


def test_gradients_of_other_parameters_are_not_changed():
    model = mlp()
    step = hesscale.compile_step(model, cross_entropy, ada(model[0].parameters()), backend="traced")
    model[2].weight.grad = torch.ones_like(model[2].weight)
    train(step, batches(4))
    torch.testing.assert_close(model[2].weight.grad, torch.ones_like(model[2].weight))


# ------------------------------------------------------------------------------------------------------------- wrong arguments


def test_wrong_arguments():
    model = mlp()
    with pytest.raises(ValueError, match="backend='jit' is not one of 'inductor', 'traced', 'eager'"):
        hesscale.compile_step(model, cross_entropy, ada(model.parameters()), backend="jit")
    with pytest.raises(TypeError, match="no option outputs"):
        hesscale.compile_step(model, cross_entropy, ada(model.parameters()), outputs=None)
    with pytest.raises(TypeError, match="the optimizer must be"):
        hesscale.compile_step(model, cross_entropy, model.parameters())
    with pytest.raises(TypeError, match="LBFGS"):
        hesscale.compile_step(model, cross_entropy, torch.optim.LBFGS(model.parameters()))


def test_options_reach_the_engine():
    model = mlp()
    step = hesscale.compile_step(model, cross_entropy, ada(model.parameters()), backend="traced", head="wrong")
    with pytest.raises(ValueError, match="head='wrong'"):
        step(*batches(1)[0])


# -------------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("backend", ["eager", "traced"])
def test_memory_does_not_grow(backend):
    step = two_of(mlp(), backend=backend)[1]
    train(step, batches(5))
    gc.collect()
    before = len(gc.get_objects())
    train(step, batches(30))
    gc.collect()
    assert len(gc.get_objects()) < before + 30


def test_graphs_of_shapes_seen_once_are_freed():
    step = two_of(mlp())[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)
        for size in range(2, 16):
            train(step, batches(1, size))
    assert step.compilations <= dynamo.MAX_GRAPHS


@pytest.mark.parametrize("frozen", [True, False])
def test_the_head_ends_at_a_frozen_layer_in_a_trace_too(frozen):
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(4, 3), nn.Linear(3, 3).requires_grad_(False)
            self.register_buffer("mixing", torch.randn(3, 3))

        def forward(self, x):
            z = self.layer(x)
            return self.last(z) if frozen else z @ self.mixing

    torch.manual_seed(0)
    check_training(Frozen(), batches(6))
