"""Many environments of one kind on one core, bit for bit as in gymnasium, with little overhead over the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..install import how_to_install

try:
    import gymnasium
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"reinforcement learning needs gymnasium: {how_to_install('rl')}") from None
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from .mujoco_envs import ROBOTS
from .networks import Array


class Environments:
    """Environments of any kind, which uses their own ``reset`` and ``step``. Observations are rows of float64."""

    def __init__(self, envs: Sequence[Any]) -> None:
        self.envs = list(envs)

    def reset(self, k: int, seed: int | None = None) -> Array:
        """Start a new episode in environment k, and return its first observation."""
        return np.array(self.envs[k].reset(seed=seed)[0], np.float64).reshape(-1)

    def step(self, actions: Array, rows: Sequence[int]) -> tuple[Array, Array, Array, Array]:
        """Step the environments ``rows``, one action each. Returns observations, rewards, terminations and truncations."""
        if len(actions) != len(rows):
            raise ValueError(f"there are {len(actions)} actions for {len(rows)} environments")
        discrete = isinstance(self.envs[0].action_space, gymnasium.spaces.Discrete)
        given = [int(action) if discrete else np.array(action) for action in actions]
        results = [self.envs[k].step(action) for k, action in zip(rows, given, strict=True)]
        return (
            np.array([np.asarray(result[0], np.float64).reshape(-1) for result in results]),
            np.array([result[1] for result in results], np.float64),
            np.array([result[2] for result in results], bool),
            np.array([result[3] for result in results], bool),
        )


class MuJoCo(Environments):
    """Gymnasium's ten v5 robots. Simulators step one by one; observations and rewards are computed for all at once.

    An environment's own state (simulator, random numbers, elapsed steps) is the same as after its ``step``, so it can be saved,
    rendered, or stepped by other code in between. Everything else that ``step`` stores is rebuilt after unpickling.
    """

    def __init__(self, envs: Sequence[Any]) -> None:
        import mujoco

        super().__init__(envs)
        base = self.envs[0].unwrapped
        self._advance, self._forces, self._frames = mujoco.mj_step, mujoco.mj_rnePostConstraint, base.frame_skip
        self._clear, self._settle = mujoco.mj_resetData, mujoco.mj_forward
        self._robot = ROBOTS[_kind(base)](base)
        self._sources = [self._bind(k) for k in range(len(self.envs))]
        *_, before, after = self._sources[0]
        self._was = np.empty((len(self.envs), before.size))
        self._now = np.empty((len(self.envs), sum(part.size for part in after)))
        ends = np.cumsum([part.size for part in after])[:-1]
        self._targets = [(was, np.split(now, ends)) for was, now in zip(self._was, self._now, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        return MuJoCo, (self.envs,)

    def reset(self, k: int, seed: int | None = None) -> Array:
        base, limit, *_ = self._sources[k]
        if seed is not None or limit._elapsed_steps is None or not self._robot.starts_near:
            return super().reset(k, seed)
        self._clear(base.model, base.data)
        self._robot.place(base)
        self._settle(base.model, base.data)
        limit._elapsed_steps = 0
        return base._get_obs()

    def step(self, actions: Array, rows: Sequence[int]) -> tuple[Array, Array, Array, Array]:
        expected = (len(rows), self._robot.size)
        if actions.shape != expected:
            raise ValueError(f"actions have shape {actions.shape}, but should have {expected} for {expected[0]} environments")
        advance, forces, frames, truncated = self._advance, self._forces, self._frames, []
        targets = self._targets[: len(rows)]
        for k, action, (was, now) in zip(rows, actions.astype(np.float64), targets, strict=True):
            base, limit, model, data, ctrl, before, after = self._sources[k]
            if base.data is not data:
                base, limit, model, data, ctrl, before, after = self._sources[k] = self._bind(k)
            if (elapsed := limit._elapsed_steps) is None:
                raise gymnasium.error.ResetNeeded(f"environment {k} must be reset before its first step")
            was[...] = before
            ctrl[...] = action
            advance(model, data, frames)
            forces(model, data)
            for target, source in zip(now, after, strict=True):
                target[...] = source
            limit._elapsed_steps = elapsed + 1
            truncated.append(elapsed + 1 >= limit._max_episode_steps)
        observations, rewards, terminated = self._robot.judge(self._was[: len(rows)], self._now[: len(rows)], actions)
        return observations, rewards, terminated, np.array(truncated, bool)

    def _bind(self, k: int) -> tuple[Any, ...]:
        """Environment, time limit, model, data, and views of the data: controls, and values to read before and after a step."""
        base, limit = self.envs[k].unwrapped, _time_limit(self.envs[k])
        return base, limit, base.model, base.data, base.data.ctrl, self._robot.before(base.data), self._robot.after(base.data)


def environments(envs: Sequence[Any]) -> Environments:
    """:class:`MuJoCo` for unmodified robots of gymnasium with the same settings, :class:`Environments` for all others."""
    return MuJoCo(envs) if _are_robots(envs) else Environments(envs)


def _are_robots(envs: Sequence[Any]) -> bool:
    return bool(envs) and all(
        _kind(env.unwrapped) in ROBOTS
        and _time_limit(env) is not None
        and env.unwrapped.render_mode != "human"
        and _settings(env.unwrapped) == _settings(envs[0].unwrapped)
        for env in envs
    )


def _kind(env: Any) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"


def _settings(env: Any) -> dict[str, Any]:
    """The settings with which the environment was created."""
    plain = {name: value for name, value in vars(env).items() if isinstance(value, (bool, int, float, str, tuple))}
    plain.pop("_np_random_seed", None)
    return plain | {"kind": _kind(env), "timestep": env.model.opt.timestep, "masses": env.model.body_mass.tolist()}


def _time_limit(env: Any) -> Any:
    """The ``TimeLimit`` around an environment; None if there are several, or other wrappers."""
    found = []
    while type(env) in (TimeLimit, OrderEnforcing, PassiveEnvChecker):
        found += [env] * (type(env) is TimeLimit)
        env = env.env
    return found[0] if len(found) == 1 and env is env.unwrapped else None
