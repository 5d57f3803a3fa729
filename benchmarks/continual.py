"""Elastic weight consolidation with HesScaleGN's diagonal as importance, beside other importances and none.

Five tasks, one after the other, with one output layer for all: the images of each are permuted (an MLP), or rotated by another
angle (a CNN). λ is chosen for each importance in the same way: from a grid, by the mean accuracy on validation images after the
last task, with other seeds than those of the table.

    python benchmarks/continual.py --out results/continual
    python benchmarks/continual.py --dataset mnist --data DATA --out results/continual
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
import torch.nn.functional as F
from backpack import backpack, extend
from backpack.extensions import DiagGGNExact, SumGradSquared
from records import header, made_by, save
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hesscale.experiments.bench.measure import digits, message
from hesscale.experiments.lab.data import DataError, Dataset, load
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.lab.store import seeded
from hesscale.uses.continual import EWC, importance

TASKS = 5
DEGREES = 30  # between tasks
BATCH = 64
IMPORTANCE_BATCH = 32
TUNING_SEEDS = (1000, 1001)
LAMBDAS = [0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]
LAMBDAS_OF_ONES = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
Batches = DataLoader[tuple[Tensor, ...]]


@dataclass(frozen=True)
class Size:
    """How many images a task has, how many of them tell how much parameters matter, and for how long a task is trained."""

    train: int
    validation: int
    test: int
    importance: int
    epochs: int


SIZES = {"digits": Size(1200, 300, 297, 600, 10), "mnist": Size(3000, 1000, 2000, 600, 4)}


def by_backpack(extension: type, result: str) -> Callable[[nn.Module, Batches], dict[str, Tensor]]:
    """The sum over samples of what an extension of BackPACK computes, divided by their number."""

    def measure(model: nn.Module, batches: Batches) -> dict[str, Tensor]:
        copied, loss_fn = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss(reduction="sum"))
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for x, y in batches:
            with backpack(extension()):
                loss_fn(copied(x), y).backward()
            for name, p in copied.named_parameters():
                total[name] += getattr(p, result) / len(batches.dataset)  # type: ignore[arg-type]
        return total

    return measure


def ours(**options: Any) -> Callable[[nn.Module, Batches], dict[str, Tensor]]:
    return lambda model, batches: importance(model, batches, lambda model, x, y: F.cross_entropy(model(x), y), **options)


def ones(model: nn.Module, batches: Batches) -> dict[str, Tensor]:
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


IMPORTANCES: dict[str, Callable[[nn.Module, Batches], dict[str, Tensor]] | None] = {
    "none (fine-tuning)": None,
    "1 everywhere (L2)": ones,
    "empirical Fisher": by_backpack(SumGradSquared, "sum_grad_squared"),
    "HesScaleGN": ours(),
    "HesScaleGN, calibrated": ours(calibrate=True),
    "Monte-Carlo": ours(method="ggn_mc_per_sample"),
    "exact diag(G)": by_backpack(DiagGGNExact, "diag_ggn_exact"),
}


def mlp(pixels: int) -> nn.Sequential:
    width = 100 if pixels == 28 else 64
    hidden = (nn.Linear(pixels**2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10))


def cnn(pixels: int) -> nn.Sequential:
    kernel, stride = (5, 2) if pixels == 28 else (3, 1)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, kernel, stride), nn.ReLU(), nn.Conv2d(8, 16, kernel, stride), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def permuted(images: Tensor, task: int, seed: int) -> Tensor:
    """Each task has its own order of the pixels."""
    pixels = images[0].numel()
    order = torch.randperm(pixels, generator=torch.Generator().manual_seed(TASKS * seed + task))
    return images.flatten(1)[:, order].view_as(images)


def rotated(images: Tensor, task: int, seed: int) -> Tensor:
    angle = torch.tensor(DEGREES * task).deg2rad()
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]]).expand(len(images), 2, 3)
    return F.grid_sample(images, F.affine_grid(turn, list(images.shape), align_corners=False), align_corners=False)


SERIES: dict[str, tuple[Callable[[Tensor, int, int], Tensor], Callable[[int], nn.Sequential]]] = {
    "permuted": (permuted, mlp),
    "rotated": (rotated, cnn),
}


def tasks_of(dataset: Dataset, series: str, seed: int, size: Size, split: str) -> list[tuple[TensorDataset, TensorDataset]]:
    """For each task, images to learn and images to score, of ``"validation"`` or ``"test"``."""
    transform, found = SERIES[series][0], []
    inputs = {of: dataset.images(of).unsqueeze(1).float() / dataset.scale for of in ("train", "test")}
    for task in range(TASKS):
        generator = torch.Generator().manual_seed(TASKS * seed + task)
        order = torch.randperm(len(dataset.train_labels), generator=generator)
        learned, scored, of = order[: size.train], order[size.train : size.train + size.validation], "train"
        if split == "test":
            scored, of = torch.randperm(len(dataset.test_labels), generator=generator)[: size.test], "test"
        found.append(
            (
                TensorDataset(transform(inputs["train"][learned], task, seed), dataset.train_labels[learned]),
                TensorDataset(transform(inputs[of][scored], task, seed), dataset.labels(of)[scored]),
            )
        )
    return found


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    return float((model(x).argmax(1) == y).float().mean())


def run(dataset: Dataset, series: str, name: str, strength: float, seed: int, size: Size, split: str) -> dict[str, float]:
    """Learn all tasks. The mean accuracy after the last, what each lost since it was learned, and the time of an importance."""
    found, measure = tasks_of(dataset, series, seed, size, split), IMPORTANCES[name]
    when_learned, times = [], []
    with seeded(seed):
        model = SERIES[series][1](dataset.train_images.shape[-1])
        ewc = EWC(model)
        for data, scored in found:
            train(model, data, ewc, strength, size.epochs)
            when_learned.append(accuracy(model, scored))
            if measure is not None:
                some = TensorDataset(*[tensor[: size.importance] for tensor in data.tensors])
                batches: Batches = DataLoader(some, batch_size=IMPORTANCE_BATCH)
                plain = cpu_time(gradients, model, batches)
                start = time.process_time()
                ewc.consolidate(measure(model, batches))
                times.append((time.process_time() - start) / plain)
    after = [accuracy(model, scored) for _, scored in found]
    forgotten = [before - now for before, now in zip(when_learned[:-1], after[:-1], strict=True)]
    return {
        "accuracy": statistics.fmean(after),
        "forgetting": statistics.fmean(forgotten),
        "learned": statistics.fmean(when_learned),
        "time": statistics.median(times) if times else 0.0,
    }


def train(model: nn.Module, data: TensorDataset, ewc: EWC, strength: float, epochs: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs, labels = data.tensors
    for _ in range(epochs):
        for some in torch.randperm(len(labels)).split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[some]), labels[some])
            (loss + strength * ewc.penalty() if ewc.terms else loss).backward()
            optimizer.step()


def gradients(model: nn.Module, batches: Batches) -> None:
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()


def cpu_time(call: Callable[..., Any], *arguments: Any) -> float:
    start = time.process_time()
    call(*arguments)
    return time.process_time() - start


def grid_of(name: str) -> list[float]:
    return {"none (fine-tuning)": [0.0], "1 everywhere (L2)": LAMBDAS_OF_ONES}.get(name, LAMBDAS)


def mean_and_error(values: Sequence[float], scale: float = 100, places: int = 1) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{scale * statistics.fmean(values):.{places}f} ± {scale * error:.{places}f}"


def page(found: dict[str, Any]) -> str:
    size, results, tuned = found["size"], [], []
    for row in found["rows"]:
        of = {key: [result[key] for result in row["results"]] for key in row["results"][0]}
        cells = [mean_and_error(of[key]) for key in ("accuracy", "forgetting", "learned")]
        strength, cost = (f"{row['strength']:.3g}", f"{statistics.median(of['time']):.1f}") if row["strength"] else ("", "")
        results.append([row["importance"], *cells, strength, cost])
        grid = [f"{strength:.3g}: {100 * score:.1f}" for strength, score in row["grid"]]
        tuned.append([row["importance"], ", ".join(grid)])
    columns = ["importance", "accuracy, %", "forgetting, %", "when learned, %", "λ", "time"]
    return f"""# Elastic weight consolidation: {found["dataset"]}, {found["series"]}

{made_by(found)}
{TASKS} tasks of {size["train"]} images, {size["epochs"]} epochs of Adam at 1e-3 with batches of {BATCH}.
Importances are of {size["importance"]} of these images; BackPACK computes the empirical Fisher and the exact diagonal.
Means and standard errors of {len(found["seeds"])} seeds, on {size["test"]} test images per task:

- accuracy: after the last task, averaged over tasks;
- forgetting: how much of a task's accuracy was lost since it had been learned, averaged over all tasks but the last;
- when learned: the accuracy of each task when it had just been learned, averaged over tasks;
- time: CPU time of an importance, as a multiple of forward and backward passes over its images, in batches of {IMPORTANCE_BATCH}.

{markdown_table(columns, results)}

## Tuning

The mean accuracy on {size["validation"]} validation images per task after the last task, by λ, over {len(TUNING_SEEDS)} other
seeds.

{markdown_table(["importance", "λ: accuracy, %"], tuned)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=list(SIZES), default="digits")
    parser.add_argument("--data", type=Path, help="where MNIST is; digits need no files")
    parser.add_argument("--series", choices=list(SERIES), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, help="of each task")
    parser.add_argument("--out", type=Path, default=Path("results/continual"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of BackPACK
    try:
        dataset = load(options.dataset, options.data)
    except DataError as error:
        print(message(error), file=sys.stderr)
        return 2
    size = SIZES[options.dataset]
    size = Size(size.train, size.validation, size.test, size.importance, options.epochs or size.epochs)
    options.out.mkdir(parents=True, exist_ok=True)
    for series in options.series or SERIES:
        rows: list[dict[str, Any]] = []
        record = {**header("continual.py", arguments), "dataset": dataset.title, "size": vars(size), "series": series}
        record |= {"seeds": list(range(options.seeds)), "rows": rows}
        for name in IMPORTANCES:
            grid = []
            for strength in grid_of(name):
                tuning = [run(dataset, series, name, strength, seed, size, "validation") for seed in TUNING_SEEDS]
                grid.append((strength, digits(statistics.fmean([result["accuracy"] for result in tuning]))))
            best = max(grid, key=lambda pair: pair[1])[0]
            results = [run(dataset, series, name, best, seed, size, "test") for seed in record["seeds"]]
            rounded = [{key: digits(value) for key, value in result.items()} for result in results]
            rows.append({"importance": name, "strength": best, "grid": grid, "results": rounded})
            print(f"{series}, {name}: {grid}, {mean_and_error([result['accuracy'] for result in results])}", flush=True)
        save(options.out / f"{options.dataset}_{series}", record, page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
