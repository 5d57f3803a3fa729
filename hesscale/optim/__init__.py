"""Optimizers that use Hessian diagonals, and trust regions."""

from __future__ import annotations

from .base import CurvatureOptimizer
from .optimizers import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam, SophiaG
from .trust_region import adapt_trust_radius

__all__ = [
    "BL89",
    "GGNMC",
    "AdaHesScale",
    "AdaHesScaleGN",
    "AdaHessian",
    "Adam",
    "CurvatureOptimizer",
    "SophiaG",
    "adapt_trust_radius",
]
