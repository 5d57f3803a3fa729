"""``hesscale inspect`` writes a page and its numbers, before and after training."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hesscale.experiments.cli import app

FACTORY = """
import torch
from torch import nn

def ready():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    return model, batches, lambda model, x, y: nn.functional.cross_entropy(model(x), y)

def once():
    model, batches, loss_fn = ready()
    return model, iter(batches), loss_fn

class Exhausted(torch.utils.data.IterableDataset):
    batches = ready()[1]

    def __iter__(self):
        while self.batches:
            yield self.batches.pop()

def exhausted():
    model, _, loss_fn = ready()
    return model, torch.utils.data.DataLoader(Exhausted(), batch_size=None), loss_fn

def incomplete():
    return ready()[:2]
"""


@pytest.fixture
def inspected(tmp_path, monkeypatch):
    """Run ``hesscale inspect`` where a module ``curvature_case`` is."""
    (tmp_path / "curvature_case.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["inspect", *arguments])


def test_the_page_has_both_reports(inspected, tmp_path):
    result = inspected("curvature_case:ready", "--steps", "20", "--lr", "0.01", "--out", "page")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page/index.html").read_text(encoding="utf-8")
    numbers = json.loads((tmp_path / "page/curvature.json").read_text(encoding="utf-8"))
    assert list(numbers) == ["Before training", "After 20 steps"]
    assert numbers["After 20 steps"]["loss"] < numbers["Before training"]["loss"]
    assert [row["parameter"] for row in numbers["Before training"]["rows"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert page.count("<h2>") == 2
    assert page.count("<td>2.weight</td>") == 6  # three tables for each
    assert "hesscale inspect curvature_case:ready --steps 20 --lr 0.01" in page
    assert "<svg" in page
    assert 'name="viewport"' in page
    assert "The diagonal h" in result.output


def test_without_training_and_without_draws(inspected, tmp_path):
    assert inspected("curvature_case:ready", "--num-samples", "0", "--max-batches", "1").exit_code == 0
    numbers = json.loads((tmp_path / "out/inspect/curvature.json").read_text(encoding="utf-8"))
    assert list(numbers) == ["As it is"]
    assert numbers["As it is"]["examples"] == 8
    assert {row["ggn_ratio"] for row in numbers["As it is"]["rows"]} == {None}


@pytest.mark.parametrize("factory", ["once", "exhausted"])
def test_a_loader_that_can_be_read_only_once_is_refused(inspected, factory):
    result = inspected(f"curvature_case:{factory}", "--steps", "5")
    assert result.exit_code != 0
    assert "read only once" in " ".join(result.output.replace("│", " ").split())
    assert factory == "exhausted" or inspected("curvature_case:once").exit_code == 0


@pytest.mark.parametrize(
    ("factory", "words"),
    [("curvature_case", "module:function"), ("curvature_case:incomplete", "loss_fn"), ("nowhere:f", "nowhere")],
)
def test_errors_of_a_factory_are_reported(inspected, factory, words):
    result = inspected(factory)
    assert result.exit_code != 0
    assert words in " ".join(result.output.replace("│", " ").split())
