"""Attention in one operator: O = P V with P = softmax(S), S = c Q Kᵀ + B.

The shares are the same as for separate operators: a product, a softmax, dropout, a product. They are computed for blocks of rows
of P, which are recomputed from Q and K, so that the whole of P is never in memory. On a GPU in bfloat16, without bias and
dropout, :mod:`hesscale.rules.kernels.attention` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .bilinear import squared
from .reductions import plus
from .registry import BL89, Final, Node, Share, chain, needs, rule, saved

MAX_ENTRIES = {"cpu": 2**18, "cuda": 2**26}  # of a block of P; a few such blocks are in memory at once
CAUSAL_ROWS = 32  # the minimum for a block on a CPU, which skips the columns that are masked for all of its rows
NODES = (
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
)
CUDNN_DROPOUT = Final(
    "cuDNN's attention keeps no mask of its dropout. Run the forward pass under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION), or without dropout in attention"
)
Block = tuple[slice, slice, slice]  # batches, heads and rows
ScoreRule = Callable[[Tensor, Tensor, Share, Share, Share], Tensor]


class Attention(NamedTuple):
    """The tensors that an attention node has saved, in the shape (batch, heads, length, size).

    Attributes:
        q: c Q.
        k, v: K and V, repeated to one head of keys and values for each head of queries.
        output: O.
        bias: B; None for zero.
        keep: the factors by which dropout multiplies P; None without dropout.
        is_causal: whether row i attends only to columns up to i.
        squares: of c Q and c K, in the dtype of s, and of V.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    bias: Tensor | None
    keep: Tensor | None
    is_causal: bool
    squares: tuple[Tensor, Tensor, Tensor]

    def columns(self, rows: slice) -> slice:
        """The columns to which some of these rows attend."""
        return slice(0, min(rows.stop, self.k.shape[2]) if self.is_causal else self.k.shape[2])

    def probabilities(self, block: Block, columns: slice) -> Tensor:
        """Rows of P."""
        batches, heads, rows = block
        scores = self.q[block] @ self.k[batches, heads, columns].mT
        if self.is_causal:  # all rows attend to columns before the first row
            row = torch.arange(rows.start, rows.stop, device=scores.device)
            column = torch.arange(min(rows.start, columns.stop), columns.stop, device=scores.device)
            scores[..., rows.start :].masked_fill_(column > row[:, None], -math.inf)
        if self.bias is None:
            return scores.softmax(-1)
        return torch._safe_softmax(scores + self.bias[batches, heads, rows, columns], -1)  # some rows may be fully masked


def read(node: Node, like: Tensor) -> Attention:
    """The tensors that the node has saved, in single precision or better, with squares in the dtype of ``like``."""
    q, k, v, scale = inputs_of(node)
    shape = (*q.shape[:3], k.shape[2])
    # Contiguous, since products of blocks would copy them otherwise.
    q, k, v = (x.to(torch.promote_types(x.dtype, torch.float32)).contiguous() for x in (q, k, v))
    q = q * scale
    bias = bias_of(node)
    return Attention(
        *(q, k, v, saved(node, "output")),
        bias=None if bias is None else bias.expand(shape),
        keep=dropout_factors(node, shape) if saved(node, "dropout_p") else None,
        is_causal=saved(node, "is_causal"),
        squares=(squared(q, like), squared(k * scale, like), v * v),
    )


def inputs_of(node: Node) -> tuple[Tensor, Tensor, Tensor, float]:
    """Q, K, V and c, with one head of keys and values for each head of queries."""
    q, k, v = (saved(node, name) for name in ("query", "key", "value"))
    scale = saved(node, "scale")
    groups = q.shape[1] // max(k.shape[1], 1)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    return q, k, v, 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def bias_of(node: Node) -> Tensor | None:
    return next((getattr(node, name) for name in ("_saved_attn_mask", "_saved_attn_bias") if hasattr(node, name)), None)


def dropout_factors(node: Node, shape: tuple[int, ...]) -> Tensor:
    """The factors by which dropout has multiplied P: 0 or 1 / (1 − p). No other tensor here is as large as P."""
    p = saved(node, "dropout_p")
    if "Efficient" in node.name():
        seed, offset = (int(saved(node, f"philox_{name}")) for name in ("seed", "offset"))
        drawn = torch.empty(shape, device=saved(node, "query").device)
        is_kept = torch._fill_mem_eff_dropout_mask_(drawn, p, seed, offset) > p
    else:
        is_kept = flash_dropout_mask(node)[..., : shape[2], : shape[3]]
    return is_kept / (1 - p)


def flash_dropout_mask(node: Node) -> Tensor:
    """Which entries of P flash attention's dropout has kept. Attention is computed again, and returns them as the signs of P."""
    fields: Any = node
    q, k, v = fields._saved_query, fields._saved_key, fields._saved_value
    seed, offset = saved(node, "rng_state").view(torch.int64).tolist()
    generator = torch.cuda.default_generators[q.device.index]
    before = generator.get_state()
    try:
        generator.manual_seed(seed)
        generator.set_offset(offset)
        output, *_, probabilities = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, saved(node, "dropout_p"), saved(node, "is_causal"), True, scale=saved(node, "scale")
        )
    finally:
        generator.set_state(before)
    if not torch.equal(output, fields._saved_output):
        raise RuntimeError(
            "the dropout mask of flash attention cannot be recomputed here; use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    return ~probabilities.signbit()


def blocks(given: Attention) -> Iterator[Block]:
    """All rows of P in blocks of limited size: from several samples, from several heads of a sample, or from one head."""
    batches, heads, rows, columns = *given.q.shape[:3], given.k.shape[2]
    device = given.q.device.type
    limit = max(1, MAX_ENTRIES.get(device, MAX_ENTRIES["cpu"]) // max(columns, 1))  # rows
    by_rows = min(limit, rows)
    if given.is_causal and device == "cpu" and not torch.compiler.is_compiling():
        by_rows = min(by_rows, max(rows // 4, CAUSAL_ROWS))
    by_heads = min(max(limit // max(by_rows, 1), 1), heads)
    by_batches = min(max(limit // max(by_rows * heads, 1), 1), batches)
    for batch in parts(batches, by_batches):
        for head in parts(heads, by_heads):
            for row in parts(rows, by_rows):
                yield batch, head, row


def parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, max(size, 1)))


def softmax_rule(p: Tensor, squares: Tensor, g: Share, s: Share, mean: Share) -> Tensor:
    """w − 2 p w + p² Σ_k s_k p_k² with w = s p² + p (g − mean), where mean = Σ_k g_k p_k; writes into g and s"""
    w = None if s is None else s.mul_(squares)
    total = None if w is None else w.sum(-1, keepdim=True)
    if g is not None:
        assert mean is not None
        slope = g.sub_(mean)
        w = slope.mul_(p) if w is None else w.addcmul_(slope, p)
    assert w is not None
    w.addcmul_(w, p, value=-2)
    return w if total is None else w.addcmul_(squares, total)


def softmax_as_if_elementwise(p: Tensor, squares: Tensor, g: Share, s: Share, mean: Share) -> Tensor:
    """f' = p (1 − p), f'' = f' (1 − 2 p)"""
    first = p - squares
    share = chain(first, first * (1 - 2 * p), g, s)
    assert share is not None
    return share


def shares_of(node: Node, g: Share, s: Share, score_rule: ScoreRule) -> list[Share]:
    """The shares of Q, K, V and, where it is an input, B."""
    shares: list[Share] = [None] * len(node.next_functions)
    if g is None and s is None:
        return shares
    like = g if s is None else s
    assert like is not None
    if score_rule is softmax_rule and has_kernels(node, like):
        shares[:3] = shares_by_kernels(node, g, s)
    else:
        shares = shares_by_blocks(node, g, s, like, score_rule)
    groups = saved(node, "query").shape[1] // max(saved(node, "key").shape[1], 1)
    if groups > 1:
        shares[1:3] = [None if x is None else x.unflatten(1, (-1, groups)).sum(2) for x in shares[1:3]]
    return shares


def has_kernels(node: Node, like: Tensor) -> bool:
    """Whether there are kernels for this node, given a share at its output."""
    q, v = saved(node, "query"), saved(node, "value")
    is_simple = bias_of(node) is None and not saved(node, "dropout_p")
    is_small = q.shape[-1] == v.shape[-1] <= kernels.MAX_HEAD_SIZE
    is_known = kernels.is_plain(q) or torch.compiler.is_compiling()
    is_fit = q.is_cuda and q.dtype == like.dtype == torch.bfloat16 and q.numel() > 0 and is_known
    return is_fit and is_simple and is_small and kernels.is_usable(q.device)


def shares_by_kernels(node: Node, g: Share, s: Share) -> list[Share]:
    """The shares of Q, K and V, without blocks of P in memory."""
    q, k, v, scale = inputs_of(node)
    mean = None if g is None else (g.float() * saved(node, "output")).sum(-1).flatten(0, 1)
    flat = [None if x is None else x.flatten(0, 1) for x in (q, k, v, s, g)]
    found = kernels.attention_shares(*flat, mean, scale, saved(node, "is_causal"))
    shares = [share.unflatten(0, q.shape[:2]) if needs(node, i) else None for i, share in enumerate(found)]
    return [*shares[:2], None if s is None else shares[2]]


def shares_by_blocks(node: Node, g: Share, s: Share, like: Tensor, score_rule: ScoreRule) -> list[Share]:
    """The shares of Q, K, V and, where it is an input, B."""
    shares: list[Share] = [None] * len(node.next_functions)
    given = read(node, like)
    g, s = (None if x is None else x.contiguous() for x in (g, s))
    dtype = torch.promote_types(like.dtype, torch.float32)  # of sums over blocks
    for i, tensor in enumerate((given.q, given.k, given.v)):
        if needs(node, i) and (i < 2 or s is not None):
            shares[i] = torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
    if len(shares) > 3 and needs(node, 3):
        bias = saved(node, "attn_bias")
        shares[3] = torch.zeros(bias.shape, dtype=dtype, device=bias.device)
    for block in blocks(given):
        add_shares(shares, given, block, None if g is None else g[block], None if s is None else s[block], score_rule)
    return [None if share is None else share.to(like.dtype) for share in shares]


def add_shares(shares: list[Share], given: Attention, block: Block, g: Share, s: Share, score_rule: ScoreRule) -> None:
    """Add the contribution of a block of P."""
    batches, heads, rows = block
    columns = given.columns(rows)
    seen = batches, heads, columns
    p = given.probabilities(block, columns)
    squares = p * p
    keep = None if given.keep is None else given.keep[batches, heads, rows, columns]
    if s is not None and shares[2] is not None:
        kept = squares if keep is None else squares * keep * keep
        shares[2][seen] += kept.to(s.dtype).mT @ s
    if all(share is None for share in (shares[0], shares[1], *shares[3:])):
        return
    to_p = None if s is None else s.to(p.dtype) @ given.squares[2][seen].mT
    slope = None if g is None else g.to(p.dtype) @ given.v[seen].mT
    if keep is not None:
        to_p = None if to_p is None else to_p.mul_(keep).mul_(keep)
        slope = None if slope is None else slope.mul_(keep)
    mean = None if g is None else (g.to(p.dtype) * given.output[block]).sum(-1, keepdim=True)
    to_scores = score_rule(p, squares, slope, to_p, mean)
    if len(shares) > 3 and shares[3] is not None:
        add_to_bias(shares[3], to_scores, (*block, columns))
    of_q, of_k, _ = given.squares
    to_product = to_scores.to(of_q.dtype)
    if shares[0] is not None:
        shares[0][block] += to_product @ of_k[seen]
    if shares[1] is not None:
        shares[1][seen] += to_product.mT @ of_q[block]


def add_to_bias(share: Tensor, to_scores: Tensor, where: tuple[slice, ...]) -> None:
    """Add a block's share to that of B, summed over the dimensions along which B was broadcast."""
    place = [part if size > 1 else slice(None) for part, size in zip(where, (1,) * (4 - share.dim()) + share.shape, strict=True)]
    target = share[tuple(place[4 - share.dim() :])]
    target += to_scores.sum_to_size(target.shape).to(share.dtype)


def merged(node: Node, shares: list[Share]) -> list[Share]:
    """Add up the shares of a tensor that is at several inputs, as for separate operators."""
    edges = list(node.next_functions)
    for i, edge in enumerate(edges):
        first = edges.index(edge)
        if first < i and edge[0] is not None:
            shares[first], shares[i] = plus(shares[first], shares[i]), None
    return shares


def refuse(node: Node) -> str | None:
    return CUDNN_DROPOUT if "Cudnn" in node.name() and saved(node, "dropout_p") else None


def attention_same(node: Node, g: Share, s: Share) -> list[Share]:
    """as for different tensors, whose shares add up"""
    return merged(node, attention(node, g, s))


@rule(*NODES, contraction=True, same=attention_same, refuse=refuse)
def attention(node: Node, g: Share, s: Share) -> list[Share]:
    """O = P V, P = softmax(S), S = c Q Kᵀ + B: s_V = (P²)ᵀ s, s_Q = c² s_S K², s_K = c² s_Sᵀ Q², s_S by the rule of softmax"""
    return shares_of(node, g, s, softmax_rule)


def attention_bl89_same(node: Node, g: Share, s: Share) -> list[Share]:
    """as for different tensors, whose shares add up"""
    return merged(node, attention_bl89(node, g, s))


@rule(*NODES, contraction=True, same=attention_bl89_same, refuse=refuse, table=BL89)
def attention_bl89(node: Node, g: Share, s: Share) -> list[Share]:
    """with softmax as if elementwise"""
    return shares_of(node, g, s, softmax_as_if_elementwise)
