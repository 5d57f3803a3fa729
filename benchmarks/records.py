"""What a benchmark keeps: numbers with the machine, versions and the command that made them, and a page to read."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hesscale.experiments.lab.files import write_whole
from hesscale.experiments.lab.machine import commit, machine

PACKAGES = (
    "gymnasium",
    "mujoco",
    "envpool",
    "stable_baselines3",
    "torchrl",
    "transformers",
    "numpy",
    "laplace-torch",
    "backpack-for-pytorch",
)  # whose versions numbers may depend on


def header(script: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """What a record begins with."""
    found = machine()
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    given = sys.argv[1:] if arguments is None else arguments
    return {"command": " ".join([f"python benchmarks/{script}", *given]), "machine": found, "commit": commit()}


def made_by(found: Mapping[str, Any]) -> str:
    m = found["machine"]
    versions = ", ".join(f"{package} {m[package]}" for package in ("torch", *PACKAGES) if package in m)
    return f"Written by `{found['command']}`\n({m.get('gpu') or m['cpu'] + ', one core'}; {versions}; commit {found['commit']})."


def save(stem: Path, found: Mapping[str, Any], text: str) -> None:
    """The record and its page, each whole or not at all."""
    write_whole(stem.with_suffix(".json"), lambda path: path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8"))
    write_whole(stem.with_suffix(".md"), lambda path: path.write_text(text, encoding="utf-8"))
    print(f"{text}\nWrote {stem}.json and .md.")
