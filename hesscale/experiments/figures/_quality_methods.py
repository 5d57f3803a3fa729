"""Hessian diagonals of many small tanh classifiers at once, each for one example: exact diagonals, and every method's estimate.

Vectors are rows, (networks, rows, units); weights are (networks, out, in). For one example, the second derivatives of a layer are
∂²L/∂W²_ij = t_i h_j² for its weights and t_i for its biases, with h its input and t = diag ∂²L/∂a² at its pre-activations a.
The estimates of all methods except AdaHessian have this form too, so t is sufficient.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy
import torch
from torch import Tensor

DRAWS = 50
STRUCTURED = ("HesScale", "HesScaleGN", "BL89", "diag(G)", "GGN-MC1", f"GGN-MC{DRAWS}", "g²", "|diag(H)|")  # the last has t = 0
HUTCHINSON = ("AdaHessian-MC1", f"AdaHessian-MC{DRAWS}")
METHODS = (*STRUCTURED, *HUTCHINSON)
TO_GGN = ("HesScaleGN", "GGN-MC1", f"GGN-MC{DRAWS}", "|diag(H)|")  # also compared with diag(G); the last one gives its norm
AUTHORS = "authors"

Layers = list[tuple[Tensor, Tensor]]  # weights (networks, out, in) and biases (networks, 1, out), from first to last layer
Rows = list[Tensor]  # one for each layer: (networks, rows, units)
Generators = list[numpy.random.Generator]  # one for each network

SIGNS = torch.tensor([[1.0 - 2 * (byte >> bit & 1) for bit in range(8)] for byte in range(256)], dtype=torch.float64)


@dataclass
class Pass:
    """A forward and backward pass of all networks, each for one example.

    Attributes:
        h: inputs of the layers.
        q: predicted distributions.
        labels: labels of the examples.
        by_label: gradients at pre-activations, with one row for each possible label of the example.
        g: gradients at pre-activations for the actual labels.
        bend: f''(a) ∘ ∂L/∂h of the hidden layers; for tanh, whose f'' is −2 h f', it is −2 h ∘ ∂L/∂a.
    """

    layers: Layers
    h: Rows
    q: Tensor
    labels: Tensor
    by_label: Rows
    g: Rows
    bend: Rows

    def of(self, k: int) -> Pass:
        """The pass of one network."""
        h, by_label, g, bend = ([rows[k : k + 1] for rows in each] for each in (self.h, self.by_label, self.g, self.bend))
        layers = [(weight[k : k + 1], bias[k : k + 1]) for weight, bias in self.layers]
        return Pass(layers, h, self.q[k : k + 1], self.labels[k : k + 1], by_label, g, bend)


def initial(sizes: list[int], generators: Generators) -> Layers:
    """Layers initialized as in nn.Linear: weights and biases uniform in ±1/√in."""

    def uniform(bound: float, *shape: int) -> Tensor:
        return torch.stack([torch.from_numpy(generator.uniform(-bound, bound, shape)) for generator in generators])

    return [(uniform(before**-0.5, after, before), uniform(before**-0.5, 1, after)) for before, after in pairwise(sizes)]


def propagate(layers: Layers, inputs: Tensor, labels: Tensor) -> Pass:
    """A forward pass with inputs (networks, 1, in), and a backward pass for every label."""
    h = [inputs]
    for weight, bias in layers[:-1]:
        h.append(torch.tanh(h[-1] @ weight.mT + bias))
    weight, bias = layers[-1]
    q = torch.softmax(h[-1] @ weight.mT + bias, -1)
    by_label = [q - torch.eye(q.shape[-1], dtype=q.dtype)]
    for (weight, _), y in zip(layers[:0:-1], h[:0:-1], strict=True):
        by_label.insert(0, by_label[0] @ weight * (1 - y * y))
    g = [rows[torch.arange(len(labels)), labels].unsqueeze(1) for rows in by_label]
    return Pass(layers, h, q, labels, by_label, g, [-2 * y * slope for y, slope in zip(h[1:], g[:-1], strict=True)])


def loss(at: Pass) -> Tensor:
    """Cross entropy of each network."""
    return -at.q.squeeze(1).gather(1, at.labels.unsqueeze(1)).squeeze(1).log()


def descend(at: Pass, step_size: float) -> Layers:
    """The layers after a step of SGD."""
    parts = zip(at.layers, at.g, at.h, strict=True)
    return [(weight - step_size * g.mT @ h, bias - step_size * g) for (weight, bias), g, h in parts]


def exact(at: Pass) -> Rows:
    """t from full matrices ∂²L/∂a²: diag(q) − qqᵀ at the logits, D Wᵀ ∂²L/∂a² W D + diag(f'' ∘ ∂L/∂h) below, D = diag(f')."""
    found = [torch.diag_embed(at.q.squeeze(1)) - at.q.mT @ at.q]
    for (weight, _), y, bend in zip(at.layers[:0:-1], at.h[:0:-1], at.bend[::-1], strict=True):
        jacobian = weight * (1 - y * y)
        found.insert(0, jacobian.mT @ found[0] @ jacobian + torch.diag_embed(bend.squeeze(1)))
    return [matrix.diagonal(dim1=1, dim2=2).unsqueeze(1) for matrix in found]


def recursion(at: Pass, s: Tensor, *, gauss_newton: bool = False) -> Rows:
    """The paper's Eq. 4, starting with s at the logits: f'² ∘ (W²)ᵀ s + f'' ∘ ∂L/∂h, without the last term for Gauss-Newton."""
    found = [s]
    for (weight, _), y, bend in zip(at.layers[:0:-1], at.h[:0:-1], at.bend[::-1], strict=True):
        s = found[0] @ weight.square() * (1 - y * y).square()
        found.insert(0, s if gauss_newton else s + bend)
    return found


def bl89(at: Pass, quirks: str = "") -> Rows:
    """BL89 treats log-softmax as elementwise, so s is zero except at the label. In the authors' code, all entries are zero."""
    label = torch.nn.functional.one_hot(at.labels, at.q.shape[-1]).unsqueeze(1)
    return recursion(at, torch.zeros_like(at.q) if quirks == AUTHORS else label * (at.q - at.q * at.q))


def structured(at: Pass, bl: Rows, counts: Tensor) -> Rows:
    """t of each method in STRUCTURED, as rows. ``counts`` (networks, 2, classes) are label counts of one draw and of DRAWS."""
    first = at.q - at.q * at.q
    hesscale, gauss_newton = recursion(at, first), recursion(at, first, gauss_newton=True)
    weights = torch.cat([at.q, counts / counts.sum(-1, keepdim=True)], 1)
    ggn = [weights @ rows.square() for rows in at.by_label]  # exact, and from draws
    squares = [g.square() for g in at.g]
    layers = zip(hesscale, gauss_newton, bl, ggn, squares, strict=True)
    return [torch.cat([*rows, torch.zeros_like(rows[0])], 1) for rows in layers]


def draw_labels(at: Pass, generators: Generators) -> Tensor:
    """The counts of each label in one draw from the predicted distribution, and in DRAWS other draws."""
    pairs = zip(generators, at.q.squeeze(1).numpy(), strict=True)
    return torch.stack([torch.from_numpy(generator.multinomial([1, DRAWS], q)) for generator, q in pairs])


def draw_signs(layers: Layers, draws: int, generators: Generators) -> Layers:
    """±1 for every parameter and draw: (networks, out, draws, in) for weights, (networks, draws, out) for biases."""
    sizes = [part[0].numel() * draws for layer in layers for part in layer]
    count = sum(sizes)
    raw = [torch.frombuffer(bytearray(generator.bytes(-(-count // 8))), dtype=torch.uint8) for generator in generators]
    parts = SIGNS.index_select(0, torch.cat(raw).int()).view(len(raw), -1)[:, :count].split(sizes, 1)
    return [
        (v.reshape(len(raw), weight.shape[1], draws, weight.shape[2]), b.reshape(len(raw), draws, bias.shape[2]))
        for (weight, bias), v, b in zip(layers, parts[::2], parts[1::2], strict=True)
    ]


@dataclass
class Products:
    """∂²L/∂θ² z for several draws of z: dg_i h_j + g_i dh_j for weights and dg_i for biases.

    Attributes:
        dh: derivatives of the layers' inputs along z, a row for each draw; None for the first layer, whose input is constant.
        dg: derivatives of the gradients at pre-activations along z.
    """

    at: Pass
    z: Layers
    dh: list[Tensor | None]
    dg: Rows

    def hutchinson(self, draws: slice) -> Layers:
        """The mean of z ∘ ∂²L/∂θ² z over some draws."""
        found = []
        for (v, b), h, g, dh, dg in zip(self.z, self.at.h, self.at.g, self.dh, self.dg, strict=True):
            v, b, dg = v[:, :, draws], b[:, draws], dg[:, draws]
            total = (dg.mT.unsqueeze(2) @ v).squeeze(2) * h
            if dh is not None:
                total = total + g.mT * (v * dh[:, draws].unsqueeze(1)).sum(2)
            found.append((total / b.shape[1], (b * dg).mean(1, keepdim=True)))
        return found

    def absolute(self, draw: int) -> Layers:
        """|∂²L/∂θ² z| of one draw."""
        found = []
        for h, g, dh, dg in zip(self.at.h, self.at.g, self.dh, self.dg, strict=True):
            row = dg[:, draw].unsqueeze(1)
            found.append(((row.mT * h + (0 if dh is None else g.mT * dh[:, draw].unsqueeze(1))).abs(), row.abs()))
        return found


def products(at: Pass, z: Layers) -> Products:
    """The forward and backward pass, differentiated along z."""
    dh: list[Tensor | None] = [None]
    da: Rows = []
    for (weight, _), (v, b), h in zip(at.layers, z, at.h, strict=True):
        along = (v.flatten(1, 2) @ h.mT).view(v.shape[:3]).mT + b
        da.append(along if dh[-1] is None else along + dh[-1] @ weight.mT)
        dh.append((1 - at.h[len(da)] ** 2) * da[-1] if len(da) < len(at.h) else None)
    weighted = at.q * da[-1]
    dg = [weighted - at.q * weighted.sum(-1, keepdim=True)]
    below = zip(at.layers[:0:-1], z[:0:-1], at.g[:0:-1], at.h[:0:-1], at.bend[::-1], da[-2::-1], strict=True)
    for (weight, _), (v, b), g, y, bend, along in below:
        slope = (g @ v.flatten(2)).view(*b.shape[:2], -1) + dg[0] @ weight
        dg.insert(0, (1 - y * y) * slope + bend * along)
    return Products(at, z, dh[:-1], dg)


def adahessian(at: Pass, generators: Generators, quirks: str = "") -> list[Layers]:
    """The estimates in HUTCHINSON: the mean of z ∘ ∂²L/∂θ² z over one draw, and over DRAWS other draws.

    The authors' code uses |∂²L/∂θ² z| of one draw instead, and in place of DRAWS draws |∂²L/∂θ² z| / DRAWS, also of one draw.
    """
    if quirks == AUTHORS:
        found = products(at, draw_signs(at.layers, 2, generators))
        return [found.absolute(0), [(weight / DRAWS, bias / DRAWS) for weight, bias in found.absolute(1)]]
    found = products(at, draw_signs(at.layers, 1 + DRAWS, generators))
    return [found.hutchinson(slice(0, 1)), found.hutchinson(slice(1, None))]


def distances(at: Pass, found: Rows, truth: Rows) -> Tensor:
    """‖·‖₁ distances of each row's diagonals t_i h_j², t_i from the true ones, as (networks, layers, rows)."""
    parts = zip(found, truth, at.h, strict=True)
    return torch.stack([(rows - t).abs().sum(-1) * (1 + h.square().sum(-1)) for rows, t, h in parts], 1)


def distance(at: Pass, found: Layers, truth: Rows) -> Tensor:
    """‖·‖₁ distances of diagonals of any form, as (networks, layers)."""
    parts = zip(found, truth, at.h, strict=True)
    return torch.stack([(w - t.mT * h * h).abs().sum((1, 2)) + (b - t).abs().sum((1, 2)) for (w, b), t, h in parts], 1)
