"""``hesscale inspect``: the report of :func:`hesscale.inspect` as a page, before and after training."""

from __future__ import annotations

import html
import importlib
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from ..optim import AdaHesScale
from ..uses import CurvatureReport, inspect
from ..uses.derivatives import arguments_of
from .lab.files import write_text
from .tasks.problem import loss_of
from .tasks.registry import PROBLEMS

Made = tuple[nn.Module, Iterable[Any], Callable[..., Tensor]]  # a model, its batches, and loss_fn(model, *batch)

EXAMPLE, EXAMPLE_BATCHES, EXAMPLE_BATCH = "digits-tanh", 18, 64
DECADES = 4  # of a figure's axis, on both sides of zero
NOTES = {
    "The diagonal h": "The mean and quantiles of the entries of h, and the fractions of entries that are negative or zero.",
    "Gradients and steps": "‖g‖ is the norm of the gradient. |g/h| is the length of a Newton step: the median over entries with "
    "a gradient. Too long is the fraction of entries with |g| > {max_step:g} |h|. Dead units are outputs of a weight, or entries "
    "of a vector, with neither gradient nor curvature on any batch. GGN ÷ HesScaleGN is the sum of the Gauss-Newton diagonal, "
    "estimated by random draws, divided by the sum of HesScaleGN; ± is its standard error over batches. Do not compare h between "
    "parameters for which this ratio differs.",
    "Largest entry of h of each parameter": "The index of the largest h, with the gradient and the value of the parameter there.",
}
CANNOT_REPEAT = (
    "the loader can be read only once; to train and inspect again, return one that can be read several times, such as a list "
    "or a DataLoader, or pass --steps 0"
)
STYLE = """
body { margin: 2rem auto; padding: 0 1rem; max-width: 62rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.note { font-size: .9rem; color: #555; }
code { overflow-wrap: anywhere; }
"""


def example() -> Made:
    """A small network and handwritten digits."""
    problem = PROBLEMS[EXAMPLE]
    splits = problem.load(None, torch.device("cpu"))
    numbers = torch.randperm(splits.train.count, generator=torch.Generator().manual_seed(0))
    batches = [splits.train.take(some) for some in numbers[: EXAMPLE_BATCHES * EXAMPLE_BATCH].split(EXAMPLE_BATCH)]
    return problem.network(splits.classes, 0), batches, loss_of


def made_by(factory: str) -> Made:
    """The result of the function ``module:function``."""
    module, colon, name = factory.partition(":")
    if not colon:
        raise ValueError(f"{factory!r} is not of the form module:function")
    sys.path.insert(0, "")
    made = getattr(importlib.import_module(module), name)()
    if not (isinstance(made, tuple) and len(made) == 3 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{factory} must return (model, loader, loss_fn), not {type(made).__name__}")
    return made


def train(made: Made, steps: int, step_size: float) -> None:
    """Train with AdaHesScale."""
    model, loader, loss_fn = made
    optimizer = AdaHesScale([p for p in model.parameters() if p.requires_grad], lr=step_size)
    was_training = model.training
    model.train()
    device = next(model.parameters()).device
    for arguments in itertools.islice(endless(loader, device), steps):
        optimizer.zero_grad()
        optimizer.backward(loss_fn(model, *arguments))
        optimizer.step()
    model.train(was_training)


def endless(loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, ...]]:
    """The arguments of each batch that is not empty, repeating the loader endlessly."""
    while True:
        is_empty = True
        for batch in loader:
            arguments, size = arguments_of(batch, device)
            if size:
                is_empty = False
                yield arguments
        if is_empty:
            raise ValueError(CANNOT_REPEAT)


def with_progress(loader: Iterable[Any], max_batches: int | None) -> Iterable[Any]:
    """The batches, with a progress bar on a terminal."""
    console = Console(stderr=True)
    count = length_hint(loader) or None
    total = max_batches if count is None else min(count, max_batches or count)
    return track(loader, "batches", total, console=console, transient=True, disable=not console.is_terminal)


def page_of(reports: Mapping[str, CurvatureReport], title: str, command: str) -> str:
    """A self-contained HTML page."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p>Written by <code>{html.escape(command)}</code>. All numbers: <a href="curvature.json">curvature.json</a>.</p>
<div class="wide">{svg(figure(reports))}</div>
{"".join(section(name, report) for name, report in reports.items())}</body>
</html>
"""


def section(name: str, report: CurvatureReport) -> str:
    remarks = "".join(f"<p>{html.escape(remark)}</p>\n" for remark in report.remarks)
    tables = []
    for title, header, rows in report.tables():
        note = html.escape(NOTES[title].format(max_step=report.max_step))
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
        tables.append(
            f'<h3>{html.escape(title)}</h3>\n<p class="note">{note}</p>\n'
            f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}</table></div>\n'
        )
    summary = f"Method {report.method}, {report.examples} examples, mean loss {report.loss:.4g}."
    return f"<h2>{html.escape(name)}</h2>\n<p>{summary}</p>\n{remarks}{''.join(tables)}"


def figure(reports: Mapping[str, CurvatureReport]) -> Figure:
    """By parameter: quantiles of h, the fraction of steps that are too long, and the Gauss-Newton diagonal ÷ HesScaleGN."""
    names = [row["parameter"] for row in next(iter(reports.values())).rows]
    result = Figure(figsize=(max(5.0, 1.5 + 0.45 * len(names)), 8), layout="constrained")
    diagonals, steps, ratios = result.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    largest = 0.0
    for number, (label, report) in enumerate(reports.items()):
        style = {"fmt": "o", "color": f"C{number}", "markersize": 4}
        x = [k + 0.25 * (number - (len(reports) - 1) / 2) for k in range(len(names))]
        low, middle, high = ([row[f"quantile_{q}"] for row in report.rows] for q in ("0.05", "0.5", "0.95"))
        diagonals.vlines(x, low, high, color=f"C{number}", linewidth=2)
        diagonals.errorbar(x, middle, label=label, **style)
        largest = max([largest, *map(abs, low), *map(abs, high)])
        steps.errorbar(x, [100 * row["long_steps"] for row in report.rows], **style)
        known = [(a, row) for a, row in zip(x, report.rows, strict=True) if (row["ggn_ratio"] or 0) > 0]
        if known:
            errors = [row["ggn_ratio_error"] or 0 for _, row in known]
            ratios.errorbar([a for a, _ in known], [row["ggn_ratio"] for _, row in known], errors, **style)
    diagonals.set_yscale("symlog", linthresh=10.0 ** (math.ceil(math.log10(largest or 1)) - DECADES))
    diagonals.set_ylabel("h: median, 5 % to 95 %")
    steps.set(ylabel="steps too long, %", ylim=(-5, 105))
    ratios.set_yscale("log")
    ratios.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ratios.yaxis.set_major_formatter("{x:g}")
    ratios.yaxis.set_minor_locator(NullLocator())
    ratios.axhline(1, color="black", linewidth=0.6)
    ratios.set_ylabel("GGN ÷ HesScaleGN")
    ratios.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    if not ratios.containers:
        ratios.text(0.5, 0.6, "not measured", ha="center", transform=ratios.transAxes)
    ratios.set_xlim(-0.6, len(names) - 0.4)
    result.legend(loc="outside upper left", ncols=len(reports), frameon=False)
    return result


def svg(drawn: Figure) -> str:
    file = io.StringIO()
    FigureCanvasSVG(drawn).print_svg(file, metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]  # without the XML declaration


def as_json(reports: Mapping[str, CurvatureReport]) -> str:
    """All rows, with null for numbers that are not finite."""
    found = {
        name: {"loss": r.loss, "examples": r.examples, "method": r.method, "rows": r.rows, "largest": r.largest}
        for name, r in reports.items()
    }
    return json.dumps(finite(found), indent=1, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspect_and_write(
    factory: str, out: Path, *, steps: int, step_size: float, method: str, num_samples: int, max_batches: int | None
) -> dict[str, CurvatureReport]:
    """Inspect the model; with ``steps``, train it and inspect it again. Write ``out``/index.html and curvature.json."""
    made = made_by(factory) if factory else example()
    if steps and isinstance(made[1], Iterator):
        raise ValueError(CANNOT_REPEAT)

    def report() -> CurvatureReport:
        model, loader, loss_fn = made
        batches = with_progress(loader, max_batches)
        return inspect(model, batches, loss_fn, method=method, num_samples=num_samples, max_batches=max_batches)

    reports = {"Before training" if steps else "As it is": report()}
    if steps:
        train(made, steps, step_size)
        reports[f"After {steps} steps"] = report()
    title = f"Curvature of {factory or PROBLEMS[EXAMPLE].title}"
    settings = f"--steps {steps} --lr {step_size:g} --method {method} --num-samples {num_samples}"
    settings += "" if max_batches is None else f" --max-batches {max_batches}"
    write_text(
        out / "index.html", page_of(reports, title, " ".join(["hesscale inspect", *([factory] if factory else []), settings]))
    )
    write_text(out / "curvature.json", as_json(reports))
    return reports
