"""Train the networks of several tasks at once, each with its own run: metrics, checkpoints, and divergence."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..lab.store import Pause, Run, seeded
from .config import Task, group_key, optimizer_of
from .images import Draws, Images, draw, load_images, number_of
from .members import Epoch, Measured, Members
from .problems import PROBLEMS

CHECKPOINT_SECONDS = 20.0


def run(task: Task, run: Run, data: Path | None) -> Mapping[str, Any]:
    return run_together([task], [run], data)[0]


def run_together(tasks: Sequence[Task], runs: Sequence[Run], data: Path | None) -> list[Mapping[str, Any]]:
    """Train the networks of several tasks, which differ only in step size and seed, in one compiled step.

    Each network is trained as it would be alone, except for random numbers that are drawn within steps (dropout, GGN-MC,
    AdaHessian). Tasks that were interrupted after different epochs train separately.
    """
    if len({group_key(task) for task in tasks}) > 1:
        raise ValueError("networks can train together only if nothing but their step sizes and seeds differs")
    epochs = [run.state["epoch"] if run.state else 0 for run in runs]
    values: dict[int, Mapping[str, Any]] = {}
    problem, device = PROBLEMS[tasks[0].problem], torch.device(tasks[0].device)
    images = load_images(problem, data, device)
    with seeded(0):
        for epoch in dict.fromkeys(epochs):
            chosen = [k for k, reached in enumerate(epochs) if reached == epoch]
            found = train([tasks[k] for k in chosen], [runs[k] for k in chosen], images, epoch)
            values.update(zip(chosen, found, strict=True))
    return [values[k] for k in range(len(tasks))]


@dataclass
class Progress:
    """The progress of one network. If networks train together, each has an equal share of the seconds.

    Attributes:
        diverged_at: the first epoch in which the loss was not finite, or more than half of the steps were skipped because
            gradients were not finite.
        epoch_seconds: the seconds of each epoch.
        at_once: how many networks trained together in each epoch. This may change after an interruption.
        step_seconds: the seconds of all steps.
        noted: the optimizer's counters at the end of the last epoch.
    """

    diverged_at: int | None = None
    epoch_seconds: list[float] = field(default_factory=list)
    at_once: list[int] = field(default_factory=list)
    step_seconds: float = 0.0
    noted: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at_once = [0] * (len(self.epoch_seconds) - len(self.at_once)) + self.at_once  # earlier versions did not record it

    @property
    def seconds(self) -> float:
        return sum(self.epoch_seconds)

    def add(self, epoch: int, done: Epoch, k: int, together: int, noted: dict[str, float], steps: int) -> None:
        """Add an epoch of network ``k`` with this number of steps."""
        self.epoch_seconds.append(done.seconds / together)
        self.at_once.append(together)
        self.step_seconds += done.step_seconds / together
        left_out = noted.get("nonfinite_steps", 0) - self.noted.get("nonfinite_steps", 0)
        self.noted = noted
        if not math.isfinite(done.losses[k]) or 2 * left_out > steps:
            self.diverged_at = epoch

    def values(self, images: int, together: int) -> dict[str, Any]:
        """Results by name. The pace is that of the median epoch, since other processes may use the machine at times.

        Args:
            images: the number of images in an epoch.
            together: only epochs in which this number of networks trained together are used for the pace.
        """
        comparable = [seconds for seconds, at_once in zip(self.epoch_seconds, self.at_once, strict=True) if at_once == together]
        pace = images / statistics.median(comparable) if comparable else math.nan
        outside = 1 - self.step_seconds / self.seconds if self.epoch_seconds else math.nan
        shares = {"seconds": self.seconds, "images_per_second": pace, "outside_steps": outside}
        return {"diverged_at": self.diverged_at, "together": together, **shares, **self.noted}


def train(tasks: Sequence[Task], runs: Sequence[Run], images: Images, epoch: int) -> list[dict[str, Any]]:
    """Train from this epoch to the end. A network that has diverged is not trained any further."""
    members = members_of(tasks, images)
    members.warm_up()
    states = [run.state for run in runs if run.state]
    for k, state in enumerate(states):
        members.load(k, state["member"])
    progress = [Progress(**state["progress"]) for state in states] or [Progress() for _ in runs]
    last: dict[int, dict[str, Measured]] = {}
    alive = [k for k, found in enumerate(progress) if found.diverged_at is None]
    total, saved = tasks[0].all_epochs, time.monotonic()
    draws = draw_all(tasks, images, epoch)
    if not epoch:
        log(members, alive, runs, progress, 0)
        alive = [k for k in alive if progress[k].diverged_at is None]
    while epoch < total and alive:
        torch.manual_seed(number_of("steps", [(task.seed, task.step_size) for task in tasks], epoch))
        end = members.train(draws)
        epoch += 1
        draws = draw_all(tasks, images, epoch)  # on the CPU, while the device computes
        done = end()
        for k in alive:
            progress[k].add(epoch, done, k, len(tasks), noted(members, k), members.steps)
            runs[k].progress(epoch, total)
        alive = [k for k in alive if progress[k].diverged_at is None]
        if epoch % tasks[0].evaluate_every == 0 or epoch == total:
            last = log(members, alive, runs, progress, epoch, done.losses)
            alive = [k for k in alive if progress[k].diverged_at is None]
        if epoch < total and alive and time.monotonic() - saved > CHECKPOINT_SECONDS:
            save(members, runs, progress, epoch)
            saved = time.monotonic()
    values = [found.values(members.steps * tasks[0].batch, len(tasks)) for found in progress]
    mode = {"mode": ", ".join(members.step.modes)}  # of every kind of step
    return [{**values[k], **mode, **(by_name(last[k]) if k in alive else {})} for k in range(len(tasks))]


def draw_all(tasks: Sequence[Task], images: Images, epoch: int) -> list[Draws]:
    found = {seed: draw(len(images.train.labels), tasks[0].batch, seed, epoch) for seed in {task.seed for task in tasks}}
    return [found[task.seed] for task in tasks]


def members_of(tasks: Sequence[Task], images: Images) -> Members:
    task, problem = tasks[0], PROBLEMS[tasks[0].problem]
    device = images.train.images.device
    models = [problem.network(images.classes, each.seed, task.activation, task.padding).to(device) for each in tasks]
    if device.type == "cuda":  # cuDNN's fast kernels need channels last
        for model in models:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizers = [optimizer_of(each, model) for each, model in zip(tasks, models, strict=True)]
    return Members(
        *(models, optimizers, images),
        is_augmented=task.augment,
        batch=task.batch,
        precision=task.precision,
        backend=task.backend,
    )


def log(
    members: Members,
    alive: Sequence[int],
    runs: Sequence[Run],
    progress: Sequence[Progress],
    epoch: int,
    losses: Sequence[float] = (),
) -> dict[int, dict[str, Measured]]:
    """Evaluate and log the networks that have not diverged. A network with a non-finite loss counts as diverged from now on."""
    found = dict(zip(alive, members.evaluate(alive), strict=True))
    for k, measured in found.items():
        if not all(math.isfinite(part.loss) for part in measured.values()):
            progress[k].diverged_at = epoch
            continue
        running = {"running_loss": losses[k]} if losses else {}
        runs[k].log(epoch, **by_name(measured), **running, seconds=progress[k].seconds)
    return found


def by_name(measured: Mapping[str, Measured]) -> dict[str, float]:
    return {f"{split}_{what}": value for split, found in measured.items() for what, value in found._asdict().items()}


def noted(members: Members, k: int) -> dict[str, float]:
    """The optimizer's counters: skipped steps, and the fraction of steps that a trust region shortened."""
    optimizer: Any = members.optimizers[k]
    values = {"nonfinite_steps": optimizer.nonfinite_steps} if hasattr(optimizer, "nonfinite_steps") else {}
    shares = getattr(optimizer, "scaled_share", {})
    return values | ({"scaled_share": float(shares[0])} if shares else {})


def save(members: Members, runs: Sequence[Run], progress: Sequence[Progress], epoch: int) -> None:
    """Write the checkpoints of all runs, before a :class:`Pause` of any of them is raised."""
    pause: Pause | None = None
    for k, run in enumerate(runs):
        try:
            run.checkpoint({"epoch": epoch, "member": members.state(k), "progress": asdict(progress[k])})
        except Pause as reached:
            pause = reached
    if pause is not None:
        raise pause
