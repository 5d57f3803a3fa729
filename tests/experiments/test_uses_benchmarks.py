"""Benchmarks of uses, at their smallest: predictions are those of laplace-torch, tasks what they say, and pages are written."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for name in ("pruning", "quantization", "trained_networks", "uncertainty", "continual", "records"):
        sys.modules.pop(name, None)


def test_pruning_resumes_from_its_folder(script, monkeypatch, tmp_path):
    pruning = script("pruning")
    case = replace(pruning.CASES[0], steps=20, examples=(32, 16))
    monkeypatch.setattr(pruning, "CASES", (case,))
    few = ("magnitude", "½ h w², HesScaleGN calibrated")
    monkeypatch.setattr(pruning, "CRITERIA", {name: pruning.CRITERIA[name] for name in few})
    monkeypatch.setattr(pruning, "HUES", pruning.HUES[:2])
    monkeypatch.setattr(pruning, "RETRAINED", few)
    monkeypatch.setattr(pruning, "RETRAINING", {case.problem: 2})
    networks, out = tmp_path / "networks", tmp_path / "out"
    arguments = ["--data", str(tmp_path), "--networks", str(networks), "--out", str(out), "--seeds", "2"]
    assert pruning.main(arguments) == 0
    page = (out / "pruning.md").read_text(encoding="utf-8")
    assert "### Channels, layer" in page
    assert "| ½ h w², HesScaleGN calibrated |" in page
    assert (out / "pruning.png").stat().st_size > 1000
    monkeypatch.setattr(pruning, "trained", None)  # nothing is computed again
    assert len(pruning.measure(case, 1, None, networks)) == 1 + 2 * (5 + 3 + 3 + 3) + 2 * 3


def test_quantization(script, monkeypatch, tmp_path):
    quantization, cases = script("quantization"), script("trained_networks").CASES
    monkeypatch.setattr(quantization, "CASE", replace(cases[0], steps=20, examples=(32, 16)))
    monkeypatch.setattr(quantization, "BUDGETS", (3, 4))
    folders = ["--data", str(tmp_path), "--networks", str(tmp_path / "networks"), "--out", str(tmp_path / "out")]
    assert quantization.main([*folders, "--seeds", "1"]) == 0
    page = (tmp_path / "out/quantization.md").read_text(encoding="utf-8")
    assert "| bits | uniform | Δ² alone | HesScaleGN | HesScaleGN calibrated | GGN-MC |" in page


@pytest.mark.filterwarnings("ignore")
class TestUncertainty:
    @pytest.fixture
    def uncertainty(self, script):
        pytest.importorskip("laplace")
        return script("uncertainty")

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


@pytest.mark.filterwarnings("ignore")
class TestContinual:
    @pytest.fixture
    def continual(self, script):
        pytest.importorskip("backpack")
        return script("continual")

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
