"""Diagonals that once were wrong without a word, against finite differences of gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import hesscale
from hesscale.estimators import estimate

pytestmark = pytest.mark.usefixtures("double_precision")
TARGETS = torch.tensor([0, 2])


def differences(function, inputs, i, h=1e-5):
    """∂g_j/∂x_j of input i."""
    found = torch.zeros(inputs[i].numel())
    for j in range(found.numel()):
        ends = []
        for sign in (-1, 1):
            moved = [x.detach().clone().requires_grad_() for x in inputs]
            with torch.no_grad():
                moved[i].view(-1)[j] += sign * h
            ends.append(torch.autograd.grad(function(*moved), moved[i])[0].flatten()[j])
        found[j] = (ends[1] - ends[0]) / (2 * h)
    return found.view_as(inputs[i])


def cumulated(*weights):
    return lambda z: ((z.logcumsumexp(1) * torch.tensor(weights)).sum(1) ** 2).sum()


X, BIAS = (2, 3), (3,)
# PyTorch's double backward is wrong in these heads
HEADS = {
    "layer_norm": (lambda z, b: F.cross_entropy(F.layer_norm(z, (3,), None, b), TARGETS), X, BIAS),
    "layer_norm, all": (lambda z, b: F.cross_entropy(F.layer_norm(z, (2, 3), None, b), TARGETS), X, X),
    "batch_norm": (lambda z, b: F.cross_entropy(F.batch_norm(z, None, None, None, b, True), TARGETS), X, BIAS),
    "batch_norm, fixed": (
        lambda z, b: F.cross_entropy(F.batch_norm(z, torch.zeros(3), torch.ones(3), None, b, False), TARGETS),
        X,
        BIAS,
    ),
    "batch_norm, images": (lambda z, b: F.batch_norm(z, None, None, None, b, True).logsumexp(1).sum(), (2, 3, 2, 2), BIAS),
    "instance_norm": (lambda z, b: F.instance_norm(z, bias=b).logsumexp(1).sum(), (1, 3, 4), BIAS),
    "logcumsumexp": (cumulated(1.0, 2.0, -1.0), X),
    "logcumsumexp, zeros": (cumulated(1.0, -1.0, 0.0), X),
    "logcumsumexp, last": (cumulated(0.0, 0.0, 1.0), X),
    "logcumsumexp, rows": (lambda z: (z.logcumsumexp(-2)[1] ** 2).sum(), X),
    "weight_norm": (lambda v, g: F.cross_entropy(torch._weight_norm(v, g, 0), TARGETS), X, (2, 1)),
    "weight_norm, columns": (lambda v, g: F.cross_entropy(torch._weight_norm(v, g, 1), TARGETS), X, (1, 3)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_torch_differentiates_twice_wrongly(name):
    torch.manual_seed(0)
    function, *shapes = HEADS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    _, diagonals = hesscale.grad(function(*inputs), inputs)
    exact = estimate("exact", function(*inputs), inputs)
    for i, (found, ours) in enumerate(zip(diagonals, exact, strict=True)):
        truth = differences(function, inputs, i)
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


def test_logcumsumexp_where_nothing_has_come_yet():
    z = torch.tensor([[-torch.inf, 0.3, 1.0]], requires_grad=True)
    (gradient,), (found,) = hesscale.grad((z.logcumsumexp(1)[:, 1:].sum(1) ** 2).sum(), [z])
    rest = z.detach()[:, 1:].requires_grad_()
    (expected,), (exact,) = hesscale.grad(cumulated(1.0, 1.0)(rest), [rest])
    torch.testing.assert_close(gradient[:, 1:], expected)
    torch.testing.assert_close(found[:, 1:], exact)


def test_a_divisor_of_few_digits():
    x, y = torch.full((2,), 2.0, requires_grad=True), torch.full((2,), 1.5, dtype=torch.float32)
    (found,) = hesscale.grad(((x / y) ** 2).sum(), [x])[1]
    torch.testing.assert_close(found, torch.full_like(x, 2 / 1.5**2), rtol=1e-14, atol=0)


def test_group_norm_of_no_samples():
    x, weight = torch.zeros(0, 4, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    hesscale.backward(F.group_norm(x, 2, weight).square().sum())
    assert x.hess_diag.shape == x.shape
    assert torch.equal(weight.hess_diag, torch.zeros(4))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ["bmm", "csr", "csc"])
def test_constants_that_are_sparse(name):
    torch.manual_seed(0)
    full, x = torch.randn(2, 4, 4).relu(), torch.randn(2, 4, 3, requires_grad=True)
    if name == "bmm":
        found = hesscale.grad(torch.bmm(full.to_sparse(), x).square().sum(), x)[1][0]
    else:
        full, x = full[0], x.detach()[0].requires_grad_()
        constant = full.to_sparse_csr() if name == "csr" else full.to_sparse_csc()
        found = hesscale.grad((constant @ x).square().sum(), x)[1][0]
    torch.testing.assert_close(found, hesscale.grad((full @ x).square().sum(), x)[1][0])
