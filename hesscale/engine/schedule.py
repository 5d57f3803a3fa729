"""What is decided about a graph before backward starts: once for all graphs of one structure, holding no node and no tensor.

A node is named by its place, the number at which a walk from the loss meets it, and a tensor by its spot: the place of the node
that made it, and which of that node's outputs it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..rules import BL89, RULES, brute_force
from ..rules.registry import RuleFunction
from . import heads
from .arguments import check_choices
from .dispatch import Step, carrier, custom_rule, steps_of
from .nodes import LEAF, Node, leading_to, metadata, topological

Spot = tuple[int, int]
Names = Mapping[Any, Any] | Sequence[Any]
MOST_BLUEPRINTS = 128
MOST_RIDING = 2**16  # numbers in a tensor
TRANSPOSE = RULES["TBackward0"]


class Reading(NamedTuple):
    """A graph's nodes by place, and everything that decisions about it depend on."""

    nodes: list[Node]
    places: dict[Node, int]
    leaves: dict[int, int]  # the place of a leaf by the id of its tensor
    structure: tuple[Any, ...]


facts_of_leaf = attrgetter("shape", "dtype", "device")
facts_of_tensor = attrgetter("is_nested_tensor", "dtype", "device")


def read(root: Node, method: str) -> Reading:
    """Walk the graph below a node."""
    special = BL89 if method == "bl89" else RULES
    nodes, places, leaves = [root], {root: 0}, {}
    structure: list[Any] = []
    note = structure.append
    for node in nodes:  # which grow on the way
        name = node.name()
        if name == LEAF:
            leaf = node.variable
            leaves[id(leaf)] = places[node]
            note(facts_of_leaf(leaf))
            note(bool(leaf._post_accumulate_grad_hooks))
            continue
        rule = special.get(name) or RULES.get(name) or custom_rule(node)
        note(rule or name)
        if rule is not None and rule.refuse is not None:
            note(rule.refuse(node))
        for meta in node._input_metadata:
            facts = facts_of_tensor(meta)
            note(facts)
            note(facts[0] or tuple(meta.shape))
        for child, index in node.next_functions:
            place = places.get(child)
            if place is None and child is not None:
                place = places[child] = len(nodes)
                nodes.append(child)
            note(place)
            note(index)
    return Reading(nodes, places, leaves, tuple(structure))


class Target(NamedTuple):
    """A tensor that a share goes to, and what curvature looks like there."""

    spot: Spot
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    rider: Instruction | None = None  # what is done with the share at once, where nothing else has to be waited for


class Instruction(NamedTuple):
    """What is done at a node; a leaf has no function."""

    place: int
    function: RuleFunction | None
    spots: tuple[Spot, ...]  # the tensors that the node made
    targets: tuple[Target | None, ...]  # None for an input that takes no share
    many: bool
    is_contraction: bool
    bends: bool
    keeps_gradient: bool


class Blueprint:
    """Which rule serves which node, where the head is, and what waits for what."""

    def __init__(
        self, steps: Sequence[Step], head: heads.Head, kept: frozenset[Spot], gauss_newton: bool, reading: Reading
    ) -> None:
        self.steps = [renamed(step, reading.places) for step in steps]
        self.head = renamed_head(head, reading.places)
        self.kept = kept
        self.gauss_newton = gauss_newton
        self.rules = {step.node: step.rule for step in self.steps}
        self.leaves = [step.node for step in self.steps if step.rule is None]
        self.hooked_leaves = {place for place in self.leaves if reading.nodes[place].variable._post_accumulate_grad_hooks}
        self.outputs = {place: len(reading.nodes[place]._input_metadata) for place, _, _, _ in self.steps}
        spots = {spot for step in self.steps for spot in step.edges if spot[0] in self.outputs or spot in kept}
        self.targets = {spot: target(spot, metadata((reading.nodes[spot[0]], spot[1]))) for spot in spots}
        self.schedules: dict[frozenset[Spot], list[Instruction]] = {}

    def schedule(self, exact: frozenset[Spot]) -> list[Instruction]:
        """The nodes that get a hook, given where the diagonal is known already.

        A node rides along without one if a single consumer gives it all it needs.
        """
        if exact not in self.schedules:
            settled = self.head.settled(exact, self.kept)
            consumers = Counter([place for step in self.steps for place, _ in step.edges])
            busy = {place for place, _ in self.kept | exact}
            riders: dict[int, Instruction] = {}
            hooked: list[Instruction] = []
            for step in reversed(self.steps):
                instruction = self.instruction(step, exact, riders)
                if consumers[step.node] < 2 and step.node not in busy and not self.waits_for_gradient(instruction):
                    riders[step.node] = instruction
                elif step.node not in settled:
                    hooked.append(instruction)
            self.schedules[exact] = hooked
        return self.schedules[exact]

    def instruction(self, step: Step, exact: frozenset[Spot], riders: dict[int, Instruction]) -> Instruction:
        place, rule, edges, repeated = step
        spots = tuple([(place, i) for i in range(self.outputs[place])])
        if rule is None:
            return Instruction(place, None, spots, (), False, False, False, True)
        function, in_head = step.function, place in self.head.nodes
        targets = [None if in_head and spot in exact else self.targets.get(spot) for spot in edges]
        targets = [t and t._replace(rider=riders.get(t.spot[0])) for t in targets]
        if rule.transposed is not None and not repeated:
            last = targets[-1] and targets[-1].rider
            if last is not None and self.rules[last.place] is TRANSPOSE:
                function, targets[-1] = rule.transposed, last.targets[0]
        bends, keeps_gradient = rule.uses_gradient(repeated), in_head or not self.gauss_newton
        return Instruction(place, function, spots, tuple(targets), rule.many, rule.contraction, bends, keeps_gradient)

    def waits_for_gradient(self, instruction: Instruction) -> bool:
        if instruction.function is None:
            return instruction.place in self.hooked_leaves  # these may clear the gradient that says whether there was one
        return instruction.many or (instruction.bends and (instruction.keeps_gradient or self.is_large(instruction)))

    def is_large(self, instruction: Instruction) -> bool:
        """Whether riding would cost memory: curvature would run far ahead of the pass, which frees tensors on its way."""
        return any(spot in self.targets and self.targets[spot].shape.numel() > MOST_RIDING for spot in instruction.spots)


_blueprints: dict[object, Blueprint] = {}


def blueprint_of(
    reading: Reading,
    ends: frozenset[Spot] | None,
    wanted: frozenset[Spot] | None,
    options: tuple[str, str, str, torch.dtype | None],
) -> Blueprint:
    """The blueprint of a graph; the first node that no rule serves raises."""
    key = reading.structure, ends, wanted, options
    blueprint = _blueprints.get(key)
    if blueprint is not None:
        return blueprint
    method, head, fallback, curvature_dtype = options
    check_choices(method=method, head=head, fallback=fallback, curvature_dtype=curvature_dtype)
    kept = wanted or frozenset()
    edges = {(reading.nodes[place], i) for place, i in kept}
    order = topological(reading.nodes[0])
    steps = steps_of(order if wanted is None else leading_to(order, edges), method=method, fallback=fallback)
    found = heads.Head.empty()
    if method != "bl89" and (head == "exact" or method == "hesscale_gn"):
        found = heads.find(steps, None if ends is None else {(reading.nodes[place], i) for place, i in ends}, edges)
    blueprint = Blueprint(steps, found, kept, method == "hesscale_gn", reading)
    if all(step.rule is not brute_force.RULE for step in steps):  # which says so at every step
        if len(_blueprints) >= MOST_BLUEPRINTS:
            _blueprints.clear()
        _blueprints[key] = blueprint
    return blueprint


def renamed(step: Step, names: Names) -> Step:
    node, rule, edges, repeated = step
    return Step(names[node], rule, tuple([(child if child is None else names[child], i) for child, i in edges]), repeated)


def renamed_head(head: heads.Head, names: Names) -> heads.Head:
    """A head with places for its nodes, or nodes for its places."""
    return heads.Head(
        frozenset([names[node] for node in head.nodes]),
        [renamed(step, names) for step in head.steps],
        frozenset([(names[node], i) for node, i in head.ends]),
        {(names[node], i): verdict for (node, i), verdict in head.doubtful.items()},
    )


def target(spot: Spot, meta: Any) -> Target:
    return Target(spot, torch.Size(meta.shape), carrier(meta.dtype), meta.device)
