"""Help texts in groups that fit the terminal, with examples. Typer's own help breaks words and cuts off names at 80 columns."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand, TyperGroup

NAMES_WIDTH = 22  # longer names of options get a separate line
PLAINER = {"<int range>": "<int>", "<list[str]>": "<str>"}  # kinds of values


class Command(TyperCommand):
    """A command whose options are grouped by ``rich_help_panel``. The lines of its ``epilog`` are examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(param, "rich_help_panel", None) or default, []).append((plainer(record[0]), record[1]))
        for name, records in groups.items():
            with formatter.section(name):
                write_list(records, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        return in_our_words(super().get_help_option(ctx))


class Group(TyperGroup):
    """A group of commands, which its help lists by ``rich_help_panel``."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            title = (command.help or "").strip().split("\n\n")[0]
            groups.setdefault(command.rich_help_panel, []).append((name, " ".join(title.split())))
        width = max(len(name) for names in groups.values() for name, _ in names)
        for panel, records in groups.items():
            with formatter.section(panel):
                write_list([(name.ljust(width), text) for name, text in records], formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)

    def get_help_option(self, ctx: Any) -> Any:
        return in_our_words(super().get_help_option(ctx))


def plainer(names: str) -> str:
    for found, better in PLAINER.items():
        names = names.replace(found, better)
    return names


def in_our_words(help_option: Any) -> Any:
    """The option ``--help``, with a description in the style of all others: in lower case, without a full stop."""
    if help_option is not None:
        help_option.help = "show this message"
    return help_option


def write_list(records: list[tuple[str, str]], formatter: Any) -> None:
    """Names and texts in two columns. Words with hyphens, such as names of optimizers, are not broken."""
    indent = " " * formatter.current_indent
    first = min(max(len(name) for name, _ in records), NAMES_WIDTH) + 2
    for name, text in records:
        room = max(formatter.width - len(indent) - first, 10)
        lines = [line for k, part in enumerate(text.splitlines()) for line in wrapped(part, room, "  " if k else "")] or [""]
        if len(name) + 2 > first:
            formatter.write(f"{indent}{name}\n")
            name = ""
        for k, line in enumerate(lines):
            formatter.write(f"{indent}{'' if k else name:<{first}}{line}".rstrip() + "\n")


def wrapped(text: str, room: int, indent: str) -> list[str]:
    text = text.replace("[default: ", "[default:\N{NO-BREAK SPACE}")
    lines = textwrap.wrap(text, room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def write_examples(epilog: str | None, formatter: Any) -> None:
    lines = (epilog or "").splitlines()
    if lines:
        with formatter.section("Example" if len(lines) == 1 else "Examples"):
            for line in lines:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
