"""Train one network with one optimizer, in blocks of steps: metrics, checkpoints, and divergence.

Batches are drawn with replacement. The batches of a block depend only on the seed and the block, so they are the same for every
optimizer, and for a resumed run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compile.step import compile_step
from ...errors import NonFiniteError
from ..lab.store import Run, seeded
from ..optimizers import OPTIMIZERS
from ..vision.images import number_of
from ..vision.members import Clock
from ..vision.problems import trained_parameters
from .problem import Splits, loss_of
from .registry import PROBLEMS

BLOCK = 20  # steps without evaluations or checkpoints in between
LAST = 50  # the number of last steps over which the training loss is averaged
EVALUATED_AT_ONCE = 500
CHECKPOINT_SECONDS = 20.0
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class Task:
    """One network to train."""

    problem: str
    dataset: str
    optimizer: str
    step_size: float
    seed: int
    steps: int
    batch: int
    eps: float  # 0 for the optimizer's default
    schedule: str
    evaluations: int
    eval_size: int  # 0 for all examples
    device: str
    backend: str

    @property
    def evaluate_every(self) -> int:
        """The number of steps between evaluations, a multiple of BLOCK. The end is always evaluated."""
        return BLOCK * math.ceil(self.steps / self.evaluations / BLOCK)


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        steps: the number of completed steps.
        diverged_at: the step at which a loss, a gradient or a Hessian diagonal was not finite.
        first: the loss of the first step.
        largest: the largest finite loss.
        last: losses of the last steps.
        seconds: of all steps.
        paces: seconds of a step in each block.
    """

    steps: int = 0
    diverged_at: int | None = None
    first: float = math.nan
    largest: float = -math.inf
    last: list[float] = field(default_factory=list)
    seconds: float = 0.0
    paces: list[float] = field(default_factory=list)

    def add(self, losses: list[float], seconds: float) -> None:
        """Add the losses of a block. The last one may be non-finite."""
        self.seconds += seconds
        self.paces.append(seconds / len(losses))
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not self.steps:
            self.first = losses[0]
        if len(finite) < len(losses):
            self.diverged_at = self.steps + 1 + next(k for k, loss in enumerate(losses) if not math.isfinite(loss))
        self.steps += len(losses)
        self.largest = max([self.largest, *finite])
        self.last = [*self.last, *losses][-LAST:]

    @property
    def train_loss(self) -> float:
        return statistics.fmean(self.last)

    def values(self) -> dict[str, Any]:
        """Results by name. The time of a step is that in the median block, since other processes may use the machine at times."""
        return {
            "diverged_at": self.diverged_at,
            "worst": self.largest / self.first if math.isfinite(self.first) else None,
            "seconds": self.seconds,
            "step_seconds": statistics.median(self.paces),
        }


def run(task: Task, run: Run, data: Path | None) -> Mapping[str, Any]:
    splits = PROBLEMS[task.problem].load(data, torch.device(task.device))
    with seeded(0):
        return train(task, run, splits)


def train(task: Task, run: Run, splits: Splits) -> dict[str, Any]:
    """Train to the end, or until the run diverges."""
    training, progress = Training(task, splits), Progress()
    if run.state:
        training.load(run.state["training"])
        progress = Progress(**run.state["progress"])
    training.warm_up()
    measured: dict[str, float] = {}
    saved = time.monotonic()
    while progress.steps < task.steps and progress.diverged_at is None:
        progress.add(*training.block(progress.steps))
        run.progress(progress.steps, task.steps)
        is_over = progress.steps == task.steps
        if progress.diverged_at is None and (is_over or progress.steps % task.evaluate_every == 0):
            measured = {"train_loss": progress.train_loss, **training.evaluate()}
            if all(map(math.isfinite, measured.values())):
                run.log(progress.steps, **measured, seconds=progress.seconds)
            else:
                progress.diverged_at = progress.steps
        if not is_over and progress.diverged_at is None and time.monotonic() - saved > CHECKPOINT_SECONDS:
            run.checkpoint({"training": training.state(), "progress": asdict(progress)})
            saved = time.monotonic()
    values = {**progress.values(), "mode": training.mode}
    return values | (measured if progress.diverged_at is None else {})


class Training:
    """A network, its optimizer, and the function that makes a step."""

    def __init__(self, task: Task, splits: Splits) -> None:
        if task.batch > splits.train.count:
            raise ValueError(f"a batch of {task.batch} is larger than the {splits.train.count} training examples")
        self.task, self.splits, self.device = task, splits, torch.device(task.device)
        self.model = PROBLEMS[task.problem].network(splits.classes, task.seed).to(self.device)
        self.optimizer: Any = self.make_optimizer()
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.is_eager = task.backend == "eager"
        self.compiled = None if self.is_eager else compile_step(self.model, loss_of, self.optimizer, backend=task.backend)

    def make_optimizer(self) -> torch.optim.Optimizer:
        spec, parameters = OPTIMIZERS[self.task.optimizer], trained_parameters(self.model)
        optimizer = spec.make(parameters, self.task.step_size)
        if self.task.eps and "eps" in optimizer.defaults:
            optimizer = spec.make(parameters, self.task.step_size, eps=self.task.eps)
        return optimizer

    @property
    def mode(self) -> str:
        return "eager" if self.compiled is None else self.compiled.mode

    def warm_up(self) -> None:
        """Compile the step, so that all steps run the same code, even after an interruption."""
        if self.compiled is not None:
            x, y = self.batches(0, 1)
            self.model.train()
            self.compiled.warm_up(x[0], y[0])

    def batches(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number_of("batches", self.task.seed, start))
        numbers = torch.randint(self.splits.train.count, (count, self.task.batch), generator=generator, device="cpu")
        return self.splits.train.take(numbers.to(self.device))

    def block(self, start: int) -> tuple[list[float], float]:
        """The losses of the next steps, and their time in seconds. If a number was not finite, the last loss is NaN."""
        batches = self.batches(start, min(BLOCK, self.task.steps - start))
        torch.manual_seed(number_of("steps", self.task.seed, start))
        self.model.train()
        clock, found, is_finite = Clock(self.device), [], True
        clock.mark()
        try:
            for k, (x, y) in enumerate(zip(*batches, strict=True)):
                self.set_rate(start + k)
                found.append(self.step(x, y))
        except NonFiniteError:
            is_finite = False
        clock.mark()
        losses: list[float] = torch.stack(found).tolist() if found else []  # waits for the device
        if not is_finite or int(getattr(self.optimizer, "nonfinite_steps", 0)):  # on a GPU, the error is raised some steps later
            losses.append(math.nan)
        return losses, clock.marked()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        if self.compiled is not None:
            return self.compiled(x, y)
        self.optimizer.zero_grad()
        loss = loss_of(self.model, x, y)
        if hasattr(self.optimizer, "backward"):
            self.optimizer.backward(loss)
        else:
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def set_rate(self, step: int) -> None:
        if self.task.schedule == "cosine":
            factor = (1 + math.cos(math.pi * step / self.task.steps)) / 2
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = factor * rate

    def evaluate(self) -> dict[str, float]:
        """Mean loss and accuracy over the predictions of the validation and test splits."""
        self.model.eval()
        found: dict[str, float] = {}
        with torch.no_grad():
            for name, split in (("validation", self.splits.validation), ("test", self.splits.test)):
                total, count = torch.zeros(2, dtype=torch.float64, device=self.device), 0
                for numbers in split.evaluated[: self.task.eval_size or None].split(EVALUATED_AT_ONCE):
                    x, y = split.take(numbers)
                    outputs, labels = self.model(x).flatten(0, -2), y.flatten()
                    right = (outputs.argmax(1) == labels).sum()
                    total += torch.stack([F.cross_entropy(outputs, labels, reduction="sum"), right])
                    count += len(labels)
                loss, accuracy = (total / count).tolist()
                found |= {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
        return found

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
