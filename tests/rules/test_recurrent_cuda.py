"""Recurrent layers on a GPU, by cuDNN and by CUDA's fused cells, against the same layers on a CPU without fusion."""

from __future__ import annotations

import pytest
import torch
from recurrent_layers import assert_same, call, derivatives, make
from test_recurrent import CUDNN, KINDS, METHODS, PROJECTED, names
from torch import nn
from torch.nn import functional as F

import hesscale

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CASES = [*((kind, name) for kind in KINDS for name in CUDNN), *(("LSTM", name) for name in PROJECTED)]


def on_cpu(found):
    return {name: tuple(None if v is None else v.cpu() for v in pair) for name, pair in found.items()}


def without_cudnn(*arguments, **options):
    with torch.backends.cudnn.flags(enabled=False):
        return call(*arguments, **options)


def both(function, kind, name, method="hesscale"):
    """Derivatives on the GPU, and on a CPU, where float64 has no fused layers."""
    options = dict((CUDNN | PROJECTED)[name])
    further = {"method": method, "is_packed": options.pop("is_packed", False)}
    found = derivatives(function, *make(KINDS[kind], device="cuda", **options), **further)
    return on_cpu(found), derivatives(call, *make(KINDS[kind], **options), **further)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_cudnn(kind, name, method):
    assert_same(*both(call, kind, name, method))


def test_layers_are_fused():
    layer, x, states = make(nn.LSTM, device="cuda")
    assert "CudnnRnnBackward0" in names(call(layer, x, states))
    assert "ThnnFusedLstmCellBackward0" in names(without_cudnn(layer, x, states))
    layer, x, states = make(nn.GRU, device="cuda")
    assert "CudnnRnnBackward0" in names(call(layer, x, states))
    assert "ThnnFusedGruCellBackward0" in names(without_cudnn(layer, x, states))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_without_cudnn(kind, name, method):
    assert_same(*both(without_cudnn, kind, name, method))


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells(cell):
    torch.manual_seed(0)
    with torch.device("cpu"):
        layer, x, weight = cell(3, 4).double(), torch.randn(5, 3).double(), torch.randn(2, 4).double()
    found = []
    for device in ("cuda", "cpu"):
        layer = layer.to(device)
        layer.zero_grad()
        h = layer(x.to(device))
        h = layer(x.to(device), h)
        h = h[0] if isinstance(h, tuple) else h
        hesscale.backward(F.linear(h, weight.to(device)).sin().sum())
        found.append({name: (p.grad.cpu(), p.hess_diag.cpu()) for name, p in layer.named_parameters()})
    assert_same(*found)


def test_dropout_between_layers_is_refused_with_a_way_out():
    layer, x, states = make(nn.LSTM, device="cuda", num_layers=2, dropout=0.5)
    with pytest.raises(hesscale.UnsupportedOperator, match=r"torch.backends.cudnn.flags\(enabled=False\)"):
        derivatives(call, layer, x, states)
    derivatives(without_cudnn, layer, x, states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision(kind, dtype):
    options = {"num_layers": 2, "bidirectional": True}
    found = on_cpu(derivatives(call, *make(KINDS[kind], dtype=dtype, device="cuda", **options)))
    layer, x, states = make(KINDS[kind], dtype=dtype, **options)
    expected = derivatives(call, layer.double(), x.double(), [state.double() for state in states])
    bound = 1e-3 if dtype == torch.float32 else 0.15
    for name, (_, truth) in expected.items():
        assert (found[name][1].double() - truth).norm() < bound * truth.norm(), name


@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_autocast(kind):
    layer, x, states = make(KINDS[kind], dtype=torch.float32, device="cuda", num_layers=2)

    def cast(*arguments):
        with torch.autocast("cuda", torch.bfloat16):
            return [y.float() for y in call(*arguments)]

    found = derivatives(cast, layer, x, states)
    for name, (_, truth) in derivatives(call, layer, x, states).items():
        assert (found[name][1] - truth).norm() < 0.15 * truth.norm(), name


def test_compiled_step():
    """The traced graph holds cuDNN's layer and the rule's steps."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.LSTM(3, 4, num_layers=2), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.layer(x)[0])

    def loss_fn(model, x):
        return model(x).sin().square().mean()

    x, losses = torch.randn(5, 4, 3, device="cuda"), []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = Model().cuda()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        step = hesscale.compile_step(model, loss_fn, optimizer, backend="traced") if compiled else None
        for _ in range(3):
            optimizer.zero_grad()
            if step is not None:
                loss = step(x)
            else:
                loss = loss_fn(model, x)
                optimizer.backward(loss)
                optimizer.step()
        losses.append(loss_fn(model, x).detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
