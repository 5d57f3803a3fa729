"""Small parameters on a CPU, with their averages in one tensor each: there, calling an operator costs more than what it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flat

from .update import Batch

MOST_NUMBERS = 2**16  # above, copying gradients costs more than it saves
AVERAGES = {"momenta": "exp_avg", "gradient_squares": "exp_avg_sq", "curvature_squares": "exp_hess_sq"}
COUNTERS = {"steps": "step", "curvature_steps": "curvature_step"}

State = Mapping[Tensor, dict[str, Any]]


def is_packable(batch: Batch) -> bool:
    """Whether one tensor of each kind would be faster, and one number serves as the counter of all."""
    if not is_small(batch.params):
        return False
    counts = [[float(step) for step in steps] for steps in (batch.steps, batch.curvature_steps) if steps]
    return all(is_constant(count) for count in counts)


def is_small(params: Sequence[Tensor]) -> bool:
    is_eager_cpu = params[0].device.type == "cpu" and not torch.compiler.is_compiling()
    return is_eager_cpu and len(params) > 1 and sum([p.numel() for p in params]) <= MOST_NUMBERS


class Pack:
    """All parameters of a group, whose averages and counters are views of one tensor for each kind."""

    def __init__(self, batch: Batch, state: State) -> None:
        self.params = batch.params
        self.states = [state[p] for p in batch.params]
        self.batch = Batch(params=batch.params, pack=self)
        self.entries: list[tuple[dict[str, Any], str, Tensor, int]] = []
        for field, name in {**AVERAGES, **COUNTERS}.items():
            if tensors := getattr(batch, field):
                whole = flat(tensors)
                setattr(self.batch, field, [whole])
                for own, view in zip(self.states, self.split(whole) if field in AVERAGES else whole.unbind(), strict=True):
                    own[name] = view
                    self.entries.append((own, name, view, view.data_ptr()))
        self.moves = torch.empty_like(self.batch.momenta[0])
        self.moves_of = self.split(self.moves)

    def split(self, whole: Tensor) -> list[Tensor]:
        """A tensor for all parameters as one for each."""
        parts = whole.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def holds(self, params: list[Tensor], state: State) -> bool:
        """Whether these are still the parameters, their state is that of this pack, and none of them lags behind."""
        return (
            len(params) == len(self.params)
            and all(p is own for p, own in zip(params, self.params, strict=True))
            and all(state.get(p) is own for p, own in zip(params, self.states, strict=True))
            and all(own.get(name) is view and view.data_ptr() == address for own, name, view, address in self.entries)
            and all(is_constant(counts.tolist()) for counts in (*self.batch.steps, *self.batch.curvature_steps))
        )

    def filled(self, gradients: list[Tensor], curvatures: list[Tensor]) -> Batch:
        self.batch.gradients = [flat(gradients)]
        self.batch.curvatures = [flat(curvatures)] if curvatures else []
        return self.batch


def is_constant(values: list[float]) -> bool:
    return values.count(values[0]) == len(values)
