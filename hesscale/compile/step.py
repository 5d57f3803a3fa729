"""A whole training step as one graph: forward pass, gradients, Hessian diagonals and the optimizer's update."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.replicas import is_replicated
from ..distributed.shards import is_sharded
from ..optim import CurvatureOptimizer
from .dynamo import Captured, ForwardGraph, NotCaptured, Runner, TooManyGraphs
from .graph_step import ModelStep, Training
from .optimizer import FunctionalOptimizer
from .restore import restored
from .signature import BatchSignature
from .staged import MAX_EAGER_STEPS, warn

MAX_MISSES = 32
BACKENDS = ("inductor", "traced", "eager")
MAX_WARM_UP = MAX_EAGER_STEPS + 4  # the most steps it can take until all later ones run the same way


def compile_step(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    backend: str = "inductor",
    cuda_graph: bool = True,
    **options: Any,
) -> CompiledStep:
    """Return a compiled function ``step(*batch) -> loss`` that trains ``model`` by one step of ``optimizer``.

    The function changes the parameters and buffers of the model, and the state of the optimizer, in place. Schedulers,
    ``state_dict`` and evaluation work as usual. Gradients do not pass through ``.grad``, which is None afterwards.

    TorchDynamo captures ``loss_fn`` and the model. It guards every value that their Python code reads. If one of these values has
    changed, the step is compiled again. The first step with a new graph runs in eager mode. The second step compiles, which takes
    seconds, and later steps are fast. If a step cannot be captured, it runs in eager mode. If it cannot be compiled, its traced
    graph runs. In both cases, a :class:`hesscale.CompileWarning` says why.

    Args:
        model: the first argument of ``loss_fn``.
        loss_fn: ``loss_fn(model, *batch) -> loss``.
        optimizer: an optimizer of hesscale or of torch.
        backend: ``"inductor"`` compiles the graph. ``"traced"`` runs the flat graph, which needs no compiler. ``"eager"`` runs
            the step in eager mode.
        cuda_graph: capture the step in a CUDA graph if the model is on a GPU.
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
    check_backend(backend)
    if backend != "eager" and is_replicated(model.parameters()):
        raise ValueError(
            "a compiled step cannot average gradients and Hessian diagonals over the processes of DistributedDataParallel. Pass "
            "backend='eager', or train with optimizer.backward(loss) and optimizer.step()"
        )
    if backend != "eager" and any(is_sharded(p) for p in model.parameters()):
        raise ValueError(
            "compile_step does not support DTensors, as under fully_shard (FSDP2) and tensor parallelism. Pass backend='eager', "
            "or train with optimizer.backward(loss) and optimizer.step()"
        )
    return CompiledStep(model, loss_fn, FunctionalOptimizer(optimizer, options), Training(backend, cuda_graph))


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")


class CapturedStep(ABC):
    """A training step whose forward pass TorchDynamo captures. If it cannot, the step runs in eager mode.

    Attributes:
        mode: how the last call ran: ``"eager"``, ``"traced"``, ``"compiled"``, ``"traced + CUDA graph"`` or
            ``"compiled + CUDA graph"``.
        reason: why it did not run in a faster mode; empty if there is no such reason.
        compilations: how many programs have been traced, and compiled where that is possible.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        loss_fn: Callable[..., Tensor],
        optimizers: Sequence[FunctionalOptimizer],
        training: Training,
    ) -> None:
        self.models, self.loss_fn, self.optimizers, self.training = models, loss_fn, optimizers, training
        self.captured: Captured | None = None
        self.refusal = ""  # why the last step was not captured
        self.refused: dict[BatchSignature, str] = {}  # why batches with these signatures are not captured
        self.misses, self.max_misses = 0, MAX_MISSES  # steps in a row without a graph; above the maximum, all graphs are dropped
        self.warned: set[str] = set()  # reasons that have been given in a warning
        self.repeat: tuple[BatchSignature, Callable[[Sequence[Tensor]], Tensor]] | None = (
            None  # the last step as a function of the batch
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy or a pickle, without graphs. A copy captures and compiles its own graphs."""
        own: dict[str, Any] = {"training": replace(self.training, last=None), "captured": None, "refused": {}, "repeat": None}
        return {**self.__dict__, **own}

    @property
    def mode(self) -> str:
        return self.training.mode.value

    @property
    def reason(self) -> str:
        return self.refusal if self.training.last is None else self.training.last.reason

    @property
    def compilations(self) -> int:
        return self.training.compilations

    def __call__(self, *batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self(*batch)
        training = self.training
        training.last, self.repeat, self.refusal = None, None, ""
        if training.backend == "eager":
            return self.eager(batch, "")
        if self.refused and (reason := self.refused.get(BatchSignature.of(batch)[1])):
            return self.eager(batch, reason)
        if self.captured is None or self.captured.is_outdated:
            self.captured = Captured(self.loss_fn, self.graph_step)
        try:
            loss = self.run(self.captured, batch)
            self.misses = 0
            return loss
        except NotCaptured as refusal:
            found: NotCaptured = refusal
        loss = self.eager(batch, str(found))  # if the loss function fails, the error is raised here and no refusal is stored
        self.remember(found, batch)
        return loss

    def remember(self, refusal: NotCaptured, batch: Sequence[Any]) -> None:
        """Warn once for each reason not to capture. After many steps in a row without a graph, drop all graphs."""
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
        self.refusal = reason
        with without_compiled_parts():
            return self.run_eager(batch)

    def again(self, *batch: Any) -> Tensor:
        """Repeat the last step with another batch, without checking that nothing else has changed.

        Use it in loops whose steps take less time than the checks. Call the step itself once after every change to its model, its
        optimizer or their options (a step size, ``load_state_dict`` …), and ``again`` in between. Batches of another shape, and
        steps at which curvature is due (``curvature_every``), are still detected.
        """
        tensors, signature = BatchSignature.of(batch)
        is_plain = not signature.obstacle and len({*map(id, tensors)}) == len(tensors)
        if self.repeat is not None and self.repeat[0] == signature and is_plain:
            return self.repeat[1](tensors)
        loss = self(*batch)
        step = self.training.last
        if is_plain and step is not None and step.is_settled and step.program is not None:
            repeat = step.program.repetition(tensors)
            self.repeat = None if repeat is None else (signature, repeat)
        return loss

    def warm_up(self, *batch: Any) -> None:
        """Compile the step for batches like this one, without training.

        Parameters, buffers, the optimizer's state and the state of torch's random number generators are restored. Anything
        else that the model's code changes, such as its counters and lists, stays changed.
        """
        optimizers = [functional.optimizer for functional in self.optimizers]
        with restored(self.models, optimizers):
            for phase in curvature_phases(optimizers[0]):
                for _ in range(MAX_WARM_UP):
                    for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
                        group["step_count"] = phase
                    self(*batch)
                    if self.training.last is None or self.training.last.is_settled:
                        break
        self.repeat = None

    @abstractmethod
    def graph_step(self, forward: ForwardGraph) -> Runner:
        """The function that Dynamo calls in place of a forward graph."""

    @abstractmethod
    def run(self, captured: Captured, batch: Sequence[Any]) -> Tensor:
        """A step with a captured graph."""

    @abstractmethod
    def run_eager(self, batch: Sequence[Any]) -> Tensor:
        """A step in eager mode, by the model's own code."""


class CompiledStep(CapturedStep):
    """A training step that compiles itself, which :func:`compile_step` returns."""

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Tensor], optimizer: FunctionalOptimizer, training: Training
    ) -> None:
        self.model, self.optimizer = uncompiled(model), optimizer.optimizer
        super().__init__([self.model], loss_fn, [optimizer], training)

    def graph_step(self, forward: ForwardGraph) -> Runner:
        return ModelStep(forward, self.training, self.model, self.optimizers[0])

    def run(self, captured: Captured, batch: Sequence[Any]) -> Tensor:
        function, given = captured.function(self.model, batch)
        loss = function(self.model, *given)
        self.training.raise_error()
        return loss

    def run_eager(self, batch: Sequence[Any]) -> Tensor:
        return self.optimizers[0].train_model(self.model, self.loss_fn, batch)


def curvature_phases(optimizer: torch.optim.Optimizer) -> list[int]:
    """Step counts at which to compile, one for each kind of step: with new curvature, and without."""
    if not isinstance(optimizer, CurvatureOptimizer):
        return [0]
    first = {optimizer.phase_at(count): count for count in reversed(range(optimizer.period))}
    return sorted(first.values())


def uncompiled(model: nn.Module) -> nn.Module:
    """The model without its ``torch.compile`` wrapper, if it has one: with it, the model would be compiled twice."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found


def without_compiled_parts() -> contextlib.AbstractContextManager[Any]:
    """Run parts of the model that are under torch.compile in eager mode, where the engine sees their operators."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]
