"""Cases: distances between all pairs of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import case, constant, exactly


def written_out(fused: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator that PyTorch differentiates once only: its gradient is made that of the same thing in plain operators."""

    def function(*inputs: Tensor) -> Tensor:
        arrived: list[Tensor] = []

        def detach(gradients: tuple[Tensor]) -> tuple[Tensor]:
            arrived[:] = gradients
            return (gradients[0].detach(),)

        def replace(pulled: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
            if not torch.is_grad_enabled():
                return None
            gradients = torch.autograd.grad(
                plain(*inputs), inputs, arrived[0].view_as(y), create_graph=True, materialize_grads=True
            )
            padded = (*gradients, torch.zeros_like(inputs[0]))  # a tensor that stands twice gets all of it the first time
            return tuple(None if old is None else new for old, new in zip(pulled, padded, strict=False))

        with torch.autograd.graph.saved_tensors_hooks(torch.detach, lambda tensor: tensor):
            y = fused(*inputs)
        node = y.grad_fn.next_functions[0][0] if y.grad_fn.name() == "ViewBackward0" else y.grad_fn
        node.register_prehook(detach)
        node.register_hook(replace)
        return y

    return function


def distances(x: Tensor, z: Tensor, p: float = 2) -> Tensor:
    """Between all pairs of rows; zero and without a gradient where these are equal."""
    difference = x.unsqueeze(-2) - z.unsqueeze(-3)
    apart = (difference != 0).any(-1)
    return torch.where(apart, torch.linalg.vector_norm(torch.where(apart.unsqueeze(-1), difference, 1), p, -1), 0)


def by_products(x: Tensor, z: Tensor) -> Tensor:
    return torch.cdist(x, z, compute_mode="use_mm_for_euclid_dist")


def cdist_case(name: str, *inputs: Any, p: float = 2) -> None:
    function = written_out(lambda x, z: torch.cdist(x, z, p), lambda x, z: distances(x, z, p))
    case(name, function, *inputs, low_precision=False)


for p in (0.0, 0.7, 1.0, 1.5, 2.0, 3.0, float("inf")):
    cdist_case(f"cdist p={p}", (3, 4), (2, 4), p=p)
    pairs = written_out(lambda x, p=p: F.pdist(x, p), lambda x, p=p: distances(x, x, p)[tuple(torch.triu_indices(4, 4, 1))])
    case(f"pdist p={p}", pairs, (4, 3), low_precision=False)
    among = written_out(lambda x, p=p: torch.cdist(x, x, p), lambda x, p=p: distances(x, x, p))
    case(f"cdist with itself p={p}", among, (3, 4), low_precision=False)
cdist_case("cdist batches", (2, 3, 4), (2, 4))
cdist_case("cdist batches right", (3, 4), (2, 1, 2, 4))
cdist_case("cdist equal rows", exactly([[0.0, 1.0], [2.0, 0.0]]), exactly([[2.0, 0.0], [0.0, 0.5], [2.0, 1.0]]))
left = written_out(lambda x: torch.cdist(x, constant(x, 2, 4)), lambda x: distances(x, constant(x, 2, 4)))
case("cdist left only", left, (3, 4), low_precision=False)
case("cdist by products", by_products, (3, 4), (2, 4))
case("cdist by products, batches", by_products, (2, 3, 4), (2, 4))
case("cdist by products, right only", lambda x: by_products(constant(x, 2, 4), x), (3, 4))
case("cdist by products, equal rows", by_products, exactly([[0.0, 1.0], [2.0, 0.0]]), exactly([[2.0, 0.0], [0.0, 0.5]]))
case("cdist by products, with itself", written_out(lambda x: by_products(x, x), lambda x: distances(x, x)), (3, 4))
