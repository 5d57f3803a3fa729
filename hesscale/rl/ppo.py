"""Proximal policy optimization: ten epochs of 32 minibatches over every 2048 steps, with the clipped surrogate."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..losses import clipped_value_loss, value_loss
from .config import Config
from .learner import Algorithm, explained_variance
from .networks import Agent
from .returns import gae
from .wrappers import Rollout


class PPO(Algorithm):
    """The surrogate for the policy and (v(s) − R)² for the critic, R = A + v; without entropy bonus or value clipping."""

    rollout = 2048
    epochs = 10
    minibatches = 32
    clip = 0.2
    lam = 0.95

    def __init__(self, config: Config) -> None:
        super().__init__(config, orthogonal=True, time_feature=False)

    @property
    def loss(self) -> Callable[..., Tensor]:
        half, clip, is_cleanrl = self.config.half_value_loss, self.clip, self.is_cleanrl

        def loss(agent: Agent, *batch: Tensor) -> Tensor:
            observations, actions, advantages, returns, old, old_values = batch
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            policy = agent.surrogate(observations, actions, advantages, old, clip)
            values = agent.values(observations)
            if is_cleanrl:
                return policy + 0.5 * clipped_value_loss(values, returns, old_values, clip=clip, half=True)
            return policy + value_loss(values, returns, half=half)

        return loss

    def learn(self, rollout: Rollout, is_logged: bool) -> None:
        values, next_values = self.values(rollout)
        found = gae(rollout.rewards, values, next_values, rollout.terminated, rollout.ended, self.gamma, self.lam)
        observations, actions = torch.from_numpy(rollout.observations), torch.from_numpy(rollout.actions)
        with torch.no_grad():
            old = self.agent.log_prob(observations, actions)
        advantages, returns = torch.from_numpy(found), torch.from_numpy(found + values)
        data = observations, actions, advantages, returns, old, torch.from_numpy(values)
        for _ in range(self.epochs):
            for chosen in torch.randperm(self.rollout).chunk(self.minibatches):
                self.update(*[entry[chosen] for entry in data])
        if is_logged:
            with torch.no_grad():
                log_ratio = self.agent.log_prob(observations, actions) - old
                standard = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
                policy = self.agent.surrogate(observations, actions, standard, old, self.clip)
                value = value_loss(self.agent.values(observations), returns, half=self.config.half_value_loss)
            self.metrics = {
                "losses/policy_loss": float(policy),
                "losses/value_loss": float(value),
                "losses/approx_kl": float((log_ratio.expm1() - log_ratio).mean()),
                "losses/clipfrac": float(((log_ratio.exp() - 1).abs() > self.clip).float().mean()),
                "losses/explained_variance": explained_variance(values, returns.numpy()),
            }
