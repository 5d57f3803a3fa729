"""What is trained, as a list of tensors: a step on a model, its loss and its optimizer reads them and changes them in place."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import optimizer as every_optimizer

from ..engine.arguments import check_loss
from ..optim import CurvatureOptimizer
from .holdings import (
    OF_EVERY_MODULE,
    OF_RECURRENT_LAYERS,
    changes,
    check_apart,
    check_constant,
    check_kept,
    containers_of,
    counters_of,
    getter_of,
    hooks_of,
    is_box_of_constants,
    is_constant,
    is_like,
    is_parallel,
    known_as,
    places_of,
    pointers,
    restore,
    watched_attributes,
    watched_options,
    without_compiled_parts,
)
from .hyperparameters import Numbers
from .make_fx import CannotTrace, trace
from .nearby import Near, Same
from .signature import Shape


class Layout(NamedTuple):
    """The tensors that an optimizer keeps: in the state of which parameter, under which names; and its counters."""

    state: list[tuple[int, tuple[str, ...]]]
    counters: list[str]


Run = Callable[..., Sequence[Tensor]]  # a step as code


class Trained(Protocol):
    """What :func:`hesscale.compile_step` needs to know of what it trains."""

    def circumstances(self) -> tuple[object, ...]: ...
    def obstacle(self) -> str: ...
    def is_steady(self) -> bool: ...
    def step(self, batch: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]: ...
    def note_step(self, etas: Sequence[Tensor]) -> None: ...
    def layout(self) -> Layout: ...
    def settle(self) -> bool: ...
    def glance(self) -> list[object]: ...
    def own_tensors(self, layout: Layout) -> list[Tensor]: ...
    def number_tensors(self) -> list[Tensor]: ...
    def trace(self, layout: Layout, shape: Shape, tensors: Sequence[Tensor]) -> GraphModule: ...
    def example(self, layout: Layout, tensors: Sequence[Tensor]) -> Sequence[Tensor]: ...
    def arranged(self, run: Run) -> Run: ...


MOST_LOOKS = 4  # whose objects live on
CIRCUMSTANCES = (
    "",
    "options",
    "attributes",
    "requires_grad of its parameters",
    "hooks of the model",
    "hooks of the optimizer",
    "whether it uses curvature",
)


class Subject:
    """A model, its loss and its optimizer."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: torch.optim.Optimizer, options: dict[str, Any]
    ) -> None:
        if unknown := options.keys() - {"head", "fallback"}:
            raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be one of torch's or of hesscale.optim, not {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the loss many times in a step, by a closure; train with it in a loop of your own")
        self.model = getattr(model, "_orig_mod", model)  # what torch.compile hides
        self.loss_fn, self.optimizer, self.options = loss_fn, optimizer, options
        self.look_near()
        self.numbers = Numbers(optimizer)
        if isinstance(optimizer, CurvatureOptimizer):
            optimizer.unpack()
        self.known_looks: dict[object, tuple[int, set[int]]] = {}  # the number of each, and its replaced buffers
        self.count = 0
        self.look()

    def look_near(self) -> None:
        """See which plain values the loss refers to, and what they are."""
        self.near = Near()
        self.near.met.update(map(id, self.model.modules()))  # which are looked at anyway
        self.near.look_at(self.loss_fn)
        self.near.keep_named(self.loss_fn)
        self.near_now = self.near.values()

    def look(self) -> None:
        """See what the model and the optimizer consist of."""
        named = list(self.model.named_modules())
        self.modules = [module for _, module in named]
        self.parts = [part.values() for module in self.modules for part in (module._modules, module._parameters)]
        self.hooks = [*OF_EVERY_MODULE, *[hooks for module in self.modules for hooks in hooks_of(module)]]
        self.dicts = [module.__dict__ for module in self.modules]
        self.sizes = [len(attributes) for attributes in self.dicts]
        self.buffers = [module._buffers.values() for module in self.modules]
        watched = [(module.__dict__, watched_attributes(module)) for module in self.modules]
        watched.append((self.optimizer.__dict__, watched_options(self.optimizer)))
        self.getters = [(holder, getter_of(names)) for holder, names in watched]
        paths = [f"{path}." if path else "" for path, _ in named]
        self.names = [f"{path}{name}" for path, module in zip(paths, self.modules, strict=True) for name in module._buffers]
        pairs = list(zip([*paths, "the optimizer's "], watched, strict=True))
        self.names += [f"{path}{name}" for path, (_, names) in pairs for name in names]
        values = [(f"{path}{name}", holder[name]) for path, (holder, names) in pairs for name in names]
        boxes = [(name, box) for name, box in values if is_box_of_constants(box)]
        self.names += [f"{name}[{key!r}]" for name, box in boxes for key in (box if isinstance(box, dict) else range(len(box)))]
        self.boxes = [box.values() if isinstance(box, dict) else box for _, box in boxes]
        self.parameter_places, self.buffer_places = places_of(self.modules)
        self.parameter_entries = [place.entries[0] for place in self.parameter_places]
        self.taken: dict[int, Tensor] = {}  # what is in their place, if it is the step's own
        self.trained = self.parameters()
        self.ids: list[int] = []  # of all that is held
        self.pattern: list[object] = []
        self.optimized = [p for group in self.optimizer.param_groups for p in group["params"]]
        known = {id(p) for p in self.trained}
        if strangers := [p for p in self.optimized if id(p) not in known]:
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
            raise ValueError(f"{len(strangers)} parameters of the optimizer are not in the model, such as of shape {shapes}")
        self.note(list(self.held()))
        signature = self.signature()
        if signature not in self.known_looks:
            self.count += 1
            if len(self.known_looks) >= MOST_LOOKS:
                self.known_looks.pop(next(iter(self.known_looks)))
            self.known_looks[signature] = self.count, set()
        # the same again has the same graphs; replaced are the buffers that the model replaces by others instead of changing them
        self.looks, self.replaced = self.known_looks[signature]

    def signature(self) -> object:
        """What it all consists of, but for constants: lists and dicts of these may be other objects."""
        count = len(self.kept) - len(self.names)
        values = zip(self.kept[count:], self.pattern[count:], strict=True)
        kinds = [type(value) if is_box_of_constants(value) else kind for value, kind in values]
        return tuple(self.pattern[:count]), tuple(kinds), tuple(self.names)

    def held(self) -> Iterable[Any]:
        """Modules and parameters by place, parameters by group; then buffers, attributes of modules, options of the optimizer."""
        kinds = [(type(module), getattr(type(module), "forward", None)) for module in self.modules]
        grouped = [group["params"] for group in self.optimizer.param_groups]
        attributes = [getter(holder) for holder, getter in self.getters]
        return chain.from_iterable([*kinds, *self.parts, *grouped, *self.buffers, *attributes, *self.boxes])

    def note(self, held: list[Any]) -> None:
        values = held[-len(self.names) :]
        self.kept, self.ids = held, [id(thing) for thing in held]  # kept, so that no other takes its address
        self.pattern, self.constants = self.pattern_of(held), tuple([known_as(value) for value in values])

    def pattern_of(self, held: list[Any]) -> list[object]:
        """Which values are the same tensor, and which object the others are that are no constants; parts as they are."""
        count = len(held) - len(self.names)
        number = {id(p): i for i, p in enumerate(self.parameters())}

        def kind(value: Any) -> object:
            if isinstance(value, Tensor):
                return number.setdefault(id(value), len(number))
            return None if is_constant(value) else Same(value)

        return [*map(Same, held[:count]), *map(kind, held[count:])]

    def parameters(self) -> list[Tensor]:
        return [holder[name] for holder, name in self.parameter_entries]

    def circumstances(self) -> tuple[object, ...]:
        """What is no tensor, and decides what a step does."""
        if self.near.values() != self.near_now:
            self.look_near()  # there may be other objects to look at
        return (
            *self.own_circumstances(),
            self.near_now,
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            torch.get_default_dtype(),
        )

    def own_circumstances(self) -> tuple[object, ...]:
        """Those of the model and the optimizer; :data:`CIRCUMSTANCES` says what is what."""
        try:
            has_changed = [*map(id, self.held())] != self.ids or [*map(len, self.dicts)] != self.sizes
        except KeyError:  # an attribute has gone
            has_changed = True
        if has_changed:
            self.look_again()
        optimizer, parameters = self.optimizer, self.trained
        return (
            self.looks,
            self.numbers.constants(),
            self.constants,
            tuple([p.requires_grad for p in parameters]),
            self.is_hooked(parameters),
            self.has_step_hooks(),
            not isinstance(optimizer, CurvatureOptimizer) or optimizer.is_curvature_due,
        )

    def look_again(self) -> None:
        """Take note of other constants, and look anew at whatever else is not as it was."""
        if [*map(len, self.dicts)] == self.sizes:
            with contextlib.suppress(KeyError):
                held = list(self.held())
                if self.pattern_of(held) == self.pattern:
                    self.note(held)
                    return
        self.look()

    def has_step_hooks(self) -> bool:
        optimizer = self.optimizer
        own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return bool(own or every_optimizer._global_optimizer_pre_hooks or every_optimizer._global_optimizer_post_hooks)

    def is_hooked(self, parameters: list[Tensor]) -> bool:
        return any(self.hooks) or bool([p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks])

    def obstacle(self) -> str:
        """Why a step cannot be traced, as far as is known beforehand."""
        optimizer, parameters = self.optimizer, self.parameters()
        if self.has_step_hooks():
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
        result = self.take_step(batch)
        with contextlib.suppress(KeyError):
            held = list(self.held())
            if [id(thing) for thing in held] != self.ids:
                self.pardon(held)
        return result

    def pardon(self, held: list[Any]) -> None:
        """Objects that the model itself makes anew at every step are no reason to look again."""
        count, pattern = len(held) - len(self.names), self.pattern_of(held)
        pairs = list(zip(pattern, self.pattern, strict=False))
        others = [new == old or (type(new), type(old)) == (Same, Same) for new, old in pairs[count:]]
        if len(pattern) == len(self.pattern) and pattern[:count] == self.pattern[:count] and all(others):
            self.kept, self.pattern = held, pattern

    def take_step(self, batch: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]:
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

    def is_steady(self) -> bool:
        """Whether all steps do the same, also where curvature is concerned."""
        return getattr(self.optimizer, "curvature_every", 1) == 1

    def note_step(self, etas: Sequence[Tensor], *, report: bool = True) -> None:
        """Take note of a step that a graph has made."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers ask
        if [p for p in self.optimized if p.grad is not None]:
            self.optimizer.zero_grad()
        if isinstance(self.optimizer, CurvatureOptimizer):
            self.optimizer.record_compiled_step(etas, report=report)

    def layout(self) -> Layout:
        state = self.optimizer.state
        held = [(i, state[p]) for i, p in enumerate(self.parameters()) if p in state]
        names = [(i, tuple([name for name, value in entries.items() if isinstance(value, Tensor)])) for i, entries in held]
        return Layout([found for found in names if found[1]], list(counters_of(self.optimizer)))

    def settle(self) -> bool:
        """Make tensors the step's own, and bring them where it can change them in place; whether any had to be moved."""
        moved = False
        if isinstance(self.optimizer, CurvatureOptimizer):
            moved = self.optimizer.is_packed
            self.optimizer.unpack()
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

    def glance(self) -> list[object]:
        """What changes if a tensor is another one, or elsewhere in memory, as long as all that were there are kept."""
        others = self.others()
        return [*self.outlines(), *map(id, others), *pointers((*self.trained, *others))]

    def outlines(self) -> list[object]:
        """What parameters and buffers are that change in place."""
        return [(tensor.shape, tensor.stride()) for tensor in (*self.trained, *[place.get() for place in self.buffer_places])]

    def others(self) -> list[Any]:
        """Buffers, the optimizer's state and its counters."""
        kept = [entries.values() for entries in self.optimizer.state.values()]
        buffers = [place.get() for place in self.buffer_places]
        return [*buffers, *chain.from_iterable(kept), *counters_of(self.optimizer).values()]

    def number_tensors(self) -> list[Tensor]:
        """The optimizer's numbers that are arguments of a step."""
        return self.numbers.tensors(self.parameters()[0])

    def own_tensors(self, layout: Layout) -> list[Tensor]:
        """All that a step changes: parameters, buffers, the optimizer's state and its counters; KeyError if some are missing."""
        own, state, counters = self.parameters(), self.optimizer.state, counters_of(self.optimizer)
        kept = [map(state[own[i]].__getitem__, names) for i, names in layout.state]
        buffers = [place.get() for place in self.buffer_places]
        check_apart(own, buffers)
        own += buffers
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
        try:
            return trace(lambda *given: self.step_on(layout, shape, given), tensors)
        except CannotTrace as error:
            changed = sorted({name for _, name, _ in self.numbers.changing} - {"lr"})
            if not changed or isinstance(self.optimizer, CurvatureOptimizer):
                raise
            raise CannotTrace(f"{error} (perhaps the optimizer does so with {', '.join(changed)}, since that changed)") from None

    def example(self, layout: Layout, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of the tensors that a step is given, those that its graph takes; with enough curvature seen for weights to move."""
        return self.warmed_up(layout, tensors, [self.optimizer])

    def warmed_up(
        self, layout: Layout, tensors: Sequence[Tensor], optimizers: Iterable[torch.optim.Optimizer]
    ) -> Sequence[Tensor]:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        warmup = max([float(group.get("curvature_warmup", 0)) for group in groups])
        begin = len(self.parameters()) + len(self.buffer_places)
        names = dict(enumerate([name for _, names in layout.state for name in names], begin))
        return [t + warmup if names.get(i) == "curvature_step" else t for i, t in enumerate(tensors)] if warmup else tensors

    def arranged(self, run: Run) -> Run:
        """The step, of code for its graph."""
        return run

    def step_on(self, layout: Layout, shape: Shape, given: Sequence[Tensor]) -> list[Tensor]:
        """One step on stand-ins for the tensors of the subject, and for a batch."""
        remaining = iter(given)
        parameters = [next(remaining).detach().requires_grad_(p.requires_grad) for p in self.parameters()]
        buffers = [next(remaining) for _ in self.buffer_places]
        state = {i: {name: next(remaining) for name in names} for i, names in layout.state}
        counters = {name: next(remaining) for name in layout.counters}
        numbers = [next(remaining) for _ in self.numbers.changing]
        with self.optimizer_holds(parameters, state, counters, numbers), self.model_holds(parameters, buffers):
            loss, etas = self.take_step(shape.batch(list(remaining)))
            return [loss, *[loss.new_ones(()) if eta is None else eta for eta in etas]]

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
