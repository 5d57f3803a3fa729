"""Small parameters on a CPU share one flat tensor per average, since the overhead of a call costs more than its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as flatten

from .batches import Batch
from .bounds import needs_adam

if TYPE_CHECKING:
    from .base import CurvatureOptimizer

MAX_PACKED_ENTRIES = 2**16  # of a group; for more, copying the gradients costs more than packing saves
AVERAGES = {"momenta": "exp_avg", "gradient_squares": "exp_avg_sq", "curvature_squares": "exp_hess_sq"}
COUNTERS = {"steps": "step", "curvature_steps": "curvature_step"}

State = Mapping[Tensor, dict[str, Any]]


class Packing:
    """The packs of an optimizer, by the index of their parameter group."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self.packs: dict[int, Pack] = {}

    @property
    def is_packed(self) -> bool:
        """Whether the averages of any group are views of one tensor now."""
        return any(pack.is_in_use() for pack in self.packs.values())

    def packed_batch(self, optimizer: CurvatureOptimizer, index: int) -> Batch | None:
        """The whole group as one batch of flat tensors; None if it has no pack, or its pack does not fit this step."""
        pack = self.packs.get(index)
        group = optimizer.param_groups[index]
        if pack is None or not is_allowed(optimizer, group):
            return None
        uses_curvature = optimizer.uses_curvature
        averages_gradient_squares = optimizer.squares_gradient or needs_adam(group)
        kept = bool(pack.batch.curvature_squares), bool(pack.batch.gradient_squares)
        if kept != (uses_curvature, averages_gradient_squares):  # a trust region or a bound was added or removed
            return None
        gradients = [g for p in group["params"] if (g := p.grad) is not None and not g.is_sparse]
        diagonals = [getattr(p, "hess_diag", None) for p in group["params"]] if uses_curvature else []
        curvatures = [diagonal for diagonal in diagonals if diagonal is not None]
        count = len(pack.params)
        if len(gradients) < count or len(curvatures) not in (0, count) or not pack.fits(group["params"], optimizer.state):
            return None
        if curvatures and [curvature.shape for curvature in curvatures] != pack.shapes:
            return None
        if curvatures:
            curvatures = [optimizer.prepare(curvature, p) for curvature, p in zip(curvatures, pack.params, strict=True)]
        return pack.filled_batch(group, gradients, curvatures)

    def pack(self, optimizer: CurvatureOptimizer, batches: list[Batch]) -> None:
        """Store the averages of a batch in flat tensors, from the next step on, if it is a whole group of small parameters."""
        if not self.is_enabled:
            return
        for batch in batches:
            is_whole_group = batch.pack is None and len(batch.params) == len(batch.group["params"])
            if is_whole_group and is_allowed(optimizer, batch.group) and is_packable(batch):
                self.packs[batch.group_index] = Pack(batch, optimizer.state)

    def unpack(self) -> None:
        """Give every parameter's state its own memory again, and stop packing."""
        for pack in self.packs.values():
            for state in pack.states:
                state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
        self.is_enabled, self.packs = False, {}


def is_allowed(optimizer: CurvatureOptimizer, group: dict[str, Any]) -> bool:
    """Whether a group may be packed: not with ``foreach=False``, and not under a gradient scaler."""
    return group["foreach"] is not False and not hasattr(optimizer, "found_inf")


def is_packable(batch: Batch) -> bool:
    """Whether the parameters are small and have taken the same number of steps, so that one counter is enough for all."""
    if batch.mesh is not None or not is_small(batch.params):
        return False
    counts = [[float(step) for step in steps] for steps in (batch.steps, batch.curvature_steps) if steps]
    return all(is_constant(count) for count in counts)


def is_small(params: Sequence[Tensor]) -> bool:
    is_eager_cpu = params[0].device.type == "cpu" and not torch.compiler.is_compiling()
    return is_eager_cpu and len(params) > 1 and sum([p.numel() for p in params]) <= MAX_PACKED_ENTRIES


class Pack:
    """All parameters of a group. Each kind of average and counter is one flat tensor, and their states hold views of it."""

    def __init__(self, batch: Batch, state: State) -> None:
        self.params = batch.params
        self.shapes = [p.shape for p in batch.params]
        self.states = [state[p] for p in batch.params]
        self.batch = Batch(batch.group, batch.group_index, params=batch.params, squares_gradient=batch.squares_gradient)
        self.batch.pack, self.batch.numels = self, [p.numel() for p in batch.params]
        self.places: list[tuple[dict[str, Any], str]] = []  # the state dicts and keys whose values are views
        self.views: list[Tensor] = []
        for attribute, name in {**AVERAGES, **COUNTERS}.items():
            if tensors := getattr(batch, attribute):
                flat = flatten(tensors)
                setattr(self.batch, attribute, [flat])
                views = self.split(flat) if attribute in AVERAGES else flat.unbind()
                for own, view in zip(self.states, views, strict=True):
                    own[name] = view
                    self.places.append((own, name))
                    self.views.append(view)
        self.identity = self.identity_of(batch.params, state)
        self.offsets = torch.tensor([0, *self.batch.numels]).cumsum(0)
        self.update = torch.empty_like(self.batch.momenta[0])  # U of the step under way
        self.update_views = self.split(self.update)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat tensor, one for each parameter."""
        parts = flat.split(self.batch.numels)
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def sums(self, flat: Tensor) -> list[float]:
        """The sum of each parameter's part of a flat tensor, in that tensor's dtype."""
        found: list[float] = torch.segment_reduce(flat, "sum", offsets=self.offsets, unsafe=True).tolist()
        return found

    @cached_property
    def positions(self) -> Tensor:
        """The position of each entry's parameter. Without bounds on the update, nothing needs it."""
        return torch.arange(len(self.params)).repeat_interleave(self.offsets.diff())

    def for_entries(self, numbers: list[Any]) -> Tensor:
        """A flat tensor with each parameter's number at all of its entries."""
        return torch.tensor(numbers, dtype=self.update.dtype).index_select(0, self.positions)

    def identity_of(self, params: list[Tensor], state: State) -> tuple[list[int], ...]:
        """The ids of these parameters, of their states and of the states' entries, and the addresses of the pack's views."""
        entries = [own.get(name) for own, name in self.places]
        states = [id(state.get(p)) for p in params]
        return [*map(id, params)], states, [*map(id, entries)], [*map(Tensor.data_ptr, self.views)]

    def fits(self, params: list[Tensor], state: State) -> bool:
        """Whether these are the pack's parameters, their state is the pack's, and all have taken the same number of steps."""
        if self.identity_of(params, state) != self.identity:
            return False
        return all(is_constant(counts.tolist()) for counts in (*self.batch.steps, *self.batch.curvature_steps))

    def is_in_use(self) -> bool:
        """Whether any state still holds one of the pack's views."""
        return any(own.get(name) is view for (own, name), view in zip(self.places, self.views, strict=True))

    def filled_batch(self, group: dict[str, Any], gradients: list[Tensor], curvatures: list[Tensor]) -> Batch:
        """The pack's batch, with the derivatives of this step."""
        self.batch.group = group
        self.batch.gradients = [flatten(gradients)]
        self.batch.curvatures = [flatten(curvatures)] if curvatures else []
        return self.batch


def is_constant(values: list[float]) -> bool:
    return values.count(values[0]) == len(values)
