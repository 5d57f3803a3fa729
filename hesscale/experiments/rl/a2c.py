"""Advantage actor-critic (A2C): an update after every five steps, with five-step returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...losses import value_loss
from .config import Config
from .learner import Algorithm, explained_variance
from .networks import Agent
from .returns import n_step_returns
from .vector_env import Rollout


class A2C(Algorithm):
    """The loss is −log π(a|s) (R − v(s)) for the policy and (v(s) − R)² for the critic. Observations include the time left."""

    rollout = 5

    def __init__(self, configs: Sequence[Config]) -> None:
        super().__init__(configs, orthogonal=False, time_feature=True)

    @property
    def loss(self) -> Callable[..., Tensor]:
        half, bonus = self.config.half_value_loss, self.config.entropy

        def loss(agent: Agent, observations: Tensor, actions: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
            policy = agent.policy_gradient(observations, actions, advantages)
            if bonus:
                policy = policy - bonus * agent.entropy(observations)
            return policy + value_loss(agent.values(observations), returns, half=half)

        return loss

    def learn(self, rollout: Rollout) -> None:
        values, next_values = self.values(rollout)
        over = rollout.is_over(self.config.truncation)
        returns = n_step_returns(rollout.rewards, next_values, over, rollout.ended, self.config.gamma)
        data = rollout.observations, rollout.actions, returns - values, returns
        self.batch = [torch.from_numpy(array) for array in data]
        self.update(*self.batch)

    def measure(self, k: int) -> dict[str, float]:
        observations, actions, advantages, returns = [tensor[k] for tensor in self.batch]
        agent = self.agents[k]
        policy = agent.policy_gradient(observations, actions, advantages)
        value = value_loss(agent.values(observations), returns, half=self.config.half_value_loss)
        return {
            "losses/policy_loss": float(policy),
            "losses/value_loss": float(value),
            "losses/explained_variance": explained_variance(returns - advantages, returns),
        }
