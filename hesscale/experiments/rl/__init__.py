"""Reinforcement learning. Where gymnasium is installed, importing this registers ``hesscale/UR-Reacher-2D-v0``."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("gymnasium"):
    from gymnasium.envs.registration import register

    register("hesscale/UR-Reacher-2D-v0", entry_point="hesscale.experiments.rl.ur_reacher:URReacher", max_episode_steps=100)
