"""Texts that come with Python, for character-level language models."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable

from .download import DataError


def python_topics() -> str:
    """The topics of Python's ``help()``, about half a million characters. They differ between versions of Python."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        raise DataError("this Python was installed without pydoc_data.topics, the topics of its help") from None
    return "\n".join(topics[name] for name in sorted(topics))


TEXTS: dict[str, Callable[[], str]] = {"python-topics": python_topics}


def text_fingerprint(name: str) -> str:
    return hashlib.sha256(TEXTS[name]().encode()).hexdigest()
