"""Compiled steps against eager ones, for changes that TorchDynamo does not guard; and what steps leave behind."""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import gc
import os
import random
import threading
import time
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.compile.inductor import outcome
from hesscale.compile.make_fx import trace

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
def test_random_numbers_of_other_libraries(kind):
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
    """Dynamo would then silently run the loss without training."""

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


@pytest.mark.parametrize("kind", ["a number", "a tensor"])
def test_a_step_size_that_changes_while_another_graph_runs(kind):
    def run(backend):
        model = Net()
        optimizer = ada(model.parameters())
        group = optimizer.param_groups[0]
        group["lr"] = torch.tensor(0.01) if kind == "a tensor" else 0.01
        step = hesscale.compile_step(model, loss_fn, optimizer, backend=backend)
        found, modes = [], []
        for i in range(2 * STEPS):
            value = (0.01, 0.1, 0.001)[i // 3 % 3]  # each change comes with one of the two batch sizes, and holds for the other
            if kind == "a tensor":
                group["lr"].fill_(value)
            else:
                group["lr"] = value
            x, y = batch(i)
            found.append(float(step(x[: 4 + 4 * (i % 2)], y[: 4 + 4 * (i % 2)])))
            modes.append(step.mode)
        return found, modes

    assert check(run)[-1] == "traced"


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


def test_again_with_a_batch_that_had_one_tensor_twice():
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


def test_again_with_a_model_that_has_state():
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


def test_warm_up_restores_groups_of_torch_optimizers():
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


def test_members_with_different_contents_of_an_attribute():
    models = [Configured(), Configured(3.0)]
    step = hesscale.func.ensemble(models, loss_fn, [ada(m.parameters()) for m in models], batch_dims=None, backend="traced")
    with pytest.raises(ValueError, match=r"member 1 differs from member 0.*config\.scale"):
        step(*batch(0))


# --------------------------------------------------------------------------------- what is kept, shared, or changed elsewhere


def test_a_batch_given_twice_that_the_loss_also_reads_by_itself():
    def loss(model, x, other):
        return model(x + other + OTHER).square().mean()

    def batches(i):
        x = OTHER if i < 5 else batch(i)[0]
        return x, x

    assert check(lambda backend: train(backend, Net(), loss=loss, batches=batches))[-1] == "traced"


def test_a_model_that_keeps_a_view_of_a_parameter():
    class Keeps(Net):
        kept = torch.zeros(6)

        def forward(self, x):
            outputs = super().forward(x) + self.kept.sum()
            self.kept = self.first.weight.detach()[:, 0]
            return outputs

    assert check(lambda backend: train(backend, Keeps()))[-1] == "eager"


def test_tensors_that_a_model_stores_in_a_skipped_step():
    class Averages(Net):
        def forward(self, x):
            self.offset = 0.9 * self.offset + x.mean(0)
            return super().forward(x)

    def run(backend):
        model = Averages()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, eps=1e-2, on_nonfinite="raise")
        step = hesscale.compile_step(model, lambda model, x, y, w: w * loss_fn(model, x, y), optimizer, backend=backend)
        found, modes = [], []
        for i in range(STEPS):
            if i in (0, 5):
                with pytest.raises(hesscale.NonFiniteError):
                    step(*batch(i), torch.tensor(float("inf")))
            else:
                found.append(float(step(*batch(i), torch.tensor(1.0))))
            modes.append(step.mode)
        return found, modes

    assert check(run)[-1] == "traced"


def test_arguments_in_memory_that_cannot_be_written_to(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((8, 4), dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="r"))
    weight = torch.ones(4)
    result, after, _ = outcome(lambda w, x: [(x * w.add_(1)).sum()], [weight, x])
    assert (float(result), after.tolist(), weight.tolist()) == (64.0, [2.0] * 4, [1.0] * 4)


def test_concurrent_traces_restore_global_state():
    def state():
        flags = torch.compiler._is_compiling_flag, torch._C._get_mkldnn_enabled()
        return *flags, torch.distributions.Distribution._validate_args, torch.manual_seed

    def slow(x):
        time.sleep(0.02)
        return x + 1

    before = state()
    threads = [threading.Thread(target=trace, args=(slow, [torch.ones(2)])) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join()
    assert state() == before


STORE = {"sum": torch.zeros(())}
WEIGHTS = torch.ones(3)


def ensembles(how, loss, change=lambda models, i: None, dims=None, make=Net, members=2):
    """The losses of an ensemble are those of members that train in turn; returns how the last step ran, and why."""
    results, steps = [], []
    for backend in ("eager", "traced"):
        torch.manual_seed(0)
        STORE["sum"] = torch.zeros(())
        models = [make() for _ in range(members)]
        optimizers = [ada(model.parameters()) for model in models]
        step = hesscale.func.ensemble(models, loss, optimizers, how=how, batch_dims=dims, backend=backend)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(6):
                given = change(models, i) or ()
                x, y = batch(i)
                x, y = (x, y) if dims is None else (torch.stack([x, -x], dims), torch.stack([y, y], dims))
                found.append([*step(x, y, *given).tolist(), float(STORE["sum"]), float(x.sum())])
        results.append(found)
        steps.append(step)
    torch.testing.assert_close(torch.tensor(results[1]), torch.tensor(results[0]), rtol=1e-4, atol=1e-5)
    return steps[1].mode, steps[1].reason


BOTH = pytest.mark.parametrize("how", ["vmap", "abreast"])


@BOTH
def test_members_that_change_the_same_global_tensor(how):
    def loss(model, x, y):
        found = loss_fn(model, x, y)
        STORE["sum"] = STORE["sum"] + found.detach()
        return found * (1 + STORE["sum"])

    assert ensembles(how, loss) == ("eager", "a member's step sets something that the next member reads")


@BOTH
def test_members_that_change_one_batch(how):
    def loss(model, x, y):
        return loss_fn(model, x.mul_(1.5), y)

    mode, reason = ensembles(how, loss)
    assert mode == "eager"
    assert "one and the same tensor" in reason


@BOTH
def test_a_batch_in_the_memory_of_a_member(how):
    def loss(model, x, y, anchor):
        return loss_fn(model, x, y) + (model.first.weight - anchor).square().sum()

    mode, reason = ensembles(how, loss, lambda models, i: [models[0].first.weight.detach()])
    assert mode == "eager"
    assert "memory that a member changes" in reason


@BOTH
def test_a_shared_tensor_in_the_memory_of_a_member(how):
    def share(models, i):
        if i == 0:
            view = models[0].second.bias.detach()
            for model in models:
                model.shared = view

    mode, reason = ensembles(how, lambda model, x, y: F.cross_entropy(model(x) * model.shared, y), share)
    assert mode == "eager"
    assert "memory that a member changes" in reason


@BOTH
def test_tensors_of_members_that_are_views_of_one(how):
    def change(models, i):
        if i == 0:
            models[0].all = torch.ones(2, 3)
            for model, row in zip(models, models[0].all, strict=True):
                model.weights = row
        models[0].all.mul_(1.5)

    assert ensembles(how, lambda model, x, y: F.cross_entropy(model(x) * model.weights, y), change)[0] == "traced"


@BOTH
def test_a_global_view_and_one_member(how, monkeypatch):
    base = torch.ones(2, 3)
    monkeypatch.setitem(globals(), "WEIGHTS", base[0])

    def change(models, i):
        base.fill_(1.0 + i)

    mode, _ = ensembles(how, lambda model, x, y: F.cross_entropy(model(x) * WEIGHTS, y), change, members=1)
    assert mode == "traced"


class Doubles(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8, 4))

    def forward(self, x):
        found = super().forward(x + self.last)
        self.last = 2 * x
        return found


@BOTH
def test_members_that_store_outputs_with_interleaved_rows(how):
    assert ensembles(how, loss_fn, dims=1, make=Doubles)[0] == "traced"
