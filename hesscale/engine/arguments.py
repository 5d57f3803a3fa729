"""Checks of the arguments that users pass, with their error messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .nodes import Edge, Node, edge_of

METHODS = ("hesscale", "hesscale_gn", "bl89")
HEADS = ("auto", "exact", "rules")
FALLBACKS = ("error", "exact")
CURVATURE_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)  # squares overflow in float16


CHOICES: dict[str, tuple[Any, ...]] = {
    "method": METHODS,
    "head": HEADS,
    "fallback": FALLBACKS,
    "curvature_dtype": CURVATURE_DTYPES,
}


def check_choices(**options: Any) -> None:
    for name, value in options.items():
        if value not in CHOICES[name]:
            raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, CHOICES[name]))}")


def check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"the loss must be a scalar, but has shape {tuple(loss.shape)}; reduce it with .mean() or .sum()")
    if loss.is_complex():
        raise ValueError("the loss must be real, but is complex")
    if not loss.requires_grad:
        raise ValueError(
            "the loss has no graph: no parameter it depends on requires a gradient, or it was computed under no_grad or in "
            "inference mode"
        )


def as_tensors(tensors: Tensor | Sequence[Tensor], name: str) -> tuple[Tensor, ...]:
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    if not tensors:
        raise ValueError(f"{name} is empty")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must hold tensors, not {type(tensor).__name__}")
        if not tensor.requires_grad:
            raise ValueError(f"{name} contains a tensor that does not require a gradient")
    return tensors


def output_edges(outputs: Tensor | Sequence[Tensor] | None, loss: Tensor, order: Iterable[Node]) -> set[Edge] | None:
    """The edges of the ``outputs`` that the user passed; None if there are none, so that :func:`find_head` looks for them."""
    if outputs is None:
        return None
    ends = {edge_of(tensor) for tensor in as_tensors(outputs, "outputs")}
    if not ends <= {edge for node in order for edge in node.next_functions} | {edge_of(loss)}:
        raise ValueError("outputs contains a tensor that is not in the graph of the loss")
    return ends
