"""Small networks run fastest on one thread. HESSCALE_TEST_DEVICE=cuda runs the rules on that device instead."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
if device := os.environ.get("HESSCALE_TEST_DEVICE"):
    torch.set_default_device(device)


@pytest.fixture
def double_precision():
    """float64 by default, and a fresh seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
