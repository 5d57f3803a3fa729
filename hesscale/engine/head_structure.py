"""The structure of the head: where it ends, and at which of its tensors the rules are exact.

The head is the part of the graph between the loss and the model's outputs. On each path back from the loss, it ends at the first
contraction (a matrix product, a convolution, an embedding …). A product with a constant does not end it. A rule is exact if the
Hessian at its output is diagonal. This follows from the structure of the operators up to there, which each ``Rule`` states. Where
the Hessian is not diagonal, ``head_values`` computes the exact diagonal by double backward through the head alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from typing import NamedTuple

from ..errors import UnsupportedOperator
from ..rules import Rule
from .block_structure import MAX_PRODUCTS, BlockStructure
from .cache import BoundedCache
from .dispatch import Step, is_constant_product
from .nodes import Edge, Node, Path, is_custom_function, leading_to, metadata

MAX_STRUCTURES = 1000
WORK_PER_NUMBER = 32  # multiplications of a matrix product that take as long as reading and writing a number
PASSES_OF_A_PRODUCT = 4  # backward passes through the head that take as long as a Hessian-vector product
FREE_NUMBERS = 2**24  # numbers to read and write that exact diagonals may always cost: about 20 ms on one core
_structures: BoundedCache[dict[int, BlockStructure]] = BoundedCache(MAX_STRUCTURES)


@dataclass
class Head:
    """The head's nodes, the tensors where it ends, and the tensors whose diagonal by the rules may not be exact."""

    nodes: frozenset[Node]
    steps: list[Step]
    ends: frozenset[Edge]
    inexact: dict[Edge, BlockStructure]
    path: Path  # the nodes that lead to inexact tensors
    has_custom_functions: bool

    @staticmethod
    def empty() -> Head:
        return Head(frozenset(), [], frozenset(), {}, [], False)

    def superfluous_nodes(self, known: Collection[Edge], requested: Collection[Edge]) -> set[Node]:
        """The head's nodes that need not be visited, since all diagonals that they contribute to are already known."""
        if not known:
            return set()
        found: set[Node] = set()
        for step in reversed(self.steps):
            if all(e[0] is None or e in known or (e[0] in found and e not in requested) for e in step.edges):
                found.add(step.node)
        return found


def find_head(steps: Sequence[Step], outputs: set[Edge] | None, requested: Collection[Edge], *, is_bounded: bool = False) -> Head:
    """Split the head off a graph, whose ``steps`` are in topological order, and find where its rules may be inexact.

    Args:
        steps: the graph's nodes with their rules.
        outputs: where the head ends; None to end it at the first contractions.
        requested: tensors whose diagonal the user asks for; they may lie inside the head.
        is_bounded: whether exact diagonals may cost only about as much as a backward pass.
    """
    inside = steps_of_head(steps, outputs)
    nodes = frozenset(step.node for step in inside)
    tensors = list(dict.fromkeys([edge for step in inside for edge in step.edges if edge[0] is not None]))
    ends = frozenset([tensor for tensor in tensors if tensor[0] not in nodes])
    in_graph = {step.node for step in steps}  # part of the graph, if only some tensors are requested

    def is_needed(tensor: Edge) -> bool:
        return (tensor in ends and tensor[0] in in_graph) or tensor in requested

    limit = min(MAX_PRODUCTS, products_in_budget(steps, inside)) if is_bounded else MAX_PRODUCTS
    structures = block_structures(inside, tensors, limit)
    inexact = {tensors[i]: structure for i, structure in structures.items() if is_needed(tensors[i])}
    if any(metadata(tensor).dtype.is_complex for tensor in inexact):
        raise UnsupportedOperator("the model's outputs are complex; pass real tensors as outputs=, or pass head='rules'")
    leading = set(leading_to([step.node for step in inside], inexact))
    path = [(step.node, step.edges) for step in inside if step.node in leading]
    return Head(nodes, inside, ends, inexact, path, any(is_custom_function(step.node) for step in inside))


def steps_of_head(steps: Sequence[Step], outputs: set[Edge] | None) -> list[Step]:
    stops = None if outputs is None else {node for node, _ in outputs}
    inside: list[Step] = []
    body: set[Node] = set()
    for step in steps:
        is_end = step.rule is None or (ends_head(step.node, step.rule) if stops is None else step.node in stops)
        if is_end or step.node in body:
            body.update(child for child, _ in step.edges)
        else:
            inside.append(step)
    return inside


def ends_head(node: Node, rule: Rule) -> bool:
    return rule.contraction and not is_constant_product(node, rule)


def products_in_budget(steps: Sequence[Step], inside: Sequence[Step]) -> int:
    """How many Hessian-vector products through the head cost about as much as a backward pass through the graph."""
    whole = sum([numbers(step) + work(step) / WORK_PER_NUMBER for step in steps])
    product = PASSES_OF_A_PRODUCT * sum([numbers(step) for step in inside])
    return int(max(whole, FREE_NUMBERS) // max(product, 1))


def numbers(step: Step) -> int:
    """How many entries a node's outputs have."""
    return sum([math.prod(meta.shape) for meta in step.node._input_metadata])


def work(step: Step) -> float:
    """About how many multiplications a contraction takes; √(m k · k n · m n) = m k n for a matrix product."""
    if step.rule is None or not step.rule.contraction:
        return 0.0
    factors = [metadata(edge).shape for edge in step.edges[-2:] if edge[0] is not None]
    return math.sqrt(numbers(step) * math.prod([math.prod(shape) for shape in factors]))


def block_structures(steps: Sequence[Step], tensors: Sequence[Edge], max_products: int) -> dict[int, BlockStructure]:
    """The block structure at each tensor whose diagonal by the rules may not be exact, by its position in ``tensors``.

    Heads with the same operators and shapes share these objects, so what one pass finds holds for all of them.
    """
    position = {tensor: i for i, tensor in enumerate(tensors)}
    shapes = tuple([tuple(metadata(tensor).shape) for tensor in tensors])
    signature = shapes, max_products, tuple([step_signature(step, position) for step in steps])
    known = _structures.get(signature)
    if known is None:
        found = {position[tensor]: BlockStructure(max_products) for tensor in find_inexact(steps)}
        known = _structures.setdefault(signature, found)
    return known


def step_signature(step: Step, position: dict[Edge, int]) -> tuple[object, ...]:
    """A step's rule, and the positions of its input and output tensors."""
    makes = [position.get((step.node, i)) for i in range(len(step.node._input_metadata))]
    return step.rule, step.repeated, tuple([position.get(edge) for edge in step.edges]), tuple(makes)


def find_inexact(steps: Sequence[Step]) -> set[Edge]:
    """The tensors of the head whose diagonal by the rules may not be exact."""
    analysis = HessianAnalysis()
    for step in steps:
        analysis.visit(step)
    return {edge for edge in list(analysis.uses) if analysis.at_tensor(edge).is_inexact}


class Kind(IntEnum):
    """What is known about a Hessian. A larger value is less structured."""

    ZERO = 0
    DIAGONAL = 1
    DENSE = 2


Use = tuple[Node, int]  # a tensor as one input of one node


class State(NamedTuple):
    """What is known about the Hessian at a tensor.

    ``coupled`` holds the uses of other tensors that have mixed second derivatives with this one.
    """

    kind: Kind
    is_inexact: bool
    coupled: set[Use]


class HessianAnalysis:
    """Derives the kind of the Hessian at each tensor, from the loss to the end of the head.

    There are two sources of error. A rule is not exact if the Hessian at the output is dense and an entry of the input reaches
    several entries of the output. The sum of the shares of two uses of a tensor is not exact if the two uses have mixed second
    derivatives.
    """

    def __init__(self) -> None:
        self.uses: dict[Edge, list[Use]] = {}
        self.kinds: dict[Use, Kind] = {}
        self.coupled: dict[Use, set[Use]] = defaultdict(set)
        self.inexact: set[Use] = set()

    def visit(self, step: Step) -> None:
        """Derive the kind at a node's inputs from that at its outputs. The node's consumers must have been visited."""
        assert step.rule is not None
        outputs = self.at_outputs(step.node)
        new_uses: list[Use] = []
        for index, edge in enumerate(step.edges):
            if edge[0] is None or edge in step.edges[:index]:
                continue
            use = (step.node, index)
            self.kinds[use] = kind_at_input(step.rule, step.edges, index, outputs.kind)
            if outputs.is_inexact or (outputs.kind == Kind.DENSE and fans_out(step, index)):
                self.inexact.add(use)
            for other in outputs.coupled:
                self.couple(use, other)
            self.uses.setdefault(edge, []).append(use)
            new_uses.append(use)
        if couples_inputs(step.rule, outputs.kind):
            for a, b in combinations(new_uses, 2):
                self.couple(a, b)

    def at_tensor(self, edge: Edge) -> State:
        """What is known about a tensor, from all its uses."""
        uses = self.uses.get(edge, [])
        kind = max([self.kinds[use] for use in uses], default=Kind.ZERO)
        are_coupled = any(b in self.coupled[a] for a, b in combinations(uses, 2))
        coupled = set().union(*[self.coupled[use] for use in uses])
        return State(kind, are_coupled or any(use in self.inexact for use in uses), coupled.difference(uses))

    def at_outputs(self, node: Node) -> State:
        """What is known about a node's outputs together."""
        edges = [(node, i) for i in range(len(node._input_metadata))]
        states = [self.at_tensor(edge) for edge in edges]
        kind = max([state.kind for state in states])
        coupled = set().union(*[state.coupled for state in states])
        among_themselves = coupled.intersection([use for edge in edges for use in self.uses.get(edge, [])])
        if among_themselves:
            kind, coupled = Kind.DENSE, coupled - among_themselves
        return State(kind, any(state.is_inexact for state in states), coupled)

    def couple(self, a: Use, b: Use) -> None:
        self.coupled[a].add(b)
        self.coupled[b].add(a)


def kind_at_input(rule: Rule, edges: Sequence[Edge], index: int, kind: Kind) -> Kind:
    """The kind of the Hessian at an input, from its kind at the outputs."""
    if kind == Kind.DENSE or (kind == Kind.DIAGONAL and rule.fan_in):
        return Kind.DENSE
    is_curved = rule.is_curved(index) or (is_taken_again(edges, index) and rule.joint and rule.mixed)
    if is_curved:
        return Kind.DENSE if rule.fan_in and not rule.separable else Kind.DIAGONAL
    return kind


def fans_out(step: Step, index: int) -> bool:
    """Whether one entry of this input reaches several entries of the outputs."""
    rule, edge = step.rule, step.edges[index]
    assert rule is not None
    is_expanded = rule.broadcast and math.prod(metadata(edge).shape) != math.prod(metadata((step.node, 0)).shape)
    is_doubled = is_taken_again(step.edges, index) and (not rule.joint or rule.fan_in)
    return rule.fan_out or is_expanded or is_doubled


def is_taken_again(edges: Sequence[Edge], index: int) -> bool:
    """Whether a later input is the same tensor."""
    return edges[index] in edges[index + 1 :]


def couples_inputs(rule: Rule, kind: Kind) -> bool:
    """Whether two inputs of an operator have mixed second derivatives, given the kind of the Hessian at its outputs."""
    return kind == Kind.DENSE or (rule.joint and (kind == Kind.DIAGONAL or rule.mixed))
