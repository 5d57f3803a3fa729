"""Models of other libraries run, with PyTorch's gradients and the recursion's diagonals, as docs/models.md says."""

from __future__ import annotations

import pytest
import torch
from model_runner import examine, is_installed
from page import CASES, row, rows_on_page, title

if torch.get_default_device().type != "cpu":
    pytest.skip("these libraries choose their device themselves", allow_module_level=True)


def test_the_page_lists_every_model():
    names = [(case.library, title(case)) for case in CASES]
    assert list(rows_on_page()) == names
    assert len(set(names)) == len(names)


def test_the_page_reports_no_wrong_number():
    for _, runs, gradients, diagonals, *_ in rows_on_page().values():
        assert runs.startswith("raises: ") or (runs, gradients) == ("yes", "identical")
        assert "DIFFER" not in diagonals


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.library}-{case.name}")
def test_models(case, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if not is_installed(case.library):
        pytest.skip(f"{case.library} is not installed")
    assert row(case, examine(case))[:4] == rows_on_page()[case.library, title(case)][:4]
