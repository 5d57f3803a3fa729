"""Evaluate a trained policy: play episodes with frozen observation statistics, for their returns and a video."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import NonFiniteError
from ..install import how_to_install
from ..lab.archives import load_archive, save_archive
from ..lab.files import write_whole
from ..lab.run_database import DamagedRun
from .config import Config
from .mujoco_state import is_mujoco
from .networks import Agent, AgentBatch, Array, Categorical, Gaussian, action_generator
from .vector_env import CLIP, DEFAULT_LENGTH, check_name

try:
    import gymnasium
except ModuleNotFoundError:
    raise ModuleNotFoundError(f"reinforcement learning needs gymnasium: {how_to_install('rl')}") from None

FORMAT = 1
MAX_PICTURES = 60  # frames per second of a video
PARTS = ("config", "agent", "seen", "steps")


class Episode(NamedTuple):
    total: float  # the undiscounted return
    length: int


@dataclass(frozen=True)
class Policy:
    """A trained agent, with the means and variances that normalize its observations.

    Attributes:
        steps: the number of environment steps in training.
    """

    config: Config
    agent: Agent
    mean: Array
    variance: Array
    steps: int

    @property
    def sees_time(self) -> bool:
        return self.config.algo == "a2c"

    def see(self, raw: Array, left: float) -> Array:
        """An observation, normalized as in training; ``left`` is the fraction of the episode's time that is left."""
        x = np.asarray(raw, np.float64).reshape(-1)
        if not np.isfinite(x).all():
            raise ValueError(f"{self.config.env} gave an observation that is not finite")
        if self.config.normalize:
            x = np.clip((x - self.mean) / np.sqrt(self.variance + 1e-8), -CLIP, CLIP)
        return (np.append(x, left) if self.sees_time else x).astype(np.float32)[None]


def save_policy(path: Path, policy: Mapping[str, Any]) -> None:
    """Write the parts of a :class:`Policy`: ``config`` (its fields), ``agent`` (a state dict), ``seen`` (mean, variance and
    count of observations) and ``steps``."""
    saved = {"format": FORMAT, **{name: policy[name] for name in PARTS}}
    write_whole(path, lambda partial: save_archive(saved, partial))


def load_policy(path: Path | str) -> Policy:
    """Load the policy of a run, from its directory or from ``policy.pt`` or ``checkpoint.pt`` in it.

    Raises:
        FileNotFoundError: if there is none.
        DamagedRun: if the file cannot be read.
        ValueError: if the file is neither a policy nor a checkpoint.
    """
    path = file_of(Path(path))
    try:
        saved = load_archive(path, "cpu")
    except Exception as error:  # torch may raise anything
        raise DamagedRun(
            f"{path} cannot be read ({error}): it is damaged, or neither a policy nor a checkpoint; "
            "if it belongs to a run, remove the run's directory, and repeat the run"
        ) from None
    if isinstance(saved, dict) and isinstance(saved.get("state"), dict):  # a checkpoint
        saved = saved["state"].get("learning")
    elif isinstance(saved, dict) and saved.get("format") != FORMAT and "format" in saved:
        raise ValueError(f"{path} has a policy of format {saved['format']!r}, but this version of hesscale reads format {FORMAT}")
    if not isinstance(saved, dict) or not set(PARTS) <= saved.keys():
        raise ValueError(f"{path} does not contain a policy that hesscale rl saved")
    try:
        config = config_of(saved["config"])
        agent = agent_of(saved["agent"])
        mean, variance = (saved["seen"][name].double().numpy() for name in ("mean", "variance"))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"the policy in {path} cannot be read ({error})") from None
    return Policy(config, agent, mean, variance, int(saved["steps"]))


def file_of(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; hesscale runs lists the runs")
    for name in ("policy.pt", "checkpoint.pt"):
        if (path / name).is_file():
            return path / name
    below = sorted(found.parent for name in ("policy.pt", "checkpoint.pt") for found in path.glob(f"*/{name}"))
    hint = f"; name a run in it, such as {below[0]}" if below else "; hesscale rl saves policy.pt at the end of a run"
    raise FileNotFoundError(f"{path} contains neither policy.pt nor checkpoint.pt{hint}")


def config_of(found: Mapping[str, Any]) -> Config:
    fields = {field.name: field for field in dataclasses.fields(Config)}
    unknown = sorted(found.keys() - fields.keys())
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in found]
    if unknown or missing:
        what = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
        raise ValueError(f"settings {'; '.join(what)}")
    return Config(**found)


def agent_of(state: Mapping[str, Any]) -> Agent:
    """An agent with the layer sizes of a state dict."""
    name = "logits" if "logits.0.weight" in state else "mean"
    width, inputs = state[f"{name}.0.weight"].shape
    outputs = len(state[f"{name}.4.bias"])
    agent: Agent
    if name == "logits":
        agent = Categorical(inputs, outputs, orthogonal=False, width=width)
    else:
        agent = Gaussian(inputs, outputs, orthogonal=False, shared="variance.log_std" in state, width=width)
    agent.load_state_dict(state)
    return agent


# ------------------------------------------------------------------------------------------------------------------- episodes


def evaluate(policy: Policy, episodes: int = 10, seed: int = 0, *, deterministic: bool = True) -> list[Episode]:
    """Play episodes with the seeds ``seed``, ``seed + 1``, …. Actions are the most likely ones, or sampled from the policy.

    Raises:
        NonFiniteError: if an action is not finite.
    """
    check(episodes, seed)
    env = make(policy)
    try:
        return [play(policy, env, seed + k, deterministic=deterministic) for k in range(episodes)]
    finally:
        env.close()


def check(episodes: int, seed: int) -> None:
    if episodes < 1 or seed < 0:
        raise ValueError(f"episodes={episodes} must be positive and seed={seed} not negative")


def make(policy: Policy, render_mode: str | None = None) -> Any:
    """The policy's environment."""
    name = policy.config.env
    check_name(name)
    try:
        env = gymnasium.make(name, render_mode=render_mode)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(f"{name} needs more than is installed: {error}") from None
    actions: Any = env.action_space
    is_discrete = isinstance(actions, gymnasium.spaces.Discrete)
    size = math.prod(env.observation_space.shape or (0,))
    fits = is_discrete == isinstance(policy.agent, Categorical) and policy.mean.shape == policy.variance.shape == (size,)
    batch = AgentBatch([policy.agent])
    outputs = int(actions.n) if is_discrete else math.prod(actions.shape or (0,))
    inputs = next(iter(batch.arrays.values()))[0][0].shape[-1]
    if not fits or inputs != size + policy.sees_time or batch.outputs != outputs:
        raise ValueError(f"the policy was trained with other observations or actions than those of {name} here")
    return env


def play(policy: Policy, env: Any, seed: int, *, deterministic: bool = True, watch: Callable[[], Any] = lambda: None) -> Episode:
    """Play one episode. ``watch`` is called at each state."""
    batch, draws = AgentBatch([policy.agent]), action_generator(seed)
    limit = (env.spec.max_episode_steps if env.spec else None) or DEFAULT_LENGTH
    raw, _ = env.reset(seed=seed)
    total, length, ended = 0.0, 0, False
    while not ended:
        watch()
        noise = np.zeros((1, batch.outputs), np.float32) if deterministic else batch.noise(draws, 1)
        (action,), signs = batch.act(policy.see(raw, 1 - length / limit), noise)
        if not np.isfinite(signs).all():
            raise NonFiniteError(f"the policy's action at step {length} is not finite: the policy has diverged")
        raw, reward, terminated, truncated, _ = env.step(given(env.action_space, action))
        if not math.isfinite(reward):
            raise ValueError(f"{policy.config.env} gave a reward of {reward} at step {length}; rewards must be finite")
        total, length, ended = total + float(reward), length + 1, bool(terminated or truncated)
    watch()
    return Episode(total, length)


def given(space: Any, action: Array) -> Any:
    """The action in the form that the environment expects."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(action + space.start)
    return np.clip(action.reshape(space.shape), space.low, space.high)


# --------------------------------------------------------------------------------------------------------------------- videos


def film(policy: Policy, path: Path | str, episodes: int = 1, seed: int = 0, *, deterministic: bool = True) -> list[Episode]:
    """Play the same episodes as :func:`evaluate` and film them (MP4)."""
    check(episodes, seed)
    path = Path(path)
    if path.suffix != ".mp4":
        raise ValueError(f"the name of the video must end in .mp4, unlike {path.name}")
    try:
        import imageio_ffmpeg
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"videos need imageio-ffmpeg: {how_to_install('rl')}") from None
    env = make(policy, "rgb_array")
    found: list[Episode] = []

    def record(partial: Path) -> None:
        env.reset(seed=seed)
        height, width, _ = picture(env).shape
        fps = env.metadata.get("render_fps") or 30
        every = math.ceil(fps / MAX_PICTURES)
        options = {"fps": fps / every, "macro_block_size": 2, "output_params": ["-f", "mp4"], "ffmpeg_log_level": "error"}
        writer = imageio_ffmpeg.write_frames(str(partial), (width, height), **options)
        writer.send(None)
        states = itertools.count()

        def watch() -> None:
            if next(states) % every == 0:
                writer.send(picture(env))

        try:
            for k in range(episodes):
                found.append(play(policy, env, seed + k, deterministic=deterministic, watch=watch))
        finally:
            writer.close()

    try:
        if is_mujoco(getattr(env.unwrapped, "data", None), "MjData"):
            choose_gl()
            follow(env.unwrapped)
        write_whole(path, record)
    finally:
        env.close()
    return found


def picture(env: Any) -> Array:
    """The current frame, as bytes of shape (height, width, 3)."""
    name = env.spec.id if env.spec else type(env.unwrapped).__name__
    try:
        found = env.render()
    except NotImplementedError:
        found = None
    except gymnasium.error.DependencyNotInstalled as error:
        raise ModuleNotFoundError(f"to draw {name} takes more than is installed: {error}") from None
    if not isinstance(found, np.ndarray) or found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] != 3:
        raise ValueError(f"{name} cannot be filmed, since it does not support render_mode='rgb_array'")
    return np.ascontiguousarray(found)


def follow(env: Any) -> None:
    """Film with the camera that tracks the robot, if there is one. Gymnasium's default camera does not follow the robot."""
    import mujoco

    camera = mujoco.mj_name2id(env.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if camera >= 0 and hasattr(env, "mujoco_renderer"):
        env.mujoco_renderer.camera_id = camera


def choose_gl() -> None:
    """Without a display, choose EGL or, if that fails, OSMesa for rendering, unless the variable MUJOCO_GL is set."""
    if sys.platform != "linux" or any(os.environ.get(name) for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")):
        return
    why = ""
    for name in ("egl", "osmesa"):
        code = f"from mujoco.{name} import GLContext; GLContext(8, 8).free()"  # in a subprocess, since a failure may crash it
        tried = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "MUJOCO_GL": name}, capture_output=True, text=True
        )
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = name
            return
        why += f"; {name}: {(tried.stderr.strip().splitlines() or ['it crashed'])[-1]}"
    raise RuntimeError(f"MuJoCo cannot render here: neither a display, nor EGL (libegl1), nor OSMesa (libosmesa6) works{why}")
