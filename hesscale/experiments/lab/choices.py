"""The named values that a setting can be chosen from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
            raise ValueError(f"no {what} is called {name!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def named(names: Iterable[str]) -> dict[str, str]:
    """Choices that consist of a name alone."""
    return {name: name for name in names}
