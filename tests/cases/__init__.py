"""The case table: every operator that has a rule, as one line. ``test_rules.py`` runs each against double backward."""

from __future__ import annotations

from . import (
    activations,
    bilinear,
    complex_numbers,
    convolution,
    distances,
    elementwise,
    fourier,
    indexing,
    linalg,
    linear_maps,
    losses,
    normalization,
    pooling,
    quantization,
    reductions,
    softmax,
)
from .table import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "activations",
    "bilinear",
    "complex_numbers",
    "convolution",
    "distances",
    "elementwise",
    "fourier",
    "indexing",
    "linalg",
    "linear_maps",
    "losses",
    "normalization",
    "pooling",
    "quantization",
    "reductions",
    "softmax",
]
