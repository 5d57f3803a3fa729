"""The reference is complete: every public name has a docstring and is on a page of docs/api."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import hesscale

PAGES = sorted((Path(__file__).parent.parent / "docs/api").glob("*.md"))
DOCUMENTED = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)]
MODULES = [
    hesscale,
    hesscale.optim,
    hesscale.estimators,
    hesscale.losses,
    hesscale.func,
    hesscale.rules,
    hesscale.sb3,
    hesscale.uses,
]
PUBLIC = [(module, name) for module in MODULES for name in module.__all__]


def located(path: str) -> object:
    """The object that a page names: one in a module, even if a function of the package has the module's name, or a module."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name, None) or importlib.import_module(path)


@pytest.fixture(scope="module")
def documented() -> list[object]:
    return [located(path) for path in DOCUMENTED]


@pytest.mark.parametrize(("module", "name"), PUBLIC, ids=lambda part: part.__name__ if isinstance(part, ModuleType) else part)
def test_public_names_are_documented(module, name, documented):
    found = getattr(module, name)
    assert any(found is one for one in documented), f"add '::: {module.__name__}.{name}' to a page of docs/api"
    assert isinstance(found, dict) or found.__doc__, f"{module.__name__}.{name} has no docstring"


def test_the_reference_shows_functions_and_not_modules_of_the_same_name():
    """mkdocstrings takes a name for a module if there is one."""
    modules = {f"hesscale.{path.stem}" for path in (Path(hesscale.__file__).parent).glob("*.py")}
    shadowed = {name for name in modules if isinstance(getattr(hesscale, name.partition(".")[2], None), FunctionType)}
    assert not shadowed & set(DOCUMENTED)
