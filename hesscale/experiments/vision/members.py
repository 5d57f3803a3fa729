"""Networks that train together, each as if alone: epochs without a look at the device, evaluation, and what is saved."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compile.ensemble import ensemble
from ...compile.step import CompiledStep
from ...optim import CurvatureOptimizer
from .images import UNIFORM, Draws, Images, Split, augmented

PRECISIONS = ("float32", "tf32", "bf16")
WARM_UP = 4  # steps until one runs as all later ones do: in eager mode, compiled, captured
AT_ONCE = 8192  # images that are made ready at once
EVALUATED_AT_ONCE = 2000


class Epoch(NamedTuple):
    """What an epoch gave: the mean loss of each member's batches, and seconds, of all members and of their steps alone."""

    losses: list[float]
    seconds: float
    step_seconds: float


class Measured(NamedTuple):
    loss: float
    accuracy: float


class Members:
    """Networks of one architecture with optimizers of one kind.

    After :meth:`warm_up` every step runs in the same way, so that training can go on from a saved state to the same numbers.

    Args:
        models, optimizers: one per member, on the device of ``images``.
        images: what they learn.
        is_augmented: whether images for training are shifted, flipped and recoloured.
        batch: images in a step of one member.
        precision: one of ``PRECISIONS``; parameters and their averages are float32 in any case.
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
            raise ValueError(f"a batch of {batch} cannot be had from {len(images.train.labels)} images")
        self.models, self.optimizers, self.images = models, optimizers, images
        self.batch, self.precision = batch, precision
        self.device = images.train.images.device
        self.padded = images.padded if is_augmented else None
        self.initial = [[p.detach().clone() for p in model.parameters()] for model in models]
        is_mapped = len(models) > 1 and not any(isinstance(module, nn.Conv2d) for module in models[0].modules())
        self.step: CompiledStep = ensemble(models, loss_of, optimizers, how="vmap" if is_mapped else "abreast", backend=backend)

    @property
    def steps(self) -> int:
        """Of an epoch; images that are too few for a batch are left out."""
        return len(self.images.train.labels) // self.batch

    def warm_up(self) -> None:
        """Compile the step by taking some, each from the beginning: what it becomes is compared where numbers are sound."""
        some = torch.arange(self.batch, device=self.device).expand(1, len(self.models), self.batch)
        x, y = self.batches(Draws(some, torch.zeros(*some.shape, UNIFORM, device=self.device)))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups if "step_count" in group]
        kinds = min(getattr(self.optimizers[0], "curvature_every", 1), 2)  # of steps: with curvature, and without
        with self.running():
            for kind in [kind for kind in range(kinds) for _ in range(WARM_UP)]:
                for count in range(kind + 1):
                    for group in groups:
                        group["step_count"] = count
                    self.step(x[0], y[0])
                for k in range(len(self.models)):
                    self.load(k, None)

    def train(self, draws: Sequence[Draws]) -> Callable[[], Epoch]:
        """Begin an epoch, of one draw per member; what comes back waits for its end, where alone the device is looked at."""
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
        """Loss and accuracy of some members by split: images without changes, of those for training as many as for validation."""
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
        """Over images: losses, and how many are right."""
        model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in zip(*[part.split(EVALUATED_AT_ONCE) for part in split], strict=True):
            outputs = model(self.images.inputs(images)).float()
            total += torch.stack([F.cross_entropy(outputs, labels, reduction="sum"), (outputs.argmax(1) == labels).sum()])
        return total

    def state(self, k: int) -> dict[str, Any]:
        """All that a member's next epochs depend on, in memory of its own."""
        return {name: [own(tensor) for tensor in tensors] for name, tensors in self.parts(k).items()} | {
            "step_counts": [group.get("step_count", 0) for group in self.optimizers[k].param_groups]
        }

    def load(self, k: int, state: dict[str, Any] | None) -> None:
        """Go on from a saved state, or from the beginning. Tensors stay where they are, as does the compiled step."""
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
        parameters, optimizer = list(self.models[k].parameters()), self.optimizers[k]
        counters: dict[str, Tensor] = getattr(optimizer, "counters", {})
        return {
            "parameters": parameters,
            "averages": [entries[name] for p in parameters for entries in [optimizer.state[p]] for name in sorted(entries)],
            "counters": [counters[name] for name in sorted(counters)],
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """In the precision asked for, with cuDNN's fastest algorithms."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, *[self.precision != "float32"] * 2
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16", cache_enabled=False):
                yield
        finally:
            cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


class Clock:
    """Seconds: of the processor on a CPU, which other processes may use too, and on the wall where there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.now: Callable[[], float] = time.perf_counter if self.is_gpu else time.process_time
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Note the time at which the device comes here: the beginning of a stretch, or its end."""
        if self.is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(self.now())

    def marked(self) -> float:
        """In all stretches; the device must have passed their ends."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        return float(sum(begin.elapsed_time(end) / 1000 if self.is_gpu else end - begin for begin, end in pairs))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
