"""Texts that come with Python, for language models of characters."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable

from .download import DataError


def python_topics() -> str:
    """The topics of Python's own help, about half a million characters; every version of Python has its own."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        raise DataError("this Python was installed without pydoc_data.topics, the text of its help") from None
    return "\n".join(topics[name] for name in sorted(topics))


TEXTS: dict[str, Callable[[], str]] = {"python-topics": python_topics}


def text_fingerprint(name: str) -> str:
    return hashlib.sha256(TEXTS[name]().encode()).hexdigest()
