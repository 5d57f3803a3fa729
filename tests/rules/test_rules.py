"""Every rule against double backward, on a loss whose Hessian at the operator's output is diagonal: there the rule is exact."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
import torch
from cases import CASES
from cases.table import NEW_TORCH, normal
from oracle import Separable, hessian_diagonal, separable_loss

import hesscale
from hesscale.engine.nodes import edge_of, topological
from hesscale.rules import BL89, RULES


def build(name: str, dtype: torch.dtype = torch.float64):
    """The case's inputs (leaves), its differentiable outputs, and a gradient and curvature for each of these."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))
    case, device = CASES[name], torch.get_default_device()
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


@pytest.mark.parametrize("use", ["both", "gradient", "curvature"])
@pytest.mark.parametrize("name", CASES)
def test_rule_is_exact_on_a_separable_loss(name, use):
    inputs, outputs, draws = build(name)
    use_g, use_s = use != "curvature", use != "gradient"
    got = compute(inputs, outputs, draws, use_g, use_s)
    for mine, truth in zip(got, expected(inputs, outputs, draws, use_g, use_s), strict=True):
        torch.testing.assert_close(mine if mine is not None else torch.zeros_like(truth), truth, rtol=1e-9, atol=1e-11)


# One case per family: the shared body must notice when its rule is a little wrong.
FAMILIES = {
    "activations": "gelu",
    "bilinear": "addmm",
    "convolution": "conv2d",
    "distances": "cdist by products",
    "elementwise": "mul",
    "special_functions": "exp",
    "indexing": "gather",
    "linear_maps": "permute",
    "losses": "mse mean",
    "normalization": "layer_norm",
    "pooling": "avg_pool2d",
    "reductions": "logsumexp",
    "softmax": "log_softmax",
    "view_writes": "write sigmoid",
}


def test_families_are_all_of_them():
    assert set(FAMILIES) == {rule.family for rule in RULES.values()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", ["gradient", "curvature"])
def test_a_broken_rule_is_caught(family, broken, monkeypatch):
    name = FAMILIES[family]
    for node in nodes_of(name) & set(RULES):
        if RULES[node].family == family:
            monkeypatch.setitem(RULES, node, break_rule(RULES[node], broken))
    if broken == "curvature" or any(RULES[node].curved for node in nodes_of(name) & set(RULES)):
        with pytest.raises(AssertionError, match="not close"):
            test_rule_is_exact_on_a_separable_loss(name, "both")


def break_rule(rule, broken: str):
    """The rule as if g, or s, were a thousandth larger than it is."""

    def off(value, wrong: bool):
        if isinstance(value, tuple):
            return tuple(off(v, wrong) for v in value)
        return value * 1.001 if wrong and value is not None else value

    def function(node, g, s):
        return rule.function(node, off(g, broken == "gradient"), off(s, broken == "curvature"))

    return dataclasses.replace(rule, function=function)


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
    untested = set() if NEW_TORCH else {"GridSampler2DBackward0", "GridSampler3DBackward0", "NextafterBackward0"}
    missing = (set(RULES) | set(BL89)) - seen - ELSEWHERE - absent - untested
    assert not missing, f"rules without a case: {sorted(missing)}"
    assert not ELSEWHERE & seen
