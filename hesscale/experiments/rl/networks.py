"""Agents: a policy and a critic, with separate tanh networks for mean, variance and value, or for logits and value.

Each network has its own loss: the loss of the mean treats the variance as constant, and vice versa.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ... import losses

Array: TypeAlias = Any  # of numpy
Outputs: TypeAlias = Mapping[str, Any]  # of networks by name: arrays or tensors

MIN_VARIANCE = 1e-16  # σ is at least 1e-8
LEAST_VARIANCE = np.array(MIN_VARIANCE, np.float32)  # an array, since NumPy takes twice as long with a Python number


def network(inputs: int, widths: Sequence[int], outputs: int, *, orthogonal: bool, gain: float) -> nn.Sequential:
    """An MLP with tanh. With ``orthogonal``, weights have gain √2 in hidden layers and ``gain`` in the last; biases are 0."""
    sizes = [inputs, *widths, outputs]
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    if orthogonal:
        for layer in linear:
            nn.init.orthogonal_(layer.weight, gain if layer is linear[-1] else math.sqrt(2))
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*[part for layer in linear[:-1] for part in (layer, nn.Tanh())], linear[-1])


class Shared(nn.Module):
    """A log σ² that does not depend on the state, from a parameter log σ."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def forward(self, observations: Tensor) -> Tensor:
        return 2 * self.log_std


class Agent(nn.Module):
    """A policy and a critic. The child modules are its networks. Each has its own trust region."""

    critic: nn.Module

    @property
    def networks(self) -> dict[str, nn.Module]:
        return dict(self.named_children())

    def values(self, observations: Tensor) -> Tensor:
        """v(s), one for each observation."""
        result: Tensor = self.critic(observations).squeeze(-1)
        return result

    @staticmethod
    def noise(draws: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """The noise from which :meth:`actions` draws; the last dimension is the number of the policy's outputs."""
        raise NotImplementedError

    @staticmethod
    def actions(outputs: Outputs, noise: Array) -> tuple[Array, Array]:
        """Actions sampled from the outputs of the policies' networks, and rows that are finite if and only if the outputs are."""
        raise NotImplementedError

    @staticmethod
    def log_prob(outputs: Outputs, actions: Tensor) -> Tensor:
        """log π(a|s), from the outputs of the networks."""
        raise NotImplementedError

    @staticmethod
    def divergences(old: Outputs, new: Outputs) -> dict[str, Tensor]:
        """KL divergences of policies from their old ones, one per agent, averaged over samples: the part of each network."""
        raise NotImplementedError

    def policy_gradient(self, observations: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        """−log π(a|s) A, averaged over samples and summed over the policy's networks."""
        raise NotImplementedError

    def surrogate(self, observations: Tensor, actions: Tensor, advantages: Tensor, old: Tensor, clip: float) -> Tensor:
        """PPO's −min(r A, clip(r) A), averaged and summed likewise. ``old`` is log π(a|s) before the update."""
        raise NotImplementedError

    def entropy(self, observations: Tensor) -> Tensor:
        """The entropy of π(·|s), averaged over samples."""
        raise NotImplementedError


class Gaussian(Agent):
    """a ~ N(μ(s), σ²(s)). μ has two hidden layers. log σ² has one, or is a parameter that does not depend on the state."""

    def __init__(self, inputs: int, outputs: int, *, orthogonal: bool, shared: bool, width: int = 64) -> None:
        super().__init__()
        self.mean = network(inputs, [width] * 2, outputs, orthogonal=orthogonal, gain=0.01)
        self.variance = Shared(inputs, outputs) if shared else network(inputs, [width], outputs, orthogonal=orthogonal, gain=0.01)
        self.critic = network(inputs, [width] * 2, 1, orthogonal=orthogonal, gain=1)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ²."""
        return self.mean(observations), self.variance(observations).exp().clamp(min=MIN_VARIANCE)

    @staticmethod
    def noise(draws: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return draws.standard_normal(shape, dtype=np.float32)

    @staticmethod
    def actions(outputs: Outputs, noise: Array) -> tuple[Array, Array]:
        scaled = np.exp(outputs["variance"])
        np.maximum(scaled, LEAST_VARIANCE, out=scaled)
        np.sqrt(scaled, out=scaled)
        scaled *= noise
        scaled += outputs["mean"]
        return scaled, scaled

    @staticmethod
    def log_prob(outputs: Outputs, actions: Tensor) -> Tensor:
        variance = outputs["variance"].exp().clamp(min=MIN_VARIANCE)
        return losses.gaussian_log_prob(outputs["mean"], actions, variance=variance)

    @staticmethod
    def divergences(old: Outputs, new: Outputs) -> dict[str, Tensor]:
        """½ Σ (μ' − μ)²/σ² and ½ Σ (σ'²/σ² − 1 − log σ'²/σ²), which add up to the divergence."""
        variance = old["variance"].exp().clamp(min=MIN_VARIANCE)
        log_ratio = new["variance"] - old["variance"]
        parts = {"mean": (new["mean"] - old["mean"]) ** 2 / variance, "variance": log_ratio.expm1() - log_ratio}
        return {name: 0.5 * part.sum(-1).mean(-1) for name, part in parts.items()}

    def policy_gradient(self, observations: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        mean, variance = self(observations)
        by_mean = losses.gaussian_policy_gradient(mean, actions, advantages, variance=variance.detach())
        return by_mean + losses.gaussian_policy_gradient(mean.detach(), actions, advantages, variance=variance)

    def surrogate(self, observations: Tensor, actions: Tensor, advantages: Tensor, old: Tensor, clip: float) -> Tensor:
        mean, variance = self(observations)
        by_mean = losses.gaussian_ppo(mean, actions, advantages, old, variance=variance.detach(), clip=clip)
        return by_mean + losses.gaussian_ppo(mean.detach(), actions, advantages, old, variance=variance, clip=clip)

    def entropy(self, observations: Tensor) -> Tensor:
        return losses.gaussian_entropy(log_std=0.5 * self.variance(observations))


class Categorical(Agent):
    """a ~ softmax(logits(s)), with two hidden layers."""

    def __init__(self, inputs: int, outputs: int, *, orthogonal: bool, width: int = 64) -> None:
        super().__init__()
        self.logits = network(inputs, [width] * 2, outputs, orthogonal=orthogonal, gain=0.01)
        self.critic = network(inputs, [width] * 2, 1, orthogonal=orthogonal, gain=1)

    @staticmethod
    def noise(draws: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return draws.gumbel(size=shape)

    @staticmethod
    def actions(outputs: Outputs, noise: Array) -> tuple[Array, Array]:
        logits = outputs["logits"]
        return np.argmax(logits + noise, -1), logits

    @staticmethod
    def log_prob(outputs: Outputs, actions: Tensor) -> Tensor:
        return losses.categorical_log_prob(outputs["logits"], actions)

    @staticmethod
    def divergences(old: Outputs, new: Outputs) -> dict[str, Tensor]:
        before, after = (outputs["logits"].log_softmax(-1) for outputs in (old, new))
        return {"logits": (after.exp() * (after - before)).sum(-1).mean(-1)}

    def policy_gradient(self, observations: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
        return losses.categorical_policy_gradient(self.logits(observations), actions, advantages)

    def surrogate(self, observations: Tensor, actions: Tensor, advantages: Tensor, old: Tensor, clip: float) -> Tensor:
        return losses.categorical_ppo(self.logits(observations), actions, advantages, old, clip=clip)

    def entropy(self, observations: Tensor) -> Tensor:
        return losses.categorical_entropy(self.logits(observations))


def action_generator(seed: int) -> np.random.Generator:
    """A generator for actions. It must differ from that of the environment, which is ``default_rng(seed)`` in gymnasium."""
    return np.random.default_rng([seed, 1])


Layers: TypeAlias = list[tuple[Tensor, Tensor]]  # weights (agents, outputs, inputs) and biases (agents, 1, outputs)


class Column(NamedTuple):
    """One layer of all agents."""

    weights: list[Tensor]
    biases: list[Tensor]
    scale: float = 1.0  # of the biases

    def scaled(self, biases: Tensor) -> Tensor:
        return biases if self.scale == 1 else self.scale * biases


class AgentBatch:
    """Agents of one kind, whose networks are evaluated together by batched matrix products.

    Single observations are evaluated with NumPy, which takes a sixth of the time of torch. A single agent's arrays have no
    dimension for agents, since products then take half the time.
    """

    def __init__(self, agents: Sequence[Agent]) -> None:
        self.kind, self.is_single = type(agents[0]), len(agents) == 1
        self.columns = {name: columns_of([agent.networks[name] for agent in agents]) for name in agents[0].networks}
        self.parameters = [p for agent in agents for p in agent.parameters()]
        self.viewed: list[int] = []  # the addresses of the parameters, if the stacked weights are views of them
        self.refresh()
        self.outputs = next(iter(self.arrays.values()))[-1][0].shape[-2]

    @torch.no_grad()
    def refresh(self) -> None:
        """Update the stacked weights. Call this after every change of a parameter, since stacked weights may be copies."""
        places = [p.data_ptr() for p in self.parameters]
        if places == self.viewed:
            return
        self.layers: dict[str, Layers] = {
            name: [(stack_or_view(c.weights), c.scaled(stack_or_view(c.biases)[:, None])) for c in columns]
            for name, columns in self.columns.items()
        }
        policy = {name: layers for name, layers in self.layers.items() if name != "critic"}
        self.arrays = {name: [self.as_arrays(w, b) for w, b in layers] for name, layers in policy.items()}
        firsts = {tensor.data_ptr() for layers in self.layers.values() for layer in layers for tensor in layer}
        self.viewed = places if firsts <= set(places) else []

    def as_arrays(self, weight: Tensor, bias: Tensor) -> tuple[Array, Array]:
        if self.is_single:
            return weight[0].numpy(), bias[0, 0].numpy()
        return weight.numpy(), bias.mT.numpy()

    def noise(self, draws: np.random.Generator, count: int) -> Array:
        """Noise for ``count`` actions of one agent."""
        return self.kind.noise(draws, (count, self.outputs))

    def act(self, observations: Array, noise: Array) -> tuple[Array, Array]:
        """One action per agent for its observation, and rows that are finite if and only if the outputs of its networks are."""
        outputs = {}
        with np.errstate(all="ignore"):  # agents that diverged overflow
            for name, layers in self.arrays.items():
                x = observations[0] if self.is_single else observations[:, :, None]
                for i, (weight, bias) in enumerate(layers):
                    if i:
                        np.tanh(x, out=x)
                    x = weight.dot(x) if self.is_single else weight @ x
                    x += bias
                outputs[name] = x.reshape(len(observations), -1)
            return self.kind.actions(outputs, noise)

    def values(self, observations: Tensor) -> Tensor:
        """v(s) for observations (agents, …, inputs)."""
        return evaluate(self.layers["critic"], observations)[..., 0]

    def log_prob(self, observations: Tensor, actions: Tensor) -> Tensor:
        """log π(a|s) for observations (agents, …, inputs)."""
        return self.kind.log_prob(self.policy(observations), actions)

    def policy(self, observations: Tensor) -> dict[str, Tensor]:
        """The outputs of the policies' networks by name, for observations (agents, …, inputs)."""
        return {name: evaluate(self.layers[name], observations) for name in self.arrays}


def stack_or_view(tensors: list[Tensor]) -> Tensor:
    """Stack tensors. The result is a view if they are evenly spaced in one storage, as in an ensemble."""
    first, last = tensors[0].detach(), tensors[-1]
    if len(tensors) == 1:
        return first[None]
    apart = {after.data_ptr() - before.data_ptr() for before, after in itertools.pairwise(tensors)}
    if len(apart) > 1 or min(apart) < 0 or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return torch.stack(tensors)
    return first.as_strided((len(tensors), *first.shape), (apart.pop() // first.itemsize, *first.stride()))


def columns_of(networks: Sequence[nn.Module]) -> list[Column]:
    """The layers of networks, one :class:`Column` per layer. A network that ignores the state has zero weights."""
    shared = [network for network in networks if isinstance(network, Shared)]
    if shared:
        return [
            Column([torch.zeros(*each.log_std.shape, each.inputs) for each in shared], [each.log_std for each in shared], 2.0)
        ]
    linear = [[layer for layer in network.children() if isinstance(layer, nn.Linear)] for network in networks]
    return [Column([each.weight for each in column], [each.bias for each in column]) for column in zip(*linear, strict=True)]


def evaluate(layers: Layers, x: Tensor) -> Tensor:
    """The networks' outputs for inputs (agents, count, inputs)."""
    for weight, bias in layers[:-1]:
        x = torch.baddbmm(bias, x, weight.mT).tanh_()
    weight, bias = layers[-1]
    return torch.baddbmm(bias, x, weight.mT)
