"""The benchmark of first steps measures those that the optimizers take."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hesscale
from hesscale.vision.images import Images, Split
from hesscale.vision.problems import PROBLEMS


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    yield importlib.import_module("first_steps")
    for name in ("first_steps", "records"):
        sys.modules.pop(name)


def made_up() -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (8, 3, 32, 32), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.arange(8))
    return Images(split, split, split, 100, 255, torch.zeros(3, 1, 1), torch.ones(3, 1, 1))


@pytest.mark.parametrize("optimizer", [hesscale.AdaHesScale, hesscale.AdaHesScaleGN])
def test_lengths_are_those_of_the_optimizer(optimizer, benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "COUNTS", (1, 3))
    images = made_up()
    row = benchmark.measured("cifar100-3c3d", "deepobs", "float32", optimizer.__name__, images, 2)
    for count in benchmark.COUNTS:
        model = PROBLEMS["cifar100-3c3d"].network(100, 0)
        start = [p.detach().clone() for p in model.parameters()]
        optimizes = optimizer(model.parameters(), lr=1.0, curvature_warmup=count - 1)
        generator = torch.Generator().manual_seed(0)
        for _ in range(count):
            some = torch.randint(0, 8, (2,), generator=generator)
            optimizes.zero_grad()
            optimizes.backward(F.cross_entropy(model(images.inputs(images.train.images[some])), images.train.labels[some]))
            optimizes.step()
        moved = max(float((p.detach() - q).abs().max()) for p, q in zip(model.parameters(), start, strict=True))
        assert row[f"largest_{count}"] == pytest.approx(moved, rel=1e-3)
    assert (row["negative"] == 0) == (optimizer is hesscale.AdaHesScaleGN)


def test_the_page_and_missing_data(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "COUNTS", (1,))
    monkeypatch.setattr(benchmark, "CASES", (("cifar100-3c3d", "none", "bf16"),))
    monkeypatch.setattr(benchmark, "load_images", lambda *_: made_up())
    assert benchmark.main(["--data", str(tmp_path), "--batch", "2", "--out", str(tmp_path / "out")]) == 0
    assert "| 3C3D | none | bf16 | AdaHessian |" in (tmp_path / "out" / "first_steps.md").read_text(encoding="utf-8")
    monkeypatch.undo()
    assert benchmark.main(["--data", str(tmp_path)]) == 2
    assert "cifar" in capsys.readouterr().err.lower()
