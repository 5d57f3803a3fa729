"""Optimizers on many tasks: tuned, at their best step sizes, and untuned, at Adam's default step size."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ...compile.step import BACKENDS
from ..lab.choices import Choices, check_least, check_numbers, choose
from ..lab.experiment import Experiment, Watched, option
from ..optimizers import HELP, IMAGE_OPTIMIZERS, with_step_sizes
from ..tasks.registry import PROBLEMS
from ..tasks.trainer import SCHEDULES, Task, run
from ._optimizers_figures import sections

DEVICES = ("auto", "cpu", "cuda")
KNOWN = Choices([spec for spec in IMAGE_OPTIMIZERS.values() if not spec.is_scaled], aliases=IMAGE_OPTIMIZERS.aliases)
FEW = ("adam", "adahessian", "adahesscale", "adahesscale-default", "adahesscale-gn-default")
VARIANTS = ("", "-default", "-long", "-clip")
ALL = (
    *("sgd-momentum", "adam", "adamw", "muon", "sophia-g", "adahessian"),
    *(f"{family}{variant}" for family in ("adahesscale", "adahesscale-gn") for variant in VARIANTS),
)
DIGITS = ",".join(name for name, problem in PROBLEMS.items() if problem.dataset == "digits")


@dataclass(frozen=True)
class Settings:
    task: str = option(DIGITS, f"tasks, separated by commas: {', '.join(PROBLEMS)}")
    optimizer: str = option(",".join(FEW), f"{HELP}: {', '.join(KNOWN)}")
    step_size: str = option(
        "1e-4,3e-4,1e-3,3e-3,1e-2", "step sizes of optimizers without @; the best one on the validation split is the tuned one"
    )
    seeds: int = option(3, "number of runs; runs with the same seed have the same initial network and batches")
    steps: int = option(0, "steps of training; 0 for the task's own")
    batch: int = option(0, "examples in a batch; 0 for the task's own")
    eps: float = option(0.0, "ε of the optimizers that have one; 0 for each optimizer's default")
    schedule: str = option("constant", f"schedule of the step size: {' or '.join(SCHEDULES)} (which decays to 0)")
    evaluations: int = option(4, "number of evaluations in a run; the last one is at its end")
    eval_size: int = option(0, "number of examples of each split to evaluate on; 0 for all")
    device: str = option("auto", f"where to train: {', '.join(DEVICES)}")
    backend: str = option(
        "auto", f"backend of hesscale.compile_step: {', '.join(BACKENDS)}; auto is inductor on a GPU and eager on a CPU"
    )


PRESETS = {
    "smoke": Settings(task="digits-tanh,digits-vit", optimizer="adam,adahesscale", step_size="1e-3,1e-2", seeds=2, steps=60),
    "small": Settings(step_size="3e-4,1e-3,3e-3", seeds=2, steps=300),
    "paper": Settings(task=",".join(PROBLEMS), optimizer=",".join(ALL), seeds=5),
}


def tasks(settings: Settings) -> list[Task]:
    problems = choose(settings.task, PROBLEMS, "task")
    if not problems:
        raise ValueError("task names no task")
    pairs = with_step_sizes(settings.optimizer, settings.step_size, KNOWN)
    for name, values in {"schedule": SCHEDULES, "device": DEVICES, "backend": ("auto", *BACKENDS)}.items():
        if getattr(settings, name) not in values:
            raise ValueError(f"{name}={getattr(settings, name)!r} is not one of {', '.join(values)}")
    check_least(settings, {"seeds": 1, "evaluations": 1, "steps": 0, "batch": 0, "eval_size": 0})
    check_numbers(settings, not_negative=["eps"])
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda, but torch finds no GPU here")
    backend = settings.backend
    if backend == "auto":
        backend = "inductor" if device == "cuda" else "eager"
    return [
        Task(
            problem=problem.name,
            dataset=problem.dataset,
            optimizer=KNOWN[optimizer].name,
            step_size=size,
            seed=seed,
            steps=settings.steps or problem.steps,
            batch=settings.batch or problem.batch,
            eps=settings.eps,
            schedule=settings.schedule,
            evaluations=settings.evaluations,
            eval_size=settings.eval_size,
            device=device,
            backend=backend,
        )
        for problem, (optimizer, size), seed in itertools.product(problems, pairs, range(settings.seeds))
    ]


def work(settings: Settings) -> str:
    asked = tasks(settings)
    problems = len({task.problem for task in asked})
    return f"{len(asked)} networks of {problems} task{'s' * (problems > 1)}, {sum(task.steps for task in asked):,} steps in all"


def is_timed(task: Task) -> bool:
    """Whether a task must run alone: on a GPU, seconds are wall time, and other runs would share the GPU."""
    return task.device == "cuda"


EXPERIMENT = Experiment(
    "optimizers",
    "The accuracy of optimizers on many tasks, tuned and at Adam's default step size.",
    Settings,
    PRESETS,
    Task,
    tasks,
    work,
    run,
    sections,
    alone=is_timed,
    amount=lambda task: task.steps,
    watched=Watched("loss", "train_loss"),
    examples=("--task digits-tanh --optimizer adam,adahesscale --seeds 2", "--task char-lstm --schedule cosine"),
)
