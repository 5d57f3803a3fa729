"""Many models trained at once: one step for all members of an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NeedsEagerPass
from .dynamo import Captured, ForwardGraph
from .ensemble_program import EnsembleProgram, Inputs, SeparateProgram, StackedProgram
from .graph_step import FunctionalStep, GraphStep, Training
from .members import Members
from .optimizer import FunctionalOptimizer
from .program import Mode
from .signature import BatchSignature
from .step import CapturedStep, check_backend, uncompiled


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
    """Return a function ``step(*batch) -> losses`` that trains all models by one step each, in one compiled graph.

    Each member is trained as if :func:`hesscale.compile_step` had trained ``models[k]`` with ``optimizers[k]`` alone, except for
    random numbers such as those of dropout. Members have the same architecture and the same class of optimizer. Options that are
    numbers (step size, trust radius, betas …) may differ between members, and may change later. You can still use the models.
    With ``how="vmap"``, their parameters, buffers and optimizer state become views of stacked tensors of all members.

    TorchDynamo guards the values that the models and ``loss_fn`` read, as for one model. If all members change in the same way,
    the step is compiled again. If members begin to differ in anything but numbers, the step raises a ValueError.

    If the gradients or curvature of a member are not finite, that member skips the step, whatever its ``on_nonfinite`` says, and
    its ``nonfinite_steps`` counts the step. The other members are not affected.

    Args:
        models: one per member.
        loss_fn: ``loss_fn(model, *batch) -> loss``, as for one model.
        optimizers: one per member.
        batch_dims: the dimension of the batch's tensors that indexes the members, or None if all members share a tensor. It is
            one value for all tensors of the batch, or a sequence with one value for each.
        how: ``"vmap"`` runs one graph whose tensors have a dimension for the members. It is fastest for small networks, whose
            kernels take longer to launch than to run. ``"abreast"`` runs the graph of each member, in parallel on a GPU. Use it
            for convolutions, which vmap makes slow. On a CPU, each member's results are then bit for bit the same as alone.
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
        raise ValueError(
            f"an ensemble needs at least one model, and one optimizer per model; it has {len(models)} and {len(optimizers)}"
        )
    if how not in HOW:
        raise ValueError(f"how={how!r} is not one of {', '.join(map(repr, HOW))}")
    check_backend(backend)
    functional = [FunctionalOptimizer(optimizer, options) for optimizer in optimizers]
    members = Members([uncompiled(model) for model in models], functional, batch_dims)
    return Ensemble(members, loss_fn, HOW[how], Training(backend, cuda_graph))


HOW: dict[str, type[EnsembleProgram]] = {"vmap": StackedProgram, "abreast": SeparateProgram}


class Ensemble(CapturedStep):
    """A training step of many models, which :func:`ensemble` returns. It has the attributes and methods of a compiled step."""

    def __init__(self, members: Members, loss_fn: Callable[..., Tensor], kind: type[EnsembleProgram], training: Training) -> None:
        super().__init__(members.models, loss_fn, members.optimizers, training)
        self.members, self.kind = members, kind

    @property
    def modes(self) -> list[str]:
        """The modes of all kinds of step, such as those with and without new curvature."""
        graphs: list[Any] = [] if self.captured is None else self.captured.runners
        return sorted({step.mode.value for graph in graphs for step in graph.steps.values()}) or [self.mode]

    def graph_step(self, forward: ForwardGraph) -> EnsembleStep:
        return EnsembleStep(forward, self.training, self.members, self.loss_fn, self.kind)

    def read(self, batch: Sequence[Any]) -> tuple[list[Tensor], BatchSignature]:
        """The tensors of a batch, and its signature."""
        tensors, signature = BatchSignature.of(batch)
        if signature.obstacle and not tensors:
            raise TypeError(signature.obstacle)
        self.members.check_batch(tensors)
        return tensors, signature

    def run(self, captured: Captured, batch: Sequence[Any]) -> Tensor:
        members, (tensors, signature) = self.members, self.read(batch)
        options = members.signature()
        function, given = captured.function(members.models[0], signature.batch(members.part(tensors, 0)))
        guards, found = captured.guards(function), []
        for k, model in enumerate(members.models):
            if k and (reason := captured.failed_guard(guards, model, given)):
                raise ValueError(f"member {k} differs from member 0; this guard does not hold for it: {reason}")
            found.append(captured.inputs(function, model, given))
        graph: Any = found[0][0]

        def is_unchanged(k: int) -> bool:
            model = members.models[k]
            if captured.failed_guard(captured.guards(function), model, given):
                return False
            return [*map(id, captured.inputs(function, model, given)[1])] == [*map(id, found[k][1])]

        inputs = Inputs(tensors, signature, BatchSignature.of(given)[0], [inputs for _, inputs in found], is_unchanged)
        outputs = graph.run(options, inputs)
        if self.training.mode is not Mode.EAGER and not graph.forward.is_pure:
            for k, model in enumerate(members.models):  # Dynamo's code sets the attributes that the model sets
                graph.outputs = tuple([output[k].clone() for output in outputs])  # rows may be interleaved in memory
                function(model, *signature.batch(members.part(tensors, k)))
            graph.outputs = ()
        losses: Tensor = outputs[graph.forward.loss]
        return losses

    def run_eager(self, batch: Sequence[Any]) -> Tensor:
        return self.members.eager(self.loss_fn, *self.read(batch))


class EnsembleStep(GraphStep):
    """Steps of all members with one forward graph. Dynamo's code calls it for each member, to set that member's attributes."""

    def __init__(
        self,
        forward: ForwardGraph,
        training: Training,
        members: Members,
        loss_fn: Callable[..., Tensor],
        kind: type[EnsembleProgram],
    ) -> None:
        super().__init__(forward, training, members.optimizers[0])
        self.members, self.loss_fn, self.kind = members, loss_fn, kind
        self.outputs: tuple[Any, ...] = ()  # outputs of the forward graph for the member whose attributes are being set
        self.are_apart = True  # no member's step changes what the forward pass of another reads

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        return self.outputs

    def eager(self, inputs: Inputs) -> tuple[Any, ...]:  # type: ignore[override]
        def check_member(k: int) -> None:
            self.are_apart = self.are_apart and inputs.is_unchanged(k)

        losses = self.members.eager(self.loss_fn, inputs.batch, inputs.signature, check_member)
        return tuple([losses if i == self.forward.loss else None for i in range(self.forward.outputs)])

    def obstacle(self, inputs: Inputs) -> str:  # type: ignore[override]
        if not self.are_apart:
            return "a member's step sets something that the next member reads"
        return super().obstacle([x for own in inputs.inputs for x in own])

    def program(self, inputs: Inputs) -> EnsembleProgram:  # type: ignore[override]
        pairs = zip(self.members.optimizers, inputs.inputs, strict=True)
        steps = [FunctionalStep(self.forward, optimizer, own) for optimizer, own in pairs]
        first = steps[0]
        for k, step in enumerate(steps):
            if step.roles != first.roles:
                raise ValueError(f"member {k} differs from member 0 in which parameters its optimizer trains")
            if step.layout != first.layout:
                raise NeedsEagerPass("the optimizers of the members hold different kinds of state")
        return self.kind(self.members, steps, inputs)
