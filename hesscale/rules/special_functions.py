"""Exponential, logarithmic, trigonometric and special functions of one or two numbers: s_x = f'² s + f'' g."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .elementwise import Pair, finite, operand, scale
from .registry import (
    ONE_TO_ONE,
    REFUSED,
    Final,
    Node,
    Share,
    Shares,
    chain,
    elementwise,
    elementwise_auto,
    linear,
    needs,
    rule,
    saved,
)

LN2, LN10 = math.log(2), math.log(10)

for sampler in ("StandardGammaBackward", "_DirichletBackward"):
    REFUSED[sampler] = (
        "PyTorch cannot differentiate Gamma, Beta, Chi2, StudentT or Dirichlet samples twice. Detach the sample, or use sample() "
        "with log_prob() in place of rsample()"
    )


# Exponentials and logarithms


@rule("ExpBackward0", **ONE_TO_ONE)
def exp(node: Node, g: Share, s: Share) -> Share:
    """f' = f'' = y: y (y s + g)"""
    y = saved(node, "result")
    if g is None or s is None:
        return chain(y, y, g, s)
    return torch.addcmul(g, y, s).mul_(y)


@elementwise("Exp2Backward0")
def exp2(node: Node) -> Pair:
    """f' = y log 2, f'' = y log² 2"""
    y = saved(node, "result")
    return y * LN2, y * LN2**2


@elementwise("Expm1Backward0")
def expm1(node: Node) -> Pair:
    """f' = f'' = y + 1"""
    first = saved(node, "result") + 1
    return first, first


@elementwise("LogBackward0")
def log(node: Node) -> Pair:
    """f' = 1/x, f'' = −f'²"""
    first = finite(saved(node, "self").reciprocal())
    return first, -first * first


@elementwise("Log2Backward0")
def log2(node: Node) -> Pair:
    """f' = 1/(x log 2), f'' = −f'² log 2"""
    first = finite((saved(node, "self") * LN2).reciprocal_())
    return first, first * first * -LN2


@elementwise("Log10Backward0")
def log10(node: Node) -> Pair:
    """f' = 1/(x log 10), f'' = −f'² log 10"""
    first = finite((saved(node, "self") * LN10).reciprocal_())
    return first, first * first * -LN10


@elementwise("Log1PBackward0")
def log1p(node: Node) -> Pair:
    """f' = 1/(1 + x), f'' = −f'²"""
    first = finite((saved(node, "self") + 1).reciprocal_())
    return first, -first * first


@elementwise("LogitBackward0")
def logit(node: Node) -> Pair:
    """f' = 1/(x (1 − x)), f'' = (2x − 1) f'²; 0 where x is clamped"""
    x, eps = saved(node, "self"), saved(node, "eps")
    first = finite((x - x * x).reciprocal_())
    if eps is not None:
        first = first.masked_fill((x < eps) | (x > 1 - eps), 0)
    return first, (2 * x - 1) * first * first


@elementwise("LogaddexpBackward0", "Logaddexp2Backward0")
def logaddexp(node: Node) -> list[Pair | None]:
    """y = log(eᵃ + eᵇ): f'_a = σ(a − b), f''_a = f'_a f'_b; likewise for b; in base 2, log 2 times a, b and f''"""
    rate = LN2 if node.name() == "Logaddexp2Backward0" else 1
    first = finite(torch.sigmoid((operand(node, "self") - operand(node, "other")) * rate))
    second = first * (1 - first) * rate
    return [(first, second) if needs(node, 0) else None, (1 - first, second) if needs(node, 1) else None]


@elementwise("XlogyBackward0", "SpecialXlog1PyBackward0", curved=(False, True))
def xlogy(node: Node) -> list[Pair | None]:
    """z = x log y: f'_x = log y; f'_y = x/y, f''_y = −x/y²; with 1 + y for y in xlog1py"""
    x, y = operand(node, "self"), operand(node, "other")
    y = y if node.name() == "XlogyBackward0" else y + 1
    of_x = (finite(torch.log(y)), None) if needs(node, 0) else None
    if not needs(node, 1):
        return [of_x, None]
    inverse = finite(1 / y)
    return [of_x, (x * inverse, -x * inverse * inverse)]


@elementwise("XlogyBackward1", "SpecialXlog1PyBackward1")
def number_logy(node: Node) -> Pair:
    """z = c log y: f' = c/y, f'' = −c/y²; with 1 + y for y in xlog1py"""
    c, y = saved(node, "self"), saved(node, "other")
    inverse = finite(1 / (y if node.name() == "XlogyBackward1" else y + 1))
    return c * inverse, -c * inverse * inverse


@linear("XlogyBackward2", "SpecialXlog1PyBackward2", **ONE_TO_ONE)
def xlog_number(node: Node, s: Tensor) -> Share:
    """z = x log c: f' = log c; with 1 + c for c in xlog1py"""
    c = saved(node, "other") + (0 if node.name() == "XlogyBackward2" else 1)
    return scale(s, math.log(c)) if c > 0 else None


@elementwise("SpecialEntrBackward0")
def entr(node: Node) -> Pair:
    """y = −x log x: f' = −1 − log x, f'' = −1/x"""
    x = saved(node, "self")
    return finite(-1 - torch.log(x)), finite(-1 / x)


@elementwise("LdexpBackward0", curved=(False, True))
def ldexp(node: Node) -> list[Pair | None]:
    """y = a 2ᵇ: f'_a = 2ᵇ; f'_b = y log 2, f''_b = y log² 2"""
    of_mantissa = (torch.exp2(operand(node, "other")), None) if needs(node, 0) else None
    if not needs(node, 1):
        return [of_mantissa, None]
    y = saved(node, "result")
    return [of_mantissa, (y * LN2, y * LN2**2)]


# Trigonometric and hyperbolic functions


@elementwise("SinBackward0")
def sin(node: Node) -> Pair:
    """f' = cos x, f'' = −sin x"""
    x = saved(node, "self")
    return torch.cos(x), torch.sin(x).neg_()


@elementwise("CosBackward0")
def cos(node: Node) -> Pair:
    """f' = −sin x, f'' = −cos x"""
    x = saved(node, "self")
    return torch.sin(x), torch.cos(x).neg_()  # the sign of f' does not matter, since it is squared


@elementwise("TanBackward0")
def tan(node: Node) -> Pair:
    """f' = 1 + y², f'' = 2y f'"""
    y = saved(node, "result")
    first = 1 + y * y
    return first, 2 * y * first


@elementwise("AsinBackward0")
def asin(node: Node) -> Pair:
    """f' = 1/√(1 − x²), f'' = x f'³"""
    x = saved(node, "self")
    first = finite(torch.rsqrt(1 - x * x))
    return first, x * first * first * first


@elementwise("AcosBackward0")
def acos(node: Node) -> Pair:
    """f' = −1/√(1 − x²), f'' = x f'³"""
    x = saved(node, "self")
    first = finite(-torch.rsqrt(1 - x * x))
    return first, x * first * first * first


@elementwise("AtanBackward0")
def atan(node: Node) -> Pair:
    """f' = 1/(1 + x²), f'' = −2x f'²"""
    x = saved(node, "self")
    first = 1 / (1 + x * x)
    return first, -2 * x * first * first


@elementwise("Atan2Backward0")
def atan2(node: Node) -> list[Pair | None]:
    """y = atan2(a, b), r = a² + b²: f'_a = b/r, f'_b = −a/r, f''_a = −f''_b = −2ab/r²"""
    a, b = operand(node, "self"), operand(node, "other")
    inverse = finite(1 / (a * a + b * b))
    of_a, of_b = b * inverse, -a * inverse
    second = 2 * of_a * of_b
    return [(of_a, second) if needs(node, 0) else None, (of_b, -second) if needs(node, 1) else None]


@elementwise("SinhBackward0")
def sinh(node: Node) -> Pair:
    """f' = cosh x, f'' = sinh x"""
    x = saved(node, "self")
    return torch.cosh(x), torch.sinh(x)


@elementwise("CoshBackward0")
def cosh(node: Node) -> Pair:
    """f' = sinh x, f'' = cosh x"""
    x = saved(node, "self")
    return torch.sinh(x), torch.cosh(x)


@elementwise("AsinhBackward0")
def asinh(node: Node) -> Pair:
    """f' = 1/√(1 + x²), f'' = −x f'³"""
    x = saved(node, "self")
    first = torch.rsqrt(1 + x * x)
    return first, -x * first * first * first


@elementwise("AcoshBackward0")
def acosh(node: Node) -> Pair:
    """f' = 1/√(x² − 1), f'' = −x f'³"""
    x = saved(node, "self")
    first = finite(torch.rsqrt(x * x - 1))
    return first, -x * first * first * first


@elementwise("AtanhBackward0")
def atanh(node: Node) -> Pair:
    """f' = 1/(1 − x²), f'' = 2x f'²"""
    x = saved(node, "self")
    first = finite(1 / (1 - x * x))
    return first, 2 * x * first * first


@elementwise("SincBackward0")
def sinc(node: Node) -> Pair:
    """u = πx, y = sin u/u: f' = π (cos u − y)/u, f'' = −π² y − 2π f'/u; by its series near 0"""
    u = saved(node, "self") * math.pi
    near = u.abs() < torch.finfo(u.dtype).eps ** (1 / 6)
    v = u.masked_fill(near, 1)
    y = torch.sin(v) / v
    first = (torch.cos(v) - y) / v
    second = -y - 2 * first / v
    square = u * u
    first = torch.where(near, u * (square / 30 - 1 / 3), first)
    second = torch.where(near, square / 10 - 1 / 3, second)
    return math.pi * first, math.pi**2 * second


# Special functions


@elementwise("ErfBackward0")
def erf(node: Node) -> Pair:
    """f' = 2/√π exp(−x²), f'' = −2x f'"""
    x = saved(node, "self")
    first = torch.exp(-x * x) * (2 / math.sqrt(math.pi))
    return first, -2 * x * first


@elementwise("ErfcBackward0")
def erfc(node: Node) -> Pair:
    """f' = −2/√π exp(−x²), f'' = −2x f'"""
    x = saved(node, "self")
    first = torch.exp(-x * x) * (-2 / math.sqrt(math.pi))
    return first, -2 * x * first


@elementwise("SpecialErfcxBackward0")
def erfcx(node: Node) -> Pair:
    """y = exp(x²) erfc x: f' = 2xy − 2/√π, f'' = 2y + 2x f'"""
    x, y = saved(node, "self"), saved(node, "result")
    first = 2 * x * y - 2 / math.sqrt(math.pi)
    return first, 2 * (y + x * first)


@elementwise("ErfinvBackward0")
def erfinv(node: Node) -> Pair:
    """f' = ½ √π exp(y²), f'' = 2y f'²"""
    y = torch.erfinv(saved(node, "self"))
    first = finite(torch.exp(y * y) * (math.sqrt(math.pi) / 2))
    return first, finite(2 * y * first * first)


@elementwise("SpecialNdtriBackward0")
def ndtri(node: Node) -> Pair:
    """f' = √(2π) exp(y²/2), f'' = y f'²"""
    y = saved(node, "result")
    first = finite(torch.exp(y * y / 2) * math.sqrt(2 * math.pi))
    return first, finite(y * first * first)


@elementwise("SpecialLogNdtrBackward0")
def log_ndtr(node: Node) -> Pair:
    """y = log Φ(x): f' = exp(−y − x²/2)/√(2π), f'' = −f' (x + f')"""
    x, y = saved(node, "self"), saved(node, "result")
    first = torch.exp(-y - x * x / 2) / math.sqrt(2 * math.pi)
    return first, -first * (x + first)


@elementwise("LgammaBackward0")
def lgamma(node: Node) -> Pair:
    """f' = ψ(x), f'' = ψ'(x)"""
    x = saved(node, "self")
    return finite(torch.digamma(x)), finite(torch.polygamma(1, x))


@elementwise("MvlgammaBackward0")
def mvlgamma(node: Node) -> Pair:
    """y = c + Σ_j log Γ(x − j/2), j < p: f' = Σ_j ψ(x − j/2), f'' = Σ_j ψ'(x − j/2)"""
    x, p = saved(node, "self"), saved(node, "p")
    terms = x.unsqueeze(-1) - torch.arange(p, dtype=x.dtype, device=x.device) / 2
    return finite(torch.digamma(terms).sum(-1)), finite(torch.polygamma(1, terms).sum(-1))


@elementwise("DigammaBackward0")
def digamma(node: Node) -> Pair:
    """f' = ψ'(x), f'' = ψ''(x)"""
    x = saved(node, "self")
    return finite(torch.polygamma(1, x)), finite(torch.polygamma(2, x))


@elementwise("PolygammaBackward0", "PolygammaBackward1")
def polygamma(node: Node) -> Pair:
    """y = ψ⁽ⁿ⁾(x): f' = ψ⁽ⁿ⁺¹⁾(x), f'' = ψ⁽ⁿ⁺²⁾(x)"""
    x, n = saved(node, "self"), saved(node, "n")
    return finite(torch.polygamma(n + 1, x)), finite(torch.polygamma(n + 2, x))


def refuse_first_argument(node: Node) -> str | None:
    return Final("PyTorch has no derivative for its first argument. Detach that argument") if needs(node, 0) else None


@elementwise("IgammaBackward0", "IgammacBackward0", refuse=refuse_first_argument)
def igamma(node: Node) -> list[Pair | None]:
    """y = P(a, x): f' = ±xᵃ⁻¹ e⁻ˣ/Γ(a), f'' = f' ((a − 1)/x − 1); a has no derivative"""
    a, x = operand(node, "self"), operand(node, "other")
    first = finite(torch.exp(torch.xlogy(a - 1, x) - x - torch.lgamma(a)))
    first = first if node.name() == "IgammaBackward0" else -first
    return [None, (first, finite(first * ((a - 1) / x - 1)))]


@elementwise("SpecialZetaBackward0", refuse=refuse_first_argument)
def zeta(node: Node) -> list[Pair | None]:
    """y = ζ(a, x): f' = −a ζ(a + 1, x), f'' = a (a + 1) ζ(a + 2, x); a has no derivative"""
    return [None, zeta_derivatives(operand(node, "self"), operand(node, "other"))]


@elementwise("SpecialZetaBackward1")
def zeta_of_number(node: Node) -> Pair:
    """y = ζ(c, x): f' = −c ζ(c + 1, x), f'' = c (c + 1) ζ(c + 2, x)"""
    return zeta_derivatives(saved(node, "self"), saved(node, "other"))


def zeta_derivatives(a: Any, x: Tensor) -> Pair:
    return finite(-a * torch.special.zeta(a + 1, x)), finite(a * (a + 1) * torch.special.zeta(a + 2, x))


@elementwise("I0Backward0")
def i0(node: Node) -> Pair:
    """y = I₀(x): f' = I₁(x), f'' = I₀(x) − I₁(x)/x"""
    x = saved(node, "self")
    first = torch.special.i1(x)
    return first, torch.i0(x) - torch.where(x == 0, 0.5, first / x)


@elementwise("SpecialI0EBackward0")
def i0e(node: Node) -> Pair:
    """y = e⁻ˡˣˡ I₀(x), z = e⁻ˡˣˡ I₁(x): f' = z − sgn(x) y, f'' = y − z/x − sgn(x) (z + f')"""
    x, y = saved(node, "self"), saved(node, "result")
    z, sign = torch.special.i1e(x), torch.sgn(x)
    first = z - sign * y
    return first, y - torch.where(x == 0, 0.5, z / x) - sign * (z + first)


@rule("SpecialI1Backward0", "SpecialI1EBackward0", **ONE_TO_ONE)
def i1(node: Node, g: Share, s: Share) -> Shares:
    """f' = node(1), f'' its derivative by autograd"""
    return elementwise_auto(node, g, s)
