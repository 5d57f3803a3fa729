"""Networks that benchmarks/pruning.py and benchmarks/quantization.py start from: trained with Adam and kept in a folder.

The same seed gives the same network, the same batches and, on the same machine, the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.tasks.problem import Problem, Split, Splits, loss_of
from hesscale.experiments.tasks.registry import PROBLEMS

STEP_SIZE = 1e-3
EVALUATED_AT_ONCE = 250


@dataclass(frozen=True)
class Case:
    """A problem, and how much of it is used.

    Attributes:
        problem: its name in :mod:`hesscale.experiments.tasks`.
        steps, batch: of training.
        evaluated: how many test examples are evaluated.
        examples: how many training examples derivatives are averaged over, and the size of their batches.
    """

    problem: str
    steps: int
    batch: int
    evaluated: int
    examples: tuple[int, int]

    @property
    def source(self) -> Problem:
        return PROBLEMS[self.problem]


CASES = (
    Case("digits-relu", 1000, 64, 297, (1024, 256)),
    Case("char-gpt", 1500, 16, 200, (128, 16)),
    Case("cifar100-3c3d", 400, 64, 1000, (512, 64)),
)


def train(model: nn.Module, split: Split, steps: int, batch: int, seed: int) -> None:
    """Steps of Adam, in training mode; the network is in evaluation mode afterwards."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=STEP_SIZE)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, *split.take(torch.randint(split.count, (batch,), generator=generator))).backward()
        optimizer.step()
    model.eval()


def trained(case: Case, splits: Splits, seed: int, folder: Path) -> nn.Module:
    """The trained network of this seed, from the folder if it is there already."""
    model = case.source.network(splits.classes, seed)
    path = folder / f"{case.problem}-{case.steps}x{case.batch}-seed{seed}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    train(model, splits.train, case.steps, case.batch, seed)
    write_whole(path, lambda file: torch.save(model.state_dict(), file))
    print(f"{case.source.title}, seed {seed}: trained", flush=True)
    return model


def examples(case: Case, split: Split, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of training examples to average derivatives over."""
    count, batch = case.examples
    numbers = torch.randint(split.count, (count,), generator=torch.Generator().manual_seed(1000 + seed))
    return [split.take(some) for some in numbers.split(batch)]


@torch.no_grad()
def evaluate(model: nn.Module, case: Case, split: Split) -> tuple[float, float]:
    """Mean loss and accuracy over the first test examples, and over all predictions of each."""
    loss = right = count = 0.0
    for numbers in split.evaluated[: case.evaluated].split(EVALUATED_AT_ONCE):
        x, y = split.take(numbers)
        loss += float(loss_of(model, x, y)) * y.numel()
        right += float((model(x).argmax(-1) == y).sum())
        count += y.numel()
    return loss / count, right / count
