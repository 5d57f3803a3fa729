"""Where the model ends and the loss begins: its outputs z, products with H = ∂²L/∂z², and draws a, b with E[a bᵀ] = H."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..engine.arguments import output_edges
from ..engine.dispatch import Step, custom_rule
from ..engine.head_structure import Head, find_head
from ..engine.nodes import LEAF, Edge, Node, edge_of, inputs_of, leading_to, metadata, topological, vjp
from ..errors import UnsupportedOperator
from ..rules import RULES, Rule
from ..rules.registry import dimension, saved
from .rows import (
    Diagonals,
    add_to,
    check_twice_differentiable,
    chunks,
    diagonal_if_alone,
    entry_by_entry,
    in_rows,
    pull_rows,
    zeros_at,
)

if TYPE_CHECKING:
    from . import Request


class Softmax(NamedTuple):
    """A log-softmax of the head: its input, its distributions q along ``dim``, and the weight of each in the loss."""

    edge: Edge
    q: Tensor
    dim: int
    weight: Tensor


class Outputs:
    """The tensors z where the model ends and the loss begins, as one flat vector. Several vectors are rows: (count, size)."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.head = head_of(request)
        self.stops = {node for node, _ in self.head.ends}
        reached = {node for node, _ in request.edges}.union(leading_to(request.order, request.edges))
        tensors = dict.fromkeys([edge for step in self.head.steps for edge in step.edges])
        ends = [edge for edge in tensors if edge in self.head.ends and edge[0] in reached]
        self.edges = [end for end in ends if end[0].name() != LEAF]
        self.leaves = {k: edge for k, edge in enumerate(request.edges) if edge in ends and edge not in self.edges}
        below = set(topological(*[node for node, _ in self.edges]))
        self.tied = any(node in below for node, _ in self.leaves.values())  # z depends on a parameter that is also in the head
        self.shapes = [tuple(metadata(edge).shape) for edge in self.edges]
        self.gradients = self.pull_loss(ends)

    def pull_loss(self, targets: Sequence[Edge]) -> dict[Edge, Tensor]:
        """∂L/∂x at tensors of the head, with a graph. Tensors where it is zero are left out."""
        loss = self.request.loss
        with torch.enable_grad():
            return vjp({edge_of(loss): torch.ones_like(loss)}, targets, self.stops)

    @cached_property
    def like(self) -> Tensor:
        """An empty vector with the size, dtype and device of z."""
        if not self.edges:
            return self.request.loss.new_empty(0)
        metas = [metadata(edge) for edge in self.edges]
        dtype = reduce(torch.promote_types, [meta.dtype for meta in metas])
        return torch.empty(sum(map(math.prod, self.shapes)), dtype=dtype, device=metas[0].device)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Rows of z from its tensors, each of shape (count, ...)."""
        return torch.cat([tensor.reshape(len(tensor), -1).to(self.like.dtype) for tensor in tensors], 1)

    def split(self, rows: Tensor) -> list[Tensor]:
        parts = rows.split([math.prod(shape) for shape in self.shapes], 1)
        return [
            part.reshape(len(rows), *shape).to(metadata(edge).dtype)
            for part, shape, edge in zip(parts, self.shapes, self.edges, strict=True)
        ]

    @cached_property
    def sources(self) -> dict[Edge, Edge]:
        """∂L/∂x as an edge of its own graph, at the ends of the head where it is not constant."""
        curved = {end: gradient for end, gradient in self.gradients.items() if gradient.requires_grad}
        check_twice_differentiable([*curved.values()])
        return {end: edge_of(gradient) for end, gradient in curved.items()}

    def gradient(self, edge: Edge) -> Tensor:
        """∂L/∂z at one of the outputs."""
        return self.gradients[edge].detach() if edge in self.gradients else zeros_at(edge)

    def products(self, rows: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """H v for every row v, and for parameters that are leaves of the head, twice their mixed derivatives with z, times v.

        If z depends on such a parameter too, these mixed derivatives occur twice in Jᵀ H J: above and below the diagonal.
        """
        found = self.head_products(self.edges, self.split(rows), [*self.edges, *self.leaves.values()])
        count = len(self.edges)
        return self.flatten(found[:count]), {k: 2 * v for k, v in zip(self.leaves, found[count:], strict=True)}

    def head_products(self, ends: Sequence[Edge], rows: Sequence[Tensor], targets: Sequence[Edge]) -> list[Tensor]:
        """∂(Σ g·v)/∂x at each target x, for every row of vectors v, where g are the gradients at these ends."""

        def product(*vectors: Tensor) -> tuple[Tensor, ...]:
            seeds: dict[Edge, Tensor] = {}
            for end, vector in zip(ends, vectors, strict=True):
                if end in self.sources:
                    add_to(seeds, self.sources[end], vector)
            found = vjp(seeds, targets, self.stops)
            return tuple([found[target] if target in found else zeros_at(target) for target in targets])

        return in_rows(torch.vmap(product), product, rows)

    def vjp(self, rows: Tensor, at_leaves: dict[int, Tensor] | None = None) -> list[Tensor | None]:
        """Jᵀv at every parameter for every row v. J is the identity at leaves of the head."""
        pulled = pull_rows(self.edges, self.request.edges, self.split(rows))
        for k, value in (at_leaves or {}).items():
            add_to(pulled, k, value)
        return pulled

    def at_leaves(self) -> list[Tensor | None]:
        """The exact diagonal of the head at parameters that are its leaves; None at all others."""
        total: list[Tensor | None] = [None] * len(self.request.params)
        for k, leaf in self.leaves.items():
            like = zeros_at(leaf)

            def products(rows: Tensor, leaf: Edge = leaf, like: Tensor = like) -> Tensor:
                return self.head_products([leaf], [rows.reshape(len(rows), *like.shape)], [leaf])[0].reshape(len(rows), -1)

            diagonal = diagonal_if_alone(products, like.flatten())
            if diagonal is None:
                diagonal = entry_by_entry(products, like.flatten(), self.request.at_once)
            total[k] = diagonal.reshape(like.shape)
        return total

    @cached_property
    def sample_count(self) -> int:
        """The number of rows of the outputs: their first dimension, after the flattening that a Linear does."""
        lengths = {shape[0] if shape else None for shape in self.shapes}
        if len(lengths) > 1 or None in lengths:
            raise ValueError(
                f"the samples are the rows of the outputs, but these have shapes {', '.join(map(str, self.shapes))}. "
                "Pass outputs= whose first dimension is the sample"
            )
        return self.shapes[0][0] if self.shapes else 0

    def draws_at(self, targets: Sequence[Edge]) -> Iterator[tuple[Diagonals, Diagonals]]:
        """All draws a and b, backpropagated to these tensors, in batches. If b is a, it is the same list."""
        for count in chunks(self.request.num_samples if self.edges else 0, self.request.at_once):
            a, b, _ = self.draw(count)
            pulled = pull_rows(self.edges, targets, self.split(a))
            yield pulled, pulled if b is a else pull_rows(self.edges, targets, self.split(b))

    @cached_property
    def draws_labels(self) -> bool:
        return bool(self.softmaxes) and not self.tied

    def draw(self, count: int) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Rows a and b with E[a bᵀ] = H, and b at leaves of the head. If H is known to be positive, b is a."""
        if self.draws_labels:
            return self.draw_labels(count)
        signs = self.request.signs(count, len(self.like), like=self.like)
        if self.tied or self.diagonal is None:
            return signs, *self.products(signs)
        a = signs * self.diagonal.abs().sqrt()
        return a, a if bool((self.diagonal >= 0).all()) else a * self.diagonal.sign(), {}

    def draw_labels(self, count: int) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """a = √|w| (q − e_y) with y drawn from q, and b = a with the sign of w."""
        rows = [(q - self.request.labels(count, q, dim)) * weight.abs().sqrt() for _, q, dim, weight in self.softmaxes]
        a = self.from_softmaxes(rows)
        if self.is_average or all(bool((softmax.weight >= 0).all()) for softmax in self.softmaxes):
            return a, a, {}
        return a, self.from_softmaxes([row * s.weight.sign() for row, s in zip(rows, self.softmaxes, strict=True)]), {}

    @cached_property
    def is_average(self) -> bool:
        """Whether the weights of the samples are positive by construction. This avoids reading them, which waits for the GPU."""
        steps = [step for step in self.head.steps if step.node.name() != "LogSoftmaxBackward0"]
        if not any(step.node.name().startswith("NllLoss") for step in steps):
            return False
        return all(step.node.name() in AVERAGES and getattr(step.node, "_saved_weight", None) is None for step in steps)

    def from_softmaxes(self, rows: Sequence[Tensor]) -> Tensor:
        """Vectors at the inputs of the log-softmaxes, backpropagated to z."""

        def pulled(*vectors: Tensor) -> tuple[Tensor, ...]:
            seeds: dict[Edge, Tensor] = {}
            for softmax, vector in zip(self.softmaxes, vectors, strict=True):
                add_to(seeds, softmax.edge, vector)
            found = vjp(seeds, self.edges, self.stops)
            return tuple([found[edge] if edge in found else zeros_at(edge) for edge in self.edges])

        return self.flatten(in_rows(torch.vmap(pulled), pulled, rows))

    @cached_property
    def diagonal(self) -> Tensor | None:
        """diag H if H is diagonal; otherwise None."""
        return diagonal_if_alone(lambda rows: self.products(rows)[0], self.like)

    @cached_property
    def softmaxes(self) -> list[Softmax]:
        """The log-softmaxes of the head, if everything else between loss and z is linear; otherwise none."""
        leading = set(leading_to(self.request.order, self.edges))
        steps = [step for step in self.head.steps if step.node in leading]
        nodes = [step.node for step in steps if step.node.name() == "LogSoftmaxBackward0"]
        others = [step for step in steps if step.node not in nodes]
        nested = any(below in nodes for node in nodes for below in topological(*inputs_of(node), stops=self.stops))
        if nested or not all(is_linear(step) for step in others):
            return []
        gradients = self.pull_loss([(node, 0) for node in nodes])
        found = []
        for (node, _), gradient in gradients.items():
            q = saved(node, "result").exp()
            dim = dimension(saved(node, "dim"), q.dim())
            found.append(Softmax(node.next_functions[0], q, dim, -gradient.detach().sum(dim, keepdim=True)))
        return found


def is_linear(step: Step) -> bool:
    """Whether a node's output is linear in its inputs, according to its rule."""
    assert step.rule is not None
    live = [i for i, (node, _) in enumerate(step.edges) if node is not None]
    apart = len(live) == 1 or not (step.rule.joint and step.rule.mixed)
    return apart and not any(step.rule.is_curved(i) for i in live)


AVERAGES = (
    *("MeanBackward0", "NllLossBackward0", "NllLoss2DBackward0", "SumBackward0"),
    *("ToCopyBackward0", "UnsafeViewBackward0", "ViewBackward0"),
)
UNKNOWN = Rule(lambda *_: None, "unknown", "an operator without a rule")


def head_of(request: Request) -> Head:
    """The head, as in :func:`hesscale.backward`. But here, only the operators of the head need rules."""
    ends = output_edges(request.chosen_outputs, request.loss, request.order)
    head = find_head([lenient_step(node) for node in request.order], ends, ())
    if not head.nodes:
        raise ValueError(
            f"{request.order[0].name()} computes the loss itself, so the model's outputs cannot be found. Pass them as outputs="
        )
    for step in head.steps:
        if ends is None and step.rule is UNKNOWN:
            raise UnsupportedOperator(
                f"it is not known whether {step.node.name()} belongs to the model or to the loss. "
                "Pass the model's outputs as outputs="
            )
    for k, (node, _) in enumerate(request.edges):
        if node in head.nodes:
            raise ValueError(
                f"{describe(request, k)} lies between the model's outputs and the loss; the outputs do not depend on it"
            )
    return head


def lenient_step(node: Node) -> Step:
    rule = None if node.name() == LEAF else RULES.get(node.name()) or custom_rule(node) or UNKNOWN
    return Step(node, rule, node.next_functions, False)


def refuse_leaves(outputs: Outputs, why: str) -> None:
    for k in outputs.leaves:
        raise ValueError(
            f"the loss depends on {describe(outputs.request, k)} other than through the model's outputs, and {why}. "
            "Leave it out of params, or pass outputs= that depend on it"
        )


def describe(request: Request, k: int) -> str:
    return f"params[{k}], of shape {tuple(request.params[k].shape)},"
