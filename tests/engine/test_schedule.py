"""What is decided once per structure of a graph must hold for every graph of it, and keep none of them alive."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.engine import schedule as blueprint
from hesscale.rules import RULES

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def no_blueprints(monkeypatch):
    monkeypatch.setattr(blueprint, "_blueprints", {})


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def loss_of(model: nn.Module, size: int = 5) -> torch.Tensor:
    torch.manual_seed(1)
    return F.cross_entropy(model(torch.randn(size, 4)), torch.arange(size) % 3)


def diagonals(model: nn.Module, loss: torch.Tensor, **options) -> list[torch.Tensor]:
    model.zero_grad()
    hesscale.backward(loss, **options)
    return [p.hess_diag for p in model.parameters()]


def test_graphs_of_one_structure_share_a_blueprint():
    model = perceptron()
    first = diagonals(model, loss_of(model))
    assert len(blueprint._blueprints) == 1
    again = diagonals(model, loss_of(model))
    assert len(blueprint._blueprints) == 1
    torch.testing.assert_close(again, first, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"method": "hesscale_gn"}, {"method": "bl89"}, {"head": "rules"}, {"fallback": "exact"}])
def test_options_have_blueprints_of_their_own(options):
    model = perceptron()
    alone = diagonals(model, loss_of(model), **options)
    blueprint._blueprints.clear()
    diagonals(model, loss_of(model))
    torch.testing.assert_close(diagonals(model, loss_of(model), **options), alone, rtol=0, atol=0)
    assert len(blueprint._blueprints) == 2


def test_outputs_and_inputs_have_blueprints_of_their_own():
    model = perceptron()
    diagonals(model, loss_of(model))
    x, y = torch.randn(5, 4), torch.arange(5) % 3
    hidden = model[:2](x)
    logits = model[2](hidden)
    hesscale.grad(F.cross_entropy(logits, y), [hidden], retain_graph=True)
    hesscale.grad(F.cross_entropy(logits, y), [logits], retain_graph=True)
    hesscale.grad(F.cross_entropy(logits, y), [hidden], outputs=logits)
    assert len(blueprint._blueprints) == 4


@pytest.mark.parametrize("width", [1, 4])
def test_a_broadcast_that_comes_and_goes(width):
    """The same operators, but with an input that is expanded in one graph only."""
    for size in (4, width, 4):
        a, b = torch.randn(size, requires_grad=True), torch.randn(4, requires_grad=True)
        found = hesscale.grad(((a * b) ** 2).sum(), [a, b])[1]
        expected = 2 * b.detach() ** 2, 2 * a.detach() ** 2
        torch.testing.assert_close(found, (expected[0].sum_to_size(size), expected[1].expand(4)))


def test_a_rule_that_is_replaced_is_heeded(monkeypatch):
    model = perceptron()
    before = diagonals(model, loss_of(model))
    monkeypatch.setitem(RULES, "TanhBackward0", RULES["SigmoidBackward0"])  # another function
    assert not torch.equal(diagonals(model, loss_of(model))[0], before[0])
    monkeypatch.delitem(RULES, "TanhBackward0")
    with pytest.raises(hesscale.UnsupportedOperator, match="TanhBackward0"):
        hesscale.backward(loss_of(model))


def test_a_transpose_with_a_rule_of_its_own_is_not_taken_together_with_the_product(monkeypatch):
    model = perceptron()
    before = diagonals(model, loss_of(model))
    monkeypatch.setitem(RULES, "TBackward0", RULES["TBackward0"])
    hesscale.register_rule("TBackward0", fan_in=False, fan_out=False)(lambda node, g, s: None if s is None else 2 * s.t())
    torch.testing.assert_close(diagonals(model, loss_of(model))[0], 2 * before[0])


def test_a_sparse_factor_is_refused_after_a_dense_one():
    x = torch.randn(3, 3)
    dense = torch.eye(3).requires_grad_()
    hesscale.backward((dense @ x).square().sum())
    sparse = torch.eye(3).to_sparse().requires_grad_()
    with pytest.raises(hesscale.UnsupportedOperator, match="sparse"):
        hesscale.backward((sparse @ x).square().sum())


def test_a_hook_that_clears_gradients_is_heeded():
    model = perceptron()
    plain = diagonals(model, loss_of(model))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    torch.testing.assert_close(diagonals(model, loss_of(model)), plain)


def test_weights_used_elsewhere_too():
    """A transpose with two consumers, and a weight that is also a summand."""
    torch.manual_seed(0)
    w = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    transposed = w.t()
    found = hesscale.grad((x @ transposed).sum() ** 2 + (transposed**3).sum() + (w**2).sum(), w, head="rules")[1][0]
    parts = [
        hesscale.grad((x @ w.t()).sum() ** 2, w, head="rules")[1][0],
        hesscale.grad((w.t() ** 3).sum(), w)[1][0],
        hesscale.grad((w**2).sum(), w)[1][0],
    ]
    torch.testing.assert_close(found, sum(parts))


def test_the_number_of_blueprints_is_bounded(monkeypatch):
    monkeypatch.setattr(blueprint, "MOST_BLUEPRINTS", 3)
    model = perceptron()
    for size in range(1, 9):
        diagonals(model, loss_of(model, size))
        assert len(blueprint._blueprints) <= 3


def test_a_blueprint_holds_no_tensor_and_no_node():
    model = perceptron()
    diagonals(model, loss_of(model))
    seen, stack = set(), list(blueprint._blueprints.items())
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type) or callable(thing):
            continue
        seen.add(id(thing))
        assert not isinstance(thing, (torch.Tensor, torch.autograd.graph.Node))
        stack += gc.get_referents(thing)
    assert len(seen) > 50


def test_large_activations_wait_for_the_pass(monkeypatch):
    """In Gauss-Newton passes nothing needs their gradient, but running ahead would hold memory; the numbers are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.ELU(), nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    params, diagonals, hooks = list(model.parameters()), [], []
    for limit in (2**16, 0):
        monkeypatch.setattr(blueprint, "MOST_RIDING", limit)
        blueprint._blueprints.clear()
        diagonals.append(hesscale.grad(F.cross_entropy(model(x), y), params, method="hesscale_gn")[1])
        (known,) = blueprint._blueprints.values()
        hooks.append(len(known.schedule(frozenset())))
    blueprint._blueprints.clear()
    assert hooks[1] == hooks[0] + 2
    for a, b in zip(*diagonals, strict=True):
        assert torch.equal(a, b)
