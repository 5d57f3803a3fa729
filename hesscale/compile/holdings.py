"""What a model and its optimizer hold: tensors in places, hooks, attributes; and whether a trace left all as it was."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from ..errors import NeedsEagerPass
from .hyperparameters import NO_OPTIONS
from .make_fx import CannotTrace
from .nearby import MOST_ENTRIES
from .signature import CONSTANTS, Constant


class Place(NamedTuple):
    """Where a model holds a tensor; one that it shares, in several places."""

    entries: list[tuple[Any, Any]]  # a dict or a list, and where in it

    def get(self) -> Tensor:
        holder, name = self.entries[0]
        tensor: Tensor = holder[name]
        return tensor

    def put(self, tensor: Tensor) -> None:
        for holder, name in self.entries:
            holder[name] = tensor


def places_of(modules: list[nn.Module]) -> tuple[list[Place], list[Place]]:
    """Where parameters are, and where buffers and other tensors are that modules hold in attributes."""
    parameters: dict[int, Place] = {}
    buffers: dict[int, Place] = {}
    for module in modules:
        holders: list[tuple[dict[int, Place], dict[str, Any]]]
        holders = [(parameters, module._parameters), (buffers, module._buffers), (buffers, module.__dict__)]
        for found, holder in holders:
            for name, tensor in holder.items():
                if isinstance(tensor, Tensor):
                    known = parameters if id(tensor) in parameters else found
                    known.setdefault(id(tensor), Place([])).entries.append((holder, name))
    for module in modules:
        for listed in [value for value in module.__dict__.values() if type(value) is list]:
            for i, tensor in enumerate(listed):
                if id(tensor) in parameters:
                    parameters[id(tensor)].entries.append((listed, i))
    return list(parameters.values()), list(buffers.values())


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]


# of all modules at once
OF_EVERY_MODULE = [
    every_module._global_forward_hooks,
    every_module._global_forward_pre_hooks,
    every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
]
OF_MODULES = vars(nn.Module()).keys() - {"training"}  # attributes that are no module's own


def watched_attributes(module: nn.Module) -> list[str]:
    return [name for name in module.__dict__ if name not in OF_MODULES]


def watched_options(optimizer: torch.optim.Optimizer) -> list[str]:
    """Options of an optimizer as a whole."""
    options = {name: value for name, value in vars(optimizer).items() if name[0] != "_"}
    return [name for name, value in options.items() if name == "generator" or isinstance(value, CONSTANTS)]


def getter_of(names: list[str]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda holder: tuple([holder[name] for name in names])


def is_constant(value: Any) -> bool:
    return isinstance(value, CONSTANTS) or (isinstance(value, tuple) and all(map(is_constant, value)))


def is_box_of_constants(value: Any) -> bool:
    return type(value) in (list, dict) and len(value) <= MOST_ENTRIES and all(map(is_constant, entries_of(value)))


def known_as(value: Any) -> object:
    """A constant, with those in tuples; a function by what it does, and whatever else by its type."""
    if isinstance(value, CONSTANTS):
        return Constant(value).key
    if isinstance(value, tuple) and is_constant(value):
        return type(value), *map(known_as, value)
    if isinstance(value, FunctionType):
        return value.__code__
    return value if isinstance(value, (BuiltinFunctionType, type)) else type(value)


def is_parallel(module: nn.Module) -> bool:
    return isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))


def containers_of(module: nn.Module) -> list[Any]:
    """The module's attributes; dicts, lists, deques and the attributes of plain objects among them, and among these."""
    inner = [box for value in module.__dict__.values() for box in box_of(value)]
    return [module.__dict__, *inner, *[box for outer in inner for value in entries_of(outer) for box in box_of(value)]]


def box_of(value: Any) -> list[Any]:
    if isinstance(value, (dict, list, deque)):
        return [value]
    return [value.__dict__] if type(getattr(value, "__dict__", None)) is dict and not isinstance(value, NO_BOXES) else []


NO_BOXES = (nn.Module, Tensor, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType)


def entries_of(box: Any) -> list[Any]:
    return list(box.values() if isinstance(box, dict) else box)


OF_RECURRENT_LAYERS = {"_flat_weights", "_flat_weight_refs"}  # the parameters once more, which these look up themselves


def changes(box: Any, before: Any) -> Iterator[str]:
    """The names under which a dict holds something else than before, or that a list does."""
    if isinstance(box, dict):
        yield from [str(name) for name in {**before, **box} if box.get(name, before) is not before.get(name, before)]
    elif len(box) != len(before) or any(a is not b for a, b in zip(box, before, strict=True)):
        yield "entries of a list"


def restore(box: Any, before: Any) -> None:
    if any(True for _ in changes(box, before)):
        box.clear()
        box.update(before) if isinstance(box, dict) else box.extend(before)


def is_like(tensor: Any, other: Tensor) -> bool:
    return isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)


def without_compiled_parts() -> contextlib.AbstractContextManager[Any]:
    """Parts of the model that are under torch.compile run as they were, so that their operators can be seen."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def pointers(values: Iterable[Any]) -> list[int]:
    try:
        return [*map(Tensor.data_ptr, values)]
    except TypeError:  # some are numbers
        return [value.data_ptr() for value in values if isinstance(value, Tensor)]


class Shared(CannotTrace, KeyError):
    """Tensors that a graph would take for different ones."""

    __str__ = RuntimeError.__str__


def clusters(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """A number for each tensor, the same for those whose memory hangs together."""
    spans = sorted([(str(t.device), *span_of(t), i) for i, t in enumerate(tensors)])
    found, until, first = [0] * len(spans), ("", 0), 0
    for device, start, end, i in spans:
        if start == end:  # of nothing
            found[i] = i
            continue
        first = i if (device, start) >= until else first
        found[i], until = first, max(until, (device, end))
    return tuple(found)


def overlapping(groups: Iterable[Iterable[Tensor]]) -> int | None:
    """The number of a group with a tensor that lies where one of a group before it does."""
    pairs = [(k, tensor) for k, tensors in enumerate(groups) for tensor in tensors]
    owners: dict[int, int] = {}
    for (k, _), cluster in zip(pairs, clusters(tensor for _, tensor in pairs), strict=True):
        if owners.setdefault(cluster, k) != k:
            return k
    return None


def check_apart(parameters: list[Tensor], buffers: list[Tensor]) -> None:
    """No parameter may lie where another or a buffer does: a graph changes each by itself."""
    found = clusters([*parameters, *buffers])
    counts = Counter(found)
    if any(counts[cluster] > 1 for cluster in found[: len(parameters)]):
        raise Shared("two parameters, or a parameter and a buffer, share memory: make them one nn.Parameter")


def span_of(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the first after it."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (steps + 1) * tensor.element_size() if tensor.numel() else start


def counters_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return getattr(optimizer, "counters", {})


def check_kept(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A step must have changed the tensors that it keeps in place, made no others, and counted in tensors alone."""
    if len(found) != len(expected):
        raise NeedsEagerPass("the optimizer has yet to make some of its state")
    for now, before in zip(found, expected, strict=True):
        for name in {**before, **now}:
            value = now.get(name)
            if name in before and not isinstance(before[name], Tensor) and not isinstance(value, Tensor):
                if value != before[name]:
                    raise CannotTrace(f"the optimizer keeps a changing {name} in its state that is no tensor")
            elif value is not before.get(name):
                raise NeedsEagerPass(f"the optimizer has yet to make its {name}, or makes it anew at every step")


def check_constant(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A step must not have changed the optimizer's numbers."""
    for now, before in zip(found, expected, strict=True):
        for name in now.keys() - NO_OPTIONS:
            if isinstance(now[name], (int, float)) and not isinstance(now[name], bool) and now[name] != before.get(name):
                raise CannotTrace(f"the optimizer changes its {name} at every step")
