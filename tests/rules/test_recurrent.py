"""Fused recurrent layers against the same layers without fusion: the diagonal must be the same, to rounding."""

from __future__ import annotations

import pytest
import torch
from oracle import Separable, hessian_diagonal, separable_loss
from recurrent_layers import KERNELS, assert_same, call, call_cells, call_cudnn, derivatives, make
from test_rules import break_rule
from torch import nn
from torch.nn import functional as F

import hesscale
from hesscale.engine.nodes import edge_of, topological
from hesscale.rules import RULES, recurrent

METHODS = ["hesscale", "hesscale_gn"]
SINGLE = {"rtol": 2e-4, "atol": 2e-5}

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="test_recurrent_cuda.py is for CUDA")


def without_fusion(*arguments, **options):
    with torch.backends.mkldnn.flags(enabled=False):
        return call(*arguments, **options)


def names(results):
    return {node.name() for y in results for node in topological(edge_of(y)[0])}


@pytest.fixture
def cuda_kernels():
    """The operators of CUDA, on a CPU and in float64, with their own autograd nodes."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, kernel in KERNELS.items():
            library.impl(name, kernel, "CPU")
        yield


# ---- nn.LSTM on a CPU, in float32

CPU = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "no biases": {"bias": False},
    "batch first": {"batch_first": True},
    "both directions": {"bidirectional": True, "num_layers": 2},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CPU)
def test_lstm_on_a_cpu(name, method):
    given = make(nn.LSTM, dtype=torch.float32, **CPU[name])
    found = derivatives(call, *given, method=method)
    assert_same(found, derivatives(without_fusion, *given, method=method), **SINGLE)


def test_lstm_on_a_cpu_is_fused_unless_packed():
    given = make(nn.LSTM, dtype=torch.float32)
    assert "MkldnnRnnLayerBackward0" in names(call(*given))
    assert "MkldnnRnnLayerBackward0" not in names(without_fusion(*given))
    assert "MkldnnRnnLayerBackward0" not in names(call(*given, is_packed=True))
    assert_same(derivatives(call, *given, is_packed=True), derivatives(without_fusion, *given, is_packed=True), **SINGLE)


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2]])
@pytest.mark.parametrize("method", METHODS)
def test_lstm_whose_results_are_not_all_used(used, method):
    given = make(nn.LSTM, dtype=torch.float32)
    found = derivatives(call, *given, method=method, used=used)
    assert_same(found, derivatives(without_fusion, *given, method=method, used=used), **SINGLE)


@pytest.mark.parametrize("method", METHODS)
def test_lstm_right_before_the_loss(method):
    given = make(nn.LSTM, dtype=torch.float32)
    found = derivatives(call, *given, method=method, readout=False)
    assert_same(found, derivatives(without_fusion, *given, method=method, readout=False), **SINGLE)


def test_lstm_in_evaluation_with_frozen_weights():
    layer, x, states = make(nn.LSTM, dtype=torch.float32, num_layers=2, dropout=0.5)
    layer.eval()
    layer.weight_hh_l0.requires_grad_(False)
    layer.bias_ih_l1.requires_grad_(False)
    assert_same(derivatives(call, layer, x, states), derivatives(without_fusion, layer, x, states), **SINGLE)


def test_lstm_with_dropout_on_a_cpu():
    """There dropout is an operator of its own between the layers."""

    def seeded(function):
        def run(*arguments):
            torch.manual_seed(3)
            return function(*arguments)

        return run

    given = make(nn.LSTM, dtype=torch.float32, num_layers=2, dropout=0.5)
    assert_same(derivatives(seeded(call), *given), derivatives(seeded(without_fusion), *given), **SINGLE)


def test_lstm_with_a_shared_bias():
    """One tensor at two inputs counts once for each, as in the layer without fusion."""
    layer, x, states = make(nn.LSTM, dtype=torch.float32)
    layer.bias_hh_l0 = layer.bias_ih_l0
    assert_same(derivatives(call, layer, x, states), derivatives(without_fusion, layer, x, states), **SINGLE)


def test_lstm_without_states_and_without_batch():
    layer = nn.LSTM(3, 4)
    x = torch.randn(5, 3)
    diagonals = []
    for fused in (True, False):
        with torch.backends.mkldnn.flags(enabled=fused):
            y, _ = layer(x)
        layer.zero_grad()
        hesscale.backward(F.linear(y, torch.ones(2, 4)).sin().sum())
        diagonals.append({name: (p.grad, p.hess_diag) for name, p in layer.named_parameters()})
    assert_same(*diagonals, **SINGLE)


def test_diagonals_share_no_memory():
    layer, x, states = make(nn.LSTM, dtype=torch.float32)
    found = derivatives(call, layer, x, states)
    assert len({diagonal.untyped_storage().data_ptr() for _, diagonal in found.values()}) == len(found)


def test_lstm_in_bfloat16():
    """It is computed in float32, so it agrees with the layer in float32 to the precision of bfloat16."""
    layer, x, states = make(nn.LSTM, dtype=torch.bfloat16)
    found = derivatives(call, layer, x, states)
    expected = derivatives(call, layer.float(), x.float(), [state.float() for state in states])
    assert found["weight_ih_l0"][1].dtype == torch.bfloat16
    for name, (_, truth) in expected.items():
        assert (found[name][1].float() - truth).norm() < 0.1 * truth.norm(), name


def test_lstm_under_a_checkpoint():
    layer, x, states = make(nn.LSTM, dtype=torch.float32)

    def checkpointed(layer, x, states):
        y, (h, c) = torch.utils.checkpoint.checkpoint(layer, x, tuple(states), use_reentrant=False)
        return [y, h, c]

    assert_same(derivatives(checkpointed, layer, x, states), derivatives(call, layer, x, states), **SINGLE)


# ---- CUDA's operators, in float64

KINDS = {
    "RNN": nn.RNN,
    "RNN relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
}
CUDNN = {
    **CPU,
    "packed": {"is_packed": True},
    "packed, both directions": {"is_packed": True, "bidirectional": True, "num_layers": 2},
    "three layers": {"num_layers": 3},
    "no biases, both directions, batch first": {"bias": False, "bidirectional": True, "batch_first": True},
}
PROJECTED = {
    "projected": {"proj_size": 2},
    "projected, no biases": {"proj_size": 2, "bias": False, "num_layers": 2},
    "projected, both directions, packed": {"proj_size": 2, "bidirectional": True, "num_layers": 2, "is_packed": True},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, name) for kind in KINDS for name in CUDNN), *(("LSTM", name) for name in PROJECTED)]
)
def test_cudnn(kind, name, method, cuda_kernels):
    options = dict((CUDNN | PROJECTED)[name])
    is_packed = options.pop("is_packed", False)
    given = make(KINDS[kind], **options)
    found = derivatives(call_cudnn, *given, method=method, is_packed=is_packed)
    assert_same(found, derivatives(call, *given, method=method, is_packed=is_packed))


@pytest.mark.parametrize("name", ["both directions", "packed, both directions", "projected, both directions, packed"])
@pytest.mark.parametrize("steps", [1, 2])
def test_cudnn_in_blocks_of_steps(steps, name, cuda_kernels, monkeypatch):
    monkeypatch.setattr(recurrent, "MAX_BLOCK_NUMEL", steps * 4 * 16)
    options = dict((CUDNN | PROJECTED)[name])
    is_packed = options.pop("is_packed", False)
    given = make(nn.LSTM, **options)
    assert_same(derivatives(call_cudnn, *given, is_packed=is_packed), derivatives(call, *given, is_packed=is_packed))


@pytest.mark.parametrize("used", [[0], [1], [2]])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_cudnn_whose_results_are_not_all_used(kind, used, cuda_kernels):
    if kind == "LSTM" or used != [2]:
        given = make(KINDS[kind], num_layers=2, bidirectional=True)
        assert_same(derivatives(call_cudnn, *given, used=used), derivatives(call, *given, used=used))


def test_cudnn_with_weights_shared_between_directions(cuda_kernels):
    layer, x, states = make(nn.GRU, bidirectional=True)
    layer.weight_hh_l0_reverse, layer.bias_ih_l0_reverse = layer.weight_hh_l0, layer.bias_ih_l0
    assert_same(derivatives(call_cudnn, layer, x, states), derivatives(call, layer, x, states))


def test_cudnn_with_one_tensor_for_both_states(cuda_kernels):
    layer, x, (h, _) = make(nn.LSTM)

    def once(function):
        return lambda layer, x, states: function(layer, x, [states[0], states[0]])

    assert_same(derivatives(once(call_cudnn), layer, x, [h]), derivatives(once(call), layer, x, [h]))


def test_cudnn_without_a_share_for_some(cuda_kernels):
    layer, x, states = make(nn.LSTM, num_layers=2, proj_size=2)
    for name, p in layer.named_parameters():
        p.requires_grad_(name in ("weight_ih_l1", "bias_hh_l0"))
    assert_same(derivatives(call_cudnn, layer, x, states), derivatives(call, layer, x, states))


def test_dropout_between_layers_of_cudnn_is_refused(cuda_kernels):
    layer, x, states = make(nn.LSTM, num_layers=2, dropout=0.5)
    with pytest.raises(hesscale.UnsupportedOperator, match=r"CudnnRnn.*dropout.*torch.backends.cudnn.flags\(enabled=False\)"):
        derivatives(call_cudnn, layer, x, states)
    layer.eval()
    assert_same(derivatives(call_cudnn, layer, x, states), derivatives(call, layer, x, states))
    given = make(nn.LSTM, dropout=0.0)
    assert_same(derivatives(call_cudnn, *given), derivatives(call, *given))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_fused_cells(kind, bias, method, cuda_kernels):
    given = make(KINDS[kind], bias=bias)
    assert_same(derivatives(call_cells, *given, method=method), derivatives(call, *given, method=method))


# ---- against double backward, where the recursion is exact


@pytest.mark.parametrize("kind", ["RNN", "RNN relu", "LSTM", "LSTM projected"])
@pytest.mark.parametrize("fused", ["mkldnn", "cudnn"])
def test_one_step_is_exact_at_the_weights(kind, fused, cuda_kernels):
    """Each entry of a weight reaches one pre-activation of a step, and that one h or c."""
    if fused == "mkldnn" and kind != "LSTM":
        return
    layer, x, states = make(KINDS[kind.partition(" proj")[0]], **({"proj_size": 2} if "proj" in kind else {}))
    x, weights = x[:1], list(layer.parameters())
    draws = [[torch.randn_like(y) for _ in range(2)] for y in call(layer, x, states)]
    dtype = torch.float32 if fused == "mkldnn" else torch.float64
    truths = loss_of(separable_loss, call(layer, x, states), draws)
    truths = [hessian_diagonal(truths, p) for p in weights]
    layer, x, states, draws = (
        layer.to(dtype),
        x.to(dtype),
        [v.to(dtype) for v in states],
        [[v.to(dtype) for v in d] for d in draws],
    )
    results = (call if fused == "mkldnn" else call_cudnn)(layer, x, states)
    found = hesscale.grad(loss_of(Separable.apply, results, draws), list(layer.parameters()), outputs=results, head="rules")[1]
    for mine, truth in zip(found, truths, strict=True):
        rtol, atol = (1e-3, 1e-4) if fused == "mkldnn" else (1e-9, 1e-11)
        torch.testing.assert_close(mine.double(), truth, rtol=rtol, atol=atol)


def loss_of(separable, results, draws):
    return sum(separable(y, g, s) for y, (g, s) in zip(results, draws, strict=True))


@pytest.mark.parametrize("broken", ["gradient", "curvature"])
@pytest.mark.parametrize(
    "node", ["MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "ThnnFusedLstmCellBackward0", "ThnnFusedGruCellBackward0"]
)
def test_a_broken_rule_is_caught(node, broken, cuda_kernels, monkeypatch):
    monkeypatch.setitem(RULES, node, break_rule(RULES[node], broken))
    function = call if "Mkldnn" in node else call_cudnn if "Cudnn" in node else call_cells
    given = make(nn.GRU if "Gru" in node else nn.LSTM, dtype=torch.float32 if "Mkldnn" in node else torch.float64)
    expected = derivatives(without_fusion, *given)
    with pytest.raises(AssertionError, match="diagonal of"):
        assert_same(derivatives(function, *given), expected, **(SINGLE if "Mkldnn" in node else {}))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_no_sequences(kind, fused):
    """A batch of none contributes nothing: what is left is the penalty. PyTorch itself refuses sequences of length zero."""
    layer = kind(3, 4, batch_first=True)
    with torch.backends.mkldnn.flags(enabled=fused):
        y, _ = layer(torch.randn(0, 5, 3))
        with pytest.raises(RuntimeError, match="larger than 0"):
            layer(torch.randn(2, 0, 3))
    hesscale.backward(y.square().sum() + sum((p * p).sum() for p in layer.parameters()))
    for p in layer.parameters():
        torch.testing.assert_close(p.hess_diag, torch.full_like(p, 2))
