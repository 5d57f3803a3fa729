"""benchmarks/pruning.py and benchmarks/quantization.py, on the digits and at their smallest."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for name in ("pruning", "quantization", "trained_networks", "records"):
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
