"""The scale σ of a Gaussian, given in one of three ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .closed_form import Pair


class Scale(NamedTuple):
    """A parametrization of σ. ``read`` returns (log σ, 1/σ), and ``derivatives`` those of log N(a; μ, σ), from z² and 1/σ."""

    read: Callable[[Tensor], tuple[Tensor, Tensor]]
    derivatives: Callable[[Tensor, Tensor], Pair]


SCALES = {
    "variance": Scale(
        lambda variance: (variance.log() / 2, variance.rsqrt()),
        lambda z2, inverse: ((z2 - 1) * inverse**2 / 2, (0.5 - z2) * inverse**4),
    ),
    "std": Scale(
        lambda std: (std.log(), std.reciprocal()),
        lambda z2, inverse: ((z2 - 1) * inverse, (1 - 3 * z2) * inverse**2),
    ),
    "log_std": Scale(
        lambda log_std: (log_std, (-log_std).exp()),
        lambda z2, inverse: (z2 - 1, -2 * z2),
    ),
}


def scale_of(mean: Tensor | None, *given: Tensor | None) -> tuple[Scale, Tensor]:
    """The parametrization in which σ is given, and its value."""
    named = [(name, raw) for name, raw in zip(SCALES, given, strict=True) if raw is not None]
    if len(named) != 1:
        met = " and ".join(name for name, _ in named) or "none"
        raise TypeError(f"the scale of a Gaussian must be given as exactly one of {', '.join(SCALES)}, but got {met}")
    name, raw = named[0]
    if not isinstance(raw, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(raw).__name__}")
    if mean is not None and not broadcasts(raw.shape, mean.shape):
        raise ValueError(
            f"{name} has shape {tuple(raw.shape)}, which does not match mean with shape {tuple(mean.shape)}. "
            f"Expected that shape, or one that broadcasts to it, like {tuple(mean.shape[-1:])} for all states"
        )
    return SCALES[name], raw


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
