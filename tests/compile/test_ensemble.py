"""Member k of an ensemble equals a single run of member k."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from steps import has_compiler
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import hesscale
from hesscale.compile.ensemble import HOW
from hesscale.compile.ensemble_program import side_by_side
from hesscale.errors import CompileWarning
from hesscale.func import ensemble as any_ensemble

pytestmark = pytest.mark.usefixtures("double_precision")
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
MEMBERS = 3
slow = pytest.mark.slow
only_abreast = pytest.mark.parametrize("how", ["abreast"], indirect=True)
chosen = {}


def few(table, *kept):
    """Parameters of which only some are in the default run."""
    return [name if name in kept else pytest.param(name, marks=slow) for name in table]


@pytest.fixture(params=HOW, autouse=True)
def how(request, monkeypatch):
    """Every test, in each way to run members together."""
    monkeypatch.setitem(chosen, "how", request.param)
    return request.param


def ensemble(*given, **options):
    return any_ensemble(*given, **{**chosen, **options})


def network():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def ada(params, k=0, **options):
    return hesscale.AdaHesScale(params, **{"lr": 0.01 * (k + 1), "eps": 1e-4, **options})


def data(steps, members=MEMBERS):
    torch.manual_seed(1)
    return [(torch.randn(members, 8, 4), torch.randint(0, 3, (members, 8))) for _ in range(steps)]


class Runs:
    """An ensemble, and eager single runs of copies of its members."""

    def __init__(self, make=ada, members=MEMBERS, network=network, loss_fn=loss_fn, **options):
        self.models = [network() for _ in range(members)]
        copies = copy.deepcopy(self.models)
        self.optimizers = [make(model.parameters(), k) for k, model in enumerate(self.models)]
        self.alone = [make(model.parameters(), k) for k, model in enumerate(copies)]
        self.step = ensemble(self.models, loss_fn, self.optimizers, **{"backend": "traced", **options})
        pairs = zip(copies, self.alone, strict=True)
        self.steps = [hesscale.compile_step(model, loss_fn, optimizer, backend="eager") for model, optimizer in pairs]

    def train(self, batches, each=None, parts=lambda batch, k: [tensor[k] for tensor in batch]):
        for i, batch in enumerate(batches):
            losses = self.step(*batch)
            expected = torch.stack([step(*parts(batch, k)) for k, step in enumerate(self.steps)])
            torch.testing.assert_close(losses, expected, **CLOSE)
            if each is not None:
                each(self.optimizers, i)
                each(self.alone, i)
        return self

    def check(self, mode="traced"):
        for k, step in enumerate(self.steps):
            torch.testing.assert_close(self.models[k].state_dict(), step.model.state_dict(), **CLOSE)
            torch.testing.assert_close(self.optimizers[k].state_dict(), self.alone[k].state_dict(), check_dtype=False, **CLOSE)
        assert self.step.mode == mode, self.step.reason
        return self


OPTIMIZERS = {
    "step sizes": ada,
    "trust radii": lambda p, k: ada(p, trust_radius=10.0 ** -(k + 1)),
    "betas": lambda p, k: ada(p, betas=(0.9 - 0.1 * k, 0.99)),
    "weight decay": lambda p, k: ada(p, weight_decay=0.1 * k, decoupled_weight_decay=True),
    "curvature every 3": lambda p, k: ada(p, k, curvature_every=3),
    "Adam, eps": lambda p, k: hesscale.Adam(p, lr=0.01, eps=10.0**-k),
    "torch Adam": lambda p, k: torch.optim.Adam(p, lr=0.01 * (k + 1)),
    "torch SGD": lambda p, k: torch.optim.SGD(p, lr=0.1 * (k + 1), momentum=0.9),
}


@pytest.mark.parametrize("name", few(OPTIMIZERS, "curvature every 3", "torch Adam"))
def test_members_equal_single_runs(name):
    runs = Runs(OPTIMIZERS[name]).train(data(6)).check()
    assert runs.step.compilations <= 2


@has_compiler
def test_a_compiled_ensemble():
    runs = Runs(
        OPTIMIZERS["trust radii"], network=lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), backend="inductor"
    )
    runs.train(data(5)).check("compiled")


ACTIVATIONS = (
    *(nn.ELU, nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Softplus, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Hardswish, nn.Mish),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid),
)
BETWEEN = {
    "max pooling": lambda: nn.MaxPool2d(2),
    "average pooling": lambda: nn.AvgPool2d(2),
    "batch norm": lambda: nn.BatchNorm2d(3),
    "rows of channels": lambda: nn.Sequential(nn.Flatten(0, 1), nn.Hardtanh(), nn.Unflatten(0, (4, 3))),
}


def convolutional(activation, *between):
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), activation(), *between, nn.Conv2d(3, 3, 2), activation(), nn.Flatten(), nn.LazyLinear(3)
    )


def images(order=torch.contiguous_format):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 2, 5, 5), torch.randint(0, 3, (2, 4))) for _ in range(4)]
    return [(x.to(memory_format=order).unflatten(0, (2, 4)), y) for x, y in batches]


def train_images(activation, between=nn.Identity, order=torch.contiguous_format, **options):
    torch.manual_seed(0)

    def make():
        model = convolutional(activation, between())
        model(images()[0][0][0])
        return model.to(memory_format=order)

    return Runs(lambda p, k: ada(p, k, eps=1e-2), 2, make, **options).train(images(order))


@pytest.mark.parametrize("activation", few(ACTIVATIONS, nn.ELU))
def test_convolutions_with(activation):
    train_images(activation).check()


@pytest.mark.parametrize("name", few(BETWEEN))
def test_convolutions_and(name):
    train_images(nn.ELU, BETWEEN[name]).check()


@pytest.mark.parametrize("name", few(BETWEEN, "rows of channels"))
def test_convolutions_with_channels_last_and(name):
    train_images(nn.ELU, BETWEEN[name], torch.channels_last).check()


@slow
def test_convolutions_and_dropout():
    torch.manual_seed(0)
    models = [convolutional(nn.ELU, nn.Dropout2d(0.5), nn.Dropout(0.2)) for _ in range(2)]
    for model in models:
        model(images()[0][0][0])
    step = ensemble(models, loss_fn, [ada(model.parameters()) for model in models], backend="traced")
    losses = torch.stack([step(*batch) for batch in images()])
    assert losses.isfinite().all()
    assert step.mode == "traced", step.reason


@slow
@has_compiler
def test_compiled_convolutions():
    train_images(nn.ELU, backend="inductor").check("compiled")


@only_abreast
@pytest.mark.parametrize("radius", [None, 1e-3])
def test_members_run_abreast_equal_single_runs_bit_for_bit(radius):
    def make(params, k):
        return ada(params, k, trust_radius=radius)

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(2, 3, 3), nn.ELU(), nn.Flatten(), nn.Linear(27, 3)).float() for _ in range(3)]
    copies = copy.deepcopy(models)
    optimizers, alone = ([make(m.parameters(), k) for k, m in enumerate(those)] for those in (models, copies))
    step = ensemble(models, loss_fn, optimizers, backend="traced")
    steps = [hesscale.compile_step(m, loss_fn, o, backend="traced") for m, o in zip(copies, alone, strict=True)]
    for _ in range(5):
        x, y = torch.randn(3, 4, 2, 5, 5, dtype=torch.float32), torch.randint(0, 3, (3, 4))
        losses = step(x, y)
        assert torch.equal(losses, torch.stack([each(x[k], y[k]) for k, each in enumerate(steps)]))
    for model, other in zip(models, copies, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert [o.scaled_share for o in optimizers] == [o.scaled_share for o in alone]


@slow
@has_compiler
def test_members_with_different_memory_layouts():
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Conv2d(2, 3, 3), nn.ELU(), nn.Flatten(), nn.Linear(27, 3)) for _ in range(2)]
    models[1].to(memory_format=torch.channels_last)
    alone = copy.deepcopy(models)
    step = ensemble(models, loss_fn, [ada(m.parameters()) for m in models])
    steps = [hesscale.compile_step(m, loss_fn, ada(m.parameters()), backend="eager") for m in alone]
    for _ in range(4):
        x, y = torch.randn(2, 4, 2, 5, 5), torch.randint(0, 3, (2, 4))
        torch.testing.assert_close(step(x, y), torch.stack([each(x[k], y[k]) for k, each in enumerate(steps)]), **CLOSE)
    assert step.mode == "compiled"


@only_abreast
def test_streams_wait_for_the_current_one_and_it_waits_for_them(monkeypatch):
    told, current = [], []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            told.append(f"{self.name} waits for {other.name}")

        def __enter__(self):
            current.append(self)

        def __exit__(self, *_):
            current.pop()

    here, streams = Stream("here"), [Stream("a"), Stream("b")]
    current.append(here)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def run(k):
        told.append(f"{k} on {current[-1].name}")
        return [torch.tensor(k)]

    assert side_by_side(run, [[0], [1], [2]], streams) == [[0], [1], [2]]
    assert told == [
        *("0 on here", "a waits for here", "1 on a", "b waits for here", "2 on b"),
        *("here waits for a", "here waits for b"),
    ]


def test_an_unknown_value_of_how_is_refused():
    model = network()
    with pytest.raises(ValueError, match="how='along' is not one of 'vmap', 'abreast'"):
        any_ensemble([model], loss_fn, [ada(model.parameters())], how="along")


@slow
def test_an_ensemble_of_one():
    Runs(members=1).train(data(4, 1)).check()


def test_a_batch_shared_by_all_members():
    batches = [(x[0], y[0]) for x, y in data(4)]
    Runs(batch_dims=None).train(batches, parts=lambda batch, k: batch).check()


def test_batches_with_some_shared_tensors():
    batches = [(x.movedim(0, -1), y[0]) for x, y in data(4)]
    Runs(batch_dims=(-1, None)).train(batches, parts=lambda batch, k: (batch[0][..., k], batch[1])).check()


@slow
def test_batches_of_dicts():
    def loss_of_dict(model, batch, factor):
        return factor * loss_fn(model, batch["x"], batch["y"])

    batches = [({"x": x, "y": y}, 2) for x, y in data(4)]
    runs = Runs(loss_fn=loss_of_dict)
    runs.train(batches, parts=lambda batch, k: ({name: t[k] for name, t in batch[0].items()}, batch[1])).check()


def test_new_batch_sizes_and_evaluation_in_between():
    runs = Runs()
    x = torch.randn(5, 4)
    for size in (8, 8, 3, 3, 8, 3):
        runs.train([(x[:, :size], y[:, :size]) for x, y in data(1)])
        for model, step in zip(runs.models, runs.steps, strict=True):
            for module in (model, step.model):
                module.eval()
            torch.testing.assert_close(model(x), step.model(x), **CLOSE)
            for module in (model, step.model):
                module.train()
    runs.check()


def test_schedulers_of_members():
    schedulers = {}

    def each(optimizers, i):
        for k, optimizer in enumerate(optimizers):
            if i == 0:
                schedulers[optimizer] = lr_scheduler.StepLR(optimizer, 1, 0.9 - 0.1 * k)
            else:
                schedulers[optimizer].step()

    runs = Runs().train(data(6), each).check()
    assert runs.step.compilations == 1
    assert len({optimizer.param_groups[0]["lr"] for optimizer in runs.optimizers}) == MEMBERS


def test_options_of_one_member_change():
    def each(optimizers, i):
        if i == 3:
            optimizers[2].param_groups[0]["eps"] = 1e-2

    runs = Runs(lambda p, k: ada(p, trust_radius=1e-2)).train(data(6), each).check()
    assert runs.step.compilations == 2


def test_parameters_may_be_frozen_and_unfrozen():
    runs = Runs()
    for is_trained in (True, False, True):
        for model in (*runs.models, *[step.model for step in runs.steps]):
            model[0].requires_grad_(is_trained)
        runs.train(data(3))
    runs.check()


def test_state_is_saved_and_loaded_midway():
    runs = Runs().train(data(3))
    for models, optimizers in ((runs.models, runs.optimizers), ([s.model for s in runs.steps], runs.alone)):
        models[1].load_state_dict(copy.deepcopy(models[0].state_dict()))
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        with torch.no_grad():
            models[0][0].weight.mul_(0.5)
        models[2][3].bias.data = torch.zeros(3)
        models[2][1].running_mean = torch.ones(6)
    runs.train(data(3)).check()


@slow
def test_loading_twice_between_steps():
    runs = Runs().train(data(4))
    for optimizers in (runs.optimizers, runs.alone):
        states = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.load_state_dict(copy.deepcopy(states[0]))
            optimizer.load_state_dict(copy.deepcopy(states[2]))
    runs.train(data(4)).check()


def test_a_diverged_member_stops_and_does_not_affect_the_others():
    def make(params, k):
        return ada(params, k, on_nonfinite="skip")

    def mean_square(model, x, y):
        return F.mse_loss(model(x), y)

    batches = [(x, torch.randn(MEMBERS, 8, 3)) for x, _ in data(4)]
    runs = Runs(make, loss_fn=mean_square).train(batches)
    before = copy.deepcopy(runs.models[1].state_dict())
    x, y = batches[0]
    y = y.clone()
    y[1] = torch.inf
    losses = runs.step(x, y)
    for k, step in enumerate(runs.steps):
        step(x[k], y[k])
    assert losses.isfinite().tolist() == [True, False, True]
    weights = [name for name, _ in runs.models[1].named_parameters()]
    torch.testing.assert_close({n: runs.models[1].state_dict()[n] for n in weights}, {n: before[n] for n in weights})
    assert [optimizer.nonfinite_steps for optimizer in runs.optimizers] == [0, 1, 0]
    runs.train(batches)
    for k, step in enumerate(runs.steps):
        torch.testing.assert_close(runs.models[k].state_dict(), step.model.state_dict(), **CLOSE)
        torch.testing.assert_close(runs.optimizers[k].state_dict()["state"], runs.alone[k].state_dict()["state"], **CLOSE)
    assert [optimizer.param_groups[0]["step_count"] for optimizer in runs.optimizers] == [9] * MEMBERS


def test_buffers_that_models_replace():
    class Averaging(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()
            self.register_buffer("average", torch.zeros(3))

        def forward(self, x):
            h = self.layers(x)
            self.average = 0.9 * self.average + h.detach().mean(0)
            return h + self.average

    Runs(lambda p, k: ada(p, k, curvature_every=2), network=Averaging).train(data(6)).check()


class Last(nn.Module):
    """Stores the batch itself in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer, self.scales = nn.Linear(3, 2), [1.0]
        self.register_buffer("last", torch.zeros(8, 3))

    def forward(self, x):
        result = self.layer(x + self.last) * self.scales[0]
        self.last = x
        return result


@slow
def test_batches_stored_by_models_are_not_overwritten(how):
    models = [Last() for _ in range(2)]
    optimizers = [ada(model.parameters()) for model in models]
    step = hesscale.func.ensemble(models, lambda m, x, y: F.cross_entropy(m(x), y), optimizers, how=how, backend="traced")
    data = [torch.full((2, 8, 3), float(i)) for i in range(5)]
    for batch in data:
        step(batch, torch.zeros(2, 8, dtype=torch.long))
    for i, batch in enumerate(data):
        assert (batch == i).all()


def test_dropout_differs_between_members():
    models = [nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = ensemble(models, lambda model, x: model(x).square().mean(), optimizers, batch_dims=None, backend="traced")
    for _ in range(3):
        losses = step(torch.ones(4, 50))
    assert step.mode == "traced"
    assert losses[0] != losses[1]


def test_members_train_one_by_one_if_the_step_cannot_be_traced():
    def branching(model, x, y):
        loss = loss_fn(model, x, y)
        return 2 * loss if loss > 1 else loss

    runs = Runs(loss_fn=branching)
    with pytest.warns(CompileWarning, match="Data-dependent branching"):
        runs.train(data(4))
    runs.check("eager")


# --------------------------------------------------------------------------------------------------------------- shared memory


def one_batch():
    return [tensor[0] for tensor in data(1)[0]]


def test_members_that_load_the_same_state_dict_do_not_share_memory():
    model, (x, y) = nn.Linear(4, 3), one_batch()
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
    step = ensemble(models, loss_fn, optimizers, batch_dims=None, backend="traced")
    for _ in range(3):
        step(x, y)
    assert [o.state[m.weight]["step"].item() for m, o in zip(models, optimizers, strict=True)] == [5.0] * 3
    for other in models[1:]:
        torch.testing.assert_close(other.weight, models[0].weight)


@pytest.mark.parametrize("what", ["state", "weights", "buffers"])
def test_members_that_share_memory_are_refused(what):
    models = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    step = ensemble(models, lambda m, x: m(x).square().mean(), optimizers, batch_dims=None, backend="traced")
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


class Counting(nn.Linear):
    """Has a buffer that is a view of another."""

    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("counts", torch.zeros(4))
        self.register_buffer("last", self.counts[-1:])

    def forward(self, x):
        self.counts.add_(1)
        return super().forward(x) * self.last


def test_members_with_buffers_that_are_views_of_others(how):
    models, (x, y) = [Counting(), Counting()], one_batch()
    optimizers = [hesscale.AdaHesScale(model.parameters()) for model in models]
    step = ensemble(models, loss_fn, optimizers, batch_dims=None, backend="traced")
    warned = pytest.warns(CompileWarning, match="tensors of a member share memory")
    with warned if how == "vmap" else contextlib.nullcontext():
        for _ in range(4):
            step(x, y)
    assert (models[0].counts[-1], models[0].last) == (4, 4)


# ------------------------------------------------------------------------------------------------------------ wrong arguments


def pair(make_model=(network, network), make=(ada, ada)):
    models = [one() for one in make_model]
    optimizers = [one(model.parameters()) for one, model in zip(make, models, strict=True)]
    return models, optimizers


@pytest.mark.parametrize(
    ("other", "saying"),
    [
        (lambda p: ada(p, trust_region="group"), "trust_region"),
        (lambda p: ada(p, curvature_every=2), "curvature_every"),
        (lambda p: ada(p, curvature_dtype=torch.bfloat16), "curvature_dtype"),
        (hesscale.AdaHesScaleGN, "optimizer 1 differs from optimizer 0 in its class"),
        (lambda p: ada([{"params": [q]} for q in p]), "parameter groups"),
    ],
)
def test_different_optimizers_are_refused(other, saying):
    models, optimizers = pair(make=(ada, other))
    with pytest.raises(ValueError, match=saying):
        ensemble(models, loss_fn, optimizers)


CANNOT_DIFFER = [{"trust_radius": 0.1}, {"maximize": True}, {"bias_correction": False}, {"graft": None}]


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("options", CANNOT_DIFFER, ids=str)
def test_options_that_must_be_equal(options, is_first):
    makers = (ada, lambda p: ada(p, **options))
    models, optimizers = pair(make=makers[::-1] if is_first else makers)
    step = ensemble(models, loss_fn, optimizers, backend="traced")
    with pytest.raises(ValueError, match=f"member 1 has options.*{next(iter(options))}"):
        step(*data(1, 2)[0])


def test_different_models_are_refused():
    wider = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    models, optimizers = pair((network, lambda: wider))
    with pytest.raises(ValueError, match="model 1 differs from model 0 in its architecture"):
        ensemble(models, loss_fn, optimizers)
    models, optimizers = pair((network, lambda: network().float()))
    with pytest.raises(ValueError, match="model 1"):
        ensemble(models, loss_fn, optimizers)


@slow
def test_parametrized_members():
    def weight_norm():
        return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))

    Runs(network=weight_norm).train(data(4)).check()


def test_different_attributes_are_refused():
    models, optimizers = pair()
    models[1][1].momentum = 0.5
    with pytest.raises(ValueError, match=r"member 1 differs from member 0.*\['1'\]\.momentum"):
        ensemble(models, loss_fn, optimizers, backend="traced")(*data(1, 2)[0])


def test_members_in_different_modes():
    models, optimizers = pair()
    step = ensemble(models, loss_fn, optimizers, backend="traced")
    for batch in data(3, 2):
        step(*batch)
    models[1].eval()
    with pytest.raises(ValueError, match=r"member 1 differs from member 0.*training"):
        step(*data(1, 2)[0])


def swap_groups(optimizer):
    one, other = optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]


DIFFERENCES = {
    "attribute": (lambda m, _: setattr(m[1], "momentum", 0.5), r"differs.*\['1'\]\.momentum"),
    "module": (lambda m, _: m.__setitem__(2, nn.Sigmoid()), r"differs.*type.*\['2'\]"),
    "hook": (lambda m, _: m[2].register_forward_hook(lambda *_: None), r"differs.*\['2'\]\._forward_hooks"),
    "option": (lambda _, o: setattr(o, "curvature_dtype", torch.float32), "options that differ.*curvature_dtype"),
    "frozen": (lambda m, _: m[0].weight.requires_grad_(False), r"differs.*\['weight'\]' requires_grad"),
    "groups": (lambda _, o: swap_groups(o), "optimizer 2 .* in its parameter groups"),
    "steps": (lambda _, o: o.param_groups[0].update(step_count=7), "member 2 has made 7 steps and member 0 4"),
}


@pytest.mark.parametrize("name", few(DIFFERENCES, "attribute"))
def test_members_that_become_different(name):
    def make(params, k):
        params = list(params)
        return ada([{"params": params[:4]}, {"params": params[4:], "lr": 0.1}], curvature_every=2)

    change, saying = DIFFERENCES[name]
    runs = Runs(make).train(data(4)).check()
    change(runs.models[2], runs.optimizers[2])
    for _ in range(2):
        with pytest.raises(ValueError, match=saying):
            runs.step(*data(1)[0])


CHANGES = {
    "memory of a buffer": lambda m, _: setattr(m[1].running_mean, "data", torch.full((6,), 5.0)),
    "an entry of the state": lambda m, o: o.state[m[0].weight].update(exp_avg=torch.ones(6, 4)),
    "memory of the state": lambda m, o: setattr(o.state[m[0].weight]["exp_avg"], "data", torch.ones(6, 4)),
    "no state": lambda _, o: o.state.clear(),
    "no state of a parameter": lambda m, o: o.state.pop(m[0].weight),
}


@pytest.mark.parametrize("name", few(CHANGES, "no state of a parameter"))
def test_tensors_of_one_member_change(name):
    runs = Runs(lambda p, k: ada(p, k, eps=1e-2)).train(data(3))
    CHANGES[name](runs.models[2], runs.optimizers[2])
    CHANGES[name](runs.steps[2].model, runs.alone[2])
    runs.train(data(3)).check()


def test_the_same_model_twice_is_refused():
    model = network()
    optimizers = [ada(model.parameters()) for _ in range(2)]
    with pytest.raises(ValueError, match="share parameters"):
        ensemble([model, model], loss_fn, optimizers)


@pytest.mark.filterwarnings("ignore::hesscale.errors.CompileWarning")
def test_wrong_batches():
    models, optimizers = pair()
    step = ensemble(models, loss_fn, optimizers, backend="traced")
    with pytest.raises(
        ValueError, match=r"dimension 0 of a tensor of shape \(3, 8, 4\) must have one entry for each of 2 members"
    ):
        step(*data(1, 3)[0])
    with pytest.raises(TypeError, match="ndarray"):
        step(data(1, 2)[0][0].numpy(), data(1, 2)[0][1])
    step = ensemble(models, loss_fn, optimizers, batch_dims=(0,), backend="traced")
    with pytest.raises(ValueError, match="batch_dims has 1 entries for a batch of 2 tensors"):
        step(*data(1, 2)[0])


def test_the_numbers_of_models_and_optimizers_must_be_equal():
    models, optimizers = pair()
    for wrong in ((models, optimizers[:1]), ([], [])):
        with pytest.raises(ValueError, match="one optimizer per model"):
            ensemble(wrong[0], loss_fn, wrong[1])
