"""Curvature rules, one small function per operator, one file per family."""

from __future__ import annotations

from . import (
    activations,
    bilinear,
    brute_force,
    complex_numbers,
    convolution,
    distances,
    elementwise,
    fourier,
    indexing,
    linear_maps,
    losses,
    normalization,
    pooling,
    quantization,
    reductions,
    softmax,
    special_functions,
    view_writes,
    written_out,
)
from .registry import BL89, COMPLEX, REFUSED, RULES, Rule, register_rule

__all__ = [
    "BL89",
    "COMPLEX",
    "REFUSED",
    "RULES",
    "Rule",
    "activations",
    "bilinear",
    "brute_force",
    "complex_numbers",
    "convolution",
    "distances",
    "elementwise",
    "fourier",
    "indexing",
    "linear_maps",
    "losses",
    "normalization",
    "pooling",
    "quantization",
    "reductions",
    "register_rule",
    "softmax",
    "special_functions",
    "view_writes",
    "written_out",
]
