"""Every rule against double backward, on a loss whose Hessian at the operator's output is diagonal: there the rule is exact."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from case_runner import build, compute, expected, nodes_of
from cases import CASES
from cases.table import NEW_TORCH

from hesscale.rules import BL89, COMPLEX, RULES, attention, parts

TOLERANCES = {torch.float64: (1e-9, 1e-11), torch.float32: (1e-5, 1e-5), torch.bfloat16: (0.02, 0.02)}


@pytest.mark.parametrize("use", ["both", "gradient", "curvature"])
@pytest.mark.parametrize("name", CASES)
def test_rule_is_exact_on_a_separable_loss(name, use):
    inputs, outputs, draws = build(name)
    use_g, use_s = use != "curvature", use != "gradient"
    got = compute(inputs, outputs, draws, use_g, use_s)
    rtol, atol = TOLERANCES[inputs[0].dtype]
    for mine, truth in zip(got, expected(inputs, outputs, draws, use_g, use_s), strict=True):
        torch.testing.assert_close(mine if mine is not None else torch.zeros_like(truth), truth, rtol=rtol, atol=atol)


IN_PARTS = [
    name for name in CASES if name.split()[0] in {"batch_norm", "gelu", "hardswish", "layer_norm", "mish", "silu", "softplus"}
]


@pytest.mark.parametrize("use", ["both", "gradient", "curvature"])
@pytest.mark.parametrize("name", IN_PARTS)
def test_a_large_tensor_is_divided(name, use, monkeypatch):
    monkeypatch.setattr(parts, "MAX_ENTRIES", 2)
    monkeypatch.setattr(parts, "MIN_PARTS", 1)
    test_rule_is_exact_on_a_separable_loss(name, use)


# One case per family: the shared body must notice when its rule is a little wrong.
FAMILIES = {
    "activations": "gelu",
    "bilinear": "addmm",
    "complex_numbers": "complex abs",
    "convolution": "conv2d",
    "distances": "cdist by products",
    "elementwise": "mul",
    "fourier": "fnet",
    "special_functions": "exp",
    "indexing": "gather",
    "linalg": "inv",
    "linear_maps": "permute",
    "losses": "mse mean",
    "normalization": "layer_norm",
    "pooling": "avg_pool2d",
    "quantization": "fake quantize with an observer",
    "reductions": "logsumexp",
    "softmax": "log_softmax",
    "view_writes": "write sigmoid",
}


def test_every_family_is_tested():
    elsewhere = {"attention", "recurrent"}  # test_attention.py, test_recurrent.py
    assert {*FAMILIES, *elsewhere} == {rule.family for table in (RULES, COMPLEX) for rule in table.values()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", ["gradient", "curvature"])
def test_a_broken_rule_is_caught(family, broken, monkeypatch):
    name = FAMILIES[family]
    served = [(table, node) for table in (RULES, COMPLEX) for node in nodes_of(name) & set(table)]
    for table, node in served:
        if table[node].family == family:
            monkeypatch.setitem(table, node, break_rule(table[node], broken))
    if broken == "curvature" or any(table[node].curved for table, node in served if table[node].family == family):
        with pytest.raises(AssertionError, match="not close"):
            test_rule_is_exact_on_a_separable_loss(name, "both")


def break_rule(rule, broken: str):
    """The rule with g or s larger by a thousandth."""

    def off(value, wrong: bool):
        if isinstance(value, tuple):
            return tuple(off(v, wrong) for v in value)
        return value * 1.001 if wrong and value is not None else value

    def function(node, g, s):
        return rule.function(node, off(g, broken == "gradient"), off(s, broken == "curvature"))

    return dataclasses.replace(rule, function=function)


# Nodes that no call on a CPU makes in float64: they belong to other devices or dtypes.
ELSEWHERE = {
    *attention.NODES,
    "CudnnBatchNormBackward0",
    "CudnnGridSamplerBackward0",
    "CudnnRnnBackward0",
    "FusedDropoutBackward0",
    "FusedRmsNormBackward0",
    "LinearBackward0",
    "MiopenBatchNormBackward0",
    "MkldnnRnnLayerBackward0",
    "PinMemoryBackward0",
    "ThnnFusedGruCellBackward0",
    "ThnnFusedLstmCellBackward0",
}


def test_every_rule_has_a_case():
    seen = set().union(*(nodes_of(name) for name in CASES))
    absent = {name for name in RULES if name[-9:-1] == "Backward" and not hasattr(torch._C._functions, name)}  # in older torch
    untested = set() if NEW_TORCH else {"GridSampler2DBackward0", "GridSampler3DBackward0"}
    untested |= set() if "nextafter" in CASES else {"NextafterBackward0"}
    missing = (set(RULES) | set(BL89) | set(COMPLEX)) - seen - ELSEWHERE - absent - untested
    assert not missing, f"rules without a case: {sorted(missing)}"
    assert not ELSEWHERE & seen
