"""Complex tensors: for each entry, rules propagate the 2×2 Hessian in its real and imaginary part, as three real numbers.

To second order, the loss changes by ½ (τ |dz|² + Re κ dz²) at an entry z, where τ = (s_re + s_im)/2 and
κ = (s_re − s_im)/2 − i s_mixed. The diagonal s of a complex tensor contains (τ, Re κ, Im κ) along an additional dimension. Under
w = c z, they become |c|² τ and c² κ. A real x has s_x = τ + Re κ. Mixed derivatives of two entries are left out, as in all rules.

Every operator that maps complex to real tensors is a contraction, so the head of a model contains no complex tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .elementwise import operand
from .registry import COMPLEX, Node, Share, linear, needs, rule, saved


def is_complex(node: Node, index: int) -> bool:
    """Whether input ``index`` is a complex tensor."""
    child, number = node.next_functions[index]
    return bool(child._input_metadata[number].dtype.is_complex)


def unpacked(s: Tensor) -> tuple[Tensor, Tensor]:
    """(τ, κ) from the diagonal of a complex tensor."""
    s = s.float() if s.dtype.itemsize < 4 else s  # complex numbers need at least single precision
    return s[..., 0], torch.complex(s[..., 1], s[..., 2])


def packed(tau: Tensor, kappa: Tensor) -> Tensor:
    """The diagonal of a complex tensor."""
    return torch.stack([tau, kappa.real, kappa.imag], -1)


def times(factor: Tensor, tau: Tensor, kappa: Tensor, to_complex: bool) -> Tensor:
    """The share of z, or of a real x, under w = c z."""
    squares = factor.abs().square()
    tau, kappa = squares * tau, factor.square() * kappa
    return packed(tau, kappa) if to_complex else tau + kappa.real


def by_components(*names: str, many: bool = False) -> None:
    """Register operators that only move entries: their own backward, applied to τ, Re κ and Im κ separately."""

    def apply(node: Node, s: Any) -> Any:
        given = [None if v is None else unpacked(v) for v in (s if many else (s,))]
        taus = node(*[None if v is None else torch.complex(v[0], torch.zeros_like(v[0])) for v in given])
        kappas = node(*[None if v is None else v[1] for v in given])
        if isinstance(taus, Tensor):
            return packed(taus.real, kappas)
        return [None if tau is None else packed(tau.real, kappa) for tau, kappa in zip(taus, kappas, strict=True)]

    apply.__doc__ = "each entry's three numbers, as in a real tensor"
    linear(*names, table=COMPLEX, joint=False, mixed=False, many=many)(apply)


by_components(
    *("CatBackward0", "CloneBackward0", "ConstantPadNdBackward0", "ExpandBackward0", "FlipBackward0", "PermuteBackward0"),
    *("RepeatBackward0", "ReshapeAliasBackward0", "RollBackward0", "SelectBackward0", "SliceBackward0", "SqueezeBackward0"),
    *("SqueezeBackward1", "SqueezeBackward2", "SqueezeBackward4", "StackBackward0"),
    *("TBackward0", "TransposeBackward0", "TransposeBackward1", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0"),
)
by_components("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0", many=True)


@linear("ViewAsRealBackward0", table=COMPLEX, contraction=True)
def view_as_real(node: Node, s: Tensor) -> Tensor:
    """y = (re z, im z): τ = (s_re + s_im)/2, κ = (s_re − s_im)/2"""
    tau, kappa = s.sum(-1) / 2, (s[..., 0] - s[..., 1]) / 2
    return torch.stack([tau, kappa, torch.zeros_like(tau)], -1)


@linear("ViewAsComplexBackward0", table=COMPLEX)
def view_as_complex(node: Node, s: Tensor) -> Tensor:
    """z = x₀ + i x₁: τ ± Re κ"""
    return torch.stack([s[..., 0] + s[..., 1], s[..., 0] - s[..., 1]], -1)


@linear(
    "ToCopyBackward0",
    table=COMPLEX,
    refuse=lambda node: REAL_OF_COMPLEX if not node._input_metadata[0].dtype.is_complex else None,
)
def to_complex(node: Node, s: Tensor) -> Tensor:
    """z = x in another dtype: τ and κ are unchanged, or τ + Re κ for a real x"""
    return s if is_complex(node, 0) else s[..., 0] + s[..., 1]


REAL_OF_COMPLEX = "a complex tensor is cast to a real one. Take its .real instead"


@linear("ComplexBackward0", table=COMPLEX, mixed=False)
def from_parts(node: Node, s: Tensor) -> list[Share]:
    """z = a + i b: τ + Re κ for a, τ − Re κ for b"""
    return [s[..., 0] + s[..., 1] if needs(node, 0) else None, s[..., 0] - s[..., 1] if needs(node, 1) else None]


@linear("ConjBackward0", "ConjPhysicalBackward0", table=COMPLEX)
def conjugate(node: Node, s: Tensor) -> Tensor:
    """w = z̄: κ̄"""
    return torch.stack([s[..., 0], s[..., 1], -s[..., 2]], -1)


@linear("NegBackward0", table=COMPLEX)
def same_entries(node: Node, s: Tensor) -> Tensor:
    """w = ±z: τ and κ are unchanged"""
    return s


@linear("AddBackward0", "SubBackward0", table=COMPLEX, mixed=False)
def add(node: Node, s: Tensor) -> list[Share]:
    """w = a ± α b: α² τ, α² κ for b"""
    tau, kappa = unpacked(s)
    factors = [kappa.new_full((), factor) for factor in (1, saved(node, "alpha"))]
    return [
        times(factor, tau, kappa, is_complex(node, i)) if needs(node, i) else None
        for i, factor in enumerate(factors[: len(node.next_functions)])
    ]


@linear("MulBackward0", table=COMPLEX)
def multiply(node: Node, s: Tensor) -> list[Share]:
    """w = a b: |b|² τ, b² κ for a; likewise for b"""
    tau, kappa = unpacked(s)
    return [
        times(operand(node, other), tau, kappa, is_complex(node, i)) if needs(node, i) else None
        for i, other in enumerate(("other", "self")[: len(node.next_functions)])
    ]


@linear("MmBackward0", "BmmBackward0", table=COMPLEX, contraction=True)
def matrix_product(node: Node, s: Tensor) -> list[Share]:
    """W = A B: τ (|B|²)ᵀ, κ (B²)ᵀ for A; likewise for B"""
    tau, kappa = unpacked(s)
    shares: list[Share] = [None, None]
    if needs(node, 0):
        b = saved(node, "mat2").to(kappa.dtype)
        shares[0] = packed(tau @ b.abs().square().mT, kappa @ b.square().mT)
    if needs(node, 1):
        a = saved(node, "self").to(kappa.dtype)
        shares[1] = packed(a.abs().square().mT @ tau, a.square().mT @ kappa)
    return shares


@linear("SumBackward0", "SumBackward1", table=COMPLEX)
def total(node: Node, s: Tensor) -> Tensor:
    """w = Σ z: τ and κ are unchanged, for every term"""
    tau, kappa = unpacked(s)
    return packed(node(torch.complex(tau, torch.zeros_like(tau))).real, node(kappa))


@rule("AbsBackward0", table=COMPLEX, contraction=True)
def absolute(node: Node, g: Share, s: Share) -> Share:
    """y = |z|, u = z/|z|: τ = (s + g/|z|)/2, κ = ū² (s − g/|z|)/2"""
    z = saved(node, "self")
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    size = z.abs()
    direction = torch.where(size > 0, z / size, 0).conj().square()
    bend = None if g is None else torch.where(size > 0, g / size, 0)
    along = None if s is None else s.to(size.dtype) * (size > 0)
    if along is None:
        return None if bend is None else packed(bend / 2, -direction * bend / 2)
    if bend is None:
        return packed(along / 2, direction * along / 2)
    return packed((along + bend) / 2, direction * (along - bend) / 2)
