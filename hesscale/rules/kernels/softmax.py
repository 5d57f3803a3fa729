"""A Triton kernel for the share of the logits of log_softmax. :mod:`hesscale.rules.softmax` has the formula.

y, s and g are contiguous matrices with one row per sample.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048  # entries of a row that are processed at a time


@triton.jit
def log_softmax_kernel(y, s, g, share, size, COLUMNS: tl.constexpr, HAS_S: tl.constexpr, HAS_G: tl.constexpr):
    """s (1 − 2 q) + q² Σ s − (q − q²) Σ g, for one row"""
    start_of_row = tl.program_id(0).to(tl.int64) * size
    sums_s, sums_g = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for start in range(0, size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        if HAS_S:
            sums_s += tl.load(s + start_of_row + columns, mask=columns < size, other=0.0).to(tl.float32)
        if HAS_G:
            sums_g += tl.load(g + start_of_row + columns, mask=columns < size, other=0.0).to(tl.float32)
    sum_s, sum_g = tl.sum(sums_s, 0), tl.sum(sums_g, 0)
    for start in range(0, size, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        q = tl.exp(tl.load(y + start_of_row + columns, mask=columns < size, other=0.0).to(tl.float32))
        found = q * (q * sum_s - (1 - q) * sum_g)
        if HAS_S:
            found += tl.load(s + start_of_row + columns, mask=columns < size, other=0.0).to(tl.float32) * (1 - 2 * q)
        tl.store(share + start_of_row + columns, found.to(share.dtype.element_ty), mask=columns < size)


def launch(y: Tensor, s: Tensor | None, g: Tensor | None) -> Tensor:
    """The share of the logits, given y = log q."""
    given = g if s is None else s
    share = torch.empty_like(y, dtype=torch.promote_types(y.dtype, given.dtype))
    facts = y.shape[1], min(COLUMNS, triton.next_power_of_2(y.shape[1])), s is not None, g is not None
    log_softmax_kernel[(y.shape[0],)](y, s, g, share, *facts, num_warps=8 if y.shape[1] > 1024 else 4)
    return share
