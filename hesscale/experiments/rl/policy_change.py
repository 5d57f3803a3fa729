"""KL divergences between policies over time, by which trust radii can adapt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .networks import AgentBatch, Array, evaluate

WINDOW = 2048  # environment steps over which a change is measured: one rollout of PPO, or many of A2C


class PolicyChange:
    """The KL divergence of each agent's policy from that at the start of a window, on the observations since then."""

    def __init__(self, agent_batch: AgentBatch) -> None:
        self.start(agent_batch)

    def start(self, agent_batch: AgentBatch) -> None:
        """Begin a window with the current policies."""
        agent_batch.refresh()
        self.old = {name: [(w.clone(), b.clone()) for w, b in agent_batch.layers[name]] for name in agent_batch.arrays}
        self.observations: list[Tensor] = []  # (agents, steps, inputs)

    def observe(self, observations: Array) -> bool:
        """Add the observations of a rollout. Returns whether the window is complete."""
        self.observations.append(torch.from_numpy(observations))
        return sum(part.shape[1] for part in self.observations) >= WINDOW

    def divergences(self, agent_batch: AgentBatch) -> dict[str, Tensor]:
        """The part of the KL divergence of each network by name, one number for each agent."""
        agent_batch.refresh()
        observations = torch.cat(self.observations, 1)
        old = {name: evaluate(layers, observations) for name, layers in self.old.items()}
        return agent_batch.kind.divergences(old, agent_batch.policy(observations))

    def state(self, k: int) -> dict[str, Any]:
        old = {name: [[w[k].clone(), b[k].clone()] for w, b in layers] for name, layers in self.old.items()}
        return {"old": old, "observations": [part[k].clone() for part in self.observations]}

    def load(self, k: int, state: dict[str, Any]) -> None:
        for name, layers in self.old.items():
            for (weights, biases), (weight, bias) in zip(layers, state["old"][name], strict=True):
                weights[k], biases[k] = weight, bias
        agents = len(next(iter(self.old.values()))[0][0])
        if len(self.observations) != len(state["observations"]):
            self.observations = [part.new_zeros(agents, *part.shape) for part in state["observations"]]
        for part, saved in zip(self.observations, state["observations"], strict=True):
            part[k] = saved
