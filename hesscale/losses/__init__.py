"""Losses of reinforcement learning whose derivatives at the model's outputs are closed forms (Appendices B and C of the paper).

A policy's loss is one number per sample, y = φ(l(x)): l is the log-probability of the action, x are the distribution's
parameters, and φ makes it a policy gradient or PPO's surrogate. So, entry by entry,

    ∂y/∂x = φ' ∂l/∂x        ∂²y/∂x² = φ'' (∂l/∂x)² + φ' ∂²l/∂x²

and that is all :func:`hesscale.backward` needs at the outputs: no double backward. To autograd each loss is what it would be if
written with ``torch.distributions``; it can be differentiated any number of times, and never waits for a device.
"""

from __future__ import annotations

from .categorical import categorical_entropy, categorical_log_prob, categorical_policy_gradient, categorical_ppo
from .gaussian import gaussian_entropy, gaussian_log_prob, gaussian_nll, gaussian_policy_gradient, gaussian_ppo
from .values import clipped_value_loss, value_loss

__all__ = [
    "categorical_entropy",
    "categorical_log_prob",
    "categorical_policy_gradient",
    "categorical_ppo",
    "clipped_value_loss",
    "gaussian_entropy",
    "gaussian_log_prob",
    "gaussian_nll",
    "gaussian_policy_gradient",
    "gaussian_ppo",
    "value_loss",
]
