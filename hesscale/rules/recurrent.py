"""Fused recurrent layers: backpropagation through time by the rules of the unfused layer, so fusion does not change the diagonal.

The pre-activations of all steps are two matrix products, since the node has saved the layer's output h'. Then (g, s) at h and c
are propagated back from step to step (:mod:`.recurrent_cells`), with two small matrix products each: g W_hh and s W_hh². The
shares of the weights are summed over time, by one matrix product for all steps. Computations that need much memory are done for a
block of steps at a time.

The rows of a tensor are those of the first step, then those of the second and so on, as in a ``PackedSequence``. Later steps may
have fewer rows. A sequence has the same position among the rows of each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from .recurrent_cells import GruCell, LstmCell, Pair, RnnCell, activations, join
from .registry import Final, Node, Share, needs, rule, saved

RELU, TANH, LSTM, GRU = range(4)  # the modes of cuDNN
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
MAX_BLOCK_NUMEL = 2**17  # of the gates in a block of steps
T = TypeVar("T")
CELLS: dict[int, Any] = {RELU: torch.rnn_relu_cell, TANH: torch.rnn_tanh_cell, GRU: torch.gru_cell}


class Weights(NamedTuple):
    """The weights of one layer in one direction, in PyTorch's order; also their shares, or whether each of them needs one."""

    ih: Any
    hh: Any
    b_ih: Any = None
    b_hh: Any = None
    hr: Any = None  # the projection of h

    @staticmethod
    def of(values: Sequence[Any], projected: bool) -> Weights:
        """From a list without the weights that the layer does not have."""
        return Weights(*values[:-1])._replace(hr=values[-1]) if projected else Weights(*values)

    def shaped(self, rows: int, projection: int) -> Weights:
        """The weights in their shapes. Under autocast, they come flattened in one buffer."""
        ih, hh, b_ih, b_hh, hr = self
        b_ih, b_hh = (None if b is None else b.reshape(rows) for b in (b_ih, b_hh))
        return Weights(ih.reshape(rows, -1), hh.reshape(rows, -1), b_ih, b_hh, None if hr is None else hr.reshape(projection, -1))


class Layer(NamedTuple):
    """The inputs of one layer, in one direction."""

    mode: int
    weights: Weights
    x: Tensor  # (rows, features)
    h: Tensor  # before the first step: (sequences, hidden), or (sequences, projection)
    c: Tensor | None  # before the first step of an LSTM: (sequences, hidden)
    sizes: list[int]  # the number of rows of each step
    backwards: bool

    def in_order(self, steps: Sequence[T]) -> Sequence[T]:
        """Steps, or blocks of them, in the order in which this direction visits them."""
        return steps[::-1] if self.backwards else steps

    def blocks(self) -> list[Block]:
        """The steps in blocks of limited size."""
        length = max(1, MAX_BLOCK_NUMEL // max(1, self.sizes[0] * self.weights.hh.shape[0]))
        starts = [0, *accumulate(self.sizes)]
        ranges = [range(t, min(t + length, len(self.sizes))) for t in range(0, len(self.sizes), length)]
        return [Block(steps, slice(starts[steps[0]], starts[steps[-1] + 1])) for steps in ranges]

    def output(self) -> Tensor:
        """h' of all steps, computed one step after another."""
        w_ih, w_hh, b_ih, b_hh, w_hr = self.weights
        h, c, inputs, found = self.h, self.c, self.x.split(self.sizes), [self.h] * len(self.sizes)
        for t in self.in_order(range(len(self.sizes))):
            n = self.sizes[t]
            if c is None:
                new = CELLS[self.mode](inputs[t], h[:n], w_ih, w_hh, b_ih, b_hh)
            else:
                i, f, q, o = activations(linear(inputs[t], w_ih, b_ih).add_(linear(h[:n], w_hh, b_hh)))
                new_c = torch.addcmul(i.mul_(q), f, c[:n])
                new, c = o.mul_(new_c.tanh()), with_first_rows(c, new_c)
            found[t] = new if w_hr is None else new @ w_hr.t()
            h = with_first_rows(h, found[t])
        return torch.cat(found)

    def h_before(self, output: Tensor) -> Tensor:
        """The input h of each row: that of the step before, or the initial h at the start of a sequence."""
        steps, found = output.split(self.sizes), [self.h] * len(self.sizes)
        for t, n in enumerate(self.sizes):
            source = t + 1 if self.backwards else t - 1
            found[t] = with_first_rows(self.h[:n], steps[source][:n]) if 0 <= source < len(steps) else self.h[:n]
        return torch.cat(found)

    def c_before(self, gates: Tensor) -> Tensor:
        """The input c of each row, in an LSTM."""
        assert self.c is not None
        c, found = self.c, [self.c] * len(self.sizes)
        for block in self.in_order(self.blocks()):
            i, f, q, _ = activations(gates[block.rows])
            sizes = [self.sizes[t] for t in block.steps]
            for t, gained, kept in self.in_order(list(zip(block.steps, i.mul_(q).split(sizes), f.split(sizes), strict=True))):
                found[t] = c[: self.sizes[t]]
                c = with_first_rows(c, torch.addcmul(gained, kept, found[t]))
        return torch.cat(found)


class Block(NamedTuple):
    """Consecutive steps, and their rows."""

    steps: range
    rows: slice


def with_first_rows(rows: Tensor, new: Tensor) -> Tensor:
    """Rows of which new ones replace the first."""
    return new if len(new) == len(rows) else torch.cat((new, rows[len(new) :]))


class Gates:
    """The pre-activations of all steps, and what else the cells need."""

    def __init__(self, layer: Layer, output: Tensor) -> None:
        w_ih, w_hh, b_ih, b_hh, _ = layer.weights
        self.layer = layer
        self.h = layer.h_before(output)
        self.a, self.b = linear(layer.x, w_ih, b_ih), linear(self.h, w_hh, b_hh)
        if layer.mode != GRU:
            self.b = self.a.add_(self.b)
        self.c = None if layer.c is None else layer.c_before(self.a)

    def cell(self, block: Block, with_g: bool) -> RnnCell | GruCell | LstmCell:
        sizes, a = self.layer.sizes[block.steps.start : block.steps.stop], self.a[block.rows]
        if self.c is not None:
            return LstmCell(a, self.c[block.rows], sizes, with_g)
        if self.layer.mode == GRU:
            return GruCell(a, self.b[block.rows], self.h[block.rows], sizes, with_g)
        return RnnCell(a, sizes, with_g, is_relu=self.layer.mode == RELU)


class LayerShares(NamedTuple):
    """(g, s) at the inputs of a layer, in one direction, and s at its weights."""

    x: Pair | None  # None if it is not needed
    h: Pair
    c: Pair | None
    weights: Weights


def through_layer(
    layer: Layer, output: Tensor, at: Pair | None, h: Pair, c: Pair | None, needed: Weights, *, needs_x: bool, keep_g: bool
) -> LayerShares:
    """Propagate (g, s) from a layer's output, and from its last h and c, to its inputs; g at x only with ``keep_g``.

    With s_a and s_b at the pre-activations, and m for the h of an LSTM before its projection, the weights' shares are

        s_aᵀ x²,  s_bᵀ h²,  Σ s_a,  Σ s_b,  s_hᵀ m²
    """
    w_ih, w_hh, _, _, w_hr = layer.weights
    sizes, gates = layer.sizes, Gates(layer, output)
    arriving = [None] * len(sizes) if at is None else at.split(sizes)
    w_hh_squares, w_hr_squares = w_hh * w_hh, None if w_hr is None else w_hr * w_hr
    at_a, s_b, s_h = [h] * len(sizes), [h.s] * len(sizes), [h.s] * len(sizes)
    hr_share: Share = None
    for block in reversed(layer.in_order(layer.blocks())):
        cell = gates.cell(block, h.g is not None)
        for t in reversed(layer.in_order(block.steps)):
            here = h.first_rows(sizes[t]).plus(arriving[t])
            s_h[t] = here.s
            if w_hr_squares is not None:
                here = here.through_product(w_hr, w_hr_squares)
            back = cell.back(t - block.steps.start, here, None if c is None else c.first_rows(sizes[t]))
            at_a[t], s_b[t] = back.a if keep_g else Pair(None, back.a.s), back.b.s
            h = replace_rows(h, back.b.through_product(w_hh, w_hh_squares).plus(back.h))
            c = None if c is None or back.c is None else replace_rows(c, back.c)
        if needed.hr and isinstance(cell, LstmCell):
            share = torch.cat([s_h[t] for t in block.steps]).t() @ cell.h.square()
            hr_share = share if hr_share is None else hr_share + share
    a = join(torch.cat, at_a, 0)
    b = torch.cat(s_b) if layer.mode == GRU else a.s
    shares = Weights(
        a.s.t() @ layer.x.square() if needed.ih else None,
        b.t() @ gates.h.square() if needed.hh else None,
        a.s.sum(0) if needed.b_ih else None,
        b.sum(0) if needed.b_hh else None,
        hr_share,
    )
    return LayerShares(a.through_product(w_ih, w_ih * w_ih) if needs_x else None, h, c, shares)


def replace_rows(rows: Pair, new: Pair) -> Pair:
    """Rows of which new ones replace the first."""
    g = None if rows.g is None or new.g is None else with_first_rows(rows.g, new.g)
    return Pair(g, with_first_rows(rows.s, new.s))


def pair_of(g: Share, s: Share, like: Tensor, with_g: bool) -> Pair:
    """(g, s) at a tensor, with zeros for None."""
    g, s = (torch.zeros_like(like) if value is None else value.to(like.dtype) for value in (g, s))
    return Pair(g if with_g else None, s)


def single(value: Any) -> Any:
    """A tensor in half precision, converted to single precision. All computations are at least in single precision."""
    return value.float() if value is not None and value.dtype in (torch.float16, torch.bfloat16) else value


MKLDNN = "Run this layer under torch.backends.mkldnn.flags(enabled=False)."
CUDNN = "Run this layer under torch.backends.cudnn.flags(enabled=False)."


def refuse_mkldnn(node: Node) -> str | None:
    return None if saved(node, "mode") == LSTM else Final(f"its curvature rule covers LSTM layers only. {MKLDNN}")


def mkldnn_layer(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> list[Share]:
    """one LSTM layer in one direction, back through time by the rules of its gates; weights s_aᵀ x² and s_bᵀ h²"""
    x, h, c, output = (single(saved(node, name)) for name in ("input", "hx_", "cx_", "result0"))
    weights = Weights(*[single(saved(node, f"weight{i}")) for i in range(4 if saved(node, "has_biases") else 2)])
    layer = Layer(LSTM, weights, x.flatten(0, 1), h, c, [x.shape[1]] * len(x), saved(node, "reverse"))
    with_g = any(value is not None for value in g)
    at = None if g[0] is None and s[0] is None else pair_of(g[0], s[0], output, with_g).map(lambda v: v.flatten(0, 1))
    ends = pair_of(g[1], s[1], h, with_g), pair_of(g[2], s[2], c, with_g)
    needed = Weights(*[needs(node, i) for i in range(1, 5)])
    shares = through_layer(layer, output.flatten(0, 1), at, *ends, needed, needs_x=needs(node, 0), keep_g=False)
    return [
        None if shares.x is None else shares.x.s.view_as(x),
        *shares.weights[:4],
        shares.h.s,
        None if shares.c is None else shares.c.s,
    ]


rule("MkldnnRnnLayerBackward0", many=True, contraction=True, same=mkldnn_layer, refuse=refuse_mkldnn)(mkldnn_layer)


def refuse_cudnn(node: Node) -> str | None:
    if saved(node, "train") and saved(node, "dropout") > 0 and saved(node, "num_layers") > 1:
        return Final(f"the mask of cuDNN's dropout between layers is not accessible. {CUDNN}")
    return None


class Sequences(NamedTuple):
    """The layout of sequences in a tensor: packed rows, or (batch, time, …), or (time, batch, …)."""

    sizes: list[int]
    is_packed: bool
    batch_first: bool

    @staticmethod
    def of(node: Node) -> Sequences:
        sizes, batch_first = [int(n) for n in saved(node, "batch_sizes")], saved(node, "batch_first")
        if sizes:
            return Sequences(sizes, True, batch_first)
        batch, time = saved(node, "input").shape[:2] if batch_first else saved(node, "input").shape[1::-1]
        return Sequences([batch] * time, False, batch_first)

    def rows(self, value: Tensor) -> Tensor:
        return value if self.is_packed else (value.transpose(0, 1) if self.batch_first else value).flatten(0, 1)

    def shaped(self, rows: Tensor) -> Tensor:
        if self.is_packed:
            return rows
        value = rows.unflatten(0, (len(self.sizes), self.sizes[0]))
        return value.transpose(0, 1) if self.batch_first else value


def layers_of(node: Node, sequences: Sequences) -> list[list[tuple[Layer, Tensor]]]:
    """Each layer and its output, by direction. cuDNN saves only the output of the last layer, so the others are recomputed."""
    x, hx, cx, last = (single(saved(node, name)) for name in ("input", "hx", "cx", "result0"))
    mode, stride, directions = saved(node, "mode"), saved(node, "weight_stride0"), 2 if saved(node, "bidirectional") else 1
    rows, projected = GATES[mode] * saved(node, "hidden_size"), saved(node, "proj_size") > 0
    weights = [single(weight) for weight in saved(node, "weight")]
    x, last, found = sequences.rows(x), sequences.rows(last), []
    for first in range(0, len(hx), directions):
        layers = []
        for part in range(first, first + directions):
            own = Weights.of(weights[part * stride : (part + 1) * stride], projected).shaped(rows, saved(node, "proj_size"))
            c = None if mode != LSTM else cx[part]
            layers.append(Layer(mode, own, x, hx[part], c, sequences.sizes, part > first))
        x = last if first + directions == len(hx) else torch.cat([layer.output() for layer in layers], 1)
        found.append(list(zip(layers, x.chunk(directions, 1), strict=True)))
    return found


def cudnn_layers(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> list[Share]:
    """RNN, GRU or LSTM, all layers and directions, back through time by the rules of its gates; weights s_aᵀ x² and s_bᵀ h²"""
    sequences = Sequences.of(node)
    stack = layers_of(node, sequences)
    stride, projected, is_lstm = saved(node, "weight_stride0"), saved(node, "proj_size") > 0, saved(node, "mode") == LSTM
    with_g, directions = any(value is not None for value in g), len(stack[0])
    hx, cx, last = (single(saved(node, name)) for name in ("hx", "cx", "result0"))
    at = None if g[0] is None and s[0] is None else pair_of(g[0], s[0], last, with_g).map(sequences.rows)
    ends_h = pair_of(g[1], s[1], hx, with_g)
    ends_c = pair_of(g[2], s[2], cx, with_g) if is_lstm else None
    shares: list[LayerShares] = []  # the last layer first, and its last direction
    for level in reversed(range(len(stack))):
        below: Pair | None = None
        for d in reversed(range(directions)):
            part = level * directions + d
            needed = Weights.of([needs(node, 1 + part * stride + i) for i in range(stride)], projected)
            h, c = ends_h.of_part(part), None if ends_c is None else ends_c.of_part(part)
            mine = None if at is None else at.of_direction(d, directions)
            layer, output = stack[level][d]
            needs_x = level > 0 or needs(node, 0)
            shares.append(through_layer(layer, output, mine, h, c, needed, needs_x=needs_x, keep_g=level > 0))
            below = below if shares[-1].x is None else shares[-1].x.plus(below)
        at = below
    parts = shares[::-1]
    weights = [share for part in parts for share in (*part.weights[: stride - projected], *part.weights[4:][:projected])]
    shapes = [weight.shape for weight in saved(node, "weight")]
    weights = [None if share is None else share.reshape(shape) for share, shape in zip(weights, shapes, strict=True)]
    c_share = torch.stack([part.c.s for part in parts if part.c is not None]) if is_lstm else None
    return [None if at is None else sequences.shaped(at.s), *weights, torch.stack([part.h.s for part in parts]), c_share]


rule("CudnnRnnBackward0", many=True, contraction=True, same=cudnn_layers, refuse=refuse_cudnn)(cudnn_layers)


def biased(node: Node, side: str) -> Tensor:
    gates, bias = single(saved(node, f"{side}_gates")), single(saved(node, f"{side}_bias"))
    return gates if bias is None else gates + bias


@rule("ThnnFusedLstmCellBackward0", many=True)
def lstm_cell(node: Node, g: tuple[Share, ...], s: tuple[Share, ...]) -> list[Share]:
    """c' = f c + i q and h' = o tanh(c') on CUDA, as separate operators from the gates' pre-activations"""
    c, with_g = single(saved(node, "cx")), any(value is not None for value in g)
    cell = LstmCell(biased(node, "input") + biased(node, "hidden"), c, [len(c)], with_g)
    back = cell.back(0, pair_of(g[0], s[0], c, with_g), pair_of(g[1], s[1], c, with_g))
    return [back.a.s, back.b.s, None if back.c is None else back.c.s, back.a.s, back.b.s]


@rule("ThnnFusedGruCellBackward0")
def gru_cell(node: Node, g: Share, s: Share) -> list[Share]:
    """n = tanh(a + r b) and h' = (h − n) z + n on CUDA, as separate operators from the gates' pre-activations"""
    h, with_g = single(saved(node, "hx")), g is not None
    cell = GruCell(biased(node, "input"), biased(node, "hidden"), h, [len(h)], with_g)
    back = cell.back(0, pair_of(g, s, h, with_g))
    return [back.a.s, back.b.s, None if back.h is None else back.h.s, back.a.s, back.b.s]
