"""Attention in one operator has the diagonals of attention written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import hesscale
from hesscale.rules import attention

METHODS = ["hesscale", "hesscale_gn", "bl89"]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


QUERIES, KEYS, VALUES = draw(2, 4, 9, 6), draw(2, 4, 7, 6, seed=1), draw(2, 4, 7, 6, seed=2)
LONG_KEYS, LONG_VALUES = draw(2, 4, 9, 6, seed=3), draw(2, 4, 9, 6, seed=4)
VISIBLE = draw(9, 7, seed=5) > -0.5
HIDDEN_ROW = VISIBLE.clone()
HIDDEN_ROW[2] = False


def sdpa(**options):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


CASES = {
    "plain": (sdpa(), [QUERIES, KEYS, VALUES]),
    "causal": (sdpa(is_causal=True), [QUERIES, LONG_KEYS, LONG_VALUES]),
    "causal with fewer keys": (sdpa(is_causal=True), [QUERIES, KEYS, VALUES]),
    "causal with more keys": (sdpa(is_causal=True), [QUERIES[:, :, :5], KEYS, VALUES]),
    "scale": (sdpa(scale=0.3), [QUERIES, KEYS, VALUES]),
    "boolean mask": (sdpa(attn_mask=VISIBLE), [QUERIES, KEYS, VALUES]),
    "a row that sees nothing": (sdpa(attn_mask=HIDDEN_ROW), [QUERIES, KEYS, VALUES]),
    "a row that sees nothing, by -inf": (
        sdpa(attn_mask=torch.zeros(9, 7, dtype=torch.float64).masked_fill(~HIDDEN_ROW, -torch.inf)),
        [QUERIES, KEYS, VALUES],
    ),
    "no row sees anything": (sdpa(attn_mask=torch.zeros(9, 7, dtype=torch.bool)), [QUERIES, KEYS, VALUES]),
    "mask by heads": (sdpa(attn_mask=draw(2, 4, 9, 7)), [QUERIES, KEYS, VALUES]),
    "mask by batches": (sdpa(attn_mask=draw(2, 1, 1, 7)), [QUERIES, KEYS, VALUES]),
    "grouped heads": (sdpa(enable_gqa=True), [QUERIES, KEYS[:, :2], VALUES[:, :2]]),
    "one head of keys": (sdpa(enable_gqa=True, is_causal=True), [QUERIES, LONG_KEYS[:, :1], LONG_VALUES[:, :1]]),
    "one tensor": (lambda x: F.scaled_dot_product_attention(x, x, x), [QUERIES]),
    "keys are values": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), [QUERIES, LONG_KEYS]),
    "queries alone": (lambda q: F.scaled_dot_product_attention(q, KEYS, VALUES), [QUERIES]),
    "values alone": (lambda v: F.scaled_dot_product_attention(QUERIES, KEYS, v), [VALUES]),
    "keys alone": (lambda k: F.scaled_dot_product_attention(QUERIES, k, VALUES), [KEYS]),
    "one key": (sdpa(), [QUERIES, KEYS[:, :, :1], VALUES[:, :, :1]]),
    "other order in memory": (sdpa(), [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (QUERIES, KEYS, VALUES)]),
}


def names(tensor):
    """Of all nodes behind a tensor."""
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [other for other, _ in node.next_functions]
    return {node.name() for node in seen}


def curved_sum(y):
    """A loss with a gradient and a curvature of its own at every entry."""
    return (y.sin().square() * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)).sum()


def derivatives(function, inputs, backends, method="hesscale", loss=curved_sum):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with sdpa_kernel(backends):
        y = function(*leaves)
    is_fused = any("ScaledDotProduct" in name for name in names(y))
    return is_fused, *hesscale.grad(loss(y), leaves, method=method, outputs=y)


FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


@pytest.mark.parametrize("limit", [2**20, 60, 7], ids="blocks of {} entries".format)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_fused_attention(name, method, limit, monkeypatch):
    monkeypatch.setitem(attention.MAX_ENTRIES, "cpu", limit)
    function, inputs = CASES[name]
    is_fused, *found = derivatives(function, inputs, FUSED, method)
    assert is_fused
    _, *expected = derivatives(function, inputs, SDPBackend.MATH, method)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", [torch.sum, lambda y: (y**2).sum()], ids=["no curvature", "no gradient at zero"])
def test_losses_with_one_term_alone(loss):
    function, inputs = CASES["causal"]
    _, *found = derivatives(function, inputs, FUSED, loss=loss)
    _, *expected = derivatives(function, inputs, SDPBackend.MATH, loss=loss)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    function, inputs = CASES["causal"]
    inputs = [x.to(dtype) for x in inputs]
    is_fused, _, found = derivatives(function, inputs, FUSED)
    assert is_fused
    assert {share.dtype for share in found} == {dtype}
    _, _, expected = derivatives(function, [x.double() for x in inputs], SDPBackend.MATH)
    for share, exact in zip(found, expected, strict=True):
        assert (share.double() - exact).norm() < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype] * exact.norm()


def test_curvature_in_bfloat16():
    q, k, v = (x.float().requires_grad_() for x in CASES["causal"][1])
    loss = curved_sum(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    optimizer = hesscale.AdaHesScale([q, k, v], curvature_dtype=torch.bfloat16)
    optimizer.backward(loss)
    _, _, expected = derivatives(sdpa(is_causal=True), [q, k, v], SDPBackend.MATH)
    for leaf, diagonal in zip((q, k, v), expected, strict=True):
        assert (leaf.hess_diag - diagonal).norm() < 0.03 * diagonal.norm()


class Sizes(TorchDispatchMode):
    """Notes how large the largest tensor is that an operator makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_memory_is_linear_in_the_length(monkeypatch):
    monkeypatch.setitem(attention.MAX_ENTRIES, "cpu", 2**12)
    x = [torch.randn(1, 2, 256, 8, requires_grad=True) for _ in range(3)]
    loss = curved_sum(F.scaled_dot_product_attention(*x, is_causal=True))
    with Sizes() as sizes:
        hesscale.backward(loss)
    assert 0 < sizes.largest <= 2**12 < 256 * 256


@pytest.mark.parametrize("backends", [FUSED, SDPBackend.MATH], ids=["fused", "math"])
@pytest.mark.parametrize(("batch", "queries", "keys"), [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3)])
def test_empty_sequences(batch, queries, keys, backends):
    """They contribute nothing: what is left is the penalty."""
    leaves = [torch.randn(batch, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (queries, keys, keys)]
    with sdpa_kernel(backends):
        y = F.scaled_dot_product_attention(*leaves)
    hesscale.backward(y.sin().square().sum() + sum((x * x).sum() for x in leaves))
    for x in leaves:
        torch.testing.assert_close(x.hess_diag, torch.full_like(x, 2))


class Decoder(nn.Module):
    """A causal Transformer with grouped queries, written as people write them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(11, 8), nn.Parameter(0.1 * torch.randn(6, 8))
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        h = self.norm(x)
        q = self.q(h).view(*tokens.shape, 4, 2).transpose(1, 2)
        k, v = self.kv(h).view(*tokens.shape, 2, 4).transpose(1, 2).chunk(2, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def run_layer(layer):
    torch.manual_seed(1)
    x = torch.randn(3, 5, 8)
    return layer(x) if not isinstance(layer, nn.MultiheadAttention) else layer(x, x, x, need_weights=False)[0]


MODELS = {
    "a decoder": (Decoder, lambda model: model(torch.arange(12).view(2, 6) % 11)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), run_layer),
    "TransformerEncoderLayer": (encoder_layer, run_layer),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(encoder_layer(), 2), run_layer),
    "Transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True),
        lambda model: model(draw(3, 5, 8), draw(3, 4, 8), tgt_mask=nn.Transformer.generate_square_subsequent_mask(4)),
    ),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS[:2])
def test_models(name, method):
    make, run = MODELS[name]
    torch.manual_seed(0)
    model = make()
    found = []
    for backends in (FUSED, SDPBackend.MATH):
        model.zero_grad()
        with sdpa_kernel(backends):
            y = run(model)
        is_fused = any("ScaledDotProduct" in name for name in names(y))
        assert is_fused == (backends is FUSED)
        hesscale.backward((y - 1).square().sum(), method=method, head="rules")
        found.append([(p.grad.clone(), p.hess_diag.clone()) for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("double_precision")
def test_a_compiled_step():
    torch.manual_seed(0)
    models = [Decoder() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.arange(12).view(2, 6) % 11

    def loss_fn(model, x):
        return F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())

    steps = [
        hesscale.compile_step(model, loss_fn, hesscale.AdaHesScale(model.parameters(), lr=0.01), backend=backend)
        for model, backend in zip(models, ("traced", "eager"), strict=True)
    ]
    losses = [[float(step(tokens)) for _ in range(4)] for step in steps]
    assert steps[0].mode == "traced", steps[0].reason
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)
