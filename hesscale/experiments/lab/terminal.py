"""Text for a terminal: tables that fit its width without breaking words, counts and durations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

from .markdown import is_numeric
from .plots import Table

GAP = 2  # characters between columns, one of which is the divider


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "run"), count(2000, "run")
    ('1 run', '2,000 runs')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A duration in a suitable unit.

    >>> duration(0.2), duration(75), duration(600), duration(9000), duration(500000)
    ('1 s', '75 s', '10 min', '2.5 hours', '5.8 days')
    """
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86400:.1f} days"


def escaped(text: str) -> str:
    return text.replace("[", r"\[")


def print_table(console: Console, table: Table) -> None:
    """Print a table. A column whose cells are all the same becomes a line below the title.

    If the columns do not fit into the width, they are printed in several blocks. Each block begins with the columns of text.
    """
    constant, rest = split_columns(table)
    console.print()
    console.print(escaped(table.title), style="bold", highlight=False)
    if constant:
        facts = "; ".join(f"{table.header[i]}: {table.rows[0][i]}" for i in constant)
        console.print(escaped(facts), highlight=False)
    for k, block in enumerate(blocks(table, rest, console.width)):
        if k:
            console.print()
        console.print(block)
    if table.caption:
        console.print(escaped(table.caption), style="dim", highlight=False)


def split_columns(table: Table) -> tuple[list[int], list[int]]:
    """The columns whose cells are all the same, and the others."""
    columns = range(len(table.header))
    constant = [i for i in columns if len(table.rows) > 1 and table.header[i] and len({row[i] for row in table.rows}) == 1]
    return constant, [i for i in columns if i not in constant] or list(columns)


def blocks(table: Table, columns: Sequence[int], room: int) -> Iterator[RichTable]:
    """The columns as one or more tables that fit into ``room``."""
    widest = {i: max(len(str(cell)) for cell in column_of(table, i)) for i in columns}
    least = {i: narrowest(table, i) for i in columns}
    keys = leading_text(table, columns)
    if sum(least[i] + GAP for i in keys) > room // 2:
        keys = keys[:1]
    left = [i for i in columns if i not in keys]
    while True:
        shown, left = [*keys, *left[:1]], left[1:]  # at least one column besides the keys, however wide
        while left and sum(least[i] + GAP for i in [*shown, left[0]]) <= room:
            shown.append(left.pop(0))
        yield block_of(table, widths(shown, least, widest, room), keys)
        if not left:
            return


def column_of(table: Table, i: int) -> list[str]:
    return [table.header[i], *(str(row[i]) for row in table.rows)]


def narrowest(table: Table, i: int) -> int:
    """The minimum width of a column: that of its longest word, or of its longest number with its error."""
    words = [word for text in column_of(table, i) for word in text.split()]
    numbers = [str(row[i]) for row in table.rows] if is_numeric(table, i) else []
    return max(map(len, [*words, *(cell for cell in numbers if len(cell) <= 20), ""]))


def leading_text(table: Table, columns: Sequence[int]) -> list[int]:
    """The columns before the first one with numbers. They describe a row."""
    numeric = next((k for k, i in enumerate(columns) if is_numeric(table, i)), 1)
    return list(columns[: max(numeric, 1)])


def widths(shown: Sequence[int], least: dict[int, int], widest: dict[int, int], room: int) -> dict[int, int]:
    """The width of each column. Columns share the room beyond their minimum widths, up to their width without line breaks."""
    found = {i: least[i] for i in shown}
    free = room - sum(width + GAP for width in found.values())
    in_order = sorted(shown, key=lambda i: widest[i] - least[i])
    for k, i in enumerate(in_order):
        more = min(widest[i] - least[i], max(free, 0) // (len(in_order) - k))
        found[i], free = found[i] + more, free - more
    return found


def block_of(table: Table, found: dict[int, int], keys: Sequence[int]) -> RichTable:
    columns = []
    for i, width in found.items():
        is_whole = all(len(str(row[i])) <= width for row in table.rows)
        is_right = is_whole and is_numeric(table, i) and i not in keys
        columns.append(Column(escaped(table.header[i]), width=width, justify="right" if is_right else "left"))
    block = RichTable(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False)
    for row in table.rows:
        block.add_row(*[escaped(str(row[i])) for i in found])
    return block
