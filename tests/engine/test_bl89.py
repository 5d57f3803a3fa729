"""Becker and LeCun's method: Eq. 4 on softmax and log-softmax as if elementwise, with f' = ∂y_i/∂x_i and f'' = ∂²y_i/∂x_i²."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale


def diagonal(loss, x, method="bl89"):
    return hesscale.grad(loss, x, method=method)[1][0]


@pytest.fixture
def logits():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def test_cross_entropy_is_curved_only_at_the_target(logits):
    target = torch.tensor([0, 3, 1, 1, 2])
    q = logits.softmax(1).detach()
    expected = F.one_hot(target, 4) * (q - q * q) / 5
    torch.testing.assert_close(diagonal(F.cross_entropy(logits, target), logits), expected)


def test_other_methods_see_every_class(logits):
    target = torch.tensor([0, 3, 1, 1, 2])
    q = logits.softmax(1).detach()
    torch.testing.assert_close(diagonal(F.cross_entropy(logits, target), logits, method="hesscale"), (q - q * q) / 5)


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax, torch._safe_softmax])
@pytest.mark.parametrize("shape", [(5, 4), (2, 4, 3)])
def test_as_if_elementwise(function, shape):
    """The formula written out entry by entry, below a squared error."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
    y = function(x, 1)
    wanted = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view(shape)
    g, s = 2 * (y - wanted).detach(), 2
    expected = torch.zeros(x.numel(), dtype=torch.float64)
    for i in range(x.numel()):
        (row,) = torch.autograd.grad(y.reshape(-1)[i], x, create_graph=True)
        first = row.reshape(-1)[i]
        second = torch.autograd.grad(first, x, retain_graph=True)[0].reshape(-1)[i]
        expected[i] = first.detach() ** 2 * s + second * g.reshape(-1)[i]
    loss = F.mse_loss(function(x, 1), wanted, reduction="sum")
    torch.testing.assert_close(diagonal(loss, x), expected.view(shape))


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid])
def test_equals_hesscale_with_squared_error(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 4), activation(), nn.Linear(4, 2)).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    parameters = list(model.parameters())
    _, bl89 = hesscale.grad(F.mse_loss(model(x), y), parameters, method="bl89")
    _, ours = hesscale.grad(F.mse_loss(model(x), y), parameters)
    for mine, theirs in zip(ours, bl89, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
