"""Hessian diagonals for PyTorch, cheap enough to use at every step."""

from __future__ import annotations

from . import estimators, losses, optim, rules
from .capture import capture
from .engine import backward, grad
from .errors import CurvatureWarning, NonFiniteError, UnsupportedOperator
from .explain import explain, operators
from .optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam
from .rules import register_rule

__all__ = [
    "BL89",
    "GGNMC",
    "AdaHesScale",
    "AdaHesScaleGN",
    "AdaHessian",
    "Adam",
    "CurvatureWarning",
    "NonFiniteError",
    "UnsupportedOperator",
    "backward",
    "capture",
    "estimators",
    "explain",
    "grad",
    "losses",
    "operators",
    "optim",
    "register_rule",
    "rules",
]
__version__ = "0.1.0"
