"""``explain`` and ``operators``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.rules import COMPLEX, RULES


def model_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return F.cross_entropy(model(torch.randn(5, 4)), torch.tensor([0, 1, 1, 0, 1]))


def test_one_row_per_node_loss_first():
    rows = hesscale.explain(model_loss()).rows
    assert rows[0].operator == "NllLossBackward0"
    assert [row.part for row in rows[:3]] == ["head", "head", "body"]
    assert sum(row.part == "leaf" for row in rows) == 4


def test_names_parameters_and_groups_by_module(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    explanation = hesscale.explain(model(torch.ones(5, 4)).square().sum(), model=model)
    modules = [row.module for row in explanation.rows if row.module]
    assert modules == ["2 (Linear)"] * 4 + ["0 (Linear)"] * 4
    assert {row.parameter for row in explanation.rows if row.part == "leaf"} == {name for name, _ in model.named_parameters()}
    lines = str(explanation).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        *("head", "2 (Linear)", "body", "0 (Linear)"),
        "The head needs only rules, which cost next to nothing.",
    ]
    assert max(map(len, lines)) <= 80


def test_parameters_of_the_model_itself_are_named_after_its_class():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(2))

    model = Scale()
    rows = hesscale.explain((model.factor * torch.ones(2)).sum(), model=model).rows
    assert {row.module for row in rows if row.parameter} == {"Scale"}


def test_the_last_line_says_what_the_head_costs():
    z = nn.Linear(4, 3)(torch.randn(5, 4))
    entropy = (z.softmax(-1) * z.log_softmax(-1)).sum()
    assert "needs 3 Hessian-vector products in every pass" in hesscale.explain(entropy).cost
    assert "is not exact" in hesscale.explain(entropy, head="rules").cost
    assert "cost next to nothing" in hesscale.explain(model_loss()).cost


def test_says_how_the_outputs_are_exact():
    by_rules = hesscale.explain(model_loss()).rows[2]
    assert (by_rules.operator, by_rules.shape, by_rules.note) == ("AddmmBackward0", (5, 2), "exact by rules")
    z = nn.Linear(4, 3)(torch.randn(5, 4))
    entropy = (z.softmax(-1) * z.log_softmax(-1)).sum()
    assert "exact by double backward (3 products)" in str(hesscale.explain(entropy))
    assert "rules, not exact" in str(hesscale.explain(entropy, head="rules"))


def test_names_what_is_unsupported_and_changes_nothing(monkeypatch):
    monkeypatch.delitem(RULES, "TanhBackward0")
    loss = model_loss()
    explanation = hesscale.explain(loss)
    assert len(explanation.unsupported) == 1
    assert "unsupported: no curvature rule for TanhBackward0" in str(explanation)
    assert explanation.cost == "hesscale.backward would raise an error."
    loss.backward()


def test_explains_the_other_methods():
    assert "as if elementwise" in str(hesscale.explain(model_loss(), method="bl89"))
    assert "head" in {row.part for row in hesscale.explain(model_loss(), method="hesscale_gn").rows}


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="scalar"):
        hesscale.explain(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="method="):
        hesscale.explain(model_loss(), method="newton")


def test_operators_lists_every_rule_with_its_maths():
    listed = hesscale.operators()
    assert {op.name.removesuffix(", complex") for op in listed} == {*RULES, *COMPLEX}
    assert all(op.summary and op.family for op in listed)
