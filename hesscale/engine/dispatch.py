"""Which rule applies to each node of a graph, or why none does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.sharding import is_gathered
from ..errors import UnsupportedOperator
from ..rules import BL89, COMPLEX, REFUSED, RULES, Rule, brute_force, custom_functions, tensor_parallel
from ..rules.registry import Final, RuleFunction, Shares, summary_of
from .nodes import LEAF, Edge, Node, metadata, per_edge


class Step(NamedTuple):
    """A node with its rule (None for a leaf) and the tensors that receive its shares."""

    node: Node
    rule: Rule | None
    edges: tuple[Edge, ...]
    repeated: bool  # several inputs are the same tensor

    @property
    def function(self) -> RuleFunction:
        assert self.rule is not None
        return self.rule.same if self.repeated and self.rule.joint and self.rule.same is not None else self.rule.function


def steps_of(order: Sequence[Node], *, method: str, fallback: str) -> list[Step]:
    """Each node with its rule. Raises UnsupportedOperator at the first node without one, before anything has changed."""
    special = BL89 if method == "bl89" else {}
    used = {edge for node in order for edge in node.next_functions}
    return [step_of(node, special, fallback, used) for node in order]


def step_of(node: Node, special: dict[str, Rule], fallback: str, used: Collection[Edge]) -> Step:
    name = node.name()
    edges = node.next_functions
    if name == LEAF and not is_complex_or_nested(node._input_metadata[0]):
        check_data(node.variable)
        return Step(node, None, edges, False)
    rule = COMPLEX.get(name) if has_complex_tensors(node) else special.get(name) or RULES.get(name) or custom_rule(node)
    repeated = len(edges) > 1 and is_repeated(edges)
    reason = refusal(node, name, rule, repeated, used)
    if reason is None:
        assert rule is not None
        return Step(node, rule, edges, repeated)
    if fallback == "exact" and known_refusal(node, name, rule) is None:
        return Step(node, brute_force.rule_for(node, reason), edges, False)
    raise UnsupportedOperator(reason)


def refusal(node: Node, name: str, rule: Rule | None, repeated: bool, used: Collection[Edge]) -> str | None:
    """Why no rule applies to this node, and what the user can do about it; None if a rule applies."""
    if rule is None or any(meta.is_nested_tensor for meta in node._input_metadata):
        shown = name.rpartition("::")[2]
        if known := known_refusal(node, name, None):
            return f"no curvature rule for {shown}: {known}."
        return f"no curvature rule for {shown}{origin(node, name)}. {WAY_OUT}"
    if rule.used_outputs is not None:
        others = [i for i in range(len(node._input_metadata)) if i not in rule.used_outputs and (node, i) in used]
        if others:
            covered = rule.used_outputs[0]
            return f"{name}: its curvature rule covers output {covered} only, but the loss also depends on {others}. {WAY_OUT}"
    if rule.refuse is not None and (reason := rule.refuse(node)) is not None:
        return f"{name}: {reason}"
    if repeated and rule.joint and rule.same is None:
        return f"several inputs of {name} are the same tensor, which its curvature rule does not cover. {WAY_OUT}"
    return None


def known_refusal(node: Node, name: str, rule: Rule | None) -> str | None:
    """Why this node is not supported even by brute force, if that is known."""
    if rule is not None and rule.refuse is not None and isinstance(reason := rule.refuse(node), Final):
        return reason
    tensors = tensors_at(node)
    if any(is_complex_or_nested(meta) for meta in tensors):
        return REFUSED["NestedTensor" if any(meta.is_nested_tensor for meta in tensors) else "Complex"]
    return next((reason for part, reason in REFUSED.items() if part in name), None)


WAY_OUT = (
    "Register a rule with hesscale.register_rule, pass fallback='exact' to compute this node by brute force if it is small, "
    "or write this part of the model with operators from hesscale.operators()."
)


def is_complex_or_nested(meta: Any) -> bool:
    """Whether a tensor is complex or nested, which most rules do not support."""
    return bool(meta.dtype.is_complex or meta.is_nested_tensor)


def tensors_at(node: Node) -> list[Any]:
    """The metadata of a node's outputs and inputs."""
    return [*node._input_metadata, *(metadata(edge) for edge in node.next_functions if edge[0] is not None)]


def has_complex_tensors(node: Node) -> bool:
    """Whether an input or output of a node is complex. Such a node needs a rule for complex tensors."""
    return any(meta.dtype.is_complex for meta in tensors_at(node))


def diagonal_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the diagonal at a tensor of this dtype: float32 in place of float16, in which squares overflow."""
    dtype = dtype.to_real()
    return torch.float32 if dtype == torch.float16 else dtype


def check_data(leaf: Tensor) -> None:
    try:
        is_missing = not leaf.untyped_storage().nbytes() and leaf.numel()
    except NotImplementedError as error:  # sparse tensors and other special layouts
        raise UnsupportedOperator(f"a parameter has the layout {leaf.layout}. {REFUSED['Sparse']}") from error
    if is_missing and not is_gathered([leaf]):  # fully_shard gathers the data before the pass needs it
        raise UnsupportedOperator(
            "a parameter has no data, as under FullyShardedDataParallel after the forward pass. FullyShardedDataParallel is not "
            "supported; use fully_shard"
        )


def is_constant_product(node: Node, rule: Rule) -> bool:
    """Whether a node multiplies an activation by a constant that is not a parameter, such as the support of a distribution."""
    if rule.factors is None:
        return False
    first, second = node.next_functions[-2:]
    if (first[0] is None) == (second[0] is None):
        return False
    constant, other = (rule.factors[0], second) if first[0] is None else (rule.factors[1], first)
    if leads_to_leaf(other[0]):  # before the saved tensor is read, since that may recompute a checkpoint
        return False
    value = getattr(node, f"_saved_{constant}")  # not converted: a copy in another dtype would not be a parameter
    return not is_parameter(value) and not may_be_autocast_copy(value)


def may_be_autocast_copy(tensor: Tensor) -> bool:
    """Whether a matrix may be autocast's 16-bit copy of a frozen parameter. Nothing in the copy says what it is a copy of."""
    return tensor.dtype.itemsize <= 2 and tensor.dim() > 1


def is_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def leads_to_leaf(node: Node | None) -> bool:
    """Whether a tensor is a leaf, or a view of one, as the weight of a layer is."""
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() == LEAF


def is_repeated(edges: Sequence[Edge]) -> bool:
    if len(edges) == 2:
        return edges[0] == edges[1] and edges[0][0] is not None
    real = [edge for edge in edges if edge[0] is not None]
    return len(set(real)) < len(real)


def custom_rule(node: Node) -> Rule | None:
    """The rule of a torch.autograd.Function: its own ``hess_diag``, or the elementwise rule if probes show that it applies."""
    forward = getattr(node, "_forward_cls", None)
    if forward is None:
        return None
    known = rule_of_function(forward, len(node._input_metadata) > 1) or tensor_parallel.rule_of(forward)
    return known or custom_functions.rule_by_probes(node)


@lru_cache(maxsize=256)
def rule_of_function(forward: type, many: bool) -> Rule | None:
    function = getattr(forward, "hess_diag", None)
    if function is None:
        return None

    def apply(node: Node, g: Shares, s: Shares) -> Shares:
        shares = function(node, g, s)
        return per_edge(node, (shares,) if isinstance(shares, Tensor) or shares is None else shares)

    return Rule(apply, "custom", summary_of(function) or "defined by the function itself", many=many)


def origin(node: Node, name: str) -> str:
    """The operator or layer that creates such a node, as a user would call it."""
    if (forward := getattr(node, "_forward_cls", None)) is not None:
        return f" (from the custom function {forward.__module__}.{forward.__qualname__}, which defines no hess_diag)"
    makers = MAKERS.get(name)
    return f" (from {makers})" if makers else f" (from an operator like torch.{snake(name)})"


def snake(name: str) -> str:
    """``FractionalMaxPool2DBackward0`` → ``fractional_max_pool2d``."""
    stem = name.partition("Backward")[0].replace("2D", "2d").replace("3D", "3d").replace("1D", "1d")
    return "".join(("_" if i and c.isupper() and not stem[i - 1].isupper() else "") + c.lower() for i, c in enumerate(stem))


VIEWS = {f"{name}Backward{i}" for i in (0, 1) for name in ("T", "Transpose", "Permute", "View", "Unsqueeze", "Squeeze", "Expand")}
ORTHOGONAL = "as in nn.utils.parametrizations.orthogonal, where orthogonal_map='cayley' avoids it"
MAKERS: dict[str, str] = {
    "LinalgMatrixExpBackward0": f"torch.matrix_exp, {ORTHOGONAL}",
    "LinalgHouseholderProductBackward0": f"torch.linalg.householder_product, {ORTHOGONAL}",
    "ScaledDotProductFlashAttentionForCpuBackward0": "F.scaled_dot_product_attention or nn.MultiheadAttention",
    "ScaledDotProductFlashAttentionBackward0": "F.scaled_dot_product_attention or nn.MultiheadAttention",
    "ScaledDotProductEfficientAttentionBackward0": "F.scaled_dot_product_attention or nn.MultiheadAttention",
    "ScaledDotProductCudnnAttentionBackward0": "F.scaled_dot_product_attention or nn.MultiheadAttention",
}
