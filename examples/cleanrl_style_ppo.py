"""PPO in one readable file, in the style of CleanRL: discrete actions, several environments, one optimizer for actor and critic.

    pip install -c constraints.txt -e ".[integrations]"
    python examples/cleanrl_style_ppo.py --steps 16384

The loop calls ``loss.backward()``, as your own script may do. ``--optimizer`` takes any optimizer of hesscale. The losses of
hesscale.losses have their second derivatives in closed form. With ``--plain``, the loss is written with torch.distributions. It
then has the same diagonals, but needs double backward between the loss and the logits.
"""

from __future__ import annotations

import argparse
import dataclasses

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

import hesscale
from hesscale import losses


@dataclasses.dataclass
class Options:
    env: str = "CartPole-v1"
    optimizer: str = "AdaHesScaleGN"
    lr: float = 3e-4
    eps: float = 1e-8
    trust_radius: float = 1e-2
    steps: int = 16384
    num_envs: int = 4
    rollout: int = 128
    epochs: int = 4
    minibatch: int = 128
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_bonus: float = 0.01
    value_weight: float = 0.5
    max_grad_norm: float = 0.5
    plain: bool = False
    seed: int = 1


class Agent(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.actor = mlp(observations, actions, 0.01)
        self.critic = mlp(observations, 1, 1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(x), self.critic(x).squeeze(-1)


def mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    network = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    for layer, gain in zip(network[::2], (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return network


def advantages_of(rewards: Tensor, values: Tensor, ends: Tensor, last_value: Tensor, gamma: float, decay: float) -> Tensor:
    """Generalized advantage estimation over (time, environment); ``ends[t]`` says that the step at t ended an episode."""
    result, running, next_value = torch.zeros_like(rewards), torch.zeros_like(last_value), last_value
    for t in reversed(range(len(rewards))):
        error = rewards[t] + gamma * next_value * (1 - ends[t]) - values[t]
        running = error + gamma * decay * (1 - ends[t]) * running
        result[t], next_value = running, values[t]
    return result


def ppo_loss(agent: Agent, batch: dict[str, Tensor], o: Options) -> Tensor:
    logits, values = agent(batch["observations"])
    policy = losses.categorical_ppo(logits, batch["actions"], batch["advantages"], batch["log_probs"], clip=o.clip)
    entropy = losses.categorical_entropy(logits)
    value = losses.value_loss(values, batch["returns"], half=True)
    return policy - o.entropy_bonus * entropy + o.value_weight * value


def plain_ppo_loss(agent: Agent, batch: dict[str, Tensor], o: Options) -> Tensor:
    """The same, as most scripts write it."""
    logits, values = agent(batch["observations"])
    policy = Categorical(logits=logits)
    ratio = (policy.log_prob(batch["actions"]) - batch["log_probs"]).exp()
    surrogate = torch.min(ratio * batch["advantages"], ratio.clamp(1 - o.clip, 1 + o.clip) * batch["advantages"])
    value = F.mse_loss(values, batch["returns"]) / 2
    return -surrogate.mean() - o.entropy_bonus * policy.entropy().mean() + o.value_weight * value


class Rollouts:
    """Plays the agent in the environments and keeps the returns of finished episodes."""

    def __init__(self, o: Options) -> None:
        self.o = o
        self.envs = gym.make_vec(
            o.env, o.num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        )
        self.observation, _ = self.envs.reset(seed=o.seed)
        self.running = np.zeros(o.num_envs)
        self.finished: list[float] = []

    @torch.no_grad()
    def play(self, agent: Agent) -> dict[str, Tensor]:
        """One rollout, flat over time and environments. A time limit counts as an end."""
        rows: dict[str, list[Tensor]] = {key: [] for key in ("observations", "actions", "log_probs", "rewards", "values", "ends")}
        for _ in range(self.o.rollout):
            x = torch.as_tensor(self.observation, dtype=torch.float32)
            logits, value = agent(x)
            policy = Categorical(logits=logits)
            action = policy.sample()
            self.observation, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            ended = terminated | truncated
            self.running += reward
            self.finished += self.running[ended].tolist()
            self.running[ended] = 0
            step = (x, action, policy.log_prob(action), torch.tensor(reward).float(), value, torch.tensor(ended).float())
            for row, entry in zip(rows.values(), step, strict=True):
                row.append(entry)
        batch = {key: torch.stack(row) for key, row in rows.items()}
        last_value = agent(torch.as_tensor(self.observation, dtype=torch.float32))[1]
        rewards, values, ends = (batch.pop(key) for key in ("rewards", "values", "ends"))
        batch["advantages"] = advantages_of(rewards, values, ends, last_value, self.o.gamma, self.o.gae_lambda)
        batch["returns"] = batch["advantages"] + values
        return {key: tensor.flatten(0, 1) for key, tensor in batch.items()}


def train(o: Options) -> list[float]:
    """The returns of all episodes, in order."""
    torch.manual_seed(o.seed)
    rollouts = Rollouts(o)
    agent = Agent(rollouts.envs.single_observation_space.shape[0], int(rollouts.envs.single_action_space.n))
    optimizer = getattr(hesscale, o.optimizer)(agent.parameters(), lr=o.lr, eps=o.eps, trust_radius=o.trust_radius)
    compute_loss = plain_ppo_loss if o.plain else ppo_loss
    with hesscale.capture(optimizer):
        for _ in range(o.steps // (o.num_envs * o.rollout)):
            data = rollouts.play(agent)
            for _ in range(o.epochs):
                for indices in torch.randperm(o.num_envs * o.rollout).split(o.minibatch):
                    batch = {key: tensor[indices] for key, tensor in data.items()}
                    batch["advantages"] = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
                    optimizer.zero_grad()
                    compute_loss(agent, batch, o).backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), o.max_grad_norm)
                    optimizer.step()
    return rollouts.finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        if isinstance(field.default, bool):
            parser.add_argument(f"--{field.name.replace('_', '-')}", action="store_true")
        else:
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    torch.set_num_threads(1)
    returns = train(Options(**vars(parser.parse_args())))
    count = max(1, len(returns) // 10)
    print(f"{len(returns)} episodes: mean return {np.mean(returns[:count]):.1f} in the first tenth, ", end="")
    print(f"{np.mean(returns[-count:]):.1f} in the last")


if __name__ == "__main__":
    main()
