"""Batched environments equal gymnasium's, bit for bit."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
mujoco = pytest.importorskip("mujoco")

from gymnasium.envs.mujoco.hopper_v5 import HopperEnv  # noqa: E402
from gymnasium.wrappers import ClipAction, TimeLimit  # noqa: E402

from hesscale.experiments.rl.batched_envs import Environments, MuJoCo, environments  # noqa: E402

ROBOTS = {  # and an episode's length that some of them reach and others do not
    "Ant": 40,
    "HalfCheetah": 40,
    "Hopper": 22,
    "Humanoid": 24,
    "HumanoidStandup": 40,
    "InvertedDoublePendulum": 8,
    "InvertedPendulum": 9,
    "Reacher": 40,
    "Swimmer": 40,
    "Walker2d": 22,
}
NEVER_TERMINATE = {"HalfCheetah", "HumanoidStandup", "Reacher", "Swimmer"}


def make(name, count, **options):
    return [gymnasium.make(f"{name}-v5", **options) for _ in range(count)]


def random_actions(env, rng, count):
    space = env.action_space
    kind = rng.choice([np.float32, np.float64])
    return rng.uniform(space.low, space.high, (count, *space.shape)).astype(kind)


def assert_same(ours, theirs):
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        np.testing.assert_array_equal(our, their, strict=True)


def compare(ours, theirs, steps, seed=0):
    """Play both with random actions in random rows; how many episodes terminated and were truncated."""
    rng, count = np.random.default_rng(seed), len(ours.envs)
    ends = np.zeros(2, int)
    for k in range(count):
        assert_same([ours.reset(k, seed + k)], [theirs.reset(k, seed + k)])
    for _ in range(steps):
        rows = rng.permutation(count)[: rng.integers(1, count + 1)].tolist()
        actions = random_actions(ours.envs[0], rng, len(rows))
        results = ours.step(actions, rows)
        assert_same(results, theirs.step(actions, rows))
        ends += [results[2].sum(), results[3].sum()]
        for k, terminated, truncated in zip(rows, *results[2:], strict=True):
            if terminated or truncated:
                assert_same([ours.reset(k)], [theirs.reset(k)])
    return ends.tolist()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ROBOTS)
def test_robots_equal_gymnasium_bit_for_bit(name, count):
    options = {"max_episode_steps": ROBOTS[name]}
    ours, theirs = environments(make(name, count, **options)), Environments(make(name, count, **options))
    assert type(ours) is MuJoCo
    terminated, truncated = compare(ours, theirs, 200, seed=count)
    assert truncated > 0
    assert (terminated > 0) == (name not in NEVER_TERMINATE)
    for our, their in zip(ours.envs, theirs.envs, strict=True):  # and what they would save is the same
        assert our._elapsed_steps == their._elapsed_steps
        assert our.np_random.bit_generator.state == their.np_random.bit_generator.state
        for field in ("qpos", "qvel", "qacc_warmstart", "ctrl", "xpos", "xipos", "cfrc_ext", "cfrc_int", "time"):
            np.testing.assert_array_equal(getattr(our.unwrapped.data, field), getattr(their.unwrapped.data, field))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ROBOTS),
        ("Hopper", {"healthy_state_range": (-900, 1.0), "healthy_z_range": (-900, 900), "healthy_angle_range": (-900, 900)}),
    ],
)
def test_robots_equal_gymnasium_in_rare_states(name, options, monkeypatch):
    """Numbers drawn in place of a simulation, some of them not finite."""
    fields = ("qpos", "qvel", "xpos", "xipos", "site_xpos", "cinert", "cvel", "cfrc_ext", "qfrc_actuator", "qfrc_constraint")

    def step(model, data, nstep):
        for field in fields:
            values = getattr(data, field)
            values[...] = rng.normal(scale=10 ** rng.uniform(-2, 2), size=values.shape)
            if values.size and rng.random() < 0.05:
                values.flat[rng.integers(values.size)] = rng.choice([np.nan, np.inf])

    monkeypatch.setattr(mujoco, "mj_step", step)
    monkeypatch.setattr(mujoco, "mj_rnePostConstraint", lambda model, data: None)
    ours, theirs = environments(make(name, 3, **options)), Environments(make(name, 3, disable_env_checker=True, **options))
    for k in range(3):
        assert_same([ours.reset(k, k)], [theirs.reset(k, k)])
    for seed in range(150):
        actions = random_actions(ours.envs[0], np.random.default_rng(seed), 3)
        with np.errstate(all="ignore"):
            rng = np.random.default_rng(seed)
            results = ours.step(actions, [0, 1, 2])
            rng = np.random.default_rng(seed)
            assert_same(results, theirs.step(actions, [0, 1, 2]))


@pytest.mark.parametrize("count", [16, 40])
def test_batched_sums_equal_single_sums(count):
    """Eight or seventeen actions, and the forces, are enough for NumPy to sum them in another order."""
    for name in ("Ant", "Humanoid"):
        compare(environments(make(name, count)), Environments(make(name, count)), 4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "Ant",
            {
                "include_cfrc_ext_in_observation": False,
                "healthy_reward": 0.3,
                "main_body": "torso",
                "healthy_z_range": (0.5, 0.8),
            },
        ),
        (
            "Ant",
            {"contact_force_range": (-0.1, 0.2), "contact_cost_weight": 0.5, "terminate_when_unhealthy": False, "frame_skip": 2},
        ),
        ("HalfCheetah", {"forward_reward_weight": 0.7, "ctrl_cost_weight": 0.3}),
        ("Hopper", {"healthy_state_range": (-1.0, 2.0), "healthy_angle_range": (-5.0, 5.0), "ctrl_cost_weight": 0.3}),
        ("Hopper", {"terminate_when_unhealthy": False, "exclude_current_positions_from_observation": False}),
        (
            "Humanoid",
            {"include_cvel_in_observation": False, "include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.1},
        ),
        ("Humanoid", {"contact_cost_range": (2.0, 3.0), "exclude_current_positions_from_observation": False}),
        ("HumanoidStandup", {"include_qfrc_actuator_in_observation": False, "impact_cost_range": (0.001, 0.01)}),
        ("InvertedDoublePendulum", {"healthy_reward": 3.3}),
        ("Reacher", {"reward_dist_weight": 0.7, "reward_control_weight": 0.1}),
        ("Swimmer", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.3}),
        ("Walker2d", {"healthy_z_range": (1.1, 1.3), "forward_reward_weight": 0.3}),
    ],
)
def test_weights_and_ranges_are_the_environments_own(name, options):
    ours = environments(make(name, 2, **options))
    assert type(ours) is MuJoCo
    compare(ours, Environments(make(name, 2, **options)), 60)


def test_environments_may_be_stepped_directly_in_between():
    ours, theirs = environments(make("Ant", 2)), Environments(make("Ant", 2))
    compare(ours, theirs, 10)
    for seed in range(3):
        actions = random_actions(ours.envs[0], np.random.default_rng(seed), 2)
        assert_same([ours.envs[0].step(actions[0])[0]], [theirs.envs[0].step(actions[0])[0]])
        assert_same(ours.step(actions, [0, 1]), theirs.step(actions, [0, 1]))


def test_a_replaced_simulation_is_detected():
    ours, theirs = environments(make("Humanoid", 2)), Environments(make("Humanoid", 2))
    compare(ours, theirs, 3)
    for env in (ours.envs[1], theirs.envs[1]):
        env.unwrapped.data = mujoco.MjData(env.unwrapped.model)
    compare(ours, theirs, 10)


def test_a_pickled_copy_has_its_own_simulations():
    ours = pickle.loads(pickle.dumps(environments(make("Hopper", 2))))
    assert type(ours) is MuJoCo
    compare(ours, Environments(make("Hopper", 2)), 10)


class Higher(HopperEnv):
    @property
    def is_healthy(self):
        return self.data.qpos[1] > 1.0


def heavier(envs):
    envs[0].unwrapped.model.body_mass[1] += 1
    return envs


OTHERS = {
    "another wrapper": lambda: [ClipAction(*make("Hopper", 1))],
    "another wrapper within": lambda: [TimeLimit(ClipAction(HopperEnv()), 10)],
    "two limits": lambda: [TimeLimit(*make("Hopper", 1), 10)],
    "no limit": lambda: make("Hopper", 1, max_episode_steps=-1),
    "a subclass": lambda: [TimeLimit(Higher(), 10)],
    "drawn at each step": lambda: make("Hopper", 1, render_mode="human"),
    "different robots": lambda: make("Hopper", 1) + make("Walker2d", 1),
    "different weights": lambda: make("Hopper", 1) + make("Hopper", 1, ctrl_cost_weight=0.1),
    "different ranges": lambda: make("Hopper", 1) + make("Hopper", 1, healthy_z_range=(0.8, 2.0)),
    "different masses": lambda: make("Hopper", 1) + heavier(make("Hopper", 1)),
    "none": list,
}


@pytest.mark.parametrize("envs", OTHERS.values(), ids=OTHERS)
def test_unknown_environments_use_their_own_step(envs):
    assert type(environments(envs())) is Environments


def test_subclasses_of_robots_use_their_own_step():
    def limited():
        return [TimeLimit(Higher(), 30) for _ in range(2)]

    compare(environments(limited()), Environments(limited()), 30)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_any_environment(name):
    ours, theirs = environments([gymnasium.make(name) for _ in range(3)]), [gymnasium.make(name) for _ in range(3)]
    rng = np.random.default_rng(0)
    for k, env in enumerate(theirs):
        assert_same([ours.reset(k, seed=k)], [env.reset(seed=k)[0].astype(float)])
    for _ in range(20):
        rows = rng.permutation(3)[: rng.integers(1, 4)].tolist()
        actions = rng.integers(0, 2, len(rows)) if name == "CartPole-v1" else random_actions(theirs[0], rng, len(rows))
        results = ours.step(actions, rows)
        assert [part.dtype for part in results] == [np.float64, np.float64, bool, bool]
        for i, k in enumerate(rows):
            observation, *others, _ = theirs[k].step(int(actions[i]) if name == "CartPole-v1" else actions[i])
            np.testing.assert_array_equal(results[0][i], observation.reshape(-1).astype(float))
            assert [part[i] for part in results[1:]] == others
            if results[2][i]:
                assert_same([ours.reset(k)], [theirs[k].reset()[0].astype(float)])


def test_environments_may_store_their_action():
    class Keeps(gymnasium.Env):
        action_space = gymnasium.spaces.Box(-1, 1, (2,))
        observation_space = gymnasium.spaces.Box(-1, 1, (1, 2))

        def reset(self, *, seed=None, options=None):
            self.kept = [np.zeros(2)]
            return np.zeros((1, 2)), {}

        def step(self, action):
            self.kept.append(action)
            return self.kept[-2].reshape(1, 2), 0, False, False, {}

    env = environments([Keeps()])
    assert env.reset(0).shape == (2,)
    actions = np.ones((1, 2))
    env.step(actions, [0])
    actions[:] = 0.5
    assert env.step(actions, [0])[0].tolist() == [[1.0, 1.0]]


def test_results_are_not_overwritten():
    env = environments(make("InvertedPendulum", 2))
    first = env.reset(0, seed=0), env.reset(1, seed=1), *env.step(np.zeros((2, 1)), [0, 1])
    copies = [part.copy() for part in first]
    env.step(np.ones((2, 1)), [0, 1])
    env.reset(0)
    assert_same(first, copies)


def test_bad_input_is_refused():
    env = environments(make("Hopper", 2))
    with pytest.raises(gymnasium.error.ResetNeeded, match="environment 1 must be reset"):
        env.step(np.zeros((1, 3)), [1])
    for k in (0, 1):
        env.reset(k)
    with pytest.raises(ValueError, match=r"actions have shape \(1, 1\), but should have \(1, 3\) for 1 environments"):
        env.step(np.zeros((1, 1)), [0])
    with pytest.raises(ValueError, match=r"actions have shape \(1, 3\), but should have \(2, 3\) for 2 environments"):
        env.step(np.zeros((1, 3)), [0, 1])
    with pytest.raises(ValueError, match="2 actions for 1 environments"):
        environments([gymnasium.make("CartPole-v1")]).step(np.zeros(2, int), [0])


def test_gymnasium_and_mujoco_need_not_be_installed():
    code = """
import sys
sys.modules["gymnasium"] = sys.modules["mujoco"] = None  # as if not installed
try:
    import hesscale.experiments.rl.batched_envs
except ModuleNotFoundError as error:
    assert "[rl]'" in str(error), error
else:
    raise AssertionError("imported")
del sys.modules["gymnasium"]
import gymnasium
from hesscale.experiments.rl.batched_envs import Environments, environments
assert type(environments([gymnasium.make("CartPole-v1")])) is Environments
"""
    subprocess.run([sys.executable, "-c", code], check=True)
