"""Attention kernels of a GPU have the diagonals of attention written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_attention import curved_sum, derivatives, names, sdpa
from torch.nn.attention import SDPBackend, sdpa_kernel

import hesscale
from hesscale.errors import UnsupportedOperator
from hesscale.rules import attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "flash, float16": (SDPBackend.FLASH_ATTENTION, torch.float16),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "efficient, bfloat16": (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # of norms


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).cuda()


def close(found, expected, share):
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= share * b.double().norm()


PADDED = "a head size that kernels pad"
CASES = {
    "plain": ({}, (64, 64, 32), 4),
    "causal": ({"is_causal": True}, (64, 64, 32), 4),
    PADDED: ({"is_causal": True}, (64, 64, 20), 4),
    "scale": ({"scale": 0.3}, (48, 80, 32), 4),
    "grouped heads": ({"enable_gqa": True}, (64, 64, 32), 2),
    "mask": ({"attn_mask": True}, (64, 64, 32), 4),
}
CANNOT = {
    *(("flash", "mask"), ("flash, float16", "mask"), ("efficient", "grouped heads"), ("efficient, bfloat16", "grouped heads")),
    *(("efficient, bfloat16", PADDED), ("cuDNN", PADDED)),
}


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels(kernel, case, method, monkeypatch):
    if (kernel, case) in CANNOT:
        pytest.skip("there is no such kernel")
    backend, dtype = KERNELS[kernel]
    options, (rows, columns, size), heads = CASES[case]
    inputs = [
        x.to(dtype)
        for x in (draw(2, 4, rows, size), draw(2, heads, columns, size, seed=1), draw(2, heads, columns, size, seed=2))
    ]
    if "attn_mask" in options:
        options = {"attn_mask": (draw(2, 4, rows, columns, seed=3)).to(dtype)}
    monkeypatch.setitem(attention.MAX_ENTRIES, "cuda", 5000)
    is_fused, _, found = derivatives(sdpa(**options), inputs, backend, method)
    assert is_fused
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    _, _, expected = derivatives(sdpa(**exact), [x.double() for x in inputs], SDPBackend.MATH, method)
    close(found, expected, TOLERANCE[dtype])


def test_a_bias_that_is_learned():
    inputs = [draw(2, 4, 16, 8), draw(2, 4, 24, 8, seed=1), draw(2, 4, 24, 8, seed=2), draw(1, 4, 16, 24, seed=3)]

    def biased(q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(2, 4, 16, 24))

    is_fused, _, found = derivatives(biased, [x.float() for x in inputs], SDPBackend.EFFICIENT_ATTENTION)
    assert is_fused
    _, _, expected = derivatives(biased, inputs, SDPBackend.MATH)
    close(found, expected, 1e-4)


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout(kernel, is_causal):
    """The mask that the rule finds is the one that was drawn, and the diagonals are those with that mask."""
    backend, dtype = KERNELS[kernel]
    torch.manual_seed(0)
    inputs = [draw(2, 4, 96, 32, seed=seed).to(dtype) for seed in range(3)]
    leaves = [x.requires_grad_() for x in inputs]
    with sdpa_kernel(backend):
        y = F.scaled_dot_product_attention(*leaves, dropout_p=0.3, is_causal=is_causal)
    node = y.grad_fn
    while "ScaledDotProduct" not in node.name():
        node = node.next_functions[0][0]
    keep = attention.dropout_factors(node, (2, 4, 96, 96)).double()
    assert abs(float((keep == 0).double().mean()) - 0.3) < 0.01
    hidden = torch.ones(96, 96, device="cuda", dtype=torch.bool).triu(1) if is_causal else None

    def written_out(q, k, v):
        scores = (q @ k.mT) / math.sqrt(32)
        scores = scores if hidden is None else scores.masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) * keep) @ v

    exact = written_out(*[x.double() for x in inputs])
    assert (exact - y.double()).norm() < TOLERANCE[dtype] * exact.norm()
    state = torch.cuda.get_rng_state()
    found = hesscale.grad(curved_sum(y), leaves)[1]
    assert torch.equal(torch.cuda.get_rng_state(), state)
    _, _, expected = derivatives(written_out, [x.double() for x in inputs], SDPBackend.MATH)
    close(found, expected, TOLERANCE[dtype])


def test_dropout_of_cudnn_is_refused():
    leaves = [draw(2, 4, 64, 32, seed=seed).bfloat16().requires_grad_() for seed in range(3)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        y = F.scaled_dot_product_attention(*leaves, dropout_p=0.3)
    assert any("Cudnn" in name for name in names(y))
    with pytest.raises(UnsupportedOperator, match="keeps no mask of its dropout"):
        hesscale.backward(y.square().sum())


def test_a_long_sequence_takes_no_more_memory_than_its_blocks():
    q, k, v = (torch.randn(1, 8, 16384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = F.scaled_dot_product_attention(q, k, v, is_causal=True).float().square().sum()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hesscale.backward(loss)
    assert torch.cuda.max_memory_allocated() - before < 4 * 8 * 16384**2 / 3  # of P in float32, with all heads
    assert q.hess_diag.isfinite().all()


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_compiled_step(cuda_graph):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = torch.nn.Linear(32, 96), torch.nn.Linear(32, 7)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    models = [Model().cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.randn(4, 16, 32, device="cuda"), torch.randint(0, 7, (4, 16), device="cuda")

    def loss_fn(model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    steps = [
        hesscale.compile_step(
            m, loss_fn, hesscale.AdaHesScale(m.parameters(), lr=1e-2, eps=1e-3), backend=b, cuda_graph=cuda_graph
        )
        for m, b in zip(models, ("inductor", "eager"), strict=True)
    ]
    losses = [[float(step(x, y)) for _ in range(6)] for step in steps]
    assert steps[0].mode == ("compiled + CUDA graph" if cuda_graph else "compiled"), steps[0].reason
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
