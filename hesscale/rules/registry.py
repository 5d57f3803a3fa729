"""One table from autograd node names to curvature rules, and the few helpers that rules share.

For y = f(x₁ … xₙ), g = ∂L/∂y and s = diag ∂²L/∂y², a rule returns for each input that needs it

    s_x = Σ_k s_k (∂y_k/∂x)² + Σ_k g_k ∂²y_k/∂x²        (Eq. 3 and 4 of the paper)

It sees its node, g and s, and nothing else. ``g`` and ``s`` may each be None, which means zero. What it returns may still
have the shape and dtype of y: the engine sums and casts every share to the input it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Node = Any  # torch.autograd.graph.Node, whose saved attributes no type checker knows
Share = Tensor | None
Shares = Share | Sequence[Share]
RuleFunction = Callable[..., Shares]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Rule:
    """A curvature rule and what the head analysis must know about the operator's structure.

    Attributes:
        function: ``(node, g, s) -> shares``, one share per entry of ``node.next_functions`` (a bare tensor for one input).
        family: the file of the rule, for tables.
        summary: its maths in one line.
        curved: some ∂²y/∂x² is not zero; the rule is called even where s is zero.
        joint: y mixes its inputs: ∂²y/∂x₁∂x₂ is not zero, or one entry of y adds entries of both. False for cat, where, max.
        fan_in: one entry of y depends on several entries of one input (sum, softmax).
        fan_out: one entry of an input reaches several entries of y (expand, softmax).
        broadcast: inputs are expanded to y's shape, so that a smaller one fans out.
        contraction: a matrix product or its like, where the head ends.
        many: the node has several differentiable outputs; g and s are then tuples.
        same: the rule for a node that meets one tensor at several of its inputs; it returns that tensor's one share per
            duplicated edge at its first position and None at the others. None: such a node is refused, unless its inputs do
            not meet (``joint=False``) or the operator is linear in a way that ``function`` handles.
        refuse: ``(node) -> reason`` or None, asked during the walk.
    """

    function: RuleFunction
    family: str
    summary: str
    curved: bool = True
    joint: bool = True
    fan_in: bool = True
    fan_out: bool = True
    broadcast: bool = False
    contraction: bool = False
    many: bool = False
    same: RuleFunction | None = None
    refuse: Callable[[Node], str | None] | None = None


RULES: dict[str, Rule] = {}
BL89: dict[str, Rule] = {}  # what the method "bl89" replaces
REFUSED: dict[str, str] = {}  # names that get no rule, and what to do instead


def rule(*names: str, table: dict[str, Rule] | None = None, **facts: Any) -> Callable[[F], F]:
    """Register ``function(node, g, s)`` for nodes of these names; ``facts`` are fields of :class:`Rule`."""

    def register(function: F) -> F:
        into = RULES if table is None else table
        for name in names:
            if name in into:
                raise ValueError(f"{name} already has a rule ({into[name].summary})")
            into[name] = Rule(function, family_of(function), summary_of(function), **facts)
        return function

    return register


def linear(*names: str, **facts: Any) -> Callable[[F], F]:
    """Register ``function(node, s)`` for operators with ∂²y/∂x² = 0; it is only called with an s."""

    def register(function: F) -> F:
        def apply(node: Node, g: Share, s: Tensor) -> Shares:
            return function(node, s)

        apply.__doc__, apply.__module__ = function.__doc__, function.__module__
        rule(*names, **{"curved": False, **facts})(apply)
        return function

    return register


def zero_one(*names: str, summary: str, **facts: Any) -> None:
    """Register operators whose Jacobian entries are 0 and 1: their own backward, applied to s."""

    def apply(node: Node, s: Any) -> Shares:
        return node(*s) if isinstance(s, tuple) else node(s)

    apply.__doc__, apply.__module__ = summary, "hesscale.rules.linear_maps"
    linear(*names, **{"joint": False, "fan_in": False, "fan_out": False, **facts})(apply)


def elementwise(*names: str, **facts: Any) -> Callable[[F], F]:
    """Register y = f(x) from ``function(node) -> (f', f'')``, or a list of such pairs, one per input.

    A derivative may be a number, a tensor, or None for zero; a pair may be None where the input needs no share.
    """

    def register(function: F) -> F:
        def apply(node: Node, g: Share, s: Share) -> Shares:
            pairs = function(node)
            if isinstance(pairs, tuple):
                return chain(*pairs, g, s)
            return [None if pair is None else chain(*pair, g, s) for pair in pairs]

        apply.__doc__, apply.__module__ = function.__doc__, function.__module__
        rule(*names, **{"fan_in": False, "fan_out": False, "broadcast": True, "same": elementwise_same, **facts})(apply)
        return function

    return register


def chain(first: Any, second: Any, g: Share, s: Share) -> Share:
    """s_x = f'² s + f'' g, with None for zero on either side."""
    share = None if s is None or first is None else s * (first * first)
    if g is None or second is None:
        return share
    return g * second if share is None else share + g * second


def elementwise_auto(node: Node, g: Share, s: Share) -> Shares:
    """f' = node(1), f'' by differentiating it: for elementwise operators without a closed form here."""
    return _elementwise_by_autograd(node, g, s, merge=False)


def elementwise_same(node: Node, g: Share, s: Share) -> Shares:
    """One tensor at several inputs of an elementwise operator: f' is the sum of its partial derivatives."""
    return _elementwise_by_autograd(node, g, s, merge=True)


def _elementwise_by_autograd(node: Node, g: Share, s: Share, merge: bool) -> Shares:
    ones = torch.ones(node._input_metadata[0].shape, dtype=node._input_metadata[0].dtype, device=node._input_metadata[0].device)
    with torch.enable_grad():
        derivatives = node(ones)
        derivatives = list(derivatives) if isinstance(derivatives, tuple) else [derivatives]
        if merge:
            for i, edge in enumerate(node.next_functions):
                first = node.next_functions.index(edge)
                if first < i and derivatives[i] is not None:
                    derivatives[first] = derivatives[first] + derivatives[i]
                    derivatives[i] = None
    shares: list[Share] = []
    for edge, first in zip(node.next_functions, derivatives, strict=True):
        if first is None:
            shares.append(None)
            continue
        share = None if s is None else s * first.detach().to(s.dtype) ** 2
        if g is not None and first.requires_grad:
            (second,) = torch.autograd.grad(
                first, torch.autograd.graph.GradientEdge(*edge), g.to(first.dtype), retain_graph=True, allow_unused=True
            )
            if second is not None:
                meta = edge[0]._input_metadata[edge[1]]
                share = second if share is None else share.sum_to_size(meta.shape) + second
        shares.append(share)
    return shares


def saved(node: Node, name: str) -> Any:
    """``node._saved_<name>``: an error if this torch calls it otherwise; float16 comes as float32, whose squares do not overflow."""
    try:
        value = getattr(node, f"_saved_{name}")
    except AttributeError:
        raise RuntimeError(
            f"{node.name()} of torch {torch.__version__} has no saved {name!r}; hesscale's rule for it was written for another "
            "version of torch. Please report this."
        ) from None
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.float16 else value


def dimension(value: int, rank: int) -> int:
    """A saved dimension as a proper one: autograd stores −1 as 2⁶⁴ − 1."""
    value = value - 2**64 if value >= 2**63 else value
    return value % max(rank, 1)


def needs(node: Node, index: int) -> bool:
    """Whether input ``index`` takes part in differentiation."""
    return node.next_functions[index][0] is not None


def family_of(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]


def summary_of(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def register_rule(*names: str, **facts: Any) -> Callable[[F], F]:
    """Teach hesscale an operator: ``function(node, g, s) -> shares`` for autograd nodes of these names.

    Replaces an existing rule of that name. A custom :class:`torch.autograd.Function` may instead define a static method
    ``hess_diag(ctx, g, s)`` with the same meaning.

    Example:
        >>> import torch, hesscale
        >>> @hesscale.register_rule("TanhBackward0", fan_in=False, fan_out=False)
        ... def tanh(node, g, s):
        ...     "f' = 1 − y², f'' = −2 y f'"
        ...     y = node._saved_result
        ...     d1 = 1 - y * y
        ...     return (0 if s is None else d1**2 * s) + (0 if g is None else -2 * y * d1 * g)
    """

    def register(function: F) -> F:
        for name in names:
            previous = RULES.pop(name, None)
            try:
                rule(name, **facts)(function)
            except TypeError:
                if previous is not None:
                    RULES[name] = previous
                raise
            RULES[name] = replace(RULES[name], family="custom")
        return function

    return register
