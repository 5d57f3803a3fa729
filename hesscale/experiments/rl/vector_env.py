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
# Constants as arrays: with Python numbers, NumPy takes twice as long for operations this small.
ONE, EPS, LOW, HIGH = np.array(1.0), np.array(1e-8), np.array(-CLIP), np.array(CLIP)
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
    """Running means and variances, one row for each environment, as in gymnasium's normalization wrappers.

    Counts have a column for each mean: NumPy is slow where shapes differ, and some columns are updated separately.
    """

    def __init__(self, count: int, size: int) -> None:
        self.mean: Array = np.zeros((count, size))
        self.variance: Array = np.ones((count, size))
        self.count: Array = np.full((count, size), 1e-4)

    def columns(self, which: slice) -> Moments:
        """Some of the columns, in the same memory."""
        found = Moments(0, 0)
        for name, array in vars(self).items():
            setattr(found, name, array[:, which])
        return found

    def update(self, rows: Any, x: Array) -> None:
        """Add one observation to each of the given rows."""
        mean, variance, count = self.mean[rows], self.variance[rows], self.count[rows]
        total = count + ONE
        change = x - mean
        mean += change / total
        change *= change
        change /= total
        variance += change
        count /= total
        variance *= count
        if not isinstance(rows, slice):  # copies of some rows, and no views
            self.mean[rows], self.variance[rows] = mean, variance
        self.count[rows] = total

    def deviations(self, rows: Any) -> Array:
        x = self.variance[rows] + EPS
        return np.sqrt(x, out=x)

    def state(self, k: int) -> dict[str, Any]:
        parts = {"mean": self.mean[k], "variance": self.variance[k], "count": self.count[k, :1]}
        return {name: torch.from_numpy(array.copy()) for name, array in parts.items()}

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
        self.name, self.normalize, self.time_feature, self.reset_returns = name, normalize, time_feature, reset_returns
        self.gamma: Array = np.array(gamma)
        self.environments = environments([make(name) for _ in seeds])
        first = self.environments.envs[0]
        space, self.actions = first.observation_space, first.action_space
        self.is_discrete = isinstance(self.actions, spaces.Discrete)
        if not isinstance(space, spaces.Box):
            raise ValueError(
                f"{name} has observations of {type(space).__name__}, but the networks here need a Box; "
                "gymnasium.wrappers.FlattenObservation can make one"
            )
        if not isinstance(self.actions, (spaces.Box, spaces.Discrete)):
            raise ValueError(f"{name} has actions of {type(self.actions).__name__}, but policies exist for Box and Discrete only")
        count, size = len(seeds), math.prod(space.shape)
        self.size, self.inputs = size, size + time_feature
        self.limit: Array = np.array(float((first.spec.max_episode_steps if first.spec else None) or DEFAULT_LENGTH))
        self.draws = [action_generator(seed) for seed in seeds]
        self.moments = Moments(count, size + 1)  # of observations and, in the last column, of discounted returns
        if isinstance(self.actions, spaces.Box):  # bounds of the shape of actions, since numpy is slow where shapes differ
            self.low, self.high = (np.repeat(bound[None], count, 0) for bound in (self.actions.low, self.actions.high))
        self.seen, self.returns = self.moments.columns(slice(size)), self.moments.columns(slice(size, None))
        self.discounted: Array = np.zeros(count)
        self.steps = 0
        self.begun: Array = np.zeros(count)  # the steps before the current episodes
        self.totals: Array = np.zeros(count)
        self.finished: list[list[tuple[float, int]]] = [[] for _ in seeds]
        self.diverged_at: list[int | None] = [None] * count
        self.active = list(range(count))  # indices of environments whose agent has not diverged
        self.rows: Any = slice(None)  # the same, as an index of arrays
        self.observations: Array = np.empty((count, self.inputs), np.float32)
        self.observations[:] = self.see(self.rows, np.stack([self.environments.reset(k, seed) for k, seed in enumerate(seeds)]))

    @property
    def outputs(self) -> int:
        """The number of discrete actions, or of entries of a continuous action."""
        return int(self.actions.n) if self.is_discrete else math.prod(self.actions.shape)

    def length(self, k: int) -> int:
        """The number of steps of the current episode so far."""
        taken = self.steps if (at := self.diverged_at[k]) is None else at
        return taken - int(self.begun[k])

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
            actions[rows, t] = taken = chosen[rows]
            following[rows, t], rewards[rows, t], terminated[rows, t], ended[rows, t] = self.step(taken)
        return Rollout(observations, actions, rewards, following, terminated, ended)

    def step(self, actions: Array) -> tuple[Array, Array, Array, Array]:
        """Step the active environments, and reset those whose episode ended.

        Returns the next observations, the rewards, whether episodes terminated, and whether they ended.
        """
        rows, going = self.rows, self.active
        if self.is_discrete:
            given = actions + self.actions.start
        else:
            given = clipped(actions.reshape(len(actions), *self.actions.shape), self.low[rows], self.high[rows])
        raw, rewards, terminated, truncated = self.environments.step(given, going)
        if not is_finite(rewards):
            odd = rewards[~np.isfinite(rewards)][0]
            raise ValueError(f"{self.name} gave a reward of {odd} at step {self.steps}; rewards must be finite")
        self.steps += 1
        self.totals[rows] += rewards
        following, judged = self.judge(rows, raw, rewards, terminated)
        self.observations[rows] = following
        ended = terminated | truncated
        if True in ended.tolist():
            for i in np.flatnonzero(ended):
                self.begin(going[i])
        return following, judged, terminated, ended

    def begin(self, k: int) -> None:
        """Record a finished episode and begin a new one."""
        self.finished[k].append((float(self.totals[k]), self.length(k)))
        self.begun[k], self.totals[k] = self.steps, 0.0
        if self.reset_returns:
            self.discounted[k] = 0.0
        row = slice(k, k + 1)
        self.observations[row] = self.see(row, self.environments.reset(k)[None])

    def see(self, rows: Any, raw: Array) -> Array:
        """Observations as rows of float32: (o − mean)/std, clipped, and the share of the episode that is left."""
        self.check(raw)
        if not self.normalize:
            return self.as_inputs(rows, raw)
        self.seen.update(rows, raw)
        return self.as_inputs(rows, clipped((raw - self.seen.mean[rows]) / self.seen.deviations(rows)))

    def judge(self, rows: Any, raw: Array, rewards: Array, terminated: Array) -> tuple[Array, Array]:
        """Observations as in :meth:`see`, and rewards, divided by the standard deviations of discounted returns and clipped.

        Both are computed at once, which takes less time.

        The discounted return is reset at the end of an episode. With ``reset_returns=False``, it is reset as in gymnasium's
        ``NormalizeReward``: before the last reward of an episode that terminates, and not at all if the episode is truncated.
        """
        if not self.normalize:
            return self.see(rows, raw), rewards
        self.check(raw)
        discounted = self.discounted[rows] * self.gamma
        if not self.reset_returns:
            discounted *= ~terminated
        discounted += rewards
        self.discounted[rows] = discounted
        both = np.empty((len(raw), self.size + 1))
        both[:, :-1], both[:, -1] = raw, discounted
        self.moments.update(rows, both)
        both -= self.moments.mean[rows]
        both[:, -1] = rewards
        both /= self.moments.deviations(rows)
        both = clipped(both)
        return self.as_inputs(rows, both[:, :-1]), both[:, -1]

    def check(self, raw: Array) -> None:
        if not is_finite(raw):
            raise ValueError(f"{self.name} gave an observation that is not finite at step {self.steps}")

    def as_inputs(self, rows: Any, x: Array) -> Array:
        """What agents see: observations and, with ``time_feature``, the share of the episode that is left."""
        inputs: Array = np.empty((len(x), self.inputs), np.float32)
        inputs[:, : self.size] = x
        if self.time_feature:
            passed = self.steps - self.begun[rows]
            passed /= self.limit
            inputs[:, -1] = ONE - passed
        return inputs

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
            "length": self.length(k),
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
        self.discounted[k], self.totals[k] = state["discounted"], state["total"]
        self.finished[k] = [(total, length) for total, length in state["finished"]]
        self.steps = state["steps"]
        if state["diverged_at"] is not None:
            self.stop(k)
            self.diverged_at[k] = state["diverged_at"]
        self.begun[k] += self.length(k) - state["length"]


def is_finite(x: Array) -> bool:
    """Whether all entries are finite. A finite sum of squares proves it in a quarter of the time."""
    flat = x.reshape(-1)
    return math.isfinite(flat.dot(flat)) or bool(np.isfinite(x).all())


def clipped(x: Array, low: Array = LOW, high: Array = HIGH) -> Array:
    """np.clip, in a third of its time."""
    above = np.maximum(x, low)
    return np.minimum(above, high, out=above)


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
