"""Compiled steps are never stale: after any change between two steps, the next loss equals that of an eager copy."""

from __future__ import annotations

import contextlib
import random
import types
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from steps import has_compiler
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import hesscale

SCALE, TABLE, NUMBERS, OUTSIDE, CRITERION = 1.0, {}, [], torch.ones(3), nn.CrossEntropyLoss()  # see reset
UNDO = contextlib.ExitStack()  # what a change adds to torch itself


def reset():
    """Restore all global state that a change may affect."""
    global SCALE, TABLE, NUMBERS, OUTSIDE, CRITERION
    SCALE, TABLE, NUMBERS, OUTSIDE = 1.0, {"scale": 1.0, "unused": 3}, [1.0] * 100, torch.ones(3)
    CRITERION = nn.CrossEntropyLoss()
    Net.class_scale, Net.forward, nn.Linear.forward = 1.0, NET_FORWARD, LINEAR_FORWARD
    by_default.__defaults__ = (1.0,)
    assign_in_closure(1.0)
    UNDO.close()


@pytest.fixture(autouse=True)
def everything_as_it_was():
    yield
    reset()


# -------------------------------------------------------------------------------------------------------- networks and losses


class Config:
    def __init__(self):
        self.scale = 1.0
        self.nested = types.SimpleNamespace(depth={"scale": [1.0, 1.0]})


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


@dataclass
class Options:
    scale: float = 1.0


class Net(nn.Module):
    """A network that reads numbers from globals, attributes, closures and other places."""

    class_scale = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Identity()
        self.register_buffer("offset", torch.zeros(6))
        self.config, self.slots, self.options = Config(), Slots(), Options()
        self.scale, self.activation, self.listed, self.queue = 1.0, torch.tanh, [1.0, 1.0], deque([1.0])
        self.is_residual = False
        self.kept = []
        self.calls = 0

    @property
    def doubled(self):
        return 2 * self.scale

    def forward(self, x):
        h = self.activation(self.norm(self.first(x)) + self.offset)
        h = self.drop(h * self.listed[1] + h if self.is_residual else h)
        return self.second(h) * self.scale


def plain(model, x, y):
    return F.cross_entropy(model(x), y)


def helper(logits):
    return logits * SCALE * TABLE["scale"] * NUMBERS[70]


def by_helper(model, x, y):
    return F.cross_entropy(helper(model(x)), y)


class ReadsGlobal(Net):
    def forward(self, x):
        return super().forward(x) * SCALE


class ReadsConfig(Net):
    def forward(self, x):
        c = self.config
        return super().forward(x) * c.scale * c.nested.depth["scale"][1] * self.slots.scale * self.options.scale


class ReadsClass(Net):
    def forward(self, x):
        return super().forward(x) * self.class_scale * type(self).class_scale


class ReadsProperty(Net):
    def forward(self, x):
        return super().forward(x) * self.doubled


class ReadsQueue(Net):
    def forward(self, x):
        return super().forward(x) * self.queue[-1]


class Counts(Net):
    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls)


class KeepsTensors(Net):
    def forward(self, x):
        h = super().forward(x)
        self.kept = [*self.kept[-1:], h.detach().mean()]
        return h * (1 + self.kept[0])


class ReplacesBuffer(Net):
    def forward(self, x):
        self.offset = 0.9 * self.offset + 0.1 * self.first(x).detach().mean(0)
        return super().forward(x)


def by_outside_tensor(model, x, y):
    return F.cross_entropy(model(x) * OUTSIDE, y)


def by_criterion(model, x, y):
    return CRITERION(model(x), y)


def by_random(model, x, y):
    return plain(model, x, y) * random.random()


def by_default(model, x, y, scale=1.0):
    return plain(model, x, y) * scale


def by_variable():
    scale = 1.0

    def loss_fn(model, x, y):
        return plain(model, x, y) * scale

    def assign(value):
        nonlocal scale
        scale = value

    return loss_fn, assign


by_closure, assign_in_closure = by_variable()


def by_default_dtype(model, x, y):
    return plain(model, x, y) * (3 if torch.get_default_dtype() is torch.float64 else 1)


class HasHook(Net):
    """Begins with a hook."""

    def __init__(self):
        super().__init__()
        self.handle = self.first.register_forward_hook(halved)


class HidesClass(Net):
    """Has an attribute in front of the one of its class."""

    def __init__(self):
        super().__init__()
        self.class_scale = 2.0

    def forward(self, x):
        return super().forward(x) * self.class_scale


class ReadsTags(Net):
    def forward(self, x):
        return super().forward(x) * (1 + len(self.kept))


class Deep(Net):
    """Has two layers of the same shape, and a square matrix between them."""

    def __init__(self):
        super().__init__()
        self.third, self.fourth = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("matrix", torch.randn(6, 6))

    def forward(self, x):
        return self.second(self.fourth(self.third(self.first(x)).tanh() @ self.matrix).tanh())


class Spare(Net):
    """Has a parameter that the loss does not use."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Parameter(torch.full((3,), 0.2))


NET_FORWARD, LINEAR_FORWARD = Net.forward, nn.Linear.forward


# -------------------------------------------------------------------------------------------------------------------- changes


def halved(module, args, output):
    return 0.5 * output


def in_globals(**values):
    return lambda *_: globals().update(values)


def attribute(path, value):
    """Set an attribute of the model, or of an object that it refers to."""

    def change(model, optimizer):
        *parts, name = path.split(".")
        for part in parts:
            model = getattr(model, part)
        setattr(model, name, value)

    return change


def replace_first(model, optimizer):
    with torch.no_grad():
        model.first.weight = nn.Parameter(model.first.weight + 0.1)  # the optimizer holds the other one


def into_identity(model, optimizer):
    model.norm = nn.Identity()


def other_submodule(model, optimizer):
    model.drop = nn.Hardtanh(-0.1, 0.1)


def freeze(model, optimizer):
    model.first.requires_grad_(False)


def forward_hook(model, optimizer):
    model.first.register_forward_hook(halved)


def forward_pre_hook(model, optimizer):
    model.second.register_forward_pre_hook(lambda module, args: (0.5 * args[0],))


def tensor_hook(model, optimizer):
    model.first.weight.register_hook(lambda gradient: 0.5 * gradient)


def step_hook(model, optimizer):
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    optimizer.register_step_pre_hook(halve)


def other_forward(model, optimizer):
    model.forward = types.MethodType(lambda self, x: 0.5 * type(self).forward(self, x), model)


def other_class(model, optimizer):
    model.__class__ = ReadsProperty


def data_in_place(model, optimizer):
    with torch.no_grad():
        model.first.weight.mul_(0.5)


def data_replaced(model, optimizer):
    model.first.weight.data = model.first.weight.data.t().contiguous().t() * 0.5  # other strides


def buffer_replaced(model, optimizer):
    model.offset = torch.full((6,), 0.3)


def share_memory(model, optimizer):
    model.first.bias.data = model.norm.bias.data  # two parameters in the same memory


def load_optimizer(model, optimizer):
    state = optimizer.state_dict()
    for entries in state["state"].values():
        entries["exp_avg"] = entries["exp_avg"] * 0
    optimizer.load_state_dict(state)


def forget_state(model, optimizer):
    optimizer.state.clear()


def load_model(model, optimizer):
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def group_option(name, value):
    return lambda model, optimizer: optimizer.param_groups[0].__setitem__(name, value)


def add_group(model, optimizer):
    extra = nn.Parameter(torch.full((3,), 0.1))
    optimizer.add_param_group({"params": [extra]})
    model.register_parameter("extra", extra)
    model.forward = types.MethodType(lambda self, x: type(self).forward(self, x) + self.extra, model)


def remove_parameter(model, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]


def swap_parameter(model, optimizer):
    """The loss uses another parameter of the optimizer than before."""
    model.second.bias, model.spare = model.spare, model.second.bias


def reset_attribute(model, optimizer):
    del model.scale
    model.scale = 3.0


def tie_parameters(model, optimizer):
    model.fourth.weight = model.third.weight


def class_forward(model, optimizer):
    Net.forward = lambda self, x: 0.5 * NET_FORWARD(self, x)


def linear_forward(model, optimizer):
    nn.Linear.forward = lambda self, x: 0.5 * LINEAR_FORWARD(self, x)


def global_hook(model, optimizer):
    UNDO.callback(register_module_forward_hook(halved).remove)


def default_dtype(model, optimizer):
    torch.set_default_dtype(torch.float64)
    UNDO.callback(torch.set_default_dtype, torch.float32)


def default_device(model, optimizer):
    torch.set_default_device("cpu")
    UNDO.callback(torch.set_default_device, None)


def one_group(model):
    return hesscale.AdaHesScale(model.parameters(), lr=0.01, eps=1e-2)


def two_groups(model):
    groups = [{"params": list(layer.parameters())} for layer in (model.first, model.second)]
    return hesscale.AdaHesScale(groups, lr=0.1, eps=1e-2, trust_radius=1e-4)


class Case(NamedTuple):
    """A change after five of ten steps.

    Attributes:
        change: takes the model and the optimizer, and changes something.
        network, loss_fn, optimizer: what is trained, and how.
        before, after: how steps run, at last, before the change and after it.
        autocast: the steps after the change run under autocast.
        rel: tolerance.
    """

    change: Callable[[Any, Any], object] = lambda *_: None
    network: Callable[[], nn.Module] = Net
    loss_fn: Callable[..., torch.Tensor] = plain
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = one_group
    before: str = "traced"
    after: str = "traced"
    autocast: bool = False
    rel: float = 1e-5


CASES = {
    "a global that forward reads": Case(in_globals(SCALE=3.0), ReadsGlobal),
    "a global that a function reads which the loss calls": Case(in_globals(SCALE=3.0), loss_fn=by_helper),
    "an entry of a global dict": Case(lambda *_: TABLE.update(scale=3.0), loss_fn=by_helper),
    "the 70th entry of a global list": Case(lambda *_: NUMBERS.__setitem__(70, 3.0), loss_fn=by_helper),
    "a variable around the loss": Case(lambda *_: assign_in_closure(3.0), loss_fn=by_closure),
    "a default of the loss": Case(lambda *_: setattr(by_default, "__defaults__", (3.0,)), loss_fn=by_default),
    "an attribute": Case(attribute("scale", 3.0)),
    "an attribute deleted and set again": Case(reset_attribute),
    "an attribute deleted that hid the one of the class": Case(lambda m, _: delattr(m, "class_scale"), HidesClass),
    "an attribute of the configuration": Case(attribute("config.scale", 3.0), ReadsConfig),
    "a list in a dict of the configuration": Case(lambda m, _: m.config.nested.depth.update(scale=[1.0, 3.0]), ReadsConfig),
    "an attribute in a slot": Case(attribute("slots.scale", 3.0), ReadsConfig),
    "a field of a dataclass": Case(attribute("options.scale", 3.0), ReadsConfig),
    "another configuration": Case(attribute("options", Options(3.0)), ReadsConfig),
    "a class attribute": Case(lambda *_: setattr(Net, "class_scale", 3.0), ReadsClass),
    "what a property returns": Case(attribute("scale", 3.0), ReadsProperty),
    "an entry of a list": Case(lambda m, _: (setattr(m, "is_residual", True), m.listed.__setitem__(1, 3.0))),
    "an entry of a list that was empty": Case(lambda m, _: m.kept.append(1), ReadsTags),
    "an entry of a queue": Case(lambda m, _: m.queue.append(3.0), ReadsQueue),
    "an activation": Case(attribute("activation", torch.relu)),
    "random.random() in the loss": Case(loss_fn=by_random, before="eager", after="eager"),
    "a tensor from outside": Case(in_globals(OUTSIDE=torch.full((3,), 3.0)), loss_fn=by_outside_tensor),
    "a tensor from outside in place": Case(lambda *_: OUTSIDE.mul_(3.0), loss_fn=by_outside_tensor),
    "an option of a criterion from outside": Case(lambda *_: setattr(CRITERION, "label_smoothing", 0.3), loss_fn=by_criterion),
    "another criterion from outside": Case(in_globals(CRITERION=nn.CrossEntropyLoss(reduction="sum")), loss_fn=by_criterion),
    "a count of calls": Case(network=Counts, before="eager", after="eager"),
    "tensors in a list": Case(network=KeepsTensors),
    "a buffer that the model replaces": Case(network=ReplacesBuffer),
    "training": Case(lambda m, _: m.eval()),
    "training of one module": Case(lambda m, _: m.norm.eval()),
    "a number of a module": Case(attribute("norm.momentum", 0.9)),
    "a module replaced by nn.Identity": Case(into_identity),
    "another module": Case(other_submodule),
    "a parameter replaced": Case(replace_first),
    "a parameter frozen": Case(freeze),
    "a forward hook": Case(forward_hook),
    "a forward hook removed": Case(lambda m, _: m.handle.remove(), HasHook),
    "a forward pre-hook": Case(forward_pre_hook),
    "a hook of all modules": Case(global_hook, after="eager"),
    "a hook of a parameter": Case(tensor_hook, after="eager"),
    "a hook of the optimizer": Case(step_hook, after="eager"),
    "another forward": Case(other_forward),
    "another forward of the class": Case(class_forward),
    "another forward of nn.Linear": Case(linear_forward),
    "another class": Case(other_class),
    "weights in place": Case(data_in_place),
    "weights elsewhere, with other strides": Case(data_replaced),
    "a buffer replaced": Case(buffer_replaced),
    "a buffer transposed in place": Case(lambda m, _: m.matrix.t_(), Deep),
    "parameters tied": Case(tie_parameters, Deep),
    "parameters that share memory": Case(share_memory),
    "the model's state loaded": Case(load_model),
    "the optimizer's state loaded": Case(load_optimizer),
    "the optimizer's state gone": Case(forget_state),
    "the step size": Case(group_option("lr", 0.05)),
    "betas": Case(group_option("betas", (0.5, 0.9))),
    "weight decay": Case(group_option("weight_decay", 0.1)),
    "a trust radius": Case(group_option("trust_radius", 1e-4)),
    "a trust region for each group": Case(lambda _, o: setattr(o, "trust_region", "group"), optimizer=two_groups),
    "the dtype of curvature": Case(lambda _, o: setattr(o, "curvature_dtype", torch.bfloat16), rel=1e-2),
    "a group of parameters added": Case(add_group),
    "parameters that the optimizer lets go": Case(remove_parameter),
    "a parameter that the loss did not use": Case(swap_parameter, Spare),
    "the default dtype": Case(default_dtype, loss_fn=by_default_dtype),
    "the default device": Case(default_device),
    "autocast": Case(autocast=True, rel=2e-2),
}


class Run(NamedTuple):
    losses: list[float]
    modes: list[str]
    parameters: dict[str, torch.Tensor]


def run(case, backend):
    reset()
    random.seed(0)
    torch.manual_seed(0)
    model = case.network()
    optimizer = case.optimizer(model)
    step = hesscale.compile_step(model, case.loss_fn, optimizer, backend=backend)
    losses, modes = [], []
    for i in range(10):
        if i == 5:
            case.change(model, optimizer)
        torch.manual_seed(i)
        x = torch.randn(8, 4, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast and i >= 5):
            losses.append(float(step(x, x[:, :3].argmax(1))))
        modes.append(step.mode)
    return Run(losses, modes, dict(model.named_parameters()))


def check(name, backend, rel):
    """Ten steps give the losses and the weights of eager mode; returns how the steps ran."""
    case = CASES[name]
    eager = run(case, "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hesscale.CompileWarning)
        found = run(case, backend)
    assert found.losses == pytest.approx(eager.losses, rel=max(rel, case.rel)), found.modes
    torch.testing.assert_close(found.parameters, eager.parameters, rtol=100 * max(rel, case.rel), atol=max(rel, case.rel))
    return found.modes


ALIKE = {  # are noticed by guards of the same kind as another case's
    *("a global that a function reads which the loss calls", "an entry of a global dict", "a default of the loss"),
    *("an attribute of the configuration", "an attribute in a slot", "a field of a dataclass", "another configuration"),
    *("what a property returns", "an entry of a queue", "an entry of a list", "an activation", "a tensor from outside"),
    *("an option of a criterion from outside", "training", "a number of a module", "another module", "a forward pre-hook"),
    *("another forward of nn.Linear", "weights in place", "a buffer replaced", "the model's state loaded", "weight decay"),
    *("the step size", "a count of calls", "the default device"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in CASES])
def test_traced(name):
    modes = check(name, "traced", 1e-5)
    assert (modes[4], modes[9]) == (CASES[name].before, CASES[name].after), modes


@pytest.mark.slow
@has_compiler
@pytest.mark.parametrize("name", CASES)
def test_compiled(name):
    modes = check(name, "inductor", 1e-4)
    assert (modes[4] == "eager", modes[9] == "eager") == (CASES[name].before == "eager", CASES[name].after == "eager"), modes
