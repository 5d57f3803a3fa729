"""What hesscale would do with a loss, operator by operator, and what it knows at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .engine.arguments import check_choices, check_loss, output_edges
from .engine.dispatch import Step, step_of
from .engine.head_structure import Head, find_head
from .engine.head_values import exact_diagonals
from .engine.nodes import LEAF, Edge, edge_of, metadata, topological
from .errors import UnsupportedOperator
from .rules import BL89, COMPLEX, RULES, Rule


class Operator(NamedTuple):
    """One covered operator: its autograd node, the family its rule belongs to, and the rule's maths."""

    name: str
    family: str
    summary: str


def operators() -> list[Operator]:
    """Every operator that has a curvature rule.

    Example:
        >>> import hesscale
        >>> [op.summary for op in hesscale.operators() if op.name == "MulBackward0"]
        ["f' = the other factor"]
    """
    found = [Operator(name, rule.family, rule.summary) for name, rule in RULES.items()]
    found += [
        Operator(f"{name}, complex" if name in RULES else name, rule.family, rule.summary) for name, rule in COMPLEX.items()
    ]
    return sorted(found)


class Row(NamedTuple):
    """One node of the graph: where it stands, what serves it, and whether its output's diagonal is exact."""

    operator: str
    shape: tuple[int, ...]
    part: str  # head, body or leaf
    rule: str
    note: str


@dataclass(frozen=True)
class Explanation:
    """The rows of :func:`explain`, loss first; ``print`` it for a table."""

    rows: tuple[Row, ...]
    unsupported: tuple[str, ...]

    def __str__(self) -> str:
        header = ("operator", "shape", "part", "rule", "note")
        cells = [header, *((r.operator, "×".join(map(str, r.shape)) or "scalar", r.part, r.rule, r.note) for r in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
        lines.insert(1, "  ".join("─" * width for width in widths))
        return "\n".join([*lines, *(f"unsupported: {reason}" for reason in self.unsupported)])


def explain(
    loss: Tensor,
    *,
    method: str = "hesscale",
    outputs: Tensor | Sequence[Tensor] | None = None,
    head: str = "auto",
) -> Explanation:
    """A table, operator by operator, of what :func:`hesscale.backward` would do with this loss; changes nothing.

    Says which rule applies, which operators lie between the loss and the model's outputs (the head), whether the diagonal at
    those outputs is exact by the rules or by double backward, and what is unsupported.

    Example:
        >>> import torch, hesscale
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> print(hesscale.explain(w.tanh().sum()))
        operator       shape   part  rule                                                      note
        ─────────────  ──────  ────  ────────────────────────────────────────────────────────  ──────────────
        SumBackward0   scalar  head  reductions: J = 1
        TanhBackward0  2       head  activations: f' = 1 − y², f'' = −2y f': f' (f' s − 2y g)
        leaf           2       leaf                                                            exact by rules
    """
    check_choices(method=method, head=head, fallback="error")
    check_loss(loss)
    steps, reasons = lenient_steps(loss, method)
    ends = output_edges(outputs, loss, [step.node for step in steps])
    found = Head.empty() if method == "bl89" else find_head(steps, ends, (), is_bounded=head == "auto")
    products: dict[Edge, int] = {}
    if head != "rules" and not reasons:
        products = {edge: exact.products for edge, exact in exact_diagonals(loss, found).items()}
    notes = {edge: end_note(edge, found, products, head) for edge in found.ends}
    rows = [row_of(step, found, notes, reasons) for step in steps]
    return Explanation(tuple(rows), tuple(reasons.values()))


UNKNOWN = Rule(lambda *_: None, "", "no rule")


def lenient_steps(loss: Tensor, method: str) -> tuple[list[Step], dict[str, str]]:
    """The graph's steps, and for each unsupported operator in it the reason; such a node counts as dense and mixing."""
    special = BL89 if method == "bl89" else {}
    steps, reasons = [], {}
    order = topological(edge_of(loss)[0])
    used = {edge for node in order for edge in node.next_functions}
    for node in order:
        try:
            steps.append(step_of(node, special, "error", used))
        except UnsupportedOperator as error:
            reasons[node.name()] = str(error)
            steps.append(Step(node, UNKNOWN, node.next_functions, False))
    return steps, reasons


def end_note(edge: Edge, found: Head, products: dict[Edge, int], head: str) -> str:
    if edge not in found.inexact:
        return "exact by rules"
    if edge in products:
        return f"exact by double backward ({products[edge]} products)"
    return "rules, not exact" if head == "rules" else "rules, not exact: double backward is impossible or takes too many products"


def row_of(step: Step, found: Head, notes: dict[Edge, str], reasons: dict[str, str]) -> Row:
    name = step.node.name()
    shape = tuple(metadata((step.node, 0)).shape)
    note = "; ".join(notes[edge] for i in range(len(step.node._input_metadata)) if (edge := (step.node, i)) in notes)
    if name == LEAF:
        return Row("leaf", shape, "leaf", "", note)
    assert step.rule is not None
    text = "no rule" if name in reasons else f"{step.rule.family}: {step.rule.summary}"
    return Row(name, shape, "head" if step.node in found.nodes else "body", text, note)
