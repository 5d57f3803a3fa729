"""How to install missing packages."""

from __future__ import annotations

from pathlib import Path


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this package, from the checkout if there is one."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e '{checkout}[{extra}]'"
    return f"pip install 'hesscale[{extra}]'"
