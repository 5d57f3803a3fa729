"""Benchmarks of uses: predictions are those of laplace-torch, scores and tasks what they say, and pages are written."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("laplace")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def benchmark_named(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {"continual", "uncertainty", "records"} & (set(sys.modules) - before):
        sys.modules.pop(name)


class TestUncertainty:
    @pytest.fixture
    def uncertainty(self, benchmark_named):
        return benchmark_named("uncertainty")

    @pytest.mark.parametrize("weights", ["all", "last_layer"])
    def test_predictions_are_those_of_laplace_torch(self, uncertainty, weights):
        torch.manual_seed(0)
        model, x = uncertainty.mlp(8), torch.rand(7, 1, 8, 8)
        loader = DataLoader(TensorDataset(x, torch.randint(0, 10, (7,))), batch_size=4)
        found = uncertainty.posterior(model, "HesScaleGN", weights, loader)
        variances = 1 / (found.H + 3)
        p = uncertainty.predictions(model, x, weights, torch.stack([variances, torch.zeros_like(variances)], 1))
        found.prior_precision = 3.0
        torch.testing.assert_close(p[0], found(x, pred_type="glm", link_approx="probit"))
        torch.testing.assert_close(p[1], model(x).softmax(1))

    def test_calibration_error(self, uncertainty):
        p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]])
        assert uncertainty.calibration_error(p, torch.tensor([0, 1, 1, 1])) == pytest.approx(0.5 * 0.4 + 0.5 * 0.3)

    def test_the_page_and_missing_data(self, uncertainty, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(uncertainty.SIZES, "digits", uncertainty.Size(20, 10, 10, 1))
        monkeypatch.setattr(uncertainty, "NETWORKS", {"MLP": uncertainty.mlp})
        assert uncertainty.main(["--seeds", "1", "--out", str(tmp_path)]) == 0
        text = (tmp_path / "digits.md").read_text(encoding="utf-8")
        assert "| MLP | last_layer | BackPackEF | validation |" in text
        assert uncertainty.main(["--dataset", "mnist", "--data", str(tmp_path)]) == 2
        assert "mnist" in capsys.readouterr().err.lower()


class TestContinual:
    @pytest.fixture
    def continual(self, benchmark_named):
        return benchmark_named("continual")

    def test_images_are_permuted_and_rotated(self, continual):
        x = torch.rand(3, 1, 8, 8)
        one, same, other = (continual.permuted(x, *which) for which in ((1, 0), (1, 0), (2, 0)))
        torch.testing.assert_close(one.flatten(1).sort(1).values, x.flatten(1).sort(1).values)
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        torch.testing.assert_close(continual.rotated(x, 0, 0), x, rtol=1e-4, atol=1e-4)
        turned = continual.rotated(x, 90 // continual.DEGREES, 0)
        assert any(torch.allclose(turned, x.rot90(k, (2, 3)), atol=1e-4) for k in (1, 3))

    @pytest.mark.parametrize(("name", "method"), [("empirical Fisher", "empirical_fisher"), ("exact diag(G)", "ggn")])
    def test_importances_of_backpack_are_ours(self, continual, name, method):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
        loader = DataLoader(TensorDataset(torch.randn(7, 4), torch.randint(0, 3, (7,))), batch_size=3)
        torch.testing.assert_close(continual.IMPORTANCES[name](model, loader), continual.ours(method=method)(model, loader))

    def test_the_page_and_missing_data(self, continual, tmp_path, monkeypatch, capsys):
        monkeypatch.setitem(continual.SIZES, "digits", continual.Size(20, 10, 10, 5, 1))
        monkeypatch.setattr(continual, "LAMBDAS", [1.0, 2.0])
        monkeypatch.setattr(continual, "LAMBDAS_OF_ONES", [1.0])
        monkeypatch.setattr(continual, "TUNING_SEEDS", (1000,))
        assert continual.main(["--seeds", "1", "--series", "permuted", "--out", str(tmp_path)]) == 0
        text = (tmp_path / "digits_permuted.md").read_text(encoding="utf-8")
        assert "| exact diag(G) |" in text
        assert continual.main(["--dataset", "mnist", "--data", str(tmp_path)]) == 2
        assert "mnist" in capsys.readouterr().err.lower()
