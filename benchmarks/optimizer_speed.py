"""The time of a training step of each optimizer in the tasks of ``hesscale optimizers``, relative to torch's Adam.

Steps are measured as the experiment makes them, in blocks of 20. In each round, every optimizer trains one block, in an order
drawn anew. Ratios are medians over rounds. The classes and sizes of the images are those of CIFAR-100, but the images are random.

    python benchmarks/optimizer_speed.py --device cuda --tf32 --out results/optimizer_speed
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
from records import header, made_by, save

from hesscale.experiments.bench.measure import message, quartiles, ratios
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.optimizers import IMAGE_OPTIMIZERS
from hesscale.experiments.tasks.problem import Split, Splits
from hesscale.experiments.tasks.registry import PROBLEMS
from hesscale.experiments.tasks.trainer import BLOCK, Task, Training

BASELINE = "adam"
TASKS = [name for name, problem in PROBLEMS.items() if problem.dataset == "cifar100"]
METHODS = [BASELINE, "adamw", "sgd-momentum", "muon", "sophia-g", "adahessian", "adahesscale-default", "adahesscale-gn-default"]
STEP_SIZE = 1e-6  # so small that no loss grows; the time of a step does not depend on it


def random_images(device: str) -> Splits:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2048, 3, 32, 32, generator=generator).to(device)
    labels = torch.randint(0, 100, (2048,), generator=generator).to(device)
    split = Split(len(labels), torch.arange(len(labels), device=device), lambda numbers: (images[numbers], labels[numbers]))
    return Splits(split, split, split, 100)


class Case:
    """A network that one optimizer trains."""

    def __init__(self, problem: str, optimizer: str, splits: Splits, options: argparse.Namespace) -> None:
        self.optimizer, self.seconds = optimizer, list[float]()
        steps = BLOCK * (options.rounds + 1)
        self.training = Training(
            Task(
                problem=problem,
                dataset="cifar100",
                optimizer=optimizer,
                step_size=STEP_SIZE,
                seed=0,
                steps=steps,
                batch=options.batch or PROBLEMS[problem].batch,
                eps=0.0,
                schedule="constant",
                evaluations=1,
                eval_size=0,
                device=options.device,
                backend=options.backend,
            ),
            splits,
        )
        self.training.warm_up()
        self.block()
        self.seconds.clear()

    def block(self) -> None:
        start = BLOCK * (1 + len(self.seconds))
        self.seconds.append(self.training.block(start)[1] / BLOCK)

    def row(self, base: Sequence[float]) -> dict[str, Any]:
        compiled = self.training.compiled
        return {
            "optimizer": self.optimizer,
            "mode": self.training.mode,
            "reason": compiled.reason if compiled else "",
            "ms_a_step": quartiles(1e3 * seconds for seconds in self.seconds),
            "relative_to_adam": ratios(self.seconds, base),
        }


def measured(problem: str, splits: Splits, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each optimizer."""
    cases, failed = [], []
    for name in dict.fromkeys([BASELINE, *options.optimizers]):
        try:
            cases.append(Case(problem, name, splits, options))
        except Exception as error:  # the others go on
            failed.append({"optimizer": name, "error": message(error)})
        print(f"{problem}, {name}: {failed[-1]['error'] if failed and failed[-1]['optimizer'] == name else 'ready'}", flush=True)
    order = list(cases)
    for _ in range(options.rounds):
        random.shuffle(order)
        for case in order:
            case.block()
    base = next(case.seconds for case in cases if case.optimizer == BASELINE)
    return [{"task": problem} | row for row in [*(case.row(base) for case in cases), *failed]]


def page(found: Mapping[str, Any]) -> str:
    header_row = ["task", "optimizer", "ms a step", "relative to Adam", "mode"]
    body = [[row["task"], IMAGE_OPTIMIZERS[row["optimizer"]].label, *cells(row)] for row in found["rows"]]
    return (
        f"# Time of a training step of each optimizer\n\n{made_by(found)} Batches as in `hesscale optimizers`,\n"
        f"{'TF32' if found['tf32'] else 'float32'}; medians and quartiles of {found['rounds']} rounds of {BLOCK} steps; "
        f"random images.\n\n{markdown_table(header_row, body)}"
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return ["–", "–", row["error"]]
    ms, ratio = (
        f"{row[key]['median']:.3g} ({row[key]['q1']:.3g}–{row[key]['q3']:.3g})" for key in ("ms_a_step", "relative_to_adam")
    )
    return [ms, ratio, row["mode"] + (f": {row['reason']}" if row["reason"] else "")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--optimizers", nargs="+", choices=IMAGE_OPTIMIZERS, default=METHODS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=0, help="examples in a batch; 0 for the task's own")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("inductor", "traced", "eager"), default="traced", help="of hesscale.compile_step")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in matrix products and convolutions on CUDA")
    parser.add_argument("--out", type=Path, default=Path("results/optimizer_speed"))
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.batch < 0:
        parser.error("--rounds must be at least 1, and --batch at least 0")
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32
    random.seed(0)
    found = header("optimizer_speed.py", arguments) | {"rounds": options.rounds, "tf32": options.tf32, "rows": []}
    splits = random_images(options.device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that is not compiled says so in the table
        for problem in options.tasks:
            found["rows"] += measured(problem, splits, options)
            save(options.out / "optimizer_speed", found, page(found))


if __name__ == "__main__":
    main()
