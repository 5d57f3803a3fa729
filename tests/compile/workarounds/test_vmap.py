"""Random numbers under vmap: different for each member, from the same distributions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.compile.make_fx import CannotTrace, trace
from hesscale.compile.workarounds.vmap import functional

aten = torch.ops.aten
N = 20_000
DRAWS = {
    "normal": lambda: torch.empty(N).normal_(1.0, 2.0),
    "distribution": lambda: torch.distributions.Normal(torch.ones(N), 2 * torch.ones(N)).rsample(),
    "uniform": lambda: torch.empty(N).uniform_(-1.0, 3.0),
    "exponential": lambda: torch.empty(N).exponential_(2.0),
    "bernoulli": lambda: torch.empty(N).bernoulli_(0.3),
    "gumbel": lambda: F.gumbel_softmax(torch.zeros(N, 3), hard=True)[:, 0],
    "dropout": lambda: F.dropout(torch.ones(N), 0.3),
    "rand": lambda: torch.rand(N),
}


def mapped(draw):
    """The draws of two members with equal arguments."""
    own = torch.zeros(2)
    graph = functional(trace(lambda own: draw() + own.sum(), [own]), [own])
    return torch.func.vmap(graph, randomness="different")(own.expand(2, 2))


@pytest.mark.parametrize("name", DRAWS)
def test_members_draw_independently_from_the_same_distribution(name):
    torch.manual_seed(0)
    first, second = mapped(DRAWS[name])
    assert not torch.equal(first, second)
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
    assert abs(correlation) < 0.03
    alone = DRAWS[name]()
    for found in (first, second):
        torch.testing.assert_close(found.mean(), alone.mean(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(found.std(), alone.std(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.empty(3).cauchy_(), lambda: torch.empty(3).geometric_(0.5), lambda: F.rrelu(-torch.ones(3), training=True)],
)
def test_draws_that_would_be_equal_for_all_members_are_refused(draw):
    with pytest.raises(CannotTrace, match="vmap would draw the same for all"):
        mapped(draw)


# ------------------------------------------------------------------------------------------- the faults, each of torch.func.vmap


def test_pytorch_bug_slice_scatter_overflows():
    """An end that is far out, as in ``x[2:] = y``, overflows: vmap adds to it. Without vmap it is clipped."""

    def write(x, y):
        return aten.slice_scatter(x, y, 0, 2, 2**63 - 1)

    x, y = torch.zeros(2, 4), torch.ones(2, 2)
    assert write(x[0], y[0]).tolist() == [0, 0, 1, 1]
    with pytest.raises(RuntimeError, match="cannot be represented as a SymInt"):
        torch.func.vmap(write)(x, y)


def test_pytorch_bug_index_fill_uses_the_last_value():
    """If only the value is mapped, all members get the last value."""
    x, index, values = torch.zeros(3), torch.tensor([0, 2]), torch.tensor([1.0, 2.0])
    found = torch.func.vmap(lambda value: aten.index_fill.int_Tensor(x, 0, index, value))(values)
    assert found.tolist() == [[2, 0, 2], [2, 0, 2]]  # the first should be [1, 0, 1]


def test_pytorch_bug_cdist_backward_is_wrong():
    """If only the gradient is mapped, the result is correct only for the first member."""
    torch.manual_seed(0)
    x, y, g = torch.randn(3, 2), torch.randn(4, 2), torch.randn(2, 3, 4)

    def backward(g):
        return aten._cdist_backward(g, x, y, 2.0, torch.cdist(x, y))

    found, expected = torch.func.vmap(backward)(g), torch.stack([backward(one) for one in g])
    torch.testing.assert_close(found[0], expected[0])
    assert not torch.allclose(found[1], expected[1])


@pytest.mark.parametrize("draw", [aten.normal_functional.default, aten.uniform.default, aten.exponential.default], ids=str)
def test_pytorch_bug_draws_into_unmapped_tensors_are_equal(draw):
    """vmap draws once for all, though with ``randomness="different"`` each should get numbers of its own."""
    torch.manual_seed(0)
    first, second = torch.func.vmap(lambda own: draw(torch.zeros(5)) + own, randomness="different")(torch.zeros(2))
    assert torch.equal(first, second)


def test_pytorch_bug_bernoulli_with_the_same_randomness_raises():
    """vmap refuses ``randomness="same"`` for a tensor that it maps over, of which only the shape matters."""
    with pytest.raises(RuntimeError, match="same randomness with a batched tensor input"):
        torch.func.vmap(lambda x: aten.bernoulli.p(x, 0.5), randomness="same")(torch.zeros(2, 5))


# -------------------------------------------------------------------------------------------------------------------- ensembles


@pytest.mark.parametrize("how", ["vmap", "abreast"])
@pytest.mark.parametrize("options", [{}, {"per_sample": True}])
def test_members_draw_independent_labels(how, options):
    models = [nn.Linear(4, 3) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    optimizers = [hesscale.GGNMC(model.parameters(), lr=1e-3, **options) for model in models]
    step = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None, how=how, backend="traced")
    x, y = torch.randn(5, 4), torch.randint(0, 3, (5,))
    squares = []  # of draws, averaged, after each step
    for _ in range(3):
        step(x, y)
        squares.append([o.state[m.weight]["exp_hess_sq"].clone() for m, o in zip(models, optimizers, strict=True)])
    assert step.mode == "traced"
    new = [now - 0.999 * before for before, now in zip(*squares[1:], strict=True)]
    assert not torch.allclose(new[0], new[1])
    assert not torch.allclose(new[1], new[2])


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)
