"""One table from autograd node names to curvature rules, and the few helpers that rules share.

For y = f(x₁ … xₙ), g = ∂L/∂y and s = diag ∂²L/∂y², a rule returns for each input that needs it

    s_x = Σ_k s_k (∂y_k/∂x)² + Σ_k g_k ∂²y_k/∂x²        (Eq. 3 and 4 of the paper)

A rule gets only its node, g and s. ``g`` and ``s`` may each be None, which means zero. A share may have the shape and dtype of y:
the engine sums and casts it to those of the input. A share may be s itself or a view of s, but not g or a saved tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..engine.nodes import Node as Node
from ..engine.nodes import derivative

Share = Tensor | None
Shares = Share | Sequence[Share]
RuleFunction = Callable[..., Shares]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class Rule:
    """A curvature rule, and the operator's structure, which the analysis of the head needs.

    Attributes:
        function: ``(node, g, s) -> shares``, one share per entry of ``node.next_functions`` (a bare tensor for one input).
        family: the name of the rule's file, for tables.
        summary: the maths of the rule in one line.
        curved: some ∂²y/∂x₁² is not zero. It is one value for all inputs, or one for each. If true, the rule is called even if s
            is zero.
        joint: one entry of y may depend on entries of two inputs. False for cat, stack, where.
        mixed: some ∂²y/∂x₁∂x₂ is not zero. False for add, True for mul.
        fan_in: one entry of y depends on several entries of one input (sum, softmax).
        separable: each entry of y is a sum of functions of single entries (sum, mse_loss), so ∂²y/∂x_i∂x_j = 0 for i ≠ j.
        fan_out: one entry of an input affects several entries of y (expand, softmax).
        broadcast: inputs are expanded to y's shape, so that an entry of a smaller input affects several entries of y.
        contraction: the operator is a matrix product or similar, where the head ends.
        factors: for a product, the names under which a node saves its two factors, which are its last two inputs. If one of them
            is a constant, the product belongs to the head.
        fresh: a share is s itself or a new tensor, never a view of s, so that the engine may write into it. This holds for every
            contraction.
        many: the node has several differentiable outputs. g and s are then tuples.
        used_outputs: the outputs that may carry gradients. A graph that uses another output is refused. None stands for all.
        same: the rule for a node that has one tensor at several of its inputs. For each duplicated edge, it returns the share of
            that tensor at the first position and None at the others. Without such a rule, the node is refused, unless no entry
            of y depends on two inputs (``joint=False``) or the operator is linear in a way that ``function`` handles.
        transposed: the rule for a product whose last factor is the transpose of a matrix that no other node uses, such as the
            weight of a Linear layer. Its last share is that of the matrix.
        refuse: ``(node) -> reason`` or None, which is called for each node of the graph.
    """

    function: RuleFunction
    family: str
    summary: str
    curved: bool | tuple[bool, ...] = True
    joint: bool = True
    mixed: bool = True
    fan_in: bool = True
    separable: bool = False
    fan_out: bool = True
    broadcast: bool = False
    contraction: bool = False
    fresh: bool = False
    factors: tuple[str, str] | None = None
    many: bool = False
    used_outputs: tuple[int, ...] | None = None
    same: RuleFunction | None = None
    transposed: RuleFunction | None = None
    refuse: Callable[[Node], str | None] | None = None

    def is_curved(self, index: int) -> bool:
        """Whether ∂²y/∂x² may differ from zero for this input."""
        return self.curved[index] if isinstance(self.curved, tuple) else self.curved

    def uses_gradient(self, repeated: bool) -> bool:
        """Whether the term with g may be nonzero. If one tensor is at two inputs, mixed derivatives contribute to it."""
        curved = any(self.curved) if isinstance(self.curved, tuple) else self.curved
        return curved or (repeated and self.joint and self.mixed)


RULES: dict[str, Rule] = {}
"""The rule of each autograd node, by the node's name."""
BL89: dict[str, Rule] = {}
"""The rules that the method ``"bl89"`` uses in place of those in `RULES`."""
COMPLEX: dict[str, Rule] = {}
"""The rules of nodes that take or make complex tensors; see :mod:`hesscale.rules.complex_numbers`."""


class Final(str):
    """A reason to refuse a node even with ``fallback="exact"``."""


KERNEL = (
    "this attention kernel has no curvature rule, and PyTorch cannot differentiate it twice. Call "
    "F.scaled_dot_product_attention instead, if necessary under torch.nn.attention.sdpa_kernel(SDPBackend.MATH); build a "
    "Hugging Face model with attn_implementation='eager'"
)
REFUSED: dict[str, str] = {
    "CompiledFunctionBackward": "a model under torch.compile hides its operators. Compile the whole step with "
    "hesscale.compile_step, pass the model before torch.compile, or run this forward pass under "
    "torch.compiler.set_stance('force_eager')",
    "DifferentiableGraphBackward": "a function under torch.jit.script hides its operators. Call it without torch.jit.script, "
    "or start Python with PYTORCH_JIT=0",
    "CheckpointFunctionBackward": "reentrant checkpointing hides its operators. Pass use_reentrant=False to checkpoint",
    "FlashAttention": KERNEL,
    "FlashAttn": KERNEL,
    "EfficientAttention": KERNEL,
    "CudnnAttention": KERNEL,
    "FusedAttention": KERNEL,
    "FlexAttention": KERNEL,
    "Varlen": KERNEL,
    "SyncBatchNorm": "batch norm over several processes couples their samples. Use group or layer norm, or nn.BatchNorm, which "
    "normalizes each process's part of the batch by itself",
    "grouped_mm_fallback": "this product of the experts cannot be differentiated twice. Call "
    "model.set_experts_implementation('eager')",
    "MiopenRnn": "ROCm's recurrent layers have no curvature rule. Run this layer under torch.backends.cudnn.flags(enabled=False)",
    "LstmMps": "the LSTM of Apple's GPUs has no curvature rule. Run this layer on the CPU",
    "Mkldnn": "tensors in the layout of oneDNN have no curvature rules. Leave out to_mkldnn, or run the forward pass under "
    "torch.backends.mkldnn.flags(enabled=False)",
    "BackwardBackward": "the loss contains a gradient (create_graph=True), whose curvature needs third derivatives. "
    "Remove such a term from the loss, or detach it",
    "SparseMmReduce": "sparse tensors have no curvature rules here. With torch_geometric, pass edge_index in place of a sparse "
    "adjacency matrix; elsewhere use dense tensors",
    "Sparse": "sparse tensors have no curvature rules. Use dense ones",
    "ToDense": "sparse tensors have no curvature rules. Use dense ones",
    "ValuesBackward": "sparse tensors have no curvature rules. Use dense ones",
    "NestedTensor": "nested tensors have no curvature rules. Use padded ones with a mask",
    "Complex": "complex tensors have curvature rules for few operators. Carry real and imaginary parts as two real tensors",
}
"""Why a node is not supported, by a part of its name, and what to do instead."""


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
    """Register ``function(node, s)`` for operators with ∂²y/∂x² = 0. It is not called if s is None."""

    def register(function: F) -> F:
        def apply(node: Node, g: Share, s: Share) -> Shares:
            return [None] * len(node.next_functions) if s is None else function(node, s)

        apply.__doc__, apply.__module__ = function.__doc__, function.__module__
        rule(*names, **{"curved": False, **facts})(apply)
        return function

    return register


def zero_one(*names: str, summary: str, **facts: Any) -> None:
    """Register operators whose Jacobian entries are 0 and 1: their own backward, applied to s."""

    def apply(node: Node, s: Any) -> Shares:
        return node(*s) if isinstance(s, tuple) else node(s)

    apply.__doc__, apply.__module__ = summary, sys._getframe(1).f_globals["__name__"]  # the caller's module gives the family
    linear(*names, **{"joint": False, "fan_in": False, "fan_out": False, **facts})(apply)


def elementwise(*names: str, **facts: Any) -> Callable[[F], F]:
    """Register y = f(x) from ``function(node) -> (f', f'')``, or a list of such pairs, one per input.

    A derivative may be a number, a tensor, or None for zero; a pair may be None where the input needs no share.
    """

    def register(function: F) -> F:
        def apply(node: Node, g: Share, s: Share) -> Shares:
            pairs = function(node)
            if isinstance(pairs, tuple):
                return chain(pairs[0], pairs[1], g, s)
            return [None if pair is None else chain(pair[0], pair[1], g, s) for pair in pairs]

        apply.__doc__, apply.__module__ = function.__doc__, function.__module__
        rule(*names, **{**ONE_TO_ONE, **facts})(apply)
        return function

    return register


def chain(first: Any, second: Any, g: Share, s: Share) -> Share:
    """s_x = f'² s + f'' g. None stands for zero, in arguments and in the result."""
    share = None if s is None or first is None else (s * first).mul_(first)
    if g is None or second is None:
        return share
    if share is None:
        return g * second
    return share.addcmul_(g, second) if isinstance(second, Tensor) else share.add_(g, alpha=second)


def elementwise_auto(node: Node, g: Share, s: Share) -> Shares:
    """f' = node(1), f'' by differentiating it: for elementwise operators without a closed form here."""
    return _elementwise_by_autograd(node, g, s, merge=False)


def elementwise_same(node: Node, g: Share, s: Share) -> Shares:
    """The same tensor at several inputs of an elementwise operator: f' is the sum of the partial derivatives."""
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
            second = derivative(first, edge, g.to(first.dtype), node)
            if second is not None:
                meta = edge[0]._input_metadata[edge[1]]
                share = second if share is None else share.sum_to_size(meta.shape) + second
        shares.append(share)
    return shares


# Fields of Rule for elementwise operators, unless their rules set them differently.
ONE_TO_ONE: dict[str, Any] = {"fan_in": False, "fan_out": False, "broadcast": True, "fresh": True, "same": elementwise_same}
MISSING = object()


def saved(node: Node, name: str) -> Any:
    """``node._saved_<name>``, with float16 as float32, since squares would overflow. Raises if there is no such attribute."""
    value: Any = getattr(node, "_saved_" + name, MISSING)
    if value is MISSING:
        raise RuntimeError(
            f"{node.name()} of torch {torch.__version__} has no saved {name!r}; hesscale's rule for it was written for another "
            "version of torch. Please report this."
        )
    return value.float() if getattr(value, "dtype", None) == torch.float16 else value


def signed(value: int) -> int:
    """A saved number with its sign: autograd stores −1 as 2⁶⁴ − 1."""
    return value - 2**64 if value >= 2**63 else value


def dimension(value: int, rank: int) -> int:
    """A saved dimension, converted to a nonnegative one."""
    return signed(value) % max(rank, 1)


def needs(node: Node, index: int) -> bool:
    """Whether input ``index`` needs a share."""
    return node.next_functions[index][0] is not None


def family_of(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]


def summary_of(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().partition("\n")[0]


def register_rule(*names: str, **facts: Any) -> Callable[[F], F]:
    """Register a curvature rule, ``function(node, g, s) -> shares``, for autograd nodes of these names.

    g is the gradient and s the Hessian diagonal at the operator's output. None stands for zero. The rule must not write into g or
    s. The share of an input is Σ_k s_k (∂y_k/∂x)² + Σ_k g_k ∂²y_k/∂x². An existing rule of the same name is replaced. A custom
    :class:`torch.autograd.Function` may instead define a static method ``hess_diag(ctx, g, s)`` with the same meaning.

    Args:
        names: autograd's names, as in ``y.grad_fn.name()``.
        facts: fields of :class:`hesscale.rules.Rule` that describe the operator's structure. The defaults assume the worst case.

    Example:
        >>> import torch, hesscale
        >>> class Cube(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x ** 3
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         return 3 * ctx.saved_tensors[0] ** 2 * g
        >>> @hesscale.register_rule("CubeBackward", fan_in=False, fan_out=False)
        ... def cube(node, g, s):
        ...     "f' = 3x², f'' = 6x"
        ...     (x,) = node.saved_tensors
        ...     return (0 if s is None else 9 * x**4 * s) + (0 if g is None else 6 * x * g)
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> hesscale.backward(Cube.apply(x).sum())
        >>> x.hess_diag
        tensor([ 6., 12.])
        >>> del hesscale.rules.RULES["CubeBackward"]
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
