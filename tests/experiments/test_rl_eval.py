"""Evaluation of trained policies, from finished and unfinished runs, with tables and videos."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.empty(0).device.type != "cpu", reason="agents act on the CPU")

gymnasium = pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")

from typer.testing import CliRunner  # noqa: E402

from hesscale.errors import NonFiniteError  # noqa: E402
from hesscale.experiments.cli import app  # noqa: E402
from hesscale.experiments.lab.store import DamagedRun, Store  # noqa: E402
from hesscale.experiments.rl import evaluate as module  # noqa: E402
from hesscale.experiments.rl.a2c import A2C  # noqa: E402
from hesscale.experiments.rl.config import Config  # noqa: E402
from hesscale.experiments.rl.evaluate import choose_gl, evaluate, film, follow, load_policy, save_policy  # noqa: E402
from hesscale.experiments.rl.networks import AgentBatch  # noqa: E402
from hesscale.experiments.rl.ppo import PPO  # noqa: E402
from hesscale.experiments.rl.vector_env import Moments  # noqa: E402

TOY = "hesscale-test/Drift-v0"


class Drift(gymnasium.Env):
    """A point on a plane that actions move. An episode ends when it is far away. Frames are grey and become lighter."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 120}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2, 1), np.float64)

    def __init__(self, is_discrete=False, render_mode=None, can_draw=True):
        self.render_mode, self.can_draw = render_mode, can_draw
        low, high = np.array([-0.5, -1.0], np.float32), np.array([0.1, 1.0], np.float32)
        self.action_space = gymnasium.spaces.Discrete(3, start=5) if is_discrete else gymnasium.spaces.Box(low, high)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = self.np_random.normal(size=(2, 1)), 0
        return self.at, {}

    def step(self, action):
        assert self.action_space.contains(action)
        push = np.array(action, float).reshape(-1)
        self.at, self.t = (
            self.at + (push[:, None] if push.size == 2 else push - 6) + self.np_random.normal(size=(2, 1)),
            self.t + 1,
        )
        return self.at, float(self.at.sum()), bool(abs(self.at).max() > 6), False, {}

    def render(self):
        return np.full((20, 31, 3), min(4 * self.t, 255), np.uint8) if self.can_draw else None


@pytest.fixture(autouse=True)
def toys(monkeypatch):
    """The environment in two kinds, of twenty steps at most, and small rollouts."""
    before = dict(gymnasium.registry)
    torch.set_default_device(None)
    gymnasium.register(TOY, Drift, max_episode_steps=20)
    gymnasium.register("hesscale-test/Choice-v0", Drift, max_episode_steps=20, kwargs={"is_discrete": True})
    gymnasium.register("hesscale-test/Blind-v0", Drift, max_episode_steps=20, kwargs={"can_draw": False})
    for name, value in {"rollout": 32, "minibatches": 4, "epochs": 2}.items():
        monkeypatch.setattr(PPO, name, value)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)
    torch.set_default_device("cpu")


CONFIG = Config("a2c", TOY, "adahesscale", 1e-3, 0, 60, backend="eager")


def learned(**changes):
    """An algorithm that has made some updates."""
    config = dataclasses.replace(CONFIG, **changes)
    learning = (A2C if config.algo == "a2c" else PPO)([config])
    while learning.envs.steps < 60:
        learning.iterate()
    return learning


@pytest.fixture
def path(tmp_path):
    save_policy(tmp_path / "policy.pt", learned().policy(0))
    return tmp_path / "policy.pt"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algo": "ppo"},
        {"env": "hesscale-test/Choice-v0"},
        {"env": "hesscale-test/Choice-v0", "algo": "ppo", "normalize": False},
        {"algo": "ppo", "protocol": "cleanrl"},
    ],
    ids=["a2c", "ppo", "categorical", "raw", "cleanrl"],
)
def test_sampled_episodes_equal_training_with_frozen_statistics(tmp_path, monkeypatch, changes):
    learning = learned(**changes)
    save_policy(tmp_path / "policy.pt", learning.policy(0))
    policy = load_policy(tmp_path)
    assert policy.config == learning.config
    assert policy.steps == learning.envs.steps >= 60
    (found,) = evaluate(policy, 1, seed=7, deterministic=False)

    monkeypatch.setattr(Moments, "update", lambda *_: None)
    envs = learning.make_envs([7])
    envs.seen.load(0, learning.envs.seen.state(0))
    envs.observations[:] = envs.see(slice(None), envs.environments.reset(0, 7)[None])
    while not envs.finished[0]:
        envs.collect(AgentBatch(learning.agents), 1)
    assert envs.finished[0] == [found]


def test_likeliest_actions_are_means_or_the_largest_logits(path, tmp_path):
    policy, env = load_policy(path), gymnasium.make(TOY)
    raw, _ = env.reset(seed=3)
    total, t, ended = 0.0, 0, False
    while not ended:
        seen = (raw.reshape(-1) - policy.mean) / np.sqrt(policy.variance + 1e-8)
        with torch.no_grad():
            action = policy.agent.mean(torch.tensor([*seen.clip(-10, 10), 1 - t / 20], dtype=torch.float32)).numpy()
        raw, reward, terminated, truncated, _ = env.step(action.clip(env.action_space.low, env.action_space.high))
        total, t, ended = total + reward, t + 1, terminated or truncated
    (found,) = evaluate(policy, 1, seed=3)
    assert found.length == t
    assert found.total == pytest.approx(total, rel=1e-4)

    save_policy(tmp_path / "choice" / "policy.pt", learned(algo="ppo", env="hesscale-test/Choice-v0").policy(0))
    policy = load_policy(tmp_path / "choice")
    with torch.no_grad():
        policy.agent.logits[-1].bias += torch.tensor([0.0, 99.0, 0.0])  # 6, which pushes nowhere
    env = gymnasium.make("hesscale-test/Choice-v0")
    env.reset(seed=3)
    first = env.step(6)[1]
    assert module.play(policy, Once(env), 3).total == first


class Once(gymnasium.Wrapper):
    """One step."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, True, info


def test_episodes_have_seeds_one_after_another(path):
    policy = load_policy(path)
    assert evaluate(policy, 3, seed=5)[1:] == evaluate(policy, 2, seed=6)
    assert len(set(evaluate(policy, 3))) == 3
    assert evaluate(policy, 2) != evaluate(policy, 2, deterministic=False)
    assert evaluate(policy, 2, deterministic=False) == evaluate(policy, 2, deterministic=False)


def test_an_unfinished_run_has_its_policy_in_its_checkpoint(tmp_path):
    learning = learned()
    with Store(tmp_path).open("rl", dataclasses.asdict(CONFIG)) as run:
        run.checkpoint({"learning": learning.state(0)})
    save_policy(tmp_path / "policy.pt", learning.policy(0))
    assert evaluate(load_policy(run.directory), 2) == evaluate(load_policy(tmp_path), 2)
    assert evaluate(load_policy(run.directory / "checkpoint.pt"), 1) == evaluate(load_policy(tmp_path), 1)
    with pytest.raises(
        FileNotFoundError, match=f"rl contains neither policy.pt nor checkpoint.pt; name a run in it, .*{run.directory.name}"
    ):
        load_policy(run.directory.parent)


def test_a_policy_of_weights_that_are_not_finite_has_diverged(path):
    policy = load_policy(path)
    with torch.no_grad():
        next(policy.agent.parameters()).fill_(math.nan)
    with pytest.raises(NonFiniteError, match="action at step 0 is not finite: the policy has diverged"):
        evaluate(policy)


# --------------------------------------------------------------------------------------------------------------------- errors


def changed(path, **changes):
    torch.save(torch.load(path, weights_only=True) | changes, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "has a policy of format 2, but this version of hesscale reads format 1"),
        ({"config": {**dataclasses.asdict(CONFIG), "colour": 1}}, r"cannot be read \(settings unknown: colour\)"),
        ({"config": {"algo": "a2c"}}, r"\(settings missing: env, optimizer, step_size, seed, steps\)"),
        ({"agent": {}}, r"cannot be read \('mean.0.weight'\)"),
        ({"seen": None}, "cannot be read"),
    ],
)
def test_files_with_another_policy_are_refused(path, changes, message):
    changed(path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_policy(path)
    assert str(path) in str(error.value)


def test_files_without_a_policy_are_refused(tmp_path):
    for content, message in (
        ([1], "does not contain a policy that hesscale rl saved"),
        ({"run": "", "state": {"weights": 1}, "rows": 0, "digest": ""}, "does not contain a policy that hesscale rl saved"),
    ):
        torch.save(content, tmp_path / "some.pt")
        with pytest.raises(ValueError, match=f"some.pt .*{message}"):
            load_policy(tmp_path / "some.pt")
    torch.save({"code": Drift}, tmp_path / "code.pt")  # loading it would need code
    (tmp_path / "empty.pt").write_bytes(b"")
    for name in ("code.pt", "empty.pt"):
        with pytest.raises(DamagedRun, match=r"damaged, or neither a policy nor a checkpoint; .* remove the run's directory"):
            load_policy(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither policy.pt nor checkpoint.pt; hesscale rl saves policy.pt"):
        load_policy(tmp_path)


def test_a_flipped_bit_in_a_policy_changes_no_weight_or_is_reported(path):
    content, expected = path.read_bytes(), load_policy(path)
    for position in range(0, len(content), len(content) // 100):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        try:
            found = load_policy(path)
        except DamagedRun:
            continue
        torch.testing.assert_close(found.agent.state_dict(), expected.agent.state_dict(), rtol=0, atol=0)
        assert (found.config, found.steps) == (expected.config, expected.steps)
        assert (found.mean == expected.mean).all()
        assert (found.variance == expected.variance).all()


def test_environments_that_the_policy_does_not_fit_are_refused(path):
    policy = load_policy(path)
    for env in ("hesscale-test/Choice-v0", "Pendulum-v1"):
        with pytest.raises(ValueError, match=f"other observations or actions than those of {env} here"):
            evaluate(dataclasses.replace(policy, config=dataclasses.replace(CONFIG, env=env)))
    with pytest.raises(ValueError, match="no environment is called 'Drift'"):
        evaluate(dataclasses.replace(policy, config=dataclasses.replace(CONFIG, env="Drift")))
    with pytest.raises(ValueError, match="episodes=0 must be positive"):
        evaluate(policy, 0)


# -------------------------------------------------------------------------------------------------------------------- command


def test_the_command_shows_each_episode_and_their_mean(path):
    done = CliRunner().invoke(app, ["rl-eval", str(path), "--episodes", "3", "--seed", "4", "--sample"])
    assert done.exit_code == 0, done.output
    found = evaluate(load_policy(path), 3, 4, deterministic=False)
    rows = [line.split(maxsplit=1) for line in done.output.splitlines() if line[:1].isdigit() or line.startswith("mean")]
    assert [[k, *rest.split()] for k, rest in rows[:3]] == [
        [str(k), f"{total:.2f}", str(length)] for k, (total, length) in enumerate(found, start=4)
    ]
    totals = [total for total, _ in found]
    assert rows[3][1].startswith(f"{np.mean(totals):.2f} ± {np.std(totals, ddof=1) / math.sqrt(3):.2f} ")
    assert f"A2C with AdaHesScale on {TOY}, after 60 steps" in done.output


def test_the_command_finds_a_run_by_the_beginning_of_its_id_or_as_the_last(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, names = Store("out/runs"), []
    for seed in (0, 1):
        with store.open("rl", {"seed": seed}) as run:
            run.finish({})
            shutil.copy(path, run.directory / "policy.pt")
            names.append(run.directory.name)
    for words in ([names[0]], [names[1][:6]], ["--last"]):
        assert CliRunner().invoke(app, ["rl-eval", *words, "--episodes", "1"]).exit_code == 0
    unknown = CliRunner().invoke(app, ["rl-eval", "zz"])
    assert unknown.exit_code == 2
    assert "zz is neither a file or folder" in unknown.output


@pytest.mark.parametrize(
    ("arguments", "message"), [(["nowhere"], "no run in out/runs has policy.pt"), ([".", "--episodes", "0"], "--episodes")]
)
def test_the_command_names_what_it_refuses(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # `make run` leaves runs in the checkout
    done = CliRunner().invoke(app, ["rl-eval", *arguments])
    assert done.exit_code == 2
    assert message in done.output


# --------------------------------------------------------------------------------------------------------------------- videos


def test_a_video_shows_the_episodes_that_are_evaluated(path, tmp_path):
    imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg")
    policy, video = load_policy(path), tmp_path / "new" / "run.mp4"
    found = film(policy, video, 2, seed=3)
    assert found == evaluate(policy, 2, seed=3)
    assert [file.name for file in video.parent.iterdir()] == ["run.mp4"]
    frames = imageio_ffmpeg.read_frames(str(video))
    facts = next(frames)
    assert facts["size"] == (32, 20)  # even
    assert facts["fps"] == 60
    shades = [np.frombuffer(frame, np.uint8).mean() for frame in frames]
    lengths = [length for _, length in found]
    times = [t for length in lengths for t in range(length + 1)][::2]  # at 60 of 120 a second
    assert shades == pytest.approx([4 * t for t in times], abs=4)

    done = CliRunner().invoke(app, ["rl-eval", str(path), "--episodes", "1", "--video", str(tmp_path / "one.mp4")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "one.mp4").stat().st_size > 0


def test_videos_that_cannot_be_made_are_refused(path, tmp_path, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    policy = load_policy(path)
    with pytest.raises(ValueError, match=r"must end in .mp4, unlike run.gif"):
        film(policy, tmp_path / "run.gif")
    blind = dataclasses.replace(policy, config=dataclasses.replace(CONFIG, env="hesscale-test/Blind-v0"))
    with pytest.raises(ValueError, match="Blind-v0 cannot be filmed"):
        film(blind, tmp_path / "run.mp4")

    def render(self):
        raise gymnasium.error.DependencyNotInstalled("install crayons")

    monkeypatch.setattr(Drift, "render", render)
    with pytest.raises(ModuleNotFoundError, match="to draw hesscale-test/Drift-v0 takes more than is installed: install crayons"):
        film(policy, tmp_path / "run.mp4")
    assert not (tmp_path / "run.mp4").exists()


@pytest.fixture
def no_display(monkeypatch):
    monkeypatch.setattr(module.sys, "platform", "linux")
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.setenv(name, "")


def tries(monkeypatch, works):
    """What MuJoCo was tried with, of which some work."""
    tried = []

    def run(command, env, **_):
        tried.append(env["MUJOCO_GL"])
        assert f"mujoco.{tried[-1]}" in command[-1]
        return subprocess.CompletedProcess(
            command, tried[-1] not in works, "", "" if tried[-1] in works else "lots\nno such library"
        )

    monkeypatch.setattr(subprocess, "run", run)
    return tried


@pytest.mark.usefixtures("no_display")
@pytest.mark.parametrize("works", ["egl", "osmesa"])
def test_mujoco_renders_with_a_backend_that_works(monkeypatch, works):
    tried = tries(monkeypatch, [works])
    choose_gl()
    assert module.os.environ["MUJOCO_GL"] == tried[-1] == works
    assert tried == ["egl", "osmesa"][: len(tried)]
    choose_gl()
    assert tried.count("egl") == 1  # said once


@pytest.mark.usefixtures("no_display")
def test_the_error_says_why_mujoco_cannot_render(monkeypatch):
    tries(monkeypatch, [])
    with pytest.raises(RuntimeError, match=r"MuJoCo cannot render here: .*egl: no such library; osmesa: no such library"):
        choose_gl()
    assert not module.os.environ["MUJOCO_GL"]
    monkeypatch.setenv("DISPLAY", ":0")
    choose_gl()


def test_the_tracking_camera_is_used_if_there_is_one():
    mujoco = pytest.importorskip("mujoco")
    for name, expected in (("HalfCheetah-v5", "track"), ("InvertedPendulum-v5", None)):
        env = gymnasium.make(name).unwrapped
        before = env.mujoco_renderer.camera_id
        follow(env)
        found = env.mujoco_renderer.camera_id
        assert (
            found == before if expected is None else mujoco.mj_id2name(env.model, mujoco.mjtObj.mjOBJ_CAMERA, found) == expected
        )
