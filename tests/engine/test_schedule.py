"""A schedule is shared by all graphs of one structure. It must be correct for each of them, and keep none of them alive."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracle import hessian_diagonal
from torch import nn

import hesscale
from hesscale.rules import RULES

pytestmark = pytest.mark.usefixtures("double_precision")


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


def entropy_loss(model: nn.Module, size: int = 5) -> torch.Tensor:
    """Needs double backward through the head."""
    torch.manual_seed(1)
    logits = model(torch.randn(size, 4))
    return (logits.softmax(1) * logits.log_softmax(1)).sum()


def calls_of(function) -> int:
    """How many functions of hesscale it calls."""
    package, count = str(Path(hesscale.__file__).parent), 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_second_pass_reuses_the_schedule():
    model = perceptron()
    losses = [loss_of(model, size=17) for _ in range(3)]
    first, second, third = (calls_of(lambda loss=loss: hesscale.backward(loss)) for loss in losses)
    assert first > 2 * second
    assert second == third


@pytest.mark.parametrize("options", [{"method": "hesscale_gn"}, {"method": "bl89"}, {"head": "rules"}])
def test_options_have_separate_schedules(options):
    """The same graph with and without them, in turn."""
    model = perceptron()
    first, plain, again = (diagonals(model, entropy_loss(model), **o) for o in (options, {}, options))
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.allclose(plain[0], first[0])


def test_fallbacks_have_separate_schedules(monkeypatch):
    monkeypatch.delitem(RULES, "TanhBackward0")
    model = perceptron()
    with pytest.warns(hesscale.CurvatureWarning, match="brute force"):
        hesscale.backward(loss_of(model), fallback="exact")
    with pytest.raises(hesscale.UnsupportedOperator, match="TanhBackward0"):
        hesscale.backward(loss_of(model))


def test_brute_force_warns_at_every_pass(monkeypatch):
    monkeypatch.delitem(RULES, "TanhBackward0")
    model = perceptron()
    for _ in range(2):
        with pytest.warns(hesscale.CurvatureWarning, match="brute force"):
            hesscale.backward(loss_of(model), fallback="exact")


def test_outputs_and_inputs_have_separate_schedules():
    """One graph, asked for different tensors and with different ends of the head, in turn and again."""
    model, x, y = perceptron(), torch.randn(5, 4), torch.arange(5) % 3
    hidden = model[:2](x)
    logits = model[2](hidden)
    loss = F.cross_entropy(logits, y)

    def ask():
        found = [hesscale.grad(loss, [tensor], retain_graph=True)[1][0] for tensor in (hidden, logits)]
        return [*found, hesscale.grad(loss, [hidden], outputs=hidden, retain_graph=True)[1][0]]

    first, again = ask(), ask()
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(first[1], hessian_diagonal(loss, logits))
    torch.testing.assert_close(first[2], hessian_diagonal(loss, hidden))  # exact where the head ends, by recursion otherwise
    assert not torch.allclose(first[0], first[2])


@pytest.mark.parametrize("width", [1, 4])
def test_a_broadcast_that_comes_and_goes(width):
    """The same operators, but with an input that is expanded in one graph only."""
    for size in (4, width, 4):
        a, b = torch.randn(size, requires_grad=True), torch.randn(4, requires_grad=True)
        found = hesscale.grad(((a * b) ** 2).sum(), [a, b])[1]
        expected = 2 * b.detach() ** 2, 2 * a.detach() ** 2
        torch.testing.assert_close(found, (expected[0].sum_to_size(size), expected[1].expand(4)))


def test_a_replaced_rule_is_used(monkeypatch):
    model = perceptron()
    before = diagonals(model, loss_of(model))
    monkeypatch.setitem(RULES, "TanhBackward0", RULES["SigmoidBackward0"])  # another function
    assert not torch.equal(diagonals(model, loss_of(model))[0], before[0])
    monkeypatch.delitem(RULES, "TanhBackward0")
    with pytest.raises(hesscale.UnsupportedOperator, match="TanhBackward0"):
        hesscale.backward(loss_of(model))


def test_a_transpose_with_a_custom_rule_is_not_fused(monkeypatch):
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


def test_hooks_that_clear_gradients():
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


@pytest.mark.parametrize("make_loss", [loss_of, entropy_loss])
def test_no_graph_is_kept_alive(make_loss):
    model = perceptron()
    loss = make_loss(model)
    hesscale.backward(loss)
    kept = [weakref.ref(thing) for thing in (loss, *model.parameters())]
    del loss, model
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize(("samples", "order"), [(8, ["rule", "gradient"]), (300, ["gradient", "rule"])])
def test_rules_of_large_activations_are_not_fused(samples, order, monkeypatch):
    """In a Gauss-Newton pass no rule needs a gradient, so curvature may run ahead of it; where that would hold much memory
    (more than 2¹⁶ numbers in a tensor), it does not."""
    events = []
    rule = RULES["TanhBackward0"]

    def function(node, g, s):
        events.append("rule")
        return rule.function(node, g, s)

    monkeypatch.setitem(RULES, "TanhBackward0", dataclasses.replace(rule, function=function))
    first, last = nn.Linear(4, 256), nn.Linear(256, 3)
    hidden = first(torch.randn(samples, 4)).tanh()
    hidden.register_hook(lambda g: events.append("gradient"))
    hesscale.backward(F.cross_entropy(last(hidden), torch.arange(samples) % 3), method="hesscale_gn")
    assert events == order
