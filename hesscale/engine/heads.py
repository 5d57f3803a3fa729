"""The head: what lies between the loss and the model's outputs, where the diagonal is to be exact.

Walking back from the loss, the head ends on each path at the first contraction (matrix product, convolution, embedding …). A rule
is exact while the Hessian at its output is diagonal; whether it still is can be read off the operators' structure (``Rule``), and
where it is not, double backward through the head alone gives the diagonal at its outputs.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import CurvatureWarning
from .dispatch import Step
from .nodes import Edge, Node, edge_of, is_once_differentiable, metadata, pull

ZERO, DIAGONAL, DENSE = range(3)  # what is known of a Hessian, best first
MOST_PRODUCTS = 1024  # Hessian-vector products for one output tensor
ROWS_AT_ONCE, MOST_NUMBERS = 64, 2**24  # products in one batch, and numbers in their vectors

MOST_VERDICTS = 1000

Use = tuple[Node, int]  # a tensor as one input of one node


class Unsettled(RuntimeError):
    """A trace needs to know which dimensions of an output are samples, which a pass with real numbers finds out."""


def warn(message: str) -> None:
    warnings.warn(message, CurvatureWarning, stacklevel=2)


@dataclass
class TensorVerdict:
    """What is remembered of a doubtful tensor from step to step."""

    block: tuple[int, ...] | None = None  # the dimensions whose entries share second derivatives; the rest are samples
    is_out_of_reach: bool = False  # the last pass in eager mode had to leave it to the rules
    vectors: tuple[Tensor, Tensor] | None = None  # kept where they are needed: bringing them to a GPU makes it wait
    news: tuple[Tensor, torch.cuda.Event, tuple[int, ...] | None] | None = None  # a check under way to the host

    def tell(self, agreed: Tensor, block: tuple[int, ...], guesses: list[tuple[int, ...]]) -> None:
        """Send the outcome of a check to the host, with the block to go on to if it failed."""
        if self.news is None and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            host = agreed.to("cpu", non_blocking=True)
            event.record()
            self.news = host, event, guesses[guesses.index(block) + 1]

    def hear(self) -> None:
        """Take in the outcome of an earlier check, if it has arrived."""
        if self.news is not None and not torch.cuda.is_current_stream_capturing() and self.news[1].query():
            (agreed, _, following), self.news = self.news, None
            if not bool(agreed):
                self.block = following
                warn("entries of a loss's output have come to share second derivatives; its last diagonals there were off")


Verdict = dict[int, TensorVerdict]
_verdicts: dict[object, Verdict] = {}


@dataclass
class Head:
    """The head's nodes, the tensors where it ends, and those of them that rules alone do not get right."""

    nodes: frozenset[Node]
    steps: list[Step]
    ends: frozenset[Edge]
    doubtful: dict[Edge, TensorVerdict]

    @property
    def has_custom_functions(self) -> bool:
        return any(hasattr(step.node, "_forward_cls") for step in self.steps)

    @staticmethod
    def empty() -> Head:
        return Head(frozenset(), [], frozenset(), {})

    def settled(self, exact: Collection[Edge], wanted: Collection[Edge]) -> set[Node]:
        """Head nodes whose shares would all be thrown away, since what they lead to is known already."""
        if not exact:
            return set()
        done: set[Node] = set()
        for step in reversed(self.steps):
            if all(e[0] is None or e in exact or (e[0] in done and e not in wanted) for e in step.edges):
                done.add(step.node)
        return done


def find(steps: Sequence[Step], outputs: set[Edge] | None, wanted: Collection[Edge]) -> Head:
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
    tensors = list(dict.fromkeys([edge for step in inside for edge in step.edges if edge[0] is not None]))
    ends = frozenset([tensor for tensor in tensors if tensor[0] not in nodes])
    doubtful = verdict(inside, tensors)
    known = {step.node for step in steps}  # not all of the graph, where only some tensors are wanted
    return Head(
        nodes,
        inside,
        ends,
        {
            tensors[i]: known_of
            for i, known_of in doubtful.items()
            if (tensors[i] in ends and tensors[i][0] in known) or tensors[i] in wanted
        },
    )


def verdict(steps: Sequence[Step], tensors: Sequence[Edge]) -> Verdict:
    """Which tensors of a head are doubtful, by their place in it; decided once for heads with the same operators and shapes."""
    number = {tensor: i for i, tensor in enumerate(tensors)}
    shapes = tuple([tuple(metadata(tensor).shape) for tensor in tensors])
    signature = shapes, tuple([wiring(step, number) for step in steps])
    if signature not in _verdicts:
        if len(_verdicts) >= MOST_VERDICTS:
            _verdicts.clear()
        _verdicts[signature] = {number[tensor]: TensorVerdict() for tensor in find_doubtful(steps)}
    return _verdicts[signature]


def wiring(step: Step, number: dict[Edge, int]) -> tuple[object, ...]:
    """A step's rule, and the tensors it takes and makes, by number."""
    makes = [number.get((step.node, i)) for i in range(len(step.node._input_metadata))]
    return step.rule, step.repeated, tuple([number.get(edge) for edge in step.edges]), tuple(makes)


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
        at, doubt = ZERO, False
        outside: set[Use] = set()
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
            repeated = edge in edges[index + 1 :]
            fan_out = rule.fan_out or (rule.broadcast and math.prod(metadata(edge).shape) != size)
            fan_out = fan_out or (repeated and (not rule.joint or rule.fan_in))
            twice = repeated and rule.joint and rule.mixed
            if at == DENSE or (at == DIAGONAL and rule.fan_in):
                level[use] = DENSE
            elif rule.bends(index) or twice:
                level[use] = DENSE if rule.fan_in and not rule.separable else DIAGONAL
            else:
                level[use] = at
            if doubt or (at == DENSE and fan_out):
                doubtful_uses.add(use)
            for partner in outside:
                couple(use, partner)
            fresh.append(use)
            uses[edge].append(use)
        if at == DENSE or (rule.joint and (at == DIAGONAL or rule.mixed)):
            for a, b in combinations(fresh, 2):
                couple(a, b)
    return {edge for edge in uses if merge(edge)[1]}


CANNOT = "PyTorch cannot differentiate this loss twice; the diagonal at the outputs is that of the rules"


class Exact(NamedTuple):
    """A diagonal, and how many Hessian-vector products it took."""

    diagonal: Tensor
    products: int


def exact_diagonals(loss: Tensor, head: Head) -> dict[Edge, Exact]:
    """Diagonals of the loss at the head's doubtful tensors, by double backward through the head alone."""
    found: dict[Edge, Exact] = {}
    if not head.doubtful:
        return found
    stops = {node for node, _ in head.ends}
    with torch.enable_grad():
        try:
            gradients = pull({edge_of(loss): torch.ones_like(loss)}, list(head.doubtful), stops)
            for edge, memory in head.doubtful.items():
                gradient = gradients.get(edge)
                if head.has_custom_functions and (gradient is None or not gradient.requires_grad):
                    warn(f"{CANNOT} (a custom function in it gives gradients without a graph)")
                    continue
                exact = hessian_diagonal(gradient, edge, stops, memory)
                if exact is not None:
                    found[edge] = exact
        except RuntimeError as error:
            if "derivative for" not in str(error) and "once_differentiable" not in str(error):
                raise
            warn(f"{CANNOT} ({error})")
    return found


def hessian_diagonal(gradient: Tensor | None, edge: Edge, stops: set[Node], memory: TensorVerdict) -> Exact | None:
    """diag ∂g/∂x, by one Hessian-vector product per entry of a sample; None where that is too many, or impossible.

    Which dimensions are samples is tried out, cheapest guess first, and verified: products with one random vector must predict
    the product with another, at every call. What was found is remembered (unless all was zero); on a GPU, where a look at the
    result would stall, a later call looks, and warns if the dimensions had become too few. A traced graph cannot look either:
    its diagonal is then NaN.
    """
    meta = metadata(edge)
    if gradient is None or not gradient.requires_grad:
        return Exact(torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device), 0)
    is_traced = torch.compiler.is_compiling()
    if is_traced and memory.is_out_of_reach and memory.block is None:
        return None
    if is_traced and (memory.is_out_of_reach or memory.block is None):
        raise Unsettled("the structure of the loss at the model's outputs is found out by a pass in eager mode")
    if memory.block is None and is_once_differentiable(gradient):
        memory.is_out_of_reach = True
        warn(CANNOT)
        return None
    shape = gradient.shape
    if not is_traced:
        memory.hear()
    at_once = not is_traced and (gradient.device.type == "cpu" or memory.block is None)  # else a look at the result would stall

    def products(rows: Tensor) -> Tensor:
        return hessian_vector_products(gradient, edge, stops, rows)

    guesses = block_guesses(len(shape))
    for block in guesses[0 if memory.block is None else guesses.index(memory.block) :]:
        count = math.prod(shape[d] for d in block)
        if count > MOST_PRODUCTS:
            continue
        order = block + tuple(d for d in range(len(shape)) if d not in block)
        z, other = random_vectors(gradient, count, memory)
        diagonal, predicted, magnitude = block_products(products, shape, order, z, other)
        if len(block) < len(shape):
            (product,) = products(unpermute(other, shape, order).unsqueeze(0))
            agreed = agree(permute(product, order, count), predicted, magnitude)
            if is_traced:
                diagonal = torch.where(agreed, diagonal, torch.nan)
            elif not at_once:
                memory.tell(agreed, block, guesses)
            elif not agreed:
                if not bool(product.isfinite().all()):  # of which nothing can be learnt
                    return Exact(torch.full(shape, torch.nan, dtype=gradient.dtype, device=gradient.device), count)
                continue
        if at_once:
            memory.is_out_of_reach = False
            if memory.block != block and bool(predicted.any() & predicted.isfinite().all()):
                memory.block = block
        return Exact(unpermute(diagonal, shape, order).detach(), count)
    memory.is_out_of_reach = True
    warn(
        f"the exact diagonal of a loss at a tensor of shape {tuple(shape)} would take more than {MOST_PRODUCTS} Hessian-vector "
        "products; the rules' value stands there. Pass head='rules' to silence this, or outputs= to move the end of the head"
    )
    return None


def block_products(
    products: Callable[[Tensor], Tensor], shape: Sequence[int], order: tuple[int, ...], z: Tensor, other: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Products with z, one entry of the block at a time.

    Returns the diagonal, what the products predict for H·other if samples are apart, and the same sum with all terms positive.
    """
    count, samples = z.shape
    diagonal, predicted, magnitude = torch.empty_like(z), torch.zeros_like(z), torch.zeros_like(z)
    at_once = max(1, min(ROWS_AT_ONCE, MOST_NUMBERS // max(1, z.numel())))
    for start in range(0, count, at_once):
        part = slice(start, start + at_once)
        rows = torch.zeros(len(z[part]), count, samples, dtype=z.dtype, device=z.device)
        rows[:, part].diagonal(dim1=0, dim2=1).copy_(z[part].T)
        found = products(torch.stack([unpermute(row, shape, order) for row in rows]))
        found = torch.stack([permute(product, order, count) for product in found])
        diagonal[part] = found[:, part].diagonal(dim1=0, dim2=1).T / z[part]
        terms = found * (other / z)[part].unsqueeze(1)
        predicted += terms.sum(0)
        magnitude += terms.abs().sum(0)
    return diagonal, predicted, magnitude


def agree(product: Tensor, predicted: Tensor, magnitude: Tensor) -> Tensor:
    """Whether a product is what was predicted, entry by entry, but for rounding."""
    eps = torch.finfo(product.dtype).eps
    scale = magnitude + product.abs()
    relative = eps**0.5 if eps < 1e-4 else 4 * eps  # in half precision the root would hide too much
    largest = scale.max() if scale.numel() else 0
    return ((predicted - product).abs() <= relative * scale + 8 * eps * largest).all()


def block_guesses(rank: int) -> list[tuple[int, ...]]:
    """Dimensions whose entries may share second derivatives, cheapest first; the last guess, all of them, is always right."""
    guesses: list[tuple[int, ...]] = [(), (rank - 1,), (1,), tuple(range(1, rank)), tuple(range(rank))]
    return list(dict.fromkeys(g for g in guesses if all(0 <= d < rank for d in g)))


def random_vectors(like: Tensor, count: int, memory: TensorVerdict) -> tuple[Tensor, Tensor]:
    """Two tensors of shape (block, samples) with irregular entries in ±[½, 3⁄2], the same at every call."""
    known = None if torch.compiler.is_compiling() else memory.vectors
    if known is None or known[0].shape[0] != count or (known[0].dtype, known[0].device) != (like.dtype, like.device):
        places = torch.arange(1, 2 * like.numel() + 1, dtype=torch.float32, device=like.device).view(
            2, count, like.numel() // max(count, 1)
        )
        noise = places.sin() * 4e4
        first, second = (noise.frac() + noise.sign() / 2).to(like.dtype)
        known = first, second
        if not torch.compiler.is_compiling():
            memory.vectors = known
    return known


def permute(tensor: Tensor, order: tuple[int, ...], count: int) -> Tensor:
    """A tensor as (block, samples)."""
    return tensor.permute(order).reshape(count, -1)


def unpermute(tensor: Tensor, shape: Sequence[int], order: tuple[int, ...]) -> Tensor:
    """(block, samples) back in its own shape."""
    return tensor.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])


def hessian_vector_products(gradient: Tensor, edge: Edge, stops: set[Node], rows: Tensor) -> Tensor:
    """∂(g·v)/∂x for every row v, batched where PyTorch can batch it."""
    source = edge_of(gradient)

    def product(row: Tensor) -> Tensor:
        return pull({source: row}, [edge], stops).get(edge, torch.zeros_like(row))

    with torch.no_grad():
        try:
            return torch.vmap(product)(rows)
        except RuntimeError as error:
            if "vmap" not in str(error).lower() and "batch" not in str(error).lower():
                raise
        return torch.stack([product(row) for row in rows])
