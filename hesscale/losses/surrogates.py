"""What a policy's loss makes of a log-probability l: φ(l), and the chain rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .closed_form import Known, Pair


class Phi(NamedTuple):
    """φ(l) with φ' and φ'', sample by sample; no φ'' where φ is linear."""

    value: Tensor
    slope: Tensor
    bend: Tensor | None


Outer = Callable[..., Phi]  # (log_prob, *constants)


def as_it_is(log_prob: Tensor) -> Phi:
    """φ(l) = l."""
    return Phi(log_prob, torch.ones_like(log_prob), None)


def weighted(log_prob: Tensor, advantages: Tensor) -> Phi:
    """φ(l) = −A l."""
    return Phi(-advantages * log_prob, -advantages, None)


def clipped(clip: float, log_prob: Tensor, advantages: Tensor, old_log_prob: Tensor) -> Phi:
    """φ(l) = −min(r A, clip(r) A) with r = exp(l − l_old); φ' = φ'' = −r A, or 0 where the clipped term is the smaller one.

    The two terms are equal inside the bounds, and there autograd's halves of both add up to the whole. Where they are equal
    outside, by rounding, only the half that belongs to r A is left.
    """
    ratio = (log_prob - old_log_prob).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    free, held = ratio * advantages, bounded * advantages
    slope = -torch.where(free > held, 0.0, free)
    slope = torch.where((free == held) & (ratio != bounded), slope / 2, slope)
    return Phi(-torch.minimum(free, held), slope, slope)


def chain(outer: Phi, pairs: Sequence[Pair | None]) -> Known:
    """φ(l(x)) from φ and the derivatives of l."""
    value, slope, bend = outer.value, outer.slope.unsqueeze(-1), outer.bend
    if bend is None:
        return Known(value, [pair and (slope * pair[0], slope * pair[1]) for pair in pairs])
    bend = bend.unsqueeze(-1)
    return Known(value, [pair and (slope * pair[0], bend * pair[0].square() + slope * pair[1]) for pair in pairs])
