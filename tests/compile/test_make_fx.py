"""Traces of functions as flat graphs of operators: what they contain, and what they refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributions import Distribution

from hesscale.compile.make_fx import CannotTrace, trace

OUTSIDE = torch.ones(3)


def changes_and_returns(x, y):
    x.mul_(2)
    return [(x * y).sum(), y.t()]


def test_a_trace_repeats_in_place_changes():
    tensors = [torch.zeros(3, 3), torch.zeros(3, 3)]
    graph = trace(changes_and_returns, tensors)
    assert not any(tensor.any() for tensor in tensors)  # nothing has run on them
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    own = x.clone()
    torch.testing.assert_close(graph(own, y), changes_and_returns(x, y))
    assert torch.equal(own, x)


def gradient(function):
    def differentiate(x):
        with torch.enable_grad():
            x.requires_grad_()
            return list(torch.autograd.grad(function(x), x))

    return differentiate


def test_a_trace_contains_the_operations_of_autograd():
    x = torch.randn(4)
    graph = trace(gradient(lambda x: x.tanh().sum()), [torch.zeros(4)])
    torch.testing.assert_close(graph(x), [1 - x.tanh() ** 2])


def seeded(x):
    torch.manual_seed(0)
    return [F.dropout(x)]


CANNOT = {
    "a condition": (lambda x: [x if x.sum() > 0 else -x], "reads the values"),
    "a number": (lambda x: [x * x.sum().item()], "reads the values"),
    "a tensor from outside": (lambda x: [x * OUTSIDE], "neither in the model nor an argument"),
    "data of Python": (lambda x: [x * torch.tensor([1.0, 2.0, 3.0])], "makes a tensor of Python data"),
    "a generator": (lambda x: [torch.rand(3, generator=torch.Generator())], "its own torch.Generator"),
    "a seed": (seeded, "sets the state of a random number generator"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_functions_that_cannot_be_traced(name):
    function, saying = CANNOT[name]
    with pytest.raises(CannotTrace, match=saying):
        trace(function, [torch.randn(3)])


def test_numbers_are_constants_and_data_if_allowed():
    x = torch.randn(3)
    assert torch.equal(trace(lambda x: [x * torch.tensor(0.5)], [x])(x)[0], 0.5 * x)
    graph = trace(lambda x: [x * torch.tensor([1.0, 2.0, 3.0])], [x], constants=True)
    assert torch.equal(graph(x)[0], x * torch.tensor([1.0, 2.0, 3.0]))


FOREACH = {
    "add_": lambda a, b: torch._foreach_add_(a, b, alpha=2),
    "addcmul_": lambda a, b: torch._foreach_addcmul_(a, b, b, 0.5),
    "addcdiv_": lambda a, b: torch._foreach_addcdiv_(a, b, b, value=3.0),
    "lerp_": lambda a, b: torch._foreach_lerp_(a, b, 0.3),
    "maximum_": lambda a, b: torch._foreach_maximum_(a, 0.1),
    "sqrt": lambda a, b: torch._foreach_copy_(a, torch._foreach_sqrt(b)),
    "mul by one tensor": lambda a, b: torch._foreach_mul_(a, b[0].sum()),
}


@pytest.mark.parametrize("name", FOREACH)
def test_foreach_operators_are_split(name):
    def function(*given):
        FOREACH[name](list(given[:2]), list(given[2:]))
        return []

    given = [torch.rand(3) + 0.1 for _ in range(4)]
    own = [tensor.clone() for tensor in given]
    graph = trace(function, given)
    assert "_foreach_" not in str(graph.graph)
    function(*given)
    graph(*own)
    torch.testing.assert_close(own, given)


def test_settings_are_restored():
    def settings():
        return Distribution._validate_args, torch._C._get_mkldnn_enabled(), torch.manual_seed, torch.compiler.is_compiling()

    before = settings()
    with pytest.raises(CannotTrace):
        trace(seeded, [torch.ones(3)])
    assert settings() == before
