"""Policies with their critic: tanh networks of their own for mean, variance and value, or for logits and value.

Losses train each network by itself: that of the mean holds the variance fixed, and the other way round.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .. import losses

Array: TypeAlias = Any  # of numpy
Act: TypeAlias = Callable[[Array, np.random.Generator], Array]  # an observation to an action

LEAST_VARIANCE = 1e-16  # σ is at least 1e-8


def network(inputs: int, widths: Sequence[int], outputs: int, *, orthogonal: bool, gain: float) -> nn.Sequential:
    """Tanh layers and a linear one; ``orthogonal`` weights have gain √2 in hidden layers and ``gain`` in the last, biases 0."""
    sizes = [inputs, *widths, outputs]
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    if orthogonal:
        for layer in linear:
            nn.init.orthogonal_(layer.weight, gain if layer is linear[-1] else math.sqrt(2))
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*[part for layer in linear[:-1] for part in (layer, nn.Tanh())], linear[-1])


class Shared(nn.Module):
    """log σ² that is the same in all states, from a parameter log σ."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, observations: Tensor) -> Tensor:
        return 2 * self.log_std


class Agent(nn.Module):
    """A policy and its critic. Children are the networks, each of which is trained with a trust region of its own."""

    critic: nn.Module

    @property
    def networks(self) -> dict[str, nn.Module]:
        return dict(self.named_children())

    def values(self, observations: Tensor) -> Tensor:
        """v(s), one for each observation."""
        result: Tensor = self.critic(observations).squeeze(-1)
        return result

    def actor(self) -> Act:
        """Draws actions from the policy as it is now, one observation at a time; for that numpy takes a sixth of torch's time."""
        raise NotImplementedError

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """log π(a|s)."""
        raise NotImplementedError

    def policy_gradient(self, observations: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        """−log π(a|s) A, a mean over samples and a sum over the policy's networks."""
        raise NotImplementedError

    def surrogate(self, observations: Tensor, actions: Tensor, advantages: Tensor, old: Tensor, clip: float) -> Tensor:
        """PPO's −min(r A, clip(r) A), likewise; ``old`` is log π(a|s) before the update."""
        raise NotImplementedError


class Gaussian(Agent):
    """a ~ N(μ(s), σ²(s)): μ with two hidden layers, σ² = exp of a network with one, or of a shared parameter."""

    def __init__(self, inputs: int, outputs: int, *, orthogonal: bool, shared: bool, width: int = 64) -> None:
        super().__init__()
        self.mean = network(inputs, [width] * 2, outputs, orthogonal=orthogonal, gain=0.01)
        self.variance = Shared(outputs) if shared else network(inputs, [width], outputs, orthogonal=orthogonal, gain=0.01)
        self.critic = network(inputs, [width] * 2, 1, orthogonal=orthogonal, gain=1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ²."""
        return self.mean(observations), self.variance(observations).exp().clamp(min=LEAST_VARIANCE)

    def actor(self) -> Act:
        mean = layers_of(self.mean)
        log_variance = None if isinstance(self.variance, Shared) else layers_of(self.variance)
        shared: Array = self.variance.log_std.detach().numpy() * 2 if isinstance(self.variance, Shared) else None

        def act(observation: Array, draws: np.random.Generator) -> Array:
            raw = shared if log_variance is None else evaluate(log_variance, observation)
            std = np.sqrt(np.maximum(np.exp(raw), np.float32(LEAST_VARIANCE)))
            return evaluate(mean, observation) + std * draws.standard_normal(std.shape, dtype=np.float32)

        return act

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        mean, variance = self(observations)
        return losses.gaussian_log_prob(mean, actions, variance=variance)

    def policy_gradient(self, observations: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        mean, variance = self(observations)
        by_mean = losses.gaussian_policy_gradient(mean, actions, advantages, variance=variance.detach())
        return by_mean + losses.gaussian_policy_gradient(mean.detach(), actions, advantages, variance=variance)

    def surrogate(self, observations: Tensor, actions: Tensor, advantages: Tensor, old: Tensor, clip: float) -> Tensor:
        mean, variance = self(observations)
        by_mean = losses.gaussian_ppo(mean, actions, advantages, old, variance=variance.detach(), clip=clip)
        return by_mean + losses.gaussian_ppo(mean.detach(), actions, advantages, old, variance=variance, clip=clip)


class Categorical(Agent):
    """a ~ softmax(logits(s)), two hidden layers."""

    def __init__(self, inputs: int, outputs: int, *, orthogonal: bool, width: int = 64) -> None:
        super().__init__()
        self.logits = network(inputs, [width] * 2, outputs, orthogonal=orthogonal, gain=0.01)
        self.critic = network(inputs, [width] * 2, 1, orthogonal=orthogonal, gain=1)

    def actor(self) -> Act:
        logits = layers_of(self.logits)

        def act(observation: Array, draws: np.random.Generator) -> Array:
            found = evaluate(logits, observation)
            if not np.isfinite(found).all():
                return np.float32(np.nan)
            return np.argmax(found + draws.gumbel(size=found.shape))

        return act

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        return losses.categorical_log_prob(self.logits(observations), actions)

    def policy_gradient(self, observations: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        return losses.categorical_policy_gradient(self.logits(observations), actions, advantages)

    def surrogate(self, observations: Tensor, actions: Tensor, advantages: Tensor, old: Tensor, clip: float) -> Tensor:
        return losses.categorical_ppo(self.logits(observations), actions, advantages, old, clip=clip)


Layers: TypeAlias = list[tuple[Array, Array]]


def layers_of(network: nn.Module) -> Layers:
    """Weights and biases, in the memory of the parameters."""
    linear = [layer for layer in network.children() if isinstance(layer, nn.Linear)]
    return [(layer.weight.detach().numpy(), layer.bias.detach().numpy()) for layer in linear]


def evaluate(layers: Layers, x: Array) -> Array:
    """The network's output for one observation."""
    for weight, bias in layers[:-1]:
        x = np.tanh(weight @ x + bias)
    weight, bias = layers[-1]
    return weight @ x + bias
