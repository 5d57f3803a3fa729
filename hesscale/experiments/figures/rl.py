"""Reinforcement learning: returns of A2C and PPO with each optimizer, by environment steps (Fig. 5, Appendix H)."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compile.step import BACKENDS
from ...errors import NonFiniteError
from ..lab.choices import choose, named
from ..lab.experiment import Experiment, Watched, option
from ..lab.store import Pause, Run
from ..optimizers import AGENT_OPTIMIZERS, HELP, positives, with_step_sizes
from ..rl.config import OWN, PARTS, POLICIES, TRUNCATIONS, Config, parts_of
from ._rl_figures import sections

if TYPE_CHECKING:
    from ..rl.learner import Algorithm

ALGORITHMS = ("a2c", "ppo")
CHOICES = {"policy": POLICIES, "truncation": ("auto", *TRUNCATIONS), "backend": BACKENDS}
OF_PPO = ("gae_lambda", "clip", "epochs", "minibatches")
POINTS = 100  # of a curve
CHECKPOINT_SECONDS = 20.0


@dataclass(frozen=True)
class Settings:
    algo: str = option("ppo", f"algorithms, separated by commas: {', '.join(ALGORITHMS)}")
    env: str = option("CartPole-v1", "Gymnasium environments with discrete or continuous actions, separated by commas")
    optimizer: str = option("adam,adahesscale", f"{HELP}: {', '.join(AGENT_OPTIMIZERS)}")
    step_size: str = option("3e-4", "step sizes of optimizers without @, separated by commas")
    seeds: int = option(2, "number of runs; the seed of a run determines its networks, environment and actions")
    steps: int = option(30_000, "number of environment steps, rounded up to whole rollouts")
    humanoid_steps: int = option(0, "number of steps in Humanoid and HumanoidStandup; 0 for the same number as elsewhere")
    policy: str = option("auto", f"distribution of the actions: {', '.join(POLICIES)}")
    protocol: str = option(
        "paper", f"paper or cleanrl; + adds and - removes a part ({', '.join(PARTS)}), as in paper+sigma or cleanrl-values"
    )
    normalize: bool = option(True, "normalize observations and rewards")
    eps: float = option(1e-5, "ε of the optimizers; it is 1e-8 in the paper's text and 1e-5 in the authors' code")
    trust_radius: str = option("1e-8", "trust radius Δ of the scaled optimizers, for each network; separate several by commas")
    half_value_loss: bool = option(False, "train the critic with ½ (v − R)², whose second derivative is 1, instead of (v − R)²")
    truncation: str = option(
        "auto",
        "value of the last state of a truncated episode: bootstrap uses the critic's estimate, terminate uses 0; auto is "
        "bootstrap for the paper's protocol and terminate for cleanrl",
    )
    rollout: int = option(0, "steps between updates; 0 for 5 (A2C) or 2048 (PPO)")
    gamma: float = option(0.99, "discount factor γ")
    gae_lambda: float = option(0.95, "λ of PPO's generalized advantage estimates")
    clip: float = option(0.2, "PPO's clipping range of probability ratios")
    epochs: int = option(0, "number of passes of PPO over each rollout; 0 for 10")
    minibatches: int = option(0, "number of minibatches in each pass; 0 for 32")
    target_kl: float = option(
        0.0,
        "let PPO adapt the trust radius of each of the policy's networks after every update, so that its part of the KL "
        "divergence from the old policy comes closer to this target; 0 for constant radii",
    )
    radius_decay: int = option(
        0,
        "number N of steps after which trust radii have halved: they are Δ/(1 + t/N) after t steps; 0 for constant radii",
    )
    width: int = option(64, "number of units in each hidden layer")
    entropy: float = option(0.0, "coefficient of the entropy bonus")
    backend: str = option("inductor", f"backend of hesscale.compile_step: {', '.join(BACKENDS)}")
    video: bool = option(False, "save a video of one episode of each agent with seed 0, as video.mp4 in the folder of its run")


MUJOCO = (
    *("Ant-v5", "Walker2d-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5"),
    *("InvertedPendulum-v5", "InvertedDoublePendulum-v5", "Swimmer-v5", "Reacher-v5", "HumanoidStandup-v5"),
)
PRESETS = {
    "smoke": Settings(algo="a2c,ppo", optimizer="adahesscale", seeds=1, steps=2048, backend="eager"),
    "small": Settings(backend="eager"),
    "paper": Settings(
        algo="a2c,ppo",
        env=",".join(MUJOCO),
        optimizer="adam,adahessian,adahesscale",
        seeds=10,
        steps=2_000_000,
        humanoid_steps=10_000_000,
    ),
}


def tasks(settings: Settings) -> list[Config]:
    from ..rl.vector_env import check_name

    algos = choose(settings.algo, named(ALGORITHMS), "algorithm")
    pairs = with_step_sizes(settings.optimizer, settings.step_size, AGENT_OPTIMIZERS)
    environments = list(dict.fromkeys(name.strip() for name in settings.env.split(",") if name.strip()))
    if not environments:
        raise ValueError("env names no environment")
    for name in environments:
        check_name(name)
    for name, known in CHOICES.items():
        if getattr(settings, name) not in known:
            raise ValueError(f"{name}={getattr(settings, name)!r} is not one of {', '.join(known)}")
    check_ranges(settings)
    radii = positives(settings.trust_radius, "trust_radius")
    if "values" in parts_of(settings.protocol) and settings.half_value_loss:
        raise ValueError(
            f"half_value_loss applies to the paper's value loss only, but protocol={settings.protocol!r} uses CleanRL's"
        )
    steps = {name: (name.startswith("Humanoid") and settings.humanoid_steps) or settings.steps for name in environments}
    same = (
        *("policy", "protocol", "normalize", "half_value_loss", "eps", "backend"),
        *("rollout", "gamma", "width", "entropy"),
    )
    shared = {name: getattr(settings, name) for name in same}
    by_protocol = "terminate" if settings.protocol.startswith("cleanrl") else "bootstrap"
    shared["truncation"] = by_protocol if settings.truncation == "auto" else settings.truncation
    cells = itertools.product(range(settings.seeds), environments, algos, pairs, radii)
    found: dict[Config, None] = {}
    for seed, env, algo, (name, size), radius in cells:
        own = {name: getattr(settings, name) for name in OF_PPO} if algo == "ppo" else {}
        if AGENT_OPTIMIZERS[name].is_scaled:
            own |= {"trust_radius": radius, "radius_decay": settings.radius_decay}
            own |= {"target_kl": settings.target_kl} if algo == "ppo" else {}
        found[Config(algo, env, name, size, seed, steps[env], **shared, **own)] = None
    return list(found)


def check_ranges(settings: Settings) -> None:
    """Raise a ValueError if a setting is out of range."""
    for name in ("seeds", "steps", "width"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(settings, name)}")
    for name in ("humanoid_steps", "rollout", "epochs", "minibatches", "eps", "entropy", "target_kl", "radius_decay"):
        if not 0 <= getattr(settings, name) < math.inf:
            raise ValueError(f"{name} must be at least 0, not {getattr(settings, name)}")
    if settings.target_kl and settings.radius_decay:
        raise ValueError("target_kl and radius_decay both change the trust radius; use one of them")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} must be between 0 and 1, not {getattr(settings, name)}")
    if not 0 < settings.clip < 1:
        raise ValueError(f"clip must be between 0 and 1, not {settings.clip}")
    if "ppo" in settings.algo:
        from ..rl.ppo import PPO

        rollout, minibatches = settings.rollout or PPO.rollout, settings.minibatches or PPO.minibatches
        if rollout % minibatches:
            raise ValueError(f"rollout={rollout} is not a multiple of minibatches={minibatches}, as PPO needs")


def work(settings: Settings) -> str:
    return work_of(tasks(settings))


def work_of(asked: Sequence[Config]) -> str:
    return f"{len(asked)} agents, {sum(task.steps for task in asked):,} environment steps in all"


def algorithm(configs: Sequence[Config]) -> Algorithm:
    from ..rl.a2c import A2C
    from ..rl.ppo import PPO

    return (A2C if configs[0].algo == "a2c" else PPO)(configs)


def kind(config: Config) -> Config:
    """A key that is the same for agents that can be trained together."""
    same: dict[str, Any] = dict.fromkeys(OWN, 0)
    return dataclasses.replace(config, **same)


def run(task: Config, run: Run, data: Path | None) -> Mapping[str, Any]:
    """Train an agent. If an action, gradient or diagonal is not finite, the run ends as diverged."""
    return run_together([task], [run], data)[0]


def run_together(tasks: Sequence[Config], runs: Sequence[Run], data: Path | None) -> Sequence[Mapping[str, Any]]:
    """Train agents together. Agents that were interrupted at different steps resume in separate groups."""
    groups: dict[int, list[int]] = {}
    for k, run in enumerate(runs):
        groups.setdefault(run.state["learning"]["world"]["steps"] if run.state else 0, []).append(k)
    found: dict[int, Mapping[str, Any]] = {}
    for _, those in sorted(groups.items()):
        values = Training([tasks[k] for k in those], [runs[k] for k in those]).finish()
        found |= dict(zip(those, values, strict=True))
    return [found[k] for k in range(len(runs))]


class Training:
    """Agents that are trained together, each with a run to log to."""

    def __init__(self, tasks: Sequence[Config], runs: Sequence[Run]) -> None:
        self.steps, self.runs = tasks[0].steps, runs
        self.learning = algorithm(tasks)
        self.envs = self.learning.envs
        self.scores, self.pace = [Score() for _ in runs], Pace()
        for k, run in enumerate(runs):
            if run.state:
                self.learning.load(k, run.state["learning"])
                self.scores[k], self.pace = Score(**run.state["score"]), Pace(**run.state["pace"])
        self.can_save, self.saved = True, time.monotonic()

    def finish(self) -> list[Mapping[str, Any]]:
        """Train to the end. Returns the results of each agent."""
        every, is_first = max(self.steps // POINTS, 1), True
        while self.envs.steps < self.steps and self.envs.active:
            begun, before = time.perf_counter(), self.envs.steps
            is_logged = (before + self.learning.rollout) // every > before // every
            self.learning.iterate(is_logged)
            if not is_first:  # the first iteration compiles
                self.pace.add(self.envs.steps - before, time.perf_counter() - begun)
            is_first = False
            if is_logged:
                self.log()
            self.save_sometimes()
        return [self.end(k) for k in range(len(self.runs))]

    def log(self) -> None:
        learning, pace = self.learning, self.pace.recent()
        for k in self.envs.active:
            returns = self.scores[k].take(self.envs.finished[k])
            self.runs[k].log(self.envs.steps, **learning.metrics[k], **learning.trust_metrics(k), **returns, **pace)
        for run in self.runs:
            run.progress(min(self.envs.steps, self.steps), self.steps)

    def save_sometimes(self) -> None:
        if not self.can_save or time.monotonic() - self.saved < CHECKPOINT_SECONDS:
            return
        try:
            states = [self.learning.state(k) for k in range(len(self.runs))]
        except TypeError as error:
            self.can_save = False
            warnings.warn(f"{error}. If this run is interrupted, it will start again from the beginning", stacklevel=2)
            return
        pause: Pause | None = None
        for run, score, state in zip(self.runs, self.scores, states, strict=True):
            try:
                run.checkpoint({"learning": state, "score": asdict(score), "pace": asdict(self.pace)})
            except Pause as found:
                pause = found
        if pause is not None:
            raise pause
        self.saved = time.monotonic()

    def end(self, k: int) -> Mapping[str, Any]:
        """The results of an agent. Its policy is saved in the folder of its run."""
        from ..rl.evaluate import save_policy

        save_policy(self.runs[k].directory / "policy.pt", self.learning.final_policy(k))
        self.scores[k].take(self.envs.finished[k])
        taken = sum(self.envs.steps if at is None else at for at in self.envs.diverged_at)
        rate = None if self.pace.mean is None else self.pace.mean * taken / self.envs.steps
        values = {"diverged_at": self.envs.diverged_at[k], "steps_per_second": rate, "together": len(self.runs)}
        shares = self.learning.scaled_shares(k)
        return {**self.scores[k].values(), **values, **({"scaled_share": shares} if shares else {})}


def film(settings: Settings, finished: Mapping[Config, Path]) -> Iterator[str]:
    """Film agents with seed 0, if the settings ask for videos and these do not exist yet."""
    if not settings.video:
        return
    from ..rl.evaluate import film, load_policy

    for task, directory in finished.items():
        path = directory / "video.mp4"
        if task.seed == 0 and not path.exists():
            what = f"{task.algo} on {task.env} with {task.optimizer}"
            try:
                (episode,) = film(load_policy(directory), path)
                yield f"{path}: {what}, a return of {episode.total:.1f}"
            except NonFiniteError as error:
                yield f"no video of {what}: {error}"


@dataclass
class Score:
    """Undiscounted returns of the episodes so far."""

    episodes: int = 0
    steps: int = 0
    sum: float = 0.0
    sum_by_steps: float = 0.0

    def take(self, finished: list[tuple[float, int]]) -> dict[str, float]:
        """Count finished episodes, and clear the list. Returns their means, for the log."""
        count = len(finished)
        if not count:
            return {}
        total, length = sum(r for r, _ in finished), sum(n for _, n in finished)
        self.episodes, self.steps, self.sum = self.episodes + count, self.steps + length, self.sum + total
        self.sum_by_steps += sum(r * n for r, n in finished)
        finished.clear()
        return {"charts/episodic_return": total / count, "charts/episodic_length": length / count}

    def values(self) -> dict[str, Any]:
        """Mean returns over the run, weighted by episode length and unweighted; None before the first episode ends."""
        by_step = self.sum_by_steps / self.steps if self.episodes else None
        return {"mean_return": by_step, "mean_return_of_episodes": self.sum / self.episodes if self.episodes else None}


@dataclass
class Pace:
    """The time of steps, without compilation."""

    steps: int = 0
    seconds: float = 0.0
    steps_before: int = 0  # at the last log
    seconds_before: float = 0.0

    def add(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = self.steps + steps, self.seconds + seconds

    @property
    def mean(self) -> float | None:
        return self.steps / self.seconds if self.steps else None

    def recent(self) -> dict[str, float]:
        """Steps per second since the last log."""
        steps, seconds = self.steps - self.steps_before, self.seconds - self.seconds_before
        self.steps_before, self.seconds_before = self.steps, self.seconds
        return {"charts/SPS": steps / seconds} if steps else {}


EXPERIMENT = Experiment(
    "rl",
    "The returns of A2C and PPO by environment steps, for each optimizer (Fig. 5).",
    Settings,
    PRESETS,
    Config,
    tasks,
    work,
    run,
    sections,
    run_together=run_together,
    kind=kind,
    after=film,
    curves=("charts/episodic_return",),
    amount=lambda config: config.steps,
    watched=Watched("return", "charts/episodic_return"),
    examples=("--optimizer adam,adahesscale --seeds 3", "--algo a2c --env HalfCheetah-v5 --steps 1000000 --backend inductor"),
)
