"""A whole training step as one graph: forward pass, gradients, Hessian diagonals and the optimizer's update."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .dynamo import Captured, NotCaptured, TooManyGraphs
from .graph_step import GraphProgram, GraphStep, Training
from .optimizer import FunctionalOptimizer
from .program import Mode
from .restore import restored
from .signature import BatchSignature
from .staged import MAX_EAGER_STEPS, StagedStep, warn

MAX_MISSES = 32
BACKENDS = ("inductor", "traced", "eager")
MAX_WARM_UP = MAX_EAGER_STEPS + 4  # steps until one runs as all later ones will


def compile_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    backend: str = "inductor",
    cuda_graph: bool = True,
    **options: Any,
) -> CompiledStep:
    """A function ``step(*batch) -> loss`` that trains ``model`` by one step of ``optimizer``, compiled as a whole.

    It changes the model's own parameters and buffers and the optimizer's own state in place; schedulers, ``state_dict`` and
    evaluation go on as ever. Gradients do not pass through ``.grad``, which is None afterwards.

    TorchDynamo captures ``loss_fn`` and the model. It guards every value that their Python code reads, and a step is
    compiled anew where one of them has changed. The first step with a new graph runs in eager mode, the second compiles,
    which takes seconds, and later ones are fast. What cannot be captured or compiled runs as a graph that is not compiled,
    or in eager mode, and a :class:`hesscale.CompileWarning` says why.

    Args:
        model: the first argument of ``loss_fn``.
        loss_fn: ``loss_fn(model, *batch) -> loss``.
        optimizer: one of ours or of torch's.
        backend: ``"inductor"`` to compile; ``"traced"`` for the flat graph, which needs no compiler; ``"eager"``.
        cuda_graph: capture the step in a CUDA graph where the model is on a GPU.
        options: ``head`` and ``fallback`` of :func:`hesscale.backward`.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        >>> def loss_fn(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> step = hesscale.compile_step(model, loss_fn, optimizer, backend="traced")
        >>> losses = [float(step(torch.ones(2, 3), torch.zeros(2, 1))) for _ in range(20)]
        >>> losses[-1] < losses[0], step.mode
        (True, 'traced')
    """
    model = getattr(model, "_orig_mod", model)  # a model under torch.compile would be compiled twice
    check_backend(backend)
    training = Training(model, FunctionalOptimizer(optimizer, options), backend, cuda_graph)
    return CompiledStep(training, loss_fn)


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")


class CompiledStep:
    """A training step that compiles itself; see :func:`compile_step`.

    Attributes:
        model, loss_fn, optimizer: as given.
        mode: how the last call ran: ``"eager"``, ``"traced"``, ``"compiled"`` or ``"compiled + CUDA graph"``.
        reason: why it ran in no better way, where that is so.
        compilations: how many programs have been traced, and compiled where that is possible.
    """

    def __init__(self, training: Training, loss_fn: Callable[..., Tensor]) -> None:
        self.training, self.loss_fn = training, loss_fn
        self.model, self.optimizer = training.model, training.optimizer.optimizer
        self.captured: Captured | None = None
        self.refused: dict[BatchSignature, str] = {}  # why batches of such signatures are not captured
        self.misses, self.max_misses = 0, MAX_MISSES  # steps in a row without a graph, and how many there may be
        self.warned: set[str] = set()  # of what may pass
        self.repeat: Repeat | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes over; it captures and compiles for itself."""
        own: dict[str, Any] = {"training": replace(self.training, last=None), "captured": None, "refused": {}, "repeat": None}
        return {**self.__dict__, **own}

    @property
    def mode(self) -> str:
        return self.training.mode.value

    @property
    def reason(self) -> str:
        return self.training.reason

    @property
    def compilations(self) -> int:
        return self.training.compilations

    def __call__(self, *batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self(*batch)
        training = self.training
        training.last = self.repeat = None
        if training.backend == "eager":
            return self.eager(batch, "")
        if self.refused and (reason := self.refused.get(BatchSignature.of(batch)[1])):
            return self.eager(batch, reason)
        if self.captured is None or self.captured.is_outdated:
            self.captured = Captured(self.loss_fn, lambda forward: GraphStep(forward, training))
        try:
            loss = self.captured(training.model, *batch)
            self.misses = 0
            return loss
        except NotCaptured as refusal:
            found: NotCaptured = refusal
        loss = self.eager(batch, str(found))  # errors of the loss itself are raised here, and nothing is remembered
        self.remember(found, batch)
        return loss

    def remember(self, refusal: NotCaptured, batch: Sequence[Any]) -> None:
        """Warn about what is not captured, once. After many steps without a graph, those that are there give way to others."""
        reason = str(refusal)
        if refusal.is_lasting:
            self.refused[BatchSignature.of(batch)[1]] = reason
        if refusal.is_lasting or reason not in self.warned:
            self.warned.add(reason)
            warn(f"the step runs in eager mode; {reason}")
        if isinstance(refusal, TooManyGraphs):
            self.misses += 1
            if self.misses > self.max_misses:
                self.captured, self.misses, self.max_misses = None, 0, 2 * self.max_misses

    def eager(self, batch: Sequence[Any], reason: str) -> Tensor:
        """A step in eager mode, by the model's own code."""
        training = self.training
        training.mode, training.reason = Mode.EAGER, reason
        with torch.enable_grad(), without_compiled_parts():
            loss = self.loss_fn(training.model, *batch)
        own = {id(p) for p in training.optimizer.parameters()}
        training.optimizer.train(loss, [p for p in training.model.parameters() if p.requires_grad and id(p) not in own])
        return loss.detach()

    def again(self, *batch: Any) -> Tensor:
        """A step as the last one, with another batch: that nothing else has changed since is not checked.

        For loops whose steps take less time than the checks: call the step itself once after every change to its model, its
        optimizer or their options (a step size, ``load_state_dict`` …), and this in between. Curvature that is due at some steps
        only (``curvature_every``), and batches of another shape, are noticed.
        """
        tensors, signature = BatchSignature.of(batch)
        repeat = self.repeat
        if repeat is not None and repeat.signature == signature and are_distinct(tensors):
            return repeat(tensors)
        loss = self(*batch)
        self.repeat = Repeat.of(self.training.last, tensors, signature)
        return loss

    def warm_up(self, *batch: Any) -> None:
        """Compile the step for such batches without training.

        Parameters, buffers, the optimizer's state and torch's random numbers are put back. What else the model's code changes,
        such as its counters and lists, stays changed.
        """
        optimizer = self.training.optimizer.optimizer
        with restored([self.training.model], [optimizer]):
            for phase in curvature_phases(optimizer):
                for _ in range(MAX_WARM_UP):
                    for group in optimizer.param_groups:
                        group["step_count"] = phase
                    self(*batch)
                    if self.training.last is None or self.training.last.is_settled:
                        break
        self.repeat = None


def curvature_phases(optimizer: torch.optim.Optimizer) -> range:
    """Numbers of steps that stand for all kinds of steps: with and without new curvature."""
    return range(min(2, getattr(optimizer, "curvature_every", 1)))


class Repeat(NamedTuple):
    """The last step, to be made again with another batch."""

    program: GraphProgram
    arguments: list[Any]  # with gaps for the tensors of the batch
    gaps: list[int | None]  # where each of these belongs, None for one that the loss does not read
    signature: BatchSignature

    @staticmethod
    def of(step: StagedStep | None, tensors: Sequence[Tensor], signature: BatchSignature) -> Repeat | None:
        """None where a step does more than its program, or has not come to its final mode."""
        program = None if step is None or not step.is_settled else step.program
        if (
            not isinstance(program, GraphProgram)
            or not program.forward.is_pure
            or not program.optimizer.repeats_itself
            or signature.obstacle
        ):
            return None
        place = {id(x): i for i, x in enumerate(program.arguments[: program.count])}
        if len(place) < program.count or not are_distinct(tensors):  # a tensor of the batch may be more than that
            return None
        gaps = [place.get(id(tensor)) for tensor in tensors]
        addresses = {x.data_ptr() for x in program.arguments[: program.count]}
        unread = [tensor for tensor, gap in zip(tensors, gaps, strict=True) if gap is None]
        if any(tensor.data_ptr() in addresses for tensor in unread):  # it is read, by another tensor object
            return None
        arguments = [None if i in gaps else x for i, x in enumerate(program.arguments)]
        return Repeat(program, arguments, gaps, signature)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        arguments = list(self.arguments)
        for gap, tensor in zip(self.gaps, tensors, strict=True):
            if gap is not None:
                arguments[gap] = tensor
        loss: Tensor = self.program(arguments)[0]
        return loss


def are_distinct(tensors: Sequence[Tensor]) -> bool:
    return len({*map(id, tensors)}) == len(tensors)


def without_compiled_parts() -> contextlib.AbstractContextManager[Any]:
    """Parts of the model that are under torch.compile run in eager mode, so that their operators can be seen."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
