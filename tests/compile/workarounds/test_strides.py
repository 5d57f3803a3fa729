"""Graphs whose views do not depend on the strides that the trace expected."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hesscale
from hesscale.compile.make_fx import trace


def mixed_strides() -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient and input of an ELU; what torch expects of elu_backward has the strides of the input."""
    return torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(2, 3, 4, 4)


def test_pytorch_bug_fake_tensors_have_other_strides():
    """elu_backward gives its result the strides of the gradient; a fake tensor has those of the input.

    Once both agree, for all operators whose gradient and input may lie differently in memory, the file ``strides.py`` can go.
    """
    g, x = mixed_strides()
    mode = FakeTensorMode()
    fake = gradient_of_elu(mode.from_tensor(g), mode.from_tensor(x))
    assert fake.stride() != gradient_of_elu(g, x).stride()


def gradient_of_elu(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.elu_backward(g, 1.0, 1.0, 1.0, False, x)


def flattened(g, x):
    return [gradient_of_elu(g, x).reshape(2, -1) * 1]


def flattened_and_written_to_alone(g, x):
    y = gradient_of_elu(g, x).reshape(2, -1)
    y.add_(1)
    return [y * 1]


@pytest.mark.parametrize("function", [flattened, flattened_and_written_to_alone])
def test_views_do_not_depend_on_strides(function):
    given = mixed_strides()
    graph = trace(function, given)
    expected = function(*(tensor.contiguous() for tensor in given))
    torch.testing.assert_close(graph(*given), expected)


def written_through_the_view(g, x):
    y = gradient_of_elu(g, x)
    y.view(2, -1).add_(1)
    return [y * 1]


def read_through_the_view(g, x):
    y = gradient_of_elu(g, x)
    view = y.view(2, -1)
    y.add_(1)
    return [view * 1]


@pytest.mark.parametrize("function", [written_through_the_view, read_through_the_view])
def test_views_that_must_see_later_changes_are_kept(function):
    contiguous = [tensor.contiguous() for tensor in mixed_strides()]
    graph = trace(function, contiguous)
    torch.testing.assert_close(graph(*contiguous), function(*contiguous))
    with pytest.raises(RuntimeError, match="view"):  # rather than other numbers
        trace(function, mixed_strides())(*mixed_strides())


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in (nn.SELU, nn.CELU, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid)]


@pytest.mark.parametrize("activation", [nn.ELU, nn.Softplus, *SLOW])
def test_a_step_with_gradients_in_another_order_than_inputs(activation):
    torch.manual_seed(0)
    layers = nn.Linear(5, 32), nn.Unflatten(1, (2, 4, 4)), activation(), nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(27, 3)
    models = [nn.Sequential(*layers).to(memory_format=torch.channels_last) for layers in (layers, copy.deepcopy(layers))]

    def step_of(model, backend):
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, eps=1e-4)
        return hesscale.compile_step(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, backend=backend)

    traced, eager = step_of(models[0], "traced"), step_of(models[1], "eager")
    for _ in range(5):
        x, y = torch.randn(4, 5), torch.randint(0, 3, (4,))
        torch.testing.assert_close(traced(x, y), eager(x, y), rtol=1e-4, atol=1e-5)
    assert traced.mode == "traced", traced.reason
