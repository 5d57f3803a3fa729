"""Runs a line of the case table: its inputs, its outputs, and the diagonals by the engine and by double backward."""

from __future__ import annotations

import zlib

import torch
from cases import CASES
from cases.table import normal
from oracle import Separable, hessian_diagonal, separable_loss

import hesscale
from hesscale.engine.nodes import edge_of, topological


def build(name: str, dtype: torch.dtype | None = None):
    """The case's inputs (leaves), its differentiable outputs, and a gradient and curvature for each of these."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    case, device = CASES[name], torch.get_default_device()
    dtype = case.dtype if dtype is None else dtype
    inputs = [make(generator).to(device=device, dtype=dtype).requires_grad_() for make in case.inputs]
    torch.manual_seed(0)
    outputs = case.function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    outputs = [y for y in outputs if y.requires_grad]
    draws = [[normal(*y.shape)(generator).to(device=device, dtype=dtype) for _ in range(2)] for y in outputs]
    return inputs, outputs, draws


def compute(inputs, outputs, draws, use_g: bool = True, use_s: bool = True):
    """The engine's diagonals with the given (g, s) at the outputs; without g by way of the Gauss-Newton method."""
    loss = sum(Separable.apply(y, g, s if use_s else None) for y, (g, s) in zip(outputs, draws, strict=True))
    method = "hesscale" if use_g else "hesscale_gn"
    return hesscale.grad(loss, inputs, method=method, outputs=outputs, head="rules", allow_unused=True, retain_graph=True)[1]


def expected(inputs, outputs, draws, use_g: bool = True, use_s: bool = True):
    loss = sum(separable_loss(y, g if use_g else None, s if use_s else None) for y, (g, s) in zip(outputs, draws, strict=True))
    return [hessian_diagonal(loss, x) for x in inputs]


def nodes_of(name: str) -> set[str]:
    _, outputs, _ = build(name)
    return {node.name() for y in outputs for node in topological(edge_of(y)[0])}
