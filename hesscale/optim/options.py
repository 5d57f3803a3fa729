"""The values that options of optimizers and of their groups may have."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

NOT_NEGATIVE = "0 or positive"
TRUST_REGIONS = ("optimizer", "group")
OPTIMIZER_OPTIONS = (  # these apply to the whole optimizer
    *("trust_region", "curvature_every", "curvature_dtype", "on_nonfinite"),
    *("num_samples", "generator", "per_sample", "spatial_average", "calibrate_every", "rho"),
)


def check_group(group: dict[str, Any]) -> None:
    """Raise for options that are out of range or not allowed in a group, and for parameters that cannot have curvature."""
    for name in OPTIMIZER_OPTIONS:
        if name in group:
            raise ValueError(f"{name} applies to the whole optimizer; pass it to the constructor, not in a group")
    lr, betas, radius = group["lr"], group["betas"], group["trust_radius"]
    is_number = not isinstance(lr, Tensor) or lr.dim() == 0
    check_range("lr", lr, is_number and 0 <= lr < math.inf, "a number of at least 0, or a tensor without dimensions")
    check_range("betas", betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "two numbers of at least 0 and below 1")
    check_range("eps", group["eps"], group["eps"] >= 0, NOT_NEGATIVE)
    check_range("weight_decay", group["weight_decay"], group["weight_decay"] >= 0, NOT_NEGATIVE)
    check_count("curvature_warmup", group["curvature_warmup"], minimum=0)
    check_range("trust_radius", radius, radius is None or radius > 0, "positive, or None")
    check_bounds(group)
    for p in group["params"]:
        if p.is_complex():
            raise ValueError("complex parameters have no Hessian diagonal; store the real and imaginary parts as two parameters")
        if p.dtype == torch.float16:
            raise ValueError("squared curvature does not fit into float16 parameters; keep them in float32 and use autocast")


def check_bounds(group: dict[str, Any]) -> None:
    """Refuse bounds on the update that are out of range."""
    clip, graft = group["update_clip"], group["graft"]
    check_range("damping", group["damping"], 0 <= group["damping"] < math.inf, NOT_NEGATIVE)
    check_range("update_clip", clip, clip is None or clip > 0, "positive, or None")
    is_pair = isinstance(graft, (tuple, list)) and len(graft) == 2
    is_valid = graft is None or (is_pair and 0 <= graft[0] <= graft[1] and graft[1] > 0)
    check_range("graft", graft, is_valid, "None, or two numbers (a, b) with 0 ≤ a ≤ b and b > 0")


def check_count(name: str, value: Any, *, minimum: int) -> None:
    """Refuse anything but a whole number of at least ``minimum``; NumPy's numbers are accepted too."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    check_range(name, value, is_number and value % 1 == 0 and value >= minimum, f"a whole number of at least {minimum}")


def check_range(name: str, value: Any, is_valid: Any, allowed: str) -> None:
    """Raise ValueError unless the value is valid; ``allowed`` says what is."""
    if not is_valid:
        raise ValueError(f"{name}={value!r} is out of range: it must be {allowed}")


def check_trust_region(name: str) -> None:
    if name not in TRUST_REGIONS:
        raise ValueError(f"trust_region={name!r} is not one of {', '.join(map(repr, TRUST_REGIONS))}")
