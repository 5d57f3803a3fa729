"""Products: y is linear in each factor, so the operator's backward with the other factors squared gives the shares (Eq. 3).

Mixed second derivatives ∂²y/∂A∂B are not zero. If the same tensor is both factors, they contribute to its second derivatives, and
the share depends on g as well. Products are computed in the dtype of s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .reductions import plus
from .registry import Final, Node, Share, dimension, linear, needs, saved

SUMMAND = "its summand is also one of its factors, which its curvature rule does not cover; use a product and a separate sum"
ALIGNED_ENTRIES = 8  # in two bytes each
SPARSE = Final("a sparse factor needs a gradient, and curvature is dense; make it dense, or detach it")


def is_sparse(child: Node | None, strides: Sequence[int]) -> bool:
    """Whether a factor needs a share and is sparse. The node saves no strides of a sparse factor."""
    return child is not None and not strides


def refuse_mm(node: Node) -> str | None:
    (left, _), (right, _) = node.next_functions
    sparse = is_sparse(left, saved(node, "self_sym_strides")) or is_sparse(right, saved(node, "mat2_sym_strides"))
    return SPARSE if sparse else None


def mm_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y = A A"""
    return [matrix_square(saved(node, "self"), g, s), None]


def mm_transposed(node: Node, g: Share, s: Share) -> list[Share]:
    """y = A Wᵀ: s_A = s W², s_W = sᵀ A²"""
    if s is None:
        return [None, None]
    (to_left, _), _ = node.next_functions
    left = None if to_left is None else row_share(s, saved(node, "mat2"))
    return [left, weight_share(s, saved(node, "self"))]


@linear("MmBackward0", contraction=True, factors=("self", "mat2"), same=mm_same, refuse=refuse_mm, transposed=mm_transposed)
def mm(node: Node, s: Tensor) -> list[Share]:
    """y = A B: s_A = s (B²)ᵀ, s_B = (A²)ᵀ s"""
    left = left_share(s, saved(node, "mat2"), saved(node, "self_sym_strides")) if needs(node, 0) else None
    right = right_share(s, saved(node, "self"), saved(node, "mat2_sym_strides")) if needs(node, 1) else None
    return [left, right]


@linear("BmmBackward0", contraction=True, factors=("self", "mat2"), same=mm_same)
def bmm(node: Node, s: Tensor) -> list[Share]:
    """y = A B for each pair of a batch: s_A = s (B²)ᵀ, s_B = (A²)ᵀ s"""
    return batch_factors(node, 0, s, dense(saved(node, "self")), dense(saved(node, "mat2")))


def dense(factor: Tensor | None) -> Tensor | None:
    """A sparse constant as a dense tensor, since there are no batched products of sparse tensors."""
    return factor if factor is None or factor.layout == torch.strided else factor.to_dense()


def summand_is_factor(node: Node) -> str | None:
    """Why β b + α A B is refused if b is also a factor. If one tensor is at two inputs, the rules cover only A = B."""
    summand, left, right = node.next_functions
    return SUMMAND if summand[0] is not None and summand in (left, right) else None


def refuse_addmm(node: Node) -> str | None:
    _, (left, _), (right, _) = node.next_functions
    sparse = is_sparse(left, saved(node, "mat1_sym_strides")) or is_sparse(right, saved(node, "mat2_sym_strides"))
    return SPARSE if sparse else summand_is_factor(node)


def addmm_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y = β b + α A A"""
    return summand_and_square(node, saved(node, "mat1"), g, s)


def addmm_transposed(node: Node, g: Share, s: Share) -> list[Share]:
    """y = β b + α A Wᵀ: s_b = β² s, s_A = α² s W², s_W = α² sᵀ A²"""
    if s is None:
        return [None, None, None]
    (to_summand, _), (to_left, _), _ = node.next_functions
    summand = None if to_summand is None else scaled(s, saved(node, "beta") ** 2)
    s = scaled(s, saved(node, "alpha") ** 2)
    left = None if to_left is None else row_share(s, saved(node, "mat2"))
    return [summand, left, weight_share(s, saved(node, "mat1"))]


@linear(
    "AddmmBackward0",
    contraction=True,
    factors=("mat1", "mat2"),
    same=addmm_same,
    refuse=refuse_addmm,
    transposed=addmm_transposed,
)
def addmm(node: Node, s: Tensor) -> list[Share]:
    """y = β b + α A B: s_b = β² s, s_A = α² s (B²)ᵀ, s_B = α² (A²)ᵀ s"""
    summand = scaled(s, saved(node, "beta") ** 2) if needs(node, 0) else None
    s = scaled(s, saved(node, "alpha") ** 2)
    left = left_share(s, saved(node, "mat2"), saved(node, "mat1_sym_strides")) if needs(node, 1) else None
    right = right_share(s, saved(node, "mat1"), saved(node, "mat2_sym_strides")) if needs(node, 2) else None
    return [summand, left, right]


@linear("SparseAddmmBackward0", contraction=True, refuse=lambda node: SPARSE if needs(node, 1) else None)
def sparse_addmm(node: Node, s: Tensor) -> list[Share]:
    """y = β b + α A B with A sparse and constant: s_b = β² s, s_B = α² (A²)ᵀ s"""
    summand = scaled(s, saved(node, "beta") ** 2) if needs(node, 0) else None
    s = scaled(s, saved(node, "alpha") ** 2)
    return [summand, None, right_share(s, saved(node, "mat1"), saved(node, "mat2_sym_strides")) if needs(node, 2) else None]


def baddbmm_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y = β b + α A A, for each matrix of a batch or summed over it"""
    return summand_and_square(node, saved(node, "batch1"), g, s)


@linear(
    "BaddbmmBackward0",
    "AddbmmBackward0",
    contraction=True,
    factors=("batch1", "batch2"),
    same=baddbmm_same,
    refuse=summand_is_factor,
)
def baddbmm(node: Node, s: Tensor) -> list[Share]:
    """y = β b + α A B, for each pair of a batch or summed over it: s_b = β² s, s_A = α² s (B²)ᵀ, s_B = α² (A²)ᵀ s"""
    summand = scaled(s, saved(node, "beta") ** 2) if needs(node, 0) else None
    s = scaled(s, saved(node, "alpha") ** 2)
    return [summand, *batch_factors(node, 1, s, saved(node, "batch1"), saved(node, "batch2"))]


def batch_factors(node: Node, first: int, s: Tensor, left: Share, right: Share) -> list[Share]:
    """The shares of A and B, the inputs ``first`` and ``first + 1``. A factor is saved only if the other one needs a share."""
    shares: list[Share] = [None, None]
    if right is not None and needs(node, first):
        shares[0] = left_share(s, right, () if left is None else left.stride())
    if left is not None and needs(node, first + 1):
        shares[1] = right_share(s, left, () if right is None else right.stride())
    return shares


@linear("GroupedMmBackward0", contraction=True)
def grouped_mm(node: Node, s: Tensor) -> list[Share]:
    """y = A B, group by group of rows, columns or matrices (mixtures of experts): s_A = s (B²)ᵀ, s_B = (A²)ᵀ s"""
    offsets, left, right = saved(node, "offs"), saved(node, "self"), saved(node, "mat2")
    return [
        grouped_product(s, squared(right, s).mT, offsets) if needs(node, 0) else None,
        grouped_product(squared(left, s).mT, s, offsets) if needs(node, 1) else None,
    ]


def grouped_product(left: Tensor, right: Tensor, offsets: Share) -> Tensor:
    """A B by groups. The kernels support float32 and narrower dtypes, in rows or columns that are aligned to 16 bytes."""
    left, right = (x if 1 in x.stride()[-2:] else x.contiguous() for x in (left, right))
    narrow = left.dtype.itemsize < 4 and not (is_aligned(left) and is_aligned(right))
    if narrow or left.dtype == torch.float64:
        left, right = left.float(), right.float()
    return torch._grouped_mm(left, right, offs=offsets)


def is_aligned(x: Tensor) -> bool:
    return all(stride == 1 or stride * x.element_size() % 16 == 0 for stride in x.stride())


def left_share(s: Tensor, right: Tensor, strides: Sequence[int]) -> Tensor:
    """s_A = s (B²)ᵀ, in the memory layout of A"""
    squares, s = operands(right, s)
    return (squares @ s.mT).mT if by_columns(strides) else s @ squares.mT


def right_share(s: Tensor, left: Tensor, strides: Sequence[int]) -> Tensor:
    """s_B = (A²)ᵀ s, in the memory layout of B. The weight of a Linear layer, for example, is transposed."""
    squares, s = operands(left, s)
    return (s.mT @ squares).mT if by_columns(strides) else squares.mT @ s


def row_share(s: Tensor, right: Tensor) -> Tensor:
    """s_A = s W², for B = Wᵀ"""
    squares, s = operands(right, s)
    columns = s.shape[1] - s.shape[1] % ALIGNED_ENTRIES
    is_narrow = s.is_cuda and s.element_size() == 2 and type(s) is Tensor
    if columns == s.shape[1] or not is_narrow or torch.compiler.is_compiling():
        return torch.mm(s, squares.t())
    # cuBLAS takes several times as long if the number of terms is not a multiple of ALIGNED_ENTRIES
    return torch.mm(s[:, :columns], squares.t()[:columns]).addmm_(s[:, columns:], squares.t()[columns:])


def weight_share(s: Tensor, left: Tensor) -> Tensor:
    """s_W = sᵀ A², for B = Wᵀ"""
    squares, s = operands(left, s)
    return torch.mm(s.t(), squares)


def operands(factor: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """A factor's squares and s in the same dtype: that of s, or of a sparse factor, since few kernels support sparse bfloat16."""
    if factor.layout == torch.sparse_csc:  # few kernels support this layout
        factor = factor.to_sparse()
    if factor.dtype == s.dtype:
        return factor * factor, s
    return (squared(factor, s), s) if factor.layout == torch.strided else (factor * factor, s.to(factor.dtype))


def squared(factor: Tensor, s: Tensor) -> Tensor:
    """A factor's squares, rounded to the dtype of s after squaring."""
    if factor.dtype == s.dtype:
        return factor * factor
    factor = factor.to(torch.promote_types(factor.dtype, s.dtype))
    return (factor * factor).to(s.dtype)


def by_columns(strides: Sequence[int]) -> bool:
    return len(strides) > 1 and strides[-2] < strides[-1]


def summand_and_square(node: Node, x: Tensor, g: Share, s: Share) -> list[Share]:
    alpha, beta = saved(node, "alpha"), saved(node, "beta")
    return [scaled(s, beta**2), matrix_square(x, scaled(g, alpha), scaled(s, alpha**2)), None]


def matrix_square(x: Tensor, g: Share, s: Share) -> Share:
    """y = x x: s_x = s (x²)ᵀ + (x²)ᵀ s + 2 s ∘ d dᵀ + 2 diag(g), with d the diagonal of x"""
    share = None
    if s is not None:
        squares, d = squared(x, s).mT, x.diagonal(dim1=-2, dim2=-1)
        share = s @ squares + squares @ s + 2 * s * d.unsqueeze(-1) * d.unsqueeze(-2)
    if g is None:
        return share
    second = torch.diag_embed(2 * g.diagonal(dim1=-2, dim2=-1))
    return second.expand_as(x) if share is None else share + second


def scaled(value: Any, factor: float) -> Any:
    return value if value is None or factor == 1 else value * factor


@linear("MvBackward0", contraction=True, factors=("self", "vec"))
def mv(node: Node, s: Tensor) -> list[Share]:
    """y = A v: s_A = s (v²)ᵀ, s_v = (A²)ᵀ s"""
    matrix = torch.outer(s, squared(saved(node, "vec"), s)) if needs(node, 0) else None
    vector = vector_share(s, saved(node, "self")) if needs(node, 1) else None
    return [matrix, vector]


@linear("AddmvBackward0", contraction=True, factors=("mat", "vec"))
def addmv(node: Node, s: Tensor) -> list[Share]:
    """y = β b + α A v: s_b = β² s, s_A = α² s (v²)ᵀ, s_v = α² (A²)ᵀ s"""
    summand = scaled(s, saved(node, "beta") ** 2) if needs(node, 0) else None
    s = scaled(s, saved(node, "alpha") ** 2)
    matrix = torch.outer(s, squared(saved(node, "vec"), s)) if needs(node, 1) else None
    vector = vector_share(s, saved(node, "mat")) if needs(node, 2) else None
    return [summand, matrix, vector]


def vector_share(s: Tensor, matrix: Tensor) -> Tensor:
    squares, s = operands(matrix, s)
    return squares.t() @ s


def addr_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y = β b + α v vᵀ: s_v = α² (s + sᵀ + 2 diag(s)) v² + 2 α diag(g)"""
    alpha = saved(node, "alpha")
    share = None if g is None else 2 * alpha * g.diagonal()
    if s is not None:
        squares = squared(saved(node, "vec1"), s) * alpha**2
        first = s @ squares + s.t() @ squares + 2 * s.diagonal() * squares
        share = first if share is None else share + first
    return [scaled(s, saved(node, "beta") ** 2), share, None]


@linear("AddrBackward0", contraction=True, same=addr_same, refuse=summand_is_factor)
def addr(node: Node, s: Tensor) -> list[Share]:
    """y = β b + α u vᵀ: s_b = β² s, s_u = α² s v², s_v = α² sᵀ u²"""
    summand = scaled(s, saved(node, "beta") ** 2) if needs(node, 0) else None
    s = scaled(s, saved(node, "alpha") ** 2)
    left = s @ squared(saved(node, "vec2"), s) if needs(node, 1) else None
    right = s.t() @ squared(saved(node, "vec1"), s) if needs(node, 2) else None
    return [summand, left, right]


def dot_same(node: Node, g: Share, s: Share) -> list[Share]:
    """y = Σ x²: s_x = 4 s x² + 2 g"""
    x = saved(node, "self")
    return [plus(None if s is None else 4 * s * squared(x, s), None if g is None else (2 * g).expand_as(x)), None]


def inner_product(node: Node, s: Tensor, other: str) -> list[Share]:
    left = s * squared(saved(node, other), s) if needs(node, 0) else None
    right = s * squared(saved(node, "self"), s) if needs(node, 1) else None
    return [left, right]


@linear("DotBackward0", contraction=True, factors=("self", "tensor"), same=dot_same)
def dot(node: Node, s: Tensor) -> list[Share]:
    """y = Σ a b: s_a = s b², s_b = s a²"""
    return inner_product(node, s, "tensor")


@linear("VdotBackward0", contraction=True, factors=("self", "other"), same=dot_same)
def vdot(node: Node, s: Tensor) -> list[Share]:
    """y = Σ a b: s_a = s b², s_b = s a²"""
    return inner_product(node, s, "other")


def cross_same(node: Node, g: Share, s: Share) -> list[Share]:
    """x × x = 0"""
    return [None, None]


@linear("LinalgCrossBackward0", contraction=True, same=cross_same)
def cross(node: Node, s: Tensor) -> list[Share]:
    """y_i = a_j b_k − a_k b_j, (i, j, k) cyclic: s_a at i is s_k b_j² + s_j b_k²; likewise for b"""
    dim = dimension(saved(node, "dim"), s.dim())
    before, after = s.roll(1, dim), s.roll(-1, dim)

    def share(other: Tensor) -> Tensor:
        squares = squared(other, s)
        return before * squares.roll(-1, dim) + after * squares.roll(1, dim)

    return [share(saved(node, "other")) if needs(node, 0) else None, share(saved(node, "self")) if needs(node, 1) else None]


@linear("TrilinearBackward0", contraction=True)
def trilinear(node: Node, s: Tensor) -> list[Share]:
    """y = Σ a b c (nn.Bilinear): J_a = Σ b c over the summed dimensions that a lacks, s_a = Σ s J_a²; likewise for b and c"""
    factors = [saved(node, "i1"), saved(node, "i2"), saved(node, "i3")]
    dims = "abcdefghijklmnopqrstuvwxyz"[: s.dim() + len(saved(node, "sumdim"))]
    y, *own = [
        "".join(dim for d, dim in enumerate(dims) if d not in saved(node, absent))
        for absent in ("sumdim", "expand1", "expand2", "expand3")
    ]
    shares: list[Share] = [None, None, None]
    for i, j, k in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        if needs(node, i):
            jacobian = "".join(dim for dim in dims if dim in own[j] + own[k] and dim in y + own[i])
            slopes = torch.einsum(f"{own[j]},{own[k]}->{jacobian}", factors[j], factors[k])
            shares[i] = torch.einsum(f"{y},{jacobian}->{own[i]}", s, squared(slopes, s))
    return shares


@linear("LinearBackward0", contraction=True)
def linear_layer(node: Node, s: Tensor) -> list[Share]:
    """y = x wᵀ + b as one operator (on Apple GPUs): s_x = s w², s_w = sᵀ x², s_b = s"""
    x = s @ squared(saved(node, "weight"), s) if needs(node, 0) else None
    weight = by_rows(s).t() @ by_rows(squared(saved(node, "input"), s)) if needs(node, 1) else None
    return [x, weight, s]


def by_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
