"""What HesScaleGN leaves out: the exact Gauss-Newton diagonal as a multiple of it, layer by layer.

HesScaleGN sees how the change of each single number bends the loss, and nothing of two together. A convolution's weight changes
all pixels at once, and the deeper what follows, the more numbers change with each of them. Measured on a batch without dropout,
as networks are initialized and after some steps of Adam.

    python benchmarks/left_out.py --data DATA --out results/left_out
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
import torch.nn.functional as F
from records import header, made_by, save
from torch import Tensor, nn

import hesscale
from hesscale.estimators import estimate
from hesscale.experiments.bench.measure import digits, message
from hesscale.experiments.lab.download import DataError
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.vision.images import Images, load_images
from hesscale.experiments.vision.problems import PROBLEMS

CASES = (  # network, padding
    ("mnist-mlp", "deepobs"),
    ("cifar100-3c3d", "deepobs"),
    ("cifar100-allcnnc", "deepobs"),
    ("cifar100-allcnnc", "none"),
)
QUANTILES = (0.05, 0.5, 0.95)
TRAINED_WITH = 64  # images in a step of Adam
STEP_SIZE = 1e-3


def loss_of(model: nn.Module, images: Images, some: Tensor) -> Tensor:
    return F.cross_entropy(model(images.inputs(images.train.images[some])), images.train.labels[some])


def train(model: nn.Module, images: Images, steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=STEP_SIZE)
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # for dropout
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, images, torch.randint(0, len(images.train.labels), (TRAINED_WITH,), generator=generator)).backward()
        optimizer.step()


def multiples(model: nn.Module, images: Images, batch: int) -> Iterator[dict[str, Any]]:
    """Of every layer's weight: the exact diagonal as a multiple, in all and entry by entry."""
    model.eval()
    names, weights = zip(*[(name, p) for name, p in model.named_parameters() if p.requires_grad and p.dim() > 1], strict=True)
    _, approximate = hesscale.grad(loss_of(model, images, torch.arange(batch)), weights, method="hesscale_gn")
    exact = [torch.zeros_like(p) for p in weights]
    for sample in torch.arange(batch).split(1):  # one by one, for which there are as many passes as classes
        for total, found in zip(exact, estimate("ggn", loss_of(model, images, sample), weights), strict=True):
            total += found / batch
    for number, (name, a, b) in enumerate(zip(names, approximate, exact, strict=True), 1):
        entries = (b / a)[a > 0].double()
        quantiles = {f"quantile_{q:g}": float(entries.sort().values[int(q * (len(entries) - 1))]) for q in QUANTILES}
        yield {"layer": number, "parameter": name, "all": float(b.sum() / a.sum()), **quantiles}


def page(found: dict[str, Any]) -> str:
    rows = [
        [
            *(row["network"], row["padding"], row["steps"], row["layer"], f"{row['all']:.3g}"),
            *(f"{row[f'quantile_{q:g}']:.3g}" for q in QUANTILES),
        ]
        for row in found["rows"]
    ]
    columns = ["network", "padding", "after steps", "layer", "all", *[f"{100 * q:g} %" for q in QUANTILES]]
    return f"""# What HesScaleGN leaves out

{made_by(found)} A batch of {found["batch"]}, no dropout;
steps are Adam's, with {TRAINED_WITH} images and step size {STEP_SIZE:g}. The exact Gauss-Newton diagonal of every layer's weight
as a multiple of HesScaleGN's: by the sums of both, and quantiles of entries where HesScaleGN's is not zero.

{markdown_table(columns, [list(map(str, row)) for row in rows])}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where MNIST and CIFAR-100 are, as for `hesscale supervised`")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200, help="of Adam, after which to measure again")
    parser.add_argument("--out", type=Path, default=Path("results/left_out"))
    options = parser.parse_args(arguments)
    record = {**header("left_out.py", arguments), "batch": options.batch, "rows": (rows := [])}
    for problem, padding in CASES:
        try:
            images = load_images(PROBLEMS[problem], options.data, torch.device("cpu"))
        except DataError as error:
            print(message(error), file=sys.stderr)
            return 2
        for steps in (0, options.steps):
            model = PROBLEMS[problem].network(images.classes, 0, padding=padding)
            train(model, images, steps)
            print(f"{problem}, padding {padding}, after {steps} steps", flush=True)
            what = {"network": PROBLEMS[problem].title, "padding": padding, "steps": steps}
            for found in multiples(model, images, options.batch):
                rows.append(what | {key: digits(value) if isinstance(value, float) else value for key, value in found.items()})
    options.out.mkdir(parents=True, exist_ok=True)
    save(options.out / "left_out", record, page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
