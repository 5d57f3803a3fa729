"""Many models trained at once: one step, mapped over the members of an ensemble."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils.parametrize import type_before_parametrizations

from ..engine.heads import Unsettled
from ..optim import CurvatureOptimizer
from .holdings import Shared, overlapping, pointers
from .hyperparameters import Option, number_dtype
from .make_fx import trace
from .signature import CONSTANTS, Shape, kind_of
from .step import CompiledStep
from .subject import CIRCUMSTANCES, Layout, Run, Subject
from .workarounds.vmap import functional


def ensemble(
    models: Sequence[nn.Module],
    loss_fn: Callable[..., Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    batch_dims: int | Sequence[int | None] | None = 0,
    how: str = "vmap",
    backend: str = "inductor",
    cuda_graph: bool = True,
    **options: Any,
) -> Ensemble:
    """A function ``step(*batch) -> losses`` that trains all models by one step each, in one compiled graph.

    Member k becomes what :func:`hesscale.compile_step` would make of ``models[k]`` and ``optimizers[k]`` alone, but for random
    numbers such as dropout's. Members have the same architecture and kind of optimizer; numbers among their options (step size,
    trust radius, betas …) may differ, and change later. The models stay usable: their parameters and buffers, and the
    optimizers' state, become views of tensors that hold those of all members, where these are mapped.

    A member whose gradients or curvature are not finite stands still for that step, whatever its ``on_nonfinite`` says; its
    ``nonfinite_steps`` counts. The others go on.

    Args:
        models: one per member.
        loss_fn: ``loss_fn(model, *batch) -> loss``, as for one model.
        optimizers: one per member.
        batch_dims: the dimension of the batch's tensors that numbers the members, or None for a tensor that all share; one for
            each tensor, or one for all.
        how: ``"vmap"``, one graph whose tensors have a dimension for the members: fastest for small networks, whose kernels take
            longer to start than to run. ``"abreast"``, the graph of one member, run for each of them, on a GPU side by side: for
            convolutions, which vmap makes slow; on a CPU a member is bit for bit what it would be alone.
        backend, cuda_graph, options: as in :func:`hesscale.compile_step`.

    Example:
        >>> import torch, hesscale
        >>> models = [torch.nn.Linear(3, 1) for _ in range(4)]
        >>> optimizers = [hesscale.AdaHesScale(m.parameters(), lr=lr) for m, lr in zip(models, (1e-3, 3e-3, 1e-2, 3e-2))]
        >>> def loss_fn(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> step = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None, backend="traced")
        >>> step(torch.ones(2, 3), torch.zeros(2, 1)).shape
        torch.Size([4])
    """
    if not models or len(models) != len(optimizers):
        raise ValueError(f"an ensemble has one optimizer per model, at least one; there are {len(models)} and {len(optimizers)}")
    if how not in HOW:
        raise ValueError(f"how={how!r} is not one of {', '.join(map(repr, HOW))}")
    members = [Subject(model, loss_fn, optimizer, options) for model, optimizer in zip(models, optimizers, strict=True)]
    return Ensemble(HOW[how](members, batch_dims), backend, cuda_graph)


class Ensemble(CompiledStep):
    """A training step of many models; see :func:`ensemble`."""


class Members:
    """The members of an ensemble, as one subject whose tensors have a first dimension for the members."""

    def __init__(self, members: list[Subject], batch_dims: int | Sequence[int | None] | None) -> None:
        self.members, self.batch_dims = members, batch_dims
        self.first = members[0]
        self.looks: list[int] = []  # how often each member has been looked at, when they were last compared
        self.keys: list[object] = []
        self.stacks: list[Tensor] = []
        self.stacked: Layout | None = None
        self.seen: list[object] = []  # at a glance, when the stacks were made
        self.held: dict[Option, tuple[list[Any], Tensor]] = {}
        self.compare()

    def compare(self) -> None:
        """All members must consist of the same, and share none of it."""
        for k, member in enumerate(self.members):
            check_alike(self.first, member, k)
        if len({id(p) for member in self.members for p in member.trained}) < len(self.members) * len(self.first.trained):
            raise ValueError("two members share parameters; give each a model of its own")
        self.looks, self.seen = [member.looks for member in self.members], []

    def circumstances(self) -> tuple[object, ...]:
        """Those of one member, once all options that differ between members are arguments of the graph."""
        found = [member.own_circumstances() for member in self.members]
        if [looks for looks, *_ in found] != self.looks:
            self.compare()
        self.check_phases()
        keys = [member.numbers.key for member in self.members]
        if keys != self.keys:
            self.unite()
            self.keys = [member.numbers.key for member in self.members]
            found = [member.own_circumstances() for member in self.members]
        decisive = [circumstances[1:] for circumstances in found]
        if decisive.count(decisive[0]) < len(decisive):
            k = next(k for k, circumstances in enumerate(decisive) if circumstances != decisive[0])
            raise ValueError(f"member {k} differs from member 0 in {difference(self.first, self.members[k])}")
        for member in self.members:  # what is the same object is compared fast
            member.constants, member.numbers.key = self.first.constants, self.first.numbers.key
        return tuple(self.looks), *self.first.circumstances()

    def check_phases(self) -> None:
        """Curvature must be due for all members at the same steps."""
        every = getattr(self.first.optimizer, "curvature_every", 1)
        if every > 1:
            counts = [member.optimizer.param_groups[0]["step_count"] for member in self.members]
            if k := next((k for k, count in enumerate(counts) if (count - counts[0]) % every), 0):
                raise ValueError(
                    f"member {k} has made {counts[k]} steps and member 0 {counts[0]}, so that curvature is not due for both at "
                    f"the same steps (curvature_every={every}); load members together, or set step_count of their groups"
                )

    def unite(self) -> None:
        """Make arguments of all numbers that are arguments for some members or differ between them."""
        numbers = [member.numbers for member in self.members]
        options = self.first.numbers.options
        differing = {option for known in numbers for option in options if known.options.get(option) != options[option]}
        differing.update(*[known.changing for known in numbers])
        for known in numbers:
            known.take(known.options, differing)
        for k, known in enumerate(numbers):
            if known.key != self.first.numbers.key:
                names = sorted({name for _, name, _ in differing if name != "lr"})
                raise ValueError(
                    f"member {k} has options that are no numbers and differ from member 0's, among {', '.join(names)}"
                )

    def is_steady(self) -> bool:
        return self.first.is_steady()

    def obstacle(self) -> str:
        return next((reason for member in self.members if (reason := member.obstacle())), "")

    def dims(self, tensors: Sequence[object]) -> list[int | None]:
        """The dimension of each tensor of a batch that numbers the members."""
        if not isinstance(self.batch_dims, Sequence):
            return [self.batch_dims] * len(tensors)
        if len(self.batch_dims) != len(tensors):
            raise ValueError(f"batch_dims has {len(self.batch_dims)} entries for a batch of {len(tensors)} tensors")
        return list(self.batch_dims)

    def part(self, tensors: Sequence[Tensor], k: int) -> list[Tensor]:
        """Member k's share of the tensors of a batch."""
        return [t if dim is None else t.select(dim, k) for t, dim in zip(tensors, self.dims(tensors), strict=True)]

    def step(self, batch: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]:
        """One step of each member in turn."""
        tensors, shape = Shape.of(batch)
        if shape.obstacle and not tensors:
            raise TypeError(shape.obstacle)
        self.check_apart()
        for tensor, dim in zip(tensors, self.dims(tensors), strict=True):
            if dim is not None and not (-tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == len(self.members)):
                raise ValueError(
                    f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} should number {len(self.members)} members; "
                    "pass batch_dims=None for a batch that all share"
                )
        with contextlib.ExitStack() as stack:
            for member in self.members:
                if isinstance(member.optimizer, CurvatureOptimizer):
                    stack.enter_context(member.optimizer.without_nonfinite_errors())
            losses = [member.step(shape.batch(self.part(tensors, k)))[0] for k, member in enumerate(self.members)]
        self.align()
        self.seen = []  # eager steps may leave tensors elsewhere
        return torch.stack(losses), []

    def check_apart(self) -> None:
        """No tensor of a member may lie where one of another does: both would change it."""
        if (k := overlapping([tensors_of(member) for member in self.members])) is not None:
            raise ValueError(
                f"member {k} shares memory of parameters, buffers or its optimizer's state with a member before it; give each "
                "tensors of its own, as copy.deepcopy does"
            )

    def align(self) -> None:
        """Members that stood still count the step too, so that curvature is due for all at the same time."""
        for i, group in enumerate(self.first.optimizer.param_groups):
            if "step_count" in group:
                count = max(member.optimizer.param_groups[i]["step_count"] for member in self.members)
                for member in self.members:
                    member.optimizer.param_groups[i]["step_count"] = count

    def layout(self) -> Layout:
        layouts = [member.layout() for member in self.members]
        if any(as_sets(layout) != as_sets(layouts[0]) for layout in layouts):
            raise Unsettled("the optimizers of the members hold different kinds of state")
        return layouts[0]

    def settle(self) -> bool:
        for member in self.members:  # of which only the first is traced
            member.replaced = self.first.replaced
        moved = [member for member in self.members if member.settle()]
        if moved:
            self.seen = []
        return bool(moved)

    def glance(self) -> list[object]:
        """Where the members' tensors are; their stacks are kept, so that no others come there."""
        return [seen for member in self.members for seen in member_glance(member)]

    def own_tensors(self, layout: Layout) -> list[Tensor]:
        """Stacks of the members' tensors, of which these are views."""
        if layout != self.stacked or self.glance() != self.seen:
            rows = [member.own_tensors(layout) for member in self.members]
            if any(overlapping([tensor] for tensor in row) is not None for row in rows):
                raise Shared("buffers of a member share memory, which vmap would take apart: use how='abreast'")
            self.stacks = [torch.stack([tensor.detach() for tensor in column]) for column in zip(*rows, strict=True)]
            for k, member in enumerate(self.members):
                member.adopt(layout, [stack[k] for stack in self.stacks])
            self.stacked, self.seen = layout, self.glance()
        return self.stacks

    def number_tensors(self) -> list[Tensor]:
        """For each option that is an argument, its numbers for all members, in a tensor that stays where it is."""
        return [self.number_tensor(option) for option in self.first.numbers.changing]

    def number_tensor(self, option: Option) -> Tensor:
        values = [member.numbers.options[option] for member in self.members]
        like = self.first.parameters()[0]
        known, tensor = self.held.get(option, (None, None))
        if tensor is None or known != values or isinstance(values[0], Tensor):
            found = torch.tensor([float(value) for value in values], dtype=number_dtype(like), device=like.device)
            is_new = tensor is None or (tensor.dtype, tensor.device) != (found.dtype, found.device)
            tensor = found if is_new or tensor is None else tensor.copy_(found)
            self.held[option] = values, tensor
        return tensor

    def trace(self, layout: Layout, shape: Shape, tensors: Sequence[Tensor]) -> GraphModule:
        """The first member's step, mapped over all."""
        own = len(tensors) - len(shape.tensors)
        example = [*[tensor[0] for tensor in tensors[:own]], *self.part(tensors[own:], 0)]
        graph = functional(trace(lambda *given: self.first.step_on(layout, shape, given), example), example)
        dims = (*[0] * own, *self.dims(shape.tensors))
        return trace(torch.func.vmap(graph, in_dims=dims, randomness="different"), tensors)

    def example(self, layout: Layout, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.first.warmed_up(layout, tensors, [member.optimizer for member in self.members])

    def arranged(self, run: Run) -> Run:
        return run

    def note_step(self, etas: Sequence[Tensor]) -> None:
        """Take note of a step that a graph has made; members that stood still in it count it too."""
        parts = [eta.unbind() for eta in etas]
        for k, member in enumerate(self.members):
            member.note_step([part[k] for part in parts], report=False)
        self.align()


class Abreast(Members):
    """Members that run the same code, each on its own tensors."""

    def own_tensors(self, layout: Layout) -> list[Tensor]:
        """Of all members, with the types and strides of the first one's, which the code is for."""
        self.check_apart()
        first = self.first.own_tensors(layout)
        found = [*first]
        for member in self.members[1:]:
            own = member.own_tensors(layout)
            if any(kind_of(a.detach()) != kind_of(b.detach()) for a, b in zip(own, first, strict=True)):
                member.adopt(layout, [alike(a.detach(), b) for a, b in zip(own, first, strict=True)])
                own = member.own_tensors(layout)
            found += own
        return found

    def number_tensors(self) -> list[Tensor]:
        return [tensor for member in self.members for tensor in member.number_tensors()]

    def trace(self, layout: Layout, shape: Shape, tensors: Sequence[Tensor]) -> GraphModule:
        """The first member's step."""
        self.own = len(self.first.own_tensors(layout))
        return self.first.trace(layout, shape, self.share(tensors, 0, self.own))

    def example(self, layout: Layout, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return self.first.example(layout, self.share(tensors, 0, self.own))

    def share(self, tensors: Sequence[Tensor], k: int, own: int) -> list[Tensor]:
        """What a step of member k takes, each of whom has so many tensors of its own."""
        count, numbers = len(self.members), len(self.first.numbers.changing)
        ends = count * own, count * (own + numbers)
        held, found, batch = tensors[: ends[0]], tensors[ends[0] : ends[1]], tensors[ends[1] :]
        return [*held[k * own : (k + 1) * own], *found[k * numbers : (k + 1) * numbers], *self.part(batch, k)]

    def arranged(self, run: Run) -> Run:
        """A step of each member, of code for what was traced last."""
        streams = [torch.cuda.Stream() for _ in self.members[1:]] if self.first.parameters()[0].is_cuda else []
        own = self.own

        def steps(*given: Tensor) -> list[Tensor]:
            shares = [self.share(given, k, own) for k in range(len(self.members))]
            found = side_by_side(run, shares, streams) if streams else [run(*share) for share in shares]
            return [torch.stack(column) for column in zip(*found, strict=True)]

        return steps


def side_by_side(run: Run, shares: Sequence[Sequence[Tensor]], streams: Sequence[torch.cuda.Stream]) -> list[Sequence[Tensor]]:
    """Run the first here and each of the others on a stream of its own, which begins where this one is, and is waited for."""
    here = torch.cuda.current_stream()
    found = []
    for share, stream in zip(shares, [here, *streams], strict=True):
        if stream is not here:
            stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found.append(run(*share))
    for stream in streams:
        here.wait_stream(stream)
    return found


def alike(tensor: Tensor, other: Tensor) -> Tensor:
    """The same numbers with the type and the strides of another tensor."""
    return torch.empty_strided(other.shape, other.stride(), dtype=other.dtype, device=other.device).copy_(tensor)


HOW: dict[str, type[Members]] = {"vmap": Members, "abreast": Abreast}


def tensors_of(member: Subject) -> list[Tensor]:
    """All that a step of a member may change."""
    state = [value for entries in member.optimizer.state.values() for value in entries.values() if isinstance(value, Tensor)]
    return [*member.parameters(), *[place.get() for place in member.buffer_places], *state]


def member_glance(member: Subject) -> list[object]:
    return [*member.outlines(), *pointers((*member.trained, *member.others()))]


def as_sets(layout: Layout) -> object:
    return {(i, frozenset(names)) for i, names in layout.state}, set(layout.counters)


def check_alike(first: Subject, member: Subject, k: int) -> None:
    """All members must do the same with tensors of the same shapes."""
    kinds = [[type_before_parametrizations(module) for module in subject.modules] for subject in (first, member)]
    tensors = [[place.get() for place in (*s.parameter_places, *s.buffer_places)] for s in (first, member)]
    shapes = [[(t.shape, t.dtype, t.device) for t in own] for own in tensors]
    if kinds[0] != kinds[1] or shapes[0] != shapes[1]:
        raise ValueError(f"model {k} has another architecture than model 0, or its tensors other types")
    if type(first.optimizer) is not type(member.optimizer) or group_places(first) != group_places(member):
        raise ValueError(f"optimizer {k} is of another kind than optimizer 0, or has other groups of parameters")
    ours, theirs = constants_of(first.optimizer), constants_of(member.optimizer)
    if differing := sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        raise ValueError(f"member {k} has options that differ from member 0's but cannot: {', '.join(differing)}")


def group_places(subject: Subject) -> list[list[int]]:
    """Which parameters of the model each group has, by number."""
    place = {id(p): i for i, p in enumerate(subject.parameters())}
    return [sorted(place[id(p)] for p in group["params"]) for group in subject.optimizer.param_groups]


def constants_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of an optimizer as a whole."""
    return {name: value for name, value in vars(optimizer).items() if name[0] != "_" and isinstance(value, CONSTANTS)}


def difference(first: Subject, member: Subject) -> str:
    """In which of the circumstances a member differs."""
    ours, theirs = first.own_circumstances(), member.own_circumstances()
    if first.constants != member.constants:
        return next(name for name, a, b in zip(first.names, first.constants, member.constants, strict=True) if a != b)
    return next(what for what, a, b in zip(CIRCUMSTANCES, ours, theirs, strict=False) if what and a != b)
