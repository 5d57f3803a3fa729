"""An optimizer as a function of tensors: a step takes parameters, state and hyperparameters, and changes them in place."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from ..engine.arguments import check_loss
from ..errors import NeedsEagerPass
from ..optim import CurvatureOptimizer
from .hyperparameters import NO_OPTIONS, Hyperparameters
from .make_fx import CannotTrace
from .signature import PLAIN


class Layout(NamedTuple):
    """The tensors that an optimizer keeps: the sorted names of each parameter's state, and those of its counters."""

    state: list[tuple[int, list[str]]]
    counters: list[str]


class FunctionalOptimizer:
    """An optimizer whose step can be traced.

    Args:
        optimizer: one of ours or of torch's.
        options: those of ``optimizer.backward``: ``head`` and ``fallback``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        if unknown := options.keys() - {"head", "fallback"}:
            raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"the optimizer must be one of torch's or of hesscale.optim, not {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TypeError("LBFGS evaluates the loss many times in a step, through a closure; use it in a loop of your own")
        self.optimizer, self.options = optimizer, options
        self.hyperparameters = Hyperparameters(optimizer)
        self.attribute_types: list[object] = []
        self.option_names: tuple[str, ...] = ()  # the attributes that are options
        self.has_curvature = isinstance(optimizer, CurvatureOptimizer)
        if isinstance(optimizer, CurvatureOptimizer):
            optimizer.unpack()

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def signature(self) -> tuple[object, ...]:
        """Everything except tensors that determines what a step does."""
        optimizer = self.optimizer
        held = vars(optimizer)
        types = [*held, *map(type, held.values())]
        if types != self.attribute_types:
            self.attribute_types = types
            self.option_names = tuple([name for name, value in held.items() if name[0] != "_" and isinstance(value, PLAIN)])
        return (
            self.hyperparameters.read(),
            optimizer.phase_at(optimizer.param_groups[0]["step_count"]) if self.has_curvature else (),  # type: ignore[attr-defined]
            self.has_step_hooks(),
            self.has_parameter_hooks(),
            getattr(optimizer, "generator", None) is not None,
            type(optimizer),
            type(optimizer).step,
            "step" in held and self.has_own_step(),
            self.option_names,
            *map(held.__getitem__, self.option_names),
        )

    def has_step_hooks(self) -> bool:
        optimizer = self.optimizer
        own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        return bool(own or torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks)

    def has_own_step(self) -> bool:
        """Whether its step is code that is neither torch's nor ours. A scheduler wraps the step, but that does not count."""
        step = vars(self.optimizer).get("step")
        is_known = type(self.optimizer).__module__.partition(".")[0] in ("torch", "hesscale")
        return not is_known or (step is not None and not getattr(step, "_wrapped_by_lr_sched", False))

    def has_parameter_hooks(self) -> bool:
        return bool([p for p in self.parameters() if p._backward_hooks or p._post_accumulate_grad_hooks])

    def obstacle(self) -> str:
        """Why a step cannot be traced, if that is known without trying; otherwise empty."""
        if self.has_step_hooks():
            return "the optimizer has step hooks, which a graph would not call"
        if self.has_own_step():
            return "the optimizer's step is your own code, and the values that it reads are not guarded"
        if self.has_parameter_hooks():
            return "a parameter has hooks, which a graph would not call"
        if getattr(self.optimizer, "generator", None) is not None:
            return "the optimizer draws from its own generator, which a graph cannot do"
        if other := [type(p).__name__ for p in self.parameters() if type(p) not in (Tensor, nn.Parameter)]:
            return f"a parameter is a {other[0]}"
        return ""

    @property
    def repeats_itself(self) -> bool:
        """Whether all steps do the same, without steps that skip curvature or calibration."""
        return getattr(self.optimizer, "period", 1) == 1

    def train(self, loss: Tensor, other_leaves: Iterable[Tensor] = ()) -> list[Tensor | None]:
        """Make one step with the gradients of a loss, and return its η.

        Gradients are removed from ``.grad`` afterwards. The ``.grad`` of ``other_leaves``, which another optimizer trains, is not
        changed.
        """
        check_loss(loss)
        others = [(leaf, leaf.grad) for leaf in other_leaves]
        self.optimizer.zero_grad()
        try:
            for leaf, _ in others:
                leaf.grad = None
            if isinstance(self.optimizer, CurvatureOptimizer):
                self.optimizer.backward(loss, **self.options)
            else:
                loss.backward()
            self.optimizer.step()
        finally:
            for leaf, gradient in others:
                leaf.grad = gradient
            self.optimizer.zero_grad()
        return getattr(self.optimizer, "eta", [])

    def train_model(self, model: nn.Module, loss_fn: Callable[..., Tensor], batch: Sequence[Any]) -> Tensor:
        """Make one step of a model in eager mode, with its own code, and return the loss."""
        with torch.enable_grad():
            loss = loss_fn(model, *batch)
        own = {id(p) for p in self.parameters()}
        self.train(loss, [p for p in model.parameters() if p.requires_grad and id(p) not in own])
        return loss.detach()

    def record_step(self, etas: Sequence[Tensor], report: bool = True) -> None:
        """Count a step that a graph has made. With ``report``, raise if it was skipped because of a non-finite number."""
        optimizer = self.optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            optimizer.zero_grad()
        if isinstance(optimizer, CurvatureOptimizer):
            optimizer.record_compiled_step(etas, report=report)

    def prepare(self) -> None:
        """Put the state where a graph can change it in place: in one tensor per parameter, on the parameter's device."""
        if isinstance(self.optimizer, CurvatureOptimizer):
            self.optimizer.unpack()
        for p, entries in self.optimizer.state.items():
            if p.is_cuda:  # torch's optimizers count their steps on the CPU
                on_cpu = [name for name, value in entries.items() if isinstance(value, Tensor) and not value.is_cuda]
                entries.update({name: entries[name].to(p.device) for name in on_cpu})

    def layout(self, parameters: Sequence[Tensor]) -> Layout:
        """The tensors that the optimizer keeps for these parameters."""
        state = self.optimizer.state
        held = [(i, state[p]) for i, p in enumerate(parameters) if p in state]
        names = [(i, sorted([name for name, value in entries.items() if isinstance(value, Tensor)])) for i, entries in held]
        return Layout([found for found in names if found[1]], sorted(self.counters))

    def tensors(self, layout: Layout, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a layout. Raises KeyError if the optimizer no longer has some of them."""
        state, counters = self.optimizer.state, self.counters
        kept = [map(state[parameters[i]].__getitem__, names) for i, names in layout.state]
        return [*chain.from_iterable(kept), *[counters[name] for name in layout.counters]]

    def held(self) -> list[object]:
        """The parameters and all objects in the state. It is faster than :meth:`tensors`, which looks up every parameter."""
        state = self.optimizer.state
        entries = chain.from_iterable(map(dict.values, state.values()))
        return [*self.parameters(), *state, *entries, *self.counters.values()]

    @property
    def counters(self) -> dict[str, Tensor]:
        return getattr(self.optimizer, "counters", {})

    @property
    def curvature_warmup(self) -> float:
        return max([float(group.get("curvature_warmup", 0)) for group in self.optimizer.param_groups])

    @contextlib.contextmanager
    def holding(
        self, stand_ins: Mapping[Tensor, Tensor], layout: Layout, tensors: Iterator[Tensor], numbers: Sequence[Tensor]
    ) -> Iterator[None]:
        """Replace the optimizer's parameters, state and numbers by other tensors inside the block; a step changes those in place.

        Parameters without a replacement are left out.

        Raises:
            NeedsEagerPass: if the optimizer creates state that was not there.
            CannotTrace: if it changes a number that is not a tensor.
        """
        optimizer, counters = self.optimizer, self.counters
        attributes, counters_before = dict(optimizer.__dict__), dict(counters)
        groups = [{**g, "params": [stand_ins[p] for p in g["params"] if p in stand_ins]} for g in optimizer.param_groups]
        if not isinstance(optimizer, CurvatureOptimizer):  # with these options, torch's optimizers accept tensors as numbers
            groups = [
                {**group, **{name: GRAPH_OPTIONS[name] for name in GRAPH_OPTIONS.keys() & group.keys()}} for group in groups
            ]
        self.hyperparameters.substitute(numbers, groups)
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        entries = {i: {name: next(tensors) for name in names} for i, names in layout.state}
        for i, (p, stand_in) in enumerate(stand_ins.items()):
            if p in optimizer.state:
                state[stand_in] = {**optimizer.state[p], **entries.get(i, {})}
        own_counters = {name: next(tensors) for name in layout.counters}
        expected = [*[dict(entries) for entries in state.values()], own_counters]
        options = [dict(group) for group in groups]
        try:
            optimizer.param_groups, optimizer.state = groups, state
            counters.update(own_counters)
            yield
            check_in_place([*state.values(), counters], expected)
            check_constant([*groups, optimizer.__dict__], [*options, attributes])
        finally:
            optimizer.__dict__.clear()
            optimizer.__dict__.update(attributes)
            counters.clear()
            counters.update(counters_before)


GRAPH_OPTIONS = {"capturable": True, "foreach": True, "fused": False}


def check_in_place(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that a step has changed its tensors in place, has created no others, and counts only in tensors."""
    if len(found) != len(expected):
        raise NeedsEagerPass("the optimizer has not created all of its state yet")
    for now, before in zip(found, expected, strict=True):
        for name in {**before, **now}:
            value = now.get(name)
            if name in before and not isinstance(before[name], Tensor) and not isinstance(value, Tensor):
                if value != before[name]:
                    raise CannotTrace(f"the optimizer's state has {name}, which changes but is not a tensor")
            elif value is not before.get(name):
                raise NeedsEagerPass(f"the optimizer has not created its {name} yet, or creates a new one at every step")


def check_constant(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Check that a step has changed none of the optimizer's numbers."""
    for now, before in zip(found, expected, strict=True):
        for name in now.keys() - NO_OPTIONS:
            if isinstance(now[name], (int, float)) and not isinstance(now[name], bool) and now[name] != before.get(name):
                raise CannotTrace(f"the optimizer changes its {name} at every step")
