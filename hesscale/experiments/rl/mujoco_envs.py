"""Observations and rewards of gymnasium's ten v5 robots, for many environments at once, bit for bit.

Sums, powers and dtypes have the same order and precision as in gymnasium for a single environment.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .networks import Array


class Robot:
    """The values that an environment reads from its simulator, and its observations and rewards as functions of these values.

    ``was`` and ``now`` are the values of :meth:`before` and :meth:`after`, one row per environment.
    """

    skipped = 1  # entries of qpos that observations leave out
    starts_near = True  # whether episodes start at the initial state with uniform noise in positions
    has_normal_noise = False  # whether noise in velocities is normal rather than uniform

    def __init__(self, env: Any) -> None:
        self.env = env
        self.dt = np.array(env.dt)  # numpy takes twice as long for a Python number as for an array in operations this small
        self.forward = np.array(getattr(env, "_forward_reward_weight", 1.0))
        self.nq, self.nv, self.size = env.model.nq, env.model.nv, env.model.nu
        self.first = self.skipped if getattr(env, "_exclude_current_positions_from_observation", False) else 0

    def place(self, env: Any) -> None:
        """Set positions and velocities at the start of an episode."""
        scale, rng = env._reset_noise_scale, env.np_random
        env.data.qpos[...] = env.init_qpos + rng.uniform(-scale, scale, self.nq)
        noise = scale * rng.standard_normal(self.nv) if self.has_normal_noise else rng.uniform(-scale, scale, self.nv)
        env.data.qvel[...] = env.init_qvel + noise

    def before(self, data: Any) -> Array:
        return data.qpos[:1]

    def after(self, data: Any) -> list[Array]:
        return [data.qpos, data.qvel]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        """Observations, rewards and terminations."""
        raise NotImplementedError

    def effort(self, actions: Array) -> Array:
        return weighted(self.env._ctrl_cost_weight, squares(actions))

    def ends(self, healthy: Array) -> Array:
        return ~healthy if self.env._terminate_when_unhealthy else np.zeros(len(healthy), bool)

    def moved(self, was: Array, now: Array) -> Array:
        """The reward for moving forward."""
        reward = now - was
        reward /= self.dt
        reward *= self.forward
        return reward


class HalfCheetah(Robot):
    has_normal_noise = True

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        rewards = self.moved(was[:, 0], now[:, 0]) - self.effort(actions)
        return now[:, self.first :].copy(), rewards, np.zeros(len(now), bool)


class Swimmer(HalfCheetah):
    skipped = 2
    has_normal_noise = False


class Walker2d(Robot):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        least = np.array([[-np.inf] * (self.nq - self.first) + [-10.0] * self.nv])
        self.bounds = least, -least  # of observations
        self.healthy = np.array([[env._healthy_z_range, env._healthy_angle_range]])  # bounds of qpos[1:]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        low, high = self.healthy[:, :, 0], self.healthy[:, :, 1]
        state = now[:, 1 : 1 + low.size]
        healthy = every((low < state) & (state < high))
        rewards = self.moved(was[:, 0], now[:, 0]) + healthy * self.env._healthy_reward - self.effort(actions)
        return clip(now[:, self.first :], *self.bounds), rewards, self.ends(healthy)


class Hopper(Walker2d):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        z, angle = self.healthy[0]
        low, high = env._healthy_state_range
        state = [env._healthy_state_range] * (self.nq + self.nv - 3)
        self.healthy = np.array([[z, (max(low, angle[0]), min(high, angle[1])), *state]])


class Ant(Robot):
    skipped = 2
    has_normal_noise = True

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.body = env.data.body(env._main_body).id

    def before(self, data: Any) -> Array:
        return data.xpos[self.body, :1]

    def after(self, data: Any) -> list[Array]:
        return [data.qpos, data.qvel, data.cfrc_ext.reshape(-1), data.xpos[self.body, :1]]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        env, end = self.env, self.nq + self.nv
        low, high = env._healthy_z_range
        healthy = every(np.isfinite(now[:, :end])) & (low <= now[:, 2]) & (now[:, 2] <= high)
        forces = clip(now[:, end:-1], *env._contact_force_range)
        costs = self.effort(actions) + env._contact_cost_weight * squares(forces)
        rewards = self.moved(was[:, 0], now[:, -1]) + healthy * env._healthy_reward - costs
        parts = [now[:, self.first : end], *([forces[:, 6:]] if env._include_cfrc_ext_in_observation else [])]
        return np.concatenate(parts, axis=1), rewards, self.ends(healthy)


class HumanoidStandup(Robot):
    skipped = 2

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.forces = slice(-env.data.cfrc_ext.size, None)

    def before(self, data: Any) -> Array:
        return data.qpos[:0]

    def after(self, data: Any) -> list[Array]:
        """The observed values, with the forces last."""
        parts = {"cinert": data.cinert[1:], "cvel": data.cvel[1:], "qfrc_actuator": data.qfrc_actuator[6:]}
        seen = [part.reshape(-1) for name, part in parts.items() if getattr(self.env, f"_include_{name}_in_observation") is True]
        return [data.qpos, data.qvel, *seen, data.cfrc_ext.reshape(-1)]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        env = self.env
        impact = clip(env._impact_cost_weight * squares(now[:, self.forces]), *env._impact_cost_range)
        rewards = now[:, 2] / env.model.opt.timestep - self.effort(actions) - impact + 1
        return self.observe(now), rewards, np.zeros(len(now), bool)

    def effort(self, actions: Array) -> Array:
        return super().effort(actions.astype(np.float64))

    def observe(self, now: Array) -> Array:
        seen = now[:, self.first : self.forces.start]
        if self.env._include_cfrc_ext_in_observation is not True:
            return seen.copy()
        return np.concatenate([seen, now[:, self.forces][:, 6:]], axis=1)


class Humanoid(HumanoidStandup):
    """x is the position of the centre of mass."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.mass = env.model.body_mass.copy()
        self.places = slice(-env.data.xipos.size, None)
        self.forces = slice(self.places.start - env.data.cfrc_ext.size, self.places.start)

    def before(self, data: Any) -> Array:
        return data.xipos.reshape(-1)

    def after(self, data: Any) -> list[Array]:
        return [*super().after(data), data.xipos.reshape(-1)]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        env = self.env
        low, high = env._healthy_z_range
        healthy = (low < now[:, 2]) & (now[:, 2] < high)
        impact = clip(env._contact_cost_weight * squares(now[:, self.forces]), *env._contact_cost_range)
        forward = self.moved(self.centre(was), self.centre(now[:, self.places]))
        rewards = forward + healthy * env._healthy_reward - (self.effort(actions) + impact)
        return self.observe(now), rewards, self.ends(healthy)

    def centre(self, places: Array) -> Array:
        return (np.einsum("b,nbj->nj", self.mass, places.reshape(len(places), -1, 3)) / self.mass.sum())[:, 0]


class InvertedPendulum(Robot):
    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        terminated = ~every(np.isfinite(now)) | (np.abs(now[:, 1]) > 0.2)
        return now.copy(), 1.0 - terminated, terminated


class InvertedDoublePendulum(Robot):
    has_normal_noise = True
    bounds = np.array(-10.0), np.array(10.0)  # of velocities and of the constraint's force in observations

    def after(self, data: Any) -> list[Array]:
        return [data.qpos, data.qvel, data.qfrc_constraint[:1], data.site_xpos[0]]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        angles, alive = now[:, 1 : self.nq].copy(), self.env._healthy_reward
        rewards, terminated = [], []
        # Computed for single numbers: x² is pow(x, 2) for them and x · x for arrays, and the last bit may differ.
        for row in now.tolist():
            x, y, v, w = row[-3], row[-1], row[self.nq + 1], row[self.nq + 2]
            terminated.append(y <= 1)
            rewards.append(alive * (not y <= 1) - (0.01 * x**2 + (y - 2) ** 2) - (1e-3 * v**2 + 5e-3 * w**2))
        parts = now[:, :1], np.sin(angles), np.cos(angles), clip(now[:, self.nq : -3], *self.bounds)
        return np.concatenate(parts, axis=1), np.array(rewards), np.array(terminated, bool)


class Reacher(Robot):
    starts_near = False  # the target is random

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.finger, self.target = (env.data.body(name).id for name in ("fingertip", "target"))

    def after(self, data: Any) -> list[Array]:
        return [data.qpos, data.qvel, data.xpos[self.finger], data.xpos[self.target]]

    def judge(self, was: Array, now: Array, actions: Array) -> tuple[Array, Array, Array]:
        angles, apart = now[:, :2].copy(), now[:, -6:-3] - now[:, -3:]
        distance = np.sqrt([row.dot(row) for row in apart])
        effort = weighted(self.env._reward_control_weight, -squares(actions))
        rewards = -distance * self.env._reward_dist_weight + effort
        observations = np.concatenate(
            [np.cos(angles), np.sin(angles), now[:, 2 : self.nq], now[:, self.nq : self.nq + 2], apart[:, :2]], axis=1
        )
        return observations, rewards, np.zeros(len(now), bool)


def squares(x: Array) -> Array:
    """Sums of squares of rows, with the same rounding as for separate arrays."""
    return np.add.reduce(np.square(np.ascontiguousarray(x)), axis=1)


def weighted(weight: float, x: Array) -> Array:
    """weight · x in the dtype that it has for a scalar. NumPy before 2.0 uses another dtype for arrays."""
    factor = scalar(weight, x.dtype)
    return factor * x.astype(factor.dtype, copy=False)


@functools.lru_cache(typed=True)
def scalar(weight: float, dtype: Any) -> Array:
    """A weight as an array, in the dtype of its product with a scalar."""
    return np.array(weight, type(weight * dtype.type(0)))


def clip(x: Array, low: Any, high: Any) -> Array:
    above = np.maximum(x, low)
    return np.minimum(above, high, out=above)


def every(x: Array) -> Array:
    return np.logical_and.reduce(x, axis=1)


ROBOTS: dict[str, type[Robot]] = {
    f"gymnasium.envs.mujoco.{module}_v5.{robot.__name__}Env": robot
    for module, robot in {
        "ant": Ant,
        "half_cheetah": HalfCheetah,
        "hopper": Hopper,
        "humanoid": Humanoid,
        "humanoidstandup": HumanoidStandup,
        "inverted_double_pendulum": InvertedDoublePendulum,
        "inverted_pendulum": InvertedPendulum,
        "reacher": Reacher,
        "swimmer": Swimmer,
        "walker2d": Walker2d,
    }.items()
}
