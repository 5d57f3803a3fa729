"""Decisions about a graph before the backward pass starts: which nodes get a hook, and what each hook does.

All graphs of one structure share one :class:`Schedule`, so that a training loop builds it once. A schedule must therefore not
refer to a node or tensor of any graph. It identifies a node by its index in a walk from the loss, and a tensor by a key: the
index of the node that made it, and which of that node's outputs it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UnsupportedOperator
from ..rules import BL89, COMPLEX, REFUSED, RULES, brute_force, tensor_parallel
from ..rules.registry import RuleFunction
from .arguments import check_choices
from .cache import BoundedCache
from .dispatch import Step, custom_rule, diagonal_dtype, is_constant_product, steps_of
from .freed import saved_attributes
from .head_structure import Head, find_head
from .nodes import LEAF, Edge, Node, leading_to, metadata, topological

TensorKey = tuple[int, int]
MAX_SCHEDULES = 128
MAX_FUSED_NUMEL = 2**16  # see Schedule.is_large
TRANSPOSE = RULES["TBackward0"]


class Graph(NamedTuple):
    """A graph's nodes in the order of the walk, and its signature, which determines the schedule."""

    nodes: list[Node]
    index_of: dict[Node, int]
    leaves: dict[int, int]  # the index of a leaf's node by the id of its tensor
    signature: tuple[Any, ...]
    edges: list[Sequence[Edge]]  # of each node
    metas: dict[Node, Any]  # the metadata of each node's outputs


leaf_metadata = attrgetter("shape", "dtype", "device")
tensor_metadata = attrgetter("is_nested_tensor", "dtype", "device")


def leaf_facts(leaf: Tensor) -> tuple[Any, ...]:
    """Shape, dtype and device of a leaf."""
    try:
        return leaf_metadata(leaf)
    except RuntimeError as error:  # a nested tensor has no shape
        raise UnsupportedOperator(f"a leaf is a nested tensor: {REFUSED['NestedTensor']}.") from error


def walk(root: Node, method: str) -> Graph:
    """Walk the graph below a node. This runs at every step, so it collects the signature in one flat list."""
    special = BL89 if method == "bl89" else RULES
    nodes, index_of, leaves = [root], {root: 0}, {}
    signature: list[Any] = []
    edges: list[Sequence[Edge]] = []
    metas: dict[Node, Any] = {}
    note, complex_rule = signature.append, COMPLEX.get
    for node in nodes:  # the loop appends to it
        name = node.name()
        if name == LEAF:
            leaf = node.variable
            leaves[id(leaf)] = index_of[node]
            note(leaf_facts(leaf))
            note(bool(leaf._post_accumulate_grad_hooks))
            edges.append(())
            continue
        rule = special.get(name) or RULES.get(name) or custom_rule(node)
        note(rule or name)
        note(complex_rule(name))
        if rule is not None and rule.refuse is not None:
            note(rule.refuse(node))
        if rule is not None and rule.factors is not None:
            note(is_constant_product(node, rule))
        metas[node] = node._input_metadata
        for meta in metas[node]:
            facts = tensor_metadata(meta)
            note(facts)
            note(facts[0] or tuple(meta.shape))
        edges.append(node.next_functions)
        for child, output_nr in edges[-1]:
            index = index_of.get(child)
            if index is None and child is not None:
                index = index_of[child] = len(nodes)
                nodes.append(child)
            note(index)
            note(output_nr)
    return Graph(nodes, index_of, leaves, tuple(signature), edges, metas)


class Target(NamedTuple):
    """A tensor that receives a share, with the shape, dtype and device of its diagonal."""

    key: TensorKey
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    fused: Instruction | None = None  # the instruction that uses the share at once, if it need not wait for anything else


class Instruction(NamedTuple):
    """What a hook does at a node. A leaf has no function."""

    node_index: int
    function: RuleFunction | None
    outputs: tuple[TensorKey, ...]  # the tensors that the node made
    targets: tuple[Target | None, ...]  # None for an input without a share
    many: bool  # the node has several differentiable outputs
    is_contraction: bool
    is_fresh: bool  # each share of the rule is a new tensor or s itself
    is_curved: bool  # the rule has a term with the gradient
    keeps_gradient: bool  # False where Gauss-Newton drops that term


class Schedule:
    """Which rule applies to each node, where the head is, and which nodes get a hook."""

    def __init__(
        self,
        steps: Sequence[Step],
        head: Head,
        requested: frozenset[TensorKey],
        gauss_newton: bool,
        graph: Graph,
        is_fused: bool = True,
    ) -> None:
        self.steps = [relabel_step(step, graph.index_of) for step in steps]
        self.head = relabel_head(head, graph.index_of)
        self.requested = requested
        self.gauss_newton = gauss_newton
        self.is_fused = is_fused
        self.rules = {step.node: step.rule for step in self.steps}
        self.uses_brute_force = any(rule is brute_force.RULE for rule in self.rules.values())
        self.is_parallel = any(rule is tensor_parallel.RULE for rule in self.rules.values())
        self.leaves = [step.node for step in self.steps if step.rule is None]
        self.hooked_leaves = {i for i in self.leaves if graph.nodes[i].variable._post_accumulate_grad_hooks}
        self.saved_attributes = saved_attributes(steps, [step.node for step in self.steps])
        self.num_outputs = {step.node: len(graph.nodes[step.node]._input_metadata) for step in self.steps}
        keys = {key for step in self.steps for key in step.edges if key[0] in self.num_outputs or key in requested}
        self.targets = {key: make_target(key, metadata((graph.nodes[key[0]], key[1]))) for key in keys}
        self._instructions: dict[frozenset[TensorKey], list[Instruction]] = {}

    def instructions(self, known: frozenset[TensorKey]) -> list[Instruction]:
        """The instructions of the hooks, given the tensors of the head whose diagonals are already known."""
        found = self._instructions.get(known)
        if found is None:
            found = self._instructions.setdefault(known, self.fuse(known))
        return found

    def fuse(self, known: frozenset[TensorKey]) -> list[Instruction]:
        """Fuse a node into its consumer if it needs nothing but the consumer's share. All other nodes get a hook."""
        superfluous = self.head.superfluous_nodes(known, self.requested)
        consumers = Counter([index for step in self.steps for index, _ in step.edges])
        must_wait = {index for index, _ in self.requested | known}
        fused: dict[int, Instruction] = {}
        hooked: list[Instruction] = []
        unwanted = known | {key for key in self.targets if key[0] in superfluous and key not in self.requested}
        for step in reversed(self.steps):
            if step.node in superfluous:
                continue
            instruction = self.instruction(step, unwanted, fused)
            waits = consumers[step.node] > 1 or step.node in must_wait or self.waits_for_gradient(instruction)
            if not waits and (self.is_fused or step.rule is TRANSPOSE):
                fused[step.node] = instruction
            else:
                hooked.append(instruction)
        return hooked

    def instruction(self, step: Step, unwanted: frozenset[TensorKey], fused: dict[int, Instruction]) -> Instruction:
        """The instruction of a node. If the node is in the head, shares for ``unwanted`` tensors are dropped."""
        index, rule, edges, repeated = step
        outputs = tuple([(index, i) for i in range(self.num_outputs[index])])
        if rule is None:
            return Instruction(index, None, outputs, (), False, False, False, False, True)
        function, in_head = step.function, index in self.head.nodes
        targets = [None if in_head and key in unwanted else self.targets.get(key) for key in edges]
        targets = [target and target._replace(fused=fused.get(target.key[0])) for target in targets]
        if rule.transposed is not None and not repeated:
            last = targets[-1] and targets[-1].fused
            if last is not None and self.rules[last.node_index] is TRANSPOSE:
                function, targets[-1] = rule.transposed, last.targets[0]
        is_curved, keeps_gradient = rule.uses_gradient(repeated), in_head or not self.gauss_newton
        kinds = rule.many, rule.contraction, rule.contraction or (rule.fresh and not repeated)
        return Instruction(index, function, outputs, tuple(targets), *kinds, is_curved, keeps_gradient)

    def waits_for_gradient(self, instruction: Instruction) -> bool:
        if instruction.function is None:  # a leaf: its hooks may clear .grad, which is read to see whether there was a gradient
            return instruction.node_index in self.hooked_leaves
        return instruction.many or (instruction.is_curved and (instruction.keeps_gradient or self.is_large(instruction)))

    def is_large(self, instruction: Instruction) -> bool:
        """Whether fusing would need much more memory: fused rules run early, before the pass has freed the graph up to there."""
        return any(key in self.targets and self.targets[key].shape.numel() > MAX_FUSED_NUMEL for key in instruction.outputs)


_schedules: BoundedCache[Schedule] = BoundedCache(MAX_SCHEDULES)


def schedule_for(
    graph: Graph,
    ends: frozenset[TensorKey] | None,
    requested: frozenset[TensorKey] | None,
    options: tuple[str, str, str, torch.dtype | None],
    *,
    is_fused: bool = True,
) -> Schedule:
    """The schedule of a graph. Raises UnsupportedOperator at the first node without a rule.

    Args:
        is_fused: whether a rule may run before the pass reaches its node. Under FSDP, the weight is not gathered until then.
    """
    key = graph.signature, ends, requested, options, is_fused
    known = _schedules.get(key)
    if known is not None:
        return known
    schedule = make_schedule(graph, ends, requested, options, is_fused)
    if schedule.uses_brute_force:
        return schedule  # not cached, since making it warns about brute force, which every step should do
    return _schedules.setdefault(key, schedule)


def make_schedule(
    graph: Graph,
    ends: frozenset[TensorKey] | None,
    requested: frozenset[TensorKey] | None,
    options: tuple[str, str, str, torch.dtype | None],
    is_fused: bool,
) -> Schedule:
    method, head, fallback, curvature_dtype = options
    check_choices(method=method, head=head, fallback=fallback, curvature_dtype=curvature_dtype)
    keys = requested or frozenset()
    edges = {(graph.nodes[index], i) for index, i in keys}
    order = topological(graph.nodes[0])
    steps = steps_of(order if requested is None else leading_to(order, edges), method=method, fallback=fallback)
    if any(step.rule is tensor_parallel.RULE for step in steps):
        tensor_parallel.check_operators(steps)
    found = Head.empty()
    if method != "bl89" and (head != "rules" or method == "hesscale_gn"):
        stops = None if ends is None else {(graph.nodes[index], i) for index, i in ends}
        found = find_head(steps, stops, edges, is_bounded=head == "auto")
    return Schedule(steps, found, keys, method == "hesscale_gn", graph, is_fused)


def relabel_step(step: Step, labels: Mapping[Node, int]) -> Step:
    node, rule, edges, repeated = step
    return Step(labels[node], rule, tuple([(child if child is None else labels[child], i) for child, i in edges]), repeated)


def relabel_head(head: Head, labels: Mapping[Node, int]) -> Head:
    """A head with node indices in place of nodes."""
    return Head(
        frozenset([labels[node] for node in head.nodes]),
        [relabel_step(step, labels) for step in head.steps],
        frozenset([(labels[node], i) for node, i in head.ends]),
        {(labels[node], i): structure for (node, i), structure in head.inexact.items()},
        [(labels[node], ()) for node, _ in head.path],
        head.has_custom_functions,
    )


def head_in(graph: Graph, head: Head) -> Head:
    """A head with a graph's nodes in place of indices. It has only the fields that double backward needs."""
    nodes, edges = graph.nodes, graph.edges
    return Head(
        frozenset(),
        [],
        frozenset([(nodes[index], i) for index, i in head.ends]),
        {(nodes[index], i): structure for (index, i), structure in head.inexact.items()},
        [(nodes[index], edges[index]) for index, _ in head.path],
        head.has_custom_functions,
    )


def make_target(key: TensorKey, meta: Any) -> Target:
    shape = (*meta.shape, 3) if meta.dtype.is_complex else meta.shape  # see rules.complex_numbers
    return Target(key, torch.Size(shape), diagonal_dtype(meta.dtype), meta.device)
