"""Gauss-Newton diagonals for uses that need nonnegative curvature, such as a posterior precision or an importance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..estimators import estimate

METHODS = ("hesscale_gn", "ggn", "ggn_mc", "ggn_mc_per_sample")


def gauss_newton(
    loss: Tensor,
    params: Sequence[Tensor],
    *,
    method: str = "hesscale_gn",
    num_samples: int = 1,
    calibrate: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ...]:
    """The diagonal of the Gauss-Newton matrix of a loss, or an approximation, for each parameter; zeros for unused parameters.

    Args:
        loss: a scalar with a graph, which is freed.
        params: leaves of that graph.
        method: an estimator of :func:`hesscale.estimators.estimate`: ``"hesscale_gn"``, ``"ggn"`` (exact), or one of the random
            ones, ``"ggn_mc"`` and ``"ggn_mc_per_sample"``.
        num_samples: how many draws the random methods and the calibration average.
        calibrate: multiply HesScaleGN by one number per parameter tensor, so that its sum over the tensor is that of a
            ``"ggn_mc"`` estimate. The sum is then correct on average, and HesScaleGN determines how it is divided among entries.
        generator: random number generator of the draws; None for torch's default generator.

    Example:
        >>> import torch
        >>> from hesscale.uses.gauss_newton import gauss_newton
        >>> layer, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> gauss_newton(0.5 * layer(x).square().sum(), [layer.weight])
        (tensor([[10.,  4.]]),)
    """
    check_method(method, calibrate, METHODS)
    if not calibrate:
        return estimate(method, loss, params, num_samples=num_samples, generator=generator)
    diagonals = estimate(method, loss, params, retain_graph=True)
    draws = estimate("ggn_mc", loss, params, num_samples=num_samples, generator=generator)
    return tuple([diagonal * factor(diagonal, draw) for diagonal, draw in zip(diagonals, draws, strict=True)])


def factor(diagonal: Tensor, draw: Tensor) -> Tensor:
    """The ratio of the two sums; 1 if the diagonal is zero."""
    dtype = torch.promote_types(diagonal.dtype, torch.float32)  # sums may be too large for float16
    total = diagonal.sum(dtype=dtype)
    return torch.where(total > 0, draw.sum(dtype=dtype) / total, 1)


def check_method(method: str, calibrate: bool, methods: Sequence[str]) -> None:
    if method not in methods:
        raise ValueError(f"method must be one of {', '.join(map(repr, methods))}, not {method!r}")
    if calibrate and method != "hesscale_gn":
        raise ValueError(f"calibrate=True corrects 'hesscale_gn', and {method!r} needs no correction; leave calibrate out")
