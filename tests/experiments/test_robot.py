"""UR-Reacher: peak, end and drop of a run as worked out by hand, and runs that are those of PPO."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.empty(0).device.type != "cpu", reason="agents act on the CPU")

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("mujoco")
np = pytest.importorskip("numpy")

from hesscale.experiments.figures import robot  # noqa: E402
from hesscale.experiments.lab.experiment import as_task  # noqa: E402
from hesscale.experiments.lab.series_layout import check  # noqa: E402
from hesscale.experiments.lab.store import Result, Store  # noqa: E402
from hesscale.experiments.rl.config import Config  # noqa: E402

EXPERIMENT = robot.EXPERIMENT
CONFIG = Config("ppo", robot.ENV, "adam", 3e-4, 0, 1000)
RISING = [0.0, 10.0, 20.0, 30.0, 100.0, 120.0, 60.0, 60.0, 40.0, 20.0]


def result(returns, diverged_at=None, every=50, **task):
    """Of 1000 steps, over the last 100 of which returns are averaged: two points."""
    points = [(every * (k + 1), value) for k, value in enumerate(returns)]
    values = {"mean_return": 0.0, "diverged_at": diverged_at, "steps_per_second": 1.0}
    return Result(dataclasses.replace(CONFIG, **task), values, {"charts/episodic_return": points}, {})


def test_returns_are_averaged_over_whole_windows():
    found = robot.smoothed(result(RISING))
    assert list(found) == [100, 150, 200, 250, 300, 350, 400, 450, 500]
    assert [at.mean for at in found.values()] == [5.0, 15.0, 25.0, 65.0, 110.0, 90.0, 60.0, 50.0, 30.0]
    assert found[300].error == pytest.approx(10.0)
    alone = robot.smoothed(result([1.0, 2.0], every=200))
    assert [(step, at.mean, at.error) for step, at in alone.items()] == [(200, 1.0, None), (400, 2.0, None)]


def test_the_drop_is_from_the_peak_to_the_end():
    found = robot.course(result(RISING))
    assert (found.peak.mean, found.peak_step, found.end.mean) == (110.0, 300, 30.0)
    assert found.drop.mean == 80.0
    assert found.drop.error == pytest.approx(np.hypot(10, 10))
    assert found.part == pytest.approx(80 / (110 - robot.STANDING_STILL))
    assert robot.is_deteriorated(result(RISING))
    kept = result([100.0, 100.0, 90.0, 90.0])
    assert robot.course(kept).part == pytest.approx(10 / 174.1)
    assert not robot.is_deteriorated(kept)
    assert robot.is_deteriorated(result([100.0, 100.0, 82.0, 82.0]))


def test_divergence_is_deterioration_but_no_gain_is_not():
    assert robot.is_deteriorated(result([5.0, 5.0], diverged_at=120))
    assert robot.course(result([5.0, 5.0], diverged_at=120)).drop is None
    assert robot.is_deteriorated(result([], diverged_at=3))
    assert robot.course(result([7.0])) is None
    idle = result([-90.0, -90.0, -120.0, -120.0])
    assert robot.course(idle).part is None
    assert not robot.is_deteriorated(idle)


def test_the_return_of_standing_still_is_correct():
    """The distance to the target stays that of the reset."""
    env = gymnasium.make(robot.ENV)
    env.reset(seed=0)
    d = np.array([env.reset()[1]["distance"] for _ in range(3000)])
    assert np.mean(500 * (-d + np.exp(-(d**2) / 0.01))) == pytest.approx(robot.STANDING_STILL, abs=3)
    _, reward, *_ = env.step(np.zeros(2))
    assert reward == pytest.approx(5 * (-d[-1] + np.exp(-(d[-1] ** 2) / 0.01)), rel=1e-3)


def test_a_section_counts_the_runs_that_deteriorated():
    adam = [result(RISING, seed=0), result([100.0] * 4, seed=1), result([], diverged_at=40, seed=2)]
    scaled = [result([80.0] * 3, seed=seed, optimizer="scaled-adam") for seed in (1, 0)]
    (found,) = robot.sections([*adam, *scaled])
    drops, differences, runs, mean, lines = found.items
    for item in found.items:
        check(item)
    assert len({item.name for item in found.items}) == 5
    assert drops.rows[0] == ["Adam", "105.0 ± 5.0", "65.0 ± 35.0", "40.0 ± 40.0", "21.7 ± 21.7", "–", "2 of 3", "1 of 3"]
    assert drops.rows[1] == ["Scaled Adam", *["80.0 ± 0.0"] * 2, *["0.0 ± 0.0"] * 2, "–", "0 of 2", "0 of 2"]
    assert differences.rows == [["Scaled Adam − Adam", "-25.0 ± 5.0", "15.0 ± 35.0", "-40.0 ± 40.0", "2"]]
    assert runs.rows[0] == ["Adam", "0", "110.0 ± 10.0", "300", "30.0 ± 10.0", "80.0 ± 14.1", "43.5", "no"]
    assert runs.rows[2] == ["Adam", "2", *["–"] * 5, "at 40"]
    assert [row[1] for row in runs.rows] == ["0", "1", "2", "0", "1"]
    assert [series.label for series in lines.series] == ["Adam"] * 3 + ["Scaled Adam"] * 2
    assert lines.series[0].y[4] == 110.0
    assert [series.label for series in mean.series] == ["Adam", "Scaled Adam"]
    assert "a window of 10% of all steps" in found.text
    counts, losses = found.findings
    assert counts.text.startswith("2 of 3 runs of Adam and 0 of 2 runs of Scaled Adam deteriorated")
    assert losses.text == "Loss from the peak to the end, in percent of the gain: Adam 21.7 ± 21.7 % and Scaled Adam 0.0 ± 0.0 %."
    idle = [result([-90.0, -90.0, -120.0, -120.0], seed=seed) for seed in (0, 1)]
    assert robot.sections(idle)[0].findings == []


def test_the_step_at_which_a_return_is_reached(monkeypatch):
    adam = [result(RISING, seed=0), result([100.0] * 4, seed=1), result([0.0] * 4, seed=2)]
    monkeypatch.setattr(robot, "GOAL", 100)
    assert [robot.step_at_goal(each) for each in adam] == [300, 100, None]
    assert robot.sections(adam)[0].items[0].rows[0][5] == "200 (2 of 3)"


def test_each_step_size_has_a_section():
    first, second = robot.sections([result(RISING), result(RISING, step_size=1e-3)])
    assert (first.title, second.title) == ("UR-Reacher with PPO, α = 0.0003", "UR-Reacher with PPO, α = 0.001")
    assert not {item.name for item in first.items} & {item.name for item in second.items}


def test_the_paper_s_runs():
    asked = robot.tasks(robot.PRESETS["paper"])
    assert len(asked) == 10
    assert {(t.algo, t.env, t.step_size, t.trust_radius) for t in asked} == {("ppo", robot.ENV, 3e-4, 1e-8)}
    assert {t.optimizer for t in asked} == {"adam", "scaled-adam"}
    assert asked[0].steps >= 250_000
    assert robot.work(robot.PRESETS["paper"]).startswith("10 agents")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"optimizer": "sgd"}, "no optimizer is called 'sgd'"),
        ({"seeds": 0}, "seeds must be at least 1, not 0"),
        ({"backend": "fast"}, "backend='fast' is not one of"),
    ],
)
def test_bad_settings_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        robot.tasks(robot.Settings(**changed))


def test_the_smoke_preset_runs(tmp_path, monkeypatch):
    from hesscale.experiments.rl.ppo import PPO

    monkeypatch.setattr(PPO, "rollout", 128)
    monkeypatch.setattr(PPO, "minibatches", 4)
    monkeypatch.setattr(PPO, "epochs", 2)
    settings = dataclasses.replace(robot.PRESETS["smoke"], steps=256)
    store, asked = Store(tmp_path), [as_task(task) for task in robot.tasks(settings)]
    for task in asked:
        EXPERIMENT.do(store, task, None)
    (found,) = robot.sections(EXPERIMENT.results(store, asked))
    assert [len(series.x) for series in found.items[3].series] == [2, 2]


def test_optimizers_have_the_same_step_sizes():
    with pytest.raises(ValueError, match="names with @ are not allowed"):
        robot.tasks(robot.Settings(optimizer="adam@1e-3,scaled-adam"))
