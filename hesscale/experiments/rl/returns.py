"""Returns and advantages. A truncated episode counts as if it went on; a terminated one does not.

All arrays are of shape (agents, steps).
"""

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
    is_last = ended.copy()
    is_last[:, -1] = True
    known = rewards + gamma * np.where(is_last & ~terminated, next_values, 0)
    return backwards(known, np.where(is_last, 0, gamma))


def gae(rewards: Array, values: Array, next_values: Array, terminated: Array, ended: Array, gamma: float, lam: float) -> Array:
    """Generalised advantages A_t = δ_t + γλ A_{t+1}, cut at ends, with δ_t = r_t + γ v(s_{t+1}) − v(s_t); arguments as above."""
    errors = rewards + gamma * np.where(terminated, 0, next_values) - values
    return backwards(errors, np.where(ended, 0, gamma * lam))


def backwards(x: Array, decay: Array) -> Array:
    """y_t = x_t + decay_t y_{t+1}, from the last on."""
    by_time, decays = np.ascontiguousarray(x.T, np.float32), np.ascontiguousarray(decay.T, np.float32)
    following: Array = np.zeros(len(x), np.float32)
    for now, factor in zip(by_time[::-1], decays[::-1], strict=True):
        now += factor * following
        following = now
    return np.ascontiguousarray(by_time.T)
