"""The named values that a setting can be chosen from."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Named(Protocol):
    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


class Choices(dict[str, N]):
    """Objects by name, in order. An object with an alias is found under both names, but is listed once.

    >>> from types import SimpleNamespace as Colour
    >>> colours = Choices([Colour(name="grey"), Colour(name="red")], aliases={"gray": "grey"})
    >>> list(colours), "gray" in colours, colours["gray"].name
    (['grey', 'red'], True, 'grey')
    """

    def __init__(self, items: Iterable[N], aliases: Mapping[str, str] | None = None) -> None:
        super().__init__((item.name, item) for item in items)
        self.aliases = aliases or {}

    def __missing__(self, name: str) -> N:
        if name not in self.aliases:
            raise KeyError(name)
        return self[self.aliases[name]]

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(name) or name in self.aliases


def choose(names: str, known: Mapping[str, T], what: str) -> list[T]:
    """The choices in a comma-separated list of names, each once."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"no {what} is called {name!r}{hint}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def check_least(settings: object, least: Mapping[str, int]) -> None:
    """Raise a ValueError if a setting is below its minimum."""
    for name, value in least.items():
        if getattr(settings, name) < value:
            raise ValueError(f"{name} must be at least {value}, not {getattr(settings, name)}")


def check_numbers(settings: object, *, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
    """Raise a ValueError if a setting is not finite or has the wrong sign."""
    for name in (*positive, *not_negative):
        value = getattr(settings, name)
        if not (0 <= value < math.inf and (value or name in not_negative)):
            raise ValueError(f"{name} must be {'positive' if name in positive else '0 or positive'} and finite, not {value}")


def named(names: Iterable[str]) -> dict[str, str]:
    """Choices that are only names."""
    return {name: name for name in names}
