"""The benchmarks of environments and of agents: measurements, and missing packages in their tables."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("mujoco")
pytest.importorskip("gymnasium")
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def environments(monkeypatch):
    """The benchmark, which is a script and not part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("environments")
    sys.modules.pop("environments")


@pytest.fixture
def rl_speed(environments):
    yield importlib.import_module("rl_speed")
    sys.modules.pop("rl_speed")


@pytest.fixture
def small(rl_speed, monkeypatch):
    """Short rollouts, and nothing to compile."""
    monkeypatch.setattr(rl_speed, "Config", functools.partial(rl_speed.Config, backend="eager"))
    monkeypatch.setattr(rl_speed, "ITERATIONS", {"ppo": 1, "a2c": 2})
    for name, size in {"rollout": 32, "epochs": 2, "minibatches": 2}.items():
        monkeypatch.setattr(rl_speed.PPO, name, size)
    return rl_speed


# ------------------------------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize("name", ["HalfCheetah-v5", "Hopper-v5", "InvertedDoublePendulum-v5"])
def test_the_simulator_follows_the_same_states_as_the_environments(environments, name):
    course = environments.record(name, 2, 150)
    assert any(course.resets) == (name != "HalfCheetah-v5")
    loop, simulator = environments.Loop(course), environments.Simulator(course)
    for way in (loop, simulator):
        way.run()
    for env, data in zip(loop.envs, simulator.data, strict=True):
        np.testing.assert_array_equal(np.concatenate([data.qpos, data.qvel]), environments.state_of(env))
    simulator.rest()
    assert simulator.data[0].time == 0


@pytest.mark.parametrize("way", ["unwrapped", "sync", "ours"])
def test_all_implementations_go_through_the_same_states(environments, way):
    course = environments.record("InvertedDoublePendulum-v5", 2, 20)
    loop, case = environments.Loop(course), environments.WAYS[way].make(course)
    loop.run()
    for _ in range(2):
        case.run()
        for env, twin in zip(getattr(case.envs, "envs", case.envs), loop.envs, strict=True):
            np.testing.assert_array_equal(environments.state_of(env), environments.state_of(twin))
        case.rest()


def test_a_rollout_observes_what_the_environment_does(environments):
    course = environments.record("Hopper-v5", 3, 2)
    case, loop = environments.Rollout(course, judged=True), environments.Loop(course)
    for actions in course.actions:
        observations, rewards, terminated = case.step(actions)
        results = [env.step(action) for env, action in zip(loop.envs, actions, strict=True)]
        np.testing.assert_allclose(observations, [result[0] for result in results], atol=1e-9)
        np.testing.assert_allclose(rewards, [result[1] for result in results], atol=1e-6)
        assert terminated.tolist() == [result[2] for result in results]


def test_environments_are_measured_and_what_is_missing_is_named(environments, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envpool", None)
    names = ["InvertedPendulum-v5", "InvertedDoublePendulum-v5"]
    environments.main(["--envs", *names, "--counts", "1", "2", "--rounds", "2", "--steps", "8", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "environments.json").read_text(encoding="utf-8"))
    assert list(found["environments"]) == names
    for name, entry in found["environments"].items():
        rows = {(row["way"], row["count"]): row for row in entry["rows"]}
        assert set(rows) == {(way, count) for way in environments.WAYS for count in (1, 2)}
        missing = {way for (way, _), row in rows.items() if "error" in row}
        assert missing == {"envpool"} | ({"rollout"} if name == names[1] else set())
        assert rows["loop", 2]["agent_steps"] == 8
        assert all(len(row["all_steps_per_second"]) == 2 for row in rows.values() if "error" not in row)
        assert rows["simulator", 1]["share_of_simulator"] == {"median": 1, "q1": 1, "q3": 1}
        assert entry["parts"]["`mj_step`"] > 0
    page = (tmp_path / "environments.md").read_text(encoding="utf-8")
    assert page == environments.page(found)
    assert "- InvertedPendulum-v5, envpool, one thread: envpool is not installed" in page
    assert page in capsys.readouterr().out


def test_steps_of_envpool_are_counted_without_its_resets(environments, monkeypatch):
    class Pool:
        """Every third step is a reset."""

        action_space = type("Space", (), {"dtype": np.dtype(np.float64)})
        calls = 0

        def reset(self):
            pass

        def step(self, actions):
            self.calls += 1
            assert actions.dtype == np.float64
            return None, None, None, None, {"elapsed_step": np.full(len(actions), self.calls % 3)}

    pool = Pool()
    monkeypatch.setitem(sys.modules, "envpool", type("Module", (), {"make": lambda *_, **__: pool}))
    case = environments.EnvPool(environments.record("InvertedPendulum-v5", 2, 6))
    case.run()
    assert pool.calls == 8  # with two resets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--ways", "magic"], "magic"), (["--envs", "Nowhere-v0"], "Nowhere-v0"), (["--counts", "0"], "must be at least 1")],
)
def test_bad_options_are_refused(environments, capsys, arguments, message):
    with pytest.raises(SystemExit):
        environments.main(arguments)
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------------- agents


def test_agents_are_measured(small, tmp_path):
    arguments = ["--envs", "CartPole-v1", "--together", "1", "2", "--rounds", "2", "--out", str(tmp_path)]
    small.main([*arguments, "--name", "tiny"])
    found = json.loads((tmp_path / "tiny.json").read_text(encoding="utf-8"))
    keys = [(row["algo"], row["method"], row["together"]) for row in found["rows"]]
    ours = [("adam", 1), ("adahesscale", 1), ("adam", 2), ("adahesscale", 2)]
    assert keys == [(algo, *key) for algo in ("ppo", "a2c") for key in [("sb3", 1), *ours]]
    has_sb3 = importlib.util.find_spec("stable_baselines3") is not None
    for row in found["rows"]:
        if row["method"] == "sb3" and not has_sb3:
            assert "stable-baselines3" in row["error"]
            continue
        assert len(row["all_steps_per_second"]) == 2
        assert row["agent_steps"] == {"ppo": 32, "a2c": 10}[row["algo"]] * row["together"]
        assert (row["to_sb3"] is not None) == has_sb3
        assert (row["to_one"]["median"] == 1) == (row["together"] == 1)
        assert row["update_us"] > 0 < row["rollout_us"]
    assert (tmp_path / "tiny.md").read_text(encoding="utf-8") == small.page(found)


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_all_take_the_same_steps_with_the_same_networks(small, algo):
    pytest.importorskip("stable_baselines3")
    theirs, ours = small.StableBaselines3(algo, "CartPole-v1"), small.Ours(algo, "CartPole-v1", "adam", 1)
    assert theirs.agent_steps == ours.agent_steps
    for case in (theirs, ours):
        for _ in range(2):
            case.run()
        assert all(0 < share < 1 for share in case.update_share)
    assert theirs.model.num_timesteps == ours.learning.envs.steps == 2 * ours.agent_steps
    sizes = [sum(p.numel() for p in module.parameters()) for module in (theirs.model.policy, ours.learning.agents[0])]
    assert sizes[0] + (2 * 64 if algo == "a2c" else 0) == sizes[1]  # whose A2C observes the time
    assert isinstance(theirs.model.policy.optimizer, torch.optim.Adam)


def test_missing_stable_baselines3_is_reported(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "stable_baselines3", None)
    rows = small.measured("a2c", "CartPole-v1", ["adam"], [1], 1)
    assert "stable-baselines3 is not installed" in rows[0]["error"]
    assert rows[1]["to_sb3"] is None
    assert "- A2C, CartPole-v1, Stable-Baselines3, Adam: stable-baselines3 is not installed" in small.speeds(rows)


def test_agents_that_diverged_are_not_measured(small):
    case = small.Ours("a2c", "CartPole-v1", "adam", 2)
    case.learning.envs.stop(1)
    with pytest.raises(RuntimeError, match="diverged"):
        case.run()


@pytest.mark.parametrize("name", ["environments", "rl_speed", "together"])
def test_stored_pages_are_those_of_the_stored_records(environments, rl_speed, name):
    path = ROOT / "results" / ("environments" if name == "environments" else "rl_speed") / f"{name}.json"
    page = environments.page if name == "environments" else rl_speed.page
    assert page(json.loads(path.read_text(encoding="utf-8"))) == path.with_suffix(".md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------- other people's algorithms


def test_every_optimizer_trains_agents_of_stable_baselines3(monkeypatch, tmp_path):
    pytest.importorskip("stable_baselines3")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sb3 = importlib.import_module("sb3_agents")
    for first, count, part in ((1, 2, "late"), (0, 1, "soon")):
        seeds = ["--first-seed", str(first), "--seeds", str(count)]
        sb3.main(["--only", "a2c-cartpole", *seeds, "--steps", "100", "--out", str(tmp_path / "parts" / part)])
    parts = [json.loads((tmp_path / "parts" / part / "sb3.json").read_text()) for part in ("late", "soon")]
    sb3.main(["--merge", str(tmp_path / "parts"), "--out", str(tmp_path)])
    found = json.loads((tmp_path / "sb3.json").read_text())
    assert found["parts"] == [part["command"] for part in parts]
    assert {key: found[key] for key in ("machine", "commit")} == {key: parts[0][key] for key in ("machine", "commit")}
    assert sb3.page(found) == (tmp_path / "sb3.md").read_text()
    rows = found["rows"]
    assert [row["optimizer"] for row in rows] == list(sb3.OPTIMIZERS)
    assert rows[0]["to_adam"] == 1
    for row in rows:
        assert [run["seed"] for run in row["runs"]] == [0, 1, 2]
        assert all(run["mean_return"] > 0 and run["train_s"] > 0 for run in row["runs"])
    with pytest.raises(ValueError, match=r"seeds \[0, 0, 1, 2\]; run each seed once"):
        sb3.joined([*rows, *parts[1]["rows"]])
    (tmp_path / "parts" / "failed").mkdir()
    with pytest.raises(FileNotFoundError, match=r"failed.sb3\.json"):
        sb3.main(["--merge", str(tmp_path / "parts"), "--out", str(tmp_path)])
    with pytest.raises(ValueError, match="no update in 5 steps"):
        sb3.main(["--only", "sac-pendulum", "--steps", "5", "--out", str(tmp_path)])
    stored = json.loads((ROOT / "results/sb3/sb3.json").read_text(encoding="utf-8"))
    assert sb3.page(stored) == (ROOT / "results/sb3/sb3.md").read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- predicted decrease


@pytest.mark.parametrize("algo", ["a2c", "ppo"])
def test_the_decrease_of_a_short_step_is_as_predicted(environments, algo, tmp_path, monkeypatch):
    benchmark = importlib.import_module("predicted_decrease")
    for name, size in {"rollout": 32, "epochs": 2, "minibatches": 2}.items():
        monkeypatch.setattr(benchmark.ALGORITHMS["ppo"], name, size)
    arguments = ["--algos", algo, "--envs", "InvertedPendulum-v5", "--radii", "1e-10", "1e-9", "--steps", "64"]
    benchmark.main([*arguments, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "predicted_decrease.json").read_text())["rows"]
    assert [(row["radius"], row["part"]) for row in rows] == [(r, part) for r in (1e-10, 1e-9) for part in ("policy", "critic")]
    assert [row["same"] for row in rows] == pytest.approx([1] * 4, abs=0.1)
    assert "| " + algo.upper() in (tmp_path / "predicted_decrease.md").read_text()
