"""The recursion by brute force over a whole model: every node of the loss's graph is differentiated twice, alone.

    s_x = Σ_k s_k (∂y_k/∂x)² + Σ_k g_k ∂²y_k/∂x²

A node's Jacobian ∂y/∂x is its backward on unit vectors, and its second derivatives are those of that backward. The gradients
come from the same walk. Nothing here knows a rule, nor the engine of hesscale. A complex entry counts as one variable with two
parts, so its s is a matrix of two by two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Node = Any
Edge = tuple[Node, int]
LEAF = "torch::autograd::AccumulateGrad"
PIECEWISE_LINEAR = ("HardsigmoidBackward0",)  # and PyTorch does not say so
MAX_CHUNK = 2**22  # entries of a Jacobian that are held at once
MAX_ENTRIES = 2**17  # of a tensor; a larger one is not compared


class TooLarge(Exception):
    """An operator has too many entries to be differentiated one by one."""


class Once(Exception):
    """PyTorch cannot differentiate an operator twice."""


@torch.no_grad()
def diagonals(loss: Tensor) -> dict[int, Tensor]:
    """The diagonal at every leaf behind the loss, by the id of the leaf. The graph is kept."""
    root = loss.grad_fn
    order = topological([root])
    gradient: dict[Edge, Tensor] = {(root, 0): torch.ones_like(loss)}
    curvature: dict[Edge, Tensor] = {}
    for node in order:
        edges = [(node, k) for k in range(len(node._input_metadata))]
        g, s = [gradient.pop(e, None) for e in edges], [curvature.get(e) for e in edges]
        if node.name() == LEAF or all(g_k is None for g_k in g):
            continue
        for x, share in shares(node, g, s).items():
            curvature[x] = curvature[x] + share if x in curvature else share
        for x, share in pull(node, g).items():
            gradient[x] = gradient[x] + share if x in gradient else share
        for e in edges:
            curvature.pop(e, None)
    leaves = {node.variable: curvature.get((node, 0)) for node in order if node.name() == LEAF}
    return {id(x): torch.zeros_like(x) if s is None else s[:, 0, 0].view_as(x).detach() for x, s in leaves.items()}


def shares(node: Node, g: Sequence[Tensor | None], s: Sequence[Tensor | None]) -> dict[Edge, Tensor]:
    """What a node hands to each of its inputs: (entries, 1, 1), or (entries, 2, 2) for real and imaginary parts."""
    found: dict[Edge, Tensor] = {}
    for k, s_k in enumerate(s):
        if s_k is not None:
            for x, squares in squared_jacobian(node, k, s_k).items():
                found[x] = found[x] + squares if x in found else squares
    for x, second in second_derivatives(node, g).items():
        if second is not None:
            found[x] = found[x] + second if x in found else second
    return found


def squared_jacobian(node: Node, k: int, s: Tensor) -> dict[Edge, Tensor]:
    """Σ_j Jⱼᵀ s_j Jⱼ for the entries j of output k: s_j (∂y_j/∂x)² where both are real."""
    where = s.flatten(1).any(1).nonzero().view(-1)
    total: dict[Edge, Tensor] = {}
    outputs = filled(node, [None] * len(node._input_metadata))

    def row(unit: Tensor) -> dict[Edge, Tensor]:
        return pull(node, [unit if i == k else None for i in range(len(outputs))])

    for rows, index in batches(row, node, outputs[k], where):
        for x, j in rows.items():
            weights = s[index].to(j.dtype)
            if j.shape[1] == j.shape[3] == 1:
                share = (weights.view(-1, 1) * j[:, 0, :, 0].square()).sum(0).view(-1, 1, 1)
            else:
                share = torch.einsum("jpq,jpxa,jqxb->xab", weights, j, j)
            total[x] = total[x] + share if x in total else share
    return total


def second_derivatives(node: Node, g: Sequence[Tensor | None]) -> dict[Edge, Tensor | None]:
    """Σ_k g_k ∂²y_k/∂x² for each input, with the others held fixed."""
    if node.name() in PIECEWISE_LINEAR:
        return {}
    with torch.enable_grad():
        if node.name() == "WeightNormInterfaceBackward0":  # PyTorch differentiates it as if the norm were constant
            return of_weight_norm(node, g[0])
        pulled = pull(node, g)
    return {x: derivatives_of(gradient, node, x) for x, gradient in pulled.items()}


def of_weight_norm(node: Node, g: Tensor) -> dict[Edge, Tensor | None]:
    """w = γ v/‖v‖, which is linear in γ."""
    v, gain, dim = node._saved_v.detach(), node._saved_g.detach(), node._saved_dim

    def loss(v: Tensor) -> Tensor:
        return (g * v * (gain / torch.norm_except_dim(v, 2, dim))).sum()

    hessian = torch.autograd.functional.hessian(loss, v).view(v.numel(), v.numel())
    return {node.next_functions[0]: hessian.diagonal().reshape(-1, 1, 1)}


def derivatives_of(gradient: Tensor, node: Node, x: Edge) -> Tensor | None:
    """∂(Jᵀg)_i/∂x_i at every entry i; None where Jᵀg does not depend on x."""
    if not gradient.requires_grad:
        return None
    stops = {child for child, _ in node.next_functions if child is not None}
    source = gradient.grad_fn if gradient.grad_fn is not None else edge_of_leaf(gradient)
    start = source, gradient.output_nr
    inner = topological([source], stops)
    if any("Error" in n.name() or "NotImplemented" in n.name() for n in inner):
        raise Once(node.name())
    if x != start and not any(x in n.next_functions for n in inner if n not in stops):
        return None

    def column(unit: Tensor) -> dict[Edge, Tensor]:
        at = {start: unit}
        for n in inner:
            cotangents = [at.get((n, i)) for i in range(len(n._input_metadata))]
            if n in stops or n.name() == LEAF or all(c is None for c in cotangents):
                continue
            for edge, share in pull(n, cotangents).items():
                at[edge] = at[edge] + share if edge in at else share
        return {x: at[x]} if x in at else {}

    parts = []
    for columns, index in batches(column, node, gradient, torch.arange(gradient.numel())):
        if x not in columns:
            return None
        parts.append(columns[x][torch.arange(len(index)), :, index])
    return torch.cat(parts) if parts else None


def batches(function: Callable[[Tensor], dict[Edge, Tensor]], node: Node, like: Tensor, where: Tensor) -> Any:
    """A function of the unit vectors at these entries of a tensor, some at a time, with the entries.

    What it returns has the shape (unit vectors, parts, entries, parts). A complex number has two parts, a real one has one.
    """
    largest = max([like.numel(), *(math.prod(c._input_metadata[i].shape) for c, i in node.next_functions if c is not None)])
    if largest > MAX_ENTRIES:
        raise TooLarge(f"{node.name()} has {largest} entries")
    step = max(MAX_CHUNK // max(largest, 1), 1)
    for index in where.split(step) if len(where) else ():
        units = torch.zeros(len(index), like.numel(), dtype=like.dtype)
        units = units.scatter_(1, index.unsqueeze(1), 1).view(len(index), *like.shape)
        found = [all_at_once(function, part) for part in ([units, 1j * units] if like.is_complex() else [units])]
        yield {x: torch.stack([as_parts(f[x]) for f in found], 1) for x in found[0]}, index


def as_parts(values: Tensor) -> Tensor:
    """(rows, entries, parts)"""
    parts = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.unsqueeze(-1)
    return parts.reshape(len(values), math.prod(values.shape[1:]), parts.shape[-1])


def all_at_once(function: Callable[[Tensor], dict[Edge, Tensor]], units: Tensor) -> dict[Edge, Tensor]:
    """With vmap; where an operator's backward does not let itself be mapped, in a loop."""
    keys: list[Edge] = []

    def values(unit: Tensor) -> list[Tensor]:
        found = function(unit)
        keys[:] = found
        return [v.clone() for v in found.values()]

    if len(units) > 2:
        try:
            mapped = torch.vmap(values)(units)
            return dict(zip(keys, mapped, strict=True))
        except (RuntimeError, ValueError, NotImplementedError, TypeError):
            pass
    rows = [function(unit) for unit in units]
    seen = list(dict.fromkeys(x for row in rows for x in row))
    shape = {x: next(row[x] for row in rows if x in row) for x in seen}
    return {x: torch.stack([row[x] if x in row else torch.zeros_like(shape[x]) for row in rows]) for x in seen}


def pull(node: Node, cotangents: Sequence[Tensor | None]) -> dict[Edge, Tensor]:
    """Jᵀv of each distinct input, in its shape: the node's own backward, called from Python."""
    if hasattr(node, "_forward_cls"):  # a torch.autograd.Function, which answers one value per argument of its forward
        values = node.apply(*filled(node, cotangents))
        values = values if isinstance(values, tuple) else (values,)
        given = iter([v for v, needed in zip(values, node.needs_input_grad, strict=True) if needed])
        values = [None if child is None else next(given) for child, _ in node.next_functions]
    else:
        values = node(*cotangents)
        values = values if isinstance(values, tuple) else (values,)
    total: dict[Edge, Tensor] = {}
    for edge, value in zip(node.next_functions, values, strict=True):
        if edge[0] is None or value is None:
            continue
        meta = edge[0]._input_metadata[edge[1]]
        value = (value.real if value.is_complex() and not meta.dtype.is_complex else value).to(meta.dtype)
        value = value if list(value.shape) == list(meta.shape) else value.sum_to_size(tuple(meta.shape))
        total[edge] = total[edge] + value if edge in total else value
    return total


def filled(node: Node, cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    """Zeros where nothing arrives."""
    pairs = zip(node._input_metadata, cotangents, strict=True)
    return [torch.zeros(tuple(m.shape), dtype=m.dtype) if c is None else c for m, c in pairs]


def topological(roots: Sequence[Node], stops: Collection[Node] = ()) -> list[Node]:
    """Every node behind the roots, each before those it takes its inputs from; the stops are the last on their paths."""
    order: list[Node] = []
    seen: set[Node] = set()
    waiting: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            if node not in stops:
                waiting += [(child, False) for child, _ in node.next_functions if child is not None]
    return order[::-1]


def edge_of_leaf(leaf: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(leaf).node


class DoublePrecision(TorchFunctionMode):
    """Lets float32 mean float64: models that cast to float32 inside would hide a small error behind its rounding."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = torch.utils._pytree.tree_map(widened, (args, kwargs or {}))
        return func(*args, **kwargs)


def widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
