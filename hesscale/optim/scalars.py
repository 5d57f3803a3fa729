"""Step numbers and counters. They are plain numbers on a CPU, where reading is free, and tensors on a GPU and in a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Number = float | Tensor  # a tensor if :func:`hesscale.compile_step` traces the step, so that the number may change later


def is_on_host(tensor: Tensor) -> bool:
    """Whether the value of a tensor can be read at no cost: on a CPU, unless the step is being traced."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def is_nonzero(value: Number) -> bool:
    """Whether an option may be nonzero. A tensor counts as nonzero, since reading it might wait for the device."""
    return isinstance(value, Tensor) or value != 0


def step_numbers(steps: list[Tensor]) -> list[Any]:
    """t for each step counter: a number on a CPU, the tensor itself elsewhere."""
    return [float(step if step.dim() == 0 else step.tolist()[0]) if is_on_host(step) else step for step in steps]


def on_host(numbers: list[Tensor]) -> list[Any]:
    """0-d tensors as plain numbers on a CPU, the tensors themselves elsewhere."""
    return torch.stack(numbers).tolist() if is_on_host(numbers[0]) else numbers


def clamp(value: Any, low: Any, high: Any) -> Any:
    """The number between ``low`` and ``high`` that is closest to ``value``: plain numbers, or a tensor between two alike."""
    return value.clamp(low, high) if isinstance(value, Tensor) else min(max(value, low), high)


def each(function: Callable[..., Any], *numbers: list[Any]) -> list[Any]:
    """Apply the function at each position. A list of one number serves all positions.

    Tensors on a GPU are stacked, so that one operator computes all positions.
    """
    count = max(map(len, numbers))
    columns = [column if len(column) == count else column * count for column in numbers]
    first = columns[0][0] if count else None
    if count > 1 and isinstance(first, Tensor) and not first.is_cpu and not torch.compiler.is_compiling():
        return list(function(*map(torch.stack, columns)).unbind())
    return list(map(function, *columns))


def materialize(numbers: list[Any]) -> list[Any]:
    """If a step is traced for a CPU, store scalars in memory. Otherwise, compiled code would recompute them for every entry."""
    is_traced = torch.compiler.is_compiling() and numbers[0].device.type == "cpu"
    return list(torch.stack(numbers).unbind()) if is_traced else numbers


def counter(counters: dict[str, Tensor], name: str, device: torch.device) -> Tensor:
    """The counter of this name, created at 0. Add to it in place, so that a captured CUDA graph counts too."""
    if name not in counters:
        counters[name] = torch.zeros((), dtype=torch.long, device=device)
    return counters[name]


def counter_dtype(p: Tensor) -> torch.dtype:
    """The dtype of a parameter's step counters. A traced step computes its bias corrections in this dtype."""
    return torch.float64 if p.dtype == torch.float64 else torch.float32
