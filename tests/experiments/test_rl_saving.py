"""Environments are saved in the middle of an episode as plain data, and continue bit for bit, or an error says why not."""

from __future__ import annotations

import io
import itertools
import threading
from collections import deque

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.empty(0).device.type != "cpu", reason="environments are simulated on the CPU")

gymnasium = pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")

import hesscale.experiments.rl  # noqa: E402, F401
from hesscale.experiments.rl.saving import restore, snapshot  # noqa: E402

CLASSIC = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0"]
ROBOTS = [
    *("Ant-v5", "Walker2d-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "InvertedPendulum-v5", "InvertedDoublePendulum-v5"),
    *("Swimmer-v5", "Reacher-v5", "HumanoidStandup-v5", "Ant-v4", "Humanoid-v4", "hesscale/UR-Reacher-2D-v0"),
]


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step(env, action):
    """What came, with the observation after a reset where the episode ended."""
    observation, reward, terminated, truncated, info = env.step(action)
    ended = terminated or truncated
    return [np.asarray(observation), reward, terminated, truncated, info, np.asarray(env.reset()[0]) if ended else None]


def same(one, other):
    observations = np.array_equal(one[0], other[0]) and (one[5] is other[5] or np.array_equal(one[5], other[5]))
    return observations and one[1:4] == other[1:4] and repr(one[4]) == repr(other[4])


@pytest.mark.filterwarnings("ignore:.*out of date")
@pytest.mark.parametrize("name", CLASSIC + ROBOTS)
def test_a_new_environment_continues_from_a_saved_state(name):
    if name in ROBOTS:
        pytest.importorskip("mujoco")
    env, fresh = (gymnasium.make(name, max_episode_steps=50) for _ in range(2))
    env.action_space.seed(0)
    env.reset(seed=0)
    for _ in range(30):
        step(env, env.action_space.sample())
    saved = through_a_file(snapshot(env))
    fresh.reset(seed=1)
    restore(fresh, saved)
    ends = 0
    for _ in range(60):
        action = env.action_space.sample()
        expected = step(env, action)
        assert same(step(fresh, action), expected)
        ends += expected[5] is not None
    assert ends


def test_derived_values_of_the_last_step_are_restored():
    """Before a step, Ant reads where it was: neither the state alone nor ``mj_forward`` knows that."""
    mujoco = pytest.importorskip("mujoco")
    env, fresh = (gymnasium.make("Ant-v5").unwrapped for _ in range(2))
    for each in (env, fresh):
        each.reset(seed=0)
    for _ in range(5):
        env.step(np.full(8, 0.5))
    restore(fresh, snapshot(env))
    for name in ("xpos", "cfrc_ext", "qacc", "qacc_warmstart", "time"):
        assert np.array_equal(getattr(fresh.data, name), getattr(env.data, name))
    mujoco.mj_forward(fresh.model, fresh.data)
    assert not np.array_equal(fresh.data.xpos, env.data.xpos)


# --------------------------------------------------------------------------------------------------------- environments of others


class Thing:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 0


class Own(gymnasium.Env):
    """Has the attributes that it is made with."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}


def moved(before, after):
    """An environment with the attributes of ``before``, after restoring the state of one with those of ``after``."""
    fresh = Own(**before)
    restore(fresh, through_a_file(snapshot(Own(**after))))
    return fresh


def test_plain_attributes_are_restored():
    values = {
        "none": None,
        "number": 2**100,
        "real": float("inf"),
        "text": "ä",
        "scalar": np.float32(0.1),
        "by_column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "bytes": np.array([b"ab", b"c"]),
        "empty": np.zeros((0, 3), np.int16),
        "nested": {"a": [1, (2, np.int8(3))], (0, 1): deque([1, 2], maxlen=2)},
    }
    fresh = moved(dict.fromkeys(values, 0), values)
    assert repr(vars(fresh)) == repr(values)
    for name in ("scalar", "by_column", "bytes", "empty"):
        assert getattr(fresh, name).dtype == values[name].dtype
    assert fresh.by_column.flags.f_contiguous
    fresh.nested[0, 1].append(3)
    assert list(fresh.nested[0, 1]) == [2, 3]


def test_attributes_may_be_added_and_removed():
    assert vars(moved({"old": 1, "both": 1}, {"new": 2, "both": 2})) == {"new": 2, "both": 2}


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox", "SFC64"])
def test_random_number_generators_continue(kind):
    draws = np.random.Generator(getattr(np.random, kind)(3))
    draws.normal(size=5)
    draws.integers(10, dtype=np.int32)  # leaves half a number behind
    here = np.random.Generator(getattr(np.random, kind)(4))
    fresh = moved({"draws": here, "draw": here.normal, "other": None}, {"draws": draws, "draw": draws.normal, "other": draws})
    assert fresh.draws is fresh.other is here  # in place, so that what refers to it goes on too
    assert fresh.draws.integers(10, size=5, dtype=np.int32).tolist() == draws.integers(10, size=5, dtype=np.int32).tolist()
    assert fresh.draw() == draws.normal()


def test_separate_generators_stay_separate():
    shared, one, other = (np.random.default_rng(seed) for seed in range(3))
    fresh = moved({"a": shared, "b": shared}, {"a": one, "b": other})
    assert [fresh.a.random(), fresh.b.random()] == [one.random(), other.random()]


def test_shared_objects_are_shared_after_restoring():
    shared, loop = [1.0], []
    loop.append(loop)
    thing = Thing(shared)
    fresh = moved(
        {"a": 0, "b": Thing(0), "c": 0, "loop": 0}, {"a": shared, "b": thing, "c": deque([shared, thing]), "loop": loop}
    )
    fresh.a.append(2.0)
    assert fresh.b.value is fresh.c[0] is fresh.a
    assert fresh.c[1] is fresh.b
    assert fresh.loop[0] is fresh.loop


def test_spaces_continue_sampling():
    boxes = [gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1, 1, (2,), seed=seed)]) for seed in (0, 1)]
    boxes[1].sample()
    fresh = moved({"space": boxes[0]}, {"space": boxes[1]})
    assert np.array_equal(fresh.space.sample(), boxes[1].sample())


def test_the_settings_of_the_new_environment_are_kept():
    fresh = moved({"render_mode": "rgb_array", "fullpath": "here", "t": 0}, {"render_mode": None, "fullpath": "there", "t": 1})
    assert vars(fresh) == {"render_mode": "rgb_array", "fullpath": "here", "t": 1}


ROWS = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"extra": itertools.count()}, r"Own cannot be saved \(its attribute extra is a itertools.count\)"),
        ({"lock": threading.Lock()}, r"its attribute lock is a _thread.lock"),
        ({"thing": Thing({1, 2})}, r"its attribute thing.value is a builtins.set"),
        ({"things": [0, Thing(1)]}, r"its attribute things\[1\] is a test_rl_saving.Thing in a container"),
        ({"slotted": Slotted()}, r"its attribute slotted is a test_rl_saving.Slotted"),
        ({"counts": type("Counts", (dict,), {})()}, r"its attribute counts is a test_rl_saving.Counts"),
        ({"mixed": np.array([None])}, "its attribute mixed is an array of object"),
        ({"a": ROWS, "b": ROWS[1]}, "its attribute b shares memory with a"),
        ({"view": torch.zeros(3).numpy()}, "its attribute view is in memory that is not numpy's"),
    ],
)
def test_values_that_cannot_be_saved_are_named(attributes, message):
    with pytest.raises(TypeError, match=message):
        snapshot(Own(**attributes))


def test_rows_of_an_array_that_do_not_overlap_are_saved():
    low, high = np.arange(4.0).reshape(2, 2).T
    assert moved({}, {"low": low, "high": high}).high.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"a": None},
            {"a": Thing(1)},
            "Own differs from the saved environment: a was test_rl_saving.Thing and is now builtins.NoneType",
        ),
        ({"a": len}, {"a": abs}, "a was builtins.abs and is now builtins.len"),
        (
            dict.fromkeys("ab", Thing(0)),
            {"a": Thing(1), "b": Thing(2)},
            "b was test_rl_saving.Thing and is now the same object as another attribute",
        ),
    ],
)
def test_an_environment_that_differs_is_refused(before, after, message):
    with pytest.raises(TypeError, match=message):
        moved(before, after)


def test_the_state_of_another_environment_is_refused():
    with pytest.raises(ValueError, match=r"belongs to CartPole-v1 \(format 1\), not to Pendulum-v1"):
        restore(gymnasium.make("Pendulum-v1"), snapshot(gymnasium.make("CartPole-v1")))


def test_a_simulation_with_another_model_is_refused():
    mujoco = pytest.importorskip("mujoco")
    env, fresh = (gymnasium.make("InvertedPendulum-v5").unwrapped for _ in range(2))
    for each in (env, fresh):
        each.reset(seed=0)
    fresh.model.body_mass[1] *= 1 + 1e-14  # as if compiled elsewhere
    restore(fresh, snapshot(env))
    fresh.model.opt.timestep *= 2
    with pytest.raises(TypeError, match="InvertedPendulum-v5 differs from the saved environment: data has another model"):
        restore(fresh, snapshot(env))
    if hasattr(mujoco.mjtEnableBit, "mjENBL_SLEEP"):
        env.model.opt.enableflags |= int(mujoco.mjtEnableBit.mjENBL_SLEEP)
        with pytest.raises(TypeError, match="its attribute data is a simulation whose bodies may fall asleep"):
            snapshot(env)


def test_a_view_of_the_simulation_is_refused():
    pytest.importorskip("mujoco")
    env = gymnasium.make("InvertedPendulum-v5")
    env.unwrapped.angle = env.unwrapped.data.qpos[1:]
    with pytest.raises(TypeError, match="its attribute angle is in memory that is not numpy's"):
        snapshot(env)


def test_a_world_of_box2d_cannot_be_saved():
    pytest.importorskip("Box2D")
    env = gymnasium.make("LunarLander-v3")
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"LunarLander-v3 cannot be saved \(its attribute world"):
        snapshot(env)
