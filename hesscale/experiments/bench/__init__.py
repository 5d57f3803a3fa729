"""The cost of a training step: whole steps of each method, timed in turn, relative to torch's Adam in the same run."""

from __future__ import annotations

from .command import main, run
from .settings import Settings

__all__ = ["Settings", "main", "run"]
