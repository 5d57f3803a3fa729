"""Every curvature diagonal that the paper compares, by name and with one signature: ``estimate(method, loss, params)``.

Those that need the model's outputs z, with J = ∂z/∂θ and H = ∂²L/∂z², see the generalized Gauss-Newton matrix as an expectation:
for vectors a, b at the outputs with E[a bᵀ] = H,

    diag(Jᵀ H J) = E[Jᵀa ∘ Jᵀb],

so that each of them is a choice of a and b, and two backward passes (one where a = b).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import heads
from .checks import as_tensors, check_loss, output_edges
from .engine import grad
from .errors import UnsupportedOperator
from .graph import Step, custom_rule
from .nodes import (
    LEAF,
    Edge,
    Node,
    edge_of,
    gradient_edge,
    inputs_of,
    is_once_differentiable,
    leading_to,
    metadata,
    pull,
    topological,
)
from .plan import carrier, fit, own
from .rules import RULES, Rule
from .rules.registry import dimension, saved

ROWS_AT_ONCE, MOST_NUMBERS = 256, 2**22  # vectors in one batched backward pass, and numbers in the largest tensor it makes

Diagonals = Sequence[Tensor | None]  # one per parameter, None for zero


def estimate(
    method: str,
    loss: Tensor,
    params: Tensor | Sequence[Tensor],
    *,
    num_samples: int = 1,
    outputs: Tensor | Sequence[Tensor] | None = None,
    generator: torch.Generator | None = None,
    retain_graph: bool = False,
) -> tuple[Tensor, ...]:
    """The diagonal that ``method`` names, one tensor per parameter, of its shape and dtype; no ``.grad`` is touched.

    Parameters that the loss does not depend on get zeros.

    Args:
        method: one of :func:`names`.
        loss: a real scalar with a graph.
        params: leaves of that graph.
        num_samples: draws of the random methods (``ggn_mc``, ``hutchinson``, ``kfac``), which return their mean.
        outputs: the model's outputs, for methods that ask where the model ends and the loss begins; found by default, as in
            :func:`hesscale.backward`.
        generator: where the random methods draw from; torch's default otherwise.
        retain_graph: keep the graph for another pass; without it the graph may be freed.

    Example:
        >>> import torch
        >>> from hesscale.estimators import estimate
        >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> estimate("exact", (w ** 3).sum(), [w])
        (tensor([ 6., 12.]),)
        >>> estimate("squared_gradient", (w ** 3).sum(), [w])
        (tensor([  9., 144.]),)
    """
    if method not in ESTIMATORS:
        raise ValueError(f"no estimator is called {method!r}; there are {', '.join(map(repr, ESTIMATORS))}")
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, not {num_samples}")
    check_loss(loss)
    given = as_tensors(params, "params")
    with torch.no_grad():
        diagonals = ESTIMATORS[method](Request(loss, given, num_samples, outputs, generator, retain_graph))
        return tuple([own(diagonal, p) for diagonal, p in zip(diagonals, given, strict=True)])


def names() -> tuple[str, ...]:
    """What :func:`estimate` can be asked for.

    Example:
        >>> from hesscale.estimators import names
        >>> names()[:4]
        ('exact', 'hesscale', 'hesscale_gn', 'bl89')
    """
    return tuple(ESTIMATORS)


@dataclass
class Request:
    """What :func:`estimate` was asked, and what several estimators derive from it."""

    loss: Tensor
    params: tuple[Tensor, ...]
    num_samples: int
    chosen_outputs: Tensor | Sequence[Tensor] | None
    generator: torch.Generator | None
    retain_graph: bool

    @cached_property
    def order(self) -> list[Node]:
        return topological(edge_of(self.loss)[0])

    @cached_property
    def edges(self) -> list[Edge]:
        return [edge_of(p) for p in self.params]

    @cached_property
    def at_once(self) -> int:
        """How many vectors to pull back in one pass."""
        largest: int = max([math.prod(meta.shape) for node in self.order for meta in node._input_metadata])
        return max(1, min(ROWS_AT_ONCE, MOST_NUMBERS // max(1, largest)))

    @cached_property
    def model_outputs(self) -> Outputs:
        return Outputs(self)

    def signs(self, *shape: int, like: Tensor) -> Tensor:
        """Independent ±1, drawn as uniform numbers, which is faster than by bernoulli_."""
        draw = torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.source(like)) < 0.5
        return draw.to(device=like.device, dtype=like.dtype).mul_(2).sub_(1)

    def signs_for_params(self, count: int) -> list[Tensor]:
        """Rows of signs for each parameter, all from one draw: a compiler may change the order of several."""
        sizes = [p.numel() for p in self.params]
        draws = self.signs(count, sum(sizes), like=self.params[0]).split(sizes, 1)
        return [draw.reshape(count, *p.shape).to(p) for draw, p in zip(draws, self.params, strict=True)]

    def labels(self, count: int, q: Tensor, dim: int) -> Tensor:
        """Draws from the distributions q along ``dim``, as one-hot vectors: the class whose exponential clock rings first."""
        clocks = torch.empty((count, *q.shape), dtype=torch.float32, device=self.source(q)).exponential_(generator=self.generator)
        label = (q / clocks.to(q.device)).argmax(dim + 1, keepdim=True)
        return torch.zeros(clocks.shape, dtype=q.dtype, device=q.device).scatter_(dim + 1, label, 1)

    def source(self, like: Tensor) -> torch.device:
        return like.device if self.generator is None else self.generator.device


# ---------------------------------------------------------------------------------------------------------------- the estimators


def exact(request: Request) -> Diagonals:
    """diag ∂²L/∂θ², by double backward: one product per entry, many at a time.

    A weight matrix that is used once, by a matrix product y = x W, needs a product per entry of y only, which are often fewer:
    ∂²L/∂W²_ji = Σ_nm x_nj x_mj ∂²L/∂y_ni∂y_mi.
    """
    layers = products_of_weights(request)
    wanted = [(layers[k], 0) if k in layers else edge for k, edge in enumerate(request.edges)]
    total: list[Tensor | None] = [None] * len(wanted)
    for k, (gradient, edge) in enumerate(zip(gradients_at(request, wanted), wanted, strict=True)):
        if gradient is not None:
            products = hessian_products(gradient, edge)
            if k in layers:
                total[k] = through_product(products, layers[k], request.edges[k], request.at_once)
            else:
                total[k] = entry_by_entry(products, gradient.flatten(), request.at_once).reshape(gradient.shape)
    return total


def recursion(method: str) -> Callable[[Request], Diagonals]:
    """One of the methods of :func:`hesscale.grad`."""

    def estimator(request: Request) -> Diagonals:
        return grad(
            request.loss,
            request.params,
            method=method,
            outputs=request.chosen_outputs,
            retain_graph=request.retain_graph,
            allow_unused=True,
        )[1]

    estimator.__doc__ = f":func:`hesscale.grad` with ``method={method!r}``."
    return estimator


def ggn(request: Request) -> Diagonals:
    """diag(Jᵀ H J) = Σ_i Jᵀe_i ∘ Jᵀ(H e_i), over all entries i of the outputs: exact for any loss, convex or not.

    Two backward passes per entry, many at a time. A leaf of the head (a log standard deviation, a temperature) is an output
    itself: J is the identity there, and its own second derivative counts.
    """
    outputs = request.model_outputs
    total = outputs.at_leaves()
    for _, rows in unit_rows(outputs.like, request.at_once):
        add_products(total, outputs.pull(rows), outputs.pull(*outputs.products(rows)))
    return total


def ggn_mc(request: Request) -> Diagonals:
    """The same in expectation: the mean of Jᵀa ∘ Jᵀb over random a, b with E[a bᵀ] = H, one backward pass or two a draw.

    Three ways to draw, the first that applies:

    - Softmax cross entropy (any loss linear in log-softmax outputs that are linear in z): a label y for every sample from the
      model's own distribution q, and a = √w (q − e_y), with w the weight of the sample in the loss. These are the paper's draws.
    - H diagonal (squared error, …): a = √|h| ∘ z with random signs z. For squared error that is the usual draw too.
    - Otherwise a = z and b = H z: unbiased for every H, but single draws may be negative even where H is positive.

    The samples of a batch are drawn independently and with mean zero, so that one pass serves them all: products of different
    samples vanish in expectation. (The paper's code squares each sample's own gradient instead: the same for a batch of one, less
    noisy for larger ones.) A negative weight or curvature changes the sign of b. Leaves of the head are exact.
    """
    outputs = request.model_outputs
    total = outputs.at_leaves()
    for count in chunks(request.num_samples if outputs.edges else 0, request.at_once):
        a, b, at_leaves = outputs.draw(count)
        pulled = outputs.pull(a)
        add_products(total, pulled, pulled if b is a else outputs.pull(b, at_leaves), 1 / request.num_samples)
    return total


def hutchinson(request: Request) -> Diagonals:
    """The mean of z ∘ ∂²L/∂θ² z over random signs z: the estimate of AdaHessian, without its averaging over space."""
    total: list[Tensor | None] = [None] * len(request.params)
    gradients = gradients_at(request, request.edges)
    curved = [k for k, gradient in enumerate(gradients) if gradient is not None]
    sources = [edge_of(gradient) for gradient in gradients if gradient is not None]
    for count in chunks(request.num_samples, request.at_once):
        signs = request.signs_for_params(count)
        add_products(total, signs, pull_rows(sources, request.edges, [signs[k] for k in curved]), 1 / request.num_samples)
    return total


def squared_gradient(request: Request) -> Diagonals:
    """(∂L/∂θ)², of the whole loss: a mean over samples is squared after it is taken."""
    gradients = torch.autograd.grad(request.loss, request.params, retain_graph=request.retain_graph, allow_unused=True)
    return [None if gradient is None else gradient.square() for gradient in gradients]


def empirical_fisher(request: Request) -> Diagonals:
    """(1/N) Σ_n (∂ℓ_n/∂θ)², reading the loss as the mean (1/N) Σ_n ℓ_n of N samples.

    The samples are the rows of the outputs (their first dimension, after the flattening that a Linear does), and ∂ℓ_n/∂θ is N
    times what the n-th row of ∂L/∂z gives when it is pulled back alone: the result is N Σ_n (J_nᵀ ∂L/∂z_n)². A loss that is a
    sum over samples is thus N times a mean; divide by N² for the mean's, by N for Σ_n (∂ℓ_n/∂θ)².
    """
    outputs = request.model_outputs
    refuse_leaves(outputs, "its gradient there cannot be told apart by sample")
    lengths = {shape[0] if shape else None for shape in outputs.shapes}
    if len(lengths) > 1 or None in lengths:
        raise ValueError(
            f"the samples are the rows of the outputs, but these have shapes {', '.join(map(str, outputs.shapes))}. "
            "Pass outputs= whose first dimension is the sample"
        )
    total: list[Tensor | None] = [None] * len(request.params)
    gradients = [outputs.gradient(edge) for edge in outputs.edges]
    for _, samples in unit_rows(gradients[0].new_empty(len(gradients[0])), request.at_once) if gradients else ():
        pulled = outputs.pull(outputs.flatten([torch.einsum("rn,n...->rn...", samples.to(g.dtype), g) for g in gradients]))
        add_products(total, pulled, pulled, samples.shape[1])
    return total


def kfac(request: Request) -> Diagonals:
    """diag(A) ⊗ diag(B) of K-FAC: A the mean of squared layer inputs, B the sum of squared backpropagated draws of ``ggn_mc``.

    For y = x W + b with rows r (samples and, in a convolution or a Linear with more dimensions, positions),

        W_ji: (1/R) Σ_r x²_rj · Σ_r E[(∂z/∂y_ri)ᵀa (∂z/∂y_ri)ᵀb],      b_i: Σ_r E[(∂z/∂y_ri)ᵀa (∂z/∂y_ri)ᵀb],

    which is Eq. 3 of the paper with the diagonal at y replaced by its mean over rows. Exact like ``ggn`` for one row. Several
    uses of a parameter add up. Raises for parameters that are not weights or biases of linear layers and convolutions.
    """
    outputs = request.model_outputs
    uses = uses_of(request)
    for use in uses:
        if not is_of_layer(use):
            raise ValueError(
                f"{describe(request, use.param)} is input {use.place} of {use.node.name()}, but K-FAC is defined for weights and "
                "biases of linear layers and convolutions. Leave it out of params, or take another estimator"
            )
    refuse_leaves(outputs, "K-FAC is defined for layers below them")
    layers = list(dict.fromkeys([(use.node, 0) for use in uses]))
    squares: list[Tensor | None] = [None] * len(layers)
    for count in chunks(request.num_samples, request.at_once):
        a, b, _ = outputs.draw(count)
        pulled = pull_rows(outputs.edges, layers, outputs.split(a))
        other = pulled if b is a else pull_rows(outputs.edges, layers, outputs.split(b))
        add_products(squares, pulled, other, 1 / request.num_samples)
    at = dict(zip(layers, squares, strict=True))
    total: list[Tensor | None] = [None] * len(request.params)
    for use in uses:
        if (square := at[(use.node, 0)]) is not None:
            shares: Any = RULES[use.node.name()].function(use.node, None, mean_over_rows(use.node, square))
            add_to(total, use.param, to_parameter(shares[use.place], use.node, use.place, request.edges[use.param]))
    return total


ESTIMATORS: dict[str, Callable[[Request], Diagonals]] = {
    "exact": exact,
    "hesscale": recursion("hesscale"),
    "hesscale_gn": recursion("hesscale_gn"),
    "bl89": recursion("bl89"),
    "ggn": ggn,
    "ggn_mc": ggn_mc,
    "hutchinson": hutchinson,
    "squared_gradient": squared_gradient,
    "empirical_fisher": empirical_fisher,
    "kfac": kfac,
}


# ------------------------------------------------------------------------------------------------------------ the model's outputs


class Softmax(NamedTuple):
    """A log-softmax of the head: its input, its distributions q along ``dim``, and how much each weighs in the loss."""

    edge: Edge
    q: Tensor
    dim: int
    weight: Tensor


class Outputs:
    """The tensors z where the model ends and the loss begins, as one flat vector; several vectors are rows, (count, size)."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.head = find_head(request)
        self.stops = {node for node, _ in self.head.ends}
        reached = {node for node, _ in request.edges}.union(leading_to(request.order, request.edges))
        tensors = dict.fromkeys([edge for step in self.head.steps for edge in step.edges])
        ends = [edge for edge in tensors if edge in self.head.ends and edge[0] in reached]
        self.edges = [end for end in ends if end[0].name() != LEAF]
        self.leaves = {k: edge for k, edge in enumerate(request.edges) if edge in ends and edge not in self.edges}
        below = set(topological(*[node for node, _ in self.edges]))
        self.tied = any(node in below for node, _ in self.leaves.values())  # z depends on a parameter that the head meets too
        self.shapes = [tuple(metadata(edge).shape) for edge in self.edges]
        self.gradients = self.pull_loss(ends)

    def pull_loss(self, targets: Sequence[Edge]) -> dict[Edge, Tensor]:
        """∂L/∂x at tensors of the head, with a graph; nothing where it is zero."""
        loss = self.request.loss
        with torch.enable_grad():
            return pull({edge_of(loss): torch.ones_like(loss)}, targets, self.stops)

    @cached_property
    def like(self) -> Tensor:
        """A vector like z."""
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
        """H v for every row v; and at parameters that are leaves of the head, twice the same.

        Twice, since where z depends on such a parameter as well, its mixed derivatives with z stand on both sides of the
        diagonal of Jᵀ H J.
        """
        found = self.head_products(self.edges, self.split(rows), [*self.edges, *self.leaves.values()])
        count = len(self.edges)
        return self.flatten(found[:count]), {k: 2 * v for k, v in zip(self.leaves, found[count:], strict=True)}

    def head_products(self, ends: Sequence[Edge], rows: Sequence[Tensor], targets: Sequence[Edge]) -> list[Tensor]:
        """∂(Σ g·v)/∂x at each target x, with g the gradients at these ends, for every row of vectors v."""

        def product(*vectors: Tensor) -> tuple[Tensor, ...]:
            seeds: dict[Edge, Tensor] = {}
            for end, vector in zip(ends, vectors, strict=True):
                if end in self.sources:
                    add_to(seeds, self.sources[end], vector)
            found = pull(seeds, targets, self.stops)
            return tuple([found[target] if target in found else zeros_at(target) for target in targets])

        return in_rows(torch.vmap(product), product, rows)

    def pull(self, rows: Tensor, at_leaves: dict[int, Tensor] | None = None) -> list[Tensor | None]:
        """Jᵀv at every parameter for every row v; J is the identity at leaves of the head."""
        pulled = pull_rows(self.edges, self.request.edges, self.split(rows))
        for k, value in (at_leaves or {}).items():
            add_to(pulled, k, value)
        return pulled

    def at_leaves(self) -> list[Tensor | None]:
        """The head's own exact diagonal at parameters that are its leaves, None at the others."""
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

    def draw(self, count: int) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Rows a and b with E[a bᵀ] = H, the same tensor where H is known to be positive; and b at leaves of the head."""
        if self.softmaxes and not self.tied:
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
        """Whether the weights of the samples are positive by construction; looking at them would make a GPU wait."""
        steps = [step for step in self.head.steps if step.node.name() != "LogSoftmaxBackward0"]
        if not any(step.node.name().startswith("NllLoss") for step in steps):
            return False
        return all(step.node.name() in AVERAGES and getattr(step.node, "_saved_weight", None) is None for step in steps)

    def from_softmaxes(self, rows: Sequence[Tensor]) -> Tensor:
        """Vectors at the inputs of the log-softmaxes, pulled back to z."""

        def pulled(*vectors: Tensor) -> tuple[Tensor, ...]:
            seeds: dict[Edge, Tensor] = {}
            for softmax, vector in zip(self.softmaxes, vectors, strict=True):
                add_to(seeds, softmax.edge, vector)
            found = pull(seeds, self.edges, self.stops)
            return tuple([found[edge] if edge in found else zeros_at(edge) for edge in self.edges])

        return self.flatten(in_rows(torch.vmap(pulled), pulled, rows))

    @cached_property
    def diagonal(self) -> Tensor | None:
        """diag H where H is diagonal."""
        return diagonal_if_alone(lambda rows: self.products(rows)[0], self.like)

    @cached_property
    def softmaxes(self) -> list[Softmax]:
        """The log-softmaxes of the head, where nothing else between loss and z is curved; otherwise none."""
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
    """Whether a node's output is linear in its inputs, by what its rule states."""
    assert step.rule is not None
    live = [i for i, (node, _) in enumerate(step.edges) if node is not None]
    apart = len(live) == 1 or not (step.rule.joint and step.rule.mixed)
    return apart and not any(step.rule.bends(i) for i in live)


AVERAGES = ("MeanBackward0", "NllLossBackward0", "NllLoss2DBackward0", "SumBackward0", "ViewBackward0", "UnsafeViewBackward0")
UNKNOWN = Rule(lambda *_: None, "unknown", "an operator without a rule")


def find_head(request: Request) -> heads.Head:
    """Where the model ends: as :func:`hesscale.backward` finds it, though only the head's operators have to be known here."""
    ends = output_edges(request.chosen_outputs, request.loss, request.order)
    head = heads.find([lenient_step(node) for node in request.order], ends, ())
    if not head.nodes:
        raise ValueError(
            f"the loss itself comes out of {request.order[0].name()}, so that no model outputs are found before it. "
            "Name them with outputs="
        )
    for step in head.steps:
        if ends is None and step.rule is UNKNOWN:
            raise UnsupportedOperator(
                f"whether {step.node.name()} belongs to the model or to the loss is not known. "
                "Name the model's outputs with outputs="
            )
    for k, (node, _) in enumerate(request.edges):
        if node in head.nodes:
            raise ValueError(f"{describe(request, k)} lies between the model's outputs and the loss, where there is no J")
    return head


def lenient_step(node: Node) -> Step:
    rule = None if node.name() == LEAF else RULES.get(node.name()) or custom_rule(node) or UNKNOWN
    return Step(node, rule, node.next_functions, False)


def refuse_leaves(outputs: Outputs, why: str) -> None:
    for k in outputs.leaves:
        raise ValueError(
            f"{describe(outputs.request, k)} enters the loss beside the model's outputs, and {why}. "
            "Leave it out of params, or name outputs= that depend on it"
        )


def describe(request: Request, k: int) -> str:
    return f"params[{k}], of shape {tuple(request.params[k].shape)},"


# ------------------------------------------------------------------------------------------------------- layers and their weights


class Use(NamedTuple):
    """A parameter as an input of a node, itself or transposed."""

    param: int
    node: Node
    place: int


TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")
PRODUCTS = {"MmBackward0": 1, "AddmmBackward0": 2}  # and which input is the weight


def uses_of(request: Request) -> list[Use]:
    """Where the graph meets each parameter."""
    known: dict[Edge, list[int]] = {}
    for k, edge in enumerate(request.edges):
        known.setdefault(edge, []).append(k)
    uses = []
    for node in reversed(request.order):
        for index, edge in enumerate(node.next_functions):
            if edge in known and node.name() in TRANSPOSES and len(metadata(edge).shape) == 2:
                known[(node, 0)] = known[edge]
            else:
                uses += [Use(k, node, index) for k in known.get(edge, ())]
    return uses


def is_of_layer(use: Use) -> bool:
    """Whether the parameter is the weight or the bias of a linear layer or a convolution there."""
    name, edges = use.node.name(), use.node.next_functions
    if name == "ConvolutionBackward0":
        return use.place in (1, 2)
    if PRODUCTS.get(name) == use.place:
        return True
    if len(metadata(edges[use.place]).shape) != 1:
        return False
    return (name == "AddmmBackward0" and use.place == 0) or (name == "AddBackward0" and is_product(edges[1 - use.place][0]))


def is_product(node: Node | None) -> bool:
    """Whether a node is a matrix product, with its result viewed in another shape or not."""
    while node is not None and node.name() in ("UnsafeViewBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return node is not None and node.name() == "MmBackward0"


def mean_over_rows(node: Node, square: Tensor) -> Tensor:
    """The mean over samples and positions at a layer's output, in its shape."""
    channel = 1 if node.name() == "ConvolutionBackward0" else square.dim() - 1
    return square.mean([d for d in range(square.dim()) if d != channel], keepdim=True).expand_as(square)


def to_parameter(share: Tensor, node: Node, index: int, param: Edge) -> Tensor:
    """What belongs to an input of a node, at the parameter that stands there, itself or transposed."""
    edge = node.next_functions[index]
    return pull({edge: fit(share, metadata(edge))}, [param], set())[param]


def products_of_weights(request: Request) -> dict[int, Node]:
    """The matrix product y = x W of each parameter W that has no other use, where y has fewer entries than W."""
    uses: dict[int, list[Use]] = {}
    for use in uses_of(request):
        uses.setdefault(use.param, []).append(use)
    return {
        k: used[0].node
        for k, used in uses.items()
        if len(used) == 1
        and PRODUCTS.get(used[0].node.name()) == used[0].place
        and math.prod(metadata((used[0].node, 0)).shape) < request.params[k].numel()
    }


def through_product(products: Callable[[Tensor], Tensor], node: Node, param: Edge, at_once: int) -> Tensor:
    """Σ_nm x_nj x_mj ∂²L/∂y_ni∂y_mi at W_ji, for y = x W."""
    index = PRODUCTS[node.name()]
    x = saved(node, "mat1") * saved(node, "alpha") if index == 2 else saved(node, "self")
    like = zeros_at((node, 0))
    total = torch.zeros(like.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
    for entries, rows in unit_rows(like.flatten(), at_once):
        n, i = entries // like.shape[1], entries % like.shape[1]
        column = products(rows).reshape(-1, *like.shape)[torch.arange(len(n), device=n.device), :, i]  # ∂²L/∂y_ni∂y_mi for all m
        total.index_add_(0, i, x[n] * (column.to(x.dtype) @ x))
    return to_parameter(total.T, node, index, param)


# ------------------------------------------------------------------------------------------------ rows of vectors, many at a time


def chunks(count: int, at_once: int) -> Iterator[int]:
    for start in range(0, count, at_once):
        yield min(at_once, count - start)


def unit_rows(like: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of a unit matrix with the size of a vector, and which ones they are, some at a time."""
    for start in range(0, len(like), at_once):
        entries = torch.arange(start, min(start + at_once, len(like)), device=like.device)
        yield entries, torch.zeros(len(entries), len(like), dtype=like.dtype, device=like.device).scatter_(1, entries[:, None], 1)


def entry_by_entry(products: Callable[[Tensor], Tensor], like: Tensor, at_once: int) -> Tensor:
    """The diagonal of a matrix, from its products with all unit vectors."""
    found = [products(rows).gather(1, entries[:, None])[:, 0] for entries, rows in unit_rows(like, at_once)]
    return torch.cat(found) if found else torch.zeros_like(like)


def diagonal_if_alone(products: Callable[[Tensor], Tensor], like: Tensor) -> Tensor | None:
    """The diagonal of a symmetric matrix that has nothing else, from its products with two vectors; None if it has more."""
    z = torch.rand(len(like), generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu").to(like) + 0.5
    diagonal, product = products(torch.stack([torch.ones_like(z), z]))
    predicted = diagonal * z
    return diagonal if not len(like) or bool(heads.agree(product, predicted, predicted.abs())) else None


def gradients_at(request: Request, edges: Sequence[Edge]) -> list[Tensor | None]:
    """∂L/∂x with a graph; None where the loss is linear in x."""
    inputs = [gradient_edge(edge) for edge in edges]
    found = torch.autograd.grad(request.loss, inputs, create_graph=True, allow_unused=True)
    curved = [gradient if gradient is not None and gradient.requires_grad else None for gradient in found]
    check_twice_differentiable([gradient for gradient in curved if gradient is not None])
    return curved


def check_twice_differentiable(gradients: Sequence[Tensor]) -> None:
    with torch.enable_grad():  # one tensor that depends on them all, so that their graph is walked once
        joined = torch.cat([gradient.reshape(-1)[:1].float() for gradient in gradients]) if gradients else torch.empty(0)
    if is_once_differentiable(joined):
        raise UnsupportedOperator(
            "PyTorch cannot differentiate this loss twice, which this estimator needs. Take one that does not ('hesscale', "
            "'squared_gradient'), or write the operator at fault with others that PyTorch can differentiate twice"
        )


def hessian_products(gradient: Tensor, edge: Edge) -> Callable[[Tensor], Tensor]:
    """Products of ∂g/∂x with rows of flat vectors."""

    def products(rows: Tensor) -> Tensor:
        (found,) = pull_rows([edge_of(gradient)], [edge], [rows.reshape(len(rows), *gradient.shape)])
        return torch.zeros_like(rows) if found is None else found.reshape(len(rows), -1)

    return products


def pull_rows(sources: Sequence[Edge], targets: Sequence[Edge], rows: Sequence[Tensor]) -> list[Tensor | None]:
    """Backward passes from the sources to the targets, one for every row of vectors, by PyTorch's own engine."""
    if not sources:
        return [None] * len(targets)
    outputs, inputs = [gradient_edge(edge) for edge in sources], [gradient_edge(edge) for edge in targets]

    def passes(vectors: Sequence[Tensor], batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, allow_unused=True, is_grads_batched=batched)

    return in_rows(lambda *vectors: passes(vectors, True), lambda *vectors: passes(vectors, False), rows)


def in_rows(many: Callable[..., Sequence[Any]], one: Callable[..., Sequence[Any]], rows: Sequence[Tensor]) -> list[Any]:
    """``many`` applied to all rows at once, or ``one`` to each: where there is only one, or PyTorch cannot batch an operator."""
    if len(rows[0]) > 1:
        try:
            return list(many(*rows))
        except RuntimeError:  # if it is not about batching, ``one`` raises it too
            pass
    found = [one(*row) for row in zip(*rows, strict=True)]
    if len(found) == 1:
        return [None if value is None else value.unsqueeze(0) for value in found[0]]
    return [None if values[0] is None else torch.stack(values) for values in zip(*found, strict=True)]


def zeros_at(edge: Edge) -> Tensor:
    meta = metadata(edge)
    return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)


def add_products(total: list[Tensor | None], left: Diagonals, right: Diagonals, scale: float = 1) -> None:
    """Add Σ a ∘ b over rows to each parameter's total."""
    for k, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is not None and b is not None:
            dtype = carrier(a.dtype)
            product = (a.to(dtype) * b.to(dtype)).sum(0)
            add_to(total, k, product if scale == 1 else product * scale)


def add_to(total: Any, key: Any, value: Tensor) -> None:
    """``total[key] += value``, where nothing, or None, is zero."""
    present = total.get(key) if isinstance(total, dict) else total[key]
    total[key] = value if present is None else present + value
