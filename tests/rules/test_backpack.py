"""BackPACK's DiagHessian and DiagGGNExact, where HesScale is exact: an implementation by others agrees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hesscale

pytestmark = pytest.mark.usefixtures("double_precision")

backpack = pytest.importorskip("backpack", reason="BackPACK is not installed")

ACTIVATIONS = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
LOSSES = {
    "cross entropy": (lambda: nn.CrossEntropyLoss(), lambda n, c: torch.randint(c, (n,))),
    "squared error": (lambda: nn.MSELoss(), lambda n, c: torch.randn(n, c)),
    "summed": (lambda: nn.CrossEntropyLoss(reduction="sum"), lambda n, c: torch.randint(c, (n,))),
}
QUANTITIES = {"hesscale": "diag_h", "hesscale_gn": "diag_ggn_exact"}


def theirs(model, loss_function, x, y, quantity):
    """BackPACK's diagonal of every parameter."""
    from backpack.extensions import DiagGGNExact, DiagHessian

    extension = {"diag_h": DiagHessian, "diag_ggn_exact": DiagGGNExact}[quantity]()
    model, loss_function = backpack.extend(model), backpack.extend(loss_function)
    with backpack.backpack(extension):
        loss_function(model(x), y).backward()
    found = [getattr(p, quantity).clone() for p in model.parameters()]
    model.zero_grad()
    return found


def ours(model, loss_function, x, y, method):
    hesscale.backward(loss_function(model(x), y), method=method)
    return [p.hess_diag for p in model.parameters()]


def compare(model, loss, x, method, layers):
    make, targets = LOSSES[loss]
    y = targets(len(x), model(x).shape[1])
    expected = theirs(model, make(), x, y, QUANTITIES[method])
    found = ours(model, make(), x, y, method)
    count = len(list(model[layers].parameters()))
    assert count
    torch.testing.assert_close(found[-count:], expected[-count:])


@pytest.mark.parametrize("method", QUANTITIES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_last_layer(activation, loss, method):
    model = nn.Sequential(nn.Linear(4, 6), ACTIVATIONS[activation](), nn.Linear(6, 5), ACTIVATIONS[activation](), nn.Linear(5, 3))
    compare(model, loss, torch.randn(7, 4), method, slice(4, None))


@pytest.mark.parametrize("method", QUANTITIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_last_two_layers_under_squared_error(activation, method):
    model = nn.Sequential(nn.Linear(4, 6), ACTIVATIONS[activation](), nn.Linear(6, 5), ACTIVATIONS[activation](), nn.Linear(5, 3))
    compare(model, "squared error", torch.randn(7, 4), method, slice(2, None))


@pytest.mark.parametrize("method", QUANTITIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_chain_one_unit_wide(activation, method):
    layers = [layer for _ in range(3) for layer in (nn.Linear(1, 1), ACTIVATIONS[activation]())]
    compare(nn.Sequential(*layers, nn.Linear(1, 1)), "squared error", torch.randn(7, 1), method, slice(None))


@pytest.mark.parametrize("method", QUANTITIES)
def test_a_convolution_before_the_outputs(method):
    """The last two layers are exact under squared error; here the lower one is a convolution that fits its input once."""
    model = nn.Sequential(nn.Conv2d(2, 3, 4), nn.Tanh(), nn.Flatten(), nn.Linear(3, 2))
    compare(model, "squared error", torch.randn(5, 2, 4, 4), method, slice(None))
