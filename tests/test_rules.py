"""Every rule against double backward, on a loss whose Hessian at the operator's output is diagonal: there the rule is exact."""

from __future__ import annotations

import zlib

import pytest
import torch
from cases import CASES
from oracle import Separable, hessian_diagonal, separable_loss

import hesscale
from hesscale.nodes import edge_of, topological
from hesscale.rules import BL89, RULES


def build(name: str, dtype: torch.dtype = torch.float64):
    """The case's inputs (leaves), its differentiable outputs, and a gradient and curvature for each of these."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    case = CASES[name]
    inputs = [make(generator).to(dtype).requires_grad_() for make in case.inputs]
    torch.manual_seed(0)
    outputs = case.function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    outputs = [y for y in outputs if y.requires_grad]
    draws = [[torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2)] for y in outputs]
    return inputs, outputs, draws


def compute(inputs, outputs, draws, use_g: bool = True, use_s: bool = True):
    """The engine's diagonals with the given (g, s) at the outputs; without g by way of the Gauss-Newton method."""
    loss = sum(Separable.apply(y, g, s if use_s else None) for y, (g, s) in zip(outputs, draws, strict=True))
    method = "hesscale" if use_g else "hesscale_gn"
    return hesscale.grad(loss, inputs, method=method, outputs=outputs, head="rules", allow_unused=True, retain_graph=True)[1]


def expected(inputs, outputs, draws, use_g: bool = True, use_s: bool = True):
    loss = sum(separable_loss(y, g if use_g else None, s if use_s else None) for y, (g, s) in zip(outputs, draws, strict=True))
    return [hessian_diagonal(loss, x) for x in inputs]


@pytest.mark.parametrize("use", ["both", "gradient", "curvature"])
@pytest.mark.parametrize("name", CASES)
def test_rule_is_exact_on_a_separable_loss(name, use):
    inputs, outputs, draws = build(name)
    use_g, use_s = use != "curvature", use != "gradient"
    got = compute(inputs, outputs, draws, use_g, use_s)
    for mine, truth in zip(got, expected(inputs, outputs, draws, use_g, use_s), strict=True):
        torch.testing.assert_close(mine if mine is not None else torch.zeros_like(truth), truth, rtol=1e-9, atol=1e-11)


def nodes_of(name: str) -> set[str]:
    _, outputs, _ = build(name)
    return {node.name() for y in outputs for node in topological(edge_of(y)[0])}


# Nodes that no call on a CPU makes: they belong to other devices.
ELSEWHERE = {
    "CudnnBatchNormBackward0",
    "CudnnGridSamplerBackward0",
    "FusedDropoutBackward0",
    "FusedRmsNormBackward0",
    "LinearBackward0",
    "MiopenBatchNormBackward0",
    "PinMemoryBackward0",
}


def test_every_rule_has_a_case():
    seen = set().union(*(nodes_of(name) for name in CASES))
    absent = {name for name in RULES if name[-9:-1] == "Backward" and not hasattr(torch._C._functions, name)}  # in older torch
    missing = (set(RULES) | set(BL89)) - seen - ELSEWHERE - absent
    assert not missing, f"rules without a case: {sorted(missing)}"
    assert not ELSEWHERE & seen
