"""Whole networks, drawn at random, against the recursion written out slowly; and where HesScale is exact, against autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import hessian_diagonal
from recursion import Line, recursion, run
from torch import nn

import hesscale

ACTIVATIONS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "elu": F.elu,
    "celu": F.celu,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "logsigmoid": F.logsigmoid,
    "sin": torch.sin,
    "square": torch.square,
    "inplace relu": lambda x: F.relu(x, inplace=True),
    "inplace elu": lambda x: F.elu(x, inplace=True),
    "inplace tanh": torch.tanh_,
    "inplace leaky_relu": lambda x: F.leaky_relu(x, inplace=True),
}
BATCH = 3


def networks(count: int):
    """This number of networks, the same in every run."""
    return settings(derandomize=True, deadline=None, max_examples=count, database=None)


class Sketch:
    """Builds a random program: draws operators, creates parameters, and stores the name of the last tensor."""

    def __init__(self, draw, *shape: int) -> None:
        self.draw = draw
        self.generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        self.leaves: dict[str, torch.Tensor] = {}
        self.lines: list[Line] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.choices: list[str] = []
        self.at = self.leaf(*shape, scale=1.0)

    def __repr__(self) -> str:
        return f"<{', '.join(self.choices)}>"

    def leaf(self, *shape: int, scale: float = 0.6) -> str:
        name = f"leaf{len(self.leaves)}"
        self.leaves[name] = (torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale).requires_grad_()
        self.shapes[name] = shape
        return name

    def add(self, function, *inputs: str, is_loss: bool = False) -> str:
        """One more line; it becomes the place to go on from."""
        self.at = f"t{len(self.lines)}"
        self.lines.append(Line(self.at, function, inputs, is_loss))
        example = [torch.zeros(self.shapes[name], dtype=torch.float64) for name in inputs]
        self.shapes[self.at] = tuple(function(*example).shape)
        return self.at

    def choose(self, options):
        choice = self.draw(st.sampled_from(list(options)))
        self.choices.append(str(choice))
        return choice

    def block(self, names: list[str]) -> None:
        getattr(self, self.choose(names))()

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    @property
    def width(self) -> int:
        return self.shapes[self.at][1]

    def activation(self) -> str:
        """May work in place, so only ever on a fresh pre-activation that nothing else reads."""
        return self.add(ACTIVATIONS[self.choose(ACTIVATIONS)], self.at)

    def linear(self, width: int, weights: tuple[str, ...] = ()) -> str:
        if not weights:
            weights = (self.leaf(width, self.width),)
            weights += (self.leaf(width),) if self.draw(st.booleans()) else ()
        return self.add(F.linear, self.at, *weights)

    def dense(self) -> None:
        self.linear(self.integer(1, 4))
        self.activation()

    def residual(self) -> None:
        x = self.at
        self.linear(self.width)
        self.activation()
        self.add(torch.add, x, self.at)

    def branches(self) -> None:
        x, ends = self.at, []
        for _ in range(2):
            self.at = x
            self.linear(self.integer(1, 3))
            ends.append(self.activation())
        self.add(lambda *parts: torch.cat(parts, 1), *ends)

    def shared(self) -> None:
        """The same weights twice in a row."""
        weights = (self.leaf(self.width, self.width), self.leaf(self.width))
        for _ in range(2):
            self.linear(self.width, weights)
            self.activation()

    def gate(self) -> None:
        x = self.at
        self.linear(self.width)
        self.add(torch.sigmoid, self.at)
        self.add(torch.mul, x, self.at)

    def squared(self) -> None:
        """One tensor at both inputs of an operator."""
        self.add(lambda x, y: x * y, self.at, self.at)

    def functional(self) -> None:
        """Matrix products and parameters without modules."""
        self.add(torch.mm, self.at, self.leaf(self.width, self.integer(1, 4)))
        self.add(torch.mul, self.at, self.leaf(self.width))
        self.add(torch.sub, self.at, self.leaf(1))
        self.activation()

    def layer_norm(self) -> None:
        shape = (self.width,)
        self.add(lambda x, w, b: F.layer_norm(x, shape, w, b), self.at, self.leaf(*shape), self.leaf(*shape))

    def batch_norm(self) -> None:
        scales = self.leaf(self.width), self.leaf(self.width)
        self.add(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), self.at, *scales)

    def convolution(self, channels: int | None = None, residual: bool = False) -> str:
        groups = self.choose([1, self.width])
        channels = self.width if residual else channels or groups * self.integer(1, 2)
        stride = 1 if residual else self.integer(1, 2)
        weights = self.leaf(channels, self.width // groups, 3, 3), self.leaf(channels)
        return self.add(lambda x, w, b: F.conv2d(x, w, b, stride=stride, padding=1, groups=groups), self.at, *weights)

    def conv_block(self) -> None:
        self.convolution()
        self.activation()

    def conv_residual(self) -> None:
        x = self.at
        self.convolution(residual=True)
        self.activation()
        self.add(torch.add, self.at, x)

    def pool(self) -> None:
        if min(self.shapes[self.at][2:]) >= 2:
            pools = {"max": lambda x: F.max_pool2d(x, 2), "average": lambda x: F.avg_pool2d(x, 2, padding=1)}
            self.add(pools[self.choose(pools)], self.at)

    def flatten(self) -> None:
        self.add(lambda x: x.flatten(1), self.at)

    def loss(self) -> str:
        """One of the losses, as one line with exact second derivatives."""
        classes = self.width
        labels = torch.randint(classes, (BATCH,), generator=self.generator)
        targets = torch.randn(BATCH, classes, generator=self.generator, dtype=torch.float64)
        losses = {
            "cross entropy": lambda a: F.cross_entropy(a, labels),
            "smoothed": lambda a: F.cross_entropy(a, labels, label_smoothing=0.1),
            "squared error": lambda a: F.mse_loss(a, targets, reduction="sum"),
            "binary": lambda a: F.binary_cross_entropy_with_logits(a, targets.sigmoid()),
            "huber": lambda a: F.huber_loss(a, targets),
            "entropy": lambda a: (a.softmax(1) * a.log_softmax(1)).sum(),
        }
        return self.add(losses[self.choose(losses)], self.at, is_loss=True)

    def finish(self) -> None:
        """A last Linear and its loss, and maybe another loss on the way there."""
        before = self.at
        self.linear(self.integer(1, 4))
        last = self.loss()
        if self.draw(st.booleans()):
            self.at = before
            self.add(torch.add, self.loss(), last)


@st.composite
def perceptrons(draw):
    sketch = Sketch(draw, BATCH, 3)
    for _ in range(sketch.integer(1, 4)):
        getattr(
            sketch, sketch.choose(["dense", "residual", "branches", "shared", "gate", "squared", "functional", "layer_norm"])
        )()
    sketch.finish()
    return sketch


@st.composite
def convolutional(draw):
    sketch = Sketch(draw, BATCH, 2, 4, 3)
    for _ in range(sketch.integer(1, 3)):
        sketch.block(["conv_block", "conv_residual", "pool", "batch_norm"])
    sketch.flatten()
    sketch.finish()
    return sketch


def check(sketch: Sketch, method: str) -> None:
    """Every leaf, and every tensor in between that nothing has written into, with the recursion's gradient and diagonal."""
    tensors = run(sketch.lines, sketch.leaves)
    names = [name for name, tensor in tensors.items() if tensor._version == 0]
    gradients, diagonals = hesscale.grad(tensors[sketch.at], [tensors[name] for name in names], method=method, retain_graph=True)
    expected = recursion(sketch.lines, sketch.leaves, gauss_newton=method == "hesscale_gn")
    for name, g, s in zip(names, gradients, diagonals, strict=True):
        torch.testing.assert_close(g, expected[name][0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(s, expected[name][1], rtol=1e-8, atol=1e-10)
    hesscale.backward(tensors[sketch.at], method=method)
    for name, leaf in sketch.leaves.items():
        torch.testing.assert_close(leaf.hess_diag, expected[name][1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@networks(30)
@given(sketch=perceptrons())
def test_perceptrons_follow_the_recursion(method, sketch):
    check(sketch, method)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@networks(12)
@given(sketch=convolutional())
def test_convolutional_networks_follow_the_recursion(method, sketch):
    check(sketch, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@networks(200)
@given(sketch=perceptrons() | convolutional())
def test_many_networks_follow_the_recursion(method, sketch):
    check(sketch, method)


def test_the_recursion_keeps_track_of_work_in_place():
    """The slow recursion itself, where it is exact: a chain of one unit with an activation in place."""
    lines = [
        Line("a", torch.mul, ("x", "w")),
        Line("h", torch.sigmoid_, ("a",)),
        Line("loss", lambda h: (h**3).sum(), ("h",), is_loss=True),
    ]
    leaves = {name: torch.tensor([0.7], dtype=torch.float64, requires_grad=True) for name in "xw"}
    found = recursion(lines, leaves)
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name][1], hessian_diagonal(run(lines, leaves)["loss"], leaf))


def double(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


LABELS = torch.tensor([0, 2, 1, 2, 0])
LOSSES = {
    "cross entropy": lambda a: F.cross_entropy(a, LABELS),
    "class weights": lambda a: F.cross_entropy(a, LABELS, torch.tensor([1.0, 3.0, 0.5], dtype=a.dtype)),
    "ignore_index": lambda a: F.cross_entropy(a, LABELS, ignore_index=2),
    "label smoothing": lambda a: F.cross_entropy(a, LABELS, label_smoothing=0.2, reduction="sum"),
    "soft targets": lambda a: F.cross_entropy(a, torch.eye(3, dtype=a.dtype)[LABELS] * 0.8 + 0.1),
    "squared error": lambda a: F.mse_loss(a, torch.eye(3, dtype=a.dtype)[LABELS]),
    "smooth l1": lambda a: F.smooth_l1_loss(a, torch.eye(3, dtype=a.dtype)[LABELS]),
    "binary": lambda a: F.binary_cross_entropy_with_logits(a, torch.eye(3, dtype=a.dtype)[LABELS]),
    "binary of sigmoid": lambda a: F.binary_cross_entropy(a.sigmoid(), torch.eye(3, dtype=a.dtype)[LABELS]),
    "kl divergence": lambda a: F.kl_div(a.log_softmax(1), (torch.eye(3, dtype=a.dtype)[LABELS] + 1) / 4, reduction="batchmean"),
    "entropy": lambda a: (a.softmax(1) * a.log_softmax(1)).sum(),
    "focal": lambda a: -((1 - a.softmax(1)) ** 2 * a.log_softmax(1)).gather(1, LABELS[:, None]).mean(),
    "expectation": lambda a: ((a.softmax(1) * torch.arange(3.0, dtype=a.dtype)).sum(1) - 1).square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_last_layer_is_exact(loss):
    model = double(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    value = LOSSES[loss](model(torch.randn(5, 4, dtype=torch.float64)))
    exact = [hessian_diagonal(value, p) for p in model[2].parameters()]
    hesscale.backward(value)
    for p, truth in zip(model[2].parameters(), exact, strict=True):
        torch.testing.assert_close(p.hess_diag, truth)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ReLU(), nn.SiLU(), nn.Softplus()])
def test_the_last_two_layers_are_exact_under_squared_error(activation):
    model = double(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), activation, nn.Linear(6, 3))
    value = F.mse_loss(model(torch.randn(5, 4, dtype=torch.float64)), torch.randn(5, 3, dtype=torch.float64))
    exact = [hessian_diagonal(value, p) for p in model[2:].parameters()]
    hesscale.backward(value)
    for p, truth in zip(model[2:].parameters(), exact, strict=True):
        torch.testing.assert_close(p.hess_diag, truth)


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.ELU(), nn.GELU(), nn.Sigmoid(), nn.Softplus()])
def test_a_chain_one_unit_wide_is_exact_everywhere(activation):
    layers = [module for _ in range(4) for module in (nn.Linear(1, 1), activation)]
    model = double(*layers, nn.Linear(1, 1))
    value = F.binary_cross_entropy_with_logits(model(torch.randn(1, 1, dtype=torch.float64)), torch.tensor([[0.3]]).double())
    exact = [hessian_diagonal(value, p) for p in model.parameters()]
    hesscale.backward(value)
    for p, truth in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(p.hess_diag, truth)
