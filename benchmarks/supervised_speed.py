"""Images per second that DeepOBS's networks learn from with every optimizer, alone and several at once, relative to Adam.

What is measured are epochs as `hesscale supervised` has them: batches drawn, augmented and learned from, in compiled steps that a
CUDA graph holds on a GPU. Images are made up. In each round, every optimizer trains an epoch, in an order drawn anew; ratios are
medians over rounds.

    python benchmarks/supervised_speed.py --together 1 5 --out results/supervised_speed
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
from records import header, made_by, save

from hesscale.experiments.bench.measure import digits, message, quartiles, ratios
from hesscale.experiments.figures.supervised import PAPER, Settings, tasks
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.optimizers import IMAGE_OPTIMIZERS
from hesscale.experiments.vision.config import Task
from hesscale.experiments.vision.images import Images, Split
from hesscale.experiments.vision.members import PRECISIONS, Epoch, Members
from hesscale.experiments.vision.problems import PROBLEMS
from hesscale.experiments.vision.trainer import draw_all, members_of

SCALED = ("scaled-adam", "scaled-adahesscale", "scaled-adahesscale-gn")
BASELINE = "adam"


def made_up(task: Task, count: int) -> Images:
    """Random images in the shapes of CIFAR-100."""
    generator, problem = torch.Generator().manual_seed(0), PROBLEMS[task.problem]

    def split() -> Split:
        images = torch.randint(0, 256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
        return Split(images.to(task.device), torch.randint(0, 100, (count,), generator=generator).to(task.device))

    mean, std = (torch.tensor(values, device=task.device)[:, None, None] for values in (problem.mean, problem.std))
    return Images(split(), split(), split(), 100, 255, mean, std)


class Case:
    """Networks that train together with one optimizer."""

    def __init__(self, asked: Sequence[Task], images: Images) -> None:
        self.tasks, self.images = asked, images
        begun = time.perf_counter()
        self.members: Members = members_of(asked, images)
        self.members.warm_up()
        self.seconds_to_compile = time.perf_counter() - begun
        self.epochs: list[Epoch] = []

    def run(self) -> None:
        self.epochs.append(self.members.train(draw_all(self.tasks, self.images, len(self.epochs)))())

    def row(self, base: Case | None) -> dict[str, Any]:
        step, members = self.members.step, self.members
        images = members.steps * members.batch * len(self.tasks)
        seconds = [epoch.seconds / images for epoch in self.epochs]
        return {
            "optimizer": self.tasks[0].optimizer,
            "together": len(self.tasks),
            "mode": step.mode,
            "reason": step.reason,
            "seconds_to_compile": digits(self.seconds_to_compile),
            "ms_a_step": quartiles(1e3 * epoch.step_seconds / members.steps for epoch in self.epochs),
            "images_per_second": quartiles(1 / s for s in seconds),
            "relative_to_adam": None if base is None else ratios(base.per_image(), seconds),
            "outside_steps": quartiles(1 - epoch.step_seconds / epoch.seconds for epoch in self.epochs),
        }

    def per_image(self) -> list[float]:
        """Seconds, round by round."""
        return [epoch.seconds / (self.members.steps * self.members.batch * len(self.tasks)) for epoch in self.epochs]


def measured(asked: Mapping[str, list[Task]], images: Images, rounds: int) -> list[dict[str, Any]]:
    """Rows of all optimizers with so many networks each."""
    cases: dict[str, Case] = {}
    rows = []
    for name, group in asked.items():
        try:
            cases[name] = Case(group, images)
            print(f"{name} × {len(group)}: compiled in {cases[name].seconds_to_compile:.0f} s", flush=True)
        except Exception as error:  # the others go on
            rows.append({"optimizer": name, "together": len(group), "error": message(error)})
            print(f"{name} × {len(group)}: {message(error)}", flush=True)
    order = list(cases.values())
    for _ in range(rounds):
        random.shuffle(order)
        for case in order:
            case.run()
    base = cases.get(BASELINE)
    return [case.row(base) for case in cases.values()] + rows


def page(found: Mapping[str, Any]) -> str:
    columns = ["optimizer", "networks", "ms a step", "images/s", "relative to Adam", "outside steps", "mode"]
    body = [[IMAGE_OPTIMIZERS[row["optimizer"]].label, str(row["together"]), *cells(row)] for row in found["rows"]]
    return (
        f"# Speed of training on images\n\n{made_by(found)} {found['task']}, batches of {found['batch']},\n{found['precision']}; "
        f"medians and quartiles of {found['rounds']} rounds of an epoch of {found['images']:,} images, made up. "
        "Relative to Adam: images a second,\nof as many networks. Outside steps: the share of the seconds in which batches are "
        "made.\n\n"
        f"{markdown_table(columns, body)}"
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return ["–", "–", "–", "–", row["error"]]
    ms, pace, ratio, outside = (row[key] for key in ("ms_a_step", "images_per_second", "relative_to_adam", "outside_steps"))
    return [
        f"{ms['median']:.3g} ({ms['q1']:.3g}–{ms['q3']:.3g})",
        f"{pace['median']:,.0f}",
        f"{ratio['median']:.2f}" if ratio else "–",
        f"{outside['median']:.1%}",
        row["mode"] + (f": {row['reason']}" if row["reason"] else ""),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    images = [name for name, problem in PROBLEMS.items() if problem.is_augmented]
    parser.add_argument("--task", choices=images, default=images[0])
    parser.add_argument("--optimizers", nargs="+", choices=IMAGE_OPTIMIZERS, default=[*PAPER, *SCALED])
    parser.add_argument("--together", nargs="+", type=int, default=[1], help="networks in one step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=40_000, help="in an epoch")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", default="auto", help="of hesscale.compile_step")
    parser.add_argument("--out", type=Path, default=Path("results/supervised_speed"))
    parser.add_argument("--name", default="", help="of the files there; the task unless given")
    options = parser.parse_args(arguments)
    if min(*options.together, options.rounds, options.images) < 1:
        parser.error("--together, --rounds and --images must be at least 1")
    random.seed(0)
    names = list(dict.fromkeys([BASELINE, *options.optimizers]))
    how = {name: getattr(options, name) for name in ("task", "precision", "device", "backend")}
    every = {name: tasks(Settings(optimizer=name, step_size="1e-4", seeds=max(options.together), **how)) for name in names}
    task = every[BASELINE][0]
    if options.images < task.batch:
        parser.error(f"--images must be at least a batch of {task.batch}")
    found = header("supervised_speed.py", arguments) | {
        "task": options.task,
        "batch": task.batch,
        "precision": task.precision,
        "rounds": options.rounds,
        "images": options.images,
        "rows": [],
    }
    data = made_up(task, options.images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step that is not compiled says so in the table
        for count in options.together:
            found["rows"] += measured({name: group[:count] for name, group in every.items()}, data, options.rounds)
            save(options.out / (options.name or options.task), found, page(found))


if __name__ == "__main__":
    main()
