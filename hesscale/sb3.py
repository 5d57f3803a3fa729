"""Algorithms of Stable-Baselines3 with an optimizer of hesscale. This module does not import Stable-Baselines3."""

from __future__ import annotations

from typing import Any, TypeVar

from .optim import CurvatureOptimizer
from .optim.capture import capture

__all__ = ["with_curvature"]
Algorithm = TypeVar("Algorithm")


def with_curvature(algorithm: type[Algorithm], optimizer: type[CurvatureOptimizer], **optimizer_kwargs: Any) -> type[Algorithm]:
    """Return a subclass of an algorithm, such as ``stable_baselines3.PPO``, that trains with this optimizer.

    Use it like the algorithm itself, with ``learn``, ``save``, ``load`` and ``set_parameters``. It computes the Hessian diagonals
    that the optimizer needs. The optimizer trains the policy of PPO, A2C and DQN, and the actor and the critic of SAC and TD3.
    SAC's temperature is still trained by torch's Adam, since Stable-Baselines3 does not let you choose that optimizer. Load
    agents with the subclass too: the algorithm itself computes no curvature, so the first step of the optimizer would raise an
    error.

    PPO and A2C train the policy and the value function with one optimizer. With ``trust_region="group"``, each of the two is a
    parameter group, and so has a trust region of its own.

    Args:
        algorithm: a class of Stable-Baselines3, or one that follows its interface.
        optimizer: a class of ``hesscale.optim``.
        optimizer_kwargs: options of the optimizer, except for ``lr``. The algorithm's ``learning_rate`` sets the step size, and
            may be a schedule.

    Example:
        ``PPO = hesscale.sb3.with_curvature(stable_baselines3.PPO, hesscale.AdaHesScale, eps=1e-8)``
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, CurvatureOptimizer)):
        raise TypeError(
            f"with_curvature takes a class of hesscale.optim as optimizer, such as hesscale.AdaHesScale, not {optimizer!r}"
        )
    if not (isinstance(algorithm, type) and hasattr(algorithm, "train")):
        raise TypeError(
            "with_curvature takes a class of Stable-Baselines3, such as PPO, and returns one; "
            f"{algorithm!r} is not such a class. Create the agent from what it returns"
        )
    if "lr" in optimizer_kwargs:
        raise TypeError("with_curvature takes no lr; pass learning_rate to the algorithm")
    base: Any = algorithm

    class WithCurvature(base):  # type: ignore[misc]
        def __init__(self, *args: Any, policy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            choice = {"optimizer_class": optimizer, "optimizer_kwargs": dict(optimizer_kwargs)}
            super().__init__(*args, policy_kwargs={**choice, **(policy_kwargs or {})}, **kwargs)

        def _setup_model(self) -> None:
            super()._setup_model()
            if hasattr(self.policy, "value_net") and getattr(self.policy.optimizer, "trust_region", "") == "group":
                separate_critic(self.policy)

        def train(self, *args: Any, **kwargs: Any) -> None:
            with capture(*curvature_optimizers(self.policy)):
                super().train(*args, **kwargs)

    WithCurvature.__name__, WithCurvature.__doc__ = algorithm.__name__, algorithm.__doc__
    WithCurvature.__qualname__ = algorithm.__qualname__
    return WithCurvature


def separate_critic(policy: Any) -> None:
    """Divide the parameters of an actor-critic policy into two groups of its optimizer, which has not made a step yet."""
    parts = [policy.value_net, getattr(policy.mlp_extractor, "value_net", None)]
    if not policy.share_features_extractor:
        parts.append(policy.vf_features_extractor)
    critic = {id(p) for part in parts if part is not None for p in part.parameters()}
    (group,) = policy.optimizer.param_groups
    actor, own = ([p for p in group["params"] if (id(p) in critic) is wanted] for wanted in (False, True))
    policy.optimizer.param_groups[:] = [{**group, "params": actor}, {**group, "params": own}]


def curvature_optimizers(policy: Any) -> list[CurvatureOptimizer]:
    """The optimizers of a policy and of its networks that use curvature."""
    found = [getattr(module, "optimizer", None) for module in policy.modules()]
    return [optimizer for optimizer in dict.fromkeys(found) if isinstance(optimizer, CurvatureOptimizer)]
