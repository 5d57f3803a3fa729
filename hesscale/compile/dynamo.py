"""TorchDynamo captures the forward pass and guards it: a graph is used only while all that its Python code read is the same."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.nn.modules import module

from .. import losses
from .make_fx import first_line

MAX_GRAPHS = 8  # forward graphs of one step; as many as Dynamo captures of one function by default
LossFunction = Callable[..., Tensor]
Runner = Callable[..., tuple[Any, ...]]


class ForwardGraph(NamedTuple):
    """The forward pass as a graph of torch's operators.

    Attributes:
        run: takes parameters, buffers and all other tensors as arguments, in the order in which they were met.
        loss: which of its outputs is the loss. The others are tensors that the model keeps.
        outputs: how many there are.
    """

    run: Callable[..., Sequence[Any]]
    loss: int
    outputs: int


GLOBAL_HOOKS = [  # which Dynamo does not guard
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
]
HAS_GLOBAL_HOOKS = "hooks are registered for all modules, which no graph would call"


class NotCaptured(Exception):
    """The forward pass cannot be captured. Nothing has run."""

    is_lasting = True  # and will not be captured with other batches like this one either


class Captured:
    """A loss function, captured: ``(model, *batch) -> loss``.

    Args:
        loss_fn: ``(model, *batch) -> loss``.
        make_runner: makes of each forward graph what runs in its place: it takes the inputs of that graph, and returns what the
            graph returns. Dynamo calls it while the guards of the graph hold, and then sets the attributes that the model sets.
    """

    def __init__(self, loss_fn: LossFunction, make_runner: Callable[[ForwardGraph], Runner]) -> None:
        self.make_runner = make_runner
        self.graphs = 0
        self.forwards: dict[type, Any] = {}  # of the classes of modules, and None for those that inherit it
        self.is_configured = self.has_run = False
        allow_losses()
        own = weakref.ref(self)  # Dynamo keeps backends for good

        def backend(graph: GraphModule, example_inputs: list[Tensor]) -> Runner:
            captured = own()
            assert captured is not None
            return captured.backend(graph)

        def closure(model: nn.Module, *batch: Any) -> Tensor:
            return loss_fn(model, *batch).clone()

        # Dynamo keeps its graphs by code object: this gives every step its own.
        closure.__code__ = closure.__code__.replace(co_name=getattr(loss_fn, "__name__", type(loss_fn).__name__))
        self.compiled: Callable[..., Tensor] = torch.compile(closure, backend=backend, fullgraph=True, dynamic=False)

    def backend(self, graph: GraphModule) -> Runner:
        """What runs in place of a graph that Dynamo has captured."""
        if not self.is_configured:
            raise RuntimeError("a graph was captured without capture_config")
        runner = self.make_runner(forward_graph(graph))
        self.graphs += 1
        own = weakref.ref(self)

        def run(*inputs: Any) -> tuple[Any, ...]:
            captured = own()
            if captured is not None:
                captured.has_run = True
            return runner(*inputs)

        return run

    def __call__(self, model: nn.Module, *batch: Any) -> Tensor:
        """The loss, by a graph whose guards hold, or by a new one.

        Raises:
            NotCaptured: no graph has run.
        """
        self.has_run = False
        if any(GLOBAL_HOOKS):
            raise Hooked(HAS_GLOBAL_HOOKS)
        if self.graphs >= MAX_GRAPHS:
            return self.call_known(model, *batch)
        try:
            if self.graphs:
                return self.compiled(model, *batch)
        except Exception:  # something is new, but the settings are not those for a capture
            if self.has_run:
                raise
        try:
            self.is_configured = True
            self.forwards.update(forwards_of(model))
            with capture_config():
                return self.compiled(model, *batch)
        except Exception as error:
            if self.has_run:
                raise
            if isinstance(refusal := getattr(error, "inner_exception", None), NotCaptured):
                raise refusal from None
            raise NotCaptured(f"TorchDynamo cannot capture it: {reason_of(error)}") from error
        finally:
            self.is_configured = False

    def is_outdated(self) -> bool:
        """Whether a class of modules has another ``forward`` now: Dynamo guards that of each module, but not of its class."""
        return any(cls.__dict__.get("forward") is not forward for cls, forward in self.forwards.items())

    def call_known(self, model: nn.Module, *batch: Any) -> Tensor:
        """The loss, by a graph whose guards hold."""
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                return self.compiled(model, *batch)
        except Exception as error:
            if self.has_run:
                raise
            raise TooManyGraphs(TOO_MANY) from error


def forwards_of(model: nn.Module) -> dict[type, Any]:
    classes = dict.fromkeys([cls for kind in map(type, model.modules()) for cls in kind.__mro__])
    return {cls: cls.__dict__.get("forward") for cls in classes}


class TooManyGraphs(NotCaptured):
    """There is no graph for this call, and no room for another."""

    is_lasting = False


class Hooked(NotCaptured):
    """Modules have hooks that Dynamo does not guard."""

    is_lasting = False


TOO_MANY = (
    f"there have been more than {MAX_GRAPHS} kinds of batches and of values that the model and the loss read; "
    "pass numbers that change as tensors"
)


@contextlib.contextmanager
def capture_config() -> Iterator[None]:
    """Settings of Dynamo for one capture: guard hooks and tied parameters of modules too, and capture recurrent layers."""
    from torch._dynamo import config

    with config.patch(
        skip_nnmodule_hook_guards=False,
        skip_no_tensor_aliasing_guards_on_parameters=False,
        allow_rnn=True,
        accumulated_recompile_limit=2**20,
    ):
        yield


@functools.lru_cache(1)
def allow_losses() -> None:
    """Our losses are functions of their arguments alone; as one operator of the graph they keep their curvature rules."""
    from torch._dynamo import allow_in_graph

    for name in losses.__all__:
        allow_in_graph(getattr(losses, name))


def forward_graph(graph: GraphModule) -> ForwardGraph:
    """Dynamo's graph, without the ``clone`` by which the closure marks the loss: the last operator of all."""
    *_, mark, output = graph.graph.nodes
    outputs: Any = output.args[0]
    loss = outputs.index(mark)
    mark.replace_all_uses_with(mark.args[0])
    graph.graph.erase_node(mark)
    graph.recompile()
    for target in [node.target for node in graph.graph.nodes if node.op == "call_function"]:
        check_operator(target)
    return ForwardGraph(graph.forward, loss, len(outputs))


def check_operator(target: Any) -> None:
    """Refuse what does something else in Dynamo's graph than in eager mode."""
    name = getattr(target, "__name__", str(target))
    if isinstance(target, HigherOrderOperator):
        what = KNOWN_HIGHER_ORDER.get(name, f"it uses {name}")
        raise NotCaptured(f"{what}, which TorchDynamo's graph does not hold as it is")
    if name in RANDOM_STATE:
        raise NotCaptured(f"it calls {name}, and so sets the state that its random numbers come from")


KNOWN_HIGHER_ORDER = {
    "autograd_function_apply": "it uses a torch.autograd.Function of its own",
    "tag_activation_checkpoint": "it uses activation checkpoints",
}
RANDOM_STATE = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}


def reason_of(error: Exception) -> str:
    """Dynamo's reason in a line: its first line, and the explanation where it has one."""
    lines = [line.strip() for line in str(error).splitlines()]
    explanation = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    return f"{first_line(error)} ({explanation})" if explanation else first_line(error)
