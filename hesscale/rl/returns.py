"""What actions were worth. For values, an episode that was truncated goes on; one that terminated does not."""

from __future__ import annotations

import numpy as np

from .networks import Array


def n_step_returns(rewards: Array, next_values: Array, terminated: Array, ended: Array, gamma: float) -> Array:
    """R_t = r_t + γ R_{t+1} up to the end of the episode or of the rollout, and there r_t + γ v(s_{t+1}), with 0 for v after
    termination.

    Args:
        rewards, next_values: r_t, and v(s_{t+1}) of the state that came next, before any reset.
        terminated, ended: whether the episode terminated, and whether it ended, by that or by truncation.
    """
    returns: Array = np.empty(len(rewards), np.float32)
    following = next_values[-1]
    for t in reversed(range(len(rewards))):
        if ended[t]:
            following = 0.0 if terminated[t] else next_values[t]
        following = returns[t] = rewards[t] + gamma * following
    return returns


def gae(rewards: Array, values: Array, next_values: Array, terminated: Array, ended: Array, gamma: float, lam: float) -> Array:
    """Generalised advantages A_t = δ_t + γλ A_{t+1}, cut at ends, with δ_t = r_t + γ v(s_{t+1}) − v(s_t); arguments as above."""
    errors = rewards + gamma * np.where(terminated, 0, next_values) - values
    advantages: Array = np.empty(len(rewards), np.float32)
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = advantages[t] = errors[t] + gamma * lam * (0.0 if ended[t] else following)
    return advantages
