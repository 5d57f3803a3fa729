"""A gymnasium environment as an agent meets it: clipped actions, normalised observations and rewards, and no hidden state.

All of it, the simulator too, can be saved as bytes in the middle of an episode, and goes on from there to the last bit.
"""

from __future__ import annotations

import copyreg
import difflib
import io
import math
import pickle
from dataclasses import dataclass
from typing import Any

try:
    import gymnasium
except ModuleNotFoundError:
    raise ModuleNotFoundError("reinforcement learning needs gymnasium: pip install 'hesscale[rl]'") from None
import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle

from ..errors import NonFiniteError
from .networks import Act, Array

CLIP = 10.0  # of normalised observations and rewards
DEFAULT_LENGTH = 1000  # of episodes, for the time feature where an environment sets no limit


@dataclass
class Rollout:
    """Steps in order, arrays of one row each; ``following`` are the observations that came next, before any reset."""

    observations: Array
    actions: Array
    rewards: Array
    following: Array
    terminated: Array
    ended: Array  # terminated or truncated

    def is_like(self, other: Rollout) -> bool:
        return all(np.array_equal(own, vars(other)[name]) for name, own in vars(self).items())


class Moments:
    """Running mean and variance of numbers or arrays, as gymnasium's normalisers keep them."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean: Array = np.zeros(shape)
        self.variance: Array = np.ones(shape)
        self.count = 1e-4

    def update(self, x: Array) -> None:
        total = self.count + 1
        change = x - self.mean
        self.mean = self.mean + change / total
        self.variance = (self.variance + change * change / total) * (self.count / total)
        self.count = total


class World:
    """One environment, its normalisers and the random numbers that actions are drawn with.

    Attributes:
        steps: taken so far.
        observation: the current one, as the agent sees it.
        finished: (return, length) of episodes that ended since they were last taken away; returns are of the raw rewards.
    """

    def __init__(self, name: str, seed: int, *, gamma: float = 0.99, normalize: bool = True, time_feature: bool = False) -> None:
        self.name, self.gamma, self.normalize, self.time_feature = name, gamma, normalize, time_feature
        self.env: Any = make(name)
        space = self.env.observation_space
        if not isinstance(space, spaces.Box):
            raise ValueError(
                f"{name} has observations of {type(space).__name__}, which no network here takes; a Box is what it needs "
                "(gymnasium.wrappers.FlattenObservation makes one)"
            )
        actions = self.env.action_space
        if isinstance(actions, spaces.Discrete):
            self.first = int(actions.start)
        elif not isinstance(actions, spaces.Box):
            raise ValueError(f"{name} has actions of {type(actions).__name__}; there are policies for Box and Discrete")
        size = math.prod(space.shape)
        self.inputs = size + time_feature
        self.limit = (self.env.spec.max_episode_steps if self.env.spec else None) or DEFAULT_LENGTH
        self.draws = np.random.default_rng(seed)
        self.seen, self.returns, self.discounted = Moments((size,)), Moments(), 0.0
        self.steps, self.length, self.total = 0, 0, 0.0
        self.finished: list[tuple[float, int]] = []
        self.observation = self.see(self.env.reset(seed=seed)[0])

    @property
    def is_discrete(self) -> bool:
        return isinstance(self.env.action_space, spaces.Discrete)

    @property
    def outputs(self) -> int:
        """Choices, or entries of an action."""
        space = self.env.action_space
        return int(space.n) if self.is_discrete else math.prod(space.shape)

    def collect(self, act: Act, count: int) -> Rollout:
        """So many steps with actions by ``act``.

        Raises:
            NonFiniteError: if it gives an action that is not finite.
        """
        observations: Array = np.empty((count, self.inputs), np.float32)
        following: Array = np.empty_like(observations)
        rewards: Array = np.empty(count, np.float32)
        terminated: Array = np.zeros(count, bool)
        ended: Array = np.zeros(count, bool)
        actions = []
        for t in range(count):
            observations[t] = self.observation
            action = act(self.observation, self.draws)
            if not np.isfinite(action).all():
                raise NonFiniteError(f"the policy's action at step {self.steps} is not finite")
            actions.append(action)
            following[t], rewards[t], terminated[t], ended[t] = self.step(action)
        return Rollout(observations, np.array(actions), rewards, following, terminated, ended)

    def step(self, action: Array) -> tuple[Array, float, bool, bool]:
        """What came next, the reward, and whether the episode terminated and ended, after which another one has begun."""
        space = self.env.action_space
        given = self.first + int(action) if self.is_discrete else np.clip(action.reshape(space.shape), space.low, space.high)
        raw, reward, terminated, truncated, _ = self.env.step(given)
        reward = float(reward)
        if not math.isfinite(reward):
            raise ValueError(f"{self.name} gave a reward of {reward} at step {self.steps}; rewards must be finite")
        self.steps, self.length, self.total = self.steps + 1, self.length + 1, self.total + reward
        following = self.observation = self.see(raw)
        ended = bool(terminated or truncated)
        reward = self.judge(reward, ended)
        if ended:
            self.finished.append((self.total, self.length))
            self.length, self.total = 0, 0.0
            self.observation = self.see(self.env.reset()[0])
        return following, reward, bool(terminated), ended

    def see(self, raw: Array) -> Array:
        """An observation as a row of float32: (o − mean)/std, clipped, and the share of the episode that is left."""
        x = np.asarray(raw, np.float64).reshape(-1)
        if not np.isfinite(x).all():
            raise ValueError(f"{self.name} gave an observation that is not finite at step {self.steps}")
        if self.normalize:
            self.seen.update(x)
            x = np.clip((x - self.seen.mean) / np.sqrt(self.seen.variance + 1e-8), -CLIP, CLIP)
        return np.append(x, 1 - self.length / self.limit).astype(np.float32) if self.time_feature else x.astype(np.float32)

    def judge(self, reward: float, ended: bool) -> float:
        """The reward, divided by the standard deviation of discounted returns and clipped."""
        if not self.normalize:
            return reward
        self.discounted = self.gamma * self.discounted + reward
        self.returns.update(self.discounted)
        if ended:
            self.discounted = 0.0
        return min(max(reward / math.sqrt(float(self.returns.variance) + 1e-8), -CLIP), CLIP)

    def save(self) -> bytes:
        """Everything, in the middle of an episode if need be."""
        file = io.BytesIO()
        try:
            Pickler(file, pickle.HIGHEST_PROTOCOL).dump(self)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise TypeError(f"the state of {self.name} cannot be saved ({error})") from None
        return file.getvalue()

    @staticmethod
    def load(saved: bytes) -> World:
        """What :meth:`save` saved. Pickles run code: load your own."""
        world: World = pickle.loads(saved)
        return world


class Pickler(pickle.Pickler):
    """Takes environments as they are, where gymnasium's own way is to make them anew."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, EzPickle):
            return copyreg.__newobj__, (type(obj),), obj.__dict__, None, None, set_attributes  # type: ignore[attr-defined]
        return NotImplemented


def set_attributes(obj: Any, attributes: dict[str, Any]) -> None:
    obj.__dict__.update(attributes)


def check_name(name: str) -> None:
    """Refuse the name of an environment that is not there, with those that it may have meant."""
    known = gymnasium.registry
    if name in known or ":" in name:  # a module that registers it
        return
    by_lower = {other.lower(): other for other in known}
    close = [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.6)]
    hint = f"; close to it: {', '.join(close)}" if close else "; gymnasium.pprint_registry() lists those that are there"
    raise ValueError(f"no environment is called {name!r}{hint}")


def make(name: str) -> Any:
    check_name(name)
    try:
        return gymnasium.make(name)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(f"{name} needs more than is installed: {error}") from None
