"""The benchmark of training on images."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("supervised_speed")
    for name in ("supervised_speed", "records"):
        sys.modules.pop(name)


def test_rows_for_every_optimizer_and_number_of_networks(benchmark, tmp_path, monkeypatch):
    small = benchmark.PROBLEMS["cifar100-3c3d"]
    monkeypatch.setitem(benchmark.PROBLEMS, "cifar100-3c3d", type(small)(**{**vars(small), "batch": 4}))
    options = [
        "--optimizers",
        "sgd",
        "--together",
        "1",
        "2",
        "--images",
        "8",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--backend",
        "eager",
    ]
    benchmark.main([*options, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "cifar100-3c3d.json").read_text())
    assert [(row["optimizer"], row["together"]) for row in found["rows"]] == [("adam", 1), ("sgd", 1), ("adam", 2), ("sgd", 2)]
    for row in found["rows"]:
        assert row["mode"] == "eager"
        ms, pace = row["ms_a_step"]["median"], row["images_per_second"]["median"]
        assert pace == pytest.approx(4 * row["together"] * 1e3 / ms * (1 - row["outside_steps"]["median"]), rel=1e-3)
    assert found["rows"][0]["relative_to_adam"]["median"] == 1
    page = (tmp_path / "cifar100-3c3d.md").read_text()
    assert "| SGD | 2 |" in page
    assert "--images 8" in page


def test_an_optimizer_that_fails_stays_in_the_table(benchmark, tmp_path, monkeypatch):
    def broken(asked, images):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(benchmark, "members_of", broken)
    benchmark.main(["--optimizers", "sgd", "--images", "128", "--device", "cpu", "--out", str(tmp_path)])
    assert "RuntimeError: no such thing" in (tmp_path / "cifar100-3c3d.md").read_text()


def test_bad_numbers_are_refused(benchmark, capsys):
    for wrong in (["--rounds", "0"], ["--images", "3"]):
        with pytest.raises(SystemExit):
            benchmark.main(wrong)
    assert "at least a batch of 128" in capsys.readouterr().err
