"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .plots import Table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], rule: Sequence[str] = ()) -> str:
    """The lines of a table. ``rule`` is the text below the header of each column, such as ``---:``."""
    lines = [header, rule or ["---"] * len(header), *rows]
    return "".join(f"{line_of(line)}\n" for line in lines)


def aligned_table(table: Table) -> str:
    """The Markdown of a table, with numbers aligned right."""
    rule = ["---:" if is_numeric(table, column) else ":---" for column in range(len(table.header))]
    return markdown_table(table.header, table.rows, rule)


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(escaped(str(cell)) for cell in cells)} |"


def escaped(text: str) -> str:
    return " ".join(text.replace("|", r"\|").replace("<", "&lt;").split())


def is_numeric(table: Table, column: int) -> bool:
    """Whether all cells of a column begin with numbers or are dashes. Such columns are aligned right."""
    cells = [str(row[column]).strip() for row in table.rows]
    return any(cells) and all(re.match(r"[-+−]?[\d.]|nan|[-−]?inf|[–—-]?$", cell) for cell in cells)
