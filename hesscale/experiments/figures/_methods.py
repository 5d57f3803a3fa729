"""Optimizers and step sizes as they are asked for: ``adam,adahesscale@1e-4`` and ``1e-4,3e-4``."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..bench.command import choose

HELP = "separated by commas, each with a step size of its own after @"


def methods(optimizers: str, step_sizes: str, known: Mapping[str, object]) -> list[tuple[str, float]]:
    """Optimizers with each of their step sizes: the one after @, else all of ``step_sizes``."""
    found: dict[tuple[str, float], None] = {}
    for text in filter(str.strip, optimizers.split(",")):
        name, at, own = text.strip().partition("@")
        if not name or (at and not own):
            raise ValueError(f"optimizer: {text.strip()!r} is not of the form name or name@step size")
        choose(name, known, "optimizer")
        for size in [own] if own else step_sizes.split(","):
            found[name, number(size)] = None
    if not found:
        raise ValueError("no optimizer is asked for")
    return list(found)


def number(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        raise ValueError(f"step_size: a step size is a number, not {text!r}; several are separated by commas") from None
    if not 0 < size < math.inf:
        raise ValueError(f"step_size: step sizes must be positive, not {text}")
    return size
