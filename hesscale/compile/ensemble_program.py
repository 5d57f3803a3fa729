"""The step of an ensemble as a program: one graph mapped over all members, or the graph of one member, run for each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .aliasing import has_overlap, overlapping_group
from .cuda_graph import empty_like
from .fx_graphs import mutated_arguments
from .graph_step import FunctionalStep
from .make_fx import CannotTrace, trace
from .members import Members, tensors_of
from .program import Code, Program
from .signature import BatchSignature, tensor_signature
from .workarounds.vmap import functional


class Inputs(NamedTuple):
    """The inputs of a step of an ensemble.

    Attributes:
        batch: the tensors of the batch.
        signature: the signature of the batch.
        first_part: the first member's part of the batch. ``inputs`` of every member contain it in place of that member's part.
        inputs: the inputs of the forward graph, for each member.
        is_unchanged: whether a member's forward graph is still valid during the step, with the same inputs.
    """

    batch: Sequence[Tensor]
    signature: BatchSignature
    first_part: Sequence[Tensor]
    inputs: Sequence[Sequence[Tensor]]
    is_unchanged: Callable[[int], bool]


class EnsembleProgram(Program):
    """The step of an ensemble.

    Args:
        members: the models and optimizers.
        steps: one per member.
        inputs: the inputs of the steps.
    """

    def __init__(self, members: Members, steps: Sequence[FunctionalStep], inputs: Inputs) -> None:
        self.members, self.steps, self.first = members, steps, steps[0]
        self.dims = members.dims(inputs.batch)
        self.batch_places = self.places_of_batch(inputs)
        own = [i for i in range(len(self.first.arguments)) if self.batch_places.get(i) is None]
        is_shared = [len(steps) > 1 and all(step.arguments[i] is self.first.arguments[i] for step in steps) for i in own]
        self.shared = [i for i, shared in zip(own, is_shared, strict=True) if shared]
        self.own = [i for i, shared in zip(own, is_shared, strict=True) if not shared]
        self.addresses: list[int] = []  # of the members' own tensors
        single = trace(self.first, self.first.arguments, constants=True)
        self.mutated = mutated_arguments(single)
        of_all = {i for i, j in self.batch_places.items() if self.dims[j] is None}
        if len(steps) > 1 and self.mutated & {*self.shared, *of_all}:
            raise CannotTrace("all members change one and the same tensor")
        self.storages: set[int] = set()  # of the members' own tensors that change
        self.place_tensors(inputs.batch)
        arguments = self.arguments_for(inputs.batch)
        super().__init__(self.whole_graph(single, arguments), arguments)

    @abstractmethod
    def whole_graph(self, single: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> torch.fx.GraphModule:
        """The graph to compile, made from that of the first member's step."""

    @abstractmethod
    def put_tensors(self) -> None:
        """Move the members' own tensors to the memory where the program reads them; they stay the same objects."""

    @abstractmethod
    def arguments_for(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """The arguments of a step with this batch."""

    def places_of_batch(self, inputs: Inputs) -> dict[int, int]:
        """The index of each argument of a member's step that is a tensor of the batch, and the index of that tensor."""
        number = {id(tensor): j for j, tensor in enumerate(inputs.first_part)}
        return {i: number[id(x)] for i, x in enumerate(inputs.inputs[0]) if id(x) in number}

    def own_tensors(self, step: FunctionalStep) -> list[Tensor]:
        return [*map(step.arguments.__getitem__, self.own)]

    def place_tensors(self, batch: Sequence[Tensor]) -> None:
        """If any of the members' own tensors have moved, put them back where the program reads them."""
        has_moved = self.own_addresses() != self.addresses
        if has_moved:
            self.storages = {*map(storage_address, self.changing_tensors())}
        self.check_others(batch)
        if has_moved:
            self.members.check_apart([self.own_tensors(step) for step in self.steps])
            self.put_tensors()
            self.addresses = self.own_addresses()
            self.storages = {*map(storage_address, self.changing_tensors())}

    def own_addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, chain.from_iterable(map(self.own_tensors, self.steps)))]

    def changing_tensors(self) -> list[Tensor]:
        return [step.arguments[i] for step in self.steps for i in self.own if i in self.mutated]

    def check_others(self, batch: Sequence[Tensor]) -> None:
        """Refuse a batch or shared tensors in memory that a member's step changes. The next member would read the change."""
        others = [*batch, *[self.first.arguments[i] for i in self.shared]]
        near = [tensor for tensor in others if storage_address(tensor) in self.storages]
        if near and overlapping_group([near, self.changing_tensors()]) is not None:
            raise CannotTrace("the batch, or a tensor that members share, lies in memory that a member changes")

    def fits(self, inputs: Inputs) -> bool:  # type: ignore[override]
        if not all(step.fits(found) for step, found in zip(self.steps, inputs.inputs, strict=True)):
            return False
        if self.places_of_batch(inputs) != self.batch_places:
            return False
        if any(step.arguments[i] is not self.first.arguments[i] for step in self.steps for i in self.shared):
            return False
        try:
            self.place_tensors(inputs.batch)
        except CannotTrace:
            return False
        self.arguments = self.arguments_for(inputs.batch)
        return True

    def finish(self, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs = self.first.forward.outputs
        self.members.record_step(results[outputs:])
        return tuple(results[:outputs])

    def repetition(self, batch: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Tensor] | None:
        if not self.first.repeats_itself:
            return None
        return lambda given: self(self.arguments_for(given))[self.first.forward.loss]

    def shares_memory(self) -> bool:
        return any(has_overlap(self.own_tensors(step)) for step in self.steps)


class StackedProgram(EnsembleProgram):
    """The members' tensors are rows of stacked tensors, and vmap maps one graph over the rows."""

    def put_tensors(self) -> None:
        if self.shares_memory():
            raise CannotTrace("tensors of a member share memory, which vmap would take apart: use how='abreast'")
        if not self.addresses:
            self.stacks = {i: new_stack(self.first.arguments[i], len(self.steps)) for i in self.own}
            self.visiting = [i for i in self.own if i < self.first.count and i not in self.mutated and not self.is_of_models(i)]
        for i, stack in self.stacks.items():
            if i in self.visiting:
                continue
            tensors = [step.arguments[i] for step in self.steps]
            rows = stack.unbind()
            if any(tensor.data_ptr() != row.data_ptr() for tensor, row in zip(tensors, rows, strict=True)):
                stack.copy_(torch.stack([tensor.detach() for tensor in tensors]))  # a tensor may be in another one's row
                for tensor, row in zip(tensors, rows, strict=True):
                    tensor.data = row

    def is_of_models(self, i: int) -> bool:
        """Whether an argument is a parameter or buffer of each member. Other arguments may be views of tensors that change."""
        pairs = zip(self.members.models, self.steps, strict=True)
        return all(any(step.arguments[i] is tensor for tensor in tensors_of(model)) for model, step in pairs)

    def arguments_for(self, batch: Sequence[Tensor]) -> list[Tensor]:
        places = self.batch_places
        for i in self.visiting:
            self.stacks[i].copy_(torch.stack([step.arguments[i].detach() for step in self.steps]))
        shared = {i: self.first.arguments[i] for i in self.shared}
        given = {**self.stacks, **shared, **{i: batch[j] for i, j in places.items()}}
        return [given[i] for i in range(len(given))]

    def whole_graph(self, single: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> torch.fx.GraphModule:
        dims: dict[int, int | None] = {**dict.fromkeys(self.own, 0), **dict.fromkeys(self.shared)}
        dims.update({i: self.dims[j] for i, j in self.batch_places.items()})
        mapped = torch.func.vmap(
            functional(single, self.first.arguments),
            in_dims=tuple([dims[i] for i in range(len(dims))]),
            randomness="different",
        )
        return trace(mapped, arguments, constants=True)

    def example(self) -> Sequence[Tensor]:
        return self.first.warmed_up(self.arguments, self.members.curvature_warmup)

    def copied_arguments(self, moved: set[int]) -> set[int]:
        return {*self.batch_places, *self.shared}


def storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def new_stack(like: Tensor, count: int) -> Tensor:
    """An empty tensor whose rows have the shape and strides of this one."""
    strides = torch.empty_like(like, device="meta").stride()
    return torch.empty_strided((count, *like.shape), (max(1, like.numel()), *strides), dtype=like.dtype, device=like.device)


class SeparateProgram(EnsembleProgram):
    """Each member keeps its own tensors, and the graph of one member runs for each of them; on a GPU, in parallel.

    The arguments are the members' own tensors, the tensors that all of them share, and the batch.
    """

    def put_tensors(self) -> None:
        """Give the members' tensors the dtypes and strides of the first member's, for which the code is compiled."""
        for step in self.steps[1:]:
            for tensor, like in zip(self.own_tensors(step), self.own_tensors(self.first), strict=True):
                if tensor_signature(tensor.detach()) != tensor_signature(like.detach()):
                    tensor.data = empty_like(like).copy_(tensor.detach())

    def arguments_for(self, batch: Sequence[Tensor]) -> list[Tensor]:
        own = [tensor for step in self.steps for tensor in self.own_tensors(step)]
        return [*own, *[self.first.arguments[i] for i in self.shared], *batch]

    def whole_graph(self, single: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> torch.fx.GraphModule:
        return single

    def part(self, arguments: Sequence[Tensor], k: int) -> list[Tensor]:
        """The arguments of member k's step."""
        count, end = len(self.own), len(self.own) * len(self.steps)
        shared, batch = arguments[end : end + len(self.shared)], arguments[end + len(self.shared) :]
        own = arguments[k * count : (k + 1) * count]
        found = {**dict(zip(self.own, own, strict=True)), **dict(zip(self.shared, shared, strict=True))}
        parts = self.members.part(batch, k)
        found.update({i: parts[j] for i, j in self.batch_places.items()})
        return [found[i] for i in range(len(found))]

    def arrange(self, code: Code) -> Code:
        streams = [torch.cuda.Stream() for _ in self.steps[1:]] if self.first.parameters[0].is_cuda else []

        def run(*arguments: Tensor) -> list[Tensor]:
            parts = [self.part(arguments, k) for k in range(len(self.steps))]
            found = side_by_side(code, parts, streams) if streams else [code(*part) for part in parts]
            return [torch.stack(column) for column in zip(*found, strict=True)]

        return run

    def example(self) -> Sequence[Tensor]:
        return self.first.warmed_up(self.part(self.arguments, 0), self.members.curvature_warmup)

    def copied_arguments(self, moved: set[int]) -> set[int]:
        return set(range(len(self.own) * len(self.steps), len(self.arguments)))


def side_by_side(code: Code, parts: Sequence[Sequence[Tensor]], streams: Sequence[torch.cuda.Stream]) -> list[Sequence[Tensor]]:
    """Run the first part on the current stream and each other part on its own stream, in parallel, and wait for all of them."""
    here = torch.cuda.current_stream()
    found = []
    for part, stream in zip(parts, [here, *streams], strict=True):
        if stream is not here:
            stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(code(*part))
    for stream in streams:
        here.wait_stream(stream)
    return found
