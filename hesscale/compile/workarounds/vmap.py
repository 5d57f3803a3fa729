"""Rewrite graphs for torch.func.vmap: without in-place changes, and without operators for which it fails or is wrong.

Seen in torch 2.13:

- slice_scatter overflows if the end of the slice is very large, as in ``x[2:] = y``;
- index_fill with a tensor as its value, if only the value is mapped, uses the last of the mapped values for all;
- _cdist_backward, if only the gradient is mapped, is wrong for all but the first;
- normal_, uniform_ and exponential_ into a tensor that is not mapped draw once for all, whatever ``randomness`` says;
- bernoulli_ into a tensor that is mapped raises with ``randomness="same"``, as for dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ..fx_graphs import replace_node
from ..make_fx import CannotTrace
from .strides import without_strides

aten = torch.ops.aten


def functional(graph: GraphModule, tensors: Sequence[Tensor]) -> GraphModule:
    """The same graph in a form that vmap can map: its only in-place changes are copies into the arguments at its end."""
    with torch.no_grad():
        pure = make_fx(torch.func.functionalize(graph), tracing_mode="fake")(*tensors)
    for node in list(pure.graph.nodes):
        if node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.copy.default and is_alike(*node.args[:2]):
            node.replace_all_uses_with(node.args[1])
    pure.graph.eliminate_dead_code()
    return mappable(pure)


def mappable(graph: GraphModule) -> GraphModule:
    """The same graph without operators for which vmap fails or is wrong. Raises CannotTrace for ``as_strided``."""
    add = graph.graph.call_function
    for node in list(graph.graph.nodes):
        if "as_strided" in str(node.target):
            raise CannotTrace("it uses as_strided, which depends on the memory layout of its tensors")
        if node.target in NOT_APART:
            raise CannotTrace(f"it draws random numbers with {node.target}, and vmap would draw the same for all")
        if node.target in DRAWN:
            replace_node(node, functools.partial(DRAWN[node.target], **options_of(node)))
            continue
        with graph.graph.inserting_before(node):
            if node.target is aten.slice_scatter.default and len(node.args) > 4:  # overflows at a very large end
                x, y, dim, start, end, *step = node.args
                node.args = x, y, dim, start, min(end, x.meta["val"].shape[dim]), *step
            elif node.target is aten.index_fill.int_Tensor:  # uses the last value for all if only values are mapped
                x, dim, index, value = node.args
                places = [None] * (dim % max(x.meta["val"].dim(), 1)) + [index]
                node.replace_all_uses_with(add(aten.index_put.default, (x, places, value)))
                graph.graph.erase_node(node)
            elif node.target is aten._cdist_backward.default:  # wrong for all but the first if only g is mapped
                g, x, y, p, distances = node.args
                flag = add(aten.isnan.default, (add(aten.sum.default, (g,)),))
                x, y, distances = (add(aten.where.self, (flag, value, value)) for value in (x, y, distances))
                node.args = g, x, y, p, distances
    return without_strides(graph)


def is_alike(a: Any, b: Any) -> bool:
    a, b = a.meta["val"], b.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def options_of(node: Node) -> dict[str, Any]:
    """Arguments after the first, by name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names[1:], node.args[1:], strict=False)), **node.kwargs}


def normal(like: Tensor, mean: float = 0.0, std: float = 1.0, generator: None = None) -> Tensor:
    return torch.randn(like.shape, dtype=like.dtype, device=like.device) * std + mean


def uniform(like: Tensor, to: float = 1.0, generator: None = None, **rest: float) -> Tensor:
    low = rest.get("from", 0.0)
    return torch.rand(like.shape, dtype=like.dtype, device=like.device) * (to - low) + low


def exponential(like: Tensor, lambd: float = 1.0, generator: None = None) -> Tensor:
    return uniform(like).neg().log1p().neg().clamp_min(torch.finfo(like.dtype).tiny) / lambd


def bernoulli(like: Tensor, p: float = 0.5, generator: None = None) -> Tensor:
    return (torch.rand(like.shape, device=like.device, dtype=torch.float32) < p).to(like.dtype)


# these fill a tensor whose values do not matter: if it is not mapped, vmap draws once for all
DRAWN: dict[Any, Callable[..., Tensor]] = {
    aten.normal_functional.default: normal,
    aten.uniform.default: uniform,
    aten.exponential.default: exponential,
    aten.bernoulli.p: bernoulli,
}
NOT_APART = (
    *(aten.cauchy.default, aten.geometric.default, aten.log_normal.default, aten.rrelu_with_noise_functional.default),
    *(aten.random.default, aten.random.to, getattr(aten.random, "from")),
)
