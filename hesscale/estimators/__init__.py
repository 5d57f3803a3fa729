"""Every curvature diagonal that the paper compares: ``estimate(method, loss, params)``.

Several estimators need the model's outputs z, with J = ∂z/∂θ and H = ∂²L/∂z². They write the generalized Gauss-Newton diagonal as
an expectation over vectors a, b at the outputs with E[a bᵀ] = H:

    diag(Jᵀ H J) = E[Jᵀa ∘ Jᵀb].

Each of these estimators chooses a and b, and takes two backward passes (one if a = b).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..engine.arguments import as_tensors, check_loss
from ..engine.nodes import Edge, Node, edge_of, topological
from ..engine.propagate import dense_copy
from . import methods
from .layers import products_of_weights as products_of_weights
from .outputs import Outputs
from .per_sample import ggn_mc_per_sample
from .rows import MAX_NUMBERS, Diagonals

__all__ = ["estimate", "names"]
MAX_ROWS = 256  # vectors in one batched backward pass


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
    """Return the diagonal that ``method`` names: for each parameter, a tensor of its shape and dtype.

    No ``.grad`` changes. If the loss does not depend on a parameter, its diagonal is zero.

    Args:
        method: one of :func:`names`.
        loss: a real scalar with a graph.
        params: leaves of that graph.
        num_samples: number of draws that the random methods average. These methods are ``ggn_mc``, ``ggn_mc_per_sample``,
            ``hutchinson`` and ``kfac``.
        outputs: the model's outputs, for methods that need to know where the model ends and the loss begins. By default, they are
            found as in :func:`hesscale.backward`.
        generator: random number generator of the random methods; None for torch's default generator.
        retain_graph: keep the graph for another pass. Otherwise, it may be freed.

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
        return tuple([dense_copy(diagonal, p) for diagonal, p in zip(diagonals, given, strict=True)])


def names() -> tuple[str, ...]:
    """Return the names of all methods of :func:`estimate`.

    Example:
        >>> from hesscale.estimators import names
        >>> names()[:4]
        ('exact', 'hesscale', 'hesscale_gn', 'bl89')
    """
    return tuple(ESTIMATORS)


@dataclass
class Request:
    """The arguments of :func:`estimate`, and values derived from them that several estimators use."""

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
        """The number of vectors to backpropagate in one batched pass."""
        largest: int = max([math.prod(meta.shape) for node in self.order for meta in node._input_metadata])
        return max(1, min(MAX_ROWS, MAX_NUMBERS // max(1, largest)))

    @cached_property
    def model_outputs(self) -> Outputs:
        return Outputs(self)

    def signs(self, *shape: int, like: Tensor) -> Tensor:
        """Independent random signs ±1. Drawing uniform numbers is faster than bernoulli_."""
        draw = torch.rand(shape, generator=self.generator, dtype=torch.float32, device=self.source(like)) < 0.5
        return draw.to(device=like.device, dtype=like.dtype).mul_(2).sub_(1)

    def signs_for_params(self, count: int) -> list[Tensor]:
        """Rows of signs for each parameter. All come from one draw, since a compiler may reorder several draws."""
        sizes = [p.numel() for p in self.params]
        draws = self.signs(count, sum(sizes), like=self.params[0]).split(sizes, 1)
        return [draw.reshape(count, *p.shape).to(p) for draw, p in zip(draws, self.params, strict=True)]

    def labels(self, count: int, q: Tensor, dim: int) -> Tensor:
        """One-hot samples from the distributions q along ``dim``: the class with the smallest t/q, for exponential random t."""
        times = torch.empty((count, *q.shape), dtype=torch.float32, device=self.source(q)).exponential_(generator=self.generator)
        label = (q / times.to(q.device)).argmax(dim + 1, keepdim=True)
        return torch.zeros(times.shape, dtype=q.dtype, device=q.device).scatter_(dim + 1, label, 1)

    def source(self, like: Tensor) -> torch.device:
        return like.device if self.generator is None else self.generator.device


ESTIMATORS: dict[str, Callable[[Request], Diagonals]] = {
    "exact": methods.exact,
    "hesscale": methods.recursion("hesscale"),
    "hesscale_gn": methods.recursion("hesscale_gn"),
    "bl89": methods.recursion("bl89"),
    "ggn": methods.ggn,
    "ggn_mc": methods.ggn_mc,
    "ggn_mc_per_sample": ggn_mc_per_sample,
    "hutchinson": methods.hutchinson,
    "squared_gradient": methods.squared_gradient,
    "empirical_fisher": methods.empirical_fisher,
    "kfac": methods.kfac,
}
