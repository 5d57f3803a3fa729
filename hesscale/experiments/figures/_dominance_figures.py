"""The report of ``dominance``: ρ before and after training, with the paper's values, and Appendix E."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..lab.plots import Finding, Heat, Plot, Section, Series, Table
from ..lab.store import Result

LAYERS, WIDTH = 4, 128
RANDOM_MATRICES = 100
PUBLISHED = {"before": (0.94, 0.91, 0.89, 0.91), "after": (0.75, 0.54, 0.81, 0.98)}
OF_PAPER = "The paper's values are from 300 networks on EMNIST."
COLOURS = {"before": "#1f77b4", "after": "#d62728"}
AVERAGED = {"before": "#17becf", "after": "#ff7f0e"}  # colours of values of |H| averaged over networks


def rho(A: Tensor) -> Tensor:
    """ρ of each matrix: 1 if it is diagonal, 0 if its diagonal is zero, NaN if the whole matrix is zero."""
    found: Tensor = A.diagonal(dim1=-2, dim2=-1).norm(dim=-1) / torch.linalg.matrix_norm(A)
    return found


def sections(results: list[Result]) -> list[Section]:
    groups: dict[Any, dict[int, Result]] = {}
    for result in sorted(results, key=lambda result: (result.task.first, result.task.count)):
        group = replace(result.task, first=0, count=0)
        groups.setdefault(group, {})[result.task.first] = result  # if two blocks have the same first network, use the larger one
    apart = [name for task in list(groups)[:1] for name in vars(task) if len({getattr(t, name) for t in groups}) > 1]
    found = []
    for task, blocks in groups.items():
        name = "-".join([task.dataset, *[f"{name}-{getattr(task, name)}" for name in apart if name != "dataset"]])
        found.append(section(name.replace(".", "_"), task, [*blocks.values()]))
    return [*found, appendix_e()]


def section(name: str, task: Any, blocks: list[Result]) -> Section:
    n, title = sum(block.task.count for block in blocks), f"{blocks[0].values['title']}, {task.activation}"
    setting = (
        f"{title}: {n} networks, {task.iterations:,} Adam steps of {task.batch} examples with step size "
        f"{task.step_size:g}; Hessians of {task.samples} training example{'s' * (task.samples > 1)} for each network"
    )
    ratios, magnitudes, accuracies = {}, {}, []
    for when in PUBLISHED:
        ratios[when] = torch.cat([block.values[f"rho_{when}"] for block in blocks])
        magnitudes[when] = torch.stack(
            [block.values[f"magnitude_{when}"].double() * block.task.count / n for block in blocks]
        ).sum(0)
        accuracies.append(f"{torch.cat([block.values[f'accuracy_{when}'] for block in blocks]).mean():.3f} {when} training")
    text = (
        "The paper finds that the Hessians of the loss at pre-activations are diagonally dominant, before and after training. "
        "So little is lost if only their diagonals are backpropagated. ρ is the norm of a matrix's diagonal divided by the "
        f"norm of the matrix.\n\n{setting}. Mean test accuracy: {', '.join(accuracies)}.\n\n"
        "ρ is averaged over networks. The authors' code averages |H| over networks and computes ρ of the average. So compare “of "
        "mean |H|” with the paper's values."
    )
    zero = sum(int(ratio.isnan().sum()) for ratio in ratios.values())
    if zero:
        text += (
            f"\n\nIn {zero} cases, all Hessians of a layer were zero, since no unit was active. The means of ρ leave them out."
        )
    items: list[Plot | Heat | Table] = [
        table(name, title, setting, ratios, magnitudes),
        plot(name, title, setting, ratios, magnitudes),
    ]
    for when, matrices in magnitudes.items():
        panels: list[tuple[str, Sequence[Sequence[float]]]] = [(f"layer {l + 1}", H.tolist()) for l, H in enumerate(matrices)]
        items.append(Heat(f"{name}-{when}", f"Mean |∇²L| at pre-activations {when} training, {title}", panels, caption=setting))
    return Section(f"Diagonal dominance, {title}", text, items, findings(name, title, ratios))


def findings(name: str, title: str, ratios: dict[str, Tensor]) -> list[Finding]:
    """ρ before and after training, compared with random matrices, and the layer in which training lowers it most."""
    means = {when: [mean_and_error(ratio) for ratio in found.T] for when, found in ratios.items()}
    if any(math.isnan(mean) for found in means.values() for mean, _ in found):
        return []
    spans = [f"{min(found)[0]:.2f} to {max(found)[0]:.2f} {when} training" for when, found in means.items()]
    random = float(rho(gaussian(RANDOM_MATRICES, WIDTH, WIDTH)).mean())
    text = (
        f"On {title.replace(', ', ' with ')}, ρ (the norm of a Hessian's diagonal over that of the whole matrix) is {spans[0]} "
        f"and {spans[1]}, depending on the layer. A random Gaussian matrix has {random:.2f}."
    )
    found = [Finding(text, f"{name}-layers")]
    changes = [(after - before, l) for l, ((before, _), (after, _)) in enumerate(zip(*means.values(), strict=True))]
    change, layer = min(changes)
    before, after = (found[layer] for found in means.values())
    if change < -2 * math.hypot(before[1], after[1]):
        found.append(Finding(f"Training lowers ρ most in layer {layer + 1}, from {spread(*before)} to {spread(*after)}."))
    return found


def table(name: str, title: str, setting: str, ratios: dict[str, Tensor], magnitudes: dict[str, Tensor]) -> Table:
    header = ["layer", *[column for when in PUBLISHED for column in (f"ρ {when}", f"ρ of mean |H| {when}", "paper")]]
    rows: list[Sequence[str]] = []
    for l in range(LAYERS):
        row = [str(l + 1)]
        for when, published in PUBLISHED.items():
            mean, error = mean_and_error(ratios[when][:, l])
            row += [spread(mean, error), f"{rho(magnitudes[when])[l]:.3f}", f"{published[l]:.2f}"]
        rows.append(row)
    mean, error = mean_and_error(rho(gaussian(RANDOM_MATRICES, WIDTH, WIDTH)))
    rows.append([f"random Gaussian {WIDTH} × {WIDTH}", spread(mean, error), "", "0.09", "", "", ""])
    caption = f"{setting}. ± is the standard error. {OF_PAPER}"
    return Table(f"{name}-table", f"Diagonal dominance before and after training, {title}", header, rows, caption)


def plot(name: str, title: str, setting: str, ratios: dict[str, Tensor], magnitudes: dict[str, Tensor]) -> Plot:
    layers, series = [float(l) for l in range(LAYERS)], []
    for when, published in PUBLISHED.items():
        x, y, colour = layers * len(ratios[when]), ratios[when].flatten().tolist(), COLOURS[when]
        means, errors = zip(*[mean_and_error(ratio) for ratio in ratios[when].T], strict=True)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        series.append(Series(f"{when}, each network", x, y, kind="dots", colour=colour))
        series.append(Series(f"{when}, mean", layers, means, low, high, colour=colour))
        series.append(Series(f"{when}, of mean |H|", layers, rho(magnitudes[when]).tolist(), colour=AVERAGED[when]))
        series.append(Series(f"{when}, of mean |H|, paper", layers, published, colour=AVERAGED[when], dashed=True))
    random = float(rho(gaussian(RANDOM_MATRICES, WIDTH, WIDTH)).mean())
    series.append(Series("random Gaussian matrix", layers, [random] * LAYERS, colour="#7f7f7f", dashed=True))
    title, caption = f"Diagonal dominance at pre-activations, {title}", f"{setting}. Bands are standard errors. {OF_PAPER}"
    numbers = [str(l + 1) for l in range(LAYERS)]
    return Plot(f"{name}-layers", title, series, "hidden layer", "ρ", categories=numbers, caption=caption)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    values = values[~values.isnan()]
    return float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def spread(mean: float, error: float) -> str:
    return f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}"


def gaussian(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def off_diagonal_gradient(W: Tensor, h: Tensor) -> Tensor:
    """∇_W J, with J = ‖A − A ∘ I‖²_F, A = Wᵀ H W and H = diag h held fixed: 4 Σ_{n≠j} A_{jn} W_{in} H_{ii} at (i, j)."""
    A = W.mT @ (h.unsqueeze(1) * W)
    return 4 * h.unsqueeze(1) * (W @ (A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))))


def appendix_e() -> Section:
    """The two cases in which ∇J is zero (in the second, on average), and a case in which it is not."""
    W, h, alpha = gaussian(RANDOM_MATRICES, WIDTH, WIDTH), gaussian(WIDTH).abs(), 0.5 * torch.ones_like(gaussian(WIDTH))
    rows: list[Sequence[str]] = []
    for case, weights, hessian in (
        ("W diagonal, H diagonal", torch.diag_embed(W.diagonal(dim1=1, dim2=2)), h),
        ("W Gaussian, H = αI", W, alpha),
        ("for contrast: W Gaussian without its signs, H = αI", W.abs(), alpha),
    ):
        gradients = off_diagonal_gradient(weights, hessian)
        one, mean = (float(g.square().mean().sqrt()) for g in (gradients, gradients.mean(0)))
        ratio = rho(weights.mT @ (hessian.unsqueeze(1) * weights)).mean()
        rows.append([case, f"{ratio:.3f}", f"{one:.3g}", f"{mean:.3g}", f"{one / math.sqrt(len(weights)):.3g}"])
    text = (
        "J is the sum of the squared off-diagonal entries of WᵀHW, where H is diagonal and fixed. ∇J is the gradient of J with "
        "respect to W. The paper names two cases in which ∇J is zero: if W is diagonal, and, on average, if W is Gaussian and "
        "H = αI. The second case does not make WᵀHW diagonal: for a square W, ρ is near √((n + 2) / (2n + 1)), which is "
        f"{math.sqrt((WIDTH + 2) / (2 * WIDTH + 1)):.3f} here. It does not need H = αI either: ∇J is odd in W, so every "
        "distribution of W that is symmetric about zero gives a mean of zero."
    )
    header = ["case", "ρ(WᵀHW)", "size of ∇J", f"size of the mean ∇J of {RANDOM_MATRICES} W", "expected size if the mean is zero"]
    caption = (
        f"{WIDTH} × {WIDTH} matrices; W has standard normal entries, α = 0.5. Sizes of ∇J are root mean squares of its elements."
    )
    found = Table("appendix-e", "Weights for which ∇J is zero", header, rows, caption)
    return Section("Weights that keep Hessians diagonal (Appendix E)", text, [found])
