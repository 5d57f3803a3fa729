"""Bits per layer by ½ h Δ² beside the same number of bits for all layers: 3C3D on CIFAR-100, trained for a few hundred steps.

The weights of all layers are rounded and stay floating-point numbers; biases are not rounded. Layers have 2 to 8 bits, and take
no more space than with the uniform bits beside them. Derivatives are averaged over training examples. Networks are kept in a
folder, which benchmarks/pruning.py shares.

    python benchmarks/quantization.py --data DATA --networks out/networks --out results/quantization
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from records import header, made_by, save
from torch import Tensor, nn
from trained_networks import CASES, evaluate, examples, trained

from hesscale.experiments.lab.download import DataError
from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.tasks.problem import Splits, loss_of
from hesscale.uses import mean_derivatives
from hesscale.uses.quantization import allocate, costs, quantize

CASE = replace(next(case for case in CASES if case.problem == "cifar100-3c3d"), evaluated=2000)
BUDGETS = (3, 4, 5, 6)
SHOWN_BUDGET = 3  # whose bits per layer are listed
UNIFORM = "uniform"
SENSITIVITIES: dict[str, dict[str, Any] | None] = {
    "Δ² alone": None,
    "HesScaleGN": {"method": "hesscale_gn"},
    "HesScaleGN calibrated": {"method": "hesscale_gn", "num_samples": 1, "calibrate": True},
    "GGN-MC": {"method": "ggn_mc"},
}
METHODS = (UNIFORM, *SENSITIVITIES)
HUES = ("#222222", "#888888", "#1b5fa8", "#35a7c2", "#c2353f")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.dim() > 1}


def rows_of(model: nn.Module, splits: Splits, seed: int) -> Iterator[dict[str, Any]]:
    """Loss and accuracy by method and budget, with the bits of each layer and the rise of the loss that ½ h Δ² predicts."""
    weights = weights_of(model)
    sizes = {name: w.numel() for name, w in weights.items()}
    batches = examples(CASE, splits.train, seed)
    tables = {}
    for method, options in SENSITIVITIES.items():
        if options is None:
            tables[method] = costs(weights, {name: torch.ones_like(w) for name, w in weights.items()})
        else:
            found = mean_derivatives(model, batches, loss_of, **options).of
            tables[method] = costs(weights, {name: found[name].diagonal for name in weights})
    yield {"method": "not rounded", "budget": 32, "bits": {}, "predicted": 0.0} | measured(model, splits)
    for budget in BUDGETS:
        for method in METHODS:
            bits = dict.fromkeys(weights, budget) if method == UNIFORM else allocate(tables[method], sizes, budget)
            table = tables["GGN-MC" if method == UNIFORM else method]
            copied = copy.deepcopy(model)
            quantize(copied, bits)
            predicted = sum(table[name][b] for name, b in bits.items())
            yield {"method": method, "budget": budget, "bits": bits, "predicted": predicted} | measured(copied, splits)


def measured(model: nn.Module, splits: Splits) -> dict[str, float]:
    loss, accuracy = evaluate(model, CASE, splits.test)
    return {"loss": loss, "accuracy": accuracy}


def collected(runs: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for what the seeds have in common."""
    return [
        {"method": same[0]["method"], "budget": same[0]["budget"], "bits": [one["bits"] for one in same]}
        | {key: [float(f"{one[key]:.5g}") for one in same] for key in ("accuracy", "loss", "predicted")}
        for same in zip(*runs, strict=True)
    ]


def cell(values: Sequence[float], factor: float, digits: int) -> str:
    mean = f"{factor * statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {factor * statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def page(found: dict[str, Any]) -> str:
    rows = {(row["method"], row["budget"]): row for row in found["rows"]}
    dense = rows["not rounded", 32]

    def rise(row: dict[str, Any]) -> list[float]:
        return [loss - before for loss, before in zip(row["loss"], dense["loss"], strict=True)]

    def table(values: Callable[[dict[str, Any]], list[float]], factor: float, digits: int) -> str:
        lines = [[str(b), *(cell(values(rows[method, b]), factor, digits) for method in METHODS)] for b in BUDGETS]
        return markdown_table(["bits", *METHODS], lines)

    shown = [rows[method, SHOWN_BUDGET]["bits"] for method in METHODS]
    bits = [[layer, *(", ".join(str(one[layer]) for one in by_seed) for by_seed in shown)] for layer in shown[0][0]]
    return f"""# Quantization

{made_by(found)}
{CASE.source.title} after {CASE.steps} steps of {CASE.batch} images,
evaluated on {CASE.evaluated} test images: mean ± standard error of {found["seeds"]} seeds, by the bits of a weight on average.
Not rounded: accuracy {cell(dense["accuracy"], 100, 1)} %, loss {cell(dense["loss"], 1, 3)}.

![Accuracy against bits](quantization.png)

## Test accuracy, %

{table(lambda row: row["accuracy"], 100, 1)}
## Rise of the test loss by rounding

{table(rise, 1, 4)}
## Rise of the loss that ½ h Δ² predicts

By the h of each method, by that of GGN-MC for uniform bits. Δ² alone predicts no loss.

{table(lambda row: row["predicted"], 1, 4)}
## Bits of each layer at {SHOWN_BUDGET} bits on average, by seed

{markdown_table(["weight", *METHODS], bits)}"""


def figure(found: dict[str, Any]) -> Figure:
    """How rounding changes accuracy and loss. Methods that choose the same bits lie side by side."""
    result = Figure(figsize=(9, 3.8), layout="constrained", dpi=90)
    accuracy, loss = result.subplots(1, 2)
    dense = found["rows"][0]
    for axes, key, factor in ((accuracy, "accuracy", 100), (loss, "loss", 1)):
        axes.axhline(0, color="black", linewidth=0.6)
        for place, (method, colour) in enumerate(zip(METHODS, HUES, strict=True)):
            mine = [row for row in found["rows"] if row["method"] == method]
            changes = [[factor * (a - b) for a, b in zip(row[key], dense[key], strict=True)] for row in mine]
            errors = [statistics.stdev(c) / math.sqrt(len(c)) if len(c) > 1 else 0.0 for c in changes]
            x = [row["budget"] + 0.1 * (place - 2) for row in mine]
            axes.errorbar(x, [statistics.fmean(c) for c in changes], errors, fmt="o", markersize=4, color=colour, label=method)
        axes.set(xlabel="bits of a weight on average", xticks=BUDGETS)
    accuracy.set_ylabel("change of test accuracy,\npercentage points")
    loss.set_ylabel("rise of test loss")
    result.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where CIFAR-100 is, as for `hesscale supervised`")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--networks", type=Path, default=Path("out/networks"), help="folder of trained networks")
    parser.add_argument("--out", type=Path, default=Path("results/quantization"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        splits = CASE.source.load(options.data, torch.device("cpu"))
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    record, runs = {**header("quantization.py", arguments), "seeds": options.seeds}, []
    for seed in range(options.seeds):
        runs.append([*rows_of(trained(CASE, splits, seed, options.networks), splits, seed)])
        print(f"seed {seed}: done", flush=True)
    record["rows"] = collected(runs)
    write_whole(options.out / "quantization.png", lambda path: FigureCanvasAgg(figure(record)).print_png(path))
    save(options.out / "quantization", record, page(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
