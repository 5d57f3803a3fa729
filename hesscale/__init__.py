"""Hessian diagonals for PyTorch, cheap enough to use at every step."""

from __future__ import annotations

from .engine import backward, grad
from .errors import CurvatureWarning, UnsupportedOperator
from .explain import explain, operators
from .rules import register_rule

__all__ = ["CurvatureWarning", "UnsupportedOperator", "backward", "explain", "grad", "operators", "register_rule"]
__version__ = "0.1.0"
