"""Stable-Baselines3's SAC with AdaHesScale: two optimizers, one for the actor and one for the critic.

    pip install -c constraints.txt -e ".[integrations]"
    python examples/sb3_sac.py --steps 3000

The optimizer of the temperature is always torch's Adam, since Stable-Baselines3 has no option for it.
"""

from __future__ import annotations

import argparse

import torch
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy

import hesscale


def mean_return(model: SAC, episodes: int = 10) -> float:
    return float(evaluate_policy(model, model.get_env(), n_eval_episodes=episodes, warn=False)[0])


def main(steps: int, seed: int, step_size: float = 1e-3) -> None:
    torch.set_num_threads(1)
    CurvatureSAC = hesscale.sb3.with_curvature(SAC, hesscale.AdaHesScale, graft=(1, 3))
    model = CurvatureSAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_rate=step_size,
        learning_starts=min(500, steps // 2),
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        device="cpu",
    )
    print(f"before: return {mean_return(model):.1f}")
    model.learn(steps)
    print(f"after {steps} steps: return {mean_return(model):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-size", type=float, default=1e-3)
    main(**vars(parser.parse_args()))
