"""Proximal policy optimization (PPO): several epochs of minibatches over every rollout, with the clipped surrogate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...losses import clipped_value_loss, value_loss
from ...optim import adapt_trust_radius
from .config import Config
from .learner import Algorithm, explained_variance
from .networks import Agent, AgentBatch
from .returns import gae
from .vector_env import Rollout


class PPO(Algorithm):
    """The loss is the surrogate for the policy and (v(s) − R)² for the critic, with R = A + v."""

    rollout = 2048
    epochs = 10
    minibatches = 32

    def __init__(self, configs: Sequence[Config]) -> None:
        super().__init__(configs, orthogonal=True, time_feature=False)
        self.epochs = self.config.epochs or type(self).epochs
        self.minibatches = self.config.minibatches or type(self).minibatches

    @property
    def loss(self) -> Callable[..., Tensor]:
        half, clip, bonus = self.config.half_value_loss, self.config.clip, self.config.entropy
        is_clipped = "values" in self.parts

        def loss(agent: Agent, *batch: Tensor) -> Tensor:
            observations, actions, advantages, returns, old, old_values = batch
            policy = agent.surrogate(observations, actions, standardized(advantages), old, clip)
            if bonus:
                policy = policy - bonus * agent.entropy(observations)
            values = agent.values(observations)
            if is_clipped:
                return policy + 0.5 * clipped_value_loss(values, returns, old_values, clip=clip, half=True)
            return policy + value_loss(values, returns, half=half)

        return loss

    def learn(self, rollout: Rollout) -> None:
        config = self.config
        values, next_values = self.values(rollout)
        over = rollout.is_over(config.truncation)
        advantages = gae(rollout.rewards, values, next_values, over, rollout.ended, config.gamma, config.gae_lambda)
        observations, actions = torch.from_numpy(rollout.observations), torch.from_numpy(rollout.actions)
        known = [torch.from_numpy(array) for array in (advantages, advantages + values, values)]
        policy = self.agent_batch.policy(observations)
        old = self.agent_batch.kind.log_prob(policy, actions)
        self.batch = [observations, actions, known[0], known[1], old, known[2]]
        agents = torch.arange(len(self.agents))[:, None]
        for _ in range(self.epochs):
            orders = [torch.randperm(self.rollout, generator=shuffle).view(self.minibatches, -1) for shuffle in self.shuffles]
            chosen = torch.stack(orders, 1)  # (minibatches, agents, samples)
            for minibatch in zip(*[tensor[agents, chosen] for tensor in self.batch], strict=True):
                self.update(*minibatch)
        if config.target_kl:
            self.adapt_trust_radii(observations, policy)

    def adapt_trust_radii(self, observations: Tensor, old: Mapping[str, Tensor]) -> None:
        """Adapt the radius of each policy network by its part of the KL divergence from the old policy."""
        self.agent_batch.refresh()
        parts = self.agent_batch.kind.divergences(old, self.agent_batch.policy(observations))
        for k in self.envs.active:
            groups = dict(zip(self.agents[k].networks, self.optimizers[k].param_groups, strict=True))
            for name, part in parts.items():
                if part[k].isfinite():  # otherwise the agent has diverged, and stops at its next action
                    adapt_trust_radius([groups[name]], float(part[k]), self.config.target_kl)
        self.are_step_sizes_new = True

    def measure(self, k: int) -> dict[str, float]:
        observations, actions, advantages, returns, old, values = [tensor[k] for tensor in self.batch]
        agent = self.agents[k]
        log_ratio = AgentBatch([agent]).log_prob(observations[None], actions[None])[0] - old
        policy = agent.surrogate(observations, actions, standardized(advantages), old, self.config.clip)
        value = value_loss(agent.values(observations), returns, half=self.config.half_value_loss)
        return {
            "losses/policy_loss": float(policy),
            "losses/value_loss": float(value),
            "losses/approx_kl": float((log_ratio.expm1() - log_ratio).mean()),
            "losses/clipfrac": float(((log_ratio.exp() - 1).abs() > self.config.clip).float().mean()),
            "losses/explained_variance": explained_variance(values, returns),
        }


def standardized(advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
