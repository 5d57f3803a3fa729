"""A demonstration: how close the diagonals of one backward pass come to the exact one, on scikit-learn's handwritten digits.

Trains a small tanh network with Adam. Before and after, compares HesScale, HesScaleGN, BL89 and the squared gradient with the
exact Hessian diagonal (double backward, float64), layer by layer; times ``hesscale.backward``; saves a plot.

    python -m hesscale.demo --epochs 20 --plot out/demo.png
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"the demonstration needs {missing.name}: pip install 'hesscale[experiments]'") from None

METHODS = {"HesScale": "hesscale", "HesScaleGN": "hesscale_gn", "BL89": "bl89"}
GRADIENT = "gradient²"
COLOURS = {"HesScale": "#1f6f8b", "HesScaleGN": "#6fb1a0", "BL89": "#e0a33e", GRADIENT: "#a9a9a9"}
WIDTH = 32
Diagonals = dict[str, list[Tensor]]  # by method, one flat tensor per layer; "exact" is one of them


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m hesscale.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=256, help="images that the loss is averaged over in the comparison")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("out/demo.png"))
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    torch.set_num_threads(1)  # fastest for a network this small
    torch.manual_seed(options.seed)
    console = Console()

    images, labels, test_images, test_labels = digits()
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    size = sum(p.numel() for p in model.parameters())
    console.print(f"A tanh network 64-{WIDTH}-{WIDTH}-10 ({size} parameters) on {len(images)} handwritten digits.")

    def diagonals(when: str) -> Diagonals:
        with console.status(f"the exact diagonal {when} training: {size} rows of the Hessian by double backward …"):
            found = compare(model, images[: options.samples], labels[: options.samples])
        console.print(table(found, f"\nHessian diagonals {when} training, mean loss of {options.samples} images"))
        return found

    before = diagonals("before")
    with console.status(f"training for {options.epochs} epochs with Adam …"):
        loss = train(model, images, labels, options.epochs)
    accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    console.print(
        f"\nTrained for {options.epochs} epochs: loss {loss:.3f}, accuracy on {len(test_images)} test images {accuracy:.1%}."
    )
    after = diagonals("after")
    console.print("Each cell: Σ|estimate − exact| / Σ|exact|, and the correlation of the two.", style="dim")
    console.print("HesScale and HesScaleGN are exact in the last layer (up to rounding), approximate in the others.", style="dim")
    plain, ours = timing(model, images[:64], labels[:64])
    console.print("\nBackward pass, batch of 64, one thread, on this machine (medians of alternating runs):")
    console.print(f"loss.backward() {plain * 1e3:.2f} ms, hesscale.backward(loss) {ours * 1e3:.2f} ms, ratio {ours / plain:.1f}.")
    save_plot(before, after, options.plot)
    console.print(f"Plot: {options.plot}. Took {time.perf_counter() - started:.0f} s.")


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images in [0, 1] and labels, shuffled; four fifths to train on, the rest to test."""
    data = load_digits()
    order = torch.randperm(len(data.target))
    images = torch.tensor(data.data / 16, dtype=torch.float32)[order]
    labels = torch.tensor(data.target)[order]
    split = len(order) * 4 // 5
    return images[:split], labels[:split], images[split:], labels[split:]


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> float:
    """Adam on batches of 64; returns the mean loss over the training images."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(images), labels).item()


def compare(model: nn.Sequential, images: Tensor, labels: Tensor) -> Diagonals:
    """The exact diagonal and its approximations."""
    parameters = list(model.parameters())
    found = {"exact": by_layer(exact_diagonal(copy.deepcopy(model).double(), images.double(), labels))}
    for name, method in METHODS.items():
        gradients, estimate = hesscale.grad(F.cross_entropy(model(images), labels), parameters, method=method)
        found[name] = by_layer([s.double() for s in estimate if s is not None])
    found[GRADIENT] = by_layer([g.double() ** 2 for g in gradients if g is not None])
    return found


def exact_diagonal(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """diag ∂²L/∂p² of every parameter tensor p: row i of its Hessian by double backward, of which entry i is kept."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(F.cross_entropy(model(images), labels), parameters, create_graph=True)
    diagonals = []
    for p, gradient in zip(parameters, gradients, strict=True):
        entries = []
        for units in torch.eye(p.numel(), dtype=p.dtype).split(64):
            (rows,) = torch.autograd.grad(gradient, p, units.view(-1, *p.shape), retain_graph=True, is_grads_batched=True)
            entries.append(rows.flatten(1)[units > 0])
        diagonals.append(torch.cat(entries))
    return diagonals


def by_layer(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Weight and bias of each layer, end to end."""
    return [torch.cat([w.flatten(), b.flatten()]) for w, b in zip(tensors[::2], tensors[1::2], strict=True)]


def error(estimate: Tensor, exact: Tensor) -> float:
    """Σ|estimate − exact| / Σ|exact|"""
    return ((estimate - exact).abs().sum() / exact.abs().sum()).item()


def table(found: Diagonals, title: str) -> Table:
    """Error and correlation of every method, layer by layer and over all."""
    exact = found["exact"]
    methods = [name for name in found if name != "exact"]
    result = Table("layer", *methods, title=title, title_justify="left", title_style="bold")
    rows = {f"{i + 1}": [i] for i in range(len(exact))} | {"all": list(range(len(exact)))}
    for label, layers in rows.items():
        truth = torch.cat([exact[i] for i in layers])
        estimates = [torch.cat([found[name][i] for i in layers]) for name in methods]
        correlations = torch.corrcoef(torch.stack([truth, *estimates]))[0, 1:]
        result.add_row(label, *(f"{error(e, truth):7.2g} {r:6.2f}" for e, r in zip(estimates, correlations, strict=True)))
    return result


def timing(model: nn.Module, images: Tensor, labels: Tensor, repeats: int = 300) -> tuple[float, float]:
    """Median seconds of ``loss.backward()`` and ``hesscale.backward(loss)``, run in turn so that load hits both."""
    backwards: tuple[Callable[[Tensor], None], ...] = (Tensor.backward, hesscale.backward)
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for backward, into in zip(backwards, seconds, strict=True):
            model.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            start = time.perf_counter()
            backward(loss)
            into.append(time.perf_counter() - start)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def save_plot(before: Diagonals, after: Diagonals, path: Path) -> None:
    """Above: estimates against the exact diagonal after training, a dot per parameter. Below: every method's error by layer."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False).flat
    for i, axes in enumerate(above.subplots(1, len(after["exact"]))):
        exact = after["exact"][i]
        shown = torch.stack([after[name][i] for name in ("BL89", "HesScale", "exact")])
        for name in ("BL89", "HesScale"):
            axes.scatter(exact, after[name][i], s=8, alpha=0.5, linewidths=0, color=COLOURS[name])
        axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
        smallest = 10.0 ** (math.floor(exact.abs().median().log10().item()) - 1)  # the axes are linear below it
        limits = (1.5 * shown.min().item() - smallest, 1.5 * shown.max().item() + smallest)
        powers = [smallest * 10**k for k in range(9) if smallest * 10**k < max(-limits[0], limits[1])]
        ticks = [*(-power for power in powers), 0, *powers]
        axes.set_xscale("symlog", linthresh=smallest, linscale=0.5)
        axes.set_yscale("symlog", linthresh=smallest, linscale=0.5)
        axes.set(xticks=ticks, yticks=ticks, xlim=limits, ylim=limits)
        axes.set(title=f"layer {i + 1}, after training", xlabel="exact", ylabel="estimate" if i == 0 else None)
    for axes, found, when in zip(below.subplots(1, 2, sharey=True), (before, after), ("before", "after"), strict=True):
        for k, (name, colour) in enumerate(COLOURS.items()):
            errors = [error(e, exact) for e, exact in zip(found[name], found["exact"], strict=True)]
            bars = axes.bar([i + 0.2 * (k - 1.5) for i in range(len(errors))], errors, width=0.18, color=colour, label=name)
            axes.bar_label(bars, [f"{e:.2f}" if e > 1e-4 else "exact" for e in errors], fontsize=8)
        axes.set_xticks(range(len(found["exact"])), [f"layer {i + 1}" for i in range(len(found["exact"]))])
        axes.set(title=f"Σ|estimate − exact| / Σ|exact|, {when} training")
    below.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path)


if __name__ == "__main__":
    main()
