"""Heads on a CUDA device."""

from __future__ import annotations

import pytest
import torch

import hesscale

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_new_mixed_derivatives_between_outputs_are_detected():
    """On a GPU, the check is read by a later pass, which warns about the diagonals in between."""
    z = torch.randn(4, 3, dtype=torch.float64, device="cuda", requires_grad=True)

    def diagonal(weight):
        factor = torch.tensor(weight, dtype=torch.float64, device="cuda")
        torch.cuda.synchronize()
        return hesscale.grad((z**2).sum() + factor * (z.softmax(1) * z.log_softmax(1)).sum(), z)[1][0]

    for _ in range(3):
        diagonal(0.0)
    with pytest.warns(hesscale.CurvatureWarning, match="have mixed second derivatives now"):
        [diagonal(1.0) for _ in range(4)]
    here = z.detach().cpu().requires_grad_()
    (truth,) = hesscale.grad((here**2).sum() + (here.softmax(1) * here.log_softmax(1)).sum(), here)[1]
    torch.testing.assert_close(diagonal(1.0).cpu(), truth)
