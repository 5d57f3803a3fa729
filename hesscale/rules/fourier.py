"""Fourier transforms. The entries of their matrices are c ω^{jk}, so the squared entries are again those of such a transform.

τ and κ are the curvature of a complex tensor; see ``complex_numbers``. A transform A has |A_kj|² = c², and
Σ_k κ_k A_kj² = c² Σ_k κ_k ω^{2jk}, which is the transform of κ at twice the frequency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .complex_numbers import packed, unpacked
from .registry import COMPLEX, Node, dimension, linear, saved


def dims_of(node: Node, rank: int) -> list[int]:
    return [dimension(d, rank) for d in saved(node, "dim")]


def squared_scale(node: Node, sizes: Sequence[int], dims: Sequence[int]) -> float:
    """c². The saved normalization is 0 for none, 1 for 1/√n, and 2 for 1/n."""
    return float(math.prod(sizes[d] for d in dims)) ** -int(saved(node, "normalization"))


def at_twice_the_frequency(transformed: Tensor, dims: Sequence[int]) -> Tensor:
    """The entries 2j mod n, for every j, along these dimensions."""
    for d in dims:
        n = transformed.shape[d]
        transformed = transformed.index_select(d, torch.arange(n, device=transformed.device) * 2 % n)
    return transformed


@linear("FftC2CBackward0", table=COMPLEX, contraction=True)
def complex_to_complex(node: Node, s: Tensor) -> Tensor:
    """τ_z = c² Σ τ, κ_z = c² F(κ) at twice the frequency"""
    tau, kappa = unpacked(s)
    dims = dims_of(node, tau.dim())
    if not dims:
        return packed(tau, kappa)
    transform = torch.fft.fftn(kappa, dim=dims) if saved(node, "forward") else torch.fft.ifftn(kappa, dim=dims, norm="forward")
    scale = squared_scale(node, tau.shape, dims)
    return packed(tau.sum(dims, keepdim=True).expand_as(tau) * scale, at_twice_the_frequency(transform, dims) * scale)


@linear("FftR2CBackward0", table=COMPLEX, contraction=True)
def real_to_complex(node: Node, s: Tensor) -> Tensor:
    """s_x = c² (Σ τ + Re F(κ) at twice the frequency)"""
    tau, kappa = unpacked(s)
    x = saved(node, "self")
    dims, last = dims_of(node, x.dim()), dimension(saved(node, "dim")[-1], x.dim())
    missing = x.shape[last] - kappa.shape[last]  # the frequencies that a one-sided transform leaves out
    if missing:
        kappa = functional.pad(kappa.movedim(last, -1), (0, missing)).movedim(-1, last)
    transform = at_twice_the_frequency(torch.fft.fftn(kappa, dim=dims), dims).real
    return (tau.sum(dims, keepdim=True) + transform) * squared_scale(node, x.shape, dims)


@linear("FftC2RBackward0", table=COMPLEX, contraction=True)
def complex_to_real(node: Node, s: Tensor) -> Tensor:
    """m = 1 for the frequencies 0 and n/2, else 2: τ = c² m² Σ s / 2, κ = c² m² F̄(s) at twice the frequency / 2"""
    s = s.float() if s.dtype.itemsize < 4 else s
    dims, last = dims_of(node, s.dim()), dimension(saved(node, "dim")[-1], s.dim())
    n = s.shape[last]
    half = n // 2 + 1
    times = torch.full((half,), 2.0, dtype=s.dtype, device=s.device)
    edges = torch.tensor([0, n // 2] if n % 2 == 0 else [0], device=s.device)
    weight = times.index_fill(0, edges, 1.0).square() * (squared_scale(node, s.shape, dims) / 2)
    weight = weight.reshape(-1, *[1] * (s.dim() - 1 - last))
    kappa = at_twice_the_frequency(torch.fft.fftn(s, dim=dims), dims).conj().narrow(last, 0, half) * weight
    tau = s.sum(dims, keepdim=True) * weight
    return packed(tau.expand(kappa.shape), kappa)
