"""The numbers among an optimizer's options: constants of a graph until they change, and arguments of it from then on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from numbers import Real
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..optim import CurvatureOptimizer

Option = tuple[int, str, int | None]  # of an optimizer: the number of its group, its name, and its place in a tuple

# what groups hold beside options: their parameters, counters, and what schedulers note there
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
NO_OPTIONS = frozenset(("params", "param_names", "step_count", *OF_SCHEDULERS))


class Numbers:
    """An optimizer's options, as constants and arguments of a graph."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.getters: list[Callable[[dict[str, Any]], Any]] = []
        self.mutable = False  # some options are lists, whose entries may change unseen
        self.last: list[Any] = []
        self.options: dict[Option, Any] = {}
        self.changing: list[Option] = []
        self.key: tuple[object, ...] = ()
        self.held: dict[Option, tuple[Any, Tensor]] = {}  # what each argument was last set to, and its tensor

    def constants(self) -> tuple[object, ...]:
        """The options that are no arguments, and which are."""
        groups = self.optimizer.param_groups
        if self.mutable or len(groups) != len(self.getters) or self.now() != self.last:
            self.getters = [itemgetter(*[name for name in group if name not in NO_OPTIONS]) for group in groups]
            self.mutable = any(
                isinstance(value, list) for group in groups for name, value in group.items() if name not in NO_OPTIONS
            )
            if isinstance(self.optimizer, CurvatureOptimizer):
                self.optimizer.check_radii()
            self.take(dict(read_options(groups)))
            self.last = self.now()
        return self.key

    def now(self) -> list[Any]:
        pairs = zip(self.getters, self.optimizer.param_groups, strict=True)
        return [(len(group["params"]), len(group), getter(group)) for getter, group in pairs]

    def take(self, options: dict[Option, Any], also_changing: Collection[Option] = ()) -> None:
        """See which options are arguments: step sizes, tensors, and what has changed before or now."""
        sticky = {*self.changing, *also_changing}
        sticky.update(option for option, value in options.items() if has_changed(self.options.get(option), value))
        whole = {option[:2] for option in sticky}  # torch's Adam wants all or none of a tuple as tensors
        self.options = options
        self.changing = [o for o, value in options.items() if is_number(value) and (o[1] == "lr" or o[:2] in whole)]
        groups = self.optimizer.param_groups
        self.key = (
            tuple(self.changing),
            tuple([item for item in options.items() if item[0] not in self.changing]),
            tuple([len(group["params"]) for group in groups]),
        )

    def tensors(self, like: Tensor) -> list[Tensor]:
        """The numbers that are arguments, as 0-d tensors that stay where they are."""
        return [self.tensor(option, like) for option in self.changing]

    def tensor(self, option: Option, like: Tensor) -> Tensor:
        value = self.options[option]
        known, tensor = self.held.get(option, (None, None))
        if tensor is None or tensor.device != like.device or tensor.dtype != number_dtype(like):
            tensor = torch.full((), float(value), dtype=number_dtype(like), device=like.device)
        elif isinstance(value, Tensor):
            tensor.copy_(value, non_blocking=True)
        elif known != value:
            tensor.fill_(float(value))
        self.held[option] = value, tensor
        return tensor

    def put(self, tensors: Sequence[Tensor], groups: list[dict[str, Any]]) -> None:
        """Replace numbers in an optimizer's groups by tensors."""
        for (i, name, k), tensor in zip(self.changing, tensors, strict=True):
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
    return isinstance(value, (Real, Tensor)) and not isinstance(value, bool)  # numpy's too


def number_dtype(like: Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32
