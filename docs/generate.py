"""Write docs/operators.md from the rules; with ``--check``, fail if the page on disk is not what would be written."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import hesscale
from hesscale.rules import REFUSED

PAGE = Path(__file__).with_name("operators.md")


def page() -> str:
    operators = hesscale.operators()
    lines = [
        "# Operators",
        "",
        "This page lists every operator that hesscale supports, by the name of its autograd node, with the maths of its rule.",
        "`print(y.grad_fn)` shows the node of an operator's output y, and `hesscale.explain(loss)` shows the nodes of a whole",
        "loss. If yours is missing, [add a rule](adding-a-rule.md).",
        "",
        "In the formulas, x is an input and y the output, with Jacobian J, or derivatives f' and f'' if the operator is",
        "elementwise. g and s are the first and second derivatives of the loss with respect to the entries of y. An input's",
        "*share* is its contribution to the Hessian diagonal ([the recursion](recursion.md)). `make docs` writes this page.",
    ]
    for family, members in groupby(sorted(operators, key=lambda operator: operator.family), key=lambda operator: operator.family):
        lines += ["", f"## [{family.replace('_', ' ')}](../hesscale/rules/{family}.py)", "", "| node | rule |", "| --- | --- |"]
        lines += [f"| `{operator.name}` | {cell(operator.summary)} |" for operator in members]
    if REFUSED:
        lines += [
            "",
            "## Operators that raise an error",
            "",
            "| the node's name contains | reason, and what to do |",
            "| --- | --- |",
        ]
        lines += [f"| `{name}` | {cell(reason)} |" for name, reason in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text that Markdown leaves alone inside a table."""
    for mark in "\\|*_":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"docs/{PAGE.name} is out of date: run make docs")
