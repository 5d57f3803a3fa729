"""The demonstration runs, and what it calls exact is exact."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from oracle import hessian_diagonal
from torch import nn
from torch.nn import functional as F

from hesscale import demo


def test_demonstration_prints_both_tables_and_saves_a_plot(tmp_path, capsys):
    demo.main(["--epochs", "1", "--samples", "4", "--plot", str(tmp_path / "new" / "plot.png")])
    printed = capsys.readouterr().out
    assert "before training" in printed
    assert "after training" in printed
    assert "ratio" in printed
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_exact_diagonal_is_that_of_double_backward_entry_by_entry():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 25), nn.Tanh(), nn.Linear(25, 2)).double()  # 75 weights: two chunks of rows
    images, labels = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    loss = F.cross_entropy(model(images), labels)
    truth = [hessian_diagonal(loss, p).flatten() for p in model.parameters()]
    torch.testing.assert_close(demo.exact_diagonal(model, images, labels), truth, rtol=1e-10, atol=1e-14)


def test_hesscale_is_exact_in_the_last_layer_of_the_demonstration():
    torch.manual_seed(0)
    images, labels, _, _ = demo.digits()
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))
    found = demo.compare(model, images[:16], labels[:16])
    assert demo.error(found["HesScale"][-1], found["exact"][-1]) < 1e-5
    assert demo.error(found["HesScaleGN"][-1], found["exact"][-1]) < 1e-5
    assert demo.error(found["BL89"][-1], found["exact"][-1]) > 0.1


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.delitem(sys.modules, "hesscale.demo")
    with pytest.raises(ModuleNotFoundError, match=r"needs sklearn.*hesscale\[experiments\]"):
        importlib.import_module("hesscale.demo")
