"""Options and parameters that are refused."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from torch import nn
from training import weight

import hesscale
from hesscale.optim import GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1},
        {"weight_decay": -1},
        {"trust_radius": 0},
        {"curvature_every": 0},
        {"curvature_every": 1.5},
        {"curvature_warmup": -1},
        {"curvature_warmup": 2.5},
        {"curvature_warmup": True},
        {"curvature_warmup": None},
        {"curvature_warmup": math.inf},
        {"graft": True},
        {"graft": 2.0},
        {"graft": (3.0, 1.0)},
        {"trust_region": "layer"},
        {"on_nonfinite": "ignore"},
    ],
)
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaHesScale([torch.ones(1, requires_grad=True)], **options)


def test_counts_may_be_numpys():
    optimizer = AdaHesScale([torch.ones(1, requires_grad=True)], curvature_every=np.int64(3), curvature_warmup=np.int32(2))
    assert (optimizer.curvature_every, optimizer.param_groups[0]["curvature_warmup"]) == (3, 2)


@pytest.mark.parametrize("name", ["curvature_every", "curvature_dtype", "on_nonfinite", "trust_region", "num_samples"])
def test_options_of_the_whole_optimizer_are_no_groups(name):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = hesscale.AdaHessian([first])
    with pytest.raises(ValueError, match=f"{name} applies to the whole optimizer"):
        optimizer.add_param_group({"params": [second], name: None})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [second], "name": "mine"})


@pytest.mark.parametrize("option", [{"rho": 0.1}, {"graft": (1.0, 3.0)}, {"damping": 0.1}, {"trust_radius": 1.0}])
def test_groups_of_sophia_take_no_options_that_it_would_ignore(option):
    (name,) = option
    with pytest.raises(ValueError, match=name):
        hesscale.optim.SophiaG([{"params": [nn.Parameter(torch.ones(2))], **option}])


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match="complex"):
        AdaHesScale([torch.ones(1, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(ValueError, match="num_samples"):
        AdaHessian([torch.ones(1, requires_grad=True)], num_samples=0)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([0, 1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        Adam(embedding.parameters()).step()


def test_float16_parameters_and_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="float16"):
        AdaHesScale([weight(dtype=torch.float16)])
    with pytest.raises(ValueError, match="betas"):
        AdaHesScale([{"params": [weight()], "betas": (1.0, 1.0)}])
    opt = AdaHesScale([w := weight()])
    w.grad, w.hess_diag = torch.ones(1, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="shape"):
        opt.step()


@pytest.mark.parametrize("options", [{"head": "Exact"}, {"fallback": "exakt"}])
def test_unknown_choices_of_backward_are_refused(options):
    w = weight()
    with pytest.raises(ValueError, match=next(iter(options))):
        AdaHesScale([w]).backward((w**2).sum(), **options)


@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHesScaleGN, AdaHessian, GGNMC])
def test_signatures_show_all_options(optimizer):
    """What ``help`` and editors show, with this optimizer's own defaults."""
    found, base = (inspect.signature(cls).parameters for cls in (optimizer, hesscale.optim.CurvatureOptimizer))
    assert not [p for p in found.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert list(found)[:5] == list(base)[:5] == ["params", "lr", "betas", "eps", "weight_decay"]
    assert found.keys() >= base.keys()
    made = optimizer([torch.ones(2, requires_grad=True)])
    for name, parameter in found.items():
        if name in made.defaults:
            assert made.defaults[name] == parameter.default, name


def test_a_subclass_with_arguments_of_its_own_has_its_own_signature():
    class Mine(hesscale.AdaHesScale):
        def __init__(self, params, pace):
            super().__init__(params, lr=pace)

    assert list(inspect.signature(Mine).parameters) == ["params", "pace"]
