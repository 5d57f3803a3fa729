"""Curvature rules, one small function per operator, one file per family."""

from __future__ import annotations

from . import bilinear, brute_force, elementwise, indexing, linear_maps, losses, normalization, pooling, reductions, softmax
from .registry import BL89, REFUSED, RULES, Rule, register_rule

__all__ = [
    "BL89",
    "REFUSED",
    "RULES",
    "Rule",
    "bilinear",
    "brute_force",
    "elementwise",
    "indexing",
    "linear_maps",
    "losses",
    "normalization",
    "pooling",
    "reductions",
    "register_rule",
    "softmax",
]
