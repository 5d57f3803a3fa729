"""The common part of A2C and PPO: agents in environments of one kind, trained together in one compiled step."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...compile.ensemble import ensemble
from ...compile.step import CapturedStep, compile_step
from ...optim import CurvatureOptimizer
from ..lab.store import seeded
from ..optimizers import AGENT_OPTIMIZERS, UNTRAINED
from .clipping import with_clipped_gradients
from .config import OWN, Config
from .networks import Agent, AgentBatch, Array, Categorical, Gaussian
from .tuning_free import TuningFree
from .vector_env import Rollout, VectorEnv

Optimizer: TypeAlias = CurvatureOptimizer | TuningFree
DECAY_PARTS = 100  # A decaying radius changes at every hundredth of ``radius_decay``: a compiled step takes time to read it.


class Algorithm:
    """Agents, each in its own environment, that are updated together. Subclasses define the loss and the update.

    Each agent is trained as it would be alone, except for rounding and the random draws of AdaHessian.

    Args:
        configs: one for each agent. They may differ only in the settings of ``OWN``.

    Attributes:
        rollout: the number of steps between updates; the class's default, unless the config sets it.
        metrics: the metrics of each agent at the last logged iteration.
    """

    rollout: int

    def __init__(self, configs: Sequence[Config], *, orthogonal: bool, time_feature: bool) -> None:
        check_alike(configs)
        self.configs, self.config = list(configs), configs[0]
        self.rollout = self.config.rollout or type(self).rollout
        self.parts = self.config.parts
        options = {"gamma": self.config.gamma, "normalize": self.config.normalize, "time_feature": time_feature}
        options["reset_returns"] = "rewards" not in self.parts
        self.make_envs: Callable[[list[int]], VectorEnv] = lambda seeds: VectorEnv(self.config.env, seeds, **options)  # type: ignore[arg-type]
        self.envs = self.make_envs([config.seed for config in configs])
        self.agents: list[Agent] = []
        for config in reversed(configs):
            with seeded(config.seed):
                self.agents.insert(0, agent_for(self.envs, config, orthogonal=orthogonal))
                self.random_state = torch.get_rng_state()  # AdaHessian draws from the state of the first seed
        self.agent_batch = AgentBatch(self.agents)
        self.shuffles = [torch.Generator().manual_seed(config.seed) for config in configs]
        self.optimizers = [optimizer_for(agent, config) for agent, config in zip(self.agents, configs, strict=True)]
        self.compile: Callable[..., None] = lambda *_: None
        self.are_step_sizes_new = True  # whether step sizes or trust radii have changed since the last step
        self.decayed_parts = -1  # for which the trust radii have been set
        self.step = self.make_step()
        self.is_warm = self.is_eager
        # A copy of the first environment, restored from its saved state. It is used to check that both continue in the same way.
        self.replica: VectorEnv | None = None
        self.is_checked = False
        self.kept: dict[int, dict[str, Any]] = {}  # policies of agents that diverged
        self.batch: list[Tensor] = []
        self.metrics: list[dict[str, float]] = [{} for _ in configs]

    @property
    def is_eager(self) -> bool:
        """Whether agents are updated one by one without compilation, as with optimizers of other packages."""
        return isinstance(self.optimizers[0], TuningFree)

    @property
    def loss(self) -> Callable[..., Tensor]:
        """A function of (agent, *batch): the sum of the losses of all its networks."""
        raise NotImplementedError

    def learn(self, rollout: Rollout) -> None:
        """Update the networks, and store the ``batch`` of the update. ``agent_batch`` has the weights from before it."""
        raise NotImplementedError

    def measure(self, k: int) -> dict[str, float]:
        """The metrics of an agent after an update with ``batch``."""
        raise NotImplementedError

    def make_step(self) -> Callable[..., Any]:
        """A function of (*batch) that updates all agents; the first dimension of the batch is the agent."""
        if self.is_eager:
            return self.eager_steps
        optimizers = [optimizer for optimizer in self.optimizers if isinstance(optimizer, CurvatureOptimizer)]
        compiled: CapturedStep
        if len(self.agents) > 1:
            compiled = ensemble(self.agents, self.loss, optimizers, backend=self.config.backend)
        else:
            compiled = compile_step(self.agents[0], self.loss, optimizers[0], backend=self.config.backend)

        def parts(batch: tuple[Tensor, ...]) -> Sequence[Tensor]:
            return batch if len(self.agents) > 1 else [tensor[0] for tensor in batch]

        def step(*batch: Tensor) -> Tensor:
            is_new, self.are_step_sizes_new = self.are_step_sizes_new, False
            return (compiled if is_new else compiled.again)(*parts(batch))

        self.compile = lambda *batch: compiled.warm_up(*parts(batch))
        return step

    def iterate(self, is_logged: bool = True) -> None:
        """Collect a rollout and update the agents."""
        if "anneal" in self.parts:
            self.anneal()
        if self.config.radius_decay:
            self.decay_trust_radii()
        self.agent_batch.refresh()
        replica, self.replica = self.replica, None
        rollout = self.envs.collect(self.agent_batch, self.rollout)
        if replica is not None and 0 in self.envs.active:
            self.compare(rollout, replica.collect(AgentBatch(self.agents[:1]), self.rollout))
        self.keep()
        if not self.envs.active:
            return
        with self.own_random_numbers():
            self.learn(rollout)
        for k in [k for k in self.envs.active if self.optimizers[k].nonfinite_steps]:
            self.envs.stop(k)
        self.keep()
        if is_logged:
            with torch.no_grad():
                for k in self.envs.active:
                    self.metrics[k] = self.measure(k)

    def compare(self, rollout: Rollout, other: Rollout) -> None:
        if not rollout.begins_like(other):
            warnings.warn(
                f"a copy of {self.config.env} does not continue as the original does, so a resumed run will have other numbers",
                stacklevel=3,
            )

    def keep(self) -> None:
        """Store the policies of agents that have just diverged."""
        for k, at in enumerate(self.envs.diverged_at):
            if at is not None and k not in self.kept:
                self.kept[k] = self.policy(k)

    def anneal(self) -> None:
        """Decrease the step size linearly to 0."""
        share = max(1 - self.envs.steps / self.config.steps, 0)
        for config, optimizer in zip(self.configs, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = share * config.step_size
        self.are_step_sizes_new = True

    def decay_trust_radii(self) -> None:
        """Set the trust radii to Δ/(1 + t/radius_decay), for the number t of steps so far."""
        parts = self.envs.steps * DECAY_PARTS // self.config.radius_decay
        if parts == self.decayed_parts:
            return
        self.decayed_parts, self.are_step_sizes_new = parts, True
        for config, optimizer in zip(self.configs, self.optimizers, strict=True):
            for group in optimizer.param_groups:
                group["trust_radius"] = torch.tensor(config.trust_radius / (1 + parts / DECAY_PARTS))

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
        """One optimizer step of all networks. Untrained agents take no steps, and need no compilation."""
        if self.config.optimizer == UNTRAINED:
            return
        if not self.is_warm:
            self.warm_up(batch)
        self.step(*batch)

    def warm_up(self, batch: tuple[Tensor, ...]) -> None:
        """Compile without training, so that all training steps run the same code, even after resuming."""
        self.compile(*batch)
        self.is_warm = True

    def pairs(self) -> list[tuple[Agent, Optimizer]]:
        return list(zip(self.agents, self.optimizers, strict=True))

    def eager_steps(self, *batch: Tensor) -> None:
        """Update the agents one by one."""
        for k, (agent, optimizer) in enumerate(self.pairs()):
            if self.envs.diverged_at[k] is not None:
                continue
            optimizer.zero_grad()
            optimizer.backward(self.loss(agent, *[tensor[k] for tensor in batch]))
            optimizer.step()

    def values(self, rollout: Rollout) -> tuple[Array, Array]:
        """v(s_t) and v(s_{t+1})."""
        both = np.concatenate([rollout.observations, rollout.following], 1)
        values = self.agent_batch.values(torch.from_numpy(both)).numpy()
        return values[:, : self.rollout], values[:, self.rollout :]

    def trust_metrics(self, k: int) -> dict[str, float]:
        """η of an agent's last step, the fraction of its steps with η < 1, and radii that change, for each network."""
        names, optimizer = list(self.agents[k].networks), self.optimizers[k]
        found = {f"trust/eta_{name}": float(eta) for name, eta in zip(names, optimizer.eta, strict=False) if eta is not None}
        if self.config.target_kl or self.config.radius_decay:
            radii = [float(group["trust_radius"]) for group in optimizer.param_groups]
            found |= {f"trust/radius_{name}": radius for name, radius in zip(names, radii, strict=True)}
        return found | {f"trust/scaled_share_{name}": share for name, share in self.scaled_shares(k).items()}

    def scaled_shares(self, k: int) -> dict[str, float]:
        """The fraction of an agent's steps with η < 1, by network; empty without trust regions."""
        names = list(self.agents[k].networks)
        return {names[i]: float(share) for i, share in self.optimizers[k].scaled_share.items()}

    def state(self, k: int) -> dict[str, Any]:
        """The state from which an agent resumes, in a form that loads with ``weights_only=True``.

        The first call creates a copy of the environment from it, to check that the copy continues in the same way.

        Raises:
            TypeError: if the environment's state cannot be saved.
        """
        env, optimizer = self.envs.state(k), self.optimizers[k].state_dict()
        entries = {i: {name: entry.clone() for name, entry in own.items()} for i, own in optimizer["state"].items()}
        if k == 0 and not self.is_checked and k in self.envs.active:
            self.replica, self.is_checked = self.make_envs([self.config.seed]), True
            self.replica.load(0, env)
        return {
            "world": env,
            **self.policy(k),
            "optimizer": {**optimizer, "state": entries},  # copies, since each tensor is a view of one for all agents
            "counters": {name: count.clone() for name, count in self.optimizers[k].counters.items()},
            "random_state": self.random_state,
            "shuffle": self.shuffles[k].get_state(),
        }

    def policy(self, k: int) -> dict[str, Any]:
        """The current policy of an agent, or its policy at divergence."""
        if k in self.kept:
            return self.kept[k]
        return {
            "config": dataclasses.asdict(self.configs[k]),
            "agent": {name: tensor.clone() for name, tensor in self.agents[k].state_dict().items()},
            "seen": self.envs.seen.state(k),
            "steps": self.envs.steps if (at := self.envs.diverged_at[k]) is None else at,
        }

    def final_policy(self, k: int) -> dict[str, Any]:
        """The policy to evaluate. If the optimizer averages its iterates, it is the average."""
        optimizer = self.optimizers[k]
        with optimizer.averaged() if isinstance(optimizer, TuningFree) else contextlib.nullcontext():
            return self.policy(k)

    def load(self, k: int, state: dict[str, Any]) -> None:
        self.envs.load(k, state["world"])
        self.agents[k].load_state_dict(state["agent"])
        self.optimizers[k].load_state_dict(state["optimizer"])
        self.optimizers[k].counters.update(state["counters"])
        self.random_state = state["random_state"]
        self.decayed_parts = -1
        self.step, self.is_warm = self.make_step(), self.is_eager  # `again` would continue with the optimizers' old state
        self.shuffles[k].set_state(state["shuffle"])
        self.kept = {}
        self.keep()


def check_alike(configs: Sequence[Config]) -> None:
    """Raise a ValueError unless agents differ only in the settings of ``OWN``."""
    for config in configs[1:]:
        changed = {name: getattr(config, name) for name in OWN}
        if dataclasses.replace(configs[0], **changed) != config:
            raise ValueError(f"agents that learn together may differ only in {', '.join(OWN)}, unlike {configs[0]} and {config}")


def optimizer_for(agent: Agent, config: Config) -> Optimizer:
    """An optimizer with one parameter group, and so one trust region, per network; in other packages, with a single group."""
    spec = AGENT_OPTIMIZERS[config.optimizer]
    groups: list[dict[str, Any]] = [{"params": network.parameters()} for network in agent.networks.values()]
    if config.target_kl or config.radius_decay:
        for group in groups:
            group["trust_radius"] = torch.tensor(config.trust_radius)  # a tensor can change without retracing the step
    optimizer: object = spec.make(
        groups,
        config.step_size,
        eps=config.eps,
        trust_radius=config.trust_radius if spec.is_scaled else None,
        trust_region="group",
        on_nonfinite="skip",
    )
    assert isinstance(optimizer, (CurvatureOptimizer, TuningFree))
    if "gradients" not in config.parts:
        return optimizer
    if isinstance(optimizer, TuningFree):
        optimizer.clips_gradients = True
        return optimizer
    return with_clipped_gradients(optimizer)


def agent_for(env: VectorEnv, config: Config, *, orthogonal: bool) -> Agent:
    """An agent whose networks fit the environment."""
    wanted = "categorical" if env.is_discrete else "gaussian"
    if config.policy not in ("auto", wanted):
        kind = "discrete" if env.is_discrete else "continuous"
        raise ValueError(f"policy={config.policy!r} does not suit the {kind} actions of {config.env}; use {wanted!r} or 'auto'")
    if env.is_discrete:
        return Categorical(env.inputs, env.outputs, orthogonal=orthogonal, width=config.width)
    shared = "sigma" in config.parts
    return Gaussian(env.inputs, env.outputs, orthogonal=orthogonal, shared=shared, width=config.width)


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 − Var(R − v) / Var(R); 0 if the returns do not vary."""
    spread = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
