"""Without Triton, or if it does not work, the rules do not use its kernels."""

from __future__ import annotations

import pytest
import torch

from hesscale.errors import CurvatureWarning
from hesscale.rules import kernels


def test_a_machine_on_which_triton_fails(monkeypatch):
    def fail(*_):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "log_softmax_share", fail)
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "_found_usable", {})
    device = torch.device("cpu")
    with pytest.warns(CurvatureWarning, match="C compiler"):
        assert not kernels.is_usable(device)
    assert not kernels.is_usable(device)  # without another warning


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_old_gpus_and_no_triton(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "HAS_TRITON", capability == (7, 5))
    monkeypatch.setattr(kernels, "_found_usable", {})
    assert not kernels.is_usable(torch.device("cpu"))
