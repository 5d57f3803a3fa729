"""The report of ``quality``: Fig. 2a and 2b, the distances to diag(G), and which of the paper's claims hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..colours import COLOURS
from ..lab.plots import Finding, Plot, Section, Series, Table
from ..lab.store import Result
from ._quality_methods import AUTHORS, DRAWS, METHODS, TO_GGN

SHOWN = (
    "HesScale",
    "BL89",
    "HesScaleGN",
    "diag(G)",
    "GGN-MC1",
    "GGN-MC50",
    "g²",
    "|diag(H)|",
    "AdaHessian-MC1",
    "AdaHessian-MC50",
)
NORM_OF_GGN = "|diag(G)|"
CAPTION = "Means over networks ± standard errors."
ROUNDING = 1e-12  # errors below this fraction of a layer's norm count as zero
QUIRKS = (
    "BL89 and AdaHessian are computed as in the authors' code. There, BL89 belongs to another network, which is initialized and "
    "trained separately, and BL89 is zero in the last layer. AdaHessian is |Hz| in place of z∘Hz, and with "
    f"{DRAWS} draws it is one draw divided by {DRAWS}."
)


@dataclass
class Findings:
    """Mean errors of shape (networks, layers, methods), with the methods in METHODS and TO_GGN."""

    task: Any
    errors: Tensor
    to_ggn: Tensor
    sizes: list[int]

    def error(self, method: str, layer: int | None = None) -> Tensor:
        """The error of each network, in one layer or summed over all layers."""
        found = self.errors[:, :, METHODS.index(method)]
        return found.sum(1) if layer is None else found[:, layer]

    def relative(self, method: str) -> Tensor:
        return self.error(method) / self.error("HesScale")

    def from_ggn(self, method: str) -> Tensor:
        """The distance to diag(G), divided by the norm of diag(G)."""
        found = self.to_ggn.sum(1)
        return found[:, TO_GGN.index(method)] / found[:, -1]


def sections(results: list[Result]) -> list[Section]:
    """One section for each combination of settings."""
    groups: dict[Any, dict[int, Findings]] = {}  # the networks of each section, by number
    for result in results:
        networks = groups.setdefault(dataclasses.replace(result.task, first=0, count=0), {})
        for k in range(result.task.count):
            errors, to_ggn = (result.values[name][k : k + 1] for name in ("errors", "to_ggn"))
            is_error = errors > ROUNDING * errors[:, :, [METHODS.index("|diag(H)|")]]
            networks[result.task.first + k] = Findings(result.task, errors * is_error, to_ggn, result.values["sizes"])
    differ = [name for task in list(groups)[:1] for name in vars(task) if len({getattr(t, name) for t in groups}) > 1]
    return [section(join([networks[k] for k in sorted(networks)]), differ) for networks in groups.values()]


def join(each: list[Findings]) -> Findings:
    errors, to_ggn = torch.cat([found.errors for found in each]), torch.cat([found.to_ggn for found in each])
    return dataclasses.replace(each[0], errors=errors, to_ggn=to_ggn)


def section(found: Findings, differ: list[str]) -> Section:
    """A section, named after the settings that differ between sections."""
    task, layers = found.task, "-".join(map(str, found.sizes))
    values = [f"{name} {getattr(task, name) if getattr(task, name) != '' else 'none'}".replace("_", " ") for name in differ]
    name = "-".join([value.replace(" ", "-") for value in values] or [task.dataset])
    pixels = "pixels standardized" if task.standardize else "pixels in [0, 1]"
    text = (
        f"{len(found.errors)} tanh networks {layers}, initialized as nn.Linear is, learn {task.examples} examples of "
        f"{task.dataset} by SGD, one at a time (step size {task.step_size:g}, {pixels}). Before the step on an example, every "
        "method's diagonal at that example is compared with the exact one: Σ|estimate − exact| over weights and biases, averaged "
        "over the examples. |diag(H)| is the error of an estimate of zero."
    )
    text += f"\n\n{QUIRKS}" if task.quirks == AUTHORS else ""
    title = f"Approximation quality ({', '.join(values)})" if values else "Approximation quality"
    made = (figure_2a, figure_2b, table_of_errors, table_of_layers, figure_of_ggn, claims)
    return Section(title, text, [make(found, name) for make in made], findings(found, name))


def findings(found: Findings, name: str) -> list[Finding]:
    """Which method has the smallest error, how much larger those of others are, and whether the last layer is exact."""
    others = [method for method in SHOWN if method != "HesScale"]
    means = {method: found.relative(method).mean().item() for method in others}
    if found.task.quirks or not all(map(math.isfinite, means.values())):  # with quirks, methods are not what their names say
        return []
    networks, start = len(found.errors), f"On {found.task.dataset}, "
    nearest = min(means, key=lambda method: means[method])
    best = int(torch.stack([found.relative(method) >= 1 for method in others]).all(0).sum())
    if means[nearest] > 1 and 2 * best > networks:
        share = number(100 * (found.error("HesScale") / found.error("|diag(H)|")).mean().item(), 2)
        texts = [
            f"{start}HesScale has the smallest error of all methods in {best} of {networks} networks: {share} % of the norm of "
            f"the exact diagonal. The next best is {nearest}, with {number(means[nearest], 3)} times its error."
        ]
    else:
        texts = [f"{start}{nearest} has {number(means[nearest], 3)} times the error of HesScale, which is not the smallest here."]
    one, many = (number(means[f"AdaHessian-MC{draws}"], 3) for draws in (1, DRAWS))
    texts.append(
        f"With one draw, AdaHessian has {one} times the error of HesScale. With {DRAWS} draws, it has {many} times the error."
    )
    if nearest != "BL89" and (found.relative("BL89") > 1).all():
        texts.append(
            f"BL89, whose diagonal at the outputs is not exact, has {number(means['BL89'], 3)} times the error of HesScale."
        )
    last = len(found.sizes) - 2
    if not any(found.error(method, last).any() for method in ("HesScale", "HesScaleGN")):
        texts.append("In the last layer, HesScale and HesScaleGN are exact.")
    return [Finding(text, f"{name}-relative") for text in texts]


def clouds(values: dict[str, Tensor], colours: Sequence[str]) -> list[Series]:
    """For each name, a bar for the mean, and one dot per network."""
    found = []
    for place, ((label, each), colour) in enumerate(zip(values.items(), colours, strict=True)):
        found.append(Series(label, [place], [each.mean().item()], kind="bars", colour=colour))
        found.append(Series(label, [place] * len(each), each.tolist(), kind="dots", colour=colour))
    return found


def figure_2a(found: Findings, name: str) -> Plot:
    return Plot(
        f"{name}-relative",
        "L¹ error of each method, divided by HesScale's (Fig. 2a)",
        clouds({method: found.relative(method) for method in SHOWN}, [COLOURS[method] for method in SHOWN]),
        y_label="error / HesScale's error",
        log_y=True,
        categories=SHOWN,
        caption="Each dot is a network, and each bar is the mean. Values below 1 would be better than HesScale.",
    )


def figure_2b(found: Findings, name: str) -> Plot:
    layers = range(len(found.sizes) - 1)
    series = []
    for method in SHOWN:
        each = [found.error(method, layer) for layer in layers]
        means, spreads = [e.mean().item() for e in each], [standard_error(e) for e in each]
        low, high = ([mean + sign * s for mean, s in zip(means, spreads, strict=True)] for sign in (-1, 1))
        dashed = method == "|diag(H)|"
        series.append(Series(method, list(layers), means, low, high, colour=COLOURS[method], dashed=dashed))
    return Plot(
        f"{name}-layers",
        "L¹ error by layer (Fig. 2b)",
        series,
        y_label="L¹ error",
        log_y=True,
        categories=[f"layer {layer + 1}" for layer in layers],
        caption=(
            "Lines are means over networks, bands are standard errors. The axis is logarithmic, so methods that are exact in "
            "a layer have no point there."
        ),
    )


def table_of_errors(found: Findings, name: str) -> Table:
    norm = found.error("|diag(H)|")
    rows: list[Sequence[str]] = [
        (m, spread(found.error(m)), spread(found.relative(m)), spread(found.error(m) / norm)) for m in SHOWN
    ]
    header = ("method", "L¹ error", "/ HesScale's", "/ |diag(H)|")
    return Table(f"{name}-errors", "L¹ errors, all layers", header, rows, caption_of(found))


def table_of_layers(found: Findings, name: str) -> Table:
    layers = range(len(found.sizes) - 1)
    rows: list[Sequence[str]] = [[method, *[spread(found.error(method, layer)) for layer in layers]] for method in SHOWN]
    header = ["method", *[f"layer {layer + 1}" for layer in layers]]
    return Table(f"{name}-errors-by-layer", "L¹ errors by layer", header, rows, caption_of(found))


def figure_of_ggn(found: Findings, name: str) -> Plot:
    labels = TO_GGN[:-1]
    return Plot(
        f"{name}-ggn",
        "L¹ distance to diag(G), divided by the norm of diag(G)",
        clouds({method: found.from_ggn(method) for method in labels}, [COLOURS[method] for method in labels]),
        y_label=f"distance / {NORM_OF_GGN}",
        categories=labels,
        caption="Each dot is a network, and each bar is the mean. An estimate of zero has the distance 1.",
    )


def claims(found: Findings, name: str) -> Table:
    """The paper's claims: for how many networks each claim holds, and the numbers."""
    others = [method for method in SHOWN if method != "HesScale"]
    ggn = ("HesScaleGN", "diag(G)", "GGN-MC1", "GGN-MC50")
    layers = range(len(found.sizes) - 1)
    norm = found.error("|diag(H)|", layers[-1])

    def best(layer: int | None = None) -> Tensor:
        return torch.stack([found.error("HesScale", layer) <= found.error(method, layer) for method in others]).all(0)

    nearest = min(others, key=lambda method: found.relative(method).mean().item())
    by_layer = torch.stack([best(layer) for layer in layers])
    last = torch.stack([found.error(method, layers[-1]) for method in ("HesScale", "HesScaleGN")]).amax(0)
    worst, closest = worst_and_best(found, ggn, ("AdaHessian-MC1", "AdaHessian-MC50"))
    mine = found.from_ggn("HesScaleGN")
    rows = [
        (
            "HesScale has the smallest error",
            best(),
            f"the next best, {nearest}, has {spread(found.relative(nearest))} times its error",
        ),
        (
            "HesScale has the smallest error in every layer",
            by_layer.all(0),
            ", ".join(f"layer {layer + 1}: {by_layer[layer].sum()}" for layer in layers),
        ),
        (
            "HesScale and HesScaleGN are exact in the last layer",
            last == 0,
            f"the largest error there is {last.max():.2g}, of a norm of {norm.mean():.2g}",
        ),
        (
            "The exact head makes HesScale better than BL89",
            found.relative("BL89") > 1,
            f"BL89 has {spread(found.relative('BL89'))} times the error",
        ),
        (
            "Methods for diag(G) are better than AdaHessian",
            worst < closest,
            f"the best AdaHessian has {spread(closest / worst)} times the error of the worst of them",
        ),
        *[
            (
                f"HesScaleGN is closer to diag(G) than {method} is",
                mine < found.from_ggn(method),
                f"distances are {spread(mine)} and {spread(found.from_ggn(method))} of {NORM_OF_GGN}",
            )
            for method in TO_GGN[1:-1]
        ],
    ]
    if found.task.quirks:  # the authors' versions of BL89 and AdaHessian cannot test claims about these methods
        rows = [row for row in rows if not row[0].endswith(("BL89", "AdaHessian"))]
    cells: list[Sequence[str]] = [(claim, f"{holds.sum()} of {len(holds)} networks", numbers) for claim, holds, numbers in rows]
    caption = QUIRKS if found.task.quirks else ""
    return Table(f"{name}-claims", "The paper's claims", ("claim", "holds for", "found"), cells, caption)


def caption_of(found: Findings) -> str:
    return f"{CAPTION} {QUIRKS}" if found.task.quirks else CAPTION


def worst_and_best(found: Findings, some: Sequence[str], others: Sequence[str]) -> tuple[Tensor, Tensor]:
    """For each network, the largest error of some methods, and the smallest error of others."""
    return torch.stack([found.error(m) for m in some]).amax(0), torch.stack([found.error(m) for m in others]).amin(0)


def standard_error(each: Tensor) -> float:
    return each.std().item() / math.sqrt(len(each)) if len(each) > 1 else 0.0


def spread(each: Tensor) -> str:
    mean = number(each.mean().item(), 3)
    return f"{mean} ± {number(standard_error(each), 2)}" if len(each) > 1 else mean


def number(value: float, digits: int) -> str:
    return f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"
