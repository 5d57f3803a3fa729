"""A report on a network's curvature, parameter by parameter, over a data set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .derivatives import TRANSPOSED, Averages, LossFunction, mean_derivatives
from .report import QUANTILES, CurvatureReport


def inspect(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction,
    *,
    method: str = "hesscale",
    num_samples: int = 1,
    max_step: float = 1.0,
    max_batches: int | None = None,
    training: bool = False,
    seed: int = 0,
) -> CurvatureReport:
    """A report on the Hessian diagonal h and the gradient g of the mean loss; ``print`` it for tables of 80 columns.

    It has one row for each parameter that requires gradients. A row has the mean and quantiles of h, the fractions of entries
    that are negative or zero, ‖g‖, the number of dead units, and the fraction of entries whose step g/|h| is too long.

    HesScaleGN leaves out mixed second derivatives of activations, and so it may be far too small. The report shows by how much:
    each row also has the sum of the Gauss-Newton diagonal, divided by the sum of HesScaleGN. The first sum is an unbiased
    estimate from random draws.

    The batches are read once, one at a time. The model is in evaluation mode during the pass. Everything that the pass changes is
    restored. For a progress bar, pass a loader that has one, such as ``tqdm(loader)``.

    Args:
        model: on any device, to which batches are moved.
        loader: batches. A tuple or list is unpacked, anything else is one argument of ``loss_fn``.
        loss_fn: ``loss_fn(model, *batch)``, the mean loss of a batch, as for :func:`hesscale.compile_step`.
        method: one of :func:`hesscale.estimators.names`.
        num_samples: random draws per batch for the comparison with HesScaleGN; 0 for none. One draw takes three backward passes.
        max_step: an entry's step is too long if |g| > ``max_step`` |h|.
        max_batches: the maximum number of batches to read.
        training: put the model in training mode instead.
        seed: of the random draws, and of dropout in training mode.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> report = hesscale.inspect(model, [x], lambda model, x: model(x).square().mean())
        >>> report.rows[0]["parameter"], report.rows[0]["mean"], report.largest[0]["index"]
        ('weight', 2.5, (0, 1))
    """
    averages = mean_derivatives(
        model,
        loader,
        loss_fn,
        method=method,
        num_samples=num_samples,
        max_batches=max_batches,
        training=training,
        seed=seed,
    )
    owners = {f"{path}.{name}".lstrip("."): module for path, module in model.named_modules() for name in module._parameters}
    params = dict(model.named_parameters())
    rows = tuple(row_of(name, params[name], owners[name], averages, max_step) for name in averages.of)
    entries = sorted([largest(name, params[name], averages) for name in averages.of], key=lambda entry: -entry["diagonal"])
    return CurvatureReport(rows, tuple(entries), method, max_step, averages.loss, averages.examples, averages.batches)


def row_of(name: str, p: nn.Parameter, module: nn.Module, averages: Averages, max_step: float) -> dict[str, Any]:
    gradient, diagonal, ratio, ratio_error = averages.of[name]
    g, h = gradient.double().abs().flatten(), diagonal.double().flatten()
    if not len(h):
        raise ValueError(f"{name} is empty, with shape {tuple(p.shape)}; freeze it with requires_grad_(False)")
    is_moved = g > 0
    units, dead = dead_units(gradient, diagonal, module)
    steps = (g / h.abs())[is_moved]
    ordered = h.sort().values
    return {
        "parameter": name,
        "module": type(module).__name__,
        "shape": tuple(p.shape),
        "mean": float(h.mean()),
        **{f"quantile_{q:g}": quantile(ordered, q) for q in QUANTILES},
        "negative": float((h < 0).double().mean()),
        "zero": float((h == 0).double().mean()),
        "gradient_norm": float(g.square().sum().sqrt()),
        "units": units,
        "dead_units": dead,
        "median_step": quantile(steps.sort().values, 0.5) if len(steps) else 0.0,
        "long_steps": float((g > max_step * h.abs()).double().mean()),
        "ggn_ratio": ratio,
        "ggn_ratio_error": ratio_error,
    }


def quantile(ordered: Tensor, q: float) -> float:
    """The q-quantile of sorted entries, without interpolation. (torch.quantile does not support large tensors.)"""
    return float(ordered[math.floor(q * (len(ordered) - 1))])


def dead_units(gradient: Tensor, diagonal: Tensor, module: nn.Module) -> tuple[int, int]:
    """The number of units (outputs of a weight, or entries of a vector), and of those without any gradient or curvature."""
    used = (gradient != 0) | (diagonal != 0)
    if used.dim() > 1 and isinstance(module, TRANSPOSED):
        used = used.unflatten(0, (module.groups, -1)).transpose(1, 2).flatten(0, 1)  # outputs first, ordered by group
    if not used.dim():
        used = used[None]
    alive = used.flatten(1).any(1) if used.dim() > 1 else used
    return len(alive), int((~alive).sum())


def largest(name: str, p: nn.Parameter, averages: Averages) -> dict[str, Any]:
    """The entry with the largest diagonal."""
    gradient, diagonal, *_ = averages.of[name]
    index = tuple(int(i) for i in torch.unravel_index(diagonal.argmax(), diagonal.shape))
    entry = {"parameter": name, "index": index, "diagonal": float(diagonal[index])}
    return entry | {"gradient": float(gradient[index]), "value": float(p.detach()[index])}
