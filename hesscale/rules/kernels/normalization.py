"""A Triton kernel for the shares of layer norm and RMS norm. :mod:`hesscale.rules.normalization` has the formulas.

x, s and g are matrices with one row per group of entries; rows are contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # for rows of 1,024 entries or more; each takes every 512th row and computes partial sums for weight and bias


@triton.jit
def norm_kernel(
    x, mean, scale, weight, s, g, share, weight_sums, bias_sums, row_count, size, row_step,
    PADDED: tl.constexpr, IS_CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_S: tl.constexpr, HAS_G: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, PADDED)
    is_inside = columns < size
    weights = tl.full([PADDED], 1.0, tl.float32)
    if HAS_WEIGHT:
        weights = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), row_count, row_step):
        entries = row * size + columns
        scale_of_row = tl.load(scale + row).to(tl.float32)
        normed = tl.load(x + entries, mask=is_inside, other=0.0).to(tl.float32)
        if IS_CENTRED:
            normed -= tl.load(mean + row).to(tl.float32)
        normed = tl.where(is_inside, normed * scale_of_row, 0.0)
        t, a = tl.zeros([PADDED], tl.float32), tl.zeros([PADDED], tl.float32)
        if HAS_S:
            s_of_row = tl.load(s + entries, mask=is_inside, other=0.0).to(tl.float32)
            of_weight += s_of_row * normed * normed
            of_bias += s_of_row
            t = s_of_row * weights * weights
        if HAS_G:
            a = tl.load(g + entries, mask=is_inside, other=0.0).to(tl.float32) * weights
        slope = t * normed + a
        tilt = tl.sum(a * normed, 0)
        quadratic = (tl.sum(slope * normed, 0) + 2 * tilt) / size / size
        found = t - tilt / size + quadratic * normed * normed
        if IS_CENTRED:
            found += (tl.sum(t, 0) + tilt + 2 * tl.sum(slope, 0) * normed) / size / size - 2 * (t + normed * slope) / size
        found *= scale_of_row * scale_of_row
        tl.store(share + entries, found.to(share.dtype.element_ty), mask=is_inside)
    partial = tl.program_id(0) * size + columns
    tl.store(weight_sums + partial, of_weight, mask=is_inside)
    tl.store(bias_sums + partial, of_bias, mask=is_inside)


def launch(
    x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, s: Tensor | None, g: Tensor | None, is_centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of x, weight and bias. The mean is read only if the norm is centred."""
    rows, size = x.shape
    padded = triton.next_power_of_2(size)
    programs = min(PROGRAMS * max(1, 1024 // padded), rows)
    given = g if s is None else s
    share = torch.empty_like(given, dtype=torch.promote_types(x.dtype, given.dtype))
    weight_sums, bias_sums = (torch.empty(programs, size, device=x.device) for _ in range(2))
    norm_kernel[(programs,)](
        *(x, mean, scale, weight, s, g, share, weight_sums, bias_sums, rows, size, programs),
        *(padded, is_centred, weight is not None, s is not None, g is not None),
        num_warps=min(max(padded // 256, 1), 16),
    )
    return share, weight_sums.sum(0), bias_sums.sum(0)
