"""What the reference pages show differently from the source: links in docstrings, and the inherited arguments of optimizers."""

from __future__ import annotations

import contextlib
import importlib
import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:attr|class|func|meth|mod):`([^`]+)`")  # Sphinx's, which editors know too
VARIADIC = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)


class HesscaleExtension(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")  # the name that Griffe knows
            obj.docstring.value = ROLE.sub(lambda role: reference(role[1], obj), text)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Arguments that an optimizer passes on, typed as ``Unpack[…]``, become part of its signature."""
        if cls.path.startswith("hesscale.optim.") and any("Unpack" in str(p.annotation) for p in cls.parameters):
            found: dict[str, griffe.Parameter] = {}
            for base in [cls, *cls.mro()]:
                if isinstance(init := base.members.get("__init__"), griffe.Function):
                    found = {**{p.name: p for p in init.parameters if p.kind not in VARIADIC}, **found}
            for parameter in found.values():
                if str(parameter.default).isupper():
                    parameter.default = value_of(str(parameter.default), cls)
            in_order = sorted(found.values(), key=lambda p: p.kind is griffe.ParameterKind.keyword_only)
            cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*in_order)))


def value_of(constant: str, cls: griffe.Class) -> str:
    """The value of a constant of the class's module, such as (1.0, 3.0) for SAFE_GRAFT."""
    return repr(getattr(importlib.import_module(cls.path.rpartition(".")[0]), constant))


def reference(name: str, obj: griffe.Object) -> str:
    """A link to what a docstring names: a member of its class, or a name of the package; else the name alone."""
    cls = obj if obj.is_class else obj.parent
    if cls is not None and cls.is_class and name in cls.all_members:
        return f"[`{name}`][{cls.all_members[name].canonical_path}]"
    if name.startswith("hesscale."):
        return f"[`{name}`][{name}]"
    with contextlib.suppress(griffe.NameResolutionError):
        if (target := obj.resolve(name)).startswith("hesscale."):
            return f"[`{name}`][{target}]"
    return f"`{name}`"
