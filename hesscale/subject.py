"""What is trained, as a list of tensors: a step on a model, its loss and its optimizer reads them and changes them in place."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from .checks import check_loss
from .heads import Unsettled
from .optim import CurvatureOptimizer
from .options import NO_OPTIONS, Numbers
from .tracing import CannotTrace, trace

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


class Shape(NamedTuple):
    """All of a batch but the values in its tensors."""

    tensors: tuple[object, ...]
    constants: tuple[object, ...]  # leaves that are no tensors, with their types; None where a tensor stands
    spec: pytree.TreeSpec | None  # None for a plain sequence of tensors
    obstacle: str  # why no graph can take such a batch

    @staticmethod
    def of(batch: Sequence[Any]) -> tuple[list[Tensor], Shape]:
        tensors = [value for value in batch if isinstance(value, Tensor)]
        spec: pytree.TreeSpec | None = None
        constants: tuple[object, ...] = ()
        if len(tensors) < len(batch):
            leaves, spec = pytree.tree_flatten(batch)
            if strangers := [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]:
                reason = f"the batch holds a {type(strangers[0]).__name__}, which is neither a tensor nor a constant"
                return [], Shape((), (), None, reason)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            constants = tuple([None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves])
        kinds = tuple([kind_of(tensor) for tensor in tensors])
        return tensors, Shape(kinds, constants, spec, "" if None not in kinds else UNUSUAL)

    def batch(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        if self.spec is None:
            return tensors
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant[1] for constant in self.constants]  # type: ignore[index]
        batch: Sequence[Any] = pytree.tree_unflatten(leaves, self.spec)
        return batch


UNUSUAL = "the batch holds a tensor that requires a gradient, or is sparse, nested, conjugated or of a class of its own"


def kind_of(tensor: Tensor) -> tuple[object, ...] | None:
    """What a graph is made for; None for tensors that are not plain data."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return None
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


class Layout(NamedTuple):
    """The tensors that an optimizer keeps: in the state of which parameter, under which names; and its counters."""

    state: list[tuple[int, tuple[str, ...]]]
    counters: list[str]


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


class Trained(Protocol):
    """What :func:`hesscale.compile_step` needs to know of what it trains."""

    def circumstances(self) -> tuple[object, ...]: ...
    def obstacle(self) -> str: ...
    def step(self, batch: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]: ...
    def note_step(self, etas: Sequence[Tensor]) -> None: ...
    def layout(self) -> Layout: ...
    def settle(self) -> bool: ...
    def glance(self) -> list[int]: ...
    def own_tensors(self, layout: Layout) -> list[Tensor]: ...
    def number_tensors(self) -> list[Tensor]: ...
    def trace(self, layout: Layout, shape: Shape, tensors: Sequence[Tensor]) -> GraphModule: ...


class Subject:
    """A model, its loss and its optimizer."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: torch.optim.Optimizer, options: dict[str, Any]
    ) -> None:
        if unknown := options.keys() - {"head", "fallback"}:
            raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be one of torch's or of hesscale.optim, not {type(optimizer).__name__}")
        self.model = getattr(model, "_orig_mod", model)  # what torch.compile hides
        self.loss_fn, self.optimizer, self.options = loss_fn, optimizer, options
        self.numbers = Numbers(optimizer)
        if isinstance(optimizer, CurvatureOptimizer):
            optimizer.unpack()
        self.looks = 0
        self.look()

    def look(self) -> None:
        """See what the model consists of."""
        self.looks += 1
        self.modules = list(self.model.modules())
        self.branches = [module._modules for module in self.modules if module._modules]
        self.tree = [module for branch in self.branches for module in branch.values()]
        self.hooks = [hooks for module in self.modules for hooks in hooks_of(module)]
        self.attributes = [(module.__dict__, attribute_getter(module)) for module in self.modules]
        self.parameter_places, self.buffer_places = places_of(self.modules)
        self.parameter_entries = [place.entries[0] for place in self.parameter_places]
        self.replaced: set[int] = set()  # the buffers that the model replaces by others instead of changing them
        self.taken: dict[int, Tensor] = {}  # what is in their place, if it is the step's own
        known = {id(p) for p in self.parameters()}
        if strangers := [p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in known]:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise ValueError(f"{len(strangers)} parameters of the optimizer are not in the model, such as of shape {shapes}")

    def parameters(self) -> list[Tensor]:
        return [holder[name] for holder, name in self.parameter_entries]

    def circumstances(self) -> tuple[object, ...]:
        """What is no tensor, and decides what a step does."""
        if [module for branch in self.branches for module in branch.values()] != self.tree:
            self.look()
        optimizer, parameters = self.optimizer, self.parameters()
        return (
            self.looks,
            self.numbers.constants(),
            tuple([getter(attributes) for attributes, getter in self.attributes]),
            tuple([p.requires_grad for p in parameters]),
            self.is_hooked(parameters),
            bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks),
            not isinstance(optimizer, CurvatureOptimizer) or optimizer.is_curvature_due,
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
        )

    def is_hooked(self, parameters: list[Tensor]) -> bool:
        return any(self.hooks) or bool([p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks])

    def obstacle(self) -> str:
        """Why a step cannot be traced, as far as is known beforehand."""
        optimizer, parameters = self.optimizer, self.parameters()
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return "the optimizer has step hooks, which no graph would call"
        if self.is_hooked(parameters):
            return "the model or a parameter has hooks, which no graph would call"
        if getattr(optimizer, "generator", None) is not None:
            return "the optimizer draws from a generator of its own, which no graph can hold"
        if parallel := [type(module).__name__ for module in self.modules if is_parallel(module)]:
            return f"{parallel[0]} moves data between devices, which no graph would do"
        if strange := [type(p).__name__ for p in parameters if type(p) not in (Tensor, nn.Parameter)]:
            return f"a parameter is a {strange[0]}"
        return ""

    def step(self, batch: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, after one step of the optimizer on it, and the η of that step."""
        with torch.enable_grad(), without_compiled_parts():
            loss = self.loss_fn(self.model, *batch)
        check_loss(loss)
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        others = [(p, p.grad) for p in self.parameters() if id(p) not in own and p.requires_grad]
        self.optimizer.zero_grad()
        try:
            for p, _ in others:  # of another optimizer, to which this step is none of its business
                p.grad = None
            if isinstance(self.optimizer, CurvatureOptimizer):
                self.optimizer.backward(loss, **self.options)
            else:
                loss.backward()
            self.optimizer.step()
        finally:
            for p, gradient in others:
                p.grad = gradient
            self.optimizer.zero_grad()
        return loss.detach(), getattr(self.optimizer, "eta", [])

    def note_step(self, etas: Sequence[Tensor]) -> None:
        """Take note of a step that a graph has made."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers ask
        if isinstance(self.optimizer, CurvatureOptimizer):
            self.optimizer.note_step(etas)

    def layout(self) -> Layout:
        state = self.optimizer.state
        held = [(i, state[p]) for i, p in enumerate(self.parameters()) if p in state]
        names = [(i, tuple([name for name, value in entries.items() if isinstance(value, Tensor)])) for i, entries in held]
        return Layout([found for found in names if found[1]], list(counters_of(self.optimizer)))

    def settle(self) -> bool:
        """Make tensors the step's own, and bring them where it can change them in place; whether any had to be moved."""
        moved = False
        if isinstance(self.optimizer, CurvatureOptimizer) and self.optimizer._packs is not None:
            self.optimizer.unpack()
            moved = True
        for i in self.replaced:  # the model may have put a tensor there that others use
            place = self.buffer_places[i]
            if place.get() is not self.taken.get(i):
                self.taken[i] = place.get().detach().clone()
                place.put(self.taken[i])
                moved = True
        for p in self.parameters():
            if p.is_cuda and p in self.optimizer.state:  # torch's optimizers count steps on the host
                entries = self.optimizer.state[p]
                on_host = [name for name, value in entries.items() if isinstance(value, Tensor) and not value.is_cuda]
                entries.update({name: entries[name].to(p.device) for name in on_host})
                moved = moved or bool(on_host)
        return moved

    def glance(self) -> list[int]:
        """What changes if a tensor is another one, or elsewhere in memory, as long as all that were there are kept."""
        parameters = self.parameters()
        kept = [entries.values() for entries in self.optimizer.state.values()]
        buffers = [place.get() for place in self.buffer_places]
        others = chain(parameters, buffers, *kept, counters_of(self.optimizer).values())
        return [*[p.data_ptr() for p in parameters], *map(id, others)]

    def number_tensors(self) -> list[Tensor]:
        """The optimizer's numbers that are arguments of a step."""
        return self.numbers.tensors(self.parameters()[0])

    def own_tensors(self, layout: Layout) -> list[Tensor]:
        """All that a step changes: parameters, buffers, the optimizer's state and its counters; KeyError if some are missing."""
        own, state, counters = self.parameters(), self.optimizer.state, counters_of(self.optimizer)
        kept = [map(state[own[i]].__getitem__, names) for i, names in layout.state]
        own += [place.get() for place in self.buffer_places]
        own.extend(chain.from_iterable(kept))
        own += [counters[name] for name in layout.counters]
        return own

    def adopt(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        """Put other tensors in the places of :meth:`own_tensors`; parameters stay the same objects."""
        given = iter(tensors)
        parameters, state, counters = self.parameters(), self.optimizer.state, counters_of(self.optimizer)
        for p in parameters:
            p.data = next(given)
        for i, place in enumerate(self.buffer_places):
            self.taken[i] = next(given)
            place.put(self.taken[i])
        for i, names in layout.state:
            state[parameters[i]].update({name: next(given) for name in names})
        for name in layout.counters:
            counters[name] = next(given)

    def trace(self, layout: Layout, shape: Shape, tensors: Sequence[Tensor]) -> GraphModule:
        """The step as a graph over own tensors, numbers and those of a batch, which returns the loss and η."""
        return trace(lambda *given: self.step_on(layout, shape, given), tensors)

    def step_on(self, layout: Layout, shape: Shape, given: Sequence[Tensor]) -> list[Tensor]:
        """One step on stand-ins for the tensors of the subject, and for a batch."""
        remaining = iter(given)
        parameters = [next(remaining).detach().requires_grad_(p.requires_grad) for p in self.parameters()]
        buffers = [next(remaining) for _ in self.buffer_places]
        state = {i: {name: next(remaining) for name in names} for i, names in layout.state}
        counters = {name: next(remaining) for name in layout.counters}
        numbers = [next(remaining) for _ in self.numbers.changing]
        with self.optimizer_holds(parameters, state, counters, numbers), self.model_holds(parameters, buffers):
            loss, etas = self.step(shape.batch(list(remaining)))
            return [loss, *[eta for eta in etas if eta is not None]]

    @contextlib.contextmanager
    def model_holds(self, parameters: list[Tensor], buffers: list[Tensor]) -> Iterator[None]:
        """Stand-ins in the place of parameters and buffers; what is in the place of a buffer in the end is its new value."""
        containers = [box for module in self.modules for box in containers_of(module)]
        before = [(box, box.copy()) for box in containers]
        places = (*self.parameter_places, *self.buffer_places)
        real = [place.get() for place in places]
        try:
            for place, tensor in zip(places, (*parameters, *buffers), strict=True):
                place.put(tensor)
            yield
            self.take_in_new_buffers(buffers)
            for place, tensor in zip(places, real, strict=True):
                place.put(tensor)
            if changed := {name for box, copy in before for name in changes(box, copy)} - OF_RECURRENT_LAYERS:
                raise CannotTrace(f"the model sets {', '.join(sorted(changed))} in its forward pass, which no graph would do")
        finally:
            for box, copy in before:
                restore(box, copy)

    def take_in_new_buffers(self, buffers: list[Tensor]) -> None:
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
        self.replaced.update(new)

    @contextlib.contextmanager
    def optimizer_holds(
        self,
        parameters: list[Tensor],
        state: dict[int, dict[str, Tensor]],
        counters: dict[str, Tensor],
        numbers: list[Tensor],
    ) -> Iterator[None]:
        optimizer, own_counters = self.optimizer, counters_of(self.optimizer)
        real = self.parameters()
        before, counters_before = dict(optimizer.__dict__), dict(own_counters)
        stand_in = dict(zip(real, parameters, strict=True))
        groups = [{**group, "params": [stand_in[p] for p in group["params"]]} for group in optimizer.param_groups]
        if not isinstance(optimizer, CurvatureOptimizer):  # the way in which torch's take numbers that are tensors
            groups = [{**group, **{name: IN_A_GRAPH[name] for name in IN_A_GRAPH.keys() & group.keys()}} for group in groups]
        self.numbers.put(numbers, groups)
        own_state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for i, p in enumerate(real):
            if p in optimizer.state:
                own_state[stand_in[p]] = {**optimizer.state[p], **state.get(i, {})}
        expected = [*[dict(entries) for entries in own_state.values()], counters]
        options = [dict(group) for group in groups]
        try:
            optimizer.param_groups, optimizer.state = groups, own_state
            own_counters.update(counters)
            yield
            check_kept([*own_state.values(), own_counters], expected)
            check_constant([*groups, optimizer.__dict__], [*options, before])
        finally:
            optimizer.__dict__.clear()
            optimizer.__dict__.update(before)
            own_counters.clear()
            own_counters.update(counters_before)


IN_A_GRAPH = {"capturable": True, "foreach": True, "fused": False}


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


def attribute_getter(module: nn.Module) -> Callable[[dict[str, Any]], object]:
    """What reads the numbers and names among a module's attributes, ``training`` among them: constants of a graph."""
    return itemgetter(*[name for name, value in module.__dict__.items() if isinstance(value, (bool, int, float, str))])


def is_parallel(module: nn.Module) -> bool:
    return isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel))


def containers_of(module: nn.Module) -> list[Any]:
    """The module's attributes, and those of them that are dicts, lists and deques."""
    return [module.__dict__, *[value for value in module.__dict__.values() if isinstance(value, (dict, list, deque))]]


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


def counters_of(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return getattr(optimizer, "counters", {})


def check_kept(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A step must have changed the tensors that it keeps in place, made no others, and counted in tensors alone."""
    if len(found) != len(expected):
        raise Unsettled("the optimizer has yet to make some of its state")
    for now, before in zip(found, expected, strict=True):
        for name in {**before, **now}:
            value = now.get(name)
            if name in before and not isinstance(before[name], Tensor) and not isinstance(value, Tensor):
                if value != before[name]:
                    raise CannotTrace(f"the optimizer keeps a changing {name} in its state that is no tensor")
            elif value is not before.get(name):
                raise Unsettled(f"the optimizer has yet to make its {name}, or makes it anew at every step")


def check_constant(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A step must not have changed the optimizer's numbers."""
    for now, before in zip(found, expected, strict=True):
        for name in now.keys() - NO_OPTIONS:
            if isinstance(now[name], (int, float)) and not isinstance(now[name], bool) and now[name] != before.get(name):
                raise CannotTrace(f"the optimizer changes its {name} at every step")
