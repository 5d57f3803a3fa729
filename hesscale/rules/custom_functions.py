"""Custom functions without ``hess_diag``: a rule for those that are elementwise, which probes of their backward detect.

For a cotangent v, the backward of an elementwise function returns f'(x) v, and f'(x) for a vector of ones. If the two agree for a
random v, the Jacobian is diagonal. f'' is the derivative of f', so the backward must be differentiable, and everything that it
saves must have a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.nodes import call, derivative, is_once_differentiable
from ..errors import NeedsEagerPass
from .registry import Node, Rule, Share

MAX_KNOWN = 1024
_known: dict[tuple[type, tuple[int, ...], torch.dtype], None] = {}  # functions found to be elementwise, oldest first


def elementwise(node: Node, g: Share, s: Share) -> list[Share]:
    """elementwise, by probes: f' = backward(1), f'' by differentiating it"""
    index, y = only_input(node), node._input_metadata[0]
    assert index is not None
    with torch.enable_grad():
        first = call(node, [torch.ones(y.shape, dtype=y.dtype, device=y.device)])[index]
    shares: list[Share] = [None] * len(node.next_functions)
    if first is None:
        return shares
    share = None if s is None else s * first.detach().to(s.dtype).square()
    if g is not None and first.requires_grad:
        second = derivative(first, node.next_functions[index], g.to(first.dtype), node)
        share = second if share is None else share if second is None else share + second
    shares[index] = share
    return shares


RULE = Rule(elementwise, "custom_functions", (elementwise.__doc__ or "").strip(), fan_in=False, fan_out=False)


def rule_by_probes(node: Node) -> Rule | None:
    """The rule for a custom function that is elementwise; None for any other."""
    function, y, index = node._forward_cls, node._input_metadata[0], only_input(node)
    if index is None or function.__module__.partition(".")[0] == "torch":  # PyTorch's own may contain collectives or whole graphs
        return None
    child, number = node.next_functions[index]
    x = child._input_metadata[number]
    if list(x.shape) != list(y.shape) or x.dtype != y.dtype or not y.dtype.is_floating_point or y.is_nested_tensor:
        return None
    key = function, tuple(y.shape), y.dtype
    if key in _known:
        return RULE
    if torch.compiler.is_compiling():
        raise NeedsEagerPass(f"only a pass in eager mode can find out whether {function.__qualname__} is elementwise")
    if not (saves_graphs_only(node) and is_elementwise(node, index)):
        return None
    while len(_known) >= MAX_KNOWN:
        _known.pop(next(iter(_known)), None)
    _known[key] = None
    return RULE


def only_input(node: Node) -> int | None:
    """The position of the only differentiable input of a function with one output; None for any other function."""
    positions = [i for i, (child, _) in enumerate(node.next_functions) if child is not None]
    return positions[0] if len(positions) == 1 and len(node._input_metadata) == 1 else None


def saves_graphs_only(node: Node) -> bool:
    """Whether all tensors that the backward saves have a graph. A tensor without a graph would be treated as constant."""
    kept: list[Any] = [*node.saved_tensors, *vars(node).values()]
    return all(t.requires_grad for t in kept if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()))


def is_indicator(first: Tensor) -> bool:
    """Whether f' takes only one value besides zero, so that f'' is zero, as in straight-through estimators that clip."""
    values = first[first != 0]
    return bool((values == values[0]).all())


def is_elementwise(node: Node, index: int) -> bool:
    """Whether backward(v) = backward(1) v for random v, and f' can be differentiated. False if the probes are inconclusive."""
    y = node._input_metadata[0]
    generator = torch.Generator(y.device).manual_seed(0)
    probes = [torch.randn(tuple(y.shape), generator=generator, device=y.device).to(y.dtype) for _ in range(2)]
    with torch.enable_grad():
        ones = torch.ones(y.shape, dtype=y.dtype, device=y.device, requires_grad=True)
        first = call(node, [ones])[index]
        if first is None or first.shape != ones.shape or not first.requires_grad or is_once_differentiable(first):
            return False
        depends_on_x = call(node, [ones.detach()])[index].requires_grad  # type: ignore[union-attr]
    first = first.detach()
    if not bool(first.any() & first.isfinite().all()):
        return False
    if not depends_on_x and node.saved_tensors and not is_indicator(first):  # a detached x would look constant
        return False
    tolerance = 8 * torch.finfo(y.dtype).eps
    with torch.no_grad():
        pulled = [call(node, [probe])[index] for probe in probes]
    if any(
        found is None or not torch.allclose(found, first * v, rtol=tolerance, atol=0)
        for found, v in zip(pulled, probes, strict=True)
    ):
        return False
    return not depends_on_x or is_second_derivative_diagonal(node, index, probes[0])


def is_second_derivative_diagonal(node: Node, index: int, probe: Tensor) -> bool:
    """Whether each entry of f' depends only on the same entry of x. It may not, if the backward is not a true gradient."""
    ones = torch.ones_like(probe)

    def second(vector: Tensor) -> Tensor:
        with torch.enable_grad():
            first = call(node, [ones])[index]
        assert first is not None
        found = derivative(first, node.next_functions[index], vector, node)
        return torch.zeros_like(vector) if found is None else found

    expected = second(ones) * probe
    margin = 64 * torch.finfo(probe.dtype).eps * float(expected.abs().max())
    return torch.allclose(second(probe), expected, rtol=1e-3, atol=margin)
