"""Hessian diagonals for PyTorch, cheap enough to use at every step."""

from __future__ import annotations

from .engine import backward, grad
from .errors import CurvatureWarning, UnsupportedOperator
from .rules import register_rule

__all__ = ["CurvatureWarning", "UnsupportedOperator", "backward", "grad", "register_rule"]
__version__ = "0.1.0"
