"""UR-Reacher: the arm is a UR5, moves as commanded, stays within its limits, and the task is what SenseAct's is."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")
mujoco = pytest.importorskip("mujoco")

import hesscale.experiments.rl  # noqa: E402, F401 registers the environment
from hesscale.experiments.rl.ur_reacher import (  # noqa: E402
    JOINT_HIGH,
    JOINT_LOW,
    MARGIN,
    MOVING,
    REST,
    SAFE_HIGH,
    SAFE_LOW,
    TARGET_HIGH,
    TARGET_LOW,
    URReacher,
    VelocityProfile,
    forward_kinematics,
    resolved_rate,
    tip,
)

ID = "hesscale/UR-Reacher-2D-v0"


def play(env, policy, seed):
    """The return of one episode."""
    observation, _ = env.reset(seed=seed)
    total, truncated = 0.0, False
    while not truncated:
        observation, reward, _, truncated, _ = env.step(policy(observation))
        total += reward
    return total


def test_gymnasium_accepts_it():
    from gymnasium.utils.env_checker import check_env

    check_env(gymnasium.make(ID).unwrapped, skip_render_check=True)


def test_an_episode_is_a_hundred_steps():
    env = gymnasium.make(ID)
    env.reset(seed=0)
    ends = [env.step(env.action_space.sample())[2:4] for _ in range(100)]
    assert ends == [(False, False)] * 99 + [(False, True)]


def test_importing_needs_neither_gymnasium_nor_mujoco():
    code = """
import sys
import hesscale
assert "gymnasium" not in sys.modules
sys.modules["gymnasium"] = sys.modules["mujoco"] = None  # as if not installed
import hesscale.experiments.rl
del sys.modules["gymnasium"], sys.modules["hesscale.experiments.rl"]
import gymnasium, hesscale.experiments.rl
try:
    gymnasium.make("hesscale/UR-Reacher-2D-v0")
except ModuleNotFoundError as error:
    assert "[rl]'" in str(error)
else:
    raise AssertionError("made without MuJoCo")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forward_kinematics_of_the_model_is_the_dh_chain():
    env = URReacher()
    rng = np.random.default_rng(0)
    for q in rng.uniform(-np.pi, np.pi, (20, 6)):
        env.data.qpos[:] = q
        mujoco.mj_kinematics(env.model, env.data)
        site, pose = env.data.site("tip"), forward_kinematics(q)
        np.testing.assert_allclose(site.xpos, pose[:3, 3], rtol=0, atol=1e-9)
        np.testing.assert_allclose(site.xmat.reshape(3, 3), pose[:3, :3], rtol=0, atol=1e-9)


def test_the_pose_of_resets_is_known():
    np.testing.assert_allclose(forward_kinematics(REST)[:3, 3], [-0.1041, 0.0194, 0.7700], rtol=0, atol=5e-5)


def test_two_joints_move_in_a_plane():
    for q in np.random.default_rng(0).uniform(JOINT_LOW, JOINT_HIGH, (20, 2)):
        expected = forward_kinematics([REST[0], *q, *REST[3:]])[:3, 3]
        np.testing.assert_allclose(tip(q), expected, rtol=0, atol=1e-12)


def test_masses_and_torque_limits():
    model = URReacher().model
    masses = [model.body(name).mass[0] for name in ("shoulder", "upper_arm", "forearm", "wrist_1", "wrist_2", "wrist_3")]
    assert masses == pytest.approx([3.7, 8.393, 2.275, 1.219, 1.219, 0.188])
    limits = np.array([150, 150, 150, 28, 28, 28])
    np.testing.assert_array_equal(model.jnt_actfrcrange, np.stack([-limits, limits], axis=1))


def test_the_joint_with_the_largest_change_accelerates_most():
    profile = VelocityProfile()
    profile.tick([1.0, -0.5])
    assert profile.v == pytest.approx([0.016, -0.008])
    assert profile.q == pytest.approx(REST[MOVING] + np.array([0.016, -0.008]) * 0.008 / 2)
    for _ in range(62):
        profile.tick([1.0, -0.5])
    assert profile.v == pytest.approx([1.0, -0.5])


@pytest.mark.parametrize(("action_delay", "observation_delay"), [(0, 0), (1, 0), (0, 1), (1, 1), (2, 4), (7, 0), (0, 5), (1, 6)])
def test_delays_are_in_packets(action_delay, observation_delay):
    env = URReacher(action_delay=action_delay, observation_delay=observation_delay)
    env.reset(seed=0)
    for sent in (5, 10):
        observation, *_ = env.step([1.0, -1.0])
        seen = max(sent - action_delay - observation_delay, 0)  # packets of acceleration at 2 rad/s²
        assert observation[2:4] == pytest.approx([0.016 * seen, -0.016 * seen], abs=0.0079)  # half a packet


@pytest.mark.parametrize("substeps", [2, 5])
def test_the_arm_follows_its_profile(substeps):
    env, rng = URReacher(substeps=substeps), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(100):
        env.step(rng.uniform(-1, 1, 2))
        np.testing.assert_allclose(env.data.qpos[MOVING], env._profile.q, rtol=0, atol=5e-4)
        np.testing.assert_allclose(np.delete(env.data.qpos, [1, 2]), np.delete(REST, [1, 2]), rtol=0, atol=5e-4)


def test_observation_and_reward():
    env = URReacher(max_speed=0.3, observation_delay=0)
    observation, info = env.reset(seed=1)
    apart = forward_kinematics(REST)[1:3, 3] - env.target[1:]
    np.testing.assert_allclose(observation, [*REST[MOVING], 0, 0, *apart, 0, 0], rtol=0, atol=1e-12)
    assert info == {"distance": pytest.approx(np.hypot(*apart)), "held": 0}
    for action in ([0.3, -0.15], [0.1, 9.0]):  # 9 is cut to 0.3
        observation, reward, *_ = env.step(action)
    np.testing.assert_allclose(observation[:2], env.data.qpos[MOVING])
    np.testing.assert_allclose(observation[2:4], env.data.qvel[MOVING] / 0.3)
    np.testing.assert_allclose(observation[4:6], forward_kinematics(env.data.qpos)[1:3, 3] - env.target[1:])
    np.testing.assert_allclose(observation[6:], [1 / 3, 1])
    d = np.hypot(*observation[4:6])
    assert reward == pytest.approx(5 * (-d + np.exp(-(d**2) / 0.01)))


def test_targets_are_in_their_box_and_spread():
    env = URReacher()
    targets = np.array([env.reset(seed=0 if i == 0 else None) and env.target for i in range(300)])
    assert (targets >= TARGET_LOW).all()
    assert (targets <= TARGET_HIGH).all()
    np.testing.assert_array_equal(env.data.mocap_pos[0], targets[-1])  # where it is drawn
    assert (np.ptp(targets[:, 1:], axis=0) > 0.9 * (TARGET_HIGH - TARGET_LOW)[1:]).all()


@pytest.mark.parametrize("action", [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b])
@pytest.mark.parametrize("speed", [0.3, 1.0, 3.0])
def test_the_arm_stays_within_its_limits(action, speed):
    env, action = URReacher(max_speed=speed), speed * np.array(action)
    env.reset(seed=0)
    packets_held = 0
    for step in range(round(300 / min(speed, 1))):
        *_, info = env.step(action)
        packets_held += info["held"]
        assert (env.data.qpos[MOVING] > JOINT_LOW).all(), step
        assert (env.data.qpos[MOVING] < JOINT_HIGH).all(), step
        position = forward_kinematics(env.data.qpos)[:3, 3]
        assert (position > SAFE_LOW).all(), step
        assert (position < SAFE_HIGH).all(), step
    room = np.concatenate(
        [env.data.qpos[MOVING] - JOINT_LOW, JOINT_HIGH - env.data.qpos[MOVING], position - SAFE_LOW, SAFE_HIGH - position]
    )
    assert room.min() < 0.02  # it went as far as it may
    assert packets_held > 0
    at = env.data.qpos[MOVING].copy()
    for _ in range(10):
        *_, info = env.step(-action)
    assert info["held"] == 0
    assert abs(env.data.qpos[MOVING] - at).max() > 0.05  # and comes back


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_commands_stay_away_from_limits(speed):
    profile, rng = VelocityProfile(), np.random.default_rng(0)
    low, high = np.append(JOINT_LOW, SAFE_LOW) + MARGIN, np.append(JOINT_HIGH, SAFE_HIGH) - MARGIN
    nearest = np.inf
    for _ in range(300):
        command = rng.choice([-speed, 0, speed / 2, speed], 2).tolist()
        for _ in range(rng.integers(20, 200)):
            profile.tick(command)
            at = np.array([*profile.q, *tip(profile.q)])
            assert (at >= low - 1e-9).all()
            assert (at <= high + 1e-9).all()
            nearest = np.minimum(nearest, np.minimum(at - low, high - at))
    assert (nearest[[0, 4]] < 0.003).all()  # the lift and the height came to theirs


def test_the_path_between_safe_poses_is_safe():
    low, high = np.append(JOINT_LOW, SAFE_LOW) + MARGIN, np.append(JOINT_HIGH, SAFE_HIGH) - MARGIN
    drawn = np.random.default_rng(0).uniform(JOINT_LOW, JOINT_HIGH, (3000, 2))
    safe = [q for q in drawn if (np.append(q, tip(q)) >= low).all() and (np.append(q, tip(q)) <= high).all()]
    ways = [a + share * (b - a) for a, b in itertools.pairwise(safe) if abs(b - a).max() < 2.5 for share in np.linspace(0, 1, 20)]
    assert len(ways) > 10_000
    positions = np.array([tip(q) for q in ways])
    assert (positions > SAFE_LOW).all()
    assert (positions < SAFE_HIGH).all()


def test_one_joint_at_its_limit_does_not_stop_the_other():
    profile = VelocityProfile()
    for _ in range(200):
        profile.tick([-1.0, 0.0])
    lift, elbow = profile.q
    assert lift == pytest.approx(JOINT_LOW[0] + MARGIN, abs=1e-3)
    assert not profile.tick([-1.0, 0.5])
    for _ in range(99):
        profile.tick([-1.0, 0.5])
    assert profile.q == pytest.approx([lift, elbow + 0.5 * (0.8 - 0.25 / 2)], abs=1e-2)


def test_everything_depends_on_the_seed():
    def episode(seed):
        env, rng = gymnasium.make(ID), np.random.default_rng(0)
        observations = [env.reset(seed=seed)[0], *(env.step(rng.uniform(-1, 1, 2))[0] for _ in range(100)), env.reset()[0]]
        return np.array(observations)

    first = episode(3)
    np.testing.assert_array_equal(first, episode(3))
    assert (first[0] != episode(4)[0]).any()


def test_a_pickled_environment_continues():
    env, rng = gymnasium.make(ID), np.random.default_rng(0)
    env.reset(seed=0)
    for _ in range(30):
        env.step(rng.uniform(-1, 1, 2))
    copy = pickle.loads(pickle.dumps(env))
    for _ in range(70):
        action = rng.uniform(-1, 1, 2)
        ours, theirs = env.step(action), copy.step(action)
        np.testing.assert_array_equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]
    assert ours[3]
    np.testing.assert_array_equal(env.reset()[0], copy.reset()[0])


def test_returns_of_known_policies():
    """Over 20 seeds, which are fewer than what `robot` says of many."""
    env, rng = gymnasium.make(ID), np.random.default_rng(0)
    policies = {
        "scripted": resolved_rate,
        "zero": lambda _: np.zeros(2),
        "random": lambda _: rng.uniform(-1, 1, 2),
    }
    means = {name: np.mean([play(env, policy, seed) for seed in range(20)]) for name, policy in policies.items()}
    assert means["scripted"] == pytest.approx(388, abs=10)
    assert means["zero"] == pytest.approx(-62, abs=2)
    assert means["random"] == pytest.approx(-93, abs=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_speed": 0}, "max_speed must be .* not 0"),
        ({"max_speed": float("nan")}, "max_speed must be .* not nan"),
        ({"max_speed": 4.0}, "at most π"),
        ({"action_delay": -1}, "action_delay must be a whole number of at least 0, not -1"),
        ({"observation_delay": 0.5}, "observation_delay must be a whole number of at least 0, not 0.5"),
        ({"substeps": 1}, "substeps must be a whole number of at least 2, not 1"),
        ({"width": 0}, "width must be a whole number of at least 1, not 0"),
        ({"render_mode": "ascii"}, "not 'ascii'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        URReacher(**options)


@pytest.mark.parametrize("action", [[0.0], [0.0, float("nan")], [[0.0, 0.0]], [float("inf"), 0.0]])
def test_bad_actions_are_refused(action):
    env = URReacher()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="two finite velocities"):
        env.step(action)


def test_reset_has_no_options():
    with pytest.raises(ValueError, match=r"no options, but got \['target'\]"):
        URReacher().reset(options={"target": (0, 0.7)})


def test_it_renders(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    try:
        from mujoco.egl import GLContext

        GLContext(8, 8).free()
    except Exception as error:
        pytest.skip(f"no EGL to render with: {error}")
    env = gymnasium.make(ID, render_mode="rgb_array", width=160, height=120)
    env.reset(seed=0)
    before = env.render()
    for _ in range(20):
        env.step(np.array([1.0, -1.0]))
    after = env.render()
    env.close()
    assert before.shape == (120, 160, 3)
    assert before.dtype == np.uint8
    assert before.std() > 10
    assert (before != after).mean() > 0.01
    reds = (before[..., 0] > 120) & (before[..., 1] < 80)
    assert reds.any()  # the target
