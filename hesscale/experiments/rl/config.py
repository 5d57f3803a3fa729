"""The settings of an agent."""

from __future__ import annotations

import re
from dataclasses import dataclass

PARTS = {  # of CleanRL's protocol; each can be added to the paper's protocol, or removed from CleanRL's
    "sigma": "one σ for all states, in place of a network",
    "gradients": "the norm of the gradient clipped to 0.5",
    "anneal": "a step size that falls to 0",
    "values": "PPO's value loss clipped and weighted by a quarter",
    "rewards": "reward normalization that truncation does not reset",
}
PROTOCOLS = {"paper": frozenset[str](), "cleanrl": frozenset(PARTS)}
POLICIES = ("auto", "gaussian", "categorical")
TRUNCATIONS = ("bootstrap", "terminate")
OWN = ("seed", "step_size", "eps", "trust_radius")  # settings in which agents that are trained together may differ


@dataclass(frozen=True)
class Config:
    """All settings that determine how an agent is trained.

    Attributes:
        algo: ``"a2c"`` or ``"ppo"``.
        env: gymnasium's name of the environment.
        optimizer: one of ``AGENT_OPTIMIZERS``. A scaled optimizer has one trust region for each network.
        step_size, eps: α and ε.
        trust_radius: Δ of a scaled optimizer. Other optimizers do not use it, and have the default.
        steps: the number of environment steps, rounded up to whole rollouts.
        policy: ``"auto"``, ``"gaussian"`` or ``"categorical"``.
        protocol: ``"paper"``, or ``"cleanrl"``, which has all ``PARTS``. ``"paper+sigma"`` has only this part;
            ``"cleanrl-values"`` has all but this one.
        normalize: whether to normalize observations and rewards.
        half_value_loss: use ½ (v − R)² in place of (v − R)².
        truncation: the target at the last step of a truncated episode. ``"bootstrap"``: r + γ v(s'). ``"terminate"``: r, as if
            the episode had terminated, as in many implementations, including that of the authors.
        rollout: steps between updates; 0 for the algorithm's default, 5 (A2C) or 2048 (PPO).
        gamma: the discount factor γ.
        gae_lambda, clip, epochs, minibatches: of PPO; A2C does not use them. 0 epochs or minibatches mean 10 and 32.
        target_kl: for PPO with a scaled optimizer. After each update, the trust radius of each of the policy's networks adapts,
            so that its part of the KL divergence comes closer to this target. 0 for constant radii.
        radius_decay: for a scaled optimizer. After t steps, the trust radii are Δ/(1 + t/radius_decay). 0 for constant radii.
        width: the number of units in each hidden layer.
        entropy: the coefficient of the entropy bonus.
        backend: of :func:`hesscale.compile_step`.
    """

    algo: str
    env: str
    optimizer: str
    step_size: float
    seed: int
    steps: int
    policy: str = "auto"
    protocol: str = "paper"
    normalize: bool = True
    eps: float = 1e-5
    trust_radius: float = 1e-8
    half_value_loss: bool = False
    truncation: str = "bootstrap"
    backend: str = "inductor"
    rollout: int = 0
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 0
    minibatches: int = 0
    target_kl: float = 0.0
    radius_decay: int = 0
    width: int = 64
    entropy: float = 0.0

    @property
    def parts(self) -> frozenset[str]:
        return parts_of(self.protocol)


def parts_of(protocol: str) -> frozenset[str]:
    """The parts of CleanRL's protocol that a protocol has.

    >>> sorted(parts_of("paper+sigma+anneal")), sorted(PARTS.keys() - parts_of("cleanrl-values"))
    (['anneal', 'sigma'], ['values'])
    """
    name, *changes = re.split(r"(?=[+-])", protocol)
    unknown = [change for change in changes if change[1:] not in PARTS]
    if name not in PROTOCOLS or unknown:
        raise ValueError(
            f"protocol must be {' or '.join(PROTOCOLS)}, optionally followed by + or - and a part: {', '.join(PARTS)}; "
            f"it is {protocol!r}"
        )
    added, removed = ({change[1:] for change in changes if change[0] == sign} for sign in "+-")
    return (PROTOCOLS[name] | added) - removed
