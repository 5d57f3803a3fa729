"""A whole training step as one graph: forward, gradients, Hessian diagonals and the optimizer's update."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import CompileWarning, NeedsEagerPass
from .holdings import clusters
from .make_fx import CannotTrace, compile_graph
from .signature import Shape, kind_of
from .subject import Layout, Subject, Trained

BACKENDS = ("inductor", "traced", "eager")
MOST_GRAPHS = 16
MOST_BUILDS = 4  # of one graph, whose tensors turn out to be others than it was made for
LAST_ATTEMPT = 64  # to trace what is not settled yet


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
    evaluation go on as ever. The first call with batches of a new shape runs in eager mode, the second compiles, which takes
    seconds, and later ones are fast. Gradients do not pass through ``.grad``, which is None afterwards.

    Whatever is not a tensor is a constant of the graph: the step is compiled anew when the shapes of the batch, an option of the
    optimizer other than its step size, attributes of the model, or plain values that ``loss_fn`` names change. What it reads in a
    more roundabout way is frozen. Where a step cannot be compiled, it is run as a graph that is not, or in eager mode, and a
    :class:`hesscale.CompileWarning` says why.

    Args:
        model: holds every parameter of the optimizer.
        loss_fn: ``loss_fn(model, *batch) -> loss``; its tensors come from the model and the batch alone.
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
    return CompiledStep(Subject(model, loss_fn, optimizer, options), backend, cuda_graph)


class CompiledStep:
    """A training step that compiles itself; see :func:`compile_step`.

    Attributes:
        mode: how the last call ran: ``"eager"``, ``"traced"``, ``"compiled"`` or ``"compiled + CUDA graph"``.
        reason: why it ran in no better way, where that is so.
    """

    def __init__(self, subject: Trained, backend: str, cuda_graph: bool) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
        self.subject, self.backend, self.cuda_graph = subject, backend, cuda_graph
        self.graphs: dict[object, Graph] = {}
        self.last: tuple[object, Graph | None] = None, None
        self.is_crowded = False
        self.mode, self.reason = "eager", ""

    def __call__(self, *batch: Any) -> Tensor:
        tensors, shape = Shape.of(batch)
        key = shape, self.subject.circumstances()
        last_key, last_graph = self.last  # to compare what is mostly the same objects takes less than a hash
        graph = last_graph if last_graph is not None and key == last_key else self.graph_for(key, shape)
        loss = graph(batch, tensors)
        self.mode, self.reason = graph.mode, graph.reason
        return loss

    def again(self, *batch: Any) -> Tensor:
        """A step as the last one, with another batch: that nothing else has changed since is not checked.

        For loops whose steps take less time than the checks: call the step itself once after every change to its model, its
        optimizer or their options (a step size, ``load_state_dict`` …), and this in between. Curvature that is due at some steps
        only (``curvature_every``), and batches of another shape, are seen.
        """
        tensors, shape = Shape.of(batch)
        _, graph = self.last
        if graph is None or graph.shape != shape or not graph.can_repeat():
            return self(*batch)
        return graph.run_on(graph.own_now, tensors)

    def graph_for(self, key: object, shape: Shape) -> Graph:
        """The graph for such steps; one that is new is kept if there is room and the key can be one."""
        can_keep = is_hashable(key)  # unless an attribute of the model or an option has become something odd
        if not can_keep or key not in self.graphs:
            graph = self.new_graph(shape)
            if not can_keep or len(self.graphs) >= MOST_GRAPHS:
                self.last = None, None  # nothing to repeat
                return graph
            self.graphs[key] = graph
        self.last = key, self.graphs[key]
        return self.graphs[key]

    def new_graph(self, shape: Shape) -> Graph:
        graph = Graph(self.subject, shape, self.backend, self.cuda_graph)
        if self.backend != "eager" and (obstacle := shape.obstacle or self.subject.obstacle()):
            graph.give_up(obstacle)
        if len(self.graphs) >= MOST_GRAPHS:
            self.graphs = {key: known for key, known in self.graphs.items() if known.run is not None}
            if self.backend != "eager" and not self.is_crowded:
                self.is_crowded = True
                warn(f"some steps run in eager mode; {CROWDED}")
        if self.is_crowded:
            graph.reason = graph.reason or CROWDED
        return graph


CROWDED = (
    f"there have been more than {MOST_GRAPHS} kinds of batches, options of the optimizer, attributes of the model, and values "
    "that the loss names; pass numbers that change as tensors"
)


class Graph:
    """The step for batches of one shape: in eager mode at first, then traced, compiled, and captured in a CUDA graph."""

    def __init__(self, subject: Trained, shape: Shape, backend: str, cuda_graph: bool) -> None:
        self.subject, self.shape, self.backend, self.cuda_graph = subject, shape, backend, cuda_graph
        self.mode, self.reason = "eager", ""
        self.calls, self.attempt = 0, 0 if backend == "eager" else 2  # the call at which to trace
        self.builds = 0
        self.layout = Layout([], [])
        self.run: Callable[..., Sequence[Any]] | None = None
        self.kinds: list[object] = []  # of tensors that it was made for
        self.kept: list[Tensor] = []  # so that no other takes its place unseen
        self.own: list[Tensor] = []  # the same without a graph, whose memory is kept too
        self.glance: list[object] = []
        self.own_now: list[Tensor] = []  # with numbers, at the last call
        self.captured: Captured | None = None

    def __call__(self, batch: Sequence[Any], tensors: list[Tensor]) -> Tensor:
        self.calls += 1
        is_new = self.calls == self.attempt
        if is_new:
            self.build(tensors)
        own = None if self.run is None else self.arguments()
        if own is None or self.run is None:
            try:
                return self.subject.step(batch)[0]
            except Exception:
                if is_new:  # what went wrong now went wrong in the trace as well: try again
                    self.calls, self.attempt, self.reason = 0, 2, ""
                raise
        self.own_now = own
        return self.run_on(own, tensors)

    def run_on(self, own: list[Tensor], tensors: list[Tensor]) -> Tensor:
        assert self.run is not None
        with torch.no_grad(), torch._C._DisableAutocast():  # the graph holds the casts
            if self.cuda_graph and self.calls > self.attempt:
                loss, *etas = self.replay(self.run, own, tensors)
            else:
                loss, *etas = self.run(*own, *tensors)
        self.subject.note_step(etas)
        return loss

    def can_repeat(self) -> bool:
        """Whether the next step is the same as the last one."""
        is_ready = self.run is not None and bool(self.own_now) and (self.captured is not None or not self.cuda_graph)
        return is_ready and self.subject.is_steady()

    def arguments(self) -> list[Tensor] | None:
        """What a step reads and changes, but for the batch; None, and back to the start, if the graph was not made for such."""
        if self.glance != self.subject.glance():
            self.captured = None
            self.subject.settle()
            try:
                self.kept = self.subject.own_tensors(self.layout)
            except KeyError:  # the optimizer's state is another one now
                self.kept = []
            self.own = [tensor.detach() for tensor in self.kept]
            self.glance = self.subject.glance()
            if self.kinds != kinds_of(self.own):
                self.mode, self.run, self.kept, self.own, self.own_now, self.glance = "eager", None, [], [], [], []
                self.calls, self.attempt = 1, 2
                return None
        return [*self.own, *self.subject.number_tensors()]

    def build(self, tensors: list[Tensor]) -> None:
        """Trace the step and compile it, as far as that goes."""
        self.reason = ""
        if self.builds >= MOST_BUILDS:
            self.give_up("the model's tensors or the optimizer's state change their shapes or types again and again")
            return
        self.subject.settle()
        try:
            self.layout = self.subject.layout()
            own = self.subject.own_tensors(self.layout)
            self.kinds = kinds_of([tensor.detach() for tensor in own])
            arguments = [*own, *self.subject.number_tensors(), *tensors]
            graph = self.subject.trace(self.layout, self.shape, arguments)
        except NeedsEagerPass as error:
            self.attempt *= 2
            if self.attempt > LAST_ATTEMPT:
                self.give_up(str(error))
            return
        except CannotTrace as error:
            self.give_up(f"it cannot be traced: {error}")
            return
        self.builds += 1
        self.mode, self.run = "traced", self.subject.arranged(graph)
        self.cuda_graph = self.cuda_graph and self.backend == "inductor" and own[0].is_cuda
        if self.backend == "inductor":
            try:
                if len(set(clusters(own))) < len(own):
                    raise RuntimeError("buffers share memory, which its code would change in another order")
                self.run = self.subject.arranged(compile_graph(graph, self.subject.example(self.layout, arguments)))
                self.mode = "compiled"
            except Exception as error:  # whatever went wrong in the compiler, the graph is right
                self.cuda_graph, self.reason = False, f"TorchInductor cannot compile it: {first_line(error)}"
                warn(f"the step runs as a graph that is not compiled; {self.reason}")

    def give_up(self, reason: str) -> None:
        self.attempt, self.reason = 0, reason
        warn(f"the step runs in eager mode; {reason}")

    def replay(self, run: Callable[..., Sequence[Any]], own: list[Tensor], tensors: list[Tensor]) -> Sequence[Tensor]:
        """Run from a CUDA graph, captured anew where parameters or state have moved in memory."""
        if self.captured is None:
            try:
                self.captured = Captured(run, own, tensors)
            except RuntimeError as error:
                self.cuda_graph, self.reason = False, f"it cannot be captured in a CUDA graph: {first_line(error)}"
                warn(f"the step runs without a CUDA graph; {self.reason}")
                return run(*own, *tensors)
            self.mode = "compiled + CUDA graph"
        return self.captured.replay(tensors)


class Captured:
    """A CUDA graph of a compiled step, which reads its batch from memory of its own."""

    def __init__(self, run: Callable[..., Sequence[Any]], own: list[Tensor], tensors: list[Tensor]) -> None:
        if elsewhere := [tensor.device for tensor in (*own, *tensors) if not tensor.is_cuda]:
            raise RuntimeError(f"a tensor of the batch or the model is on the {elsewhere[0]}")
        self.batch = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in tensors]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = list(run(*own, *self.batch))

    def replay(self, tensors: list[Tensor]) -> list[Tensor]:
        for held, tensor in zip(self.batch, tensors, strict=True):
            held.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return [output.clone() for output in self.outputs]


def kinds_of(tensors: list[Tensor]) -> list[object]:
    """What a graph is made for, and which of them share memory."""
    return [*map(kind_of, tensors), clusters(tensors)]


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def warn(message: str) -> None:
    """Warn about the line outside this package that called."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("hesscale."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, CompileWarning, stacklevel=level)
