"""Algorithms of Stable-Baselines3 with an optimizer of hesscale. This module does not import Stable-Baselines3."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from .errors import CurvatureWarning
from .optim import CurvatureOptimizer
from .optim.capture import capture

__all__ = ["with_curvature"]
Algorithm = TypeVar("Algorithm")
TEMPERATURE_STEP_SIZE = 3e-4  # the default of SAC's learning_rate


def with_curvature(
    algorithm: type[Algorithm], optimizer: Callable[..., CurvatureOptimizer], **optimizer_kwargs: Any
) -> type[Algorithm]:
    """Return a subclass of an algorithm, such as ``stable_baselines3.PPO``, that trains with this optimizer.

    Use it like the algorithm itself, with ``learn``, ``save``, ``load`` and ``set_parameters``. It computes the Hessian diagonals
    that the optimizer needs. The optimizer trains the policy of PPO, A2C and DQN, and the actor and the critic of SAC and TD3.
    SAC's temperature is still trained by torch's Adam, since Stable-Baselines3 does not let you choose that optimizer. Load
    agents with the subclass too: the algorithm itself computes no curvature, so the first step of the optimizer would raise an
    error.

    PPO and A2C train the policy and the value function with one optimizer. With ``trust_region="group"``, each of the two is a
    parameter group, and so has its own trust region.

    If you pass a ``trust_radius``, the trust region limits the length of a step. So the default of ``learning_rate`` becomes 1.
    Gradients are not clipped unless you pass ``max_grad_norm``, because the thresholds of Stable-Baselines3 were chosen for Adam.
    The step size of SAC's temperature, which has no trust region, is then 3e-4 for any ``learning_rate``. The radius has the
    units of the loss, so it suits several environments only if rewards are normalized. Without a ``VecNormalize`` that does so,
    ``learn`` issues a :class:`hesscale.CurvatureWarning`.

    Args:
        algorithm: a class of Stable-Baselines3, or one that follows its interface.
        optimizer: a class of ``hesscale.optim``, or its ``paper``.
        optimizer_kwargs: options of the optimizer, except for ``lr``. The algorithm's ``learning_rate`` sets the step size, and
            may be a schedule.

    Example:
        ``PPO = hesscale.sb3.with_curvature(stable_baselines3.PPO, hesscale.AdaHesScale)``
    """
    owner = getattr(optimizer, "__self__", optimizer)  # AdaHesScale, for AdaHesScale.paper
    if not (isinstance(owner, type) and issubclass(owner, CurvatureOptimizer)):
        raise TypeError(
            f"with_curvature takes a class of hesscale.optim as optimizer, such as hesscale.AdaHesScale, not {optimizer!r}"
        )
    if not (isinstance(algorithm, type) and hasattr(algorithm, "train")):
        raise TypeError(
            "with_curvature takes a class of Stable-Baselines3, such as PPO, and returns one; "
            f"{algorithm!r} is not such a class. Create the agent from the class that it returns"
        )
    if "lr" in optimizer_kwargs:
        raise TypeError("with_curvature takes no lr; pass learning_rate to the algorithm")
    base: Any = algorithm

    class WithCurvature(base):  # type: ignore[misc]
        def __init__(self, *args: Any, policy_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            choice = {"optimizer_class": optimizer, "optimizer_kwargs": dict(optimizer_kwargs), **(policy_kwargs or {})}
            if (choice["optimizer_kwargs"] or {}).get("trust_radius") is not None:
                kwargs = {**trust_region_defaults(base, args, kwargs), **kwargs}
            super().__init__(*args, policy_kwargs=choice, **kwargs)

        def learn(self, *args: Any, **kwargs: Any) -> Any:
            if has_trust_region(self.policy):
                warn_of_raw_rewards(self.get_vec_normalize_env())
            return super().learn(*args, **kwargs)

        def _setup_model(self) -> None:
            super()._setup_model()
            if hasattr(self.policy, "value_net") and getattr(self.policy.optimizer, "trust_region", "") == "group":
                separate_critic(self.policy)

        def _update_learning_rate(self, optimizers: Any) -> None:
            super()._update_learning_rate(optimizers)
            temperature = getattr(self, "ent_coef_optimizer", None)
            if temperature is not None and has_trust_region(self.policy):
                temperature.param_groups[0]["lr"] = TEMPERATURE_STEP_SIZE

        def train(self, *args: Any, **kwargs: Any) -> None:
            with capture(*curvature_optimizers(self.policy)):
                super().train(*args, **kwargs)

    WithCurvature.__name__, WithCurvature.__doc__ = algorithm.__name__, algorithm.__doc__
    WithCurvature.__qualname__ = algorithm.__qualname__
    return WithCurvature


def trust_region_defaults(algorithm: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """The options of ``algorithm(*args, **kwargs)`` whose defaults change with a trust region, except those that are given."""
    names: list[str] = []
    for init in [vars(cls)["__init__"] for cls in algorithm.__mro__ if "__init__" in vars(cls)]:
        parameters = list(inspect.signature(init).parameters.values())[1:]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in names]
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):  # otherwise, it passes options on to its base class
            break
    defaults = {"learning_rate": 1.0} | ({"max_grad_norm": math.inf} if "max_grad_norm" in names else {})
    given = {*names[: len(args)], *kwargs}
    return {name: value for name, value in defaults.items() if name not in given}


def has_trust_region(policy: Any) -> bool:
    groups = [group for optimizer in curvature_optimizers(policy) for group in optimizer.param_groups]
    return any(group["trust_radius"] is not None for group in groups)


def warn_of_raw_rewards(normalizer: Any) -> None:
    """Warn if rewards are not normalized, given the environment's ``VecNormalize`` or None."""
    if normalizer is None or not normalizer.norm_reward:
        warnings.warn(
            "trust_radius has the units of the loss, so it depends on the scale of the rewards, and no VecNormalize normalizes "
            "them. Wrap the environment in stable_baselines3.common.vec_env.VecNormalize, or tune the radius for it",
            CurvatureWarning,
            stacklevel=3,
        )


def separate_critic(policy: Any) -> None:
    """Divide the parameters of an actor-critic policy into two groups of its optimizer, before its first step."""
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
