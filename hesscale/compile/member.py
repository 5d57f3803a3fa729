"""A model with its optimizer as a member of an ensemble: its step as a function of tensors."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .aliasing import has_overlap
from .make_fx import CannotTrace
from .optimizer import FunctionalOptimizer, Layout
from .signature import PLAIN, BatchSignature


class Place(NamedTuple):
    """Where a model holds a tensor; in several places, if it shares it."""

    entries: list[tuple[Any, Any]]  # a dict or a list, and the key or index there

    def get(self) -> Tensor:
        holder, name = self.entries[0]
        tensor: Tensor = holder[name]
        return tensor

    def put(self, tensor: Tensor) -> None:
        for holder, name in self.entries:
            holder[name] = tensor


class Member:
    """A model, its loss and its optimizer. Modules, attributes and hooks stay as they are when it is made."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: torch.optim.Optimizer, options: dict[str, Any]
    ) -> None:
        self.model, self.loss_fn = getattr(model, "_orig_mod", model), loss_fn
        self.optimizer = FunctionalOptimizer(optimizer, options)
        self.modules = list(self.model.modules())
        self.parameter_places, self.buffer_places = places_of(self.modules)
        self.parameters = [place.get() for place in self.parameter_places]
        known = {id(p) for p in self.parameters}
        if others := [p for p in self.optimizer.parameters() if id(p) not in known]:
            shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
            raise ValueError(f"{len(others)} parameters of the optimizer are not in the model, such as of shape {shapes}")
        self.replaced_buffers: set[int] = set()  # which the model replaces by others instead of changing them
        self.own_buffers: dict[int, Tensor] = {}  # those in their place, if the ensemble put them there
        self.structure, self.identities = self.read_structure(), self.read_identities()

    # ----------------------------------------------------------------------------------------------- what may not change

    def read_structure(self) -> list[tuple[str, Any]]:
        """Modules, parameters, attributes and hooks, by name."""
        found: list[tuple[str, Any]] = [("the optimizer's parameters", tuple(map(id, self.optimizer.parameters())))]
        for path, module in self.model.named_modules():
            values = {"class": type(module), "forward": type(module).forward, **module._modules, **module._parameters}
            values.update({kind.lstrip("_"): tuple(getattr(module, kind)) for kind in HOOKS})
            values.update({k: v for k, v in vars(module).items() if k not in MODULE_ATTRIBUTES and not isinstance(v, Tensor)})
            prefix = f"{path}." if path else ""
            for name, value in values.items():
                found += contents(f"{prefix}{name}", value)
        return found

    def read_identities(self) -> list[int]:
        """Which objects the structure consists of, without their names: quick to compare."""
        found = [*map(id, self.optimizer.parameters())]
        for module in self.modules:
            held = module.__dict__
            found += [id(type(module)), id(type(module).forward), *map(id, held["_modules"].values())]
            found += [*map(id, held["_parameters"].values()), *[len(held[kind]) for kind in HOOKS]]
            for name, value in held.items():
                if name not in MODULE_ATTRIBUTES and not isinstance(value, Tensor):
                    plain = isinstance(value, PLAIN)
                    found += [id(value)] if plain else [id(inner) for _, inner in contents("", value)]
        return found

    def changed_part(self) -> str:
        """The name of a part that an ensemble takes for fixed, and that has changed; empty if none has."""
        identities = self.read_identities()
        if identities == self.identities:
            return ""
        now, before = dict(self.read_structure()), dict(self.structure)
        changed = [name for name, value in now.items() if name not in before or not is_same(value, before[name])]
        changed += sorted(before.keys() - now.keys())
        if not changed:
            self.identities = identities
        return changed[0] if changed else ""

    def signature(self) -> tuple[object, ...]:
        """What may change, is no tensor, and decides what a step does."""
        return (
            self.optimizer.signature(),
            tuple([module.training for module in self.modules]),
            tuple([p.requires_grad for p in self.parameters]),
        )

    def obstacle(self) -> str:
        """Why a step cannot be traced, as far as that is known beforehand."""
        if any(getattr(module, kind) for module in self.modules for kind in HOOKS):
            return "the model has hooks, which no graph would call"
        parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
        if found := [type(module).__name__ for module in self.modules if isinstance(module, parallel)]:
            return f"{found[0]} moves data between devices, which no graph would do"
        return self.optimizer.obstacle()

    # ---------------------------------------------------------------------------------------------------------- tensors

    def buffers(self) -> list[Tensor]:
        return [place.get() for place in self.buffer_places]

    def layout(self) -> Layout:
        return self.optimizer.layout(self.parameters)

    def tensors(self, layout: Layout) -> list[Tensor]:
        """All that a step changes; KeyError if some are missing."""
        return [*self.parameters, *self.buffers(), *self.optimizer.tensors(layout, self.parameters)]

    def shares_memory(self, layout: Layout) -> bool:
        """Whether some of its tensors overlap."""
        return has_overlap(self.tensors(layout))

    def all_tensors(self) -> list[Tensor]:
        return self.tensors(self.layout())

    def replace_tensors(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Put other tensors in the places of :meth:`tensors`; parameters stay the same objects."""
        given = iter(tensors)
        for p in self.parameters:
            p.data = next(given)
        for i, place in enumerate(self.buffer_places):
            self.own_buffers[i] = next(given)
            place.put(self.own_buffers[i])
        self.optimizer.replace_tensors(layout, self.parameters, given)

    def prepare(self) -> None:
        """Bring tensors to where a graph can change them in place, and take over those that the model has put there."""
        self.optimizer.prepare()
        for i in self.replaced_buffers:
            place = self.buffer_places[i]
            if place.get() is not self.own_buffers.get(i):
                self.own_buffers[i] = place.get().detach().clone()
                place.put(self.own_buffers[i])

    # ------------------------------------------------------------------------------------------------------------- steps

    def eager(self, batch: Sequence[Any]) -> Tensor:
        """A step in eager mode; returns its loss."""
        with torch.enable_grad():
            loss = self.loss_fn(self.model, *batch)
        own = {id(p) for p in self.optimizer.parameters()}
        self.optimizer.train(loss, [p for p in self.parameters if p.requires_grad and id(p) not in own])
        self.structure, self.identities = self.read_structure(), self.read_identities()  # the model itself may change them
        return loss.detach()

    def step(self, layout: Layout, signature: BatchSignature, given: Sequence[Tensor]) -> list[Tensor]:
        """One step on stand-ins for the member's tensors, the optimizer's numbers and a batch; returns the loss, and η."""
        rest = iter(given)
        parameters = [next(rest).detach().requires_grad_(p.requires_grad) for p in self.parameters]
        buffers = [next(rest) for _ in self.buffer_places]
        state = [next(rest) for _ in range(sum([len(names) for _, names in layout.state]) + len(layout.counters))]
        numbers = [next(rest) for _ in self.optimizer.hyperparameters.arguments]
        stand_ins = dict(zip(self.parameters, parameters, strict=True))
        with self.optimizer.holding(stand_ins, layout, iter(state), numbers), self.model_holding(parameters, buffers):
            with torch.enable_grad():
                loss = self.loss_fn(self.model, *signature.batch(list(rest)))
            etas = self.optimizer.train(loss)
            return [loss.detach(), *[loss.new_ones(()) if eta is None else eta.detach() for eta in etas]]

    @contextlib.contextmanager
    def model_holding(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Iterator[None]:
        """The model with stand-ins for parameters and buffers; what is in the place of a buffer at the end is its new value."""
        before = [(held, held.copy()) for module in self.modules for held in containers_of(module)]
        places = (*self.parameter_places, *self.buffer_places)
        real = [place.get() for place in places]
        try:
            for place, tensor in zip(places, (*parameters, *buffers), strict=True):
                place.put(tensor)
            yield
            self.take_new_buffers(buffers)
            for place, tensor in zip(places, real, strict=True):
                place.put(tensor)
            changed = {name for held, copy in before for name in changed_names(held, copy)} - FLAT_WEIGHTS
            if changed:
                raise CannotTrace(f"the model sets {', '.join(sorted(changed))} in its forward pass, which no graph would do")
        finally:
            for held, copy in before:
                restore(held, copy)

    def take_new_buffers(self, buffers: Sequence[Tensor]) -> None:
        new = {}
        for i, (place, buffer) in enumerate(zip(self.buffer_places, buffers, strict=True)):
            for holder, name in place.entries:
                if (tensor := holder[name]) is buffer:
                    continue
                if not is_like(tensor, buffer) or len(place.entries) > 1:
                    raise CannotTrace(f"the model puts another kind of tensor in the place of its {name}")
                new[i] = tensor.detach().clone()
        for i, tensor in new.items():
            buffers[i].copy_(tensor)
        self.replaced_buffers.update(new)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_ATTRIBUTES = vars(nn.Module()).keys()
FLAT_WEIGHTS = {"_flat_weights", "_flat_weight_refs"}  # recurrent layers hold their parameters here once more
NO_CONTAINERS = (nn.Module, Tensor, torch.optim.Optimizer, type, ModuleType, FunctionType, MethodType)


def places_of(modules: Sequence[nn.Module]) -> tuple[list[Place], list[Place]]:
    """Where parameters are, and where buffers are and other tensors that modules hold in attributes."""
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


def is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (*PLAIN, tuple)) and a == b)


def containers_of(module: nn.Module) -> list[Any]:
    """A module's attributes; and dicts, lists and the attributes of plain objects among them, two levels down."""
    inner = [held for value in module.__dict__.values() for held in container_of(value)]
    return [module.__dict__, *inner, *[held for outer in inner for value in values_of(outer) for held in container_of(value)]]


def container_of(value: Any) -> list[Any]:
    if isinstance(value, (dict, list, deque)):
        return [value]
    return [value.__dict__] if type(getattr(value, "__dict__", None)) is dict and not isinstance(value, NO_CONTAINERS) else []


def contents(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """A value, and what is in it if it is a dict, a list or a plain object, by name; tensors left out."""
    yield name, value
    for held in container_of(value) if depth else []:
        for key, inner in held.items() if isinstance(held, dict) else enumerate(held):
            if not isinstance(inner, Tensor):
                yield from contents(f"{name}.{key}", inner, depth - 1)


def values_of(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def changed_names(container: Any, before: Any) -> Iterator[str]:
    """The names under which a dict holds something else than before, or that a list does."""
    if isinstance(container, dict):
        names = chain(before, container.keys() - before.keys())
        yield from [str(name) for name in names if container.get(name, before) is not before.get(name, before)]
    elif len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True)):
        yield "entries of a list"


def restore(container: Any, before: Any) -> None:
    if any(True for _ in changed_names(container, before)):
        container.clear()
        container.update(before) if isinstance(container, dict) else container.extend(before)


def is_like(tensor: Any, other: Tensor) -> bool:
    return isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype, tensor.device) == (other.shape, other.dtype, other.device)
