"""Measure the return of a scripted controller on the UR-Reacher, to compare with what agents learn. It needs the extra ``rl``.

    python examples/scripted_reacher.py --episodes 5000

Episode k begins with seed k.
"""

from __future__ import annotations

import argparse
import statistics

import gymnasium

import hesscale.experiments.rl  # noqa: F401  # registers the environment
from hesscale.experiments.rl.ur_reacher import resolved_rate


def play(env: gymnasium.Env, seed: int) -> float:
    observation, _ = env.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        observation, reward, terminated, truncated, _ = env.step(resolved_rate(observation))
        total, is_over = total + float(reward), terminated or truncated
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100)
    episodes = parser.parse_args().episodes
    if episodes < 2:
        parser.error("--episodes must be at least 2")
    env = gymnasium.make("hesscale/UR-Reacher-2D-v0")
    totals = [play(env, seed) for seed in range(episodes)]
    print(f"{statistics.fmean(totals):.1f} ± {statistics.stdev(totals) / episodes**0.5:.1f} over {episodes} episodes")


if __name__ == "__main__":
    main()
