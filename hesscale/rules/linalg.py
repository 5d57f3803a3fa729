"""Matrix decompositions, inverses and determinants, for every matrix of a batch.

Z is the inverse of A, and E is the change of one entry, E_ij = 1. A symmetric matrix changes by (E + Eᵀ)/2, as in PyTorch. The
rules of Cholesky factors, eigenvalues and singular values take n⁴ operations and n³ memory for an n×n matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reductions import plus
from .registry import Node, Share, linear, needs, rule, saved


@rule("LinalgInvExBackward0")
def inverse(node: Node, g: Share, s: Share) -> Share:
    """Y = A⁻¹: ∂Y = −Y E Y, ∂²Y = 2 Y E Y E Y; s_A = (Y²)ᵀ s (Y²)ᵀ + 2 Yᵀ ∘ Yᵀ g Yᵀ"""
    y = saved(node, "inverse").mT
    share = None if s is None else y.square() @ s @ y.square()
    return plus(share, None if g is None else 2 * y * (y @ g @ y))


def solution_shares(node: Node, g: Share, s: Share, z: Tensor, vector: bool) -> list[Share]:
    """X = Z B or B Z: ∂X = −Z E X, ∂²X = 2 Z E Z E X in A."""
    x = saved(node, "result")
    left = saved(node, "left")
    if vector:
        x, g, s = (None if v is None else v.unsqueeze(-1) for v in (x, g, s))
    a, b = (z.mT, x.mT) if left else (x.mT, z.mT)
    shares: list[Share] = [None, None]
    if needs(node, 0):
        first = None if s is None else a.square() @ s @ b.square()
        shares[0] = plus(first, None if g is None else 2 * z.mT * (a @ g @ b))
    if needs(node, 1) and s is not None:
        share = z.mT.square() @ s if left else s @ z.mT.square()
        shares[1] = share.squeeze(-1) if vector else share
    return shares


@rule("LinalgSolveExBackward0", curved=(True, False))
def solve(node: Node, g: Share, s: Share) -> list[Share]:
    """A X = B: s_A = (Z²)ᵀ s (X²)ᵀ + 2 Zᵀ ∘ Zᵀ g Xᵀ, s_B = (Z²)ᵀ s; likewise for X A = B"""
    a, x = saved(node, "A"), saved(node, "result")
    return solution_shares(node, g, s, torch.linalg.inv(a), vector=x.dim() == a.dim() - 1)


@rule("LinalgSolveTriangularBackward0", curved=(True, False))
def solve_triangular(node: Node, g: Share, s: Share) -> list[Share]:
    """A X = B or X A = B with A triangular: as for any A, but only for the entries of the triangle"""
    a, upper, unit = saved(node, "self"), saved(node, "upper"), saved(node, "unitriangular")
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = torch.linalg.solve_triangular(a, identity.expand_as(a), upper=upper, unitriangular=unit)
    shares = solution_shares(node, g, s, z, vector=False)
    if shares[0] is not None:
        shares[0] = shares[0].triu(int(unit)) if upper else shares[0].tril(-int(unit))
    return shares


@linear("LinalgDetBackward0", curved=True, fan_out=False)  # only mixed second derivatives are not zero
def determinant(node: Node, s: Tensor) -> Share:
    """y = det A: ∂y = y Zᵀ, and linear in each entry"""
    y = node._input_metadata[0]
    first: Tensor = node(torch.ones(y.shape, dtype=y.dtype, device=y.device))
    return s[..., None, None] * first.square()


@rule("LinalgSlogdetBackward0", many=True, fan_out=False)
def log_determinant(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> Share:
    """y = log |det A|: ∂y = Zᵀ, ∂²y = −(Zᵀ)²; the sign is constant"""
    y = node._input_metadata[1]
    first: Tensor = node(None, torch.ones(y.shape, dtype=y.dtype, device=y.device))
    difference = s[1] if g[1] is None else plus(s[1], -g[1])
    return None if difference is None else difference[..., None, None] * first.square()


@rule("CholeskyBackward0", "LinalgCholeskyExBackward0")
def cholesky(node: Node, g: Share, s: Share) -> Share:
    """L Lᵀ = A, P = L⁻¹: ∂L = L N with N = Φ(P E Pᵀ), ∂²L = −2 L Φ(N Nᵀ); Φ halves the diagonal and zeros the upper triangle"""
    factor = saved(node, "result" if hasattr(node, "_saved_result") else "L")
    if saved(node, "upper"):
        factor, g, s = factor.mT, *(None if v is None else v.mT for v in (g, s))
    n = factor.shape[-1]
    p = torch.linalg.solve_triangular(
        factor, torch.eye(n, dtype=factor.dtype, device=factor.device).expand_as(factor), upper=False
    )
    weight = torch.ones_like(factor).tril() - torch.eye(n, dtype=factor.dtype, device=factor.device) / 2
    v = weight.mT.unsqueeze(-1) * p.unsqueeze(-3)  # (d, c, i): column d of N for E_ij is (v_i P_dj + v_j P_di)/2
    quadratic = torch.zeros_like(v)  # (d, i, j)
    if s is not None:
        columns = factor.unsqueeze(-3) @ v
        quadratic = quadratic + columns.mT @ (s.tril().mT.unsqueeze(-1) * columns) / 4
    if g is not None:
        form = weight * (factor.mT @ g.tril())
        quadratic = quadratic - v.mT @ (form + form.mT).unsqueeze(-3) @ v / 4
    of_one = quadratic.diagonal(dim1=-2, dim2=-1).mT @ p.square()  # (i, j)
    both = (quadratic * p.unsqueeze(-1) * p.unsqueeze(-2)).sum(-3)
    return of_one + of_one.mT + 2 * both


@rule("LinalgEighBackward0", many=True, used_outputs=(0,))
def symmetric_eigenvalues(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> Share:
    """∂λ_k = V_ik V_jk, ∂²λ_k = Σ_m (V_im V_jk + V_ik V_jm)² / 2 (λ_k − λ_m) over m ≠ k"""
    values, v = saved(node, "eigenvalues"), saved(node, "eigenvectors")
    squares, share = v.square(), None
    if (s_values := s[0]) is not None:
        share = (squares * s_values.unsqueeze(-2)) @ squares.mT
    if (slope := g[0]) is None:
        return share
    factor = slope.unsqueeze(-1) * reciprocal_gaps(values, values)
    one = squares @ factor @ squares.mT
    return plus(share, (one + one.mT) / 2 + products(v, v, factor))


@rule("LinalgSvdBackward0", many=True, used_outputs=(1,))
def singular_values(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> Share:
    """∂σ_k = U_ik V_jk; ∂²σ_k from the eigenvalues ±σ and 0 of the symmetric matrix [[0, A], [Aᵀ, 0]]"""
    values = saved(node, "S")
    u, v = saved(node, "U")[..., : values.shape[-1]], saved(node, "Vh").mT[..., : values.shape[-1]]
    u2, v2, share = u.square(), v.square(), None
    if (s_values := s[1]) is not None:
        share = (u2 * s_values.unsqueeze(-2)) @ v2.mT
    if (slope := g[1]) is None:
        return share
    minus, plus_ = reciprocal_gaps(values, values), (values.unsqueeze(-1) + values.unsqueeze(-2)).reciprocal()
    plus_ = plus_ - torch.diag_embed(plus_.diagonal(dim1=-2, dim2=-1))
    alike, crossed = (slope.unsqueeze(-1) * (minus + sign * plus_) for sign in (1, -1))
    second = (u2 @ alike @ v2.mT + u2 @ alike.mT @ v2.mT) / 2 + products(u, v, crossed)
    rest = slope / values
    second = second + (1 - u2.sum(-1, keepdim=True)) * (v2 @ rest.unsqueeze(-1)).mT
    return plus(share, second + (u2 @ rest.unsqueeze(-1)) * (1 - v2.sum(-1, keepdim=True)).mT)


def reciprocal_gaps(values: Tensor, others: Tensor) -> Tensor:
    """1/(λ_k − λ_m), and 0 for k = m"""
    gaps = values.unsqueeze(-1) - others.unsqueeze(-2)
    same = torch.eye(gaps.shape[-1], dtype=torch.bool, device=gaps.device)
    return torch.where(same, 0, gaps.masked_fill(same, 1).reciprocal())


def products(u: Tensor, v: Tensor, factor: Tensor) -> Tensor:
    """Σ_km F_km U_ik U_im V_jk V_jm"""
    pairs_u, pairs_v = ((x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) for x in (u, v))
    return (pairs_u * factor.flatten(-2).unsqueeze(-2)) @ pairs_v.mT


@rule("CholeskySolveBackward0", curved=(False, True))
def cholesky_solve(node: Node, g: Share, s: Share) -> list[Share]:
    """L Lᵀ X = B, W = L⁻ᵀ, Y = Lᵀ X: ∂X = −Z (E Lᵀ + L Eᵀ) X in L, with entries −(Z_ai Y_jb + W_aj X_ib); in B as for solve"""
    x, factor, upper = saved(node, "result"), saved(node, "input2"), saved(node, "upper")
    factor = factor.triu().mT if upper else factor.tril()
    n = factor.shape[-1]
    identity = torch.eye(n, dtype=factor.dtype, device=factor.device).expand_as(factor)
    w = torch.linalg.solve_triangular(factor, identity, upper=False).mT
    z = w @ w.mT
    shares: list[Share] = [z.square() @ s if needs(node, 0) and s is not None else None, None]
    if needs(node, 1):
        share = None
        if s is not None:
            y = factor.mT @ x
            with_x, with_y = ((m.mT.unsqueeze(-1) * v.unsqueeze(-2)).flatten(-2) for m, v in ((z, x), (w, y)))  # (i, a b)
            both = (with_x * s.flatten(-2).unsqueeze(-2)) @ with_y.mT
            share = z.square() @ s @ y.mT.square() + x.square() @ s.mT @ w.square() + 2 * both
        if g is not None:
            m = z @ g @ x.mT
            rows, columns = m @ factor, (factor.mT @ m).mT
            diagonal = (factor.mT @ rows).diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
            share = plus(share, 2 * (w * (rows + columns) + z.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * diagonal))
        assert share is not None
        shares[1] = share.mT.triu() if upper else share.tril()
    return shares
