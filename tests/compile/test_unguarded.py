"""Compiled steps against eager ones where TorchDynamo alone would be stale, and what steps leave behind."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import gc
import os
import random
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale

STEPS = 10


class Net(nn.Module):
    """A network whose outputs are multiplied by what a function returns."""

    def __init__(self, scale=lambda: 1.0):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale = scale
        self.register_buffer("offset", torch.full((4,), 0.3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x + self.offset))) * self.scale()


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(i):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
    return x, x[:, :3].argmax(1)


def ada(params):
    return hesscale.AdaHesScale(params, lr=0.01, eps=1e-2)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def train(backend, model, *, loss=loss_fn, make=ada, change=lambda model, optimizer: None, batches=batch, again=False):
    """Losses of ten steps, with a change before the sixth, and the modes in which they ran."""
    optimizer = make(model.parameters())
    step = hesscale.compile_step(model, loss, optimizer, backend=backend)
    found, modes = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(STEPS):
            if i == STEPS // 2:
                change(model, optimizer)
            found.append(float((step.again if again else step)(*batches(i))))
            modes.append(step.mode)
    return found, modes


def check(run):
    """``run(backend)`` gives the same losses in both modes; returns the modes of the traced one."""
    results = []
    for backend in ("eager", "traced"):
        torch.manual_seed(0)
        results.append(run(backend))
    (eager, _), (found, modes) = results
    assert found == pytest.approx(eager, rel=1e-4), modes
    return modes


class Table(collections.abc.Mapping):
    def __init__(self):
        self.entries = {"scale": 1.0}

    def __getitem__(self, key):
        return self.entries[key]

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


# ------------------------------------------------------------------------------------------------ what Dynamo does not guard


@pytest.mark.parametrize(
    "read",
    [
        lambda: float(os.getenv("SCALE", "1")),
        lambda: float(os.environ.get("SCALE", "1")),
        lambda: 3.0 if "SCALE" in os.environ else 1.0,
    ],
)
def test_the_environment(read, monkeypatch):
    def run(backend):
        monkeypatch.delenv("SCALE", raising=False)
        return train(backend, Net(read), change=lambda *_: monkeypatch.setenv("SCALE", "3"))

    check(run)


@pytest.mark.parametrize("read", [lambda table: table.get("more", 1.0), lambda table: 3.0 if "more" in table else 1.0])
def test_keys_of_a_mapping(read):
    def run(backend):
        table = Table()
        return train(backend, Net(lambda: read(table)), change=lambda *_: table.entries.update(more=3.0))

    check(run)


@pytest.mark.parametrize("kind", ["random.Random", "numpy"])
def test_random_numbers_that_are_not_torchs(kind):
    def run(backend):
        source = random.Random(0)
        np.random.seed(0)
        draw = {
            "random.Random": source.random,
            "numpy": lambda: torch.from_numpy(np.random.randn(3).astype(np.float32)),
        }[kind]
        return train(backend, Net(lambda: draw()))

    check(run)


class Base:
    def scale(self):
        return 1.0


class Derived(Base):
    pass


@pytest.mark.parametrize("owner", [Base, Derived])
def test_methods_replaced_in_a_class(owner, monkeypatch):
    def run(backend):
        reader = Derived()
        with monkeypatch.context() as patch:
            return train(
                backend,
                Net(lambda: reader.scale()),
                change=lambda *_: patch.setattr(owner, "scale", lambda _: 3.0, raising=False),
            )

    assert check(run)[-1] == "traced"


def test_forward_replaced_in_a_class_of_torch(monkeypatch):
    forward = nn.Linear.forward

    def run(backend):
        with monkeypatch.context() as patch:
            return train(
                backend, Net(), change=lambda *_: patch.setattr(nn.Linear, "forward", lambda self, x: 0.5 * forward(self, x))
            )

    assert check(run)[-1] == "traced"


def test_a_function_of_torch_wrapped_where_it_is_defined(monkeypatch):
    """The graph calls functions by name, and would call the wrapper twice."""
    cross_entropy = F.cross_entropy

    def run(backend):
        with monkeypatch.context() as patch:
            return train(
                backend,
                Net(),
                change=lambda *_: patch.setattr(F, "cross_entropy", lambda *args, **kwargs: 3 * cross_entropy(*args, **kwargs)),
            )

    check(run)


class Doubled(torch.overrides.TorchFunctionMode):
    """Doubles what tanh returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.tanh else result


def test_a_function_mode():
    def run(backend):
        with contextlib.ExitStack() as stack:
            return train(backend, Net(), change=lambda *_: stack.enter_context(Doubled()))

    check(run)


def test_a_stance_that_turns_dynamo_off():
    """Dynamo then runs the loss without a word, and nothing was trained."""

    def run(backend):
        with contextlib.ExitStack() as stack:
            change = lambda *_: stack.enter_context(torch.compiler.set_stance("force_eager"))  # noqa: E731
            return train(backend, Net(), change=change)

    assert check(run)[-1] == "eager"


# ---------------------------------------------------------------------------------------------------------------- optimizers


class Own(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(self.options["factor"])
        super().step()


def own(params):
    optimizer = Own(params, lr=0.1)
    optimizer.options = {"factor": 1.0}
    return optimizer


def patch_step(model, optimizer):
    before = optimizer.step

    def step():
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        before()

    optimizer.step = step


CODE_OF_OPTIMIZERS = {
    "an option of an optimizer of one's own": (own, lambda model, optimizer: optimizer.options.update(factor=0.1)),
    "another step": (sgd, patch_step),
    "another class": (
        sgd,
        lambda model, optimizer: setattr(optimizer, "__class__", torch.optim.SGD) or patch_step(model, optimizer),
    ),
}


@pytest.mark.parametrize("name", CODE_OF_OPTIMIZERS)
def test_code_of_optimizers(name):
    make, change = CODE_OF_OPTIMIZERS[name]
    check(lambda backend: train(backend, Net(), make=make, change=change))


def test_a_scheduler_made_later_leaves_the_step_traced():
    def change(model, optimizer):
        torch.optim.lr_scheduler.StepLR(optimizer, 3)

    assert check(lambda backend: train(backend, Net(), change=change))[-1] == "traced"


# --------------------------------------------------------------------------------------------------------------------- again


def two_inputs(model, x, z):
    return (model(x) ** 2).mean() + (model(x) * z.sum()).mean()


OTHER = batch(100)[0]


def with_other(model, x, y):
    return F.cross_entropy(model(x) + model(OTHER), y)


class Remembers(Net):
    """Adds the batch before."""

    def __init__(self):
        super().__init__()
        self.previous = torch.zeros(8, 4)

    def forward(self, x):
        outputs = super().forward(x + self.previous)
        self.previous = x
        return outputs


def test_again_with_a_batch_whose_tensors_were_one():
    def batches(i):
        x = batch(i)[0]
        return x, x if i < 5 else batch(i + 20)[0]

    check(lambda backend: train(backend, Net(), loss=two_inputs, batches=batches, again=True))


def test_again_with_a_batch_that_was_a_buffer():
    def run(backend):
        model = Net()
        batches = lambda i: (batch(i)[0], model.offset if i < 5 else torch.ones(4))  # noqa: E731
        return train(backend, model, loss=two_inputs, batches=batches, again=True)

    check(run)


def test_a_batch_that_the_loss_also_reads_by_itself():
    batches = lambda i: (OTHER if i < 5 else batch(i)[0], batch(i)[1])  # noqa: E731
    assert check(lambda backend: train(backend, Net(), loss=with_other, batches=batches))[-1] == "traced"


def test_again_with_a_batch_that_the_loss_also_reads_by_itself():
    batches = lambda i: (OTHER if i < 5 else batch(i)[0], batch(i)[1])  # noqa: E731
    check(lambda backend: train(backend, Net(), loss=with_other, batches=batches, again=True))


def test_again_of_a_pure_step_checks_nothing():
    model = Net()
    step = hesscale.compile_step(model, loss_fn, ada(model.parameters()), backend="traced")
    for i in range(5):
        step.again(*batch(i))
    model.scale = None  # would raise where it is read
    step.again(*batch(5))


def test_again_with_a_model_that_remembers():
    check(lambda backend: train(backend, Remembers(), again=True))


# ------------------------------------------------------------------------------------------------------------ what is left


def test_a_copy_of_a_step_trains_its_own_model():
    model = Net()
    step = hesscale.compile_step(model, loss_fn, ada(model.parameters()), backend="traced")
    for i in range(3):
        step(*batch(i))
    other = copy.deepcopy(step)
    before = model.first.weight.detach().clone()
    losses = [float(other(*batch(i))) for i in range(4)]
    assert torch.equal(model.first.weight, before)
    assert [float(step(*batch(i))) for i in range(4)] == pytest.approx(losses)
    assert other.mode == "traced"


def test_steps_that_are_dropped_free_their_models():
    def make():
        model = Net()
        optimizer = ada(model.parameters())
        step = hesscale.compile_step(model, loss_fn, optimizer, backend="traced")
        for i in range(3):
            step(*batch(i))
        return [weakref.ref(each) for each in (model, optimizer, step)]

    found = [make() for _ in range(3)]
    gc.collect()
    assert [ref() for refs in found for ref in refs] == [None] * 9


def test_warm_up_leaves_the_groups_of_torchs_optimizers():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    before = set(optimizer.param_groups[0])
    hesscale.compile_step(model, loss_fn, optimizer, backend="traced").warm_up(*batch(0))
    assert set(optimizer.param_groups[0]) == before


# ----------------------------------------------------------------------------------------------------------------- ensembles


class Configured(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.config, self.listed = types.SimpleNamespace(scale=scale), [{"scale": 1.0}]

    def forward(self, x):
        return self.layer(x) * self.config.scale * self.listed[0]["scale"]


factor = 1.0


def scaled_loss(model, x, y):
    return factor * loss_fn(model, x, y)


def change_factor(models, monkeypatch):
    monkeypatch.setitem(globals(), "factor", 3.0)


def change_config(models, monkeypatch):
    for model in models:
        model.config.scale = 3.0


def change_list(models, monkeypatch):
    for model in models:
        model.listed[0]["scale"] = 3.0


@pytest.mark.parametrize("how", ["vmap", "abreast"])
@pytest.mark.parametrize("change", [change_factor, change_config, change_list])
def test_an_ensemble_follows_what_changes_in_all_members(how, change, monkeypatch):
    models = [Configured(), Configured()]
    twins = copy.deepcopy(models)
    optimizers = [ada(model.parameters()) for model in models]
    step = hesscale.func.ensemble(models, scaled_loss, optimizers, how=how, batch_dims=None, backend="traced")
    alone = [hesscale.compile_step(twin, scaled_loss, ada(twin.parameters()), backend="eager") for twin in twins]
    for i in range(6):
        if i == 3:
            change([*models, *twins], monkeypatch)
        losses = step(*batch(i))
        torch.testing.assert_close(losses, torch.stack([one(*batch(i)) for one in alone]))
    assert step.mode == "traced"


def test_members_that_differ_in_what_an_attribute_holds():
    models = [Configured(), Configured(3.0)]
    step = hesscale.func.ensemble(models, loss_fn, [ada(m.parameters()) for m in models], batch_dims=None, backend="traced")
    with pytest.raises(ValueError, match=r"member 1 differs from member 0.*config\.scale"):
        step(*batch(0))
