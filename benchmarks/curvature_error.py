"""What bfloat16 products cost in accuracy: Hessian diagonals with ``curvature_dtype=torch.bfloat16``, and training with them.

Networks on scikit-learn's digits, and 3C3D on CIFAR-100 where a folder with it is given. Each is measured on one batch as
initialized and after training by Adam: for every parameter the relative L¹ error ‖s_bf16 − s‖₁ / ‖s‖₁ and the cosine of the two,
and for scale the distance of s itself to the exact diagonal. Then AdaHesScale trains with both, from the same seeds; products in
float64 show how far two runs part by rounding alone.

    python benchmarks/curvature_error.py --cifar data --out results/curvature_error
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from learning import batches, cell, digits, loss_on, summary
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import hesscale
from hesscale.estimators import estimate
from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.vision.problems import three_c_three_d
from hesscale.optim import AdaHesScale, AdaHesScaleGN

BATCH = 64  # images that a diagonal is computed for
METHODS = ("hesscale", "hesscale_gn")
PRODUCTS = {"float32": None, "bfloat16": torch.bfloat16, "float64": torch.float64}
MLP, CNN = "MLP 64-32-32-10", "CNN, two convolutions"
RUNS = (  # step sizes at which these learn in 300 steps; for the MLP those of results/learning
    (MLP, AdaHesScale, 0.01),
    (MLP, AdaHesScaleGN, 0.003),
    (CNN, AdaHesScale, 0.003),
    (CNN, AdaHesScaleGN, 0.003),
)
COLOURS = {"float32": "#1f5a96", "bfloat16": "#c0392b", "float64": "#7a7a7a"}


class Residual(nn.Module):
    """x + f(x)"""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Attention(nn.Module):
    """Softmax attention with two heads, of plain operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inward(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)  # each (batch, head, token, channel)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.outward((weights @ v).transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """Adds a learned vector to each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(0.1 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.vectors


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))


def convolutional() -> nn.Module:
    body = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ELU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1)]
    return nn.Sequential(*body, nn.ELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10))


def residual() -> nn.Module:
    def block() -> nn.Module:
        first = [nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        return Residual(*first, nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))

    stem = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*stem, block(), nn.ReLU(), block(), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    """Rows of the image are tokens."""

    def block(width: int) -> list[nn.Module]:
        perceptron = [nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)]
        return [Residual(nn.LayerNorm(width), Attention(width)), Residual(*perceptron)]

    stem = [nn.Unflatten(1, (8, 8)), nn.Linear(8, 16), Positions(8, 16)]
    return nn.Sequential(*stem, *block(16), *block(16), nn.LayerNorm(16), Mean(), nn.Linear(16, 10))


@dataclass(frozen=True)
class Problem:
    """A network, its training images and labels, and how Adam trains it."""

    make: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    steps: int
    step_size: float
    has_exact: bool = True  # small enough for one double backward per parameter

    def network(self, seed: int) -> nn.Module:
        """Initialized by ``seed`` alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cifar", type=Path, help="a folder with cifar-100-python/train, for 3C3D; left out otherwise")
    parser.add_argument("--seeds", type=int, default=20, help="training runs of each optimizer, dtype and network")
    parser.add_argument("--steps", type=int, default=300, help="steps of a training run")
    parser.add_argument("--out", type=Path, default=Path("results/curvature_error"))
    options = parser.parse_args(arguments)
    if min(options.seeds, options.steps) < 1:
        parser.error("--seeds and --steps must be at least 1")
    started = time.perf_counter()
    torch.set_num_threads(1)  # reproducible
    images = digits().train
    problems = {
        MLP: Problem(perceptron, images, 300, 0.01),
        CNN: Problem(convolutional, images, 300, 0.01),
        "ResNet with batch norm": Problem(residual, images, 300, 0.01),
        "transformer, two blocks": Problem(transformer, images, 300, 0.01),
    }
    if options.cifar is not None:
        problems["3C3D, CIFAR-100"] = Problem(three_c_three_d, cifar100(options.cifar), 150, 0.001, has_exact=False)
    diagonals = {}
    for name, problem in problems.items():
        diagonals[name] = measure(problem)
        print(f"{name}: measured ({time.perf_counter() - started:.0f} s)", flush=True)
    training: dict[str, Any] = {}
    for network, optimizer, step_size in RUNS:
        name = f"{network}, {optimizer.__name__}"
        training[name] = compare(problems[network], optimizer, step_size, options)
        print(f"{name}: trained ({time.perf_counter() - started:.0f} s)", flush=True)
    record = {
        "command": command(options),
        "torch": torch.__version__,
        "batch": BATCH,
        "seeds": options.seeds,
        "steps": options.steps,
        "diagonals": diagonals,
        "training": training,
    }
    save(options.out, record)
    print(markdown(record))
    print(f"Wrote {options.out}/curvature_error.json, .md and .png in {time.perf_counter() - started:.0f} s.")


def command(options: argparse.Namespace) -> str:
    cifar = "" if options.cifar is None else f" --cifar {options.cifar}"
    return f"python benchmarks/curvature_error.py --seeds {options.seeds} --steps {options.steps}{cifar} --out {options.out}"


def cifar100(folder: Path) -> tuple[Tensor, Tensor]:
    """The first 10,000 training images, centred and scaled, and their 100 labels."""
    found = pickle.loads((folder / "cifar-100-python/train").read_bytes(), encoding="latin1")
    images = torch.tensor(found["data"][:10_000]).view(-1, 3, 32, 32).float() / 255
    deviation, mean = torch.std_mean(images, (0, 2, 3), keepdim=True)
    return (images - mean) / deviation, torch.tensor(found["fine_labels"][:10_000])


def measure(problem: Problem) -> dict[str, Any]:
    """The errors as initialized, and after training by torch's Adam."""
    model = problem.network(0)
    images, labels = problem.train
    found = {"parameters": sum(p.numel() for p in model.parameters()), "initialized": errors(model, problem)}
    optimizer = torch.optim.Adam(model.parameters(), lr=problem.step_size)
    for batch in itertools.islice(batches(len(images), BATCH, 0), problem.steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return {**found, "trained": errors(model, problem), "trained_steps": problem.steps}


def errors(model: nn.Module, problem: Problem) -> dict[str, Any]:
    """Distances between diagonals on the first images: by method bfloat16 to float32, and HesScale's to the exact diagonal."""
    names, params = zip(*model.named_parameters(), strict=True)
    images, labels = problem.train[0][:BATCH], problem.train[1][:BATCH]

    def loss() -> Tensor:
        return F.cross_entropy(model(images), labels)

    found: dict[str, Any] = {"loss": rounded(loss().item())}
    diagonals: dict[str, Sequence[Any]] = {}
    for method in METHODS:
        diagonals[method] = hesscale.grad(loss(), params, method=method)[1]
        low = hesscale.grad(loss(), params, method=method, curvature_dtype=torch.bfloat16)[1]
        found[method] = distances(names, low, diagonals[method])
    if problem.has_exact:
        exact = estimate("exact", loss(), params)
        found["to_the_exact_diagonal"] = distances(names, diagonals["hesscale"], exact)
    return found


def distances(names: Sequence[str], found: Sequence[Tensor], truth: Sequence[Tensor]) -> dict[str, Any]:
    """Relative L¹ error and cosine by parameter and over all, and the share of entries that are off by a tenth of themselves."""
    pairs = [(a.double().flatten(), b.double().flatten()) for a, b in zip(found, truth, strict=True)]
    everything = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    error = {name: distance(*pair) for name, pair in zip(names, pairs, strict=True)}
    cosine = {name: F.cosine_similarity(*pair, dim=0, eps=0).item() for name, pair in zip(names, pairs, strict=True)}
    off = (everything[0] - everything[1]).abs() > 0.1 * everything[1].abs()
    return {
        "all": rounded(distance(*everything)),
        "median": rounded(statistics.median(error.values())),
        "worst": rounded(max(error.values())),
        "worst_parameter": max(error, key=lambda name: error[name]),
        "smallest_cosine": float(f"{min(cosine.values()):.7g}"),
        "off_by_a_tenth": rounded(off.double().mean().item()),
        "error": {name: rounded(value) for name, value in error.items()},
        "cosine": {name: float(f"{value:.7g}") for name, value in cosine.items()},
    }


def distance(found: Tensor, truth: Tensor) -> float:
    return ((found - truth).abs().sum() / truth.abs().sum()).item()


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def compare(problem: Problem, optimizer: Any, step_size: float, options: argparse.Namespace) -> dict[str, Any]:
    """Final training losses by dtype of the products, and their differences to float32's, seed by seed."""
    final = {
        name: [train(problem, optimizer, step_size, dtype, seed, options.steps) for seed in range(options.seeds)]
        for name, dtype in PRODUCTS.items()
    }
    return {
        "step_size": step_size,
        "final_training_loss": {name: [rounded(loss) for loss in losses] for name, losses in final.items()},
        "mean": {name: summary(losses) for name, losses in final.items()},
        "difference": {
            name: summary([a - b for a, b in zip(losses, final["float32"], strict=True)])
            for name, losses in final.items()
            if name != "float32"
        },
    }


def train(problem: Problem, optimizer: Any, step_size: float, dtype: torch.dtype | None, seed: int, steps: int) -> float:
    """The loss over all training images at the end."""
    model, (images, labels) = problem.network(seed), problem.train
    opt = optimizer.paper(model.parameters(), lr=step_size, curvature_dtype=dtype)
    for batch in itertools.islice(batches(len(images), BATCH, seed), steps):
        opt.zero_grad()
        opt.backward(F.cross_entropy(model(images[batch]), labels[batch]))
        opt.step()
    return loss_on(model, problem.train)


def save(folder: Path, record: dict[str, Any]) -> None:
    """The record, its tables and its figure, each whole or not at all."""
    write_whole(
        folder / "curvature_error.json", lambda path: path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    )
    write_whole(folder / "curvature_error.md", lambda path: path.write_text(markdown(record), encoding="utf-8"))
    write_whole(folder / "curvature_error.png", lambda path: FigureCanvasAgg(figure(record)).print_png(path))


def markdown(record: dict[str, Any]) -> str:
    return (
        "# The error of bfloat16 curvature\n\n"
        f"Written by `{record['command']}`\n(torch {record['torch']}).\n\n"
        "## Diagonals\n\n"
        "Relative L¹ error ‖s_bf16 − s‖₁ / ‖s‖₁ of the diagonal with products in bfloat16 to that in float32, on one batch of "
        f"{record['batch']}:\nover all parameters, the median and the worst of single ones (a layer's weight, its bias), and "
        "their smallest cosine. Beside it the\nshare of entries that are off by more than a tenth of themselves, HesScaleGN's "
        "error, and ‖s − h‖₁ / ‖h‖₁: how far HesScale in\nfloat32 is from the exact diagonal h.\n\n"
        + diagonals_table(record)
        + "\n\n## Training\n\n"
        f"Mean ± standard error over {record['seeds']} seeds of the training loss after {record['steps']} steps, by the dtype of "
        "the curvature's products, and of\nthe difference to float32, seed by seed. Runs with products in float64 part from "
        "float32 by its rounding alone.\n\n"
        + training_table(record)
        + "\n\n![Errors by parameter, and final training losses](curvature_error.png)\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)])


def diagonals_table(record: dict[str, Any]) -> str:
    header = [
        "network",
        "parameters",
        "",
        "error, all",
        "median",
        "worst",
        "smallest cosine",
        "entries off by 10 %",
        "HesScaleGN, all",
        "HesScale to exact, all",
    ]
    rows = []
    for name, found in record["diagonals"].items():
        for moment in ("initialized", "trained"):
            low, newton, exact = (found[moment].get(k) for k in ("hesscale", "hesscale_gn", "to_the_exact_diagonal"))
            rows.append(
                [
                    name,
                    f"{found['parameters']:,}",
                    moment,
                    *(percent(low[key]) for key in ("all", "median", "worst")),
                    f"{low['smallest_cosine']:.6f}",
                    percent(low["off_by_a_tenth"]),
                    percent(newton["all"]),
                    "–" if exact is None else percent(exact["all"]),
                ]
            )
    return table(header, rows)


def percent(value: float) -> str:
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.0f} %"


def training_table(record: dict[str, Any]) -> str:
    header = ["network, optimizer", "step size", *PRODUCTS, "bfloat16 − float32", "float64 − float32"]
    rows = [
        [
            name,
            f"{found['step_size']:g}",
            *(cell(found["mean"][dtype], ".3g") for dtype in PRODUCTS),
            *(cell(found["difference"][dtype], "+.2g").replace("± +", "± ") for dtype in ("bfloat16", "float64")),
        ]
        for name, found in record["training"].items()
    ]
    return table(header, rows)


def figure(record: dict[str, Any]) -> Figure:
    """Left: errors, a dot per parameter. Right: final training losses, a dot per seed."""
    result = Figure(figsize=(12, 5), layout="constrained", dpi=90)
    left, right = result.subplots(1, 2)
    places = [(name, moment) for name in record["diagonals"] for moment in ("initialized", "trained")]
    for x, (name, moment) in enumerate(places):
        found = record["diagonals"][name][moment]
        for key, colour in (("hesscale", COLOURS["bfloat16"]), ("to_the_exact_diagonal", "#1f5a96")):
            values = [value for value in found.get(key, {"error": {}})["error"].values() if value > 0]
            shift = -0.15 if key == "hesscale" else 0.15
            left.plot([x + shift] * len(values), values, ".", color=colour, alpha=0.6)
    left.plot([], [], ".", color=COLOURS["bfloat16"], label="bfloat16 to float32 products")
    left.plot([], [], ".", color="#1f5a96", label="HesScale to the exact diagonal")
    left.set(yscale="log", ylim=(2e-5, 20), ylabel="relative L¹ error of a parameter's diagonal")
    left.set_title("a dot per parameter (HesScale is exact in the last layer, below the axis)", fontsize=9)
    left.set_xticks(range(len(places)), [f"{name}\n{moment}" for name, moment in places], rotation=60, ha="right", fontsize=7)
    left.legend(frameon=False, loc="center", ncols=2, fontsize=9)
    for x, found in enumerate(record["training"].values()):
        for shift, (dtype, losses) in zip((-0.2, 0, 0.2), found["final_training_loss"].items(), strict=True):
            right.plot([x + shift] * len(losses), losses, ".", color=COLOURS[dtype], label=dtype if x == 0 else None)
    right.set(yscale="log", ylabel=f"training loss after {record['steps']} steps")
    right.set_xticks(range(len(record["training"])), [name.replace(", ", "\n") for name in record["training"]], fontsize=8)
    right.set_title("a dot per seed", fontsize=9)
    right.legend(frameon=False)
    return result


if __name__ == "__main__":
    main()
