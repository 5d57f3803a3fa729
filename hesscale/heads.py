"""The head: what lies between the loss and the model's outputs, where the diagonal is to be exact.

Walking back from the loss, the head ends on each path at the first contraction (matrix product, convolution, embedding …). A rule
is exact while the Hessian at its output is diagonal; whether it still is can be read off the operators' structure (``Rule``), and
where it is not, double backward through the head alone gives the diagonal at its outputs.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from .errors import CurvatureWarning
from .graph import Edge, Step, gradient_edge, metadata
from .rules.registry import Node

ZERO, DIAGONAL, DENSE = range(3)  # what is known of a Hessian, best first
MOST_PRODUCTS = 1024  # Hessian-vector products for one output tensor
ROWS_AT_ONCE = 64

Use = tuple[Node, int]  # a tensor as one input of one node


@dataclass
class Head:
    """The head's nodes, the tensors where it ends, and those of them that rules alone do not get right."""

    nodes: frozenset[Node]
    steps: list[Step]
    ends: frozenset[Edge]
    doubtful: list[Edge]
    signature: tuple[object, ...] = field(default=())

    @staticmethod
    def empty() -> Head:
        return Head(frozenset(), [], frozenset(), [])

    def settled(self, exact: dict[Edge, Tensor], wanted: Sequence[Edge]) -> set[Node]:
        """Head nodes whose shares would all be thrown away, since what they lead to is known already."""
        if not exact:
            return set()
        done: set[Node] = set()
        for step in reversed(self.steps):
            if all(e[0] is None or e in exact or (e[0] in done and e not in wanted) for e in step.edges):
                done.add(step.node)
        return done


def find(steps: Sequence[Step], outputs: set[Edge] | None, wanted: Sequence[Edge]) -> Head:
    """Split the head off a graph (``steps`` in topological order) and see where its rules are exact."""
    body: set[Node] = set()
    inside: list[Step] = []
    stops = None if outputs is None else {node for node, _ in outputs}
    for step in steps:
        ends_here = step.rule is None or (step.rule.contraction if stops is None else step.node in stops)
        if ends_here or step.node in body:
            body.update(child for child, _ in step.edges)
        else:
            inside.append(step)
    nodes = frozenset(step.node for step in inside)
    known = {step.node for step in steps}
    ends = frozenset(e for step in inside for e in step.edges if e[0] is not None and e[0] not in nodes and e[0] in known)
    doubtful = find_doubtful(inside)
    doubtful &= ends | frozenset(wanted)
    ordered = [e for e in dict.fromkeys(e for step in inside for e in step.edges) if e in doubtful]
    return Head(nodes, inside, ends, ordered, signature(inside) if ordered else ())


def signature(steps: Sequence[Step]) -> tuple[object, ...]:
    """Two heads with equal signatures have the same operators, connected alike, on the same shapes."""
    number = {step.node: i for i, step in enumerate(steps)}
    return tuple(
        (step.node.name(), tuple((number.get(c, -1), i, tuple(metadata((c, i)).shape)) if c else None for c, i in step.edges))
        for step in steps
    )


def find_doubtful(steps: Sequence[Step]) -> set[Edge]:
    """The tensors of the head whose diagonal the rules may get wrong.

    Follows, for every tensor, whether the Hessian there is zero, diagonal or dense, and which pairs of tensors share second
    derivatives. A rule errs when it fans out from a dense Hessian; adding shares errs when the tensors they came through share
    second derivatives.
    """
    uses: dict[Edge, list[Use]] = defaultdict(list)
    level: dict[Use, int] = {}
    partners: dict[Use, set[Use]] = defaultdict(set)
    doubtful_uses: set[Use] = set()

    def merge(edge: Edge) -> tuple[int, bool, set[Use]]:
        """Level, doubt and partners of a tensor, from those of its uses."""
        own = uses[edge]
        meets = any(b in partners[a] for a, b in combinations(own, 2))
        elsewhere = set().union(*(partners[use] for use in own)).difference(own) if own else set()
        return max((level[u] for u in own), default=ZERO), meets or any(u in doubtful_uses for u in own), elsewhere

    def couple(a: Use, b: Use) -> None:
        partners[a].add(b)
        partners[b].add(a)

    for node, rule, edges, _ in steps:
        assert rule is not None
        at, doubt, outside = ZERO, False, set()
        count = len(node._input_metadata)
        for i in range(count):
            level_i, doubt_i, partners_i = merge((node, i))
            at, doubt, outside = max(at, level_i), doubt or doubt_i, outside | partners_i
        siblings = {use for i in range(count) for use in uses[(node, i)]}
        if outside & siblings:  # two outputs of this node share second derivatives
            at, outside = DENSE, outside - siblings
        size = math.prod(node._input_metadata[0].shape)
        fresh: list[Use] = []
        for index, edge in enumerate(edges):
            if edge[0] is None or edge in edges[:index]:
                continue
            use = (node, index)
            fan_out = rule.fan_out or (rule.broadcast and math.prod(metadata(edge).shape) != size)
            if at == DENSE:
                level[use] = DENSE
            elif at == DIAGONAL or rule.curved:
                level[use] = DENSE if rule.fan_in else DIAGONAL
            else:
                level[use] = ZERO
            if doubt or (at == DENSE and fan_out):
                doubtful_uses.add(use)
            for partner in outside:
                couple(use, partner)
            fresh.append(use)
            uses[edge].append(use)
        if at == DENSE or (rule.joint and (at == DIAGONAL or rule.curved)):
            for a, b in combinations(fresh, 2):
                couple(a, b)
    return {edge for edge in uses if merge(edge)[1]}


# Which of a tensor's dimensions hold entries that share second derivatives, by head signature: the rest are samples.
_blocks: dict[tuple[object, ...], tuple[int, ...]] = {}
_calls: dict[tuple[object, ...], int] = defaultdict(int)


def exact_diagonals(loss: Tensor, head: Head) -> dict[Edge, Tensor]:
    """Diagonals of the loss at the head's doubtful tensors, by double backward through the head alone."""
    if not head.doubtful:
        return {}
    edges = [gradient_edge(edge) for edge in head.doubtful]
    found: dict[Edge, Tensor] = {}
    with blocked({node for node, _ in head.ends}), torch.enable_grad():
        try:
            gradients = torch.autograd.grad(loss, edges, create_graph=True, allow_unused=True)
            for edge, gradient in zip(head.doubtful, gradients, strict=True):
                diagonal = hessian_diagonal(gradient, edge, (*head.signature, head.doubtful.index(edge)))
                if diagonal is not None:
                    found[edge] = diagonal
        except RuntimeError as error:
            if "derivative for" not in str(error) and "once_differentiable" not in str(error):
                raise
            warn(f"the loss cannot be differentiated twice ({error}); the diagonal at the outputs is that of the rules")
    return found


def hessian_diagonal(gradient: Tensor | None, edge: Edge, key: tuple[object, ...]) -> Tensor | None:
    """diag ∂g/∂x, by one Hessian-vector product per entry of a sample; None where that would be too many.

    Which dimensions are samples is tried out, cheapest guess first, and verified: products with one random vector must predict
    the product with another. A verdict is kept per graph signature; on a GPU, where looking at a result stalls, it is verified
    again only at calls 1, 2, 4, 8 …
    """
    meta = metadata(edge)
    if gradient is None or not gradient.requires_grad:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    shape = gradient.shape
    _calls[key] += 1
    verify = gradient.device.type == "cpu" or _calls[key].bit_count() == 1
    guesses = block_guesses(len(shape))
    guesses = guesses[guesses.index(_blocks.get(key, guesses[0])) :]
    for block in guesses:
        count = math.prod(shape[d] for d in block)
        if count > MOST_PRODUCTS:
            continue
        samples = tuple(d for d in range(len(shape)) if d not in block)
        order = block + samples
        z, other = random_vectors(gradient, order, count)
        rows = torch.zeros(count, count, z.shape[1], dtype=z.dtype, device=z.device)
        rows.diagonal(dim1=0, dim2=1).copy_(z.T)
        check = verify and bool(samples)
        if check:
            rows = torch.cat([rows, other.unsqueeze(0)])
        products = hessian_vector_products(gradient, edge, unpermute(rows, shape, order))
        products = permute(products, order, count)
        if check:
            predicted = (products[:-1] * (other / z).unsqueeze(1)).sum(0)
            error = (predicted - products[-1]).abs().max()
            scale = products[-1].abs().max() + predicted.abs().max()
            if not error <= torch.finfo(z.dtype).eps ** 0.5 * scale:
                continue
        _blocks[key] = block
        diagonal = products.diagonal(dim1=0, dim2=1).T / z
        return unpermute(diagonal.unsqueeze(0), shape, order)[0].detach()
    warn(
        f"the exact diagonal of a loss at a tensor of shape {tuple(shape)} would take more than {MOST_PRODUCTS} Hessian-vector "
        "products; the rules' value stands there. Pass head='rules' to silence this, or outputs= to move the end of the head"
    )
    return None


def block_guesses(rank: int) -> list[tuple[int, ...]]:
    """Dimensions whose entries may share second derivatives, cheapest first; the last guess, all of them, is always right."""
    guesses: list[tuple[int, ...]] = [(), (rank - 1,), (1,), tuple(range(1, rank)), tuple(range(rank))]
    return list(dict.fromkeys(g for g in guesses if all(0 <= d < rank for d in g)))


def random_vectors(like: Tensor, order: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Two random tensors of shape (block, samples) with entries in ±[½, 3⁄2], the same at every call."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    z = torch.rand(2, count, like.numel() // max(count, 1), generator=generator, dtype=torch.float64) + 0.5
    z *= torch.randint(0, 2, z.shape, generator=generator) * 2 - 1
    first, second = z.to(dtype=like.dtype, device=like.device)
    return first, second


def permute(rows: Tensor, order: tuple[int, ...], count: int) -> Tensor:
    """(rows, *shape) → (rows, block, samples)."""
    return rows.permute(0, *(d + 1 for d in order)).reshape(rows.shape[0], count, -1)


def unpermute(rows: Tensor, shape: Sequence[int], order: tuple[int, ...]) -> Tensor:
    """(rows, block, samples) → (rows, *shape)."""
    rows = rows.reshape(-1, *(shape[d] for d in order))
    return rows.permute(0, *(order.index(d) + 1 for d in range(len(shape))))


def hessian_vector_products(gradient: Tensor, edge: Edge, rows: Tensor) -> Tensor:
    """∂(g·v)/∂x for every row v, batched where PyTorch can batch it."""
    target = gradient_edge(edge)
    try:
        parts = [
            torch.autograd.grad(gradient, target, part, retain_graph=True, is_grads_batched=True, allow_unused=True)[0]
            for part in rows.split(ROWS_AT_ONCE)
        ]
    except RuntimeError as error:
        if "vmap" not in str(error).lower() and "batch" not in str(error).lower():
            raise
        parts = [torch.autograd.grad(gradient, target, row, retain_graph=True, allow_unused=True)[0] for row in rows]
        parts = [None if part is None else part.unsqueeze(0) for part in parts]
    if any(part is None for part in parts):
        return torch.zeros_like(rows)
    return torch.cat(parts)


@contextmanager
def blocked(nodes: set[Node]) -> Iterator[None]:
    """Let no gradient pass below these nodes: what lies there is the body, not the head."""

    def block(gradients: Sequence[Tensor | None]) -> tuple[None, ...]:
        return (None,) * len(gradients)

    handles = [node.register_prehook(block) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def warn(message: str) -> None:
    warnings.warn(message, CurvatureWarning, stacklevel=2)
