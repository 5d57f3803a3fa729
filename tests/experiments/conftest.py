"""What tests of runs share."""

from __future__ import annotations

import os

import pytest

from hesscale.experiments.lab import run as run_module
from hesscale.experiments.lab import run_database as database_module


@pytest.fixture
def quick_store(monkeypatch):
    """Runs of this process neither wait for the disk, which matters to no process that is killed, nor ask git for the commit."""

    def connect(directory):
        database = database_module.connect(directory)
        database.execute("PRAGMA synchronous = OFF")
        return database

    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(run_module, "connect", connect)
    monkeypatch.setattr(run_module, "commit", lambda: "abc")
