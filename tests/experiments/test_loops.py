"""The benchmark of training loops of other libraries."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
LIBRARIES = {
    "sb3-ppo-cartpole": "stable_baselines3",
    "sb3-ppo-pendulum": "stable_baselines3",
    "sb3-sac": "stable_baselines3",
    "sb3-dqn": "stable_baselines3",
    "torchrl-ppo": "torchrl",
    "hf-bert": "transformers",
}


@pytest.fixture
def loops(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("loops")
    for name in ("loops", "records"):
        sys.modules.pop(name)
    torch.set_num_threads(before)


def rows_of(loops, folder, *options):
    loops.main([*options, "--rounds", "2", "--updates", "10", "--out", str(folder)])
    return json.loads((folder / "loops.json").read_text())["rows"]


def test_every_loop_is_tested(loops):
    assert set(LIBRARIES) == set(loops.CASES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if library == "stable_baselines3" else pytest.mark.slow) for name, library in LIBRARIES.items()],
)
def test_each_optimizer_makes_the_updates_of_a_block(loops, tmp_path, monkeypatch, name):
    pytest.importorskip(LIBRARIES[name])
    built = []
    case = loops.CASES[name]

    def build(updates, choice):
        built.append(case.build(updates, choice))
        return built[-1]

    monkeypatch.setitem(loops.CASES, name, loops.Case(case.title, build, case.updates))
    rows = rows_of(loops, tmp_path, "--only", name)
    assert [row["optimizer"] for row in rows] == list(loops.OPTIMIZERS)
    assert not any("error" in row for row in rows)
    assert rows[0]["ratio"]["median"] == 1
    for row, loop in zip(rows, built, strict=True):
        assert row["ms"]["median"] > 0
        for optimizer in loop.optimizers:  # one block before the rounds, and one in each
            counts = {int(state["step"]) for state in optimizer.state.values()}
            assert counts == {30}
    for optimizer in built[2].optimizers:
        assert {int(state["curvature_step"]) for state in optimizer.state.values()} == {3}
    page = (tmp_path / "loops.md").read_text()
    assert case.title in page
    assert f"--only {name}" in page


def test_a_loop_that_fails_stays_in_the_table(loops, tmp_path, monkeypatch):
    def broken(updates, choice):
        raise RuntimeError("no such loop")

    monkeypatch.setitem(loops.CASES, "sb3-dqn", loops.Case("broken", broken, 10))
    rows = rows_of(loops, tmp_path, "--only", "sb3-dqn")
    assert [row["error"] for row in rows] == ["RuntimeError: no such loop"] * len(loops.OPTIMIZERS)
    assert "no such loop" in (tmp_path / "loops.md").read_text()


def test_blocks_hold_whole_periods_of_curvature(loops, capsys):
    with pytest.raises(SystemExit):
        loops.main(["--updates", "5"])
    assert "multiple of 10" in capsys.readouterr().err
