"""Returns and advantages. They bootstrap from the value of the next state if an episode is truncated, but not if it terminates.

All arrays have the shape (agents, steps).
"""

from __future__ import annotations

import numpy as np

from .networks import Array


def n_step_returns(rewards: Array, next_values: Array, terminated: Array, ended: Array, gamma: float) -> Array:
    """R_t = r_t + γ R_{t+1}. At the end of the episode or rollout, R_t = r_t + γ v(s_{t+1}), with v = 0 after termination.

    Args:
        rewards, next_values: r_t, and v(s_{t+1}) of the next state, before any reset.
        terminated, ended: whether the episode terminated, and whether it terminated or was truncated.
    """
    is_last = ended.copy()
    is_last[:, -1] = True
    known = rewards + gamma * np.where(is_last & ~terminated, next_values, 0)
    return backwards(known, np.where(is_last, 0, gamma))


def gae(rewards: Array, values: Array, next_values: Array, terminated: Array, ended: Array, gamma: float, lam: float) -> Array:
    """Generalized advantage estimates A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ v(s_{t+1}) − v(s_t), up to the episode's end.

    The arguments are those of :func:`n_step_returns`, and λ.
    """
    errors = rewards + gamma * np.where(terminated, 0, next_values) - values
    return backwards(errors, np.where(ended, 0, gamma * lam))


def backwards(x: Array, decay: Array) -> Array:
    """y_t = x_t + decay_t y_{t+1}, starting from the last step."""
    by_time, decays = np.ascontiguousarray(x.T, np.float32), np.ascontiguousarray(decay.T, np.float32)
    following: Array = np.zeros(len(x), np.float32)
    for now, factor in zip(by_time[::-1], decays[::-1], strict=True):
        now += factor * following
        following = now
    return np.ascontiguousarray(by_time.T)
