"""Custom functions without ``hess_diag``: they work if probes show that they are elementwise, and are refused otherwise."""

from __future__ import annotations

import pytest
import torch
from oracle import hessian_diagonal
from torch.autograd.function import once_differentiable

import hesscale
from hesscale.rules import custom_functions


class Function(torch.autograd.Function):
    """x³, with a backward as it should be."""

    @staticmethod
    def forward(ctx, x, *arguments):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g, *[None] * (len(ctx.needs_input_grad) - 1)


class ByOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (1 - y) * g


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0].abs() < 1)


class Once(Function):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Detached(Function):
    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0].detach() ** 2 * g


class WithoutGraph(Function):
    @staticmethod
    def backward(ctx, g):
        with torch.no_grad():
            return 3 * ctx.saved_tensors[0] ** 2 * g


class Derivative(Function):
    """Saves what depends on x, without its graph."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(3 * x**2)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return ctx.saved_tensors[0] * g


class Attribute(Derivative):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = 3 * x**2
        return x**3

    @staticmethod
    def backward(ctx, g):
        return ctx.slope * g


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - (g * y).sum(-1, keepdim=True))


class OfAll(StraightThrough):
    """A backward whose slope at one entry depends on the others."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x * x.mean()).tanh()


class Nothing(StraightThrough):
    """Of zeros nothing can be learned."""

    @staticmethod
    def backward(ctx, g):
        return 0 * g


def point(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize(
    ("function", "arguments"), [(Function, ()), (Function, (2, "x")), (ByOutput, ()), (StraightThrough, ()), (Clipped, ())]
)
def test_elementwise_functions_need_no_rule(function, arguments, method):
    x = point(3, 4)
    loss = function.apply(2 * x, *arguments).sin().square().sum()
    for head in ("rules", "exact"):
        (found,) = hesscale.grad(loss, x, head=head, retain_graph=True)[1]
        torch.testing.assert_close(found, hessian_diagonal(loss, x))
    weight = torch.nn.Parameter(torch.eye(4, dtype=torch.float64), requires_grad=False)  # where the head ends
    loss = (function.apply(x, *arguments) @ weight).square().sum()
    (found,) = hesscale.grad(loss, x, method=method, retain_graph=True)[1]
    if method == "hesscale":
        torch.testing.assert_close(found, hessian_diagonal(loss, x))
    else:
        (first,) = torch.autograd.grad(function.apply(x, *arguments).sum(), x)
        torch.testing.assert_close(found, 2 * first**2)


@pytest.mark.parametrize("function", [Once, Detached, WithoutGraph, Derivative, Attribute, Softmax, OfAll, Nothing])
def test_other_functions_are_refused(function):
    x = point(3, 4)
    with pytest.raises(hesscale.UnsupportedOperator, match="defines no hess_diag"):
        hesscale.backward(function.apply(x).square().sum())
    assert x.grad is None


def test_functions_are_probed_once(monkeypatch):
    monkeypatch.setattr(custom_functions, "_known", {})
    probed = []
    monkeypatch.setattr(custom_functions, "is_elementwise", lambda node, index: probed.append(node) or True)
    for shape in ((3, 4), (3, 4), (5,)):
        hesscale.backward(Function.apply(point(*shape)).square().sum())
    assert len(probed) == 2


def test_random_numbers_are_left_alone(monkeypatch):
    monkeypatch.setattr(custom_functions, "_known", {})
    before = torch.get_rng_state()
    hesscale.backward(Function.apply(point(3)).square().sum())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype):
    x = point(3, 4).detach().to(dtype).requires_grad_()
    (found,) = hesscale.grad(Function.apply(x).square().sum(), x)[1]
    torch.testing.assert_close(found.double(), 30 * x.detach().double() ** 4, rtol=0.05, atol=0.05)
