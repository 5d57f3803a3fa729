"""Stable-Baselines3's PPO with AdaHesScale in place of Adam.

    pip install -c constraints.txt -e ".[integrations]"
    python examples/sb3_ppo.py --steps 8192

It prints the mean return before and after training, saves the agent, loads it, and continues to train with the saved averages.
"""

from __future__ import annotations

import argparse
import tempfile

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy

import hesscale


def mean_return(model: PPO, episodes: int = 10) -> float:
    return float(evaluate_policy(model, model.get_env(), n_eval_episodes=episodes, warn=False)[0])


def main(steps: int, seed: int) -> None:
    torch.set_num_threads(1)  # networks this small are slower on more
    CurvaturePPO = hesscale.sb3.with_curvature(PPO, hesscale.AdaHesScale, eps=1e-8, graft=(1, 3))
    model = CurvaturePPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=512, seed=seed, device="cpu")
    print(f"before: return {mean_return(model):.1f}")
    model.learn(steps)
    print(f"after {model.num_timesteps} steps: return {mean_return(model):.1f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/agent")
        model = CurvaturePPO.load(f"{folder}/agent", env=gym.make("CartPole-v1"), device="cpu")
    model.learn(steps // 4, reset_num_timesteps=False)
    print(f"loaded, after {model.num_timesteps} steps: return {mean_return(model):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=1)
    main(**vars(parser.parse_args()))
