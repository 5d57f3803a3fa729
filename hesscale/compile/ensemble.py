"""Many models trained at once: one step for all members of an ensemble."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .dynamo import GLOBAL_HOOKS, HAS_GLOBAL_HOOKS
from .member import Member
from .members import Members, SeparateMembers, StackedMembers
from .program import Code, Mode, Program
from .restore import restored
from .signature import BatchSignature, tensor_signature
from .staged import MAX_EAGER_STEPS, StagedStep
from .step import check_backend, curvature_phases

MAX_STEPS = 16  # kinds of steps that are kept


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

    Modules, their attributes and hooks are fixed when the ensemble is made: where a change is noticed, the step raises.
    ``training``, ``requires_grad`` and the optimizers' numbers may change. What ``loss_fn`` reads besides its arguments is
    constant, as for ``jax.jit``.

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
    check_backend(backend)
    members = [Member(model, loss_fn, optimizer, options) for model, optimizer in zip(models, optimizers, strict=True)]
    return Ensemble(HOW[how](members, batch_dims), backend, cuda_graph)


HOW: dict[str, type[Members]] = {"vmap": StackedMembers, "abreast": SeparateMembers}


class Ensemble:
    """A training step of many models; see :func:`ensemble`. It has the attributes and methods of a compiled step."""

    def __init__(self, members: Members, backend: str, cuda_graph: bool) -> None:
        self.members, self.backend, self.cuda_graph = members, backend, cuda_graph
        self.steps: dict[object, StagedStep] = {}
        self.key: object = None
        self.step: StagedStep | None = None
        self.repeat: tuple[BatchSignature, EnsembleProgram, list[Tensor]] | None = None

    @property
    def mode(self) -> str:
        return (Mode.EAGER if self.step is None else self.step.mode).value

    @property
    def reason(self) -> str:
        return "" if self.step is None else self.step.reason

    @property
    def compilations(self) -> int:
        return sum([step.builds for step in self.steps.values()])

    @property
    def modes(self) -> list[str]:
        """How every kind of step has run, such as those with and without new curvature."""
        return sorted({step.mode.value for step in self.steps.values()})

    def __call__(self, *batch: Any) -> Tensor:
        self.repeat = None
        tensors, signature = BatchSignature.of(batch)
        if signature.obstacle and not tensors:
            raise TypeError(signature.obstacle)
        key = signature, self.members.signature(), surroundings()
        if self.step is None or key != self.key:
            self.key, self.step = key, self.step_for(key, signature)
        losses: Tensor = self.step(tensors)[0]
        return losses

    def step_for(self, key: object, signature: BatchSignature) -> StagedStep:
        """The step for such a batch and such options; a new one takes the place of the oldest where there are too many."""
        if key not in self.steps:
            if len(self.steps) >= MAX_STEPS:
                self.steps.pop(next(iter(self.steps)))
            found = [HAS_GLOBAL_HOOKS] if any(GLOBAL_HOOKS) else []
            found += [reason for member in self.members.members if (reason := member.obstacle())]
            self.steps[key] = StagedStep(
                EnsembleSource(self.members, signature),
                compiles=self.backend == "inductor",
                captures=self.cuda_graph and self.members.first.parameters[0].is_cuda,
                obstacle="" if self.backend == "eager" else signature.obstacle or (found[0] if found else ""),
            )
            if self.backend == "eager":
                self.steps[key].next_build = None
        return self.steps[key]

    def again(self, *batch: Any) -> Tensor:
        """A step as the last one, with another batch: that nothing else has changed since is not checked.

        See :meth:`hesscale.compile.step.CompiledStep.again`.
        """
        tensors, signature = BatchSignature.of(batch)
        if self.repeat is not None and self.repeat[0] == signature:
            _, repeated, arguments = self.repeat
            losses: Tensor = repeated([*arguments, *tensors])[0]
            return losses
        losses = self(*batch)
        program = None if self.step is None or not self.step.is_settled else self.step.program
        if isinstance(program, EnsembleProgram) and self.members.first.optimizer.repeats_itself:
            self.repeat = signature, program, program.arguments[: len(program.arguments) - len(tensors)]
        return losses

    def warm_up(self, *batch: Any) -> None:
        """Compile the step for such batches without training; see :meth:`hesscale.compile.step.CompiledStep.warm_up`."""
        models = [member.model for member in self.members.members]
        optimizers = [member.optimizer.optimizer for member in self.members.members]
        with restored(models, optimizers):
            for phase in curvature_phases(optimizers[0]):
                for _ in range(MAX_EAGER_STEPS + 4):
                    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
                        group["step_count"] = phase
                    self(*batch)
                    if self.step is None or self.step.is_settled:
                        break
        self.repeat = None


def surroundings() -> tuple[object, ...]:
    """Settings of torch that decide what a step does."""
    return (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        any(GLOBAL_HOOKS),
    )


class EnsembleSource:
    """Makes steps of an ensemble for batches of one signature."""

    def __init__(self, members: Members, signature: BatchSignature) -> None:
        self.members, self.signature = members, signature

    def eager(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (self.members.eager(inputs, self.signature),)

    def obstacle(self, inputs: Sequence[Any]) -> str:
        return ""

    def program(self, inputs: Sequence[Any]) -> Program:
        self.members.prepare()
        return EnsembleProgram(self.members, self.signature, inputs)


class EnsembleProgram(Program):
    """The step of an ensemble. Its arguments are the members' tensors, the optimizers' numbers, and the batch."""

    def __init__(self, members: Members, signature: BatchSignature, batch: Sequence[Tensor]) -> None:
        self.members, self.layout = members, members.layout()
        self.batch_size = len(batch)
        arguments = [*members.tensors(self.layout), *members.numbers(), *batch]
        super().__init__(members.trace(self.layout, signature, arguments), arguments)
        members.prepare()  # the trace may have found buffers that the model replaces
        self.own = members.tensors(self.layout)
        self.signatures = [tensor_signature(tensor.detach()) for tensor in self.own]
        self.location = members.location()
        self.arguments = [*self.own, *members.numbers(), *batch]

    def arrange(self, code: Code) -> Code:
        return self.members.arrange(code, self.layout)

    def fits(self, inputs: Sequence[Any]) -> bool:
        members = self.members
        if members.location() != self.location:
            members.prepare()
            try:
                self.own = members.tensors(self.layout)
            except KeyError:  # the optimizers' state is another one now
                return False
            self.location = members.location()
            if [tensor_signature(tensor.detach()) for tensor in self.own] != self.signatures:
                return False
        self.arguments = [*self.own, *members.numbers(), *inputs]
        return True

    def finish(self, results: Sequence[Any]) -> tuple[Any, ...]:
        losses, *etas = results
        self.members.record_step(etas)
        return (losses,)

    def example(self) -> Sequence[Tensor]:
        return self.members.example(self.layout, self.arguments)

    def shares_memory(self) -> bool:
        return any(member.shares_memory(self.layout) for member in self.members.members)

    def copied_arguments(self, moved: set[int]) -> set[int]:
        count = len(self.arguments)
        return set(range(count - self.batch_size, count))
