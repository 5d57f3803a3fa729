"""Pruning by saliency beside magnitude and |g w|: accuracy against sparsity, at once and in stages with retraining.

The digits MLP, a GPT of characters and 3C3D on CIFAR-100 are trained with Adam, then pruned in copies. 3C3D is trained for a few
hundred steps only. Derivatives are averaged over training examples, accuracies are those of test examples. A seed sets the
network, its batches and the examples for the derivatives. Only the MLP is small enough for the exact diagonal. In the others, the
mean of 30 unbiased draws per batch of the Gauss-Newton diagonal takes its place. A later call resumes from networks and finished
seeds in a folder.

    python benchmarks/pruning.py --data DATA --networks out/networks --out results/pruning
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from records import header, made_by, save
from torch import Tensor, nn
from trained_networks import CASES, Case, evaluate, examples, train, trained

from hesscale.experiments.lab.download import DataError
from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.tasks.problem import Splits, loss_of
from hesscale.uses import mean_derivatives
from hesscale.uses.pruning import Place, original, prune_channels, prune_weights, saliency, weights_of

Batches = list[tuple[Tensor, Tensor]]
Scores = dict[Place, Tensor]
Criterion = Callable[[nn.Module, Batches], Scores]

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
LAYER_SPARSITIES = (0.8, 0.9, 0.95)
CHANNEL_SPARSITIES = (0.1, 0.3, 0.5)
STAGES = (0.8, 0.9, 0.95)
RETRAINING = {"digits-relu": 100, "char-gpt": 100, "cifar100-3c3d": 25}  # steps after each stage
CHANNELS = ("digits-relu", "cifar100-3c3d")  # networks whose channels are pruned
EXACT = ("digits-relu",)  # networks that are small enough for the exact diagonal


def magnitude(model: nn.Module, batches: Batches) -> Scores:
    return {(module, name): getattr(module, name).detach().square() for module, name in weights_of(model)}


def gradient_times_weight(model: nn.Module, batches: Batches) -> Scores:
    found = mean_derivatives(model, batches, loss_of, method="squared_gradient").of
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        (module, name): (found[names[id(original(module, name))]].gradient * getattr(module, name).detach()).abs()
        for module, name in weights_of(model)
    }


def by_saliency(**options: Any) -> Criterion:
    return functools.partial(saliency, loss_fn=loss_of, **options)


CRITERIA: dict[str, Criterion] = {
    "magnitude": magnitude,
    "abs(g w)": gradient_times_weight,
    "½ h w², HesScaleGN": by_saliency(method="hesscale_gn"),
    "½ h w², HesScaleGN calibrated": by_saliency(method="hesscale_gn", num_samples=1, calibrate=True),
    "−g w + ½ h w², HesScaleGN": by_saliency(method="hesscale_gn", gradient=True),
    "abs(−g w + ½ h w²), HesScaleGN": lambda model, batches: {
        place: score.abs() for place, score in saliency(model, batches, loss_of, gradient=True).items()
    },
    "½ h w², HesScale": by_saliency(method="hesscale"),
    "½ h w², GGN-MC": by_saliency(method="ggn_mc"),
    "½ h w², GGN-MC of 30 draws": by_saliency(method="ggn_mc", num_samples=30),
    "½ h w², exact": by_saliency(method="exact"),
}
RETRAINED = (
    *("magnitude", "abs(g w)", "½ h w², HesScaleGN", "½ h w², HesScaleGN calibrated"),
    *("abs(−g w + ½ h w²), HesScaleGN", "½ h w², GGN-MC of 30 draws"),
)
TITLES = {"weights, global": "pruned at once", "weights, global, retrained": "pruned and trained in stages"}
HUES = ("#222222", "#e08e00", "#1b5fa8", "#35a7c2", "#7b4fa3", "#d08cc0", "#2e9e4f", "#c2353f", "#7d1f1f", "#888888")


def pruned(model: nn.Module, scores: Scores, sparsity: float, mode: str) -> nn.Module:
    """A copy with the weights or channels of lowest scores masked."""
    copied = copy.deepcopy(model)
    given = dict(zip(weights_of(copied), scores.values(), strict=True))
    what, scope = mode.split(", ")[:2]
    if what == "channels":
        prune_channels(dict(list(given.items())[:-1]), sparsity, scope=scope)  # all but the network's outputs
    else:
        prune_weights(given, sparsity, scope=scope)
    return copied


def at_once(case: Case, model: nn.Module, splits: Splits, batches: Batches) -> Iterator[dict[str, Any]]:
    """Accuracy after pruning, by criterion, what is pruned, and sparsity."""
    plan = [("weights, global", SPARSITIES), ("weights, layer", LAYER_SPARSITIES)]
    if case.problem in CHANNELS:
        plan += [("channels, global", CHANNEL_SPARSITIES), ("channels, layer", CHANNEL_SPARSITIES)]
    for criterion, scores_of in CRITERIA.items():
        if "exact" not in criterion or case.problem in EXACT:
            scores = scores_of(model, batches)
            for mode, sparsities in plan:
                for sparsity in sparsities:
                    yield row(case, splits, pruned(model, scores, sparsity, mode), mode, criterion, sparsity)


def in_stages(case: Case, model: nn.Module, splits: Splits, batches: Batches, seed: int) -> Iterator[dict[str, Any]]:
    """Accuracy when pruning and retraining take turns."""
    for criterion in RETRAINED:
        network = copy.deepcopy(model)
        for stage, sparsity in enumerate(STAGES):
            prune_weights(CRITERIA[criterion](network, batches), sparsity)
            train(network, splits.train, RETRAINING[case.problem], case.batch, 2000 + 10 * seed + stage)
            yield row(case, splits, network, "weights, global, retrained", criterion, sparsity)


def row(case: Case, splits: Splits, model: nn.Module, mode: str, criterion: str, sparsity: float) -> dict[str, Any]:
    loss, accuracy = evaluate(model, case, splits.test)
    return {"mode": mode, "criterion": criterion, "sparsity": sparsity, "loss": loss, "accuracy": accuracy}


def measure(case: Case, seed: int, splits: Splits, folder: Path) -> list[dict[str, Any]]:
    """All rows of one network, from the folder if they are there already."""
    path = folder / f"pruning-{case.problem}-seed{seed}.json"
    if not path.exists():
        model, batches = trained(case, splits, seed, folder), examples(case, splits.train, seed)
        rows = [row(case, splits, model, "not pruned", "", 0.0)]
        rows += [*at_once(case, model, splits, batches), *in_stages(case, model, splits, batches, seed)]
        write_whole(path, lambda file: file.write_text(json.dumps(rows), encoding="utf-8"))
        print(f"{case.source.title}, seed {seed}: pruned", flush=True)
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def collected(case: Case, runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for what the seeds have in common."""
    return [
        {"network": case.source.title, **{key: same[0][key] for key in ("mode", "criterion", "sparsity")}}
        | {key: [float(f"{one[key]:.5g}") for one in same] for key in ("accuracy", "loss")}
        for same in zip(*runs, strict=True)
    ]


def cell(values: Sequence[float]) -> str:
    mean = f"{100 * statistics.fmean(values):.1f}"
    return mean if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values) / math.sqrt(len(values)):.1f}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    sparsities = sorted({row["sparsity"] for row in rows})
    cells = {(row["criterion"], row["sparsity"]): cell(row["accuracy"]) for row in rows}
    criteria = [criterion for criterion in CRITERIA if (criterion, sparsities[0]) in cells]
    lines = [[criterion, *(cells[criterion, sparsity] for sparsity in sparsities)] for criterion in criteria]
    return markdown_table(["saliency", *(f"{100 * sparsity:g} %" for sparsity in sparsities)], lines)


def page(found: dict[str, Any]) -> str:
    parts = [
        f"# Pruning\n\n{made_by(found)}\nTest accuracy in %: mean ± standard error of {found['seeds']} seeds, by the share of "
        "weights or channels that are zero.\nThe errors include the differences between networks.\n",
        "![Accuracy against sparsity](pruning.png)\n",
    ]
    for case in CASES:
        rows = [row for row in found["rows"] if row["network"] == case.source.title]
        dense = cell(rows[0]["accuracy"])
        trained_for = f"Trained for {case.steps} steps of {case.batch} examples, evaluated on {case.evaluated} test examples"
        parts.append(f"## {case.source.title}\n\n{trained_for}; {dense} % before pruning.\n")
        for mode in dict.fromkeys(row["mode"] for row in rows[1:]):
            note = f" ({RETRAINING[case.problem]} steps after each column)" if "retrained" in mode else ""
            parts.append(f"### {mode.capitalize()}{note}\n\n{table([row for row in rows if row['mode'] == mode])}")
    return "\n".join(parts)


def figure(found: dict[str, Any]) -> Figure:
    """Top: pruned at once. Bottom: in stages with retraining."""
    result = Figure(figsize=(12, 7.5), layout="constrained", dpi=90)
    grid = result.subplots(2, len(CASES), squeeze=False)
    for column, case in enumerate(CASES):
        rows = [row for row in found["rows"] if row["network"] == case.source.title]
        for axes, mode in zip(grid[:, column], TITLES, strict=True):
            axes.axhline(100 * statistics.fmean(rows[0]["accuracy"]), color="black", linewidth=0.6)
            for criterion, colour in zip(CRITERIA, HUES, strict=True):
                points = [
                    (row["sparsity"], row["accuracy"]) for row in rows if (row["mode"], row["criterion"]) == (mode, criterion)
                ]
                means = [100 * statistics.fmean(values) for _, values in points]
                if points:
                    x = [100 * sparsity for sparsity, _ in points]
                    dash = (
                        (0, (3, 3)) if criterion == "½ h w², HesScale" else "-"
                    )  # with ReLU, this line lies on that of HesScaleGN
                    axes.plot(x, means, linestyle=dash, marker=".", color=colour, linewidth=1.4, label=criterion)
            axes.set(xlabel="weights that are zero, %", ylabel="test accuracy, %", ylim=(0, None))
            axes.set(
                title=f"{case.source.title}\n{TITLES[mode]}",
                xticks=[100 * s for s in (STAGES if "retrained" in mode else SPARSITIES)],
            )
    result.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where CIFAR-100 is, as for `hesscale supervised`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", type=Path, default=Path("out/networks"), help="folder of networks and finished seeds")
    parser.add_argument("--out", type=Path, default=Path("results/pruning"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    record = {**header("pruning.py", arguments), "seeds": options.seeds, "rows": (rows := [])}
    for case in CASES:
        try:
            splits = case.source.load(options.data, torch.device("cpu"))
        except DataError as error:
            print(error, file=sys.stderr)
            return 2
        rows += collected(case, [measure(case, seed, splits, options.networks) for seed in range(options.seeds)])
    write_whole(options.out / "pruning.png", lambda path: FigureCanvasAgg(figure(record)).print_png(path))
    save(options.out / "pruning", record, page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
