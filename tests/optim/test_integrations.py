"""Unmodified training loops of other libraries. Each test runs if its library is installed."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscale

if torch.get_default_device().type != "cpu":
    pytest.skip("these libraries choose their device themselves", allow_module_level=True)

os.environ["HF_HUB_OFFLINE"] = "1"
ORIGINAL = torch.autograd.backward
ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
NO_LIMIT = 1e30  # a trust radius that never shortens a step, but needs the curvature to know


@pytest.fixture(autouse=True)
def _undone():
    yield
    assert torch.autograd.backward is ORIGINAL


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def copies(module):
    return [p.detach().clone() for p in module.parameters()]


def assert_equal(tensors, others, **tolerance):
    torch.testing.assert_close(list(tensors), list(others), **(tolerance or {"rtol": 0, "atol": 0}))


def assert_trained(module, before, optimizer, steps=None):
    """Parameters moved and are finite, and curvature, of most of them not zero, reached the average at every step."""
    after = copies(module)
    assert all(p.isfinite().all() for p in after)
    assert any(not torch.equal(p, q) for p, q in zip(after, before, strict=True))
    states = list(optimizer.state.values())
    assert len(states) == len(optimizer.parameters())
    assert sum(bool(state["exp_hess_sq"].any()) for state in states) > len(states) / 2
    assert all(state["curvature_step"] == state["step"] for state in states)
    if steps is not None:
        assert optimizer.param_groups[0]["step_count"] == steps


# --- Stable-Baselines3 ---

AGENTS = {
    "PPO": ("CartPole-v1", {"n_steps": 64, "batch_size": 32, "n_epochs": 2}, 128),
    "A2C": ("CartPole-v1", {}, 40),
    "DQN": ("CartPole-v1", {"learning_starts": 40, "learning_rate": 1e-4}, 80),
    "SAC": ("Pendulum-v1", {"learning_starts": 20}, 40),
    "TD3": ("Pendulum-v1", {"learning_starts": 20}, 40),
}


def make_agent(name, optimizer, changes=None, **options):
    sb3 = pytest.importorskip("stable_baselines3")
    gym = pytest.importorskip("gymnasium")
    env, settings, steps = AGENTS[name]
    kwargs = {"net_arch": [16, 16], "optimizer_class": optimizer, "optimizer_kwargs": options}
    agent = getattr(sb3, name)(
        "MlpPolicy", gym.make(env), policy_kwargs=kwargs, seed=0, device="cpu", **(settings | (changes or {}))
    )
    return agent, steps


def rewards_normalized(env):
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    return VecNormalize(make_vec_env(env))


def parts_of(agent):
    """The networks whose optimizer can be chosen."""
    return [agent.actor, agent.critic] if hasattr(agent, "actor") else [agent.policy]


def learn(agent, steps, **options):
    with hesscale.capture(*[part.optimizer for part in parts_of(agent)]):
        agent.learn(steps, **options)


@pytest.mark.parametrize("name", AGENTS)
def test_stable_baselines3_trains_saves_loads_and_goes_on(name, tmp_path):
    gym = pytest.importorskip("gymnasium")
    agent, steps = make_agent(name, hesscale.AdaHesScale, eps=1e-5, trust_radius=1e-3)
    before = [copies(part) for part in parts_of(agent)]
    learn(agent, steps)
    for part, start in zip(parts_of(agent), before, strict=True):
        assert_trained(part, start, part.optimizer)

    agent.save(tmp_path / "agent")
    loaded = type(agent).load(tmp_path / "agent", env=gym.make(AGENTS[name][0]), device="cpu")
    for part, other in zip(parts_of(agent), parts_of(loaded), strict=True):
        assert type(other.optimizer) is hesscale.AdaHesScale
        ours, theirs = part.optimizer.state_dict(), other.optimizer.state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for key, state in ours["state"].items():
            assert_equal(state.values(), theirs["state"][key].values())

    before = [copies(part) for part in parts_of(loaded)]
    count = [part.optimizer.param_groups[0]["step_count"] for part in parts_of(loaded)]
    learn(loaded, steps, reset_num_timesteps=False)
    for part, start, steps_before in zip(parts_of(loaded), before, count, strict=True):
        assert_trained(part, start, part.optimizer)
        assert part.optimizer.param_groups[0]["step_count"] > steps_before


@pytest.mark.parametrize("name", AGENTS)
def test_stable_baselines3_gets_the_gradients_it_always_got(name):
    """With a trust region that never binds, Adam in the block is torch's Adam without it.

    A large eps and no clipping, since Adam and clipping would both hide a gradient that is off by a factor.
    """
    changes = {"learning_rate": 1e-2} | ({} if name in ("SAC", "TD3") else {"max_grad_norm": 1e9})
    agent, steps = make_agent(name, hesscale.Adam, changes, eps=0.1, trust_radius=NO_LIMIT)
    learn(agent, steps)
    reference, _ = make_agent(name, torch.optim.Adam, changes, eps=0.1)
    reference.learn(steps)
    for part, other in zip(parts_of(agent), parts_of(reference), strict=True):
        assert any(bool(state["exp_hess_sq"].any()) for state in part.optimizer.state.values())
        assert_equal(part.parameters(), other.parameters(), rtol=1e-4, atol=1e-5)


def test_stable_baselines3_without_the_block_says_what_to_do():
    agent, steps = make_agent("A2C", hesscale.AdaHesScale)
    with pytest.raises(RuntimeError, match=r"with hesscale\.capture\(optimizer\)"):
        agent.learn(steps)


@pytest.mark.parametrize("name", AGENTS)
def test_with_curvature_is_the_optimizer_and_the_block(name, tmp_path):
    """Also after it was saved and loaded, and with a step size that falls."""
    sb3 = pytest.importorskip("stable_baselines3")
    gym = pytest.importorskip("gymnasium")
    env, settings, steps = AGENTS[name]
    options, settings = {"eps": 1e-5}, settings | {"learning_rate": lambda left: 1e-4 * left}
    reference, _ = make_agent(name, hesscale.AdaHesScale, settings, **options)
    learn(reference, steps)
    algorithm = hesscale.sb3.with_curvature(getattr(sb3, name), hesscale.AdaHesScale, **options)
    agent = algorithm("MlpPolicy", gym.make(env), policy_kwargs={"net_arch": [16, 16]}, seed=0, device="cpu", **settings)
    agent.learn(steps)
    for part, other in zip(parts_of(agent), parts_of(reference), strict=True):
        assert_equal(part.parameters(), other.parameters())

    agent.save(tmp_path / "agent")
    loaded = algorithm.load(tmp_path / "agent", env=gym.make(env), device="cpu")
    loaded.set_parameters(agent.get_parameters())
    before = [copies(part) for part in parts_of(loaded)]
    loaded.learn(steps, reset_num_timesteps=False)
    for part, start in zip(parts_of(loaded), before, strict=True):
        assert_trained(part, start, part.optimizer)


@pytest.mark.parametrize("name", ["PPO", "A2C"])
def test_policy_and_value_function_have_a_trust_region_each(name, tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    env, settings, steps = AGENTS[name]
    algorithm = hesscale.sb3.with_curvature(getattr(sb3, name), hesscale.AdaHesScale, trust_radius=1e-6, trust_region="group")
    agent = algorithm("MlpPolicy", rewards_normalized(env), seed=0, device="cpu", **settings)
    names = {id(p): name for name, p in agent.policy.named_parameters()}
    actor, critic = ({names[id(p)] for p in group["params"]} for group in agent.policy.optimizer.param_groups)
    assert {name for name in critic if "value_net" not in name} == {name for name in actor if "value_net" in name} == set()
    assert len(actor) + len(critic) == len(names)
    agent.learn(steps)
    assert len(agent.policy.optimizer.eta) == 2
    agent.save(tmp_path / "agent")
    loaded = algorithm.load(tmp_path / "agent", env=rewards_normalized(env), device="cpu")
    assert [len(group["params"]) for group in loaded.policy.optimizer.param_groups] == [len(actor), len(critic)]
    assert_equal(loaded.policy.parameters(), agent.policy.parameters())
    loaded.learn(steps, reset_num_timesteps=False)


@pytest.mark.parametrize("optimizer", [hesscale.Adam, hesscale.AdaHesScale, hesscale.AdaHesScale.paper])
@pytest.mark.parametrize("name", AGENTS)
def test_a_trust_region_needs_no_step_size(name, optimizer, tmp_path):
    """Its step size is 1 and gradients are not clipped, unless the caller says otherwise."""
    sb3 = pytest.importorskip("stable_baselines3")
    env, settings, steps = AGENTS[name]
    env = rewards_normalized(env)
    algorithm = hesscale.sb3.with_curvature(getattr(sb3, name), optimizer, trust_radius=1e-6)
    settings = {key: value for key, value in settings.items() if key != "learning_rate"}
    agent = algorithm("MlpPolicy", env, seed=0, device="cpu", **settings)
    assert agent.learning_rate == 1
    assert getattr(agent, "max_grad_norm", math.inf) == math.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error", hesscale.CurvatureWarning)
        agent.learn(steps)
    agent.save(tmp_path / "agent")
    loaded = algorithm.load(tmp_path / "agent", env=env, device="cpu")
    assert loaded.learning_rate == 1
    assert getattr(loaded, "max_grad_norm", math.inf) == math.inf
    for part, other in zip(parts_of(loaded), parts_of(agent), strict=True):
        assert part.optimizer.param_groups[0]["trust_radius"] == 1e-6
        assert part.optimizer.param_groups[0]["graft"] == other.optimizer.param_groups[0]["graft"]
    assert algorithm("MlpPolicy", env, 0.5, device="cpu").learning_rate == 0.5
    if name in ("PPO", "A2C", "DQN"):
        assert algorithm("MlpPolicy", env, max_grad_norm=2.0, device="cpu").max_grad_norm == 2


@pytest.mark.parametrize("names_an_option", [False, True])
def test_a_trust_region_needs_no_step_size_in_a_class_of_ones_own(names_an_option):
    """It hides the parameters of PPO, or some of them, behind its own."""
    sb3 = pytest.importorskip("stable_baselines3")

    class Other(sb3.PPO):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    class Clipped(sb3.PPO):
        def __init__(self, policy, env, max_grad_norm=0.5, **kwargs):
            super().__init__(policy, env, max_grad_norm=max_grad_norm, **kwargs)

    algorithm = hesscale.sb3.with_curvature(Clipped if names_an_option else Other, hesscale.AdaHesScale, trust_radius=1e-6)
    small = {"n_steps": 64, "device": "cpu"}
    agent = algorithm("MlpPolicy", "CartPole-v1", **small)
    assert (agent.learning_rate, agent.max_grad_norm) == (1, math.inf)
    agent = algorithm("MlpPolicy", "CartPole-v1", learning_rate=0.5, max_grad_norm=2.0, **small)
    assert (agent.learning_rate, agent.max_grad_norm) == (0.5, 2)
    agent = algorithm("MlpPolicy", "CartPole-v1", 0.25, **small)
    assert (agent.learning_rate, agent.max_grad_norm) == ((1, 0.25) if names_an_option else (0.25, math.inf))


def test_the_options_of_an_agent_decide_whether_it_has_a_trust_region():
    sb3 = pytest.importorskip("stable_baselines3")
    region, none = {"optimizer_kwargs": {"trust_radius": 1e-6}}, {"optimizer_kwargs": {}}
    with_region = hesscale.sb3.with_curvature(sb3.A2C, hesscale.AdaHesScale, trust_radius=1e-6)
    without = hesscale.sb3.with_curvature(sb3.A2C, hesscale.AdaHesScale)
    assert without("MlpPolicy", "CartPole-v1", policy_kwargs=region, device="cpu").learning_rate == 1
    agent = with_region("MlpPolicy", "CartPole-v1", policy_kwargs=none, device="cpu")
    assert (agent.learning_rate, agent.max_grad_norm) == (7e-4, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", hesscale.CurvatureWarning)
        agent.learn(5)


@pytest.mark.parametrize("options", [{}, {"trust_radius": 1e-6}])
def test_the_temperature_does_not_take_the_step_size_of_a_trust_region(options, tmp_path):
    sb3 = pytest.importorskip("stable_baselines3")
    env, settings, steps = AGENTS["SAC"]
    env = rewards_normalized(env)
    algorithm = hesscale.sb3.with_curvature(sb3.SAC, hesscale.AdaHesScale, **options)
    agent = algorithm("MlpPolicy", env, learning_rate=lambda left: 1e-4 * (1 + left), device="cpu", **settings)
    agent.learn(steps)
    agent.save(tmp_path / "agent")
    loaded = algorithm.load(tmp_path / "agent", env=env, device="cpu")
    loaded.learn(steps, reset_num_timesteps=False)
    for each in (agent, loaded):
        step_size = each.critic.optimizer.param_groups[0]["lr"]
        assert 1e-4 <= step_size <= 2e-4
        assert each.ent_coef_optimizer.param_groups[0]["lr"] == (3e-4 if options else step_size)


def test_a_trust_radius_for_raw_rewards_draws_a_warning():
    sb3 = pytest.importorskip("stable_baselines3")
    algorithm = hesscale.sb3.with_curvature(sb3.A2C, hesscale.AdaHesScale, trust_radius=1e-6)
    agent = algorithm("MlpPolicy", "CartPole-v1", device="cpu")
    with pytest.warns(hesscale.CurvatureWarning, match="VecNormalize"):
        agent.learn(5)


def test_with_curvature_refuses_what_it_cannot_use():
    sb3 = pytest.importorskip("stable_baselines3")
    with pytest.raises(TypeError, match=r"not <class 'torch\.optim\.adam\.Adam'>"):
        hesscale.sb3.with_curvature(sb3.PPO, torch.optim.Adam)
    with pytest.raises(TypeError, match="Create the agent from the class that it returns"):
        hesscale.sb3.with_curvature(make_agent("A2C", torch.optim.Adam)[0], hesscale.AdaHesScale)
    with pytest.raises(TypeError, match="pass learning_rate to the algorithm"):
        hesscale.sb3.with_curvature(sb3.PPO, hesscale.AdaHesScale, lr=1e-3)


@pytest.mark.slow
def test_stable_baselines3_ppo_learns_cartpole():
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.evaluation import evaluate_policy

    kwargs = {"optimizer_class": hesscale.AdaHesScale, "optimizer_kwargs": {"eps": 1e-8}}
    agent = sb3.PPO("MlpPolicy", "CartPole-v1", learning_rate=1e-4, n_steps=512, policy_kwargs=kwargs, seed=1, device="cpu")
    before, _ = evaluate_policy(agent, agent.get_env(), n_eval_episodes=10, warn=False)
    learn(agent, 8192)
    after, _ = evaluate_policy(agent, agent.get_env(), n_eval_episodes=10, warn=False)
    assert before < 50
    assert after > 150


# --- a script of one file ---


@pytest.mark.usefixtures("examples")
def test_one_file_ppo_gets_the_same_curvature_from_either_loss():
    pytest.importorskip("gymnasium")
    from cleanrl_style_ppo import Agent, Options, Rollouts, plain_ppo_loss, ppo_loss

    torch.manual_seed(0)
    options = Options(num_envs=2, rollout=16)
    agent = Agent(4, 2)
    batch = Rollouts(options).play(agent)
    with torch.no_grad():  # a policy that has moved on, so that some ratios are clipped
        for p in agent.parameters():
            p += 0.3 * torch.randn_like(p)
    agent.double()
    batch = {key: t.double() if t.is_floating_point() else t for key, t in batch.items()}
    params = list(agent.parameters())
    fast, plain = (hesscale.grad(loss(agent, batch, options), params) for loss in (ppo_loss, plain_ppo_loss))
    for ours, theirs in zip(fast, plain, strict=True):
        assert_equal(ours, theirs, rtol=1e-8, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
def test_one_file_ppo_learns_cartpole():
    pytest.importorskip("gymnasium")
    from cleanrl_style_ppo import Options, train

    returns = train(Options())
    tenth = len(returns) // 10
    assert sum(returns[-tenth:]) > 2 * sum(returns[:tenth])


# --- Lightning ---


def make_trainer(folder, **options):
    lightning = pytest.importorskip("lightning")
    from lightning_digits import CaptureCurvature

    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"enable_checkpointing": False} | options
    return lightning.Trainer(callbacks=[CaptureCurvature()], default_root_dir=folder, **quiet, **options)


def make_digits(optimizer, **options):
    pytest.importorskip("lightning")
    from lightning_digits import Digits, digits

    class Chosen(Digits):
        def configure_optimizers(self):
            return optimizer(self.parameters(), lr=1e-3, **options)

    torch.manual_seed(0)
    return Chosen(), torch.utils.data.DataLoader(digits(), batch_size=64)


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 10), ({"gradient_clip_val": 0.1}, 10), ({"accumulate_grad_batches": 2}, 5), ({"precision": "bf16-mixed"}, 10)],
)
def test_lightning_trains(options, steps, tmp_path):
    module, loader = make_digits(hesscale.AdaHesScale, trust_radius=1e-3)
    before = copies(module)
    trainer = make_trainer(tmp_path, max_epochs=1, limit_train_batches=10, **options)
    trainer.fit(module, loader)
    assert_trained(module, before, trainer.optimizers[0], steps)


@pytest.mark.usefixtures("examples")
def test_lightning_gets_the_gradients_it_always_got(tmp_path):
    modules = []
    for optimizer, options in ((hesscale.Adam, {"eps": 0.1, "trust_radius": NO_LIMIT}), (torch.optim.Adam, {"eps": 0.1})):
        module, loader = make_digits(optimizer, **options)
        trainer = make_trainer(tmp_path, max_epochs=1, limit_train_batches=10)
        if optimizer is torch.optim.Adam:
            trainer.callbacks.clear()
        trainer.fit(module, loader)
        modules.append(module)
    assert_equal(*(module.parameters() for module in modules), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("examples")
def test_lightning_resumes_where_it_stopped(tmp_path):
    whole, loader = make_digits(hesscale.AdaHesScale)
    make_trainer(tmp_path, max_epochs=2, limit_train_batches=5).fit(whole, loader)
    half, _ = make_digits(hesscale.AdaHesScale)
    trainer = make_trainer(tmp_path, max_epochs=1, limit_train_batches=5)
    trainer.fit(half, loader)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = make_digits(hesscale.AdaHesScale)
    make_trainer(tmp_path, max_epochs=2, limit_train_batches=5).fit(rest, loader, ckpt_path=tmp_path / "half.ckpt")
    assert_equal(rest.parameters(), whole.parameters(), rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("examples")
def test_lightning_ends_the_block_when_training_fails(tmp_path):
    module, loader = make_digits(hesscale.AdaHesScale)
    module.on_train_batch_start = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, max_epochs=1).fit(module, loader)
    assert torch.autograd.backward is ORIGINAL


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("clip", [None, 0.1])
def test_lightning_with_a_gradient_scaler(clip, tmp_path):
    """The callback hands it on. Lightning lets no optimizer that unscales by itself have its gradients clipped."""
    pytest.importorskip("lightning")
    from lightning.pytorch.plugins import MixedPrecision

    module, loader = make_digits(hesscale.AdaHesScale)
    before = copies(module)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = make_trainer(tmp_path, max_epochs=1, limit_train_batches=5, plugins=[plugin], gradient_clip_val=clip)
    if clip is None:
        trainer.fit(module, loader)
        assert_trained(module, before, trainer.optimizers[0], 5)
    else:
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            trainer.fit(module, loader)


# --- Hugging Face ---


@pytest.fixture
def accelerate_reset():
    """Accelerate keeps its settings for the length of a process."""
    accelerate = pytest.importorskip("accelerate")
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def make_hf_trainer(folder, optimizer=None, attention="sdpa", max_steps=6, **options):
    transformers = pytest.importorskip("transformers")
    from huggingface_trainer import make_model, sentences

    torch.manual_seed(0)
    model = make_model(attention)
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no", "lr_scheduler_type": "constant"}
    settings = {"max_steps": max_steps, "per_device_train_batch_size": 8, "learning_rate": 1e-3} | quiet | options
    optimizer = optimizer or (lambda params: hesscale.AdaHesScale(params, lr=1e-3))
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **settings),
        train_dataset=sentences(64),
        optimizers=(optimizer(model.parameters()), None),
    )


def fit(trainer, **options):
    with hesscale.capture(trainer.optimizer):
        trainer.train(**options)
    return trainer.model


def bare(trainer):
    """The optimizer without Accelerate's wrapper."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


@pytest.mark.usefixtures("examples", "accelerate_reset")
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"max_grad_norm": 0.01}, {"gradient_accumulation_steps": 2}])
def test_hugging_face_trainer_trains(options, tmp_path):
    trainer = make_hf_trainer(tmp_path, **options)
    before = copies(trainer.model)
    fit(trainer)
    assert_trained(trainer.model, before, bare(trainer), 6)


@pytest.mark.usefixtures("examples", "accelerate_reset")
def test_hugging_face_trainer_gets_the_gradients_it_always_got(tmp_path):
    options = {"lr": 1e-2, "eps": 0.1}
    ours = fit(make_hf_trainer(tmp_path, lambda params: hesscale.Adam(params, trust_radius=NO_LIMIT, **options), max_grad_norm=0))
    theirs = make_hf_trainer(tmp_path, lambda params: torch.optim.Adam(params, **options), max_grad_norm=0)
    theirs.train()
    assert_equal(ours.parameters(), theirs.model.parameters(), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("examples", "accelerate_reset")
def test_hugging_face_trainer_resumes_where_it_stopped(tmp_path):
    whole = fit(make_hf_trainer(tmp_path / "whole"))
    saves = {"save_strategy": "steps", "save_steps": 3}
    fit(make_hf_trainer(tmp_path / "parts", max_steps=3, **saves))
    rest = make_hf_trainer(tmp_path / "parts")
    fit(rest, resume_from_checkpoint=str(tmp_path / "parts/checkpoint-3"))
    assert bare(rest).param_groups[0]["step_count"] == 6
    assert_equal(rest.model.parameters(), whole.parameters(), rtol=1e-5, atol=1e-7)


@pytest.mark.usefixtures("examples", "accelerate_reset")
def test_hugging_face_trainer_has_the_same_curvature_from_fused_attention(tmp_path):
    averages = []
    for attention in ("sdpa", "eager"):
        trainer = make_hf_trainer(tmp_path, attention=attention, max_steps=1)
        fit(trainer)
        averages.append(torch.cat([state["exp_hess_sq"].flatten() for state in bare(trainer).state.values()]))
    fused, eager = averages
    assert (fused - eager).norm() < 1e-4 * eager.norm()


@pytest.mark.usefixtures("examples", "accelerate_reset")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_trains(precision):
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from huggingface_trainer import make_model, sentences

    accelerator = accelerate.Accelerator(mixed_precision=precision, cpu=True)
    torch.manual_seed(0)
    model = make_model()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3)
    before = copies(model)
    wrapped_model, wrapped, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(sentences(32), batch_size=8)
    )
    with hesscale.capture(optimizer):
        for batch in loader:
            wrapped.zero_grad()
            accelerator.backward(wrapped_model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            wrapped.step()
    assert_trained(model, before, optimizer, 4)


# --- automatic mixed precision by hand ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_scaler_with_clipping(dtype):
    """Clipping shortens g alone, after the scale is out of both g and the curvature: as in a loop without a scaler."""

    def run(scaler):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-2)
        optimizer.unpack()  # a scaler unpacks too, and packed sums are rounded in another order
        norms = []
        with hesscale.capture(optimizer, scaler=scaler if scaler.is_enabled() else None):
            for _ in range(5):
                x, y = torch.randn(16, 4), torch.randint(3, (16,))
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
                    loss = F.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
                scaler.step(optimizer)
                scaler.update()
        assert all(norm > 0.1 for norm in norms)
        return model

    with_scaler, without = (run(torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=on)) for on in (True, False))
    assert_equal(with_scaler.parameters(), without.parameters(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("optimizer", "radius"), [("AdaHesScale", 1e-7), ("Adam", 0.0)])
def test_ppo_in_one_file_updates_every_network(monkeypatch, optimizer, radius):
    pytest.importorskip("gymnasium")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import ppo_continuous

    options = ppo_continuous.Options(optimizer=optimizer, trust_radius=radius, steps=256, rollout=256, epochs=1, minibatch=128)
    make, seen = ppo_continuous.make_optimizer, []

    def watched(agent, o):
        seen.extend((agent, {name: p.detach().clone() for name, p in agent.named_parameters()}))
        return make(agent, o)

    monkeypatch.setattr(ppo_continuous, "make_optimizer", watched)
    returns = ppo_continuous.train(options)
    agent, before = seen
    assert len(returns) == 1
    assert -2000 < returns[0] < 0
    assert all((p != before[name]).any() for name, p in agent.named_parameters())


# --- the examples and the page that quotes them ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "arguments", "says"),
    [
        ("sb3_ppo.py", ["stable_baselines3"], ["--steps", "1024"], "loaded, after 1536 steps"),
        ("sb3_sac.py", ["stable_baselines3"], ["--steps", "200"], "after 200 steps"),
        ("lightning_digits.py", ["lightning", "sklearn"], ["--epochs", "2"], "after 2 epochs"),
        ("huggingface_trainer.py", ["transformers", "accelerate"], ["--steps", "5"], "after 5 steps"),
        ("accelerate_bert.py", ["transformers", "accelerate"], ["--steps", "5"], "after 5 steps"),
        ("cleanrl_style_ppo.py", ["gymnasium"], ["--steps", "1024"], "mean return"),
        ("ppo_continuous.py", ["gymnasium"], ["--steps", "1024"], "5 episodes, mean return"),
    ],
)
def test_examples_run(script, needs, arguments, says):
    for library in needs:
        pytest.importorskip(library)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, EXAMPLES / script, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


@pytest.mark.parametrize("name", ["integrations", "distributed"])
def test_pages_quote_the_examples(name):
    """Blocks marked ``py`` are lines of a file in examples/, up to their indentation."""
    page = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    sources = [flat(path.read_text(encoding="utf-8")) for path in EXAMPLES.glob("*.py")]
    quotes = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert quotes
    for quote in quotes:
        assert any(flat(quote) in source for source in sources), quote


def flat(code):
    return "\n".join(line.strip() for line in code.strip().splitlines())
