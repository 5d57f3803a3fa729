"""The Triton kernels compute the same shares as the rules in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_attention import derivatives, sdpa
from test_attention_cuda import close, draw
from torch.nn.attention import SDPBackend

import hesscale
from hesscale.rules import kernels

pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() and kernels.HAS_TRITON), reason="no GPU, or no Triton")
LENGTHS = {
    "blocks that are full": (128, 128, 64),
    "blocks that are not": (200, 200, 64),
    "fewer keys": (130, 70, 48),
    "more keys": (40, 257, 128),
}


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_attention(lengths, is_causal, method, monkeypatch):
    rows, columns, size = LENGTHS[lengths]
    inputs = [draw(2, 4, length, size, seed=seed).bfloat16() for seed, length in enumerate((rows, columns, columns))]
    calls = []
    monkeypatch.setattr(kernels, "attention_shares", lambda *x, given=kernels.attention_shares: calls.append(1) or given(*x))
    attend = sdpa(is_causal=is_causal, scale=0.2)
    backend = SDPBackend.FLASH_ATTENTION if rows == columns else SDPBackend.EFFICIENT_ATTENTION
    _, _, found = derivatives(attend, inputs, backend, method)
    assert calls
    _, _, expected = derivatives(attend, [x.double() for x in inputs], SDPBackend.MATH, method)
    close(found, expected, 0.02)
    monkeypatch.setattr(kernels, "is_usable", lambda device: False)
    _, _, in_blocks = derivatives(attend, inputs, backend, method)
    assert len(calls) == 1
    close(found, in_blocks, 0.02)


def test_attention_is_mapped_like_a_loop():
    q, k, v, s, g = (draw(3, 4, length, 32, seed=seed).bfloat16() for seed, length in enumerate((50, 70, 70, 50, 50)))
    mean = draw(3, 4, 50, seed=5).float()

    def shares(q, v, s, mean):
        return kernels.attention_shares(q, k[0], v, s, g[0], mean, 0.3, True)

    mapped = torch.vmap(shares, in_dims=(0, 0, 0, 0))(q, v, s, mean)
    for i in range(3):
        for one, all_of_them in zip(shares(q[i], v[i], s[i], mean[i]), mapped, strict=True):
            assert torch.equal(one, all_of_them[i])


NORMS = {
    "layer norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    "layer norm of matrices": lambda x, w, b: F.layer_norm(x, x.shape[-2:], w.expand(x.shape[-2:]), b.expand(x.shape[-2:])),
    "layer norm without weight": lambda x, w, b: F.layer_norm(x, x.shape[-1:]) + 0 * (w + b),
    "RMS norm": lambda x, w, b: F.rms_norm(x, x.shape[-1:], w, 1e-6) + b,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 65, 1000])
@pytest.mark.parametrize("norm", NORMS)
def test_norms(norm, size, dtype, monkeypatch):
    """The loss has the gradient g and the Hessian diag(s) at y; the kernel is called where PyTorch's norm is one operator."""
    x, w, b = draw(300, 7, size), draw(size, seed=1), draw(size, seed=2)
    g, s = draw(300, 7, size, seed=3), draw(300, 7, size, seed=4)
    calls = []
    monkeypatch.setattr(kernels, "norm_shares", lambda *x, given=kernels.norm_shares, **y: calls.append(1) or given(*x, **y))

    def diagonals(dtype, method):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w, b)]
        y = NORMS[norm](*leaves).double()
        change = y - y.detach()
        return hesscale.grad((g * change + s / 2 * change**2).sum(), leaves, method=method, outputs=y, head="rules")[1]

    for method in ("hesscale", "hesscale_gn"):
        rounded = [t.to(dtype).double() for t in (x, w, b)]
        found = diagonals(dtype, method)
        assert len(calls) == 1
        calls.clear()
        x, w, b = rounded
        expected = diagonals(torch.float64, method)
        assert not calls
        close(found, expected, 5e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [3, 130, 5001])
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_log_softmax(method, size, dtype):
    """With a Hessian diag(s) at the log-probabilities, and with s = 0, as in cross-entropy."""
    x, g, s = (draw(40, 5, size, seed=seed) for seed in range(3))
    x = x.to(dtype).double()

    def diagonal(dtype, s):
        leaf = x.to(dtype).requires_grad_()
        y = F.log_softmax(leaf, -1).double()
        change = y - y.detach()
        return hesscale.grad((g * change + s / 2 * change**2).sum(), [leaf], method=method, head="rules")[1]

    for curvature in (s, 0 * s):
        close(diagonal(dtype, curvature), diagonal(torch.float64, curvature), 2e-5 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("columns", [1024, 1027])
def test_products_with_rows_of_any_length(columns):
    """Rows that do not begin at multiples of 16 bytes are copied, and sums of terms that do not fill 16 bytes are divided."""
    x, w = draw(64, 48), draw(columns, 48, seed=1)
    y = torch.randint(columns, (64,), device="cuda")

    def diagonals(dtype, curvature_dtype):
        leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (x, w)]
        return hesscale.grad(F.cross_entropy(F.linear(*leaves), y), leaves, curvature_dtype=curvature_dtype)[1]

    close(diagonals(torch.float32, torch.bfloat16), diagonals(torch.float64, None), 0.01)
