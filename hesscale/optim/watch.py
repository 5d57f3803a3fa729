"""Pickles of optimizers from earlier versions look for a class in this module."""

from .nonfinite import Watch

__all__ = ["Watch"]
