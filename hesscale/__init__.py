"""Hessian diagonals for PyTorch, in the backward pass that computes the gradients."""

from __future__ import annotations

from . import estimators, func, losses, optim, rules, sb3, uses
from .compile.step import compile_step
from .engine.backward import backward, grad, hess_diags
from .errors import CompileWarning, CurvatureWarning, NonFiniteError, UnsupportedOperator
from .explain import explain, operators
from .optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam
from .optim.capture import capture
from .rules import register_rule
from .uses import inspect

__all__ = [
    "BL89",
    "GGNMC",
    "AdaHesScale",
    "AdaHesScaleGN",
    "AdaHessian",
    "Adam",
    "CompileWarning",
    "CurvatureWarning",
    "NonFiniteError",
    "UnsupportedOperator",
    "backward",
    "capture",
    "compile_step",
    "estimators",
    "explain",
    "func",
    "grad",
    "hess_diags",
    "inspect",
    "losses",
    "operators",
    "optim",
    "register_rule",
    "rules",
    "sb3",
    "uses",
]
__version__ = "0.2.0"
