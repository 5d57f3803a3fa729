"""Automatic mixed precision: divide gradients and curvature by the factor of a gradient scaler.

``torch.amp.GradScaler.step`` sets ``grad_scale`` and ``found_inf`` on an optimizer while it calls its ``step``.
``GradScaler.unscale_`` unscales gradients, but not Hessian diagonals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..distributed.shards import is_sharded
from ..errors import UnsupportedOperator
from .batches import Batch

if TYPE_CHECKING:
    from .derivatives import DerivativeOptimizer

SHARDED = (
    "a gradient scaler is not supported with Hessian diagonals of DTensors, as under fully_shard (FSDP2) and tensor parallelism. "
    "Train in bfloat16, which needs none, or under DistributedDataParallel"
)


@contextmanager
def unscaled_curvature(optimizer: DerivativeOptimizer, scale: Tensor | None) -> Iterator[None]:
    """Divide the Hessian diagonals that the block computes by ``scale``. If the block raises, restore the earlier ones."""
    if scale is None:
        yield
        return
    if any(is_sharded(p) for p in optimizer.parameters()):
        raise UnsupportedOperator(SHARDED)
    earlier = [(p, getattr(p, "hess_diag", None), p.grad is None) for p in optimizer.parameters()]
    for p, _, _ in earlier:
        p.hess_diag = None
    try:
        yield
    except BaseException:
        for p, diagonal, _ in earlier:
            p.hess_diag = diagonal
        raise
    for p, diagonal, had_no_gradient in earlier:
        if p.hess_diag is not None:
            p.hess_diag /= scale.to(p.device)
        if diagonal is not None and not had_no_gradient:
            p.hess_diag = diagonal if p.hess_diag is None else diagonal.add_(p.hess_diag)
    optimizer.curvature_is_unscaled = True


def unscale(optimizer: DerivativeOptimizer, batches: list[Batch]) -> None:
    """Divide gradients and curvature by the scaler's factor, unless that has been done already.

    Raises:
        RuntimeError: if GradScaler.unscale_ has unscaled the gradients, but the curvature is still scaled.
    """
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None and not hasattr(optimizer, "found_inf"):
        return
    if any(batch.mesh is not None for batch in batches):
        raise UnsupportedOperator(SHARDED)
    for batch in batches:
        if scale is not None:
            torch._foreach_div_(batch.gradients, scale.to(batch.gradients[0].device))
        if not batch.curvatures or optimizer.curvature_is_unscaled:
            continue
        if scale is None:
            raise RuntimeError(
                "GradScaler.unscale_ unscaled the gradients but not hess_diag; call optimizer.backward(loss, scaler=scaler) "
                "with the unscaled loss, or leave the unscaling to scaler.step"
            )
        batch.curvatures = list(torch._foreach_div(batch.curvatures, scale.to(batch.curvatures[0].device)))


def clear_scaler_attributes(optimizer: DerivativeOptimizer) -> None:
    """Remove the attributes that GradScaler.step has set. GradScaler itself does not remove them if the step raises an error."""
    for name in ("grad_scale", "found_inf"):
        optimizer.__dict__.pop(name, None)
