"""What A2C and PPO share: an agent for an environment, and updates of its networks as one compiled step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..compiled import compile_step
from ..lab.store import seeded
from .config import OPTIMIZERS, Config
from .networks import Agent, Array, Categorical, Gaussian
from .wrappers import Rollout, World

MOST_NORM = 0.5  # of gradients in CleanRL's protocol


class Algorithm:
    """An agent in its environment; subclasses say what a rollout teaches.

    Attributes:
        rollout: steps between updates.
        updates: of the networks so far.
    """

    rollout: int
    gamma = 0.99

    def __init__(self, config: Config, *, orthogonal: bool, time_feature: bool) -> None:
        self.config = config
        self.world = World(config.env, config.seed, gamma=self.gamma, normalize=config.normalize, time_feature=time_feature)
        with seeded(config.seed):
            self.agent = agent_for(self.world, config, orthogonal=orthogonal)
            self.random_state = torch.get_rng_state()  # the agent's own from here on, for AdaHessian's draws and minibatches
        kind = OPTIMIZERS[config.optimizer]
        self.optimizer = kind.make(
            [{"params": network.parameters()} for network in self.agent.networks.values()],
            lr=config.step_size,
            eps=config.eps,
            trust_radius=config.trust_radius if kind.is_scaled else None,
            trust_region="group",
        )
        self.step: Callable[..., Any] = self.clipped_step
        if not self.is_cleanrl:
            self.step = compile_step(self.agent, self.loss, self.optimizer, backend=config.backend)
        self.is_warm = self.is_cleanrl
        self.updates = 0
        self.twin: World | None = None  # a copy from what was saved, which is to do the same
        self.is_checked = False
        self.metrics: dict[str, float] = {}

    @property
    def is_cleanrl(self) -> bool:
        return self.config.protocol == "cleanrl"

    @property
    def loss(self) -> Callable[..., Tensor]:
        """(agent, *batch) to the sum of all networks' losses."""
        raise NotImplementedError

    def learn(self, rollout: Rollout, is_logged: bool) -> None:
        """Update the networks, and fill ``metrics`` if they are asked for."""
        raise NotImplementedError

    def iterate(self, is_logged: bool = True) -> None:
        """A rollout, and what it teaches."""
        if self.is_cleanrl:
            share = max(1 - self.world.steps / self.config.steps, 0)
            for group in self.optimizer.param_groups:
                group["lr"] = share * self.config.step_size
        twin, self.twin = self.twin, None
        rollout = self.world.collect(self.agent.actor(), self.rollout)
        if twin is not None and not rollout.is_like(twin.collect(self.agent.actor(), self.rollout)):
            warnings.warn(f"a copy of {self.config.env} goes another way: a run that is resumed will too", stacklevel=2)
        with self.own_random_numbers():
            self.learn(rollout, is_logged)

    @contextlib.contextmanager
    def own_random_numbers(self) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.random_state)
        try:
            yield
        finally:
            self.random_state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def update(self, *batch: Tensor) -> None:
        """One step of all networks."""
        if not self.is_warm:
            self.warm_up(batch)
        self.step(*batch)
        self.updates += 1

    def warm_up(self, batch: tuple[Tensor, ...]) -> None:
        """Compile by steps that are taken back, so that all that count are made by the same code, also after an interruption."""
        weights = [p.detach().clone() for p in self.agent.parameters()]
        state = [{name: entry.clone() for name, entry in self.optimizer.state[p].items()} for p in self.agent.parameters()]
        counters = {name: count.clone() for name, count in self.optimizer.counters.items()}
        taken = self.optimizer.param_groups[0]["step_count"]
        with torch.random.fork_rng(devices=[]):
            for _ in range(2):
                self.step(*batch)
        with torch.no_grad():
            for p, weight, entries in zip(self.agent.parameters(), weights, state, strict=True):
                p.copy_(weight)
                for name, entry in self.optimizer.state[p].items():
                    entry.copy_(entries[name]) if name in entries else entry.zero_()
        for name, count in self.optimizer.counters.items():
            count.copy_(counters[name]) if name in counters else count.zero_()
        for group in self.optimizer.param_groups:
            group["step_count"] = taken
        self.is_warm = True

    def clipped_step(self, *batch: Tensor) -> None:
        """An eager step with the norm of the gradient clipped."""
        self.optimizer.zero_grad()
        self.optimizer.backward(self.loss(self.agent, *batch))
        nn.utils.clip_grad_norm_(self.agent.parameters(), MOST_NORM)
        self.optimizer.step()

    @torch.no_grad()
    def values(self, rollout: Rollout) -> tuple[Array, Array]:
        """v(s_t) and v(s_{t+1})."""
        both = np.concatenate([rollout.observations, rollout.following])
        values = self.agent.values(torch.from_numpy(both)).numpy()
        return values[: self.rollout], values[self.rollout :]

    def trust_metrics(self) -> dict[str, float]:
        """η of the last step and the share of steps with η < 1, for each network."""
        names = list(self.agent.networks)
        found: dict[str, float] = {}
        for name, eta in zip(names, self.optimizer.eta, strict=False):
            found |= {} if eta is None else {f"trust/eta_{name}": float(eta)}
        return found | {f"trust/scaled_share_{names[k]}": float(share) for k, share in self.optimizer.scaled_share.items()}

    def state(self) -> dict[str, Any]:
        """All that is needed to go on, in a form that loads with ``weights_only=True``; once, it is checked that a copy of the
        environment made from it does the same.

        Raises:
            TypeError: if the environment's state cannot be saved.
        """
        saved = self.world.save()
        if not self.is_checked:
            self.twin, self.is_checked = World.load(saved), True
        return {
            "world": torch.frombuffer(bytearray(saved), dtype=torch.uint8),
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": self.optimizer.counters,
            "random_state": self.random_state,
            "updates": self.updates,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.world = World.load(state["world"].numpy().tobytes())
        self.agent.load_state_dict(state["agent"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.counters.update(state["counters"])
        self.random_state, self.updates = state["random_state"], state["updates"]


def agent_for(world: World, config: Config, *, orthogonal: bool) -> Agent:
    """Networks of the environment's sizes."""
    wanted = "categorical" if world.is_discrete else "gaussian"
    if config.policy not in ("auto", wanted):
        kind = "discrete" if world.is_discrete else "continuous"
        raise ValueError(f"{config.env} has {kind} actions, for which policy={config.policy!r} is none; use {wanted!r} or 'auto'")
    if world.is_discrete:
        return Categorical(world.inputs, world.outputs, orthogonal=orthogonal)
    return Gaussian(world.inputs, world.outputs, orthogonal=orthogonal, shared=config.protocol == "cleanrl")


def explained_variance(values: Array, returns: Array) -> float:
    """1 − Var(R − v) / Var(R), 0 where returns do not vary."""
    spread = float(np.var(returns))
    return 1 - float(np.var(returns - values)) / spread if spread > 0 else 0.0
