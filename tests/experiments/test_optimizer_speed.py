"""The benchmark of optimizers on the tasks of ``hesscale optimizers``."""

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
    yield importlib.import_module("optimizer_speed")
    for name in ("optimizer_speed", "records"):
        sys.modules.pop(name)


def options(out, *more):
    return ["--tasks", "cifar100-3c3d", "--batch", "2", "--rounds", "2", "--backend", "eager", "--out", str(out), *more]


def test_a_row_for_every_optimizer(benchmark, tmp_path):
    benchmark.main(options(tmp_path, "--optimizers", "adahesscale-default"))
    rows = json.loads((tmp_path / "optimizer_speed.json").read_text())["rows"]
    assert [row["optimizer"] for row in rows] == ["adam", "adahesscale-default"]
    assert rows[0]["relative_to_adam"]["median"] == 1
    assert all(row["mode"] == "eager" and row["ms_a_step"]["median"] > 0 for row in rows)
    assert "| cifar100-3c3d | AdaHesScale, grafted (default) |" in (tmp_path / "optimizer_speed.md").read_text()


def test_an_optimizer_that_fails_stays_in_the_table(benchmark, tmp_path, monkeypatch):
    class Broken(benchmark.Case):
        def __init__(self, problem, optimizer, *rest):
            if optimizer == "muon":
                raise RuntimeError("no such thing")
            super().__init__(problem, optimizer, *rest)

    monkeypatch.setattr(benchmark, "Case", Broken)
    benchmark.main(options(tmp_path, "--optimizers", "muon"))
    assert "RuntimeError: no such thing" in (tmp_path / "optimizer_speed.md").read_text()


def test_bad_numbers_are_refused(benchmark, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--rounds", "0"])
    assert "--rounds must be at least 1" in capsys.readouterr().err
