"""One step of a recurrent layer, as the chain of rules that apply to the unfused layer.

From a = x W_ihᵀ + b_ih and b = h W_hhᵀ + b_hh, for the h and c of the step before, a cell computes

    RNN     h' = tanh(a + b), or relu
    GRU     r, z = σ(a + b), n = tanh(a + r b), h' = (h − n) z + n
    LSTM    i, f, o = σ(a + b), q = tanh(a + b), c' = f c + i q, h' = o tanh(c')

by elementwise operators. The recursion propagates (g, s) at h' and c' back to a, b, h and c. For each entry, this is a linear map
(:class:`Elementwise`) whose coefficients do not depend on (g, s). So the coefficients are computed for many steps at once, and a
step itself is a few elementwise products. Each cell below represents several consecutive steps, with ``sizes`` rows each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .registry import Share


class Pair(NamedTuple):
    """The gradient g (None for Gauss-Newton) and the diagonal s at one tensor."""

    g: Share
    s: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """Apply a function, such as a view, to both."""
        return Pair(None if self.g is None else function(self.g), function(self.s))

    def plus(self, other: Pair | None) -> Pair:
        if other is None:
            return self
        return Pair(None if self.g is None or other.g is None else self.g + other.g, self.s + other.s)

    def through(self, f: Elementwise) -> Pair:
        """(g, s) at x from (g, s) at y = f(x)."""
        s = self.s * f.square
        if self.g is None or f.first is None:
            return Pair(None, s)
        return Pair(self.g * f.first, s if f.second is None else s.addcmul_(self.g, f.second))

    def through_product(self, weight: Tensor, squares: Tensor) -> Pair:
        """(g, s) at x from (g, s) at y = x Wᵀ."""
        return Pair(None if self.g is None else self.g @ weight, self.s @ squares)

    def first_rows(self, n: int) -> Pair:
        return self.map(lambda v: v[:n])

    def of_part(self, part: int) -> Pair:
        """The pair of one layer and direction, from a stack of all."""
        return self.map(lambda v: v[part])

    def of_direction(self, d: int, directions: int) -> Pair:
        """The pair of one direction, from tensors that concatenate the features of all directions."""
        return self.map(lambda v: v.chunk(directions, 1)[d])

    def split(self, sizes: list[int]) -> list[Pair]:
        """One pair for each step."""
        return [Pair(*pair) for pair in zip(split(self.g, sizes), self.s.split(sizes), strict=True)]


def join(function: Callable[[list[Tensor], int], Tensor], pairs: Sequence[Pair], dim: int) -> Pair:
    """Concatenate or stack pairs."""
    g = [pair.g for pair in pairs if pair.g is not None]
    return Pair(function(g, dim) if len(g) == len(pairs) else None, function([pair.s for pair in pairs], dim))


class Elementwise(NamedTuple):
    """A chain of elementwise operators from x to y: g_x = first · g, s_x = square · s + second · g.

    ``first`` and ``second`` are f' and f'', or None for zero. For Gauss-Newton, which has no g, both are None. ``square`` is f'².
    If x reaches y by two paths, it is the sum of their squares.
    """

    first: Share
    square: Tensor
    second: Share = None

    def after(self, inner: Elementwise) -> Elementwise:
        """The composition self(inner(x)): the recursion, applied twice."""
        second = times(self.first, inner.second)
        if self.second is not None:
            second = self.second * inner.square if second is None else second.addcmul_(self.second, inner.square)
        return Elementwise(times(self.first, inner.first), self.square * inner.square, second)

    def split(self, sizes: list[int]) -> list[Elementwise]:
        """One for each step."""
        return [Elementwise(*part) for part in zip(*(split(tensor, sizes) for tensor in self), strict=True)]


def times(a: Share, b: Share) -> Share:
    return None if a is None or b is None else a * b


def split(value: Share, sizes: list[int]) -> Sequence[Share]:
    return [None] * len(sizes) if value is None else value.split(sizes)


def sigmoid(y: Tensor, with_g: bool) -> Elementwise:
    """f' = y (1 − y), f'' = f' (1 − 2 y)"""
    slope = y * (1 - y)
    return Elementwise(slope, slope * slope, slope * (1 - 2 * y)) if with_g else Elementwise(None, slope * slope)


def tanh(y: Tensor, with_g: bool) -> Elementwise:
    """f' = 1 − y², f'' = −2 y f'"""
    slope = 1 - y * y
    return Elementwise(slope, slope * slope, -2 * y * slope) if with_g else Elementwise(None, slope * slope)


def relu(y: Tensor, with_g: bool) -> Elementwise:
    """f' is 0 or 1"""
    slope = (y > 0).to(y.dtype)
    return Elementwise(slope if with_g else None, slope)


def multiply(factor: Tensor, with_g: bool) -> Elementwise:
    """f' is the other factor"""
    return Elementwise(factor if with_g else None, factor * factor)


def stack(gates: Sequence[Elementwise]) -> Elementwise:
    """Gates side by side: (rows, gates, hidden)."""
    first, square, second = ([t for t in tensors if t is not None] for tensors in zip(*gates, strict=True))
    return Elementwise(
        torch.stack(first, 1) if first else None, torch.stack(square, 1), torch.stack(second, 1) if second else None
    )


class Back(NamedTuple):
    """(g, s) at the inputs of a step: a and b, and h and c as far as they are used other than through b."""

    a: Pair
    b: Pair
    h: Pair | None = None
    c: Pair | None = None


class RnnCell:
    """h' = f(a + b): s_a = s_b = f'² s + f'' g"""

    def __init__(self, gates: Tensor, sizes: list[int], with_g: bool, *, is_relu: bool) -> None:
        self.gates = (relu(gates, with_g) if is_relu else tanh(gates.tanh(), with_g)).split(sizes)

    def back(self, t: int, h: Pair, c: Pair | None = None) -> Back:
        pre = h.through(self.gates[t])
        return Back(pre, pre)


class GruCell:
    """h' = (h − n) z + n: n reaches h' by two paths with f' = −z and 1, so s_n = (1 + z²) s and g_n = (1 − z) g"""

    def __init__(self, a: Tensor, b: Tensor, h: Tensor, sizes: list[int], with_g: bool) -> None:
        a, b = (gates.unflatten(-1, (3, -1)) for gates in (a, b))  # (rows, gates, hidden)
        r, z = (a[:, :2] + b[:, :2]).sigmoid_().unbind(1)
        n = torch.addcmul(a[:, 2], r, b[:, 2]).tanh_()
        to_n = Elementwise(1 - z if with_g else None, 1 + z * z).after(tanh(n, with_g))
        to_r = to_n.after(multiply(b[:, 2], with_g)).after(sigmoid(r, with_g))
        to_z = multiply(h - n, with_g).after(sigmoid(z, with_g))
        self.gates = stack([to_r, to_z, to_n]).split(sizes)
        self.r = multiply(r.unsqueeze(1), with_g).split(sizes)
        self.z = multiply(z, with_g).split(sizes)

    def back(self, t: int, h: Pair, c: Pair | None = None) -> Back:
        pre = h.map(lambda v: v.unsqueeze(1)).through(self.gates[t])
        third = pre.map(lambda v: v[:, 2:]).through(self.r[t])  # b occurs as r b in the third gate
        hidden = join(torch.cat, [pre.map(lambda v: v[:, :2]), third], 1)
        return Back(flat(pre), flat(hidden), h.through(self.z[t]))


class LstmCell:
    """c' = f c + i q and h' = o tanh(c'): s_c' gains o² tanh'² s + o tanh'' g; i, f, q and c get s_c' times squared factors"""

    def __init__(self, gates: Tensor, c: Tensor, sizes: list[int], with_g: bool) -> None:
        i, f, q, o = activations(gates)
        squashed = torch.addcmul(i * q, f, c).tanh_()
        self.h = o * squashed
        self.squash = multiply(o, with_g).after(tanh(squashed, with_g)).split(sizes)
        to_i = multiply(q, with_g).after(sigmoid(i, with_g))
        to_f = multiply(c, with_g).after(sigmoid(f, with_g))
        to_q = multiply(i, with_g).after(tanh(q, with_g))
        to_o = multiply(squashed, with_g).after(sigmoid(o, with_g))
        self.gates = stack([to_i, to_f, to_q, to_o]).split(sizes)
        self.forget = multiply(f, with_g).split(sizes)

    def back(self, t: int, h: Pair, c: Pair | None = None) -> Back:
        c = h.through(self.squash[t]).plus(c)
        pre = flat(join(torch.stack, [c, c, c, h], 1).through(self.gates[t]))
        return Back(pre, pre, None, c.through(self.forget[t]))


def activations(gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """i, f, q and o of an LSTM."""
    i, f, q, o = gates.chunk(4, 1)
    return i.sigmoid(), f.sigmoid(), q.tanh(), o.sigmoid()


def flat(pair: Pair) -> Pair:
    return pair.map(lambda v: v.flatten(1))
