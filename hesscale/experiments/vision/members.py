"""Networks that train together, each as if it were alone: epochs without synchronization, evaluation, and checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compile.ensemble import ensemble
from ...optim import CurvatureOptimizer
from .images import UNIFORM, Draws, Images, Split, augmented
from .problems import trained_parameters

PRECISIONS = ("float32", "tf32", "bf16")
AT_ONCE = 8192  # images that are augmented at once
EVALUATED_AT_ONCE = 2000


class Epoch(NamedTuple):
    """The mean loss of each member in an epoch, the seconds of the epoch, and the seconds of only its steps."""

    losses: list[float]
    seconds: float
    step_seconds: float


class Measured(NamedTuple):
    loss: float
    accuracy: float


class Members:
    """Networks of one architecture with optimizers of one kind.

    After :meth:`warm_up`, all steps run the same code, so that training from a saved state gives the same numbers.

    Args:
        models, optimizers: one per member, on the device of ``images``.
        images: the data.
        is_augmented: whether training images are augmented.
        batch: the batch size of one member.
        precision: one of ``PRECISIONS``. Parameters and averages are always float32.
        backend: of :func:`hesscale.compile_step`.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        images: Images,
        *,
        is_augmented: bool,
        batch: int,
        precision: str = "float32",
        backend: str = "inductor",
    ) -> None:
        if batch > len(images.train.labels):
            raise ValueError(f"a batch of {batch} is larger than the {len(images.train.labels)} training images")
        self.models, self.optimizers, self.images = models, optimizers, images
        self.batch, self.precision = batch, precision
        self.device = images.train.images.device
        self.padded = images.padded if is_augmented else None
        self.initial = [[p.detach().clone() for p in trained_parameters(model)] for model in models]
        is_mapped = len(models) > 1 and not any(isinstance(module, nn.Conv2d) for module in models[0].modules())
        self.step = ensemble(models, loss_of, optimizers, how="vmap" if is_mapped else "abreast", backend=backend)

    @property
    def steps(self) -> int:
        """The number of steps in an epoch. An incomplete last batch is left out."""
        return len(self.images.train.labels) // self.batch

    def warm_up(self) -> None:
        """Compile the step without training."""
        with self.running():
            self.step.warm_up(*self.first_batch())

    def first_batch(self) -> tuple[Tensor, Tensor]:
        """A batch of the first images, the same for all members."""
        first = torch.arange(self.batch, device=self.device).expand(1, len(self.models), self.batch)
        x, y = self.batches(Draws(first, torch.zeros(*first.shape, UNIFORM, device=self.device)))
        return x[0], y[0]

    def train(self, draws: Sequence[Draws]) -> Callable[[], Epoch]:
        """Start an epoch with one draw per member. Returns a function that waits for its end and returns the result."""
        clock, total = Clock(self.device), torch.zeros(len(self.models), device=self.device)
        begun = clock.now()
        stacked = Draws(*[torch.stack(parts, 1).to(self.device, non_blocking=True) for parts in zip(*draws, strict=True)])
        for model in self.models:
            model.train()
        with self.running():
            for chunk in zip(*[part.split(max(AT_ONCE // stacked.image[0].numel(), 1)) for part in stacked], strict=True):
                images, labels = self.batches(Draws(*chunk))
                clock.mark()
                for x, y in zip(images, labels, strict=True):
                    total += self.step(x, y)
                clock.mark()

        def end() -> Epoch:
            losses: list[float] = (total / len(stacked.image)).tolist()
            return Epoch(losses, clock.now() - begun, clock.marked())

        return end

    def batches(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Inputs and labels for draws of (steps, members, batch)."""
        if self.padded is None:
            return self.images.inputs(self.images.train.images[draws.image]), self.images.train.labels[draws.image]
        images = augmented(self.padded, draws, self.images.scale)
        return images.sub_(self.images.mean).div_(self.images.std), self.images.train.labels[draws.image]

    def evaluate(self, members: Sequence[int]) -> list[dict[str, Measured]]:
        """Loss and accuracy of some members by split, without augmentation. As many training as validation images are used."""
        count = len(self.images.validation.labels)
        train = Split(*[tensor[:count] for tensor in self.images.train])
        splits = {"train": train, "validation": self.images.validation, "test": self.images.test}
        with torch.no_grad(), self.running():
            sums = [torch.stack([self.sums(self.models[k], split) for split in splits.values()]) for k in members]
        counts = [len(split.labels) for split in splits.values()]
        found = torch.stack(sums).tolist() if sums else []
        return [
            {name: Measured(*[value / n for value in row]) for name, n, row in zip(splits, counts, rows, strict=True)}
            for rows in found
        ]

    def sums(self, model: nn.Module, split: Split) -> Tensor:
        """The sum of losses, and the number of correct predictions."""
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in zip(*[part.split(EVALUATED_AT_ONCE) for part in split], strict=True):
            outputs = model(self.images.inputs(images)).float()
            total += torch.stack([F.cross_entropy(outputs, labels, reduction="sum"), (outputs.argmax(1) == labels).sum()])
        return total

    def state(self, k: int) -> dict[str, Any]:
        """A copy of the state that a member's next epochs depend on."""
        return {name: [own(tensor) for tensor in tensors] for name, tensors in self.parts(k).items()} | {
            "step_counts": [group.get("step_count", 0) for group in self.optimizers[k].param_groups]
        }

    def load(self, k: int, state: dict[str, Any] | None) -> None:
        """Load a saved state, or the initial one, in place, since the compiled step refers to its tensors."""
        optimizer = self.optimizers[k]
        for name, tensors in self.parts(k).items():
            saved = state[name] if state else self.initial[k] if name == "parameters" else [0.0] * len(tensors)
            with torch.no_grad():
                for tensor, value in zip(tensors, saved, strict=True):
                    tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)
        for i, group in enumerate(optimizer.param_groups):
            if "step_count" in group:
                group["step_count"] = state["step_counts"][i] if state else 0
        if isinstance(optimizer, CurvatureOptimizer):
            optimizer.acknowledge_nonfinite_steps()

    def parts(self, k: int) -> dict[str, list[Tensor]]:
        """The tensors that a step changes."""
        parameters, optimizer = trained_parameters(self.models[k]), self.optimizers[k]
        counters: dict[str, Tensor] = getattr(optimizer, "counters", {})
        return {
            "parameters": parameters,
            "averages": [entries[name] for p in parameters for entries in [optimizer.state[p]] for name in sorted(entries)],
            "counters": [counters[name] for name in sorted(counters)],
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Use the chosen precision, and cuDNN's fastest algorithms, inside the block."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, *[self.precision != "float32"] * 2
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
                yield
        finally:
            cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


class Clock:
    """Measures seconds: process time on a CPU, since other processes may use it too, and wall time on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.now: Callable[[], float] = time.perf_counter if self.is_gpu else time.process_time
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Record the time at which the device reaches this point, as the beginning or the end of an interval."""
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(self.now())

    def marked(self) -> float:
        """The seconds of all intervals. The device must have reached their ends."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        return float(sum(begin.elapsed_time(end) / 1000 if self.is_gpu else end - begin for begin, end in pairs))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
