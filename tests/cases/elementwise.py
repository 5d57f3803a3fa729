"""Cases: elementwise operators."""

from __future__ import annotations

import torch
from torch import Tensor, special

from .table import between, case, exactly, positive


def constant(like: Tensor) -> Tensor:
    """Numbers between −1 and 1 of the same shape and dtype, which take no gradient; none is zero."""
    return torch.linspace(-1, 1, like.numel() + 1, dtype=torch.float64)[1:].reshape(like.shape).to(like.dtype) + 0.01


# One input

OF_ALL_NUMBERS = (
    *(torch.neg, torch.square, torch.abs, torch.sign, torch.sgn, torch.exp, torch.exp2, torch.expm1, torch.sin, torch.cos),
    *(torch.tan, torch.atan, torch.sinh, torch.cosh, torch.asinh, torch.sinc, torch.erf, torch.erfc, torch.floor, torch.ceil),
    *(torch.round, torch.trunc, torch.frac, torch.deg2rad, torch.rad2deg, torch.angle),
    *(torch.i0, special.i0e, special.i1, special.i1e, special.log_ndtr, special.erfcx),
)
OF_POSITIVE_NUMBERS = (
    *(torch.reciprocal, torch.sqrt, torch.rsqrt, torch.log, torch.log2, torch.log10, torch.log1p, torch.lgamma, torch.digamma),
    special.entr,
)
INSIDE_THE_UNIT = (torch.asin, torch.acos, torch.atanh, torch.erfinv, torch.log1p)
for function in OF_ALL_NUMBERS:
    case(function.__name__.removeprefix("special_"), function, (3, 4))
for function in OF_POSITIVE_NUMBERS:
    case(f"{function.__name__.removeprefix('special_')} of positive numbers", function, positive(3, 4))
for function in INSIDE_THE_UNIT:
    case(f"{function.__name__} inside the unit interval", function, between(-0.9, 0.9, 3, 4))
case("acosh", torch.acosh, between(1.2, 3, 3, 4))
case("logit", torch.logit, between(0.1, 0.9, 3, 4))
case("logit clamped", lambda x: torch.logit(x, 0.2), exactly([-0.5, 0.1, 0.3, 0.7, 0.95, 1.5]))
case("ndtri", special.ndtri, between(0.1, 0.9, 3, 4))
case("polygamma", lambda x: torch.polygamma(2, x), between(1, 3, 3, 4))
case("polygamma of order zero", lambda x: torch.polygamma(0, x), positive(3, 4))
case("polygamma in place", lambda x: x.clone().polygamma_(1), positive(3, 4))
case("mvlgamma", lambda x: torch.mvlgamma(x, 3), between(1.5, 4, 3, 4))
case("reciprocal of negative numbers", torch.reciprocal, between(-2, -0.3, 3, 4))
case("abs at zero", torch.abs, exactly([-1.0, 0.0, 2.0]))
case("log_ndtr far out", special.log_ndtr, exactly([-100.0, -20.0, -5.0, 5.0, 30.0]))
case("exp of a number", torch.exp, ())
case("exp of a transpose", lambda x: x.t().exp(), (3, 4))
case("sinc beside zero", torch.sinc, exactly([-0.3, 0.002, 0.004, 1.0]))
for function in (torch.i0, special.i0e, special.i1, special.i1e):
    case(f"{function.__name__.removeprefix('special_')} at zero", function, exactly([0.0, 0.5]))
case("round to decimals", lambda x: torch.round(x, decimals=1), (3, 4))
case("nan_to_num", torch.nan_to_num, exactly([-1.0, float("inf"), float("nan"), 0.5]))
case("frexp", lambda x: torch.frexp(x)[0], exactly([-10.0, 0.3, 1.0, 300.0]), low_precision=False)
case("fake_quantize", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -5, 5), (3, 4), low_precision=False)
case(
    "fake_quantize by tensors",
    lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.1), torch.tensor(0, dtype=torch.int32), -5, 5),
    (3, 4),
    low_precision=False,
)
case(
    "fake_quantize of channels",
    lambda x: torch.fake_quantize_per_channel_affine(x, torch.full((4,), 0.1), torch.zeros(4, dtype=torch.int32), 1, -5, 5),
    (3, 4),
    low_precision=False,
)

# Numbers as the other operand

case("add a number", lambda x: x + 2, (3, 4))
case("add a number, traced", lambda x: torch.ops.aten.add.Scalar(x, 2, 3), (3, 4))
case("sub a number, traced", lambda x: torch.ops.aten.sub.Scalar(x, 2, 3), (3, 4))
case("sub from a number", lambda x: 2 - x, (3, 4))
case("sub from a number, alpha", lambda x: torch.ops.aten.rsub.Scalar(x, 2, 3), (3, 4))
case("mul by a number", lambda x: 3 * x, (3, 4))
case("mul of numbers", lambda x: 3 * x, ())
case("mul by a large integer", lambda x: x * 4_000_000_000, (3, 4), low_precision=False)
case("mul by bytes", lambda x: x * torch.tensor([100, 20, 3, 255], dtype=torch.uint8), (3, 4))
case("mul by a mask", lambda x: x * torch.tensor([True, False, True, True]), (3, 4))
case("mul by a number, traced", lambda x: torch.ops.aten.mul.Scalar(x, 3), (3, 4))
case("div by a number", lambda x: x / 3, (3, 4))
case("div by integers", lambda x: x / torch.tensor([3, 7, -2, 5]), (3, 4))
case("div by a number, traced", lambda x: torch.ops.aten.div.Scalar(x, 3), (3, 4))
case("div a number", lambda x: 3 / x, positive(3, 4))
case("div by a number, rounded", lambda x: torch.ops.aten.div.Scalar_mode(x, 0.3, rounding_mode="floor"), (3, 4))
case("div by a number, not rounded", lambda x: torch.ops.aten.div.Scalar_mode(x, 0.3, rounding_mode=None), (3, 4))
case("fmod a number", lambda x: torch.fmod(x, 0.3), (3, 4))
case("remainder of a number", lambda x: torch.remainder(x, 0.3), (3, 4))
case("copysign of a number", lambda x: torch.copysign(x, -2), (3, 4))
case("lerp by a number", lambda x, y: torch.lerp(x, y, 0.3), (3, 4), (4,))
case("xlogy of a number", lambda y: torch.xlogy(2, y), positive(3, 4))
case("xlogy by a number", lambda x: torch.xlogy(x, 3), (3, 4))
case("xlogy by zero", lambda x: torch.xlogy(x, 0), exactly([0.0, 0.0]))
case("xlog1py of a number", lambda y: special.xlog1py(2, y), positive(3, 4))
case("xlog1py by a number", lambda x: special.xlog1py(x, 3), (3, 4))
case("zeta of a number", lambda x: special.zeta(2.5, x), positive(3, 4))
case("pow of a number", lambda x: 3**x, (3, 4))
case("pow of one", lambda x: 1**x, (3, 4))
for exponent in (0, 1, 2, 3, 4, -1, -2):
    case(f"pow {exponent}", lambda x, n=exponent: x**n, between(-2, -0.3, 3, 4))
for exponent in (0.5, 1.5, 2.5, -0.5, 3.7):
    case(f"pow {exponent}", lambda x, n=exponent: x**n, positive(3, 4))
for exponent in (0, 1, 2, 3, 2.5):
    case(f"pow {exponent} at zero", lambda x, n=exponent: x**n, exactly([0.0, 1.0, 2.0]))

# Two inputs

OF_TWO = {
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: torch.sub(x, y, alpha=3),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=3),
    "mul": torch.mul,
    "div": torch.div,
    "div in no rounding mode": lambda x, y: torch.div(x, y, rounding_mode=None),
    "div rounded down": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "pow": torch.pow,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "xlogy": torch.xlogy,
    "xlog1py": special.xlog1py,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "ldexp": torch.ldexp,
    "copysign": torch.copysign,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "clamp_min": torch.clamp_min,
    "clamp_max": torch.clamp_max,
    **({"nextafter": torch.nextafter} if torch.__version__ >= "2.13" else {}),  # it has no derivative before
}
for name, function in OF_TWO.items():
    case(name, function, positive(3, 4), positive(3, 4))
    case(f"{name} broadcast", function, positive(3, 1, 4), positive(2, 1))
    case(f"{name} of one tensor twice", lambda x, f=function: f(x, x), positive(3, 4))
    case(f"{name}, left only", lambda x, f=function: f(x, constant(x).abs()), positive(3, 4))
    case(f"{name}, right only", lambda y, f=function: f(constant(y).abs(), y), positive(3, 4))
for name in ("mul", "div", "atan2", "hypot", "logaddexp", "fmod", "remainder", "copysign"):
    case(f"{name} of both signs", OF_TWO[name], (3, 4), (3, 4), low_precision=name != "div")
for name in ("maximum", "minimum", "fmax", "fmin", "clamp_min", "clamp_max"):
    ties = exactly([1.0, 2.0, 3.0, -1.0]), exactly([1.0, 5.0, -3.0, -1.0])
    case(f"{name} with ties", OF_TWO[name], *ties)
case("add numbers", torch.add, (), ())
case("mul of a transpose", lambda x, y: x.t() * y, (3, 4), (4, 3))
case("mul of nothing", torch.mul, (0, 3), (3,))
case("mul one number twice", lambda x: x * x, ())
case("ldexp by integers", lambda x: torch.ldexp(x, torch.tensor([1, 2, 3, 0])), (3, 4))
case("pow by integers", lambda x: x ** torch.tensor([1, 2, 0, 3]), between(-2, 2, 3, 4))
case("pow at zero", lambda x: x ** torch.tensor([1.0, 2.0, 3.0, 2.5], dtype=x.dtype), exactly([0.0, 0.0, 0.0, 0.0]))
case("pow of negative numbers", lambda x: x ** torch.tensor([-2.0, 3.0], dtype=x.dtype), exactly([-1.5, -0.5]))
case("xlogy at zero", lambda x: torch.xlogy(x, torch.zeros_like(x)), exactly([0.0, 0.0]))
case("igamma", lambda x: torch.igamma(constant(x).abs() + 1, x), positive(3, 4))
case("igammac", lambda x: torch.igammac(constant(x).abs() + 1, x), positive(3, 4))
case("zeta", lambda x: special.zeta(constant(x).abs() + 1.5, x), positive(3, 4))

# Three inputs

case("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=3), (3, 4), (4,), (3, 1))
case("addcmul, first only", lambda x: torch.addcmul(x, constant(x), constant(x)), (3, 4))
case("addcmul, second only", lambda a: torch.addcmul(constant(a), a, constant(a), value=2), (3, 4))
case("addcmul of one tensor thrice", lambda x: torch.addcmul(x, x, x, value=3), (3, 4))
case("addcmul of one factor twice", lambda x, a: torch.addcmul(x, a, a, value=3), (3, 4), (4,))
case("addcdiv", lambda x, a, b: torch.addcdiv(x, a, b, value=3), (3, 4), (4,), positive(3, 1))
case("addcdiv, first only", lambda x: torch.addcdiv(x, constant(x), constant(x)), (3, 4))
case("addcdiv, last only", lambda b: torch.addcdiv(constant(b), constant(b), b, value=2), positive(3, 4))
case("addcdiv of one tensor twice", lambda x, a: torch.addcdiv(x, a, x, value=3), positive(3, 4), (4,))
case("lerp", torch.lerp, (3, 4), (4,), (3, 1))
case("lerp, weight only", lambda w: torch.lerp(constant(w), -constant(w), w), (3, 4))
case("lerp of one tensor twice", torch.lerp, (3, 4), (3, 4), (4,))
case("lerp towards itself", lambda x, w: torch.lerp(x, x, w), (3, 4), (4,))
case("lerp by itself", lambda x, y: torch.lerp(x, y, x), (3, 4), (4,))
case("lerp of one tensor twice, by a number", lambda x: torch.lerp(x, x, 0.3), (3, 4))
case("clamp", lambda x: x.clamp(-0.5, 0.5), (3, 4))
case("clamp from below", lambda x: x.clamp(min=0.0), exactly([-1.0, 0.0, 1.0]))
case("clamp at its bounds", lambda x: x.clamp(-1, 1), exactly([-1.0, 0.0, 1.0, 2.0]))
case("clamp by tensors", torch.clamp, (3, 4), between(-0.5, 0, 4), between(0.1, 0.5, 3, 1))
case("clamp by a tensor from above", lambda x, y: torch.clamp(x, max=y), (3, 4), (4,))
case("clamp by crossed tensors", torch.clamp, (3, 4), (3, 4), (3, 4))
case("clamp by itself", lambda x: torch.clamp(x, x, x), (3, 4))
case("clamp_min by a number", lambda x: x.clamp_min(0.1), (3, 4))
case("clamp_max by a number", lambda x: x.clamp_max(0.1), (3, 4))

# No derivative

for name in ("eq_", "ge_", "gt_", "le_", "lt_", "ne_"):
    case(f"{name} a number", lambda x, name=name: getattr(x.clone(), name)(0.1), (3, 4))
    case(f"{name}", lambda x, y, name=name: getattr(x.clone(), name)(y), (3, 4), (3, 4))
FILLS = {
    "bernoulli_": (0.3,),
    "cauchy_": (),
    "exponential_": (),
    "geometric_": (0.3,),
    "log_normal_": (),
    "normal_": (),
    "uniform_": (),
}
for name, arguments in FILLS.items():
    case(name, lambda x, name=name, arguments=arguments: getattr(x.clone(), name)(*arguments), (3, 4))
case("random_", lambda x: x.clone().random_(), (3, 4))
case("random_ up to", lambda x: x.clone().random_(5), (3, 4))
case("random_ between", lambda x: x.clone().random_(2, 5), (3, 4))
case("bernoulli", torch.bernoulli, between(0.1, 0.9, 3, 4))
case("bernoulli_ by a tensor", lambda x, p: x.clone().bernoulli_(p), (3, 4), between(0.1, 0.9, 3, 4))
case("poisson", torch.poisson, positive(3, 4))
case("normal of a mean", lambda x: torch.normal(x, 1.0), (3, 4))
case("normal of a spread", lambda x: torch.normal(0.0, x), positive(3, 4))
case("normal of both", torch.normal, (3, 4), positive(3, 4))
