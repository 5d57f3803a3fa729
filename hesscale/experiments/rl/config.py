"""The settings of an agent."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOLS = ("paper", "cleanrl")
POLICIES = ("auto", "gaussian", "categorical")
TRUNCATIONS = ("bootstrap", "terminate")
OWN = ("seed", "step_size", "eps", "trust_radius")  # settings in which agents that are trained together may differ


@dataclass(frozen=True)
class Config:
    """Everything that decides what one agent learns.

    Attributes:
        algo: ``"a2c"`` or ``"ppo"``.
        env: gymnasium's name of the environment.
        optimizer: one of ``AGENT_OPTIMIZERS``; the scaled ones have a trust region for each network.
        step_size, eps: α and ε.
        trust_radius: Δ, of the scaled optimizers; the default for all others, which do not use it.
        steps: of the environment, rounded up to whole rollouts.
        policy: ``"auto"``, ``"gaussian"`` or ``"categorical"``.
        protocol: ``"paper"``, or ``"cleanrl"``: σ is a shared parameter, gradients are clipped, the step size falls to 0, and PPO
            clips and halves its value loss.
        normalize: observations and rewards.
        half_value_loss: ½ (v − R)² in place of (v − R)².
        truncation: ``"bootstrap"``: an episode that is cut off is worth r + γ v(s') at its end; ``"terminate"``: r, as if it were
            over, as in many implementations, the authors' among them.
        rollout: steps between updates; 0 for the algorithm's own number, 5 (A2C) or 2048 (PPO).
        gamma: the discount γ.
        gae_lambda, clip, epochs, minibatches: of PPO; A2C does not use them. 0 epochs or minibatches stand for 10 and 32.
        width: units in each hidden layer.
        entropy: the coefficient of the entropy bonus.
        backend: of :func:`hesscale.compile_step`; with CleanRL's protocol steps are eager whatever it is.
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
    width: int = 64
    entropy: float = 0.0
