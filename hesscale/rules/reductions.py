"""Reductions and running reductions: sums, means, products, variances, norms, extrema."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import Node, Share, chain, dimension, linear, needs, rule, saved


def axes(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """The reduced dimensions in ascending order; all dimensions if none are given."""
    if dims is None or rank == 0:
        return tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted(dimension(d, rank) for d in dims)) or tuple(range(rank))


def restored(value: Any, dims: tuple[int, ...], keepdim: bool) -> Any:
    """A reduced tensor with the reduced dimensions restored with size 1; None stays None."""
    if keepdim or value is None:
        return value
    for d in dims:
        value = value.unsqueeze(d)
    return value


def filled(share: Share, shape: Sequence[int]) -> Share:
    return None if share is None else share.expand(shape)


def plus(a: Share, b: Share) -> Share:
    return b if a is None else a if b is None else a + b


# sums and means


@linear("SumBackward0", fan_out=False)
def sum_all(node: Node, s: Tensor) -> Share:
    """J = 1"""
    return s.expand(saved(node, "self_sym_sizes"))


@linear("SumBackward1", fan_out=False)
def sum_dims(node: Node, s: Tensor) -> Share:
    """J = 1"""
    shape = saved(node, "self_sym_sizes")
    return filled(restored(s, axes(saved(node, "dim"), len(shape)), saved(node, "keepdim")), shape)


@linear("NansumBackward0", fan_out=False)
def nansum(node: Node, s: Tensor) -> Share:
    """J = 1, and 0 where x is nan"""
    x = saved(node, "self")
    return torch.where(x.isnan(), 0, restored(s, axes(saved(node, "dim"), x.dim()), saved(node, "keepdim")))


@linear("MeanBackward0", fan_out=False)
def mean_all(node: Node, s: Tensor) -> Share:
    """J = 1/n"""
    return (s / saved(node, "self_sym_numel") ** 2).expand(saved(node, "self_sym_sizes"))


@linear("MeanBackward1", fan_out=False)
def mean_dims(node: Node, s: Tensor) -> Share:
    """J = 1/n"""
    shape = saved(node, "self_sym_sizes")
    dims = axes(saved(node, "dim"), len(shape))
    return filled(restored(s / size(shape, dims) ** 2, dims, saved(node, "keepdim")), shape)


def size(shape: Sequence[int], dims: tuple[int, ...]) -> int:
    return math.prod(shape[d] for d in dims)


@linear("CumsumBackward0")
def cumsum(node: Node, s: Tensor) -> Share:
    """y_k = Σ_{i≤k} x_i: Σ_{k≥i} s_k"""
    dim = dimension(saved(node, "dim"), s.dim())
    return s.flip(dim).cumsum(dim).flip(dim) if s.dim() else s


# products


@rule("ProdBackward0", fan_out=False)
def prod_all(node: Node, g: Share, s: Share) -> Share:
    """∂y/∂x_i = Π_{j≠i} x_j, ∂²y/∂x_i² = 0"""
    x = saved(node, "self")
    return None if s is None else s * product_of_others(x.reshape(-1)).square().reshape(x.shape)


@rule("ProdBackward1", fan_out=False)
def prod_dim(node: Node, g: Share, s: Share) -> Share:
    """∂y/∂x_i = Π_{j≠i} x_j, ∂²y/∂x_i² = 0"""
    if s is None:
        return None
    x = saved(node, "self")
    if x.dim() == 0:
        return s
    dim = dimension(saved(node, "dim"), x.dim())
    s = s if saved(node, "keepdim") else s.unsqueeze(dim)
    return s * product_of_others(x.movedim(dim, -1)).square().movedim(-1, dim)


def product_of_others(x: Tensor) -> Tensor:
    """Π_{j≠i} x_j along the last dimension, as a product of cumulative products from both ends, to avoid division by zero."""
    if x.shape[-1] == 0:
        return x
    before = F.pad(x, (1, -1), value=1).cumprod(-1)
    after = F.pad(x, (-1, 1), value=1).flip(-1).cumprod(-1).flip(-1)
    return before * after


@rule("CumprodBackward0")
def cumprod(node: Node, g: Share, s: Share) -> Share:
    """y_{i−1}² R_i with R_i = s_i + x_{i+1}² R_{i+1}, since ∂y_k/∂x_i = y_{i−1} Π_{i<j≤k} x_j; n log n time"""
    x = saved(node, "self")
    if s is None or x.dim() == 0 or x.numel() == 0:
        return s
    dim = dimension(saved(node, "dim"), x.dim())
    x, y, s = (to_last(t, dim) for t in (x, saved(node, "result"), s))
    before = F.pad(y, (1, -1), value=1).square()
    share = before * suffix_sums(s, F.pad(x, (-1, 1)).square())
    return torch.where(before == 0, 0, share).movedim(-1, dim)


def to_last(value: Any, dim: int) -> Any:
    return None if value is None else value.movedim(dim, -1)


def suffix_sums(values: Tensor, factors: Tensor) -> Tensor:
    """R_i = v_i + f_i R_{i+1} along the last dimension, by a parallel scan with log₂ n doublings."""
    reach = 1
    while reach < values.shape[-1]:
        values = values + factors * F.pad(values, (-reach, reach))
        factors = factors * F.pad(factors, (-reach, reach))
        reach *= 2
    return values


# sums of exponentials


@rule("LogsumexpBackward0", fan_out=False)
def logsumexp(node: Node, g: Share, s: Share) -> Share:
    """q = exp(x − y): ∂y/∂x_i = q_i, ∂²y/∂x_i² = q_i − q_i²"""
    x = saved(node, "self")
    dims, keepdim = axes(saved(node, "dim"), x.dim()), saved(node, "keepdim")
    y, g, s = (restored(t, dims, keepdim) for t in (saved(node, "result"), g, s))
    q = torch.where(y.isinf(), 0, (x - y).exp())
    return chain(q, q - q * q, g, s)


@rule("LogcumsumexpBackward0")
def logcumsumexp(node: Node, g: Share, s: Share) -> Share:
    """q_ki = exp(x_i − y_k): Σ_{k≥i} s_k q_ki² + g_k (q_ki − q_ki²), in n log n time"""
    x, y = saved(node, "self"), saved(node, "result")
    dim = dimension(saved(node, "dim"), x.dim())
    if x.dim() == 0 or x.numel() == 0:
        return s
    x, y, g, s = (to_last(t, dim) for t in (x, y, g, s))
    empty_so_far = y.isneginf()
    q = torch.where(empty_so_far, 0, (x - y).exp())
    # q_ki = q_ii exp(y_i − y_{i+1}) … exp(y_{k−1} − y_k), with no factor above 1
    step = torch.where(empty_so_far, 0, F.pad((y[..., :-1] - y[..., 1:]).exp(), (0, 1)))
    share = None if s is None else q * q * suffix_sums(s, step * step)
    if g is not None:
        share = plus(share, q * suffix_sums(g, step) - q * q * suffix_sums(g, step * step))
    return None if share is None else share.movedim(-1, dim)


# variances


@rule("VarBackward0", fan_out=False)
def var(node: Node, g: Share, s: Share) -> Share:
    """∂y/∂x_i = 2 (x_i − x̄)/(n − c), ∂²y/∂x_i² = 2 (1 − 1/n)/(n − c)"""
    return spread(node, (g, None), (s, None))


@rule("StdBackward0", fan_out=False)
def std(node: Node, g: Share, s: Share) -> Share:
    """∂y/∂x_i = (x_i − x̄)/((n − c) y), ∂²y/∂x_i² = ((1 − 1/n)/(n − c) − (∂y/∂x_i)²)/y; zero at y = 0"""
    return spread(node, (g, None), (s, None), root="result")


@rule("VarMeanBackward0", many=True)
def var_mean(node: Node, g: tuple[Share, Share], s: tuple[Share, Share]) -> Share:
    """the sum of the rules of var and mean"""
    return spread(node, g, s)


@rule("StdMeanBackward0", many=True)
def std_mean(node: Node, g: tuple[Share, Share], s: tuple[Share, Share]) -> Share:
    """the sum of the rules of std and mean"""
    return spread(node, g, s, root="result0")


def spread(node: Node, g: tuple[Share, Share], s: tuple[Share, Share], root: str | None = None) -> Share:
    """The input's share for the outputs (variance or its root, mean)."""
    x = saved(node, "self")
    dims = axes(saved(node, "dim"), x.dim())
    keepdim = saved(node, "keepdim")
    gradient, curvature, curvature_of_mean = (restored(t, dims, keepdim) for t in (g[0], s[0], s[1]))
    count = size(x.shape, dims)
    correction = saved(node, "correction")
    freedom = count - (1 if correction is None else correction)
    share = None
    if freedom > 0 and (gradient is not None or curvature is not None):
        first, second = (x - x.mean(dims, keepdim=True)) / freedom, (1 - 1 / count) / freedom
        if root is None:
            share = chain(2 * first, 2 * second, gradient, curvature)
        else:
            y = restored(saved(node, root), dims, keepdim)
            y = torch.where(y == 0, torch.inf, y)
            first = first / y
            share = chain(first, (second - first * first) / y, gradient, curvature)
    if curvature_of_mean is not None:
        share = plus(share, curvature_of_mean / count**2)
    return filled(share, x.shape)


# norms


@rule("LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "NormBackward2", "NormBackward3", fan_out=False)
def norm(node: Node, g: Share, s: Share) -> Share:
    """r = |x|/y: ∂y/∂x_i = ± r_i^(p−1), ∂²y/∂x_i² = (p − 1)(r_i^(p−2) − (∂y/∂x_i)²)/y; zero at y = 0"""
    x, p = saved(node, "self"), exponent(node)
    everything = node.name() in ("NormBackward0", "NormBackward2")
    dims = axes(None if everything else saved(node, "dim"), x.dim())
    keepdim = not everything and saved(node, "keepdim")
    y, g, s = (restored(t, dims, keepdim) for t in (saved(node, "result"), g, s))
    first, ratio = norm_slopes(x, y, p, dims)
    return chain(first, norm_curvature(first, ratio, y, p), g, s)


def exponent(node: Node) -> float:
    p = saved(node, "ord" if node.name() == "LinalgVectorNormBackward0" else "p")
    return 2.0 if p is None else float(p)


def norm_slopes(x: Tensor, y: Tensor, p: float, dims: tuple[int, ...]) -> tuple[Share, Share]:
    """∂y/∂x_i, and r_i^(p−2) if the norm is curved; both are zero at singular points."""
    if p == 0:
        return None, None
    if p == 1:
        return x.sgn(), None
    if math.isinf(p):
        largest = x.abs() == y
        return x.sgn() * largest / largest.sum(dims, keepdim=True), None
    singular = (y == 0) if p >= 2 else (y == 0) | (x == 0)
    r = torch.where(singular, 1, x.abs() / y)
    return torch.where(singular, 0, x.sgn() * r ** (p - 1)), torch.where(singular, 0, r ** (p - 2))


def norm_curvature(first: Share, ratio: Share, y: Tensor, p: float) -> Share:
    """∂²y/∂x² = (p − 1)(Σ r^(p−2) − (Σ ∂y/∂x)²)/y, with sums over the entries that are the same variable"""
    if first is None or ratio is None:
        return None
    return (p - 1) * (ratio - first * first) / torch.where(y == 0, torch.inf, y)


@rule("DistBackward0", fan_out=False)
def dist(node: Node, g: Share, s: Share) -> list[Share]:
    """y = ‖a − b‖: the rule of the norm; an entry of a broadcast input changes several differences"""
    a, b, y, p = saved(node, "self"), saved(node, "other"), saved(node, "result"), exponent(node)
    difference = (a - b).to(node._input_metadata[0].dtype).to(y.dtype)  # rounded as in the forward pass, to find ties
    first, ratio = norm_slopes(difference, y, p, axes(None, difference.dim()))

    def share(shape: torch.Size) -> Share:
        slope, summed = (None if t is None else t.sum_to_size(shape) for t in (first, ratio))
        return chain(slope, norm_curvature(slope, summed, y, p), g, s)

    return [share(t.shape) if needs(node, i) else None for i, t in enumerate((a, b))]


@rule("RenormBackward0")
def renorm(node: Node, g: Share, s: Share) -> Share:
    """y = M x h with h = 1/(‖x‖ + ε) where ‖x‖ > M: M² (s (h² + 2 h x h') + h'² Σ_k s_k x_k²) + M (2 g h' + h'' Σ_k g_k x_k)"""
    x, p, limit = saved(node, "self"), exponent(node), saved(node, "maxnorm")
    kept = dimension(saved(node, "dim"), x.dim())
    dims = tuple(d for d in range(x.dim()) if d != kept)
    length = torch.linalg.vector_norm(x, p, dims, keepdim=True)
    first, ratio = norm_slopes(x, length, p, dims)
    second = norm_curvature(first, ratio, length, p)
    h = 1 / (length + 1e-7)
    h1 = torch.zeros_like(x) if first is None else -first * h**2
    h2 = 2 * h1 * h1 / h - (0 if second is None else second * h**2)
    share = None
    if s is not None:
        share = limit**2 * (s * (h**2 + 2 * h * x * h1) + h1**2 * (s * x * x).sum(dims, keepdim=True))
    if g is not None:
        share = plus(share, limit * (2 * g * h1 + h2 * (g * x).sum(dims, keepdim=True)))
    return None if share is None else torch.where(length > limit, share, 0 if s is None else s)


# extrema


@linear("MaxBackward1", "MinBackward1", "AmaxBackward0", "AminBackward0", fan_out=False)
def extremum(node: Node, s: Tensor) -> Share:
    """J = 1/k at the k entries that tie, else 0"""
    everything = node.name() in ("MaxBackward1", "MinBackward1")
    return tied(node, s, "result", None if everything else saved(node, "dim"), not everything and saved(node, "keepdim"))


@linear("AminmaxBackward0", many=True)
def aminmax(node: Node, s: tuple[Share, Share]) -> Share:
    """J = 1/k at the k entries that tie, for the smallest and for the largest"""
    dims, keepdim = saved(node, "dim"), saved(node, "keepdim")
    low, high = (None if t is None else tied(node, t, name, dims, keepdim) for t, name in zip(s, ("min", "max"), strict=True))
    return plus(low, high)


def tied(node: Node, s: Tensor, result: str, dims: int | Sequence[int] | None, keepdim: bool) -> Tensor:
    x = saved(node, "self")
    reduced = axes(dims, x.dim())
    ties = x == restored(saved(node, result), reduced, keepdim)
    share: Tensor = restored(s, reduced, keepdim) / ties.sum(reduced, keepdim=True).square() * ties
    return share


@linear("MaxBackward0", "MinBackward0", fan_in=False, fan_out=False)
def selected(node: Node, s: Tensor) -> Share:
    """J = 1 at the chosen index"""
    shape, index = saved(node, "self_sym_sizes"), saved(node, "indices")
    dim = dimension(saved(node, "dim"), len(shape))
    if shape and not saved(node, "keepdim"):
        s, index = s.unsqueeze(dim), index.unsqueeze(dim)
    return s.new_zeros(shape).scatter(dim, index, s)


@linear("CummaxBackward0", "CumminBackward0", fan_in=False)
def running_extremum(node: Node, s: Tensor) -> Share:
    """J = 1 at the index of the running extremum; each entry gets the sum of its shares"""
    index = saved(node, "indices")
    return torch.zeros_like(s).scatter_add(dimension(saved(node, "dim"), s.dim()), index, s)
