"""Cases: losses."""

from __future__ import annotations

from .table import case  # noqa: F401
