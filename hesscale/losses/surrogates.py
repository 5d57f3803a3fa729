"""The loss of a policy as a function φ(l) of the log-probability l, and the chain rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .closed_form import Known, Pair


class Phi(NamedTuple):
    """φ(l), φ' and φ'' of each sample; φ'' is None if φ is linear."""

    value: Tensor
    first: Tensor
    second: Tensor | None


Outer = Callable[..., Phi]  # (log_prob, *constants)


def as_it_is(log_prob: Tensor) -> Phi:
    """φ(l) = l."""
    return Phi(log_prob, torch.ones_like(log_prob), None)


def weighted(log_prob: Tensor, advantages: Tensor) -> Phi:
    """φ(l) = −A l."""
    return Phi(-advantages * log_prob, -advantages, None)


def clipped(clip: float, log_prob: Tensor, advantages: Tensor, old_log_prob: Tensor) -> Phi:
    """φ(l) = −min(r A, clip(r) A) with r = exp(l − l_old); φ' = φ'' = −r A, or 0 where the clipped term is the smaller one.

    The two terms are equal inside the bounds. There, autograd gives half of the gradient to each term, and the halves add up. If
    the terms are equal outside the bounds, due to rounding, only the half of r A remains.
    """
    ratio = (log_prob - old_log_prob).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    free, held = ratio * advantages, bounded * advantages
    first = -torch.where(free > held, 0.0, free)
    first = torch.where((free == held) & (ratio != bounded), first / 2, first)
    return Phi(-torch.minimum(free, held), first, first)


def chain(outer: Phi, pairs: Sequence[Pair | None]) -> Known:
    """φ(l(x)) from φ and the derivatives of l."""
    value, first, second = outer.value, outer.first.unsqueeze(-1), outer.second
    if second is None:
        return Known(value, [pair and (first * pair[0], first * pair[1]) for pair in pairs])
    second = second.unsqueeze(-1)
    return Known(value, [pair and (first * pair[0], second * pair[0].square() + first * pair[1]) for pair in pairs])
