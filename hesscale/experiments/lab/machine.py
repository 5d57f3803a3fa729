"""The machine on which a result was computed, and the commit of the code."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from ... import __version__

PACKAGES = ("torch", "numpy", "scikit-learn", "gymnasium", "mujoco")


def machine() -> dict[str, str]:
    found = {
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "system": platform.system(),
        "python": platform.python_version(),
        **packages(),
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


def packages() -> dict[str, str]:
    """The versions of packages that may affect numbers."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"hesscale": __version__, **found, "torch": str(torch.__version__)}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this package's working tree, and whether the package has uncommitted changes."""
    folder = Path(__file__).parent.parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # fails if it is not tracked, as inside another project
        return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
