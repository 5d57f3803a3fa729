"""An optimizer's options in a graph. A number is a constant of the graph until it first changes. Then it becomes an argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..optim import CurvatureOptimizer

Option = tuple[int, str, int | None]  # the index of the parameter group, the option's name, and the index in a tuple

# entries of a group that are not options: its parameters, a counter, and what schedulers store there
SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
NO_OPTIONS = frozenset(("params", "param_names", "step_count", *SCHEDULER_KEYS))


class Hyperparameters:
    """The options of an optimizer's groups, divided into constants and arguments of a graph."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.values: dict[Option, Any] = {}
        self.arguments: list[Option] = []  # a new list whenever an option may have changed
        self.has_tensors = False  # a tensor may change in place, so it has to be copied every time
        self.constants: tuple[object, ...] = ()
        self.getters: list[Callable[[dict[str, Any]], Any]] = []
        self.has_lists = False  # a list may change in place, so its entries have to be read at every step
        self.last: list[Any] = []
        self.tensors: dict[Option, tuple[Any, Tensor]] = {}  # the value that each argument was last set to, and its tensor

    def read(self) -> tuple[object, ...]:
        """The optimizer's options as a key for the graph: the values of constants, and which options are arguments."""
        groups = self.optimizer.param_groups
        if self.has_lists or len(groups) != len(self.getters) or self.snapshot() != self.last:
            options = [[name for name in group if name not in NO_OPTIONS] for group in groups]
            self.getters = [itemgetter(*names) for names in options]
            named = zip(groups, options, strict=True)
            self.has_lists = any(isinstance(group[name], list) for group, names in named for name in names)
            if isinstance(self.optimizer, CurvatureOptimizer):
                self.optimizer.check_radii()
            self.divide(dict(read_options(groups)))
            self.last = self.snapshot()
        return self.constants

    def snapshot(self) -> list[Any]:
        pairs = zip(self.getters, self.optimizer.param_groups, strict=True)
        return [(len(group["params"]), len(group), getter(group)) for getter, group in pairs]

    def divide(self, values: dict[Option, Any], more_arguments: Collection[Option] = ()) -> None:
        """Turn step sizes, tensors, and every number that has ever changed into arguments; the other options stay constants."""
        changed = {*self.arguments, *more_arguments}
        changed.update(option for option, value in values.items() if has_changed(self.values.get(option), value))
        whole = {option[:2] for option in changed}  # torch's Adam takes tensors for all entries of a tuple or for none
        self.values = values
        self.arguments = [o for o, value in values.items() if is_number(value) and (o[1] == "lr" or o[:2] in whole)]
        self.has_tensors = any(isinstance(values[option], Tensor) for option in self.arguments)
        groups = self.optimizer.param_groups
        self.constants = (
            tuple(self.arguments),
            tuple([item for item in values.items() if item[0] not in self.arguments]),
            tuple([len(group["params"]) for group in groups]),
        )

    def argument_tensors(self, like: Tensor) -> list[Tensor]:
        """The arguments as 0-d tensors, which stay at the same address."""
        return [self.argument_tensor(option, like) for option in self.arguments]

    def argument_tensor(self, option: Option, like: Tensor) -> Tensor:
        value = self.values[option]
        known, tensor = self.tensors.get(option, (None, None))
        if tensor is None or tensor.device != like.device or tensor.dtype != number_dtype(like):
            tensor = torch.full((), float(value), dtype=number_dtype(like), device=like.device)
        elif isinstance(value, Tensor):
            tensor.copy_(value, non_blocking=True)
        elif known != value:
            tensor.fill_(float(value))
        self.tensors[option] = value, tensor
        return tensor

    def substitute(self, tensors: Sequence[Tensor], groups: list[dict[str, Any]]) -> None:
        """Replace the numbers that are arguments by these tensors."""
        for (i, name, k), tensor in zip(self.arguments, tensors, strict=True):
            value = groups[i][name]
            groups[i][name] = tensor if k is None else tuple([tensor if j == k else v for j, v in enumerate(value)])


def read_options(groups: list[dict[str, Any]]) -> Iterator[tuple[Option, Any]]:
    for i, group in enumerate(groups):
        for name, value in group.items():
            if name in NO_OPTIONS:
                continue
            if isinstance(value, (tuple, list)):
                yield from (((i, name, k), part) for k, part in enumerate(value))
            else:
                yield (i, name, None), value


def has_changed(previous: Any, value: Any) -> bool:
    return isinstance(value, Tensor) or (is_number(previous) and bool(value != previous))


def is_number(value: Any) -> bool:
    return isinstance(value, (Real, Tensor)) and not isinstance(value, bool)  # numpy's numbers too


def number_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32
