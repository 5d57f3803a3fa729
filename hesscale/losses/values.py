"""Losses of critics: squared errors of values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import check_clip, check_constants, check_reduction, reduce
from .closed_form import ClosedForm, Known, wide


class ClippedValue(ClosedForm):
    """max((v − R)², (v_c − R)²)"""


def farther(clip: float, needed: Sequence[bool], values: Tensor, returns: Tensor, old_values: Tensor) -> Known:
    """max((v − R)², (v_c − R)²) with v_c = v_old + clip(v − v_old, −ε, ε). If the squares are equal, each counts half."""
    change = values - old_values
    bounded = change.clamp(-clip, clip)
    inside = (change == bounded).to(values.dtype)
    error, held = values - returns, old_values + bounded - returns
    square, held_square = error * error, held * held
    share = ((square > held_square).to(error.dtype) + (square >= held_square).to(error.dtype)) / 2
    first = 2 * (share * error + (1 - share) * inside * held)
    return Known(torch.maximum(square, held_square), [(first, 2 * (share + (1 - share) * inside))])


def value_loss(values: Tensor, returns: Tensor, *, half: bool = False, reduction: str = "mean") -> Tensor:
    """Return (v − R)², or ½ (v − R)² with ``half=True``.

    The second derivative is 2, or 1 with ``half=True``. It is divided by N if the loss is a mean. Those of Appendix C correspond
    to ``half=True, reduction="sum"``.

    Args:
        values, returns: of one shape; returns are constants.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> values = torch.zeros(4, requires_grad=True)
        >>> hesscale.backward(losses.value_loss(values, torch.ones(4)))
        >>> values.hess_diag
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_constants("values", values, values.shape, returns=returns)
    check_reduction(reduction)
    loss = F.mse_loss(wide(values), wide(returns), reduction=reduction)
    return loss / 2 if half else loss


def clipped_value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    *,
    clip: float = 0.2,
    half: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """Return PPO's max((v − R)², (v_c − R)²) with v_c = v_old + clip(v − v_old, −ε, ε), times ½ with ``half=True``.

    The second derivative is that of :func:`value_loss`, or 0 where the clipped term is larger.

    Args:
        values, returns, old_values: of one shape; only the first is differentiated.
        clip: ε.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> values = torch.tensor([0.1, 0.5], requires_grad=True)
        >>> hesscale.backward(losses.clipped_value_loss(values, torch.ones(2), torch.zeros(2), reduction="sum"))
        >>> values.hess_diag
        tensor([2., 0.])
    """
    check_constants("values", values, values.shape, returns=returns, old_values=old_values)
    loss = ClippedValue.evaluate(partial(farther, check_clip(clip)), [values], returns, old_values)
    return reduce(loss / 2 if half else loss, reduction)
