"""Recurrent layers, fused and unfused, with everything that needs a gradient; and CUDA's kernels, computed on a CPU for tests."""

from __future__ import annotations

import copy
import threading

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import hesscale

MODES = {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}
LENGTHS = [5, 3, 3, 1]  # of packed sequences


def make(kind, *, dtype=torch.float64, device="cpu", **options):
    """A layer, sequences for it, and the states it starts from."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        layer = kind(3, 4, **options).to(dtype)
        x = torch.randn(4, 5, 3, dtype=dtype) if layer.batch_first else torch.randn(5, 4, 3, dtype=dtype)
        parts = layer.num_layers * (2 if layer.bidirectional else 1)
        h, c = torch.randn(parts, 4, layer.proj_size or 4, dtype=dtype), torch.randn(parts, 4, 4, dtype=dtype)
    layer = layer.to(device)
    for p in layer.parameters():  # far from linear
        p.data.mul_(1.5)
    states = (h, c) if isinstance(layer, nn.LSTM) else (h,)
    return layer, x.to(device), [state.to(device) for state in states]


def pack(x):
    """Sequences of different lengths, from a tensor with time first."""
    return pack_sequence([x[:length, i] for i, length in enumerate(LENGTHS)])


def packed(x):
    packing = pack(x)
    return packing.data, packing.batch_sizes.tolist()


def call(layer, x, states, *, is_packed=False):
    """``nn.LSTM`` and its like, as users call them: the output and the last states."""
    given = PackedSequence(*pack(x)) if is_packed else x
    output, last = layer(given, tuple(states) if len(states) == 2 else states[0])
    return [output.data if is_packed else output, *(last if isinstance(last, tuple) else (last,))]


def call_cudnn(layer, x, states, *, is_packed=False):
    """The same by the operator that CUDA has for it."""
    data, sizes = packed(x) if is_packed else (x, [])
    weights = list(layer._flat_weights)
    directions = 2 if layer.bidirectional else 1
    stride = len(weights) // (layer.num_layers * directions)
    h, c = states if len(states) == 2 else (states[0], None)
    outputs = torch._cudnn_rnn(
        *(data, weights, stride, None, h, c, MODES[layer.mode], layer.hidden_size, layer.proj_size, layer.num_layers),
        *(layer.batch_first and not is_packed, layer.dropout, layer.training, layer.bidirectional, sizes, None),
    )
    return list(outputs[: 1 + len(states)])


def call_cells(layer, x, states):
    """One layer as CUDA computes it without cuDNN: a fused cell at each step."""
    w_ih, w_hh, *biases = layer._flat_weights
    states, outputs = [state[0] for state in states], []
    for x_t in x:
        gates = x_t @ w_ih.t(), states[0] @ w_hh.t()
        if layer.mode == "LSTM":
            states = torch.ops.aten._thnn_fused_lstm_cell(*gates, states[1], *biases)[:2]
        else:
            states = torch.ops.aten._thnn_fused_gru_cell(*gates, states[0], *biases)[:1]
        outputs.append(states[0])
    return [torch.stack(outputs), *(state.unsqueeze(0) for state in states)]


def derivatives(call, layer, x, states, *, method="hesscale", used="all", readout=True, **options):
    """Gradients and diagonals at the layer's weights, its input and the states it starts from."""
    layer = copy.deepcopy(layer)
    x, *states = (v.clone().requires_grad_() for v in (x, *states))
    results = call(layer, x, states, **options)
    if used != "all":
        results = [results[i] for i in used]
    torch.manual_seed(1)
    loss = 0
    for y in results:
        weight = torch.randn(3, y.shape[-1], dtype=torch.float64, device="cpu").to(y)
        z = nn.functional.linear(y, nn.Parameter(weight, requires_grad=False)) if readout else y  # where the head ends
        loss = loss + (z.sin() + z.square()).sum()
    hesscale.backward(loss, method=method, outputs=None if readout else results)
    leaves = {**dict(layer.named_parameters()), "x": x, **{f"state {i}": state for i, state in enumerate(states)}}
    return {name: (leaf.grad, getattr(leaf, "hess_diag", None)) for name, leaf in leaves.items()}


def assert_same(found, expected, **tolerance):
    for name, truths in expected.items():
        for what, mine, truth in zip(("gradient", "diagonal"), found[name], truths, strict=True):
            if truth is None:
                assert mine is None, f"{what} of {name}"
            else:
                atol = tolerance.get("atol", 1e-12) * max(1.0, truth.abs().max().item())
                rtol = tolerance.get("rtol", 1e-9)
                torch.testing.assert_close(
                    mine.to(truth), truth, rtol=rtol, atol=atol, msg=lambda m, n=f"{what} of {name}": f"{n}: {m}"
                )


def outside_autograd(function):
    """Run in a thread of its own: below autograd, where kernels run, no graph is made."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def unfused(x, weights, stride, h, c, mode, layers, batch_first, bidirectional, sizes):
    """Without fusion, as PyTorch computes it on a CPU."""
    function = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)[mode]
    has_biases = stride > 3
    states = (h, c) if mode == 2 else h
    with torch.backends.mkldnn.flags(enabled=False):
        if sizes:
            given = x, torch.tensor(sizes), states, weights, has_biases, layers, 0.0, True, bidirectional
        else:
            given = x, states, weights, has_biases, layers, 0.0, True, bidirectional, batch_first
        results = function(*given)
    return results if mode == 2 else (*results, x.new_empty(0))


def cudnn_forward(
    x, weights, stride, buffer, h, c, mode, hidden, projected, layers, batch_first, dropout, train, both, sizes, state
):
    results = unfused(x, weights, stride, h, c, mode, layers, batch_first, both, sizes)
    return *(y.detach() for y in results), x.new_empty(0, dtype=torch.uint8), x.new_empty(0)


def cudnn_backward(
    x,
    weights,
    stride,
    buffer,
    h,
    c,
    output,
    g,
    g_h,
    g_c,
    mode,
    hidden,
    projected,
    layers,
    batch_first,
    dropout,
    train,
    both,
    sizes,
    *_,
):
    def compute():
        leaves = [v.detach().requires_grad_() for v in (x, h, *weights)]
        last = None if c is None else c.detach().requires_grad_()
        results = unfused(leaves[0], leaves[2:], stride, leaves[1], last, mode, layers, batch_first, both, sizes)
        pairs = [(y, v) for y, v in zip(results, (g, g_h, g_c), strict=True) if v is not None]
        targets = [*leaves, *([] if last is None else [last])]
        found = torch.autograd.grad([y for y, _ in pairs], targets, [v for _, v in pairs], allow_unused=True)
        found = [torch.zeros_like(t) if v is None else v for v, t in zip(found, targets, strict=True)]
        return found[0], found[1], found[-1] if last is not None else None, found[2 : 2 + len(weights)]

    return outside_autograd(compute)


def lstm_cell(a, b, c, a_bias=None, b_bias=None):
    gates = a + b if a_bias is None else a + a_bias + b + b_bias
    return *lstm_step(gates, c), gates


def lstm_step(gates, c):
    i, f, q, o = gates.chunk(4, 1)
    new = f.sigmoid() * c + i.sigmoid() * q.tanh()
    return o.sigmoid() * new.tanh(), new


def lstm_cell_backward(g_h, g_c, c, new_c, gates, has_bias):
    def compute():
        leaves = [v.detach().requires_grad_() for v in (gates, c)]
        pairs = [(y, v) for y, v in zip(lstm_step(*leaves), (g_h, g_c), strict=True) if v is not None]
        return torch.autograd.grad([y for y, _ in pairs], leaves, [v for _, v in pairs])

    found = outside_autograd(compute)
    return *found, found[0].sum(0)


def gru_cell(a, b, h, a_bias=None, b_bias=None):
    a, b = (a, b) if a_bias is None else (a + a_bias, b + b_bias)
    return gru_step(a, b, h), torch.cat((a, b, h), 1)


def gru_step(a, b, h):
    (a_r, a_z, a_n), (b_r, b_z, b_n) = a.chunk(3, 1), b.chunk(3, 1)
    n, z = (a_n + (a_r + b_r).sigmoid() * b_n).tanh(), (a_z + b_z).sigmoid()
    return (h - n) * z + n


def gru_cell_backward(g, workspace, has_bias):
    def compute():
        hidden = workspace.shape[1] // 7
        leaves = [v.detach().requires_grad_() for v in workspace.split([3 * hidden, 3 * hidden, hidden], 1)]
        return torch.autograd.grad(gru_step(*leaves), leaves, g)

    a, b, h = outside_autograd(compute)
    return a, b, h, a.sum(0), b.sum(0)


KERNELS = {
    "_cudnn_rnn": cudnn_forward,
    "_cudnn_rnn_backward": cudnn_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
