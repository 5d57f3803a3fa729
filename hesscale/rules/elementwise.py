"""Elementwise maps y = f(x): Eq. (4) with a diagonal Jacobian, s_x = f'(x)² s + f''(x) g. ``activations`` has the activations.

Where f' or f'' is not finite (√x and log x at 0), it is replaced by zero, which avoids 0·∞.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .registry import ONE_TO_ONE, Node, Share, Shares, chain, elementwise, linear, needs, rule, saved

Pair = tuple[Any, Any]


def operand(node: Node, name: str) -> Any:
    """A saved operand as a floating point tensor, since squares of integers overflow.

    PyTorch saves a Python number as a 0-d tensor, and computes the product of two such tensors in the default dtype.
    """
    value = saved(node, name)
    if not isinstance(value, Tensor):
        return value
    made = node._input_metadata[0].dtype
    if value.is_floating_point() and value.dim():
        return value.to(torch.promote_types(value.dtype, made))  # in a narrower dtype than the output, digits would be lost
    dtype = torch.promote_types(made, torch.float32)
    return value.to(dtype) if value.dim() else torch.ones((), dtype=dtype, device=value.device) * value


def finite(derivative: Tensor) -> Tensor:
    """The derivative with zero in place of values that are not finite. Changes the tensor in place."""
    return derivative.nan_to_num_(0.0, 0.0, 0.0)


# Linear or piecewise linear


@linear(
    *("SignBackward0", "SgnBackward0", "CeilBackward0", "FloorBackward0", "TruncBackward0", "RoundBackward0", "RoundBackward1"),
    *(f"{name}Backward{i}" for name in ("Eq", "Ge", "Gt", "Le", "Lt", "Ne") for i in range(2)),
    *("BernoulliBackward0", "BernoulliBackward1", "BernoulliBackward2", "PoissonBackward0"),
    *("NormalBackward0", "NormalBackward1", "NormalBackward2", "NormalBackward3"),
    *("RandomBackward0", "RandomBackward1", "RandomBackward2", "UniformBackward0", "LogNormalBackward0"),
    *("CauchyBackward0", "ExponentialBackward0", "GeometricBackward0"),
    **{**ONE_TO_ONE, "joint": False, "mixed": False},
)
def step_function(node: Node, s: Tensor) -> list[Share]:
    """f' = 0: steps, comparisons and random draws"""
    return [None] * len(node.next_functions)


@linear(
    *("AddBackward1", "SubBackward1", "NegBackward0", "FracBackward0", "FmodBackward0", "RemainderBackward0"),
    **ONE_TO_ONE,
)
def shift(node: Node, s: Tensor) -> Share:
    """f' = ±1"""
    return s


@linear(
    *("ClampBackward0", "ClampBackward1", "ClampMinBackward0", "ClampMinBackward1", "ClampMaxBackward0", "ClampMaxBackward1"),
    *("FmaxBackward0", "FminBackward0", "NextafterBackward0", "NanToNumBackward0"),
    "FakeQuantizePerTensorAffineCachemaskBackward0",
    "FakeQuantizePerTensorAffineCachemaskTensorQparamsBackward0",
    "FakeQuantizePerChannelAffineCachemaskBackward0",
    **{**ONE_TO_ONE, "joint": False, "mixed": False},
)
def select(node: Node, s: Tensor) -> Shares:
    """f' = 1 where y is this input, else 0"""
    return node(s)


@linear("Deg2RadBackward0", "Rad2DegBackward0", "FrexpBackward0", "DivBackward3", "CopysignBackward1", **ONE_TO_ONE)
def rescale(node: Node, s: Tensor) -> Share:
    """f' is constant, and the node multiplies by it: node(s) = f' s, node(node(s)) = f'² s"""
    return node(node(s))


def refuse_complex(node: Node) -> str | None:
    source, index = node.next_functions[0]
    is_complex = source._input_metadata[index].dtype.is_complex
    return "complex tensors have no curvature rules. Carry real and imaginary parts as two real tensors" if is_complex else None


@linear("AbsBackward0", refuse=refuse_complex, **ONE_TO_ONE)
def absolute(node: Node, s: Tensor) -> Share:
    """f' = ±1, and 0 at 0; node(node(s)) = f'² s"""
    return node(node(s))


@linear("AngleBackward0", refuse=refuse_complex, **ONE_TO_ONE)
def angle(node: Node, s: Tensor) -> Share:
    """f' = 0: the angle of a real number is 0 or π"""
    return None


@linear("CopysignBackward0", mixed=False, **ONE_TO_ONE)
def copysign(node: Node, s: Tensor) -> list[Share]:
    """f' = ±1, and 0 at 0; f' = 0 for the input that only gives the sign"""
    return [s.masked_fill(saved(node, "self") == 0, 0) if needs(node, 0) else None, None]


# Arithmetic


@linear("AddBackward0", "SubBackward0", mixed=False, **ONE_TO_ONE)
def add(node: Node, s: Tensor) -> list[Share]:
    """f' = 1 and ±α"""
    return [s, scale(s, saved(node, "alpha")) if needs(node, 1) else None]


@linear("RsubBackward0", mixed=False, **ONE_TO_ONE)
def subtract_from(node: Node, s: Tensor) -> list[Share]:
    """f' = −α and 1"""
    return [scale(s, saved(node, "alpha")) if needs(node, 0) else None, s]


@linear("RsubBackward1", **ONE_TO_ONE)
def subtract_from_number(node: Node, s: Tensor) -> Share:
    """f' = −α"""
    return scale(s, saved(node, "alpha"))


@linear("MulBackward1", **ONE_TO_ONE)
def multiply_by_number(node: Node, s: Tensor) -> Share:
    """f' = c"""
    return scale(s, saved(node, "other"))


@linear("DivBackward1", **ONE_TO_ONE)
def divide_by_number(node: Node, s: Tensor) -> Share:
    """f' = 1 / c"""
    return scale(s, 1 / saved(node, "other"))


def scale(s: Tensor, factor: Any) -> Tensor:
    """factor² s, without intermediate tensors of its size."""
    if not isinstance(factor, Tensor):
        return s if factor == 1 else s * (factor * factor)
    return s * (factor * factor) if factor.numel() < s.numel() else (s * factor).mul_(factor)


def square(node: Node, g: Share, s: Share) -> list[Share]:
    """y = x · x: f' = 2x, f'' = 2"""
    return [chain(2 * saved(node, "self"), 2, g, s), None]


@linear("MulBackward0", **{**ONE_TO_ONE, "same": square})
def multiply(node: Node, s: Tensor) -> list[Share]:
    """f' = the other factor"""
    return [scale(s, operand(node, other)) if needs(node, i) else None for i, other in enumerate(("other", "self"))]


@elementwise("DivBackward0", "DivBackward2", curved=(False, True), same=lambda node, g, s: [None, None])  # x/x = 1
def divide(node: Node) -> list[Pair | None]:
    """y = a/b: f'_a = 1/b; f'_b = −a/b², f''_b = 2a/b³; f' = 0 if y is rounded"""
    if node.name() == "DivBackward2" and saved(node, "rounding_mode") is not None:
        return [None, None]
    inverse = finite(operand(node, "other").reciprocal())
    if not needs(node, 1):
        return [(inverse, None), None]
    first = operand(node, "self") * inverse * -inverse
    return [(inverse, None) if needs(node, 0) else None, (first, -2 * first * inverse)]


@elementwise("ReciprocalBackward0")
def reciprocal(node: Node) -> Pair:
    """y = 1/x: f' = −y², f'' = 2y³"""
    y = saved(node, "result").nan_to_num(0.0, 0.0, 0.0)
    return -y * y, 2 * y * y * y


@linear("AddcmulBackward0", **ONE_TO_ONE)
def addcmul(node: Node, s: Tensor) -> list[Share]:
    """y = x + v a b: f'_x = 1, f'_a = v b, f'_b = v a"""
    value = saved(node, "value")
    left = scale(s, operand(node, "tensor2") * value) if needs(node, 1) else None
    right = scale(s, operand(node, "tensor1") * value) if needs(node, 2) else None
    return [s, left, right]


@elementwise("AddcdivBackward0", curved=(False, False, True))
def addcdiv(node: Node) -> list[Pair | None]:
    """y = x + v a/b: f'_x = 1, f'_a = v/b; f'_b = −v a/b², f''_b = 2v a/b³"""
    value = saved(node, "value")
    shares: list[Pair | None] = [(1, None) if needs(node, 0) else None, None, None]
    if needs(node, 1) or needs(node, 2):
        inverse = finite(operand(node, "tensor2").reciprocal())
        shares[1] = (value * inverse, None) if needs(node, 1) else None
        if needs(node, 2):
            first = operand(node, "tensor1") * inverse * inverse * -value
            shares[2] = (first, -2 * first * inverse)
    return shares


@linear("LerpBackward0", mixed=False, **ONE_TO_ONE)
def lerp_by_number(node: Node, s: Tensor) -> list[Share]:
    """y = a + w (b − a): f' = 1 − w and w"""
    weight = saved(node, "weight")
    return [scale(s, 1 - weight) if needs(node, 0) else None, scale(s, weight) if needs(node, 1) else None]


@linear("LerpBackward1", **ONE_TO_ONE)
def lerp(node: Node, s: Tensor) -> list[Share]:
    """y = a + w (b − a): f'_a = 1 − w, f'_b = w, f'_w = b − a"""
    return [
        scale(s, 1 - saved(node, "weight")) if needs(node, 0) else None,
        scale(s, saved(node, "weight")) if needs(node, 1) else None,
        scale(s, saved(node, "end") - saved(node, "self")) if needs(node, 2) else None,
    ]


@linear("FmodBackward1", "RemainderBackward1", mixed=False, **ONE_TO_ONE)
def remainder(node: Node, s: Tensor) -> list[Share]:
    """y = a − b ⌊a/b⌋ (or towards zero): f'_a = 1, f'_b = −⌊a/b⌋"""
    if not needs(node, 1):
        return [s, None]
    mode = "trunc" if node.name() == "FmodBackward1" else "floor"
    return [s, scale(s, finite(torch.div(operand(node, "self"), operand(node, "other"), rounding_mode=mode)))]


@linear("MaximumBackward0", "MinimumBackward0", mixed=False, **ONE_TO_ONE)
def extremum(node: Node, s: Tensor) -> list[Share]:
    """f' = 1 where y is this input, else 0; ½ for both in a tie"""
    left, right = saved(node, "self"), saved(node, "other")
    split = torch.where(left == right, s / 4, s)
    losing = [left < right, left > right]
    if node.name() == "MinimumBackward0":
        losing.reverse()
    return [split.masked_fill(mask, 0) if needs(node, i) else None for i, mask in enumerate(losing)]


# Powers


@rule("PowBackward0", **ONE_TO_ONE)
def power(node: Node, g: Share, s: Share) -> Share:
    """y = xⁿ: f' = n xⁿ⁻¹, f'' = n (n − 1) xⁿ⁻²"""
    n = saved(node, "exponent")
    if n == 0:
        return None
    if n == 1:
        return s
    x = saved(node, "self")
    if n == 2:
        return chain(2 * x if s is not None else None, 2, g, s)
    power = x ** (n - 2)
    power = finite(power) if n < 2 else power
    return chain(n * x * power, n * (n - 1) * power, g, s)


@elementwise("PowBackward1")
def power_of_tensors(node: Node) -> list[Pair | None]:
    """y = aᵇ: f'_a = b aᵇ⁻¹, f''_a = b (b − 1) aᵇ⁻²; f'_b = y log a, f''_b = y log² a"""
    a, b = operand(node, "self"), operand(node, "exponent")
    of_base = of_exponent = None
    if needs(node, 0):
        at_zero = a == 0
        first = (b * a ** (b - 1)).masked_fill(at_zero & (b < 1), 0)
        of_base = first, (b * (b - 1) * a ** (b - 2)).masked_fill(at_zero & (b < 2), 0)
    if needs(node, 1):
        log = torch.log(a).masked_fill(a <= 0, 0)
        first = saved(node, "result") * log
        of_exponent = first, first * log
    return [of_base, of_exponent]


@elementwise("PowBackward2")
def power_of_number(node: Node) -> Pair:
    """y = cˣ: f' = y log c, f'' = y log² c"""
    base = saved(node, "self")
    if base <= 0:
        return None, None
    first = saved(node, "result") * math.log(base)
    return first, first * math.log(base)


@elementwise("SqrtBackward0")
def sqrt(node: Node) -> Pair:
    """y = √x: f' = 1/(2y), f'' = −2 f'³"""
    first = finite(0.5 / saved(node, "result"))
    return first, -2 * first * first * first


@elementwise("RsqrtBackward0")
def rsqrt(node: Node) -> Pair:
    """y = 1/√x: f' = −½ y³, f'' = ¾ y⁵"""
    y = saved(node, "result").nan_to_num(0.0, 0.0, 0.0)
    square = y * y
    return -0.5 * y * square, 0.75 * y * square * square


@elementwise("HypotBackward0")
def hypot(node: Node) -> list[Pair | None]:
    """y = √(a² + b²): f'_a = a/y, f''_a = (1 − f'_a²)/y; likewise for b"""
    inverse = finite(1 / saved(node, "result"))
    pairs: list[Pair | None] = [None, None]
    for i, name in enumerate(("self", "other")):
        if needs(node, i):
            first = operand(node, name) * inverse
            pairs[i] = first, inverse * (1 - first * first)
    return pairs
