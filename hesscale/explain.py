"""A report on how hesscale handles each operator of a loss, and the list of all operators with a rule."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from .engine.arguments import check_choices, check_loss, output_edges
from .engine.dispatch import Step, step_of
from .engine.head_structure import Head, find_head
from .engine.head_values import exact_diagonals
from .engine.nodes import LEAF, Edge, Node, edge_of, metadata, topological
from .errors import UnsupportedOperator
from .rules import BL89, COMPLEX, RULES, Rule


class Operator(NamedTuple):
    """An operator that has a rule: its autograd node, the family of the rule, and the rule's maths."""

    name: str
    family: str
    summary: str


def operators() -> list[Operator]:
    """Return every operator that has a curvature rule.

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
    """One node of the graph in an :class:`Explanation`.

    Attributes:
        operator: the name of the node.
        shape: the shape of its first output.
        part: ``"head"``, ``"body"`` or ``"leaf"``.
        rule: the family of its rule and the rule's maths.
        note: how the diagonal is computed at the model's outputs, if this node returns one of them.
        module: the module whose parameters it uses, such as ``"0 (Linear)"``; empty if it uses none.
        parameter: the name of a leaf, if the model is known.
    """

    operator: str
    shape: tuple[int, ...]
    part: str
    rule: str
    note: str
    module: str = ""
    parameter: str = ""


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`; ``print`` it for a table.

    Attributes:
        rows: one row per node of the graph, from the loss to the leaves.
        unsupported: for each operator that is not supported, the reason.
        products: the number of Hessian-vector products through the head that make the diagonal at the model's outputs exact.
        is_exact: whether the diagonal at all of the model's outputs is exact.
    """

    rows: tuple[Row, ...]
    unsupported: tuple[str, ...]
    products: int = 0
    is_exact: bool = True

    def __str__(self) -> str:
        width = max(shutil.get_terminal_size().columns, 60)
        operators = [row.parameter or row.operator for row in self.rows]
        shapes = ["×".join(map(str, row.shape)) or "scalar" for row in self.rows]
        first, second = (max(map(len, cells), default=0) for cells in (operators, shapes))
        lines, heading = [], ""
        for row, operator, shape in zip(self.rows, operators, shapes, strict=True):
            above = "head" if row.part == "head" else row.module or "body"
            if above != heading:
                lines.append(above)
                heading = above
            begin = f"  {operator:<{first}}  {shape:<{second}}  "
            rule = textwrap.wrap(row.rule, max(width - len(begin), 20), break_long_words=False, break_on_hyphens=False)
            lines += [(begin if k == 0 else " " * len(begin)) + line for k, line in enumerate(rule or [""])]
            if row.note:
                lines += [f"    {row.note}"]
        lines += [f"unsupported: {reason}" for reason in self.unsupported]
        return "\n".join(line.rstrip() for line in [*lines, *textwrap.wrap(self.cost, width)])

    @property
    def cost(self) -> str:
        """A sentence on what the head costs."""
        if self.unsupported:
            return "hesscale.backward would raise an error."
        exact = "" if self.is_exact else " The diagonal at the model's outputs is not exact."
        if not self.products:
            return f"The head needs only rules, which cost next to nothing.{exact}"
        products = f"{self.products} Hessian-vector product{'s' if self.products > 1 else ''}"
        return f"The head needs {products} in every pass, through the head and not through the model.{exact}"


def explain(
    loss: Tensor,
    *,
    model: nn.Module | None = None,
    method: str = "hesscale",
    outputs: Tensor | Sequence[Tensor] | None = None,
    head: str = "auto",
) -> Explanation:
    """Explain what :func:`hesscale.backward` would do with this loss, operator by operator. Nothing changes.

    The explanation has the rule of each operator, and the operators between the loss and the model's outputs (the head). It says
    whether the diagonal at those outputs is exact by the rules or by double backward, what that costs, and which operators are
    not supported. ``print`` it for a table.

    Args:
        loss: as in :func:`hesscale.backward`, like ``method``, ``outputs`` and ``head``.
        model: if given, its parameters are named, and operators are grouped by the modules whose parameters they use.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Sigmoid())
        >>> print(hesscale.explain(model(torch.ones(4, 3)).sum(), model=model))
        head
          SumBackward0      scalar  reductions: J = 1
          SigmoidBackward0  4×2     activations: f' = y (1 − y), f'' = (1 − 2y) f': f'
                                    (f' s + (1 − 2y) g)
        0 (Linear)
          MmBackward0       4×2     bilinear: y = A B: s_A = s (B²)ᵀ, s_B = (A²)ᵀ s
            exact by rules
          TBackward0        3×2     linear_maps: the same entries in other positions
          0.weight          2×3
        The head needs only rules, which cost next to nothing.
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
    names = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    modules = {} if model is None else modules_of(steps, model, names)
    rows = [row_of(step, found, notes, reasons, modules.get(step.node, ""), names) for step in steps]
    is_exact = method != "bl89" and all(edge not in found.inexact or edge in products for edge in found.ends)
    return Explanation(tuple(grouped(rows)), tuple(reasons.values()), sum(products.values()), is_exact)


def modules_of(steps: Sequence[Step], model: nn.Module, names: dict[int, str]) -> dict[Node, str]:
    """The module whose parameters a node uses, directly or through a view; "" if it uses none."""
    found: dict[Node, str] = {}
    of_parameters_alone: set[Node] = set()
    for step in reversed(steps):
        node, inputs = step.node, [node for node, _ in step.edges]
        found[node] = ""
        if node.name() == LEAF:
            name = names.get(id(node.variable))
            if name is not None:
                module = name.rpartition(".")[0]
                kind = type(model.get_submodule(module)).__name__
                found[node] = f"{module} ({kind})" if module else kind
                of_parameters_alone.add(node)
        elif used := [found[other] for other in inputs if other in of_parameters_alone]:
            found[node] = used[0]
            if len(inputs) == 1:
                of_parameters_alone.add(node)
    return found


def grouped(rows: Sequence[Row]) -> list[Row]:
    """Rows of the same module are moved together, to the position of the first of them."""
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(row.module, []).append(row)
    found: list[Row] = []
    for row in rows:
        found += [row] if not row.module else of.pop(row.module, [])
    return found


UNKNOWN = Rule(lambda *_: None, "", "no rule")


def lenient_steps(loss: Tensor, method: str) -> tuple[list[Step], dict[str, str]]:
    """The graph's steps, and the reason for each unsupported operator, which is treated as having a dense Jacobian."""
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


def row_of(step: Step, found: Head, notes: dict[Edge, str], reasons: dict[str, str], module: str, names: dict[int, str]) -> Row:
    name = step.node.name()
    shape = tuple(metadata((step.node, 0)).shape)
    note = "; ".join(notes[edge] for i in range(len(step.node._input_metadata)) if (edge := (step.node, i)) in notes)
    if name == LEAF:
        return Row("leaf", shape, "leaf", "", note, module, names.get(id(step.node.variable), ""))
    assert step.rule is not None
    text = "no rule" if name in reasons else f"{step.rule.family}: {step.rule.summary}"
    return Row(name, shape, "head" if step.node in found.nodes else "body", text, note, module)
