"""Files of torch.save with verified checksums, which torch.load does not check."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config


def save_archive(value: Any, path: Path) -> None:
    """``torch.save``, always with checksums, even after a call of ``torch.serialization.set_crc32_options(False)``."""
    with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
        torch.save(value, path)


def load_archive(path: Path, map_location: str | None = None) -> Any:
    """Load a file that :func:`save_archive` wrote. Loading runs no code.

    Raises:
        Exception: of any kind, if the file is damaged or was not written by :func:`save_archive`.
    """
    with zipfile.ZipFile(path) as archive:
        if record := archive.testzip():
            raise ValueError(f"the checksum of {record} is wrong")
    return torch.load(path, map_location=map_location, weights_only=True)
