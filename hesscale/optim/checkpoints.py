"""State dicts and pickles of optimizers, including those from earlier versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import bounds
from .scalars import counter_dtype

if TYPE_CHECKING:
    from .base import CurvatureOptimizer


LATER_OPTIONS = {"curvature_warmup": 0, **bounds.NEUTRAL}  # early pickles lack them; these values mean the same


def picklable_attributes(optimizer: CurvatureOptimizer) -> dict[str, Any]:
    """The public attributes of an optimizer, without the wrapper that a scheduler has installed as ``step``."""
    return {name: value for name, value in optimizer.__dict__.items() if name[0] != "_" and not callable(value)}


def upgrade_pickle(optimizer: CurvatureOptimizer) -> None:
    """Give an optimizer that an earlier version pickled the attributes and options of this version."""
    if "watch" in optimizer.__dict__:
        optimizer.nonfinite_check = optimizer.__dict__.pop("watch")
    optimizer.__dict__.setdefault("_has_warned_of_length", False)
    if not LATER_OPTIONS.keys() <= optimizer.defaults.keys():
        for options in (optimizer.defaults, *optimizer.param_groups):
            options.update({**LATER_OPTIONS, **options})
        optimizer.option_names = tuple(optimizer.defaults)


def complete_loaded_state(optimizer: CurvatureOptimizer, saved: dict[str, Any]) -> None:
    """Add options that the saved groups lack, move step counters to their parameters' devices, and copy every tensor.

    Groups that were saved before bounds on the update existed continue without bounds. Torch rounds every entry except ``step``
    to the dtype of the parameter. Since bfloat16 counts only to 256, counters are read from ``saved``.
    """
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    unrounded = {p: saved["state"].get(key, {}) for key, p in zip(keys, params, strict=True)}
    for group in optimizer.param_groups:
        is_ours = "trust_radius" in group  # a group saved by a torch optimizer does not say whether there were bounds
        options = {**optimizer.defaults, **bounds.NEUTRAL} if is_ours else optimizer.defaults
        for name in optimizer.option_names:
            group.setdefault(name, options[name])
        group.setdefault("step_count", 0)
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for name in {"step", "curvature_step", "calibration_sums"} & state.keys():
                value = unrounded[p].get(name, state[name])
                state[name] = torch.as_tensor(value).to(device=p.device, dtype=counter_dtype(p))
            state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
