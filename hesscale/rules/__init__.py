"""Curvature rules, one small function per operator, one file per family."""

from __future__ import annotations

from . import (
    activations,
    attention,
    bilinear,
    brute_force,
    convolution,
    distances,
    elementwise,
    indexing,
    linear_maps,
    losses,
    normalization,
    pooling,
    recurrent,
    reductions,
    softmax,
    special_functions,
    view_writes,
    written_out,
)
from .registry import BL89, REFUSED, RULES, Rule, register_rule

__all__ = [
    "BL89",
    "REFUSED",
    "RULES",
    "Rule",
    "activations",
    "attention",
    "bilinear",
    "brute_force",
    "convolution",
    "distances",
    "elementwise",
    "indexing",
    "linear_maps",
    "losses",
    "normalization",
    "pooling",
    "recurrent",
    "reductions",
    "register_rule",
    "softmax",
    "special_functions",
    "view_writes",
    "written_out",
]
