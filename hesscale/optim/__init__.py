"""Optimizers that use Hessian diagonals, and trust regions."""

from __future__ import annotations

from .base import CurvatureOptimizer
from .optimizers import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam, SophiaG

__all__ = ["BL89", "GGNMC", "AdaHesScale", "AdaHesScaleGN", "AdaHessian", "Adam", "CurvatureOptimizer", "SophiaG"]
