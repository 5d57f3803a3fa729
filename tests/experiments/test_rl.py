"""A2C and PPO: advantages, losses and normalization against slow references; training, resuming, and errors."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import warnings

import pytest
import torch
from torch import distributions as D

pytestmark = pytest.mark.skipif(torch.empty(0).device.type != "cpu", reason="agents act on the CPU")

gymnasium = pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")

from hesscale import losses as hesscale_losses  # noqa: E402
from hesscale.errors import NonFiniteError  # noqa: E402
from hesscale.experiments.figures import rl  # noqa: E402
from hesscale.experiments.figures._rl_figures import averaged  # noqa: E402
from hesscale.experiments.lab.experiment import as_task  # noqa: E402
from hesscale.experiments.lab.series_layout import check  # noqa: E402
from hesscale.experiments.lab.store import Pause, Result, Store  # noqa: E402
from hesscale.experiments.optimizers import AGENT_OPTIMIZERS  # noqa: E402
from hesscale.experiments.rl.a2c import A2C  # noqa: E402
from hesscale.experiments.rl.clipping import clip_gradients  # noqa: E402
from hesscale.experiments.rl.config import Config  # noqa: E402
from hesscale.experiments.rl.networks import AgentBatch, Categorical, Gaussian  # noqa: E402
from hesscale.experiments.rl.ppo import PPO  # noqa: E402
from hesscale.experiments.rl.returns import gae, n_step_returns  # noqa: E402
from hesscale.experiments.rl.tuning_free import PACKAGES  # noqa: E402
from hesscale.experiments.rl.vector_env import Rollout, VectorEnv, is_finite  # noqa: E402
from hesscale.optim import CurvatureOptimizer  # noqa: E402

EXPERIMENT = rl.EXPERIMENT
TOY = "hesscale-test/Toy-v0"
CONFIG = Config("a2c", TOY, "adahesscale", 1e-3, 0, 40, backend="eager")


class Toy(gymnasium.Env):
    """Observes how many steps it took since the reset, and rewards with it; every other episode terminates after seven."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    given: tuple = ()

    def __init__(self, reward=None, actions=None, observations=None, extra=None):
        self.reward, self.extra, self.episode = reward, extra, 0
        self.action_space = actions or self.action_space
        self.observation_space = self.observation_space if observations is None else observations

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return np.array([0.0]), {}

    def step(self, action):
        Toy.given = action
        self.t += 1
        noise = next(self.extra) if self.extra else 0.0
        reward = float(self.t) if self.reward is None else self.reward
        return np.array([self.t + noise]), reward, self.t == 7 and self.episode % 2 == 0, False, {}


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """Episodes of ten steps at most, small rollouts for PPO, and environments of its own."""
    before = dict(gymnasium.registry)
    torch.set_default_device(None)  # it costs time at every call
    gymnasium.register(TOY, Toy, max_episode_steps=10)
    monkeypatch.setattr(PPO, "rollout", 32)
    monkeypatch.setattr(PPO, "minibatches", 4)
    monkeypatch.setattr(PPO, "epochs", 2)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    torch.set_default_device("cpu")


def register(name, **options):
    gymnasium.register(name, Toy, max_episode_steps=10, kwargs=options, disable_env_checker=True)
    return name


# ----------------------------------------------------------------------------------------------------------------- advantages


@pytest.fixture
def some():
    """Rewards, values, next values, and episodes that terminate or are truncated."""
    draws = np.random.default_rng(0)
    rewards, values, following = draws.normal(size=(3, 2, 50)).astype(np.float32)
    ended = draws.random((2, 50)) < 0.3
    terminated = ended & (draws.random((2, 50)) < 0.5)
    assert (ended & ~terminated).any()
    assert terminated.any()
    return rewards, values, following, terminated, ended


def test_n_step_returns_are_sums_up_to_the_end_of_the_episode(some):
    rewards, _, following, terminated, ended = some
    found = n_step_returns(rewards, following, terminated, ended, 0.9)
    for agent, t in itertools.product(range(2), range(50)):
        last = next((k for k in range(t, 50) if ended[agent, k]), 49)
        expected = sum(0.9 ** (k - t) * rewards[agent, k] for k in range(t, last + 1))
        if not terminated[agent, last]:
            expected += 0.9 ** (last + 1 - t) * following[agent, last]
        assert found[agent, t] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_gae_is_a_sum_of_errors_up_to_the_end_of_the_episode(some):
    rewards, values, following, terminated, ended = some
    found = gae(rewards, values, following, terminated, ended, 0.9, 0.8)
    errors = rewards + 0.9 * following * ~terminated - values
    for agent, t in itertools.product(range(2), range(50)):
        last = next((k for k in range(t, 50) if ended[agent, k]), 49)
        expected = sum((0.9 * 0.8) ** (k - t) * errors[agent, k] for k in range(t, last + 1))
        assert found[agent, t] == pytest.approx(expected, rel=1e-5, abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------- environment


class Fixed:
    """Policies that always do the same."""

    def __init__(self, *actions):
        self.actions = np.array(actions)

    def noise(self, draws, count):
        return np.zeros((count, 2))

    def act(self, observations, noise):
        return self.actions, self.actions.reshape(len(self.actions), -1)


STILL = Fixed(np.zeros(2, np.float32))


def test_rollouts_store_next_observations_before_a_reset():
    envs = VectorEnv(TOY, [0], normalize=False)
    found = envs.collect(STILL, 30)
    lengths = [10, 7, 10]  # truncated, terminated, truncated
    expected = [list(range(n)) for n in lengths]
    assert found.observations[0, :27, 0].tolist() == list(itertools.chain(*expected))
    assert found.following[0, :27, 0].tolist() == [t + 1 for t in itertools.chain(*expected)]
    assert np.flatnonzero(found.ended[0]).tolist() == [9, 16, 26]
    assert np.flatnonzero(found.terminated[0]).tolist() == [16]
    assert envs.finished == [[(55.0, 10), (28.0, 7), (55.0, 10)]]


def test_observations_are_normalized_as_in_gymnasium():
    envs, other = VectorEnv("CartPole-v1", [3]), gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
    observation, _ = other.reset(seed=3)
    for k in range(100):
        np.testing.assert_allclose(envs.observations[0], np.clip(observation, -10, 10), rtol=1e-5, atol=1e-6)
        observation, _, terminated, truncated, _ = other.step(k % 2)
        envs.step(np.array([k % 2]))
        if terminated or truncated:
            observation, _ = other.reset()
    assert len(envs.finished[0]) > 1


def test_warnings_about_deprecated_models_are_silenced(capfd):
    pytest.importorskip("mujoco")
    VectorEnv("HalfCheetah-v5", [0, 1])
    assert "deprecated" not in "".join(capfd.readouterr())


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    rewards = VectorEnv(TOY, [0], gamma=0.9).collect(STILL, 27).rewards[0]
    seen, discounted = [], 0.0
    for t, raw in enumerate([t + 1 for n in (10, 7, 10) for t in range(n)]):
        discounted = 0.9 * (0 if raw == 1 else discounted) + raw
        seen.append(discounted)
        mean = sum(seen) / (len(seen) + 1e-4)
        variance = (sum((x - mean) ** 2 for x in seen) + 1e-4 * (1 + mean**2)) / (len(seen) + 1e-4)
        assert rewards[t] == pytest.approx(min(raw / math.sqrt(variance + 1e-8), 10), rel=1e-4)


def test_rewards_can_be_normalized_as_in_gymnasium():
    """It does not reset the discounted return when an episode is truncated."""
    rewards = VectorEnv(TOY, [0], gamma=0.9, reset_returns=False).collect(STILL, 27).rewards[0]
    other = gymnasium.wrappers.NormalizeReward(gymnasium.make(TOY), gamma=0.9)
    other.reset(seed=0)
    for found in rewards:
        _, reward, terminated, truncated, _ = other.step(np.zeros(2, np.float32))
        assert found == pytest.approx(float(np.clip(reward, -10, 10)), rel=1e-4)
        if terminated or truncated:
            other.reset()


def test_numbers_whose_squares_overflow_are_finite():
    for x in (np.array([[1e200, -1e300]]), np.array([1e30, 1], np.float32), np.zeros((0, 3))):
        assert is_finite(x)
    for x in (np.nan, np.inf, -np.inf):
        assert not is_finite(np.array([[0.0, x]]))


def test_actions_are_clipped_and_the_time_left_is_observed():
    envs = VectorEnv(TOY, [0], time_feature=True)
    assert envs.inputs == 2
    found = envs.collect(Fixed(np.array([3.0, -0.5], np.float32)), 12)
    assert Toy.given.tolist() == [1.0, -0.5]
    assert found.actions[0, 0].tolist() == [3.0, -0.5]
    np.testing.assert_allclose(found.observations[0, :, 1], [1 - t / 10 for t in [*range(10), 0, 1]], atol=1e-6)
    np.testing.assert_allclose(found.following[0, 9, 1], 0, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------------- losses


def batch(agent, count=16, inputs=3, outputs=2):
    generator = torch.Generator().manual_seed(1)
    observations = torch.randn(count, inputs, generator=generator)
    if isinstance(agent, Categorical):
        actions = torch.randint(outputs, (count,), generator=generator)
    else:
        actions = torch.randn(count, outputs, generator=generator)
    advantages, returns, noise = torch.randn(3, count, generator=generator)
    old = log_prob_of(agent, observations, actions) + 0.2 * noise
    return observations, actions, advantages, returns, old


def log_prob_of(agent, observations, actions):
    return AgentBatch([agent]).log_prob(observations[None], actions[None])[0]


def agents():
    torch.manual_seed(0)
    yield Gaussian(3, 2, orthogonal=False, shared=False)
    yield Gaussian(3, 2, orthogonal=True, shared=True)
    yield Categorical(3, 2, orthogonal=False)


@pytest.mark.parametrize("agent", list(agents()), ids=["gaussian", "shared", "categorical"])
def test_losses_have_the_gradients_of_plain_formulas(agent):
    observations, actions, advantages, _, old = batch(agent)
    if isinstance(agent, Categorical):
        log_prob = D.Categorical(logits=agent.logits(observations)).log_prob(actions)
    else:
        variance = agent.variance(observations).exp().expand_as(actions)
        log_prob = D.Normal(agent.mean(observations), variance.sqrt()).log_prob(actions).sum(-1)
    torch.testing.assert_close(log_prob_of(agent, observations, actions), log_prob.detach())
    torch.testing.assert_close(AgentBatch([agent]).values(observations[None])[0], agent.values(observations).detach())
    ratio = (log_prob - old).exp()
    surrogate = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    policy = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
    for found, expected in (
        (agent.policy_gradient(observations, actions, advantages), -(log_prob * advantages).mean()),
        (agent.surrogate(observations, actions, advantages, old, 0.2), surrogate),
    ):
        grads = torch.autograd.grad(found, policy), torch.autograd.grad(expected, policy, retain_graph=True)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("agent", list(agents()), ids=["gaussian", "shared", "categorical"])
def test_actions_are_drawn_from_the_policy(agent):
    observation = torch.tensor([0.3, -1.0, 0.5])
    batch = AgentBatch([agent] * 4000)
    noise = batch.noise(np.random.default_rng(0), 4000)
    actions = torch.from_numpy(batch.act(observation.expand(4000, 3).numpy(), noise)[0])
    with torch.no_grad():
        if isinstance(agent, Categorical):
            torch.testing.assert_close(
                actions.double().mean(), agent.logits(observation).softmax(0)[1].double(), atol=0.03, rtol=0
            )
        else:
            mean, variance = agent(observation)
            torch.testing.assert_close(actions.mean(0), mean, atol=0.08, rtol=0)
            torch.testing.assert_close(actions.var(0), variance, atol=0.1, rtol=0)


@pytest.mark.parametrize("backend", ["eager", "traced"])
@pytest.mark.parametrize("count", [1, 3])
def test_an_agent_batch_uses_the_current_weights(count, backend):
    learning = A2C([dataclasses.replace(CONFIG, seed=seed, backend=backend) for seed in range(count)])
    for _ in range(3):
        learning.iterate()
    learning.agent_batch.refresh()
    assert bool(learning.agent_batch.viewed) == (
        count == 1 or backend == "traced"
    )  # no copies where the weights lie side by side
    observations = torch.randn(count, 4, learning.envs.inputs)
    for k, agent in enumerate(learning.agents):
        expected = agent.values(observations[k]).detach()
        torch.testing.assert_close(learning.agent_batch.values(observations)[k], expected)
        with torch.no_grad():
            agent.critic[-1].bias += 1.0
    learning.agent_batch.refresh()
    torch.testing.assert_close(learning.agent_batch.values(observations)[-1], expected + 1)


def test_parts_of_the_divergence_are_those_of_its_networks():
    old, new = ({"mean": torch.randn(2, 5, 3), "variance": torch.randn(2, 5, 3)} for _ in range(2))
    parts = Gaussian.divergences(old, new)
    before, after = (D.Normal(outputs["mean"], outputs["variance"].exp().sqrt()) for outputs in (old, new))
    torch.testing.assert_close(parts["mean"] + parts["variance"], D.kl_divergence(after, before).sum(-1).mean(-1))
    assert Gaussian.divergences(old, {**old, "mean": new["mean"]})["variance"].tolist() == [0, 0]
    before, after = ({"logits": torch.randn(2, 5, 3)} for _ in range(2))
    expected = D.kl_divergence(*(D.Categorical(logits=outputs["logits"]) for outputs in (after, before))).mean(-1)
    torch.testing.assert_close(Categorical.divergences(before, after)["logits"], expected)


ADAPTING = dataclasses.replace(
    CONFIG,
    algo="ppo",
    optimizer="scaled-adahesscale",
    step_size=1.0,
    trust_radius=1e-6,
    target_kl=1e-4,
    rollout=32,
    epochs=1,
    minibatches=2,
)


def test_trust_radii_adapt_to_the_divergence_from_the_old_policy(monkeypatch):
    learning = PPO([ADAPTING, dataclasses.replace(ADAPTING, seed=1)])
    collect, seen = learning.envs.collect, []
    monkeypatch.setattr(learning.envs, "collect", lambda *inputs: seen.append(collect(*inputs)) or seen[-1])
    old = copy.deepcopy(learning.agents)
    learning.iterate()
    for k, agent in enumerate(learning.agents):
        observations = torch.from_numpy(seen[0].observations[k])
        with torch.no_grad():
            outputs = [{name: each.networks[name](observations) for name in ("mean", "variance")} for each in (old[k], agent)]
        parts = Gaussian.divergences(*outputs)
        factors = [min(max(1e-4 / float(part), 0.5), 2.0) for part in parts.values()]
        radii = [float(group["trust_radius"]) for group in learning.optimizers[k].param_groups]
        assert radii == pytest.approx([1e-6 * factor for factor in (*factors, 1.0)], rel=1e-4)  # the critic's stays
        assert learning.trust_metrics(k)["trust/radius_mean"] == radii[0]


@pytest.mark.parametrize("count", [1, 2])
def test_a_compiled_step_uses_the_adapted_radius(count):
    found = []
    for backend in ("eager", "traced"):
        learning = PPO([dataclasses.replace(ADAPTING, target_kl=1.0, seed=seed, backend=backend) for seed in range(count)])
        for _ in range(4):
            learning.iterate()
        radii = [group["trust_radius"] for optimizer in learning.optimizers for group in optimizer.param_groups[:2]]
        assert [float(radius) for radius in radii] == pytest.approx([16e-6] * len(radii))
        found.append([p.detach() for agent in learning.agents for p in agent.parameters()])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "traced"])
def test_a_decaying_radius_is_half_as_large_after_its_number_of_steps(backend):
    decaying = dataclasses.replace(CONFIG, optimizer="scaled-adahesscale", step_size=1.0, trust_radius=1e-6, backend=backend)
    learning = A2C([dataclasses.replace(decaying, radius_decay=10, seed=seed) for seed in range(2)])
    constant = A2C([dataclasses.replace(decaying, seed=seed) for seed in range(2)])
    for steps, radius in ((0, 1e-6), (5, 1e-6 / 1.5), (10, 5e-7)):
        assert learning.envs.steps == steps
        learning.iterate()
        for k, optimizer in enumerate(learning.optimizers):
            assert [float(group["trust_radius"]) for group in optimizer.param_groups] == pytest.approx([radius] * 3)
            assert learning.trust_metrics(k)["trust/radius_mean"] == pytest.approx(radius)
        for group in [group for optimizer in constant.optimizers for group in optimizer.param_groups]:
            group["trust_radius"] = radius
        constant.are_step_sizes_new = True
        constant.iterate()
    for own, other in zip(learning.agents, constant.agents, strict=True):
        torch.testing.assert_close(own.state_dict(), other.state_dict(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("algorithm", [A2C, PPO])
@pytest.mark.parametrize(
    ("name", "backend"), [("adahesscale", "eager"), ("scaled-adam", "traced"), ("scaled-adahesscale", "traced")]
)
def test_one_step_is_that_of_an_optimizer_and_a_trust_region_for_each_network(algorithm, name, backend):
    learning = algorithm([dataclasses.replace(CONFIG, optimizer=name, backend=backend, half_value_loss=True)])
    (agent,) = learning.agents
    observations, actions, advantages, returns, old = batch(agent, inputs=learning.envs.inputs)
    data = [observations, actions, advantages, returns]
    if algorithm is PPO:
        data += [old, torch.zeros(16)]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    twin = type(agent)(learning.envs.inputs, 2, orthogonal=False, shared=False)
    twin.load_state_dict(agent.state_dict())
    kind = AGENT_OPTIMIZERS[name]
    radius = 1e-8 if kind.is_scaled else None
    own = [kind.make(network.parameters(), 1e-3, eps=1e-5, trust_radius=radius) for network in twin.networks.values()]
    for _ in range(3):
        learning.update(*[tensor[None] for tensor in data])
        mean, variance = twin(observations)
        if algorithm is PPO:
            losses = [
                hesscale_losses.gaussian_ppo(mean, actions, advantages, old, variance=variance.detach()),
                hesscale_losses.gaussian_ppo(mean.detach(), actions, advantages, old, variance=variance),
            ]
        else:
            losses = [
                hesscale_losses.gaussian_policy_gradient(mean, actions, advantages, variance=variance.detach()),
                hesscale_losses.gaussian_policy_gradient(mean.detach(), actions, advantages, variance=variance),
            ]
        losses.append((twin.values(observations) - returns).square().mean() / 2)
        for optimizer, loss in zip(own, losses, strict=True):
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
    torch.testing.assert_close(list(agent.parameters()), list(twin.parameters()), rtol=1e-4, atol=1e-6)
    metrics = learning.trust_metrics(0)
    if kind.is_scaled:
        for network, optimizer in zip(("mean", "variance", "critic"), own, strict=True):
            assert metrics[f"trust/eta_{network}"] == pytest.approx(float(optimizer.eta[0]), rel=1e-3)
            assert metrics[f"trust/scaled_share_{network}"] == float(optimizer.scaled_share[0])
    else:
        assert not metrics


# ------------------------------------------------------------------------------------------------------------------- learning


def learned(learning, steps):
    """The mean return over the second half of so many steps."""
    (finished,) = learning.envs.finished
    while learning.envs.steps < steps:
        if learning.envs.steps <= steps // 2:
            finished.clear()
        learning.iterate(False)
    return np.average([found for found, _ in finished], weights=[length for _, length in finished])


def test_ppo_learns_to_balance_a_pole(monkeypatch):
    monkeypatch.setattr(PPO, "rollout", 1024)
    monkeypatch.setattr(PPO, "minibatches", 16)
    monkeypatch.setattr(PPO, "epochs", 10)
    learning = PPO([dataclasses.replace(CONFIG, env="CartPole-v1", step_size=3e-4, seed=1)])
    assert learned(learning, 6000) > 80  # at random: 28


def test_a2c_learns_to_balance_a_pendulum():
    pytest.importorskip("mujoco")
    learning = A2C([dataclasses.replace(CONFIG, env="InvertedPendulum-v5", step_size=3e-4)])
    assert learned(learning, 5000) > 80  # at random: 8


# ----------------------------------------------------------------------------------------------------------------------- runs


def done(folder, *configs):
    store, asked = Store(folder), [as_task(config) for config in configs]
    for task in asked:
        EXPERIMENT.do(store, task, None)
    return EXPERIMENT.results(store, asked)


def numbers(result):
    """All but times."""
    values = {name: value for name, value in result.values.items() if name != "steps_per_second"}
    return values, {name: points for name, points in result.metrics.items() if name != "charts/SPS"}


RUNS = {
    "ppo": {"algo": "ppo", "env": "InvertedPendulum-v5", "optimizer": "scaled-adam", "backend": "traced", "steps": 200},
    "kl": {
        "algo": "ppo",
        "env": "CartPole-v1",
        "optimizer": "scaled-adam",
        "target_kl": 1e-3,
        "rollout": 32,
        "epochs": 1,
        "minibatches": 2,
        "steps": 96,
    },
    "a2c": {
        "env": "InvertedPendulum-v5",
        "optimizer": "scaled-adahesscale",
        "trust_radius": 1e-3,
        "backend": "traced",
        "steps": 60,
    },
    "decay": {
        "env": "CartPole-v1",
        "optimizer": "scaled-adam",
        "trust_radius": 1e-3,
        "radius_decay": 20,
        "backend": "traced",
        "steps": 60,
    },
    "random": {"env": "CartPole-v1", "optimizer": "adahessian", "backend": "traced", "steps": 60},
    "cleanrl": {"algo": "ppo", "env": "InvertedPendulum-v5", "protocol": "cleanrl", "backend": "traced", "steps": 200},
    "dog": {"env": "CartPole-v1", "optimizer": "dog", "step_size": 1.0, "steps": 60},
    "prodigy": {"env": "CartPole-v1", "optimizer": "prodigy", "step_size": 1.0, "steps": 60},
    "schedule-free": {"env": "CartPole-v1", "optimizer": "schedule-free", "steps": 60},
    "eager": {"env": "CartPole-v1", "optimizer": "adam", "steps": 60},
}


@pytest.mark.parametrize("stops", [2, pytest.param(math.inf, marks=pytest.mark.slow)], ids=["twice", "always"])
@pytest.mark.parametrize(
    "name",
    ["a2c", "random", "cleanrl", "kl", "eager", "dog", "prodigy", "schedule-free", pytest.param("ppo", marks=pytest.mark.slow)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch, name, stops):
    if "Pendulum" in RUNS[name]["env"]:
        pytest.importorskip("mujoco")
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name][0])
    monkeypatch.setattr(rl, "POINTS", 4)
    config = dataclasses.replace(CONFIG, **RUNS[name])
    (whole,) = done(tmp_path / "whole", config)
    assert whole.facts["resumed"] == 0
    monkeypatch.setattr(rl, "CHECKPOINT_SECONDS", -1.0)
    parts, pauses = Store(tmp_path / "parts"), 0
    while parts.result("rl", as_task(config)) is None:
        try:
            EXPERIMENT.do(Store(parts.root, seconds=-1.0 if pauses < stops else math.inf), as_task(config), None)
        except Pause:
            pauses += 1
    assert pauses >= min(stops, 3)
    assert numbers(parts.result("rl", as_task(config))) == numbers(whole)
    assert "losses/value_loss" in whole.metrics
    assert "charts/episodic_return" in whole.metrics
    assert whole.values["diverged_at"] is None
    if name == "a2c":
        shares = [share for _, share in whole.metrics["trust/scaled_share_critic"]]
        assert any(0 < share < 1 for share in shares)
        assert whole.values["scaled_share"]["critic"] == shares[-1]


TOGETHER = {
    "a2c": {"optimizer": "scaled-adahesscale", "backend": "traced", "steps": 40},
    "cleanrl": {"algo": "ppo", "optimizer": "adam", "protocol": "cleanrl", "backend": "traced", "steps": 64},
    "sigma": {"algo": "ppo", "protocol": "paper+sigma+values", "backend": "traced", "steps": 64},
    "eager": {"env": "CartPole-v1", "optimizer": "scaled-adam", "steps": 40},
    "ppo": {"algo": "ppo", "optimizer": "adahesscale", "backend": "traced", "steps": 64},
}


def together(folder, configs, seconds=math.inf):
    store, asked = Store(folder, seconds=seconds), [as_task(config) for config in configs]
    EXPERIMENT.do_together(store, asked, None)
    return EXPERIMENT.results(store, asked)


def check_alike(found, expected):
    """But for rounding."""
    assert found.metrics.keys() == expected.metrics.keys()
    for metric, points in expected.metrics.items():
        if metric != "charts/SPS":
            np.testing.assert_allclose(found.metrics[metric], points, rtol=1e-3, atol=1e-5, err_msg=metric)


@pytest.mark.parametrize(
    "name", ["a2c", "cleanrl", "eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ppo", "sigma"))]
)
def test_agents_trained_together_equal_agents_trained_alone(tmp_path, monkeypatch, name):
    monkeypatch.setattr(rl, "POINTS", 4)
    first = dataclasses.replace(CONFIG, **TOGETHER[name])
    own = [{"seed": 0}, {"seed": 1, "step_size": 3e-3, "trust_radius": 1e-6, "eps": 1e-4}]
    configs = [dataclasses.replace(first, **changes) for changes in own]
    assert len({rl.kind(config) for config in configs}) == 1
    for found, expected in zip(together(tmp_path / "together", configs), done(tmp_path, *configs), strict=True):
        assert found.values["together"] == 2
        check_alike(found, expected)
    policies = [torch.load(next(tmp_path.glob(f"{where}rl/*/policy.pt"))) for where in ("", "together/")]
    assert policies[0].keys() == policies[1].keys()


def test_agents_stopped_at_different_steps_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "POINTS", 4)
    monkeypatch.setattr(rl, "CHECKPOINT_SECONDS", -1.0)
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in range(3)]
    whole = together(tmp_path / "whole", configs)
    for _ in range(2):
        with pytest.raises(Pause):
            together(tmp_path / "parts", configs, seconds=-1.0)
    assert list(map(numbers, together(tmp_path / "parts", configs))) == list(map(numbers, whole))
    with pytest.raises(Pause):
        together(tmp_path / "apart", configs[:2], seconds=-1.0)
    with pytest.raises(Pause):
        together(tmp_path / "apart", configs[1:2], seconds=-1.0)
    found = together(tmp_path / "apart", configs)
    assert [result.values["together"] for result in found] == [1, 1, 1]
    for result, expected in zip(found, whole, strict=True):
        check_alike(result, expected)


def test_a_diverged_agent_does_not_affect_the_others(tmp_path):
    fine = dataclasses.replace(CONFIG, optimizer="adam", env="CartPole-v1", steps=60)
    wild = dataclasses.replace(fine, step_size=1e38)
    found, gone = together(tmp_path / "both", [fine, wild])
    (alone,) = done(tmp_path, fine)
    assert found.values["diverged_at"] is None
    assert 0 < gone.values["diverged_at"] < 60
    assert found.values["mean_return"] == alone.values["mean_return"]


def check_same(policy, expected):
    assert (policy["steps"], policy["config"]) == (expected["steps"], expected["config"])
    for part in ("agent", "seen"):
        torch.testing.assert_close(policy[part], expected[part], rtol=0, atol=0)


def diverge(learning, k):
    """As a gradient that is not finite does."""
    learning.optimizers[k].counters.setdefault("nonfinite", torch.zeros((), dtype=torch.long)).add_(1)


@pytest.mark.parametrize("backend", ["eager", pytest.param("traced", marks=pytest.mark.slow)])
def test_the_policy_of_a_diverged_agent_is_kept(backend):
    learning = A2C([dataclasses.replace(CONFIG, seed=seed, backend=backend) for seed in range(2)])
    learning.iterate()
    learning.iterate()
    diverge(learning, 0)
    learning.iterate()
    before = copy.deepcopy(learning.policy(0))
    assert (learning.envs.diverged_at, before["steps"]) == ([15, None], 15)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states = [learning.state(k) for k in range(2)]
        for _ in range(3):
            learning.iterate()
    check_same(learning.policy(0), before)
    assert learning.policy(1)["steps"] == 30
    other = A2C([dataclasses.replace(CONFIG, seed=seed, backend=backend) for seed in range(2)])
    for k in range(2):
        other.load(k, states[k])
    for _ in range(3):
        other.iterate()
    for k in range(2):
        check_same(other.policy(k), learning.policy(k))


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_loading_a_state_replaces_that_of_trained_agents(count):
    learning, other = (A2C([dataclasses.replace(CONFIG, seed=seed, backend="traced") for seed in range(count)]) for _ in range(2))
    learning.iterate()
    states = copy.deepcopy([learning.state(k) for k in range(count)])
    for _ in range(4):
        other.iterate()
    for k in range(count):
        other.load(k, states[k])
    for each in (learning, other):
        for _ in range(3):
            each.iterate()
    for k in range(count):
        check_same(other.policy(k), learning.policy(k))
        states = [each.optimizers[k].state_dict()["state"] for each in (learning, other)]
        torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_checkpoint_contains_only_one_agent():
    learning = A2C([dataclasses.replace(CONFIG, seed=seed, backend="traced") for seed in range(3)])
    learning.iterate()
    learning.iterate()
    for tensor in torch.utils._pytree.tree_leaves(learning.state(0)):
        if isinstance(tensor, torch.Tensor):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_actions_are_not_drawn_with_the_numbers_of_the_environment():
    envs = VectorEnv("CartPole-v1", [3])
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=3)
    numbers = envs.draws[0].random(100)
    assert not np.isin(numbers, np.random.default_rng(3).random(200)).any()
    assert not np.isin(numbers, env.unwrapped.np_random.random(200)).any()


def test_agents_with_other_differences_cannot_be_trained_together():
    with pytest.raises(ValueError, match="differ only in seed, step_size, eps, trust_radius"):
        A2C([CONFIG, dataclasses.replace(CONFIG, optimizer="adam")])


def test_a_run_depends_only_on_its_seed(tmp_path):
    first, same = (done(tmp_path / name, CONFIG)[0] for name in "ab")
    torch.manual_seed(5)
    np.random.seed(5)
    (other,) = done(tmp_path, dataclasses.replace(CONFIG, seed=1))
    assert numbers(first) == numbers(same)
    assert numbers(first) != numbers(other)


def test_returns_are_logged_and_scored_by_episode_and_by_step(tmp_path):
    (result,) = done(tmp_path, dataclasses.replace(CONFIG, steps=27))
    assert result.values["mean_return_of_episodes"] == pytest.approx((55 + 28 + 55) / 3)
    assert result.values["mean_return"] == pytest.approx((550 + 7 * 28 + 550) / 27)
    assert dict(result.metrics["charts/episodic_return"]) == {10: 55.0, 20: 28.0, 30: 55.0}
    assert dict(result.metrics["charts/episodic_length"]) == {10: 10.0, 20: 7.0, 30: 10.0}


@pytest.mark.parametrize("name", [TOY, "CartPole-v1"])
def test_actions_that_are_not_finite_are_divergence(name):
    learning = A2C([dataclasses.replace(CONFIG, env=name, seed=seed) for seed in range(2)])
    with torch.no_grad():
        next(learning.agents[1].parameters()).fill_(math.nan)
    learning.iterate()
    assert learning.envs.diverged_at == [None, 0]
    assert learning.envs.steps == 5
    with torch.no_grad():
        next(learning.agents[0].parameters()).fill_(math.nan)
    learning.iterate()
    assert learning.envs.diverged_at == [5, 0]


def test_divergence_is_a_result_and_counts_as_the_worst(tmp_path):
    fine = [dataclasses.replace(CONFIG, optimizer="adam", seed=seed, env="CartPole-v1", steps=60) for seed in (0, 1)]
    wild = dataclasses.replace(fine[0], step_size=1e38)
    results = done(tmp_path, *fine, wild)
    assert results[2].values["diverged_at"] < 60
    (section,) = rl.sections(results)
    table, plot = section.items
    scores = {row[2]: row[3] for row in table.rows}
    worst = min(result.values["mean_return"] for result in results if result.values["mean_return"] is not None)
    assert scores["1e38"] == f"{worst:.1f}"
    assert [row[5] for row in table.rows] == ["0 of 2", "1 of 1"]
    assert [series.label for series in plot.series] == ["Adam, α = 0.001"]


def test_sections_show_each_environment_and_algorithm(tmp_path):
    settings = rl.Settings(algo="a2c,ppo", env=f"{TOY},CartPole-v1", optimizer="adam,adahesscale", steps=64, backend="eager")
    configs = rl.tasks(settings)
    assert len(configs) == 16
    found = rl.sections(done(tmp_path, *configs))
    assert [section.title for section in found] == ["A2C, paper protocol", "PPO, paper protocol"]
    names = [item.name for section in found for item in section.items]
    assert len(set(names)) == len(names) == 6
    assert names[3:5] == ["returns-ppo", "return-ppo-CartPole-v1"]
    for item in itertools.chain(*[section.items for section in found]):
        check(item)
    assert [len(item.series) for item in found[0].items[1:]] == [2, 2]


def test_optimizers_are_compared_over_all_environments():
    def result(env, optimizer, seed, value):
        config = dataclasses.replace(CONFIG, env=env, optimizer=optimizer, seed=seed)
        values = {"diverged_at": None, "mean_return": value, "steps_per_second": None}
        return Result(config, values, {}, {})

    results = [
        *[result("a", "adam", seed, 0.0) for seed in (0, 1)],
        *[result("a", "adahesscale", seed, 10.0) for seed in (0, 1)],
        *[result("b", "adam", seed, 300.0) for seed in (0, 1)],
        *[result("b", "adahesscale", seed, 300.0 + 50 * seed) for seed in (0, 1)],
    ]
    (section,) = rl.sections(results)
    assert section.items[1].rows == [
        ["Adam", "0.001", "0.00 [0.00, 0.00]"],
        ["AdaHesScale", "0.001", section.items[1].rows[1][2]],
    ]
    assert section.items[1].rows[1][2].startswith("1.00 [")  # of 0, 1, 1 and 2, the middle two
    over_all, first, second = section.findings
    assert over_all.text.startswith(
        "A2C: interquartile mean of the scores over 2 environments, at one step size for all of them: "
    )
    expected = (
        "A2C on a: AdaHesScale has the highest mean return, 10.0 ± 0.0 at step size 0.001; Adam has 0.0 ± 0.0 at step size 0.001."
    )
    assert (first.text, first.figure) == (expected, "return-a2c-a")
    assert second.text.endswith("The difference is within 2 standard errors.")
    longer = [dataclasses.replace(r, task=dataclasses.replace(r.task, env="a", steps=80)) for r in results[4:]]
    elsewhere = [dataclasses.replace(r, task=dataclasses.replace(r.task, step_size=0.5)) for r in results[4:]]
    for others in ([], longer, elsewhere):  # nothing that several environments have
        assert "overall-a2c" not in [item.name for item in rl.sections([*results[:4], *others])[0].items]


def test_curves_hold_the_last_return_of_a_seed():
    def result(points, diverged_at=None):
        return Result(CONFIG, {"diverged_at": diverged_at}, {"charts/episodic_return": points}, {})

    found = averaged([result([(10, 1.0), (30, 5.0)]), result([(20, 3.0), (30, 7.0)], diverged_at=30)], -1.0)
    assert {step: at.mean for step, at in found.items()} == {20: 2.0, 30: 2.0}


def test_truncated_episodes_bootstrap_or_count_as_terminated():
    """Episodes of ten and seven steps with rewards 1 and values 0.5 everywhere; the second one terminates."""
    ended, terminated = np.zeros((2, 1, 20), bool)
    ended[0, [9, 16]], terminated[0, 16] = True, True
    ones = np.ones((1, 20), np.float32)
    rollout = Rollout(np.zeros((1, 20, 1)), np.zeros((1, 20, 2)), ones, np.zeros((1, 20, 1)), terminated, ended)
    for truncation, expected in (("bootstrap", 1 + 0.99 * 0.5), ("terminate", 1.0)):
        over = rollout.is_over(truncation)
        returns = n_step_returns(ones, ones / 2, over, ended, 0.99)
        assert returns[0, 9] == pytest.approx(expected)
        assert returns[0, 16] == 1
        assert gae(ones, ones / 2, ones / 2, over, ended, 0.99, 0.95)[0, 9] == pytest.approx(expected - 0.5)
    learning = [A2C([dataclasses.replace(CONFIG, truncation=truncation)]) for truncation in ("bootstrap", "terminate")]
    for each in learning:
        each.iterate()
        each.iterate()  # up to a truncation
    assert learning[0].batch[3][0, -1] != learning[1].batch[3][0, -1]


def test_videos_are_made_once_for_seed_0(tmp_path, monkeypatch):
    from hesscale.experiments.rl import evaluate

    def film(policy, path):
        if policy.config.step_size == 1.0:
            raise NonFiniteError("it has diverged")
        path.touch()
        return [evaluate.Episode(1.0, 2)]

    monkeypatch.setattr(evaluate, "film", film)
    configs = [dataclasses.replace(CONFIG, seed=seed) for seed in range(2)]
    configs.append(dataclasses.replace(CONFIG, step_size=1.0))
    done(tmp_path, *configs)
    directories = {config: Store(tmp_path).directory("rl", as_task(config)) for config in configs}
    assert list(rl.film(rl.Settings(), directories)) == []
    line, other = rl.film(rl.Settings(video=True), directories)
    assert other == f"no video of a2c on {TOY} with adahesscale: it has diverged"
    assert line == f"{directories[configs[0]] / 'video.mp4'}: a2c on {TOY} with adahesscale, a return of 1.0"
    assert list(rl.film(rl.Settings(video=True), directories)) == [other]


def test_cleanrl_shares_sigma_clips_gradients_and_anneals_the_step_size(monkeypatch):
    norms = []
    step = CurvatureOptimizer.step_once

    def watched(optimizer, closure=None):
        norms.append(float(torch.stack([p.grad.norm() for p in optimizer.parameters()]).norm()))
        return step(optimizer, closure)

    monkeypatch.setattr(CurvatureOptimizer, "step_once", watched)
    learning = A2C([dataclasses.replace(CONFIG, protocol="cleanrl", steps=20)])
    assert [p.shape for p in learning.agents[0].variance.parameters()] == [(2,)]
    sizes = []
    for _ in range(4):
        learning.iterate()
        sizes += {group["lr"] for group in learning.optimizers[0].param_groups}
    assert sizes == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert max(norms) == pytest.approx(0.5, rel=1e-3)  # gradients of the first rewards are large


@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_gradients_are_clipped_as_torch_clips_them(size):
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(1))]
    for p in weights[:2]:
        p.grad = size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.dim()))
    expected = [p.grad.clone() for p in weights[:2]]
    clip_gradients(torch.optim.SGD(weights))
    found = [p.grad for p in weights[:2]]
    for p, gradient in zip(weights, expected, strict=False):
        p.grad = gradient
    torch.nn.utils.clip_grad_norm_(weights, 0.5)
    torch.testing.assert_close(found, [p.grad for p in weights[:2]])
    assert weights[2].grad is None


def test_each_part_of_cleanrl_can_be_used_alone():
    def learning(protocol):
        return PPO([dataclasses.replace(CONFIG, algo="ppo", protocol=protocol, rollout=8, minibatches=2, epochs=1)])

    def loss(part):
        """The loss of a batch with values far from those of the rollout, whose difference is clipped."""
        agent, rows, ones = Gaussian(1, 2, orthogonal=False, shared=False), torch.ones(4, 1), torch.ones(4)
        batch = rows, torch.ones(4, 2), ones, ones, ones, 9 * ones
        return float(learning(f"paper{part}").loss(agent, *batch).detach())

    assert [p.shape for p in learning("paper+sigma").agents[0].variance.parameters()] == [(2,)]
    assert len([*learning("cleanrl-sigma").agents[0].variance.parameters()]) == 4
    assert [learning(protocol).envs.reset_returns for protocol in ("paper", "paper+rewards")] == [True, False]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = loss("")
        torch.manual_seed(0)
        assert loss("+values") > plain
    (paper,), (cleanrl,), (mixed,) = (
        {task.truncation for task in rl.tasks(rl.Settings(**given))}
        for given in ({}, {"protocol": "cleanrl-values"}, {"protocol": "cleanrl", "truncation": "bootstrap"})
    )
    assert (paper, cleanrl, mixed) == ("bootstrap", "terminate", "bootstrap")


@pytest.mark.parametrize("name", PACKAGES)
def test_optimizers_of_other_packages_make_their_own_steps(name):
    module, kind, _ = PACKAGES[name]
    package = pytest.importorskip(module)
    learning = A2C([dataclasses.replace(CONFIG, optimizer=name, step_size=1.0)])
    (agent,) = learning.agents
    twin = copy.deepcopy(agent)
    own = getattr(package, kind)(twin.parameters(), lr=1.0)
    for _ in range(3):
        learning.iterate()
        if name == "schedule-free":
            own.train()
        own.zero_grad()
        learning.loss(twin, *[tensor[0] for tensor in learning.batch]).backward()
        own.step()
    torch.testing.assert_close(list(agent.parameters()), list(twin.parameters()))
    assert not learning.trust_metrics(0)
    before = copy.deepcopy(agent.state_dict())
    final = learning.final_policy(0)["agent"]
    torch.testing.assert_close(agent.state_dict(), before)
    if name == "schedule-free":
        own.eval()
    torch.testing.assert_close(final, twin.state_dict())


def test_steps_of_another_package_that_are_not_finite_are_counted():
    pytest.importorskip("prodigyopt")
    learning = A2C([dataclasses.replace(CONFIG, optimizer="prodigy", step_size=1.0, seed=seed) for seed in range(2)])
    learning.agents[1].critic[0].weight.data.fill_(math.nan)
    learning.iterate()
    assert [optimizer.nonfinite_steps for optimizer in learning.optimizers] == [0, 1]
    assert learning.envs.diverged_at == [None, 5]
    learning.iterate()
    assert [optimizer.nonfinite_steps for optimizer in learning.optimizers] == [0, 1]


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(PACKAGES, "dog", ("no_such_module", "DoG", "dog-optimizer"))
    with pytest.raises(ModuleNotFoundError, match=r"the optimizer dog needs dog-optimizer: pip install .*\[experiments\]"):
        A2C([dataclasses.replace(CONFIG, optimizer="dog")])


def test_discrete_actions_start_where_the_environment_counts_from():
    name = register("hesscale-test/Choice-v0", actions=gymnasium.spaces.Discrete(3, start=5))
    VectorEnv(name, [0]).collect(Fixed(2), 1)
    assert Toy.given == 7


# --------------------------------------------------------------------------------------------------------------------- errors


def test_unknown_names_are_refused_with_close_ones():
    for settings, message in (
        (rl.Settings(env="cartpole-v1"), "no environment is called 'cartpole-v1'; similar names are CartPole-v1"),
        (rl.Settings(env="zzzz"), "no environment is called 'zzzz'; gymnasium.pprint_registry"),
        (rl.Settings(algo="dqn"), "no algorithm is called 'dqn'; there are a2c, ppo"),
        (rl.Settings(optimizer="sgd"), "no optimizer is called 'sgd'"),
        (rl.Settings(protocol="mine"), "protocol must be paper or cleanrl, .* it is 'mine'"),
        (rl.Settings(protocol="paper+sigmas"), "a part: sigma, gradients, anneal, values, rewards"),
        (rl.Settings(step_size="x"), "a number, not 'x'"),
        (rl.Settings(optimizer="@1e-3"), "'@1e-3' must be a name, or name@step_size"),
        (rl.Settings(optimizer="adam@"), "'adam@' must be a name, or name@step_size"),
        (rl.Settings(env=","), "env names no environment"),
        (rl.Settings(steps=0), "steps must be at least 1, not 0"),
        (rl.Settings(eps=-1.0), "eps must be at least 0, not -1.0"),
        (rl.Settings(truncation="ignore"), "truncation='ignore' is not one of auto, bootstrap, terminate"),
        (rl.Settings(protocol="cleanrl", half_value_loss=True), "half_value_loss applies to the paper's value loss only"),
    ):
        with pytest.raises(ValueError, match=message):
            rl.tasks(settings)


def test_an_optimizer_may_have_a_step_size_of_its_own():
    asked = rl.tasks(rl.Settings(optimizer="adam,adahesscale@1e-4", step_size="3e-4,1e-3", seeds=1))
    assert [(task.optimizer, task.step_size) for task in asked] == [("adam", 3e-4), ("adam", 1e-3), ("adahesscale", 1e-4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"actions": gymnasium.spaces.MultiDiscrete([2, 2])},
            "has actions of MultiDiscrete, but policies exist for Box and Discrete only",
        ),
        ({"observations": gymnasium.spaces.Dict({})}, "has observations of Dict, but the networks here need a Box"),
    ],
)
def test_unsupported_spaces_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        A2C([dataclasses.replace(CONFIG, env=register("hesscale-test/Odd-v0", **options))])


def test_a_policy_of_the_wrong_kind_is_refused():
    with pytest.raises(ValueError, match="policy='gaussian' does not suit the discrete actions of CartPole-v1"):
        A2C([dataclasses.replace(CONFIG, env="CartPole-v1", policy="gaussian")])
    with pytest.raises(ValueError, match="policy='categorical' does not suit the continuous actions"):
        PPO([dataclasses.replace(CONFIG, policy="categorical")])


def test_rewards_and_observations_that_are_not_finite_are_errors():
    with pytest.raises(ValueError, match="hesscale-test/NaN-v0 gave a reward of nan at step 0"):
        A2C([dataclasses.replace(CONFIG, env=register("hesscale-test/NaN-v0", reward=math.nan))]).iterate()
    with pytest.raises(ValueError, match="Inf-v0 gave an observation that is not finite at step 1"):
        A2C([dataclasses.replace(CONFIG, env=register("hesscale-test/Inf-v0", extra=itertools.repeat(math.inf)))]).iterate()


def test_environments_that_cannot_be_saved_or_copied_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "CHECKPOINT_SECONDS", -1.0)
    name = register("hesscale-test/Generator-v0", extra=Unpicklable())
    with pytest.warns(UserWarning, match=r"Generator-v0 cannot be saved .*. If this run is interrupted, it will start again"):
        done(tmp_path, dataclasses.replace(CONFIG, env=name))
    name = register("hesscale-test/Shared-v0", extra=Everyone())
    with pytest.warns(UserWarning, match="a copy of hesscale-test/Shared-v0 does not continue as the original does"):
        done(tmp_path, dataclasses.replace(CONFIG, env=name))


class Unpicklable:
    def __next__(self):
        return 0.0

    def __reduce__(self):
        raise TypeError("no")

    def __deepcopy__(self, memo):
        return self


class Everyone:
    """Noise that all copies share."""

    draws = itertools.count()

    def __next__(self):
        return float(next(self.draws))


@pytest.mark.parametrize("count", [1, 2])
def test_untrained_agents_keep_their_weights(count):
    config = Config("a2c", "CartPole-v1", "untrained", step_size=1.0, seed=0, steps=20, backend="eager")
    learning = A2C([dataclasses.replace(config, seed=seed) for seed in range(count)])
    before = [p.detach().clone() for agent in learning.agents for p in agent.parameters()]
    for _ in range(3):
        learning.iterate()
    after = [p for agent in learning.agents for p in agent.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_entropy_bonus_is_that_of_the_policy():
    observations = torch.randn(5, 3)
    agent = Gaussian(3, 2, orthogonal=False, shared=False)
    mean, variance = agent(observations)
    expected = D.Independent(D.Normal(mean, variance.sqrt()), 1).entropy().mean()
    torch.testing.assert_close(agent.entropy(observations), expected)
    shared = Gaussian(3, 2, orthogonal=False, shared=True)
    torch.testing.assert_close(shared.entropy(observations), D.Normal(0.0, 1.0).entropy() * 2)
    discrete = Categorical(3, 4, orthogonal=False)
    expected = D.Categorical(logits=discrete.logits(observations)).entropy().mean()
    torch.testing.assert_close(discrete.entropy(observations), expected)


@pytest.mark.parametrize("algorithm", [A2C, PPO])
@pytest.mark.parametrize("protocol", ["paper", "cleanrl"])
def test_the_entropy_bonus_is_part_of_the_loss(algorithm, protocol):
    config = dataclasses.replace(CONFIG, algo=algorithm.__name__.lower(), protocol=protocol, rollout=8, minibatches=2, epochs=1)
    plain, rewarded = (algorithm([dataclasses.replace(config, entropy=bonus)]) for bonus in (0.0, 0.3))
    plain.iterate()
    batch = [tensor[0] for tensor in plain.batch]
    difference = plain.loss(plain.agents[0], *batch) - rewarded.loss(plain.agents[0], *batch)
    torch.testing.assert_close(difference, 0.3 * plain.agents[0].entropy(batch[0]), rtol=1e-4, atol=1e-6)


def test_ppo_takes_as_many_steps_as_its_options_say(monkeypatch):
    config = dataclasses.replace(CONFIG, algo="ppo", rollout=12, epochs=3, minibatches=4, width=5, gamma=0.9, gae_lambda=0.8)
    learning = PPO([config])
    sizes = []
    monkeypatch.setattr(learning, "update", lambda *batch: sizes.append(len(batch[0][0])))
    learning.iterate(is_logged=False)
    assert sizes == [3] * 12
    assert learning.envs.steps == 12
    assert learning.envs.gamma == 0.9
    assert learning.agents[0].critic[0].out_features == 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"width": 0}, "width must be at least 1, not 0"),
        ({"entropy": -1.0}, "entropy must be at least 0, not -1.0"),
        ({"gamma": 1.5}, "gamma must be between 0 and 1, not 1.5"),
        ({"clip": 0.0}, "clip must be between 0 and 1, not 0.0"),
        ({"rollout": 100, "minibatches": 8}, "rollout=100 is not a multiple of minibatches=8"),
    ],
)
def test_options_out_of_range_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        rl.tasks(rl.Settings(**changed))


def test_a2c_runs_do_not_depend_on_options_of_ppo():
    asked = rl.tasks(rl.Settings(algo="a2c,ppo", optimizer="adam", seeds=1, clip=0.1, epochs=4, gamma=0.95))
    assert [(task.algo, task.clip, task.epochs, task.gamma) for task in asked] == [("a2c", 0.2, 0, 0.95), ("ppo", 0.1, 4, 0.95)]
