"""A toy experiment: a random walk that logs, checkpoints, and fails in the way that a task asks for."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hesscale.experiments.lab.experiment import Experiment, option
from hesscale.experiments.lab.store import Run, Store

CHECKPOINT_STEPS = 4
SLOW_SECONDS = 0.02  # a step of a slow task


@dataclass(frozen=True)
class Settings:
    seeds: int = option(2, "how many")
    steps: int = option(10, "of each")
    scale: float = option(1.0, "of a step")
    is_slow: bool = option(False, "take time")
    fault: str = option("", "what goes wrong")


@dataclass(frozen=True)
class Task:
    seed: int
    steps: int = 10
    scale: float = 1.0
    is_slow: bool = False
    fault: str = ""  # raise, die, raise once or die once


def tasks(settings: Settings) -> list[Task]:
    shared = {"steps": settings.steps, "scale": settings.scale, "is_slow": settings.is_slow, "fault": settings.fault}
    return [Task(seed, **shared) for seed in range(settings.seeds)]


def run(task: Task, run: Run, data: Path | None) -> dict[str, Any]:
    random = torch.Generator(device="cpu").manual_seed(task.seed)
    x, begin = torch.zeros(3, device="cpu"), 0
    if run.state is not None:
        x, begin = run.state["x"], run.state["step"]
        random.set_state(run.state["random"])
    if data is not None:
        (data / f"process{os.getpid()}").touch()
    for step in range(begin, task.steps):
        if step == 6:
            misbehave(task, data)
        x = x + task.scale * torch.randn(3, generator=random, device="cpu")
        run.log(step, norm=x.norm(), first=x[0])
        run.progress(step + 1, task.steps)
        if (step + 1) % CHECKPOINT_STEPS == 0:
            run.checkpoint({"x": x, "step": step + 1, "random": random.get_state()})
        time.sleep(SLOW_SECONDS * task.is_slow)
    return {"end": x, "norm": float(x.norm()), "steps": task.steps}


def misbehave(task: Task, data: Path | None) -> None:
    """As the task asks for; what is to happen once leaves a mark in ``data``, and does not happen without."""
    fault, _, once = task.fault.partition(" ")
    if once:
        if data is None or (data / f"mark{task.seed}").exists():
            return
        (data / f"mark{task.seed}").touch()
    if fault == "raise":
        raise ValueError("the toy was told to fail")
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)


EXPERIMENT = Experiment(
    name="toy",
    title="A random walk",
    settings=Settings,
    presets={"smoke": Settings(), "small": Settings(), "paper": Settings()},
    task=Task,
    tasks=tasks,
    work=lambda settings: f"{settings.seeds} walks",  # which cannot be pickled
    run=run,
    sections=lambda results: [],
)


def run_together(tasks: Sequence[Task], runs: Sequence[Run], data: Path | None) -> list[dict[str, Any]]:
    """One after another; who was together is marked in ``data``."""
    if data is not None:
        (data / f"together{'+'.join(str(task.seed) for task in tasks)}").touch()
    return [run(task, each, data) for task, each in zip(tasks, runs, strict=True)]


def kind(task: Task) -> float:
    return task.scale


TOGETHER = dataclasses.replace(EXPERIMENT, run_together=run_together, kind=kind)


def numbers(store: Store, task: dict[str, Any]) -> tuple[Any, ...]:
    """All results of a finished run, as values that can be compared."""
    result = store.result("toy", task)
    assert result is not None, f"{task} is not finished"
    return {**result.values, "end": result.values["end"].tolist()}, result.metrics
