"""Gradients whose derivatives are wrong or missing in PyTorch, rewritten with operators that it differentiates correctly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..engine.nodes import BACKWARD_OVERRIDES
from .losses import ctc_counts
from .registry import dimension, saved, signed

Gradients = list[Tensor | None]


def of_norm(channel: int) -> Callable[[Any, Sequence[Tensor | None], Gradients], Gradients]:
    """Normalization without a weight. Its second derivatives lack the bias, whose gradient is the sum of the cotangents."""

    def override(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
        g, bias = cotangents[0], pulled[2]
        if g is None or bias is None or saved(node, "weight") is not None:
            return pulled
        kept = [channel] if channel > 0 else range(g.dim() - bias.dim(), g.dim())
        dims = [d for d in range(g.dim()) if d not in kept]
        return [*pulled[:2], g.sum(dims).to(bias.dtype) if dims else g.to(bias.dtype), *pulled[3:]]

    return override


def of_logcumsumexp(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
    """Σ_{k≥i} g_k exp(x_i − y_k). PyTorch computes it by logarithms of g, which may be zero."""
    (g,), x = cotangents, saved(node, "self")
    if g is None or x.dim() == 0 or x.numel() == 0:
        return pulled
    dim = dimension(saved(node, "dim"), x.dim())
    x, y, g = (t.movedim(dim, -1) for t in (x, saved(node, "result"), g))
    n = x.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu()  # k ≥ i
    y = y.masked_fill(y.isneginf(), 0.0)  # x is −∞ there too
    q = (x.unsqueeze(-1) - y.unsqueeze(-2)).masked_fill(~later, -torch.inf).exp()
    return [(q @ g.to(q.dtype).unsqueeze(-1)).squeeze(-1).movedim(-1, dim)]


def of_weight_norm(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
    """w = γ v/‖v‖ with ‖v‖ as a function of v. PyTorch's second derivatives treat it as constant."""
    g, v, weight = cotangents[0], saved(node, "v"), saved(node, "g")
    if g is None:
        return pulled
    kept = dimension(saved(node, "dim"), v.dim())
    dims = [d for d in range(v.dim()) if d != kept]
    norm = v.square().sum(dims, keepdim=True).sqrt()
    along = (g * v).sum(dims, keepdim=True) / norm
    found = (g - v * (along / norm)) * (weight / norm), along
    return [None if before is None else now for before, now in zip(pulled, found, strict=True)]


def of_ctc(node: Any, cotangents: Sequence[Tensor | None], pulled: Gradients) -> Gradients:
    """p − q, where −q is the gradient of −log P. PyTorch cannot differentiate its CTC loss twice."""
    (g,) = cotangents
    if g is None:
        return pulled
    log_p = saved(node, "log_probs")
    log_p = log_p.view_as(log_p)  # so that no hook of log_p runs
    counts = ctc_counts(node, log_p)
    loss = ctc_of(node, log_p).masked_fill(~counts.any(0).squeeze(-1), 0.0)
    (minus_q,) = torch.autograd.grad(loss, log_p, g, create_graph=torch.is_grad_enabled())
    return [minus_q + (g.unsqueeze(-1) * log_p.exp()).masked_fill(~counts, 0.0)]


def ctc_of(node: Any, log_p: Tensor) -> Tensor:
    """−log P of each sample, by the forward algorithm over states: the symbols, with blanks between them."""
    steps, samples, _ = log_p.shape
    states, device = saved(node, "result1").shape[-1], log_p.device
    lengths = torch.as_tensor(saved(node, "target_lengths"), device=device)
    state, number = torch.arange(states, device=device), torch.arange(states // 2, device=device)
    targets, blank = saved(node, "targets"), signed(saved(node, "blank"))
    if targets.dim() == 1:  # concatenated targets
        places = (lengths.cumsum(0) - lengths).unsqueeze(1) + number
        targets = targets[places.clamp_max(max(len(targets) - 1, 0))] if len(targets) else targets.new_zeros(samples, 0)
    symbols = torch.full((samples, states), blank, dtype=torch.long, device=device)
    symbols[:, 1::2] = targets[:, : states // 2].long().masked_fill(number >= lengths.unsqueeze(1), blank)
    may_skip = (symbols != blank) & (symbols != symbols.roll(2, 1)) & (state >= 2)
    emitted = log_p.gather(2, symbols.expand(steps, samples, states))
    impossible = torch.finfo(log_p.dtype).min / 4
    starts = (state < 2) & (state <= 2 * lengths.unsqueeze(1))
    alpha = emitted[0].masked_fill(~starts, impossible)
    input_lengths = torch.as_tensor(saved(node, "input_lengths"), device=device).unsqueeze(1)
    for t in range(1, steps):
        one, two = (functional.pad(alpha, (k, 0), value=impossible)[:, :states] for k in (1, 2))
        ways = torch.stack([alpha, one, two.masked_fill(~may_skip, impossible)])
        alpha = torch.where(t < input_lengths, (ways.logsumexp(0) + emitted[t]).clamp_min(impossible), alpha)
    last = torch.stack([2 * lengths, (2 * lengths - 1).clamp_min(0)], 1)
    ends = alpha.gather(1, last)
    return -torch.where(lengths > 0, ends.logsumexp(1), ends[:, 0])


BATCH_NORMS = (
    *("NativeBatchNormBackward0", "NativeBatchNormLegitBackward0", "NativeBatchNormLegitBackward1"),
    *("NativeBatchNormLegitNoTrainingBackward0", "BatchNormWithUpdateBackward0", "BatchNormNoUpdateBackward0"),
    *("CudnnBatchNormBackward0", "MiopenBatchNormBackward0"),
)
BACKWARD_OVERRIDES.update(dict.fromkeys(BATCH_NORMS, of_norm(1)))
BACKWARD_OVERRIDES["NativeLayerNormBackward0"] = of_norm(0)
BACKWARD_OVERRIDES["CtcLossBackward0"] = BACKWARD_OVERRIDES["CtcLossBackward1"] = of_ctc
BACKWARD_OVERRIDES["LogcumsumexpBackward0"] = of_logcumsumexp
BACKWARD_OVERRIDES["WeightNormInterfaceBackward0"] = of_weight_norm
