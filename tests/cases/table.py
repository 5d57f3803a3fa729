"""How a line of the case table is written: ``case(name, function, *inputs)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NEW_TORCH = hasattr(torch.ops.aten, "_upsample_lanczos2d_aa")  # torch 2.11 cannot differentiate some operators, or not twice

Input = Callable[[torch.Generator], Tensor]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """``function`` of inputs of one dtype: one operator, plus views at most, so that its rule is exact on a separable loss."""

    function: Callable[..., Any]
    inputs: tuple[Input, ...]
    low_precision: bool  # also run in float16 and bfloat16
    dtype: torch.dtype = torch.float64


def case(
    name: str,
    function: Callable[..., Any],
    *inputs: tuple[int, ...] | Input,
    low_precision: bool = True,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Add a line; a shape stands for normal entries."""
    if name in CASES:
        raise ValueError(f"two cases are called {name}")
    CASES[name] = Case(function, tuple(normal(*i) if isinstance(i, tuple) else i for i in inputs), low_precision, dtype)


def normal(*shape: int) -> Input:
    return lambda generator: torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)


def between(low: float, high: float, *shape: int) -> Input:
    return lambda generator: (
        torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device) * (high - low) + low
    )


def positive(*shape: int) -> Input:
    return between(0.3, 2.0, *shape)


def exactly(values: Any) -> Input:
    return lambda generator: torch.tensor(values, dtype=torch.float64)


def constant(like: Tensor, *shape: int) -> Tensor:
    """An operand that needs no share."""
    return torch.linspace(-1.2, 0.9, torch.Size(shape).numel()).reshape(shape).to(like.dtype)
