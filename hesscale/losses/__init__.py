"""Losses of reinforcement learning whose derivatives at the model's outputs have closed forms (Appendices B and C of the paper).

The loss of a policy is one number per sample, y = φ(l(x)). Here l is the log-probability of the action, x are the parameters of
the distribution, and φ is −A l for a policy gradient, or the surrogate of PPO. So, entry by entry,

    ∂y/∂x = φ' ∂l/∂x        ∂²y/∂x² = φ'' (∂l/∂x)² + φ' ∂²l/∂x²

and :func:`hesscale.backward` needs nothing else at the outputs, in particular no double backward. Values and gradients are the
same as with ``torch.distributions``. A loss can be differentiated any number of times, and never waits for a device.
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
