"""Gradients that PyTorch differentiates wrongly, written out in operators that it differentiates rightly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.nodes import BACKWARD_OVERRIDES
from .registry import dimension, saved

Gradients = list[Tensor | None]


def of_norm(channel: int) -> Callable[[Any, Sequence[Tensor | None], Gradients], Gradients]:
    """Normalisation without a weight, whose second derivatives leave out the bias: its gradient is the sum of what comes."""

    def override(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
        g, bias = cotangents[0], pulled[2]
        if g is None or bias is None or saved(node, "weight") is not None:
            return pulled
        kept = [channel] if channel > 0 else range(g.dim() - bias.dim(), g.dim())
        dims = [d for d in range(g.dim()) if d not in kept]
        return [*pulled[:2], g.sum(dims).to(bias.dtype) if dims else g.to(bias.dtype), *pulled[3:]]

    return override


def of_logcumsumexp(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
    """Σ_{k≥i} g_k exp(x_i − y_k): PyTorch takes logarithms of g, of which some may be zero."""
    (g,), x = cotangents, saved(node, "self")
    if g is None or x.dim() == 0 or x.numel() == 0:
        return pulled
    dim = dimension(saved(node, "dim"), x.dim())
    x, y, g = (t.movedim(dim, -1) for t in (x, saved(node, "result"), g))
    n = x.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu()  # k ≥ i
    y = y.masked_fill(y.isneginf(), 0.0)  # as x is there, too
    q = (x.unsqueeze(-1) - y.unsqueeze(-2)).masked_fill(~later, -torch.inf).exp()
    return [(q @ g.to(q.dtype).unsqueeze(-1)).squeeze(-1).movedim(-1, dim)]


def of_weight_norm(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
    """w = γ v/‖v‖ with ‖v‖ as a function of v, which PyTorch holds fixed."""
    g, v, weight = cotangents[0], saved(node, "v"), saved(node, "g")
    if g is None:
        return pulled
    kept = dimension(saved(node, "dim"), v.dim())
    dims = [d for d in range(v.dim()) if d != kept]
    norm = v.square().sum(dims, keepdim=True).sqrt()
    along = (g * v).sum(dims, keepdim=True) / norm
    found = (g - v * (along / norm)) * (weight / norm), along
    return [None if before is None else now for before, now in zip(pulled, found, strict=True)]


BATCH_NORMS = (
    *("NativeBatchNormBackward0", "NativeBatchNormLegitBackward0", "NativeBatchNormLegitBackward1"),
    *("NativeBatchNormLegitNoTrainingBackward0", "BatchNormWithUpdateBackward0", "BatchNormNoUpdateBackward0"),
    *("CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
)
BACKWARD_OVERRIDES.update(dict.fromkeys(BATCH_NORMS, of_norm(1)))
BACKWARD_OVERRIDES["NativeLayerNormBackward0"] = of_norm(0)
BACKWARD_OVERRIDES["LogcumsumexpBackward0"] = of_logcumsumexp
BACKWARD_OVERRIDES["WeightNormInterfaceBackward0"] = of_weight_norm
