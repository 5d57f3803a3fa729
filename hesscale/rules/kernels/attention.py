"""Triton kernels for the shares of attention in bfloat16 on a GPU.

They compute the same shares as :mod:`hesscale.rules.attention`, but never write any part of P to memory. The factors of products
are in bfloat16, and sums are in single precision. All tensors are contiguous, of shape (batch · heads, length, size).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BY_ROWS = 64, 32, 4  # rows and columns of a block of P, and warps; large heads have twice as many warps
BY_COLUMNS = 64, 32, 4
LARGE_MEMORY = 2**17  # bytes of shared memory that large heads need for three stages of the pipeline


@triton.jit
def load_rows(matrix, rows, count, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Load rows of a matrix, with zeros beyond its ends."""
    entries = tl.arange(0, PADDED)
    is_inside = (rows < count)[:, None] & (entries < SIZE)[None, :]
    return tl.load(matrix + rows[:, None] * SIZE + entries[None, :], mask=is_inside, other=0.0)


@triton.jit
def store_rows(matrix, values, rows, count, SIZE: tl.constexpr, PADDED: tl.constexpr):
    entries = tl.arange(0, PADDED)
    is_inside = (rows < count)[:, None] & (entries < SIZE)[None, :]
    tl.store(matrix + rows[:, None] * SIZE + entries[None, :], values.to(matrix.dtype.element_ty), mask=is_inside)


@triton.jit
def scores_of(q, k, rows, columns, column_count, scale, IS_CAUSAL: tl.constexpr):
    """c Q Kᵀ, and −∞ where a query does not attend to a key."""
    is_seen = (columns < column_count)[None, :]
    if IS_CAUSAL:
        is_seen = is_seen & (columns[None, :] <= rows[:, None])
    return tl.where(is_seen, tl.dot(q, tl.trans(k)) * scale, -float("inf"))


@triton.jit
def share_of_scores(p, v, s, g, mean, total, HAS_S: tl.constexpr, HAS_G: tl.constexpr):
    """w − 2 p w + p² Σ_k s_k p_k² with w = s p² + p (g − mean), for s and g at P"""
    w = tl.zeros_like(p)
    if HAS_S:
        w += p * p * tl.dot(s, tl.trans(v * v))
    if HAS_G:
        w += p * (tl.dot(g, tl.trans(v)) - mean[:, None])
    return w - 2 * p * w + p * p * total[:, None]


@triton.jit
def rows_kernel(
    q, k, v, s, g, mean, log_sum, total, share, row_count, column_count, scale,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_S: tl.constexpr, HAS_G: tl.constexpr,
):  # fmt: skip
    """For some rows of one head: log Σ exp of the scores, Σ_k s_k p_k², and the share of Q."""
    blocks = tl.cdiv(row_count, ROWS)
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    rows = block * ROWS + tl.arange(0, ROWS)
    of_rows, of_columns = head * row_count * SIZE, head * column_count * SIZE
    q_rows = load_rows(q + of_rows, rows, row_count, SIZE, PADDED)
    s_rows, g_rows, means = q_rows, q_rows, tl.zeros([ROWS], tl.float32)
    if HAS_S:
        s_rows = load_rows(s + of_rows, rows, row_count, SIZE, PADDED)
    if HAS_G:
        g_rows = load_rows(g + of_rows, rows, row_count, SIZE, PADDED)
        means = tl.load(mean + head * row_count + rows, mask=rows < row_count, other=0.0)
    last = column_count
    if IS_CAUSAL:
        last = tl.minimum(column_count, (block + 1) * ROWS)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    sums, totals = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)  # Σ exp, and Σ s exp², relative to the largest
    for start in range(0, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        scores = scores_of(
            q_rows, load_rows(k + of_columns, columns, column_count, SIZE, PADDED), rows, columns, column_count, scale, IS_CAUSAL
        )
        larger = tl.maximum(largest, tl.max(scores, 1))
        exps, shrink = tl.exp(scores - larger[:, None]), tl.exp(largest - larger)
        sums = sums * shrink + tl.sum(exps, 1)
        if HAS_S:
            v_columns = load_rows(v + of_columns, columns, column_count, SIZE, PADDED)
            totals = totals * shrink * shrink + tl.sum(exps * exps * tl.dot(s_rows, tl.trans(v_columns * v_columns)), 1)
        largest = larger
    log_sums, totals = largest + tl.log(sums), totals / (sums * sums)
    tl.store(log_sum + head * row_count + rows, log_sums, mask=rows < row_count)
    tl.store(total + head * row_count + rows, totals, mask=rows < row_count)
    shares = tl.zeros([ROWS, PADDED], tl.float32)
    for start in range(0, last, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k_columns = load_rows(k + of_columns, columns, column_count, SIZE, PADDED)
        v_columns = load_rows(v + of_columns, columns, column_count, SIZE, PADDED)
        p = tl.exp(scores_of(q_rows, k_columns, rows, columns, column_count, scale, IS_CAUSAL) - log_sums[:, None])
        to_scores = share_of_scores(p, v_columns, s_rows, g_rows, means, totals, HAS_S, HAS_G)
        shares += tl.dot(to_scores.to(k_columns.dtype), k_columns * k_columns)
    store_rows(share + of_rows, shares * scale * scale, rows, row_count, SIZE, PADDED)


@triton.jit
def columns_kernel(
    q, k, v, s, g, mean, log_sum, total, share_k, share_v, row_count, column_count, scale,
    SIZE: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_S: tl.constexpr, HAS_G: tl.constexpr,
):  # fmt: skip
    """For some columns of one head: the shares of K and V."""
    blocks = tl.cdiv(column_count, COLUMNS)
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    of_rows, of_columns = head * row_count * SIZE, head * column_count * SIZE
    k_columns = load_rows(k + of_columns, columns, column_count, SIZE, PADDED)
    v_columns = load_rows(v + of_columns, columns, column_count, SIZE, PADDED)
    shares_k, shares_v = tl.zeros([COLUMNS, PADDED], tl.float32), tl.zeros([COLUMNS, PADDED], tl.float32)
    first = 0
    if IS_CAUSAL:
        first = block * COLUMNS // ROWS * ROWS
    for start in range(first, row_count, ROWS):
        rows = start + tl.arange(0, ROWS)
        q_rows = load_rows(q + of_rows, rows, row_count, SIZE, PADDED)
        s_rows, g_rows, means = q_rows, q_rows, tl.zeros([ROWS], tl.float32)
        if HAS_S:
            s_rows = load_rows(s + of_rows, rows, row_count, SIZE, PADDED)
        if HAS_G:
            g_rows = load_rows(g + of_rows, rows, row_count, SIZE, PADDED)
            means = tl.load(mean + head * row_count + rows, mask=rows < row_count, other=0.0)
        log_sums = tl.load(log_sum + head * row_count + rows, mask=rows < row_count, other=float("inf"))
        totals = tl.load(total + head * row_count + rows, mask=rows < row_count, other=0.0)
        p = tl.exp(scores_of(q_rows, k_columns, rows, columns, column_count, scale, IS_CAUSAL) - log_sums[:, None])
        to_scores = share_of_scores(p, v_columns, s_rows, g_rows, means, totals, HAS_S, HAS_G)
        shares_k += tl.dot(tl.trans(to_scores.to(q_rows.dtype)), q_rows * q_rows)
        if HAS_S:
            shares_v += tl.dot(tl.trans((p * p).to(s_rows.dtype)), s_rows)
    store_rows(share_k + of_columns, shares_k * scale * scale, columns, column_count, SIZE, PADDED)
    store_rows(share_v + of_columns, shares_v, columns, column_count, SIZE, PADDED)


def shared_memory(x: Tensor) -> int:
    """Bytes that the warps of a program may share on this GPU."""
    return getattr(torch.cuda.get_device_properties(x.device), "shared_memory_per_block_optin", 0)


def launch(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor | None, g: Tensor | None, mean: Tensor | None, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The shares of Q, K and V, given s and g at O, and Σ g O over each row."""
    # Tensors are made contiguous here, since a tensor that is contiguous in a trace may not be contiguous when the graph runs.
    q, k, v, s, g, mean = (None if x is None else x.contiguous() for x in (q, k, v, s, g, mean))
    (heads, rows, size), columns = q.shape, k.shape[1]
    log_sum, total = (torch.empty(heads, rows, device=q.device) for _ in range(2))
    shares = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    given = q, k, v, s, g, mean, log_sum, total
    sizes = rows, columns, scale, size, max(16, triton.next_power_of_2(size))
    flags = is_causal, s is not None, g is not None
    more, stages = (1, 3) if size <= 64 else (2, 3 if shared_memory(q) >= LARGE_MEMORY else 2)
    *block, warps = BY_ROWS
    grid = (triton.cdiv(rows, block[0]) * heads,)
    rows_kernel[grid](*given, shares[0], *sizes, *block, *flags, num_warps=warps * more, num_stages=stages)
    *block, warps = BY_COLUMNS
    grid = (triton.cdiv(columns, block[1]) * heads,)
    columns_kernel[grid](*given, *shares[1:], *sizes, *block, *flags, num_warps=warps * more, num_stages=stages)
    return shares
