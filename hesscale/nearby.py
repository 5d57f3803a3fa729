"""The plain values that a function refers to besides its arguments: a record of what it did goes stale when they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MOST_ENTRIES = 64


class Near:
    """Variables and attributes with plain values that a function refers to, as far as they are near."""

    def __init__(self) -> None:
        self.cells: list[CellType] = []  # nonlocal variables
        self.entries: list[tuple[dict[Any, Any], Any]] = []  # global variables, and what dicts hold
        self.attributes: list[tuple[Any, str]] = []

    def look_at(self, thing: Any, depth: int = 4) -> None:
        parts: Sequence[Any] = ()
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                self.attributes += [(module, k) for k, v in vars(module).items() if isinstance(v, PLAIN) and k[0] != "_"]
        elif isinstance(thing, MethodType):
            parts = thing.__func__, thing.__self__
        elif isinstance(thing, partial):
            parts = thing.func, thing.args, thing.keywords
        elif isinstance(thing, FunctionType):
            parts = self.look_at_variables(thing)
        elif isinstance(thing, dict):
            self.entries += [(thing, k) for k, v in thing.items() if isinstance(v, PLAIN)][:MOST_ENTRIES]
            parts = list(thing.values())[:MOST_ENTRIES]
        elif isinstance(thing, (list, tuple)):
            parts = thing[:MOST_ENTRIES]
        elif hasattr(thing, "__dict__") and not isinstance(thing, (type, ModuleType)):
            named = {**vars(type(thing)), **vars(thing)}
            self.attributes += [(thing, k) for k, v in named.items() if isinstance(v, PLAIN) and k[:2] != "__"]
            parts = [value for value in vars(thing).values() if isinstance(value, nn.Module)]
        if depth:
            for part in parts:
                if not isinstance(part, PLAIN):
                    self.look_at(part, depth - 1)

    def look_at_variables(self, function: FunctionType) -> list[Any]:
        """Take note of a function's variables that are not its own, and return their values."""
        if function.__module__.partition(".")[0] in ("torch", "hesscale"):
            return []
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]
        names = {name for code in codes_of(function.__code__) for name in code.co_names} & function.__globals__.keys()
        values = {name: function.__globals__[name] for name in sorted(names)}
        self.cells += [cell for cell in cells if isinstance(cell.cell_contents, PLAIN)]
        self.entries += [(function.__globals__, name) for name, value in values.items() if isinstance(value, PLAIN)]
        return [*[cell.cell_contents for cell in cells], *values.values()]


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def known_by(leaf: Any) -> object:
    """A plain value as such, with its type; anything else by its identity, a module by its attributes too."""
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    near = Near()
    near.look_at(leaf, 0)
    return Same(leaf), *[known_by(getattr(holder, name, None)) for holder, name in near.attributes]


class Same:
    """Equal to the same object alone, which lives on."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)
