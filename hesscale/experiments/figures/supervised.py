"""Image classification: seven optimizers on DeepOBS's networks, by epochs and by seconds (Fig. 4, Appendix G)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ...compile.step import BACKENDS
from ..lab.choices import check_least, check_numbers, choose, named
from ..lab.experiment import Experiment, Watched, option
from ..optimizers import HELP, IMAGE_OPTIMIZERS, with_step_sizes
from ..vision.config import Task, group_key
from ..vision.members import PRECISIONS
from ..vision.problems import ACTIVATIONS, PADDINGS, PROBLEMS
from ..vision.trainer import run, run_together
from ._supervised_figures import sections

DEVICES = ("auto", "cpu", "cuda")
PAPER = ("sgd", "adam", "adahessian", "bl89", "ggnmc", "adahesscale", "adahesscale-gn")


@dataclass(frozen=True)
class Settings:
    task: str = option("digits-mlp", f"tasks, separated by commas: {', '.join(PROBLEMS)}")
    optimizer: str = option(",".join(PAPER), f"{HELP}: {', '.join(IMAGE_OPTIMIZERS)}")
    step_size: str = option(
        "1e-5,1e-4,1e-3,1e-2,1e-1,1",
        "step sizes of optimizers without @; the report shows the one with the best validation accuracy",
    )
    seeds: int = option(3, "number of runs; runs with the same seed have the same initial network, batches and augmentation")
    epochs: int = option(0, "epochs of training; 0 for the task's own")
    sgd_epochs: int = option(
        1, "multiple of the epochs for SGD; in the paper, SGD trains for as long as the slowest optimizer takes"
    )
    batch: int = option(0, "images in a batch; 0 for the task's own")
    activation: str = option("elu", f"activation function: {', '.join(ACTIVATIONS)}")
    padding: str = option("deepobs", f"padding of convolutions and pooling: {' or '.join(PADDINGS)} (as in the authors' code)")
    l2: float = option(
        0.0, "λ of the penalty ½λ‖W‖² on weights (not biases); DeepOBS uses 0.002 for 3C3D and 0.0005 for All-CNN-C"
    )
    augment: bool = option(True, "augment the training images of CIFAR-100: shift, flip and change colours")
    eps: float = option(1e-8, "ε of the adaptive optimizers")
    trust_radius: float = option(1e-4, "trust radius Δ of the scaled optimizers")
    evaluate_every: int = option(1, "number of epochs between evaluations")
    precision: str = option("tf32", f"precision of matrix products: {', '.join(PRECISIONS)}; on a CPU, tf32 is float32")
    device: str = option("auto", f"where to train: {', '.join(DEVICES)}")
    backend: str = option(
        "auto", f"backend of hesscale.compile_step: {', '.join(BACKENDS)}; auto is inductor on a GPU and traced on a CPU"
    )


PRESETS = {
    "smoke": Settings(optimizer="adam,adahesscale,scaled-adahesscale", step_size="1e-3,1e-2", seeds=2, epochs=2),
    "small": Settings(),
    "paper": Settings(task="cifar100-3c3d,cifar100-allcnnc", seeds=30),
}


def tasks(settings: Settings) -> list[Task]:
    problems = choose(settings.task, named(PROBLEMS), "task")
    if not problems:
        raise ValueError("task names no task")
    pairs = with_step_sizes(settings.optimizer, settings.step_size, IMAGE_OPTIMIZERS)
    known = {"activation": ACTIVATIONS, "padding": PADDINGS, "precision": PRECISIONS, "device": DEVICES}
    for name, values in {**known, "backend": ("auto", *BACKENDS)}.items():
        if getattr(settings, name) not in values:
            raise ValueError(f"{name}={getattr(settings, name)!r} is not one of {', '.join(values)}")
    check_least(settings, {"seeds": 1, "sgd_epochs": 1, "evaluate_every": 1, "epochs": 0, "batch": 0})
    check_numbers(settings, positive=["trust_radius"], not_negative=("l2", "eps"))
    has_gpu, device = torch.cuda.is_available(), settings.device
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if device == "cuda" and not has_gpu:
        raise ValueError("device=cuda, but torch finds no GPU here")
    backend = settings.backend
    if backend == "auto":
        backend = "inductor" if device == "cuda" else "traced"
    precision = "float32" if (settings.precision, device) == ("tf32", "cpu") else settings.precision
    shared: dict[str, Any] = {name: getattr(settings, name) for name in ("activation", "padding", "l2", "eps", "evaluate_every")}
    shared |= {"precision": precision, "device": device, "backend": backend}
    return [
        Task(
            problem=name,
            dataset=PROBLEMS[name].dataset,
            optimizer=optimizer,
            step_size=size,
            seed=seed,
            epochs=settings.epochs or PROBLEMS[name].epochs,
            times=settings.sgd_epochs if optimizer == "sgd" else 1,
            batch=settings.batch or PROBLEMS[name].batch,
            augment=settings.augment and PROBLEMS[name].is_augmented,
            trust_radius=settings.trust_radius if IMAGE_OPTIMIZERS[optimizer].is_scaled else 0.0,
            **shared,
        )
        for name, (optimizer, size), seed in itertools.product(problems, pairs, range(settings.seeds))
    ]


def work(settings: Settings) -> str:
    asked = tasks(settings)
    epochs = sum(task.all_epochs for task in asked)
    return f"{len(asked)} networks ({settings.task}), {epochs:,} epochs in all"


def is_timed(task: Task) -> bool:
    """Whether a task must run alone: on a GPU, seconds are wall time, and other runs would share the GPU."""
    return task.device == "cuda"


EXPERIMENT = Experiment(
    "supervised",
    "The accuracy of seven optimizers in image classification, by epochs and by seconds (Fig. 4, Appendix G).",
    Settings,
    PRESETS,
    Task,
    tasks,
    work,
    run,
    sections,
    alone=is_timed,
    run_together=run_together,
    kind=group_key,
    unit="epochs",
    amount=lambda task: task.all_epochs,
    watched=Watched("loss", "running_loss"),
    examples=("--optimizer adam@1e-3,adahesscale@1e-3 --seeds 5", "--task cifar100-3c3d --data DATA"),
)
