"""Gymnasium environments for several agents: actions are clipped, and observations and rewards are normalized.

An environment can be saved in the middle of an episode, and continues bit for bit after it is restored.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..install import how_to_install

try:
    import gymnasium
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"reinforcement learning needs gymnasium: {how_to_install('rl')}") from None
import numpy as np
import torch
from gymnasium import spaces

from .batched_envs import environments
from .networks import AgentBatch, Array, action_generator
from .saving import restore, snapshot

CLIP = 10.0  # of normalized observations and rewards
DEFAULT_LENGTH = 1000  # of episodes, for the time feature of environments without a time limit


@dataclass
class Rollout:
    """Arrays of shape (agents, steps, …). ``following`` are the next observations, before any reset."""

    observations: Array
    actions: Array
    rewards: Array
    following: Array
    terminated: Array
    ended: Array  # terminated or truncated

    def is_over(self, truncation: str) -> Array:
        """The steps whose targets do not bootstrap from the value of the next state."""
        return self.ended if truncation == "terminate" else self.terminated

    def begins_like(self, other: Rollout) -> bool:
        """Whether the first agents of both rollouts have the same actions, observations and rewards."""
        return all(np.array_equal(own[0], vars(other)[name][0]) for name, own in vars(self).items())


class Moments:
    """Running means and variances, one row for each environment, as in gymnasium's normalization wrappers."""

    def __init__(self, count: int, size: int) -> None:
        self.mean: Array = np.zeros((count, size))
        self.variance: Array = np.ones((count, size))
        self.count: Array = np.full((count, 1), 1e-4)

    def update(self, rows: Any, x: Array) -> None:
        """Add one observation to each of the given rows."""
        count, mean = self.count[rows], self.mean[rows]
        total = count + 1
        change = x - mean
        self.mean[rows] = mean + change / total
        self.variance[rows] = (self.variance[rows] + change * change / total) * (count / total)
        self.count[rows] = total

    def state(self, k: int) -> dict[str, Any]:
        return {name: torch.from_numpy(array[k].copy()) for name, array in vars(self).items()}

    def load(self, k: int, state: dict[str, Any]) -> None:
        for name, array in vars(self).items():
            array[k] = state[name].numpy()


class VectorEnv:
    """Environments of one kind that step together, each with its own agent, running statistics and random numbers.

    Attributes:
        steps: the number of steps that each environment has taken.
        observations: the current normalized observations.
        finished: for each, (return, length) of the episodes that ended since the list was cleared. Returns are of raw rewards.
        diverged_at: for each, the step at which its agent diverged and stopped, or None.
    """

    def __init__(
        self,
        name: str,
        seeds: Sequence[int],
        *,
        gamma: float = 0.99,
        normalize: bool = True,
        time_feature: bool = False,
        reset_returns: bool = True,
    ) -> None:
        self.name, self.gamma, self.normalize, self.time_feature = name, gamma, normalize, time_feature
        self.reset_returns = reset_returns
        self.environments = environments([make(name) for _ in seeds])
        first = self.environments.envs[0]
        space, self.actions = first.observation_space, first.action_space
        if not isinstance(space, spaces.Box):
            raise ValueError(
                f"{name} has observations of {type(space).__name__}, but the networks here need a Box; "
                "gymnasium.wrappers.FlattenObservation can make one"
            )
        if not isinstance(self.actions, (spaces.Box, spaces.Discrete)):
            raise ValueError(f"{name} has actions of {type(self.actions).__name__}, but policies exist for Box and Discrete only")
        count, size = len(seeds), math.prod(space.shape)
        self.inputs = size + time_feature
        self.limit = (first.spec.max_episode_steps if first.spec else None) or DEFAULT_LENGTH
        self.draws = [action_generator(seed) for seed in seeds]
        self.seen, self.returns = Moments(count, size), Moments(count, 1)
        self.discounted: Array = np.zeros(count)
        self.steps = 0
        self.lengths: Array = np.zeros(count, int)
        self.totals: Array = np.zeros(count)
        self.finished: list[list[tuple[float, int]]] = [[] for _ in seeds]
        self.diverged_at: list[int | None] = [None] * count
        self.active = list(range(count))  # indices of environments whose agent has not diverged
        self.rows: Any = slice(None)  # the same, as an index of arrays
        self.observations: Array = np.empty((count, self.inputs), np.float32)
        self.observations[:] = self.see(self.rows, np.stack([self.environments.reset(k, seed) for k, seed in enumerate(seeds)]))

    @property
    def is_discrete(self) -> bool:
        return isinstance(self.actions, spaces.Discrete)

    @property
    def outputs(self) -> int:
        """The number of discrete actions, or of entries of a continuous action."""
        return int(self.actions.n) if self.is_discrete else math.prod(self.actions.shape)

    def stop(self, k: int) -> None:
        """Stop an environment whose agent has diverged."""
        if k in self.active:
            self.diverged_at[k] = self.steps
            self.active.remove(k)
            self.rows = np.array(self.active, int)

    def collect(self, agents: AgentBatch, count: int) -> Rollout:
        """Take ``count`` steps in each environment. An agent whose action is not finite has diverged."""
        size = len(self.draws)
        observations: Array = np.zeros((size, count, self.inputs), np.float32)
        following: Array = np.zeros_like(observations)
        rewards: Array = np.zeros((size, count), np.float32)
        terminated: Array = np.zeros((size, count), bool)
        ended: Array = np.zeros((size, count), bool)
        actions: Array = np.zeros((size, count), int) if self.is_discrete else np.zeros((size, count, self.outputs), np.float32)
        noise = np.stack([agents.noise(draws, count) for draws in self.draws], 1)
        for t in range(count):
            observations[:, t] = self.observations
            chosen, signs = agents.act(self.observations, noise[t])
            if not is_finite(signs):
                for k in np.flatnonzero(~np.isfinite(signs).all(1)):
                    self.stop(int(k))
                if not self.active:
                    break
            rows = self.rows
            actions[rows, t] = chosen[rows]
            following[rows, t], rewards[rows, t], terminated[rows, t], ended[rows, t] = self.step(chosen[rows])
        return Rollout(observations, actions, rewards, following, terminated, ended)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step the active environments, and reset those whose episode ended.

        Returns the next observations, the rewards, whether episodes terminated, and whether they ended.
        """
        rows, going = self.rows, self.active
        if isinstance(self.actions, spaces.Discrete):
            given = actions + self.actions.start
        else:
            given = clipped(actions.reshape(-1, *self.actions.shape), self.actions.low, self.actions.high)
        raw, rewards, terminated, truncated = self.environments.step(given, going)
        if not is_finite(rewards):
            odd = rewards[~np.isfinite(rewards)][0]
            raise ValueError(f"{self.name} gave a reward of {odd} at step {self.steps}; rewards must be finite")
        self.steps += 1
        self.lengths[rows] += 1
        self.totals[rows] += rewards
        following = self.see(rows, raw)
        self.observations[rows] = following
        ended = terminated | truncated
        judged = self.judge(rows, rewards, terminated, ended)
        if ended.any():
            self.begin([going[i] for i in np.flatnonzero(ended)])
        return following, judged, terminated, ended

    def begin(self, those: list[int]) -> None:
        """Record finished episodes and begin new ones."""
        for k in those:
            self.finished[k].append((float(self.totals[k]), int(self.lengths[k])))
        self.lengths[those], self.totals[those] = 0, 0.0
        self.observations[those] = self.see(those, np.stack([self.environments.reset(k) for k in those]))

    def see(self, rows: Any, raw: Array) -> Array:
        """Observations as rows of float32: (o − mean)/std, clipped, and the fraction of the episode's time that is left."""
        if not is_finite(raw):
            raise ValueError(f"{self.name} gave an observation that is not finite at step {self.steps}")
        x = raw
        if self.normalize:
            self.seen.update(rows, raw)
            x = clipped((raw - self.seen.mean[rows]) / np.sqrt(self.seen.variance[rows] + 1e-8))
        if self.time_feature:
            x = np.concatenate([x, 1 - self.lengths[rows][:, None] / self.limit], 1)
        return x.astype(np.float32)

    def judge(self, rows: Any, rewards: Array, terminated: Array, ended: Array) -> Array:
        """The rewards, divided by the standard deviations of discounted returns and clipped.

        The discounted return is reset at the end of an episode. With ``reset_returns=False``, it is reset as in gymnasium's
        ``NormalizeReward``: before the last reward of an episode that terminates, and not at all if the episode is truncated.
        """
        if not self.normalize:
            return rewards
        kept = self.discounted[rows] if self.reset_returns else self.discounted[rows] * ~terminated
        discounted = self.gamma * kept + rewards
        self.returns.update(rows, discounted[:, None])
        self.discounted[rows] = discounted * ~ended if self.reset_returns else discounted
        return clipped(rewards / np.sqrt(self.returns.variance[rows, 0] + 1e-8))

    def state(self, k: int) -> dict[str, Any]:
        """The state of one environment, which may be in the middle of an episode.

        Raises:
            TypeError: if the environment's state cannot be saved.
        """
        return {
            "env": snapshot(self.environments.envs[k]),
            "draws": self.draws[k].bit_generator.state,
            "seen": self.seen.state(k),
            "returns": self.returns.state(k),
            "observation": torch.from_numpy(self.observations[k].copy()),
            "discounted": float(self.discounted[k]),
            "length": int(self.lengths[k]),
            "total": float(self.totals[k]),
            "finished": [list(episode) for episode in self.finished[k]],
            "diverged_at": self.diverged_at[k],
            "steps": self.steps,
        }

    def load(self, k: int, state: dict[str, Any]) -> None:
        restore(self.environments.envs[k], state["env"])
        self.draws[k].bit_generator.state = state["draws"]
        self.seen.load(k, state["seen"])
        self.returns.load(k, state["returns"])
        self.observations[k] = state["observation"].numpy()
        self.discounted[k], self.lengths[k], self.totals[k] = state["discounted"], state["length"], state["total"]
        self.finished[k] = [(total, length) for total, length in state["finished"]]
        self.steps = state["steps"]
        if state["diverged_at"] is not None:
            self.stop(k)
            self.diverged_at[k] = state["diverged_at"]


def is_finite(x: Array) -> bool:
    """Whether all entries are finite. A finite sum implies it, and takes half the time."""
    return math.isfinite(x.sum()) or bool(np.isfinite(x).all())


def clipped(x: Array, low: Any = -CLIP, high: Any = CLIP) -> Array:
    """Like np.clip, in a third of the time."""
    return np.minimum(np.maximum(x, low), high)


def check_name(name: str) -> None:
    """Raise a ValueError for an unknown environment, with similar names."""
    known = gymnasium.registry
    if name in known or ":" in name:  # module:name, where the module registers the environment
        return
    by_lower = {other.lower(): other for other in known}
    close = [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.6)]
    hint = f"; similar names are {', '.join(close)}" if close else "; gymnasium.pprint_registry() lists all environments"
    raise ValueError(f"no environment is called {name!r}{hint}")


def make(name: str) -> Any:
    check_name(name)
    try:
        with quiet_models(name):
            return gymnasium.make(name)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(f"{name} needs more than is installed: {error}") from None


@contextlib.contextmanager
def quiet_models(name: str) -> Iterator[None]:
    """Silence MuJoCo's warnings that some of gymnasium's models are deprecated."""
    spec = gymnasium.registry.get(name)
    if spec is None or "envs.mujoco" not in str(spec.entry_point) or not importlib.util.find_spec("mujoco"):
        yield
        return
    import mujoco

    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: None if "deprecated" in text else warnings.warn(text, stacklevel=2))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
