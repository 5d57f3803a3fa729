"""Networks of stable-baselines3 and torchrl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_runner import Case, draw, in_full_precision
from torch import Tensor, nn
from torch.nn import functional as F

NARROW = {"net_arch": [6, 6]}


def policy(name: str, make: Callable[[Any, Any], nn.Module], loss: Callable[[nn.Module], Tensor]) -> Case:
    def build() -> nn.Module:
        import stable_baselines3
        from gymnasium import spaces

        return make(stable_baselines3, spaces)

    return in_full_precision(Case("stable_baselines3", name, build, loss))


def torchrl(name: str, loss: Callable[[nn.Module], Tensor], *args: Any, **settings: Any) -> Case:
    def build() -> nn.Module:
        from torchrl import modules

        return getattr(modules, name)(*args, **settings)

    return Case("torchrl", name, build, loss)


def box(spaces: Any, size: int = 3) -> Any:
    return spaces.Box(-1, 1, (size,))


def actor_critic(kind: str, actions: Callable[[Any], Any], **options: Any) -> Callable[[Any, Any], nn.Module]:
    def make(sb3: Any, spaces: Any) -> nn.Module:
        from stable_baselines3.common import policies

        return getattr(policies, kind)(box(spaces), actions(spaces), lambda _: 1e-3, **NARROW, **options)

    return make


def ppo(actions: Callable[[], Tensor]) -> Callable[[nn.Module], Tensor]:
    """The clipped surrogate, the value loss and the entropy bonus."""

    def loss(model: nn.Module) -> Tensor:
        value, log_prob, entropy = model.evaluate_actions(draw(5, 3), actions())
        ratio = (log_prob - log_prob.detach() - 0.05).exp()
        advantage = draw(5, seed=2)
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -surrogate.mean() + 0.5 * F.mse_loss(value.flatten(), draw(5, seed=3)) - 0.01 * entropy.mean()

    return loss


def q_learning(model: nn.Module) -> Tensor:
    q = model.q_net(draw(5, 3)).gather(1, torch.tensor([[0], [2], [1], [1], [0]]))
    return F.smooth_l1_loss(q, draw(5, 1, seed=2))


def soft_actor(model: nn.Module) -> Tensor:
    action, log_prob = model.actor.action_log_prob(draw(5, 3))
    return (0.1 * log_prob - torch.cat(model.critic(draw(5, 3), action), 1).min(1).values).mean()


def deterministic_actor(model: nn.Module) -> Tensor:
    x = draw(5, 3)
    return -model.critic.q1_forward(x, model.actor(x)).mean() + F.mse_loss(model.critic(x, draw(5, 2))[0], draw(5, 1, seed=2))


def off_policy(kind: str) -> Callable[[Any, Any], nn.Module]:
    def make(sb3: Any, spaces: Any) -> nn.Module:
        module = __import__(f"stable_baselines3.{kind}.policies", fromlist=["MlpPolicy"])
        space = spaces.Discrete(3) if kind == "dqn" else box(spaces, 2)
        return module.MlpPolicy(box(spaces), space, lambda _: 1e-3, **NARROW)

    return make


def pixels(sb3: Any, spaces: Any) -> nn.Module:
    from stable_baselines3.common.torch_layers import NatureCNN

    return NatureCNN(spaces.Box(0, 255, (1, 36, 36), dtype="uint8"), features_dim=4)


def squared(*inputs: Callable[[], Tensor]) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        y = model(*(draw_input() for draw_input in inputs))
        y = y[0] if isinstance(y, tuple) else y
        return F.mse_loss(y, draw(*y.shape, seed=3))

    return loss


def numbers(*shape: int, seed: int = 0) -> Callable[[], Tensor]:
    return lambda: draw(*shape, seed=seed)


def tanh_normal(model: nn.Module) -> Tensor:
    from torchrl.modules import TanhNormal

    loc, scale = model(draw(5, 3))
    return -TanhNormal(loc, scale).log_prob(draw(5, 2, seed=2).tanh()).mean()


def gaussian() -> nn.Module:
    from torchrl.modules import MLP, NormalParamExtractor

    return nn.Sequential(MLP(3, 4, num_cells=[6]), NormalParamExtractor())


FEATURES, OUT = (
    {"in_features": 3, "num_cells": [6], "depth": 1, "out_features": 6},
    {"in_features": 8, "num_cells": [6], "depth": 1},
)
CASES = [
    policy(
        "ActorCriticPolicy, discrete",
        actor_critic("ActorCriticPolicy", lambda s: s.Discrete(3)),
        ppo(lambda: torch.arange(5) % 3),
    ),
    policy("ActorCriticPolicy, continuous", actor_critic("ActorCriticPolicy", lambda s: box(s, 2)), ppo(numbers(5, 2, seed=4))),
    policy(
        "ActorCriticPolicy, state-dependent exploration",
        actor_critic("ActorCriticPolicy", lambda s: box(s, 2), use_sde=True),
        ppo(numbers(5, 2, seed=4)),
    ),
    policy("DQNPolicy", off_policy("dqn"), q_learning),
    policy("SACPolicy", off_policy("sac"), soft_actor),
    policy("TD3Policy", off_policy("td3"), deterministic_actor),
    policy("NatureCNN", pixels, squared(numbers(2, 1, 36, 36))),
    torchrl("MLP", squared(numbers(5, 3)), 3, 2, depth=2, num_cells=6),
    Case("torchrl", "MLP, NormalParamExtractor, TanhNormal", gaussian, tanh_normal),
    torchrl("ConvNet", squared(numbers(2, 3, 8, 8)), 3, num_cells=[4, 4], kernel_sizes=[3, 2], strides=[2, 1]),
    torchrl("Conv3dNet", squared(numbers(2, 1, 4, 4, 4)), 1, num_cells=[2, 2], kernel_sizes=2),
    torchrl("NoisyLinear", squared(numbers(5, 3)), 3, 2),
    torchrl("DdpgMlpActor", squared(numbers(5, 3)), 2, mlp_net_kwargs={"in_features": 3, "num_cells": [6, 6]}),
    torchrl("DdpgMlpQNet", squared(numbers(5, 3), numbers(5, 2, seed=1)), FEATURES, OUT),
    torchrl("MultiAgentMLP", squared(numbers(5, 2, 3)), 3, 2, 2, centralized=True, share_params=False, depth=1, num_cells=6),
    torchrl(
        "QMixer", squared(numbers(5, 2, 1), numbers(5, 3, seed=1)), state_shape=(3,), mixing_embed_dim=4, n_agents=2, device="cpu"
    ),
    torchrl("LSTM", squared(numbers(2, 3, 4)), 4, 5, batch_first=True),
    torchrl("GRU", squared(numbers(2, 3, 4)), 4, 5, batch_first=True),
]
