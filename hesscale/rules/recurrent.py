"""Fused recurrent layers: the same chain of node rules as in the layer without fusion, so that fusion does not change the numbers.

At every step t the layer without fusion computes, from a = x W_ihᵀ + b_ih and b = h W_hhᵀ + b_hh for the previous h and c,

    RNN     h' = tanh(a + b), or relu
    GRU     r, z = σ(a + b), n = tanh(a + r b), h' = (h − n) z + n
    LSTM    i, f, o = σ(a + b), q = tanh(a + b), c' = f c + i q, h' = o tanh(c'), and then h' W_hrᵀ with projections

one elementwise operator at a time. The recursion therefore goes backwards in time with (g, s) at h' and c', adds up what meets at a
tensor, and maps it to (g, s) at the pre-activations a and b. That map is linear in (g, s) at each entry (:class:`Elementwise`), and
its coefficients do not depend on (g, s). So they are computed for all steps at once. A step is left with a few products of
entries and the two matrix products with W_hh and its squares. The shares of the weights are one matrix product over all steps.

Sequences are packed: the rows of step 0, then those of step 1, and so on, where later steps may have fewer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from .registry import Node, Share, needs, rule, saved

RELU, TANH, LSTM, GRU = range(4)  # cuDNN's numbers for the kinds of layers


class Pair(NamedTuple):
    """The gradient g (None for Gauss-Newton) and the diagonal s at one tensor."""

    g: Share
    s: Tensor

    def plus(self, other: Pair | None) -> Pair:
        if other is None:
            return self
        return Pair(None if self.g is None or other.g is None else self.g + other.g, self.s + other.s)

    def through(self, f: Elementwise) -> Pair:
        """From y = f(x) to x."""
        if self.g is None:
            return Pair(None, self.s * f.square)
        assert f.first is not None
        s = self.s * f.square if f.second is None else (self.s * f.square).addcmul_(self.g, f.second)
        return Pair(self.g * f.first, s)

    def through_product(self, weight: Tensor, squares: Tensor) -> Pair:
        """From y = x Wᵀ to x."""
        return Pair(None if self.g is None else self.g @ weight, self.s @ squares)

    def split(self, sizes: list[int]) -> list[Pair]:
        """One for each step."""
        g = [None] * len(sizes) if self.g is None else self.g.split(sizes)
        return [Pair(*pair) for pair in zip(g, self.s.split(sizes), strict=True)]

    def flatten(self) -> Pair:
        """(steps, sequences, …) as rows."""
        return Pair(None if self.g is None else self.g.flatten(0, 1), self.s.flatten(0, 1))

    def first_rows(self, n: int) -> Pair:
        return self if n == len(self.s) else Pair(None if self.g is None else self.g[:n], self.s[:n])

    def with_first_rows(self, new: Pair) -> Pair:
        """These rows, of which new ones replace the first."""
        n = len(new.s)
        if n == len(self.s):
            return new
        return Pair(None if self.g is None or new.g is None else torch.cat((new.g, self.g[n:])), torch.cat((new.s, self.s[n:])))


class Elementwise(NamedTuple):
    """A chain of elementwise operators from x to y: g_x = first · g, s_x = square · s + second · g.

    ``first`` and ``second`` are f' and f'', or None for zero; both are None for Gauss-Newton. ``square`` is f'², but the sum of
    f'² over paths where x reaches y by two.
    """

    first: Share
    square: Tensor
    second: Share = None

    def after(self, inner: Elementwise) -> Elementwise:
        """This operator on what ``inner`` makes: the recursion, applied twice."""
        second = times(self.first, inner.second)
        if self.second is not None:
            second = self.second * inner.square if second is None else second.addcmul_(self.second, inner.square)
        return Elementwise(times(self.first, inner.first), self.square * inner.square, second)

    def split(self, sizes: Sequence[int]) -> list[Elementwise]:
        """One for each step."""
        parts = [[None] * len(sizes) if t is None else t.split(list(sizes)) for t in self]
        return [Elementwise(*part) for part in zip(*parts, strict=True)]


def times(a: Share, b: Share) -> Share:
    return None if a is None or b is None else a * b


def sigmoid(y: Tensor, with_g: bool) -> Elementwise:
    slope = y * (1 - y)
    return Elementwise(slope, slope * slope, slope * (1 - 2 * y)) if with_g else Elementwise(None, slope * slope)


def tanh(y: Tensor, with_g: bool) -> Elementwise:
    slope = 1 - y * y
    return Elementwise(slope, slope * slope, -2 * y * slope) if with_g else Elementwise(None, slope * slope)


def relu(y: Tensor, with_g: bool) -> Elementwise:
    slope = (y > 0).to(y.dtype)
    return Elementwise(slope if with_g else None, slope)


def multiply(factor: Tensor, with_g: bool) -> Elementwise:
    return Elementwise(factor if with_g else None, factor * factor)


def stack(gates: Sequence[Elementwise]) -> Elementwise:
    """Gates side by side: (rows, gates, hidden)."""
    first, square, second = zip(*gates, strict=True)
    with_g = first[0] is not None
    return Elementwise(torch.stack(first, 1) if with_g else None, torch.stack(square, 1), torch.stack(second, 1) if with_g else None)


class Back(NamedTuple):
    """(g, s) at what a step took: the pre-activations a and b, and h and c as far as they do not go through b."""

    a: Pair
    b: Pair
    h: Pair | None = None
    c: Pair | None = None


class RnnCell:
    """h' = tanh(a + b), or relu: s_a = s_b = f'² s + f'' g"""

    def __init__(self, a: Tensor, b: Tensor, sizes: Sequence[int], with_g: bool, is_relu: bool) -> None:
        gates = relu((a + b).relu_(), with_g) if is_relu else tanh((a + b).tanh_(), with_g)
        self.gates = gates.split(sizes)

    def back(self, t: int, h: Pair, c: Pair | None) -> Back:
        pre = h.through(self.gates[t])
        return Back(pre, pre)


class GruCell:
    """h' = (h − n) z + n for n = tanh(a + r b): n reaches h' by two paths, whose squares 1 and z² the recursion adds up"""

    def __init__(self, a: Tensor, b: Tensor, h: Tensor, sizes: Sequence[int], with_g: bool) -> None:
        a, b = (v.unflatten(-1, (3, -1)) for v in (a, b))  # (rows, gates, hidden)
        r, z = (a[:, :2] + b[:, :2]).sigmoid_().unbind(1)
        n = torch.addcmul(a[:, 2], r, b[:, 2]).tanh_()
        to_n = Elementwise(1 - z if with_g else None, 1 + z * z).after(tanh(n, with_g))
        to_r = to_n.after(multiply(b[:, 2], with_g)).after(sigmoid(r, with_g))
        to_z = multiply(h - n, with_g).after(sigmoid(z, with_g))
        self.gates = stack([to_r, to_z, to_n]).split(sizes)
        self.r, self.z = (multiply(v, with_g).split(sizes) for v in (r, z))

    def back(self, t: int, h: Pair, c: Pair | None) -> Back:
        pre = broadcast(h).through(self.gates[t])
        third = Pair(None if pre.g is None else pre.g[:, 2], pre.s[:, 2]).through(self.r[t])  # that of b goes through r b
        g = None if pre.g is None or third.g is None else torch.cat((pre.g[:, :2], third.g.unsqueeze(1)), 1)
        hidden = Pair(g, torch.cat((pre.s[:, :2], third.s.unsqueeze(1)), 1))
        return Back(flat(pre), flat(hidden), h.through(self.z[t]))


class LstmCell:
    """c' = f c + i q and h' = o tanh(c'): s_c' = s_c + o² tanh'² s_h + o tanh'' g_h, and from there to i, f, q and c"""

    def __init__(self, a: Tensor, b: Tensor, c: Tensor, sizes: Sequence[int], backwards: bool, with_g: bool) -> None:
        gates = (a + b).unflatten(-1, (4, -1))  # (rows, gates, hidden)
        i, f, q, o = gates[:, 0].sigmoid(), gates[:, 1].sigmoid(), gates[:, 2].tanh(), gates[:, 3].sigmoid()
        increment, forget = (i * q).split(list(sizes)), f.split(list(sizes))
        before: list[Tensor] = [c] * len(sizes)
        after = list(before)
        for t in order(sizes, backwards):  # c has rows of all sequences
            before[t] = c[: sizes[t]]
            after[t] = torch.addcmul(increment[t], forget[t], before[t])
            c = after[t] if len(after[t]) == len(c) else torch.cat((after[t], c[sizes[t] :]))
        self.c = torch.cat(after)
        squashed = self.c.tanh()
        self.h = o * squashed
        self.squash = multiply(o, with_g).after(tanh(squashed, with_g)).split(sizes)
        by_c = [(q, sigmoid(i, with_g)), (torch.cat(before), sigmoid(f, with_g)), (i, tanh(q, with_g))]
        by_h = (squashed, sigmoid(o, with_g))
        self.gates = stack([multiply(factor, with_g).after(gate) for factor, gate in (*by_c, by_h)]).split(sizes)
        self.forget = multiply(f, with_g).split(sizes)

    def back(self, t: int, h: Pair, c: Pair | None) -> Back:
        c = h.through(self.squash[t]).plus(c)
        g = None if c.g is None or h.g is None else torch.stack((c.g, c.g, c.g, h.g), 1)
        pre = flat(Pair(g, torch.stack((c.s, c.s, c.s, h.s), 1)).through(self.gates[t]))
        return Back(pre, pre, None, c.through(self.forget[t]))


def broadcast(h: Pair) -> Pair:
    return Pair(None if h.g is None else h.g.unsqueeze(1), h.s.unsqueeze(1))


def flat(pair: Pair) -> Pair:
    return Pair(None if pair.g is None else pair.g.flatten(1), pair.s.flatten(1))


def order(sizes: Sequence[int], backwards: bool) -> Sequence[int]:
    """The steps in the order in which a direction makes them."""
    return range(len(sizes))[::-1] if backwards else range(len(sizes))


class Weights(NamedTuple):
    """The weights of one layer in one direction, in PyTorch's order. Also, for each of them, whether it needs a share."""

    ih: Any
    hh: Any
    b_ih: Any = None
    b_hh: Any = None
    hr: Any = None

    @staticmethod
    def of(values: Sequence[Any], projected: bool) -> Weights:
        """From PyTorch's list, which leaves out what a layer does not have."""
        return Weights(*values[:-1], **{"hr": values[-1]}) if projected else Weights(*values)


class Layer(NamedTuple):
    """What one layer took in one direction."""

    mode: int
    weights: Weights
    x: Tensor  # (rows, features)
    h: Tensor  # before the first step: (sequences, hidden, or what that is projected to)
    c: Tensor | None  # the same, for an LSTM
    sizes: Sequence[int]  # the rows of each step
    backwards: bool

    def output(self) -> Tensor:
        """h' of all steps, one step after another."""
        w_ih, w_hh, b_ih, b_hh, w_hr = self.weights
        h, c, inputs, found = self.h, self.c, self.x.split(list(self.sizes)), [self.h] * len(self.sizes)
        for t in order(self.sizes, self.backwards):
            n = self.sizes[t]
            if c is None:
                new = CELLS[self.mode](inputs[t], h[:n], w_ih, w_hh, b_ih, b_hh)
            else:
                i, f, q, o = linear(inputs[t], w_ih, b_ih).add_(linear(h[:n], w_hh, b_hh)).chunk(4, 1)
                memory = torch.addcmul(i.sigmoid() * q.tanh(), f.sigmoid(), c[:n])
                new, c = o.sigmoid() * memory.tanh(), torch.cat((memory, c[n:]))
            found[t] = new if w_hr is None else new @ w_hr.t()
            h = torch.cat((found[t], h[n:]))
        return torch.cat(found)

    def h_before(self, output: Tensor) -> Tensor:
        """The h that each row took: that of the step before, or the one given where the sequence starts."""
        steps, found = output.split(list(self.sizes)), [self.h] * len(self.sizes)
        for t, n in enumerate(self.sizes):
            source = t + 1 if self.backwards else t - 1
            carried = steps[source][:n] if 0 <= source < len(steps) else self.h[:0]
            found[t] = torch.cat((carried, self.h[len(carried) : n])) if len(carried) < n else carried
        return torch.cat(found)

    def cell(self, a: Tensor, b: Tensor, h: Tensor, with_g: bool) -> RnnCell | GruCell | LstmCell:
        if self.c is not None:
            return LstmCell(a, b, self.c, self.sizes, self.backwards, with_g)
        return GruCell(a, b, h, self.sizes, with_g) if self.mode == GRU else RnnCell(a, b, self.sizes, with_g, self.mode == RELU)


CELLS: dict[int, Any] = {RELU: torch.rnn_relu_cell, TANH: torch.rnn_tanh_cell, GRU: torch.gru_cell}


class LayerShares(NamedTuple):
    """(g, s) at what a layer took in one direction. g at x is None unless it was asked for."""

    x: Pair
    h: Pair
    c: Pair | None
    weights: Weights


def through_layer(
    layer: Layer, output: Tensor, at: Pair | None, h: Pair, c: Pair | None, needed: Weights, input_g: bool
) -> LayerShares:
    """From (g, s) at a layer's output and at its last h and c to what it took.

    The weights' shares are s_aᵀ x², s_bᵀ h², Σ s_a, Σ s_b and s_hᵀ m², where m is an LSTM's h before its projection to h.
    """
    w_ih, w_hh, b_ih, b_hh, w_hr = layer.weights
    sizes, with_g = list(layer.sizes), h.g is not None
    before = layer.h_before(output)
    cell = layer.cell(linear(layer.x, w_ih, b_ih), linear(before, w_hh, b_hh), before, with_g)
    arriving = [None] * len(sizes) if at is None else at.split(sizes)
    w_hh2, w_hr2 = w_hh * w_hh, None if w_hr is None else w_hr * w_hr
    a, b, outputs = [h] * len(sizes), [h] * len(sizes), [h] * len(sizes)
    for t in reversed(order(sizes, layer.backwards)):
        at_h = outputs[t] = h.first_rows(sizes[t]).plus(arriving[t])
        if w_hr is not None:
            at_h = at_h.through_product(w_hr, w_hr2)
        back = cell.back(t, at_h, None if c is None else c.first_rows(sizes[t]))
        a[t], b[t] = back.a, back.b
        h = h.with_first_rows(back.b.through_product(w_hh, w_hh2).plus(back.h))
        c = None if c is None or back.c is None else c.with_first_rows(back.c)
    s_a = torch.cat([pair.s for pair in a])
    s_b = torch.cat([pair.s for pair in b]) if layer.mode == GRU else s_a
    s_h = torch.cat([pair.s for pair in outputs]) if needed.hr else None
    g_a = torch.cat([pair.g for pair in a if pair.g is not None]) if with_g and input_g else None
    shares = Weights(
        s_a.t() @ layer.x.square() if needed.ih else None,
        s_b.t() @ before.square() if needed.hh else None,
        s_a.sum(0) if needed.b_ih else None,
        s_b.sum(0) if needed.b_hh else None,
        s_h.t() @ cell.h.square() if s_h is not None and isinstance(cell, LstmCell) else None,
    )
    return LayerShares(Pair(g_a, s_a).through_product(w_ih, w_ih * w_ih), h, c, shares)


def pair_of(g: Share, s: Share, like: Tensor, with_g: bool) -> Pair:
    """(g, s) at a tensor, with zeros for None."""
    g, s = (torch.zeros_like(like) if v is None else v.to(like.dtype) for v in (g, s))
    return Pair(g if with_g else None, s)


def exact(value: Any) -> Any:
    """A tensor in the dtype to compute with: float16 and bfloat16 have no digits to spare over many steps."""
    return value.float() if value is not None and value.dtype in (torch.float16, torch.bfloat16) else value


MKLDNN_WAY_OUT = "Run this layer under torch.backends.mkldnn.flags(enabled=False)."
CUDNN_WAY_OUT = "Run this layer under torch.backends.cudnn.flags(enabled=False)."


def refuse_mkldnn(node: Node) -> str | None:
    """PyTorch calls it for one direction of one LSTM layer at a time, with time first."""
    if saved(node, "mode") == LSTM and not saved(node, "batch_first") and not saved(node, "batch_sizes"):
        return None
    return f"its curvature rule covers one LSTM layer with time first. {MKLDNN_WAY_OUT}"


def mkldnn_lstm(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> list[Share]:
    """an LSTM layer in one direction, node by node backwards in time as without fusion; weights s_aᵀ x², s_bᵀ h², Σ s_a, Σ s_b"""
    x, h, c, output = (exact(saved(node, name)) for name in ("input", "hx_", "cx_", "result0"))
    has_biases, with_g = saved(node, "has_biases"), any(v is not None for v in g)
    weights = [exact(saved(node, f"weight{i}")) for i in range(4 if has_biases else 2)]
    layer = Layer(LSTM, Weights(*weights), x.flatten(0, 1), h, c, [x.shape[1]] * len(x), saved(node, "reverse"))
    at = None if g[0] is None and s[0] is None else pair_of(g[0], s[0], output, with_g).flatten()
    at_h, at_c = pair_of(g[1], s[1], h, with_g), pair_of(g[2], s[2], c, with_g)
    needed = Weights(*(needs(node, i) for i in range(1, 5)))
    shares = through_layer(layer, output.flatten(0, 1), at, at_h, at_c, needed, False)
    return [shares.x.s.view_as(x), *shares.weights[:4], shares.h.s, None if shares.c is None else shares.c.s]


rule("MkldnnRnnLayerBackward0", many=True, contraction=True, same=mkldnn_lstm, refuse=refuse_mkldnn)(mkldnn_lstm)
