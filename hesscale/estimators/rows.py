"""Batched backward passes for many vectors at a time, and sums of their results. Vectors are rows: (count, size)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engine.dispatch import diagonal_dtype
from ..engine.head_values import agree
from ..engine.nodes import Edge, edge_of, gradient_edge, is_once_differentiable, metadata, vjp
from ..errors import UnsupportedOperator

if TYPE_CHECKING:
    from . import Request

MAX_NUMBERS = 2**22  # in the largest tensor of a batched backward pass

Diagonals = Sequence[Tensor | None]  # one per parameter, None for zero


def chunks(count: int, at_once: int) -> Iterator[int]:
    for start in range(0, count, at_once):
        yield min(at_once, count - start)


def unit_rows(like: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of the identity matrix in batches, each with the indices of its rows."""
    for start in range(0, len(like), at_once):
        entries = torch.arange(start, min(start + at_once, len(like)), device=like.device)
        yield entries, torch.zeros(len(entries), len(like), dtype=like.dtype, device=like.device).scatter_(1, entries[:, None], 1)


def entry_by_entry(products: Callable[[Tensor], Tensor], like: Tensor, at_once: int) -> Tensor:
    """The diagonal of a matrix, from its products with all unit vectors, in batches."""
    found = [products(rows).gather(1, entries[:, None])[:, 0] for entries, rows in unit_rows(like, at_once)]
    return torch.cat(found) if found else torch.zeros_like(like)


def diagonal_if_alone(products: Callable[[Tensor], Tensor], like: Tensor) -> Tensor | None:
    """The diagonal of a symmetric matrix if it is diagonal, from its products with two vectors; otherwise None."""
    z = torch.rand(len(like), generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu").to(like) + 0.5
    diagonal, product = products(torch.stack([torch.ones_like(z), z]))
    predicted = diagonal * z
    return diagonal if not len(like) or bool(agree(product, predicted, predicted.abs())) else None


def gradients_at(request: Request, edges: Sequence[Edge]) -> list[Tensor | None]:
    """∂L/∂x with a graph at each edge; None if the loss is linear in x."""
    with torch.enable_grad():
        found = vjp({edge_of(request.loss): torch.ones_like(request.loss)}, edges, set())
    curved = [gradient if gradient is not None and gradient.requires_grad else None for gradient in map(found.get, edges)]
    check_twice_differentiable([gradient for gradient in curved if gradient is not None])
    return curved


def check_twice_differentiable(gradients: Sequence[Tensor]) -> None:
    with torch.enable_grad():  # their graph is walked only once, from a tensor that depends on all of them
        joined = torch.cat([gradient.reshape(-1)[:1].float() for gradient in gradients]) if gradients else torch.empty(0)
    if is_once_differentiable(joined):
        raise UnsupportedOperator(
            "PyTorch cannot differentiate this loss twice, which this estimator needs. Use one that does not ('hesscale', "
            "'squared_gradient'), or replace the operator by others that PyTorch can differentiate twice"
        )


def hessian_products(gradient: Tensor, edge: Edge) -> Callable[[Tensor], Tensor]:
    """Products of ∂g/∂x with rows of flat vectors."""

    def products(rows: Tensor) -> Tensor:
        (found,) = pull_rows([edge_of(gradient)], [edge], [rows.reshape(len(rows), *gradient.shape)])
        return torch.zeros_like(rows) if found is None else found.reshape(len(rows), -1)

    return products


def pull_rows(sources: Sequence[Edge], targets: Sequence[Edge], rows: Sequence[Tensor]) -> list[Tensor | None]:
    """Backpropagate every row of vectors from the sources to the targets with PyTorch's engine."""
    if not sources:
        return [None] * len(targets)
    outputs, inputs = [gradient_edge(edge) for edge in sources], [gradient_edge(edge) for edge in targets]

    def passes(vectors: Sequence[Tensor], batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, allow_unused=True, is_grads_batched=batched)

    return in_rows(lambda *vectors: passes(vectors, True), lambda *vectors: passes(vectors, False), rows)


def in_rows(many: Callable[..., Sequence[Any]], one: Callable[..., Sequence[Any]], rows: Sequence[Tensor]) -> list[Any]:
    """Apply ``many`` to all rows at once; or ``one`` to each, if there is only one row or PyTorch cannot batch an operator."""
    if len(rows[0]) > 1:
        try:
            return list(many(*rows))
        except RuntimeError:  # if batching is not the cause, ``one`` raises the same error
            pass
    found = [one(*row) for row in zip(*rows, strict=True)]
    if len(found) == 1:
        return [None if value is None else value.unsqueeze(0) for value in found[0]]
    return [None if values[0] is None else torch.stack(values) for values in zip(*found, strict=True)]


def zeros_at(edge: Edge) -> Tensor:
    meta = metadata(edge)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def add_products(total: list[Tensor | None], left: Diagonals, right: Diagonals, scale: float = 1) -> None:
    """Add Σ a ∘ b over rows to each parameter's total."""
    for k, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is not None and b is not None:
            dtype = diagonal_dtype(a.dtype)
            product = (a.to(dtype) * b.to(dtype)).sum(0)
            add_to(total, k, product if scale == 1 else product * scale)


def add_to(total: Any, key: Any, value: Tensor) -> None:
    """``total[key] += value``. A missing value or None counts as zero."""
    present = total.get(key) if isinstance(total, dict) else total[key]
    total[key] = value if present is None else present + value
