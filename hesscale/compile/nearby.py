"""What a function refers to besides its arguments: a record of what it did goes stale when that changes."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MOST_ENTRIES = 64
LIBRARIES = {"torch", "hesscale", "numpy", *sys.stdlib_module_names}  # what stays as it is


class Near:
    """The places where a function finds values, as far as they are near: plain values there, and which objects."""

    def __init__(self) -> None:
        self.cells: list[CellType] = []  # nonlocal variables
        self.entries: list[tuple[dict[Any, Any], Any]] = []  # global variables, what dicts hold, and modules in modules
        self.attributes: list[tuple[Any, str]] = []
        self.boxes: list[list[Any] | deque[Any] | dict[Any, Any]] = []  # by what they hold
        self.names = {"__call__", "forward"}  # that stand in the functions met
        self.met: set[int] = set()

    def look_at(self, thing: Any, depth: int = 4) -> None:
        things = [thing]
        for _ in range(depth + 1):
            parts = []
            for part in sorted(things, key=lambda part: not isinstance(part, FunctionType)):  # these tell names
                if id(part) not in self.met and not isinstance(part, (Tensor, *PLAIN)):
                    self.met.add(id(part))
                    parts += self.parts_of(part)
            things = parts

    def parts_of(self, thing: Any) -> list[Any]:
        """Take note of the places in a thing, and return what to look at next."""
        if isinstance(thing, nn.Module):
            return self.parts_of_modules(thing)
        if isinstance(thing, MethodType):
            return [thing.__func__, thing.__self__]
        if isinstance(thing, partial):
            return [thing.func, thing.args, thing.keywords]
        if isinstance(thing, FunctionType):
            return self.variables_of(thing)
        if isinstance(thing, dict):
            self.entries += [(thing, key) for key in islice(dict.keys(thing), MOST_ENTRIES)]
            return entries_of(thing)
        if isinstance(thing, (list, tuple, deque)):
            if not isinstance(thing, tuple):
                self.boxes.append(thing)
            return entries_of(thing)
        if isinstance(thing, (type, ModuleType)):
            return [] if is_of_a_library(thing) else self.named_in(thing)
        if hasattr(thing, "__dict__") or hasattr(thing, "__slots__"):
            named = {**vars(type(thing)), **own_attributes(thing)}
            self.attributes += [(thing, k) for k, v in named.items() if isinstance(v, PLAIN) and k[:2] != "__"]
            return [*self.objects_of(thing), type(thing)]
        return []

    def parts_of_modules(self, root: nn.Module) -> list[Any]:
        parts: list[Any] = []
        for module in root.modules():
            self.met.add(id(module))
            self.attributes += [(module, k) for k, v in vars(module).items() if isinstance(v, PLAIN) and k[0] != "_"]
            self.entries += [(module._modules, name) for name in module._modules]
            parts += [*self.objects_of(module), type(module)]
        return parts

    def objects_of(self, thing: Any) -> list[Any]:
        """What is in those of a thing's own attributes whose names were met."""
        if code := written_in(thing):
            self.names |= names_in(code)
        own = own_attributes(thing)
        found = {k: v for k, v in own.items() if k in self.names and not isinstance(v, (Tensor, *PLAIN))}
        self.attributes += [(thing, name) for name in found]
        return list(found.values())

    def named_in(self, thing: type | ModuleType) -> list[Any]:
        """What a class or an imported module holds under names that were met."""
        held: dict[str, Any] = {}
        for holder in reversed(thing.__mro__) if isinstance(thing, type) else [thing]:
            held.update({} if is_of_a_library(holder) else vars(holder))
        found = {name: held[name] for name in sorted(held.keys() & self.names)}
        self.attributes += [(thing, name) for name, value in found.items() if not isinstance(value, (*DESCRIPTORS, Tensor))]
        return [behind(value) for value in found.values()]

    def variables_of(self, function: FunctionType) -> list[Any]:
        """A function's defaults, and the values of those of its variables that are not its own."""
        if is_of_a_library(function):
            return []
        words = names_in(function)
        self.names |= words
        cells = [cell for cell in function.__closure__ or () if cell != CellType()]
        values = {name: function.__globals__[name] for name in sorted(words & function.__globals__.keys())}
        self.cells += [cell for cell in cells if not isinstance(cell.cell_contents, Tensor)]
        self.entries += [(function.__globals__, k) for k, v in values.items() if not isinstance(v, (Tensor, ModuleType))]
        self.attributes += [(function, k) for k in ("__defaults__", "__kwdefaults__") if getattr(function, k)]
        defaults = function.__defaults__, function.__kwdefaults__
        return [*defaults, *[cell.cell_contents for cell in cells], *values.values()]

    def keep_named(self, function: Any) -> None:
        """Of attributes and entries, forget those whose names do not stand in a function, but for those of modules that do.

        Lists and dicts are kept that the function has by name, and those in them.
        """
        given: list[Any] = []
        while isinstance(function, (partial, MethodType)):
            given += [*function.args, *function.keywords.values()] if isinstance(function, partial) else []
            function = function.func if isinstance(function, partial) else function.__func__
        code = written_in(function)
        names = names_in(code) if code else set()
        self.entries = [(holder, key) for holder, key in self.entries if key in names]
        named = named_variables(code) if code else []
        named += [(name, getattr(holder, name, None)) for holder, name in self.attributes if name in names]
        if code:
            given += [*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).values()]
        given += [dict.get(holder, key) for holder, key in self.entries if code is None or holder is not code.__globals__]
        given += [part for value in (*given, *[value for _, value in named]) for part in entries_of(value)]
        held = [*given, *[value for _, value in named]]
        modules = [module for value in held if isinstance(value, nn.Module) for module in value.modules()]
        kept = {id(holder) for holder in (function, code, *modules)}
        self.attributes = [(holder, k) for holder, k in self.attributes if k in names or id(holder) in kept]
        given += [getattr(holder, name, None) for holder, name in self.attributes if id(holder) in kept]
        self.keep_boxes(code, given, named)

    def keep_boxes(self, code: FunctionType | None, given: list[Any], named: list[tuple[str, Any]]) -> None:
        """Of a dict that a function has by name, and only takes known keys from, note these; of other boxes all they hold."""
        self.boxes = list({id(value): value for value in given if isinstance(value, (list, deque, dict))}.values())
        others = {id(value): value for _, value in named if isinstance(value, (list, deque, dict))}
        for box in [box for box in others.values() if not any(box is other for other in self.boxes)]:
            keys = [keys_taken(code, name) if code else None for name, value in named if value is box]
            if isinstance(box, dict) and None not in keys:
                self.entries += [(box, key) for some in keys for key in some or ()]
            else:
                self.boxes.append(box)

    def values(self) -> tuple[object, ...]:
        """What is there now, to compare with later."""
        found = [known(cell.cell_contents) for cell in self.cells]
        found += [known(dict.get(holder, key, Near)) for holder, key in self.entries]
        found += [known(getattr(holder, name, None)) for holder, name in self.attributes]
        found += [known(tuple([part for part in entries_of(box) if not isinstance(part, Tensor)])) for box in self.boxes]
        return tuple(found)


def written_in(thing: Any) -> FunctionType | None:
    """A function itself, or what is called where an object is."""
    found = [thing, *[getattr(type(thing), name, None) for name in ("forward", "__call__")]]
    return next((each for each in found if isinstance(each, FunctionType) and not is_of_a_library(each)), None)


def entries_of(value: Any) -> list[Any]:
    """The first that a list, tuple or dict holds, with keys."""
    if isinstance(value, dict):
        return list(chain.from_iterable(islice(dict.items(value), MOST_ENTRIES)))
    return list(islice(value, MOST_ENTRIES)) if isinstance(value, (list, tuple, deque)) else []


def named_variables(function: FunctionType) -> list[tuple[str, Any]]:
    """The variables of a function that are not its own, with their values."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around = [(name, cell.cell_contents) for name, cell in cells if cell != CellType()]
    return around + [(name, function.__globals__[name]) for name in sorted(names_in(function) & function.__globals__.keys())]


def keys_taken(function: FunctionType, name: str) -> set[Any] | None:
    """The keys by which a function reads and writes the dict of that name; None if it does anything else with it."""
    found = set()
    for code in codes_of(function.__code__):
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP", "EXTENDED_ARG")]
        for first, key, then in zip(steps, [*steps[1:], *steps[-1:]], [*steps[2:], *steps[-1:] * 2], strict=True):
            words = first.argval if isinstance(first.argval, tuple) else (first.argval,)
            if name not in words or not first.opname.startswith("LOAD") or first.opname == "LOAD_CLOSURE":
                continue  # as a word it may be one for getattr
            is_taken = then.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") or (then.opname == "BINARY_OP" and then.argrepr == "[]")
            if first.argval != name or key.opname not in ("LOAD_CONST", "LOAD_SMALL_INT") or not is_taken:
                return None
            found.add(key.argval)
    return found


def own_attributes(thing: Any) -> dict[str, Any]:
    """Those of an object itself, also if it has slots for them."""
    slots = [name for kind in type(thing).__mro__ for name in names_of_slots(kind)]
    return {**{name: getattr(thing, name) for name in slots if hasattr(thing, name)}, **getattr(thing, "__dict__", {})}


def names_of_slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if name[:2] != "__"]


DESCRIPTORS = (property, classmethod, staticmethod)


def behind(value: Any) -> Any:
    """The function of a descriptor; anything else as it is."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def names_in(function: FunctionType) -> set[str]:
    """The names and words that stand in a function, and in those that it defines."""
    codes = codes_of(function.__code__)
    return {name for code in codes for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def is_of_a_library(thing: FunctionType | type | ModuleType) -> bool:
    module = thing.__name__ if isinstance(thing, ModuleType) else thing.__module__
    return str(module).partition(".")[0] in LIBRARIES


def known_now(thing: Any, depth: int = 4) -> tuple[object, ...]:
    """A thing, and all that is near it, to compare with later."""
    near = Near()
    near.look_at(thing, depth)
    places = [key for _, key in (*near.entries, *near.attributes)]
    return known(thing), tuple(places), near.values()


def known(value: Any, depth: int = 2) -> object:
    """A plain value as such, with its type; tuples by what they hold; anything else by its identity, but tensors not at all."""
    if isinstance(value, PLAIN):
        return type(value), repr(value) if isinstance(value, (float, complex)) else value  # tells 0.0 from -0.0, and nan is nan
    if isinstance(value, tuple) and depth:
        return type(value), *[known(part, depth - 1) for part in value]
    return Tensor if isinstance(value, Tensor) else Same(value)


def shown(value: Any, depth: int = 2) -> Any:
    """A value such that torch.compile looks at it again before it uses what it compiled; an object by its identity."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Tensor):
        return None
    if isinstance(value, (ModuleType, BuiltinFunctionType)):
        return value.__name__
    if isinstance(value, MethodType):
        return [shown(value.__func__), shown(value.__self__)]
    if isinstance(value, (tuple, list, dict)):  # up to torch 2.11, torch.compile knows none of the above by identity
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        return [shown(part, depth - 1) for part in parts[:MOST_ENTRIES]] if depth else len(parts)
    return id(value)


class Same:
    """Equal to the same object alone, which lives on."""

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)
