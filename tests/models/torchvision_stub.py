"""Stands in for torchvision while timm is imported.

timm's models ask torchvision for one class, a frozen batch norm, which they only compare types with. Its data pipeline, which
they import too, asks for transforms and datasets. Nothing here uses either, and torchvision is as large as everything else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

MODULES = ("", ".datasets", ".ops", ".ops.misc", ".transforms", ".transforms.functional")


class Stub(ModuleType):
    """A module in which every name is a class of its own."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__getattr__": lambda self, key: None})
        setattr(self, name, made)
        return made


class Names(type):
    """A class whose attributes are their own names, as those of an Enum."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


@contextlib.contextmanager
def torchvision_stub() -> Iterator[None]:
    """Other libraries look for torchvision as well, so the stub goes once timm has been imported."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    modules = {f"torchvision{name}": Stub(f"torchvision{name}") for name in MODULES}
    for name, module in modules.items():
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["torchvision.transforms.functional"].InterpolationMode = Names("InterpolationMode", (), {})
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
