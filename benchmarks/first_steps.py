"""How long first steps are, of the weight that moves farthest, by how many Hessian diagonals were averaged.

Weights stay as they are initialized, while batches of CIFAR-100 fill the averages of Algorithm 2. Shown is the largest
entry of M̂ ⊘ (√V̂ + ε) of the whole network, which times α is how far that weight would move, beside the median entry; and at the
start, how the gradient compares with the diagonal and how many of its entries are negative or zero.

    python benchmarks/first_steps.py --data DATA --out results/first_steps
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
import torch.nn.functional as F
from records import header, made_by, save
from torch import Tensor

import hesscale
from hesscale.experiments.bench.measure import digits, message
from hesscale.experiments.lab.download import DataError
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.vision.images import Images, load_images
from hesscale.experiments.vision.problems import PROBLEMS

CASES = (  # network, padding, precision
    ("cifar100-3c3d", "deepobs", "float32"),
    ("cifar100-allcnnc", "deepobs", "float32"),
    ("cifar100-allcnnc", "deepobs", "bf16"),
    ("cifar100-allcnnc", "none", "float32"),
)
OPTIMIZERS = {
    "AdaHesScale": hesscale.AdaHesScale.paper,
    "AdaHesScaleGN": hesscale.AdaHesScaleGN.paper,
    "AdaHessian": hesscale.AdaHessian,
}
COUNTS = (1, 2, 3, 5, 10, 20)
BETAS, EPS = (0.9, 0.999), 1e-8


def measured(problem: str, padding: str, precision: str, name: str, images: Images, batch: int) -> dict[str, Any]:
    model = PROBLEMS[problem].network(images.classes, 0, padding=padding)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[name](params)
    averages: list[list[Any]] = [[0.0, 0.0] for _ in params]
    row: dict[str, Any] = {"network": PROBLEMS[problem].title, "padding": padding, "precision": precision, "optimizer": name}
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # for dropout and AdaHessian's draws
    for count in range(1, max(COUNTS) + 1):
        some = torch.randint(0, len(images.train.labels), (batch,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(images.inputs(images.train.images[some])), images.train.labels[some])
        optimizer.zero_grad()
        optimizer.backward(loss)
        gradients, diagonals = [p.grad for p in params], [p.hess_diag for p in params]
        for pair, gradient, diagonal in zip(averages, gradients, diagonals, strict=True):
            pair[0] = BETAS[0] * pair[0] + (1 - BETAS[0]) * gradient
            pair[1] = BETAS[1] * pair[1] + (1 - BETAS[1]) * diagonal.square()
        if count == 1:
            first = together(diagonals)
            row["gradient_over_curvature"] = float(together(gradients).norm() / first.norm())
            row |= {"negative": float((first < 0).double().mean()), "zero": int((first == 0).sum())}
        if count in COUNTS:
            corrected = [(m / (1 - BETAS[0] ** count), v / (1 - BETAS[1] ** count)) for m, v in averages]
            steps = together([m / (v.sqrt() + EPS) for m, v in corrected]).abs()
            row |= {f"largest_{count}": float(steps.max()), f"median_{count}": float(steps.median())}
    return row


def together(tensors: Sequence[Any]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def page(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        lengths = [f"{row[f'largest_{count}']:.3g} ({row[f'median_{count}']:.2g})" for count in COUNTS]
        beginning = [f"{row['gradient_over_curvature']:.2g}", f"{100 * row['negative']:.0f} %", str(row["zero"])]
        rows.append([*[row[name] for name in ("network", "padding", "precision", "optimizer")], *beginning, *lengths])
    columns = ["network", "padding", "precision", "optimizer", "gradient / diagonal", "negative", "zero", *map(str, COUNTS)]
    return f"""# Lengths of first steps

{made_by(found)} Batches of {found["batch"]}, ε = {EPS:g}.
The norm of the first gradient by that of the first diagonal, of whose entries a share is negative and some are zero, and the
largest entry of M̂ ⊘ (√V̂ + ε), in units of the step size, after so many diagonals; in brackets the median entry.

{markdown_table(columns, rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where CIFAR-100 is, as for `hesscale supervised`")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("results/first_steps"))
    options = parser.parse_args(arguments)
    try:
        images = load_images(PROBLEMS["cifar100-3c3d"], options.data, torch.device("cpu"))
    except DataError as error:
        print(message(error), file=sys.stderr)
        return 2
    rows = []
    for case, name in itertools.product(CASES, OPTIMIZERS):
        found = measured(*case, name, images, options.batch)
        rows.append({key: digits(value) if isinstance(value, float) else value for key, value in found.items()})
        print(", ".join([*case, name]), flush=True)
    record = {**header("first_steps.py", arguments), "batch": options.batch, "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out / "first_steps", record, page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
