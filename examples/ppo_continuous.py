"""PPO with continuous actions in one readable file, with step size 1 and a trust region in place of a tuned step size.

    pip install -c constraints.txt -e ".[rl]"
    python examples/ppo_continuous.py --env Pendulum-v1 --steps 30720
    python examples/ppo_continuous.py --env InvertedPendulum-v5 --gamma 0.99 --steps 30720

As in the paper, mean, variance and value have separate networks, each with its own trust region. If an episode is truncated, its
returns include the value of the last state. ``--optimizer Adam --lr 3e-4 --trust-radius 0`` trains with Adam, for comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import hesscale
from hesscale import losses
from hesscale.optim.bounds import NEUTRAL


@dataclasses.dataclass
class Options:
    env: str = "Pendulum-v1"
    optimizer: str = "AdaHesScale"
    lr: float = 1.0
    trust_radius: float = 1e-7
    eps: float = 1e-5
    steps: int = 30720
    rollout: int = 1024
    epochs: int = 10
    minibatch: int = 64
    gamma: float = 0.9
    gae_lambda: float = 0.95
    clip: float = 0.2
    seed: int = 1


class Agent(nn.Module):
    """a ~ N(μ(s), σ²(s)), and v(s)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mean = network([inputs, 64, 64, outputs], last_gain=0.01)
        self.log_variance = network([inputs, 64, outputs], last_gain=0.01)
        self.critic = network([inputs, 64, 64, 1], last_gain=1.0)

    def policy(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(observations), self.log_variance(observations).exp()

    def values(self, observations: Tensor) -> Tensor:
        return self.critic(observations).squeeze(-1)


def network(sizes: list[int], last_gain: float) -> nn.Sequential:
    linear = [nn.Linear(inputs, outputs) for inputs, outputs in itertools.pairwise(sizes)]
    for layer in linear:
        nn.init.orthogonal_(layer.weight, last_gain if layer is linear[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[part for layer in linear[:-1] for part in (layer, nn.Tanh())], linear[-1])


def ppo_loss(agent: Agent, batch: dict[str, Tensor], clip: float) -> Tensor:
    """The surrogate for the mean and for the variance, each with the other held fixed, and (v − R)² for the critic."""
    mean, variance = agent.policy(batch["observations"])
    data = batch["actions"], batch["advantages"], batch["log_probs"]
    by_mean = losses.gaussian_ppo(mean, *data, variance=variance.detach(), clip=clip)
    by_variance = losses.gaussian_ppo(mean.detach(), *data, variance=variance, clip=clip)
    return by_mean + by_variance + losses.value_loss(agent.values(batch["observations"]), batch["returns"])


def environment(o: Options) -> gym.Env:
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(o.env))  # before rewards are scaled
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(env))
    env = gym.wrappers.TransformObservation(env, lambda x: np.clip(x, -10, 10).astype(np.float32), env.observation_space)
    env = gym.wrappers.NormalizeReward(env, gamma=o.gamma)
    return gym.wrappers.TransformReward(env, lambda reward: float(np.clip(reward, -10, 10)))


class Rollouts:
    """Plays the agent in one environment and keeps the returns of the episodes that ended."""

    def __init__(self, o: Options) -> None:
        self.o, self.env = o, environment(o)
        self.observation, _ = self.env.reset(seed=o.seed)
        self.finished: list[float] = []

    @torch.no_grad()
    def play(self, agent: Agent) -> dict[str, Tensor]:
        rows: dict[str, list[Tensor]] = {name: [] for name in ("observations", "actions", "log_probs")}
        rewards, following, terminated, ended = [], [], [], []
        for _ in range(self.o.rollout):
            x = torch.as_tensor(self.observation)
            mean, variance = agent.policy(x)
            action = mean + variance.sqrt() * torch.randn_like(mean)
            log_prob = losses.gaussian_log_prob(mean, action, variance=variance)
            for row, entry in zip(rows.values(), (x, action, log_prob), strict=True):
                row.append(entry)
            self.observation, reward, is_over, is_cut_off, info = self.env.step(action.numpy())
            rewards.append(reward)
            following.append(torch.as_tensor(self.observation))  # before any reset
            terminated.append(is_over)
            ended.append(is_over or is_cut_off)
            if ended[-1]:
                self.finished.append(float(info["episode"]["r"]))
                self.observation, _ = self.env.reset()
        batch = {name: torch.stack(row) for name, row in rows.items()}
        values, next_values = agent.values(batch["observations"]), agent.values(torch.stack(following))
        batch["advantages"] = self.advantages(rewards, values, next_values, terminated, ended)
        batch["returns"] = batch["advantages"] + values
        return batch

    def advantages(
        self, rewards: list[float], values: Tensor, next_values: Tensor, terminated: list[bool], ended: list[bool]
    ) -> Tensor:
        """Generalized advantage estimates: δ_t = r_t + γ v(s_{t+1}) − v(s_t), summed up to the end of the episode."""
        result, running = torch.zeros_like(values), torch.tensor(0.0)
        for t in reversed(range(len(rewards))):
            error = rewards[t] + self.o.gamma * next_values[t] * (not terminated[t]) - values[t]
            running = error + self.o.gamma * self.o.gae_lambda * running * (not ended[t])
            result[t] = running
        return result


def make_optimizer(agent: Agent, o: Options) -> hesscale.optim.CurvatureOptimizer:
    """A trust region for each network; ``trust_radius=0`` is for none."""
    groups = [{"params": part.parameters()} for part in agent.children()]
    bounds = NEUTRAL if o.optimizer.startswith("AdaHesScale") else {}  # the paper's algorithm; the trust region bounds the step
    region = {"trust_radius": o.trust_radius or None, "trust_region": "group"}
    return getattr(hesscale, o.optimizer)(groups, lr=o.lr, eps=o.eps, **region, **bounds)


def train(o: Options) -> list[float]:
    """The returns of all episodes, in order."""
    torch.manual_seed(o.seed)
    rollouts = Rollouts(o)
    agent = Agent(rollouts.env.observation_space.shape[0], rollouts.env.action_space.shape[0])
    optimizer = make_optimizer(agent, o)
    for _ in range(o.steps // o.rollout):
        data = rollouts.play(agent)
        for _ in range(o.epochs):
            for indices in torch.randperm(o.rollout).split(o.minibatch):
                batch = {name: tensor[indices] for name, tensor in data.items()}
                batch["advantages"] = (batch["advantages"] - batch["advantages"].mean()) / (batch["advantages"].std() + 1e-8)
                optimizer.zero_grad()
                optimizer.backward(ppo_loss(agent, batch, o.clip))
                optimizer.step()
        if rollouts.finished:
            print(f"{len(rollouts.finished):5d} episodes, mean return of the last ten {np.mean(rollouts.finished[-10:]):8.1f}")
    return rollouts.finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for field in dataclasses.fields(Options):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    torch.set_num_threads(1)
    train(Options(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
