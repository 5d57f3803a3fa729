"""The members of an ensemble together: all alike, with tensors in one stack, or each with its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn.utils.parametrize import type_before_parametrizations

from ..errors import NeedsEagerPass
from ..optim import CurvatureOptimizer
from .aliasing import has_overlap, overlapping_group
from .cuda_graph import empty_like
from .hyperparameters import Option, number_dtype
from .make_fx import CannotTrace, trace
from .member import Member
from .optimizer import Layout
from .program import Code
from .signature import PLAIN, BatchSignature, tensor_signature
from .workarounds.vmap import functional


class Members(ABC):
    """Members of one architecture, with optimizers of one kind.

    Args:
        members: one or more.
        batch_dims: of the tensors of a batch: the dimension that numbers the members, or None for one that all share.
    """

    def __init__(self, members: Sequence[Member], batch_dims: int | Sequence[int | None] | None) -> None:
        self.members, self.batch_dims = members, batch_dims
        self.first = members[0]
        for k, member in enumerate(members):
            check_alike(self.first, member, k)
        if len({id(p) for member in members for p in member.parameters}) < len(members) * len(self.first.parameters):
            raise ValueError("two members share parameters; give each a model of its own")

    # ------------------------------------------------------------------------------------- what differs by how members run

    @abstractmethod
    def tensors(self, layout: Layout) -> list[Tensor]:
        """The members' tensors, as a step takes them."""

    @abstractmethod
    def numbers(self) -> list[Tensor]:
        """Those of the optimizers' numbers that are arguments, as a step takes them."""

    @abstractmethod
    def trace(self, layout: Layout, signature: BatchSignature, arguments: Sequence[Tensor]) -> GraphModule:
        """The step as a graph."""

    @abstractmethod
    def example(self, layout: Layout, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the graph takes, once ``curvature_warmup`` is over."""

    @abstractmethod
    def arrange(self, code: Code, layout: Layout) -> Code:
        """The step of all members, made of code for the graph."""

    # ---------------------------------------------------------------------------------------------------------- signature

    def signature(self) -> tuple[object, ...]:
        """That of each member, once all numbers that differ between members are arguments."""
        for k, member in enumerate(self.members):
            if part := member.changed_part():
                raise RuntimeError(
                    f"{part} of member {k} has changed; an ensemble fixes modules, attributes and hooks when it is made, so make "
                    "a new one"
                )
        self.check_phases()
        found = [member.signature() for member in self.members]
        if any(other != found[0] for other in found):
            self.make_differing_numbers_arguments()
            found = [member.signature() for member in self.members]
        for k, other in enumerate(found):
            if other != found[0]:
                raise ValueError(f"member {k} differs from member 0 in {difference(self.first, self.members[k])}")
        return found[0]

    def make_differing_numbers_arguments(self) -> None:
        hyperparameters = [member.optimizer.hyperparameters for member in self.members]
        values = hyperparameters[0].values
        differing = {option for known in hyperparameters for option in values if known.values.get(option) != values[option]}
        differing.update(*[known.arguments for known in hyperparameters])
        for known in hyperparameters:
            known.divide(known.values, differing)
        for k, known in enumerate(hyperparameters):
            if known.constants != hyperparameters[0].constants:
                names = sorted({name for _, name, _ in differing if name != "lr"})
                raise ValueError(
                    f"member {k} has options that are no numbers and differ from member 0's, among {', '.join(names)}"
                )

    def check_phases(self) -> None:
        """Curvature must be due for all members at the same steps."""
        every = getattr(self.first.optimizer.optimizer, "curvature_every", 1)
        if every > 1:
            counts = [member.optimizer.optimizer.param_groups[0]["step_count"] for member in self.members]
            if k := next((k for k, count in enumerate(counts) if (count - counts[0]) % every), 0):
                raise ValueError(
                    f"member {k} has made {counts[k]} steps and member 0 {counts[0]}, so that curvature is not due for both at "
                    f"the same steps (curvature_every={every}); load members together, or set step_count of their groups"
                )

    # -------------------------------------------------------------------------------------------------------------- batch

    def dims(self, tensors: Sequence[object]) -> list[int | None]:
        """The dimension of each tensor of a batch that numbers the members."""
        if not isinstance(self.batch_dims, Sequence):
            return [self.batch_dims] * len(tensors)
        if len(self.batch_dims) != len(tensors):
            raise ValueError(f"batch_dims has {len(self.batch_dims)} entries for a batch of {len(tensors)} tensors")
        return list(self.batch_dims)

    def check_batch(self, tensors: Sequence[Tensor]) -> None:
        for tensor, dim in zip(tensors, self.dims(tensors), strict=True):
            if dim is not None and not (-tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == len(self.members)):
                raise ValueError(
                    f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} should number {len(self.members)} members; "
                    "pass batch_dims=None for a batch that all share"
                )

    def part(self, tensors: Sequence[Tensor], k: int) -> list[Tensor]:
        """Member k's part of the tensors of a batch."""
        return [t if dim is None else t.select(dim, k) for t, dim in zip(tensors, self.dims(tensors), strict=True)]

    # -------------------------------------------------------------------------------------------------------------- steps

    def eager(self, tensors: Sequence[Tensor], signature: BatchSignature) -> Tensor:
        """A step of each member in turn; returns their losses. One that meets a non-finite number stands still."""
        self.check_batch(tensors)
        self.check_apart()
        losses = []
        for k, member in enumerate(self.members):
            optimizer = member.optimizer.optimizer
            with optimizer.without_nonfinite_errors() if isinstance(optimizer, CurvatureOptimizer) else nullcontext():
                losses.append(member.eager(signature.batch(self.part(tensors, k))))
        self.align()
        return torch.stack(losses)

    def record_step(self, etas: Sequence[Tensor]) -> None:
        """Count a step that a graph has made."""
        parts = [eta.unbind() for eta in etas]
        for k, member in enumerate(self.members):
            member.optimizer.record_step([part[k] for part in parts], report=False)
        self.align()

    def align(self) -> None:
        """Members that stood still count the step too, so that curvature is due for all at the same time."""
        groups = [member.optimizer.optimizer.param_groups for member in self.members]
        for same in zip(*groups, strict=True):
            if "step_count" in same[0]:
                count = max([group["step_count"] for group in same])
                for group in same:
                    group["step_count"] = count

    # ------------------------------------------------------------------------------------------------------------ tensors

    def layout(self) -> Layout:
        layouts = [member.layout() for member in self.members]
        if any(as_sets(layout) != as_sets(layouts[0]) for layout in layouts):
            raise NeedsEagerPass("the optimizers of the members hold different kinds of state")
        return layouts[0]

    def prepare(self) -> None:
        for member in self.members:  # of which only the first is traced
            member.replaced_buffers = self.first.replaced_buffers
            member.prepare()

    def check_apart(self) -> None:
        """No tensor of a member may lie where one of another does: both would change it."""
        if (k := overlapping_group([member.all_tensors() for member in self.members])) is not None:
            raise ValueError(
                f"member {k} shares memory of parameters, buffers or its optimizer's state with a member before it; give each "
                "tensors of its own, as copy.deepcopy does"
            )

    def location(self) -> list[object]:
        """What changes if a tensor of a member is another one, or elsewhere in memory."""
        found: list[object] = []
        for member in self.members:
            tensors = (*member.parameters, *member.buffers())
            state = [value for entries in member.optimizer.optimizer.state.values() for value in entries.values()]
            kept = [value for value in (*state, *member.optimizer.counters.values()) if isinstance(value, Tensor)]
            found += [(t.shape, t.stride()) for t in tensors]
            found += map(Tensor.data_ptr, (*tensors, *kept))
        return found


class StackedMembers(Members):
    """Members whose tensors are rows of one tensor, with one graph that is mapped over them by vmap."""

    def __init__(self, members: Sequence[Member], batch_dims: int | Sequence[int | None] | None) -> None:
        super().__init__(members, batch_dims)
        self.stacks: list[Tensor] = []
        self.stacked: tuple[Layout, list[object]] | None = None  # the layout, and the location of the rows
        self.number_tensors: dict[Option, tuple[list[Any], Tensor]] = {}

    def tensors(self, layout: Layout) -> list[Tensor]:
        if self.stacked != (layout, self.location()):
            rows = [member.tensors(layout) for member in self.members]
            if any(has_overlap(row) for row in rows):
                raise CannotTrace("tensors of a member share memory, which vmap would take apart: use how='abreast'")
            self.stacks = [torch.stack([tensor.detach() for tensor in column]) for column in zip(*rows, strict=True)]
            for k, member in enumerate(self.members):
                member.replace_tensors(layout, [stack[k] for stack in self.stacks])
            self.stacked = layout, self.location()
        return self.stacks

    def numbers(self) -> list[Tensor]:
        return [self.number(option) for option in self.first.optimizer.hyperparameters.arguments]

    def number(self, option: Option) -> Tensor:
        """An option of all members, in a tensor that stays where it is."""
        values = [member.optimizer.hyperparameters.values[option] for member in self.members]
        like = self.first.parameters[0]
        known, tensor = self.number_tensors.get(option, (None, None))
        if tensor is None or known != values or isinstance(values[0], Tensor):
            new = torch.tensor([float(value) for value in values], dtype=number_dtype(like), device=like.device)
            is_alike = tensor is not None and (tensor.dtype, tensor.device) == (new.dtype, new.device)
            tensor = tensor.copy_(new) if tensor is not None and is_alike else new
            self.number_tensors[option] = values, tensor
        return tensor

    def trace(self, layout: Layout, signature: BatchSignature, arguments: Sequence[Tensor]) -> GraphModule:
        count = len(arguments) - len(signature.tensors)
        example = [*[tensor[0] for tensor in arguments[:count]], *self.part(arguments[count:], 0)]
        graph = functional(trace(lambda *given: self.first.step(layout, signature, given), example), example)
        dims = (*[0] * count, *self.dims(signature.tensors))
        return trace(torch.func.vmap(graph, in_dims=dims, randomness="different"), arguments)

    def example(self, layout: Layout, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        return warmed_up(self.members, layout, arguments)

    def arrange(self, code: Code, layout: Layout) -> Code:
        return code


class SeparateMembers(Members):
    """Members with tensors of their own, for each of which the graph of one member is run; on a GPU side by side."""

    def tensors(self, layout: Layout) -> list[Tensor]:
        """Of all members, with the types and strides of the first one's, which the code is for."""
        self.check_apart()
        first = self.first.tensors(layout)
        found = [*first]
        for member in self.members[1:]:
            own = member.tensors(layout)
            pairs = list(zip(own, first, strict=True))
            if any(tensor_signature(a.detach()) != tensor_signature(b.detach()) for a, b in pairs):
                member.replace_tensors(layout, [empty_like(b).copy_(a.detach()) for a, b in pairs])
                own = member.tensors(layout)
            found += own
        return found

    def numbers(self) -> list[Tensor]:
        like = self.first.parameters[0]
        return [n for member in self.members for n in member.optimizer.hyperparameters.argument_tensors(like)]

    def trace(self, layout: Layout, signature: BatchSignature, arguments: Sequence[Tensor]) -> GraphModule:
        share = self.share(layout, arguments, 0)
        return trace(lambda *given: self.first.step(layout, signature, given), share)

    def example(self, layout: Layout, arguments: Sequence[Tensor]) -> Sequence[Tensor]:
        return warmed_up(self.members[:1], layout, self.share(layout, arguments, 0))

    def share(self, layout: Layout, arguments: Sequence[Tensor], k: int) -> list[Tensor]:
        """What a step of member k takes."""
        count, own = len(self.members), len(self.first.tensors(layout))
        numbers = len(self.first.optimizer.hyperparameters.arguments)
        ends = count * own, count * (own + numbers)
        held, found, batch = arguments[: ends[0]], arguments[ends[0] : ends[1]], arguments[ends[1] :]
        return [*held[k * own : (k + 1) * own], *found[k * numbers : (k + 1) * numbers], *self.part(batch, k)]

    def arrange(self, code: Code, layout: Layout) -> Code:
        streams = [torch.cuda.Stream() for _ in self.members[1:]] if self.first.parameters[0].is_cuda else []

        def steps(*arguments: Tensor) -> list[Tensor]:
            shares = [self.share(layout, arguments, k) for k in range(len(self.members))]
            found = side_by_side(code, shares, streams) if streams else [code(*share) for share in shares]
            return [torch.stack(column) for column in zip(*found, strict=True)]

        return steps


def warmed_up(members: Sequence[Member], layout: Layout, arguments: Sequence[Tensor]) -> list[Tensor]:
    """Arguments of a step as they are once ``curvature_warmup`` is over for all members."""
    groups = [group for member in members for group in member.optimizer.optimizer.param_groups]
    warmup = max([float(group.get("curvature_warmup", 0)) for group in groups])
    start = len(members[0].parameters) + len(members[0].buffer_places)
    state = members[0].optimizer.with_enough_curvature(layout, arguments[start:], warmup)
    return [*arguments[:start], *state]


def side_by_side(code: Code, shares: Sequence[Sequence[Tensor]], streams: Sequence[torch.cuda.Stream]) -> list[Sequence[Tensor]]:
    """Run the first here and each of the others on a stream of its own, which begins where this one is, and is waited for."""
    here = torch.cuda.current_stream()
    found = []
    for share, stream in zip(shares, [here, *streams], strict=True):
        if stream is not here:
            stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(code(*share))
    for stream in streams:
        here.wait_stream(stream)
    return found


def as_sets(layout: Layout) -> object:
    return {(i, frozenset(names)) for i, names in layout.state}, set(layout.counters)


def check_alike(first: Member, member: Member, k: int) -> None:
    """All members must do the same with tensors of the same shapes."""
    kinds = [[type_before_parametrizations(module) for module in one.modules] for one in (first, member)]
    tensors = [[*one.parameters, *one.buffers()] for one in (first, member)]
    shapes = [[(t.shape, t.dtype, t.device) for t in own] for own in tensors]
    if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
        raise ValueError(f"model {k} has another architecture than model 0, or its tensors other types")
    ours, theirs = first.optimizer.optimizer, member.optimizer.optimizer
    if type(ours) is not type(theirs) or groups_of(first) != groups_of(member):
        raise ValueError(f"optimizer {k} is of another kind than optimizer 0, or has other groups of parameters")
    options = [{n: v for n, v in vars(one).items() if n[0] != "_" and isinstance(v, PLAIN)} for one in (ours, theirs)]
    if differing := sorted(name for name in {**options[0], **options[1]} if options[0].get(name) != options[1].get(name)):
        raise ValueError(f"member {k} has options that differ from member 0's but cannot: {', '.join(differing)}")
    if differing := differing_attributes(first, member):
        raise ValueError(f"member {k} differs from member 0 in {differing[0]}")


def groups_of(member: Member) -> list[list[int]]:
    """Which parameters of the model each group has, by number."""
    place = {id(p): i for i, p in enumerate(member.parameters)}
    return [sorted(place[id(p)] for p in group["params"]) for group in member.optimizer.optimizer.param_groups]


def differing_attributes(first: Member, member: Member) -> list[str]:
    """Plain attributes of modules, by which members differ."""
    own, other = dict(first.structure), dict(member.structure)
    missing = sorted(own.keys() ^ other.keys())
    return [*missing, *[name for name, a in own.items() if isinstance(a, PLAIN) and is_other(a, other.get(name))]]


def is_other(a: Any, b: Any) -> bool:
    return (type(a), a) != (type(b), b)


def difference(first: Member, member: Member) -> str:
    """In what a member differs."""
    (options, training, _), (other_options, other_training, _) = first.signature(), member.signature()
    if options != other_options:
        return "options of its optimizer, in hooks, or in whether it uses curvature"
    return "training" if training != other_training else "requires_grad"
