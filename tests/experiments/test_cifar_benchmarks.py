"""Benchmarks on CIFAR-100: first steps are those that the optimizers take, and what is left out is what is known to be."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale
from hesscale.experiments.vision import problems
from hesscale.experiments.vision.images import Images, Split
from hesscale.experiments.vision.problems import PROBLEMS


@pytest.fixture
def benchmark_named(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent.parent / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {"first_steps", "left_out", "records"} & (set(sys.modules) - before):
        sys.modules.pop(name)


@pytest.fixture
def benchmark(benchmark_named):
    return benchmark_named("first_steps")


@pytest.fixture
def left_out(benchmark_named):
    return benchmark_named("left_out")


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
        optimizes = optimizer.paper(model.parameters(), lr=1.0, curvature_warmup=count - 1)
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


class TestLeftOut:
    def test_a_layer_that_nothing_shares(self, left_out):
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 5), nn.Tanh(), nn.Linear(5, 100)).double()
        _, last = left_out.multiples(model, in_double(made_up()), 2)
        for name in ("all", "quantile_0.05", "quantile_0.95"):
            assert last[name] == pytest.approx(1)

    def test_pixels_that_are_alike_count_as_often_as_there_are(self, left_out):
        """In a mean over sixteen, each by itself has a 256th of the curvature, and there are 256 pairs."""
        model = nn.Sequential(nn.Conv2d(3, 100, 8, stride=8), problems.Mean(100, 16)).double()
        images = in_double(made_up())
        images.train.images[:] = images.train.images[:, :, :1, :1]
        (row,) = left_out.multiples(model, images, 2)
        assert row["all"] == pytest.approx(16)
        assert row["quantile_0.05"] == pytest.approx(16)

    def test_the_page_and_missing_data(self, left_out, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(left_out, "CASES", (("cifar100-3c3d", "none"),))
        monkeypatch.setattr(left_out, "load_images", lambda *_: made_up())
        assert left_out.main(["--data", "DATA", "--batch", "1", "--steps", "1", "--out", str(tmp_path / "out")]) == 0
        text = (tmp_path / "out" / "left_out.md").read_text(encoding="utf-8")
        assert "| 3C3D | none | 0 | 1 |" in text
        assert "| 3C3D | none | 1 | 6 | 1 | 1 | 1 | 1 |" in text
        monkeypatch.undo()
        assert left_out.main(["--data", str(tmp_path)]) == 2
        assert "mnist" in capsys.readouterr().err.lower()


def in_double(images: Images) -> Images:
    return images._replace(mean=images.mean.double(), std=images.std.double())
