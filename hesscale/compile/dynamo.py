"""TorchDynamo captures the forward pass and guards it: a graph is used only while all values that the code reads are the same."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext

from .. import losses
from .make_fx import TRACING, first_line

MAX_GRAPHS = 8  # forward graphs of one step; as many as Dynamo captures of one function by default
LossFunction = Callable[..., Tensor]
Runner = Callable[..., tuple[Any, ...]]


class ForwardGraph(NamedTuple):
    """The forward pass as a graph of torch's operators.

    Attributes:
        run: takes parameters, buffers and all other tensors as arguments, in the order in which the code reads them.
        loss: the index of the loss among the outputs. The others are tensors that the model stores in attributes.
        outputs: the number of outputs.
        is_pure: whether the code sets no attributes and reads no tensor under two names.
    """

    run: Callable[..., Sequence[Any]]
    loss: int
    outputs: int
    is_pure: bool


GLOBAL_HOOKS = [  # Dynamo does not guard these
    module._global_forward_hooks,
    module._global_forward_pre_hooks,
    module._global_backward_hooks,
    module._global_backward_pre_hooks,
]
HAS_GLOBAL_HOOKS = "hooks are registered for all modules, which a graph would not call"
HAS_FUNCTION_MODE = "a TorchFunctionMode is active, which would be called for the operators of the graph again"


class NotCaptured(Exception):
    """The forward pass cannot be captured. No code of the model has run."""

    is_lasting = True  # another attempt with a batch like this one would fail too


class TooManyGraphs(NotCaptured):
    """There is no graph for this call, and the limit on graphs is reached."""

    is_lasting = False


class UnguardedState(NotCaptured):
    """Global state, such as hooks for all modules, prevents the forward pass from being captured or guarded."""

    is_lasting = False


class InputsOnly(Exception):
    """Ends a call that was made only to get a graph and its inputs, before anything has run."""


class Captured:
    """A loss function that Dynamo captures.

    Args:
        loss_fn: ``(model, *batch) -> loss``.
        make_runner: returns the function that is called in place of a forward graph. That function has the inputs and outputs of
            the graph. It is called if the guards of the graph hold. Dynamo's code then sets the attributes that the model sets.
    """

    def __init__(self, loss_fn: LossFunction, make_runner: Callable[[ForwardGraph], Runner]) -> None:
        self.loss_fn, self.make_runner = loss_fn, make_runner
        self.runners: list[Runner] = []
        self.methods: list[tuple[type, str, Any]] = []  # captured by Dynamo, which does not guard them
        self.inputs_only = False
        self.found: tuple[Runner, Sequence[Any]] | None = None  # by a call that was made only for the inputs
        self.last: Callable[..., Tensor] | None = None  # Dynamo's code of the last call
        allow_losses()
        own = weakref.ref(self)  # Dynamo never frees a backend

        def backend(graph: GraphModule, example_inputs: list[Tensor]) -> Runner:
            captured = own()
            assert captured is not None
            return captured.backend(graph)

        def closure(model: nn.Module, *batch: Any) -> Tensor:
            return loss_fn(model, *batch).clone()

        # Dynamo caches graphs by code object, so every step needs its own code object.
        closure.__code__ = closure.__code__.replace(co_name=getattr(loss_fn, "__name__", type(loss_fn).__name__))
        self.closure = closure
        self.compiled: Callable[..., Tensor] = torch.compile(closure, backend=backend, fullgraph=True, dynamic=False)

    def backend(self, graph: GraphModule) -> Runner:
        """The function that is called in place of a graph that Dynamo has captured."""
        number, forward = len(self.runners), forward_graph(graph)
        self.runners.append(self.make_runner(forward))
        self.methods += captured_methods()
        nothing = (None,) * forward.outputs if forward.is_pure else None
        own = weakref.ref(self)  # Dynamo never frees the function that is returned here

        def run(*inputs: Any) -> tuple[Any, ...]:
            captured = own()
            assert captured is not None
            if captured.inputs_only:
                captured.found = captured.runners[number], inputs
                if nothing is None:
                    raise InputsOnly
                return nothing  # in less time: Dynamo's code only returns what it is given
            return captured.runners[number](*inputs)

        return run

    @property
    def is_outdated(self) -> bool:
        """Whether a method that was captured has been replaced in its class."""
        return any(getattr(owner, name, None) is not method for owner, name, method in self.methods)

    def function(self, model: nn.Module, batch: Sequence[Any]) -> tuple[Callable[..., Tensor], Sequence[Any]]:
        """Dynamo's code for a graph whose guards hold, or for a new one, and the batch to call it with.

        Raises:
            NotCaptured: there is no such graph, and none can be captured.
        """
        check_process()
        batch = tuple(batch)
        if function := self.guarded(model, batch):
            return function, batch
        aliases = aliases_of(batch)
        if not (function := self.guarded(model, aliases)):
            self.capture(model, aliases)
            function = self.guarded(model, aliases)
        if function is None:
            raise NotCaptured("TorchDynamo's guards do not hold for what it has just captured")
        return function, aliases

    def guarded(self, model: nn.Module, batch: Sequence[Any]) -> Callable[..., Tensor] | None:
        """Dynamo's code for the first of its graphs whose guards hold.

        ``self.compiled`` would find it too, but the Python wrapper of ``torch.compile`` takes as long as a small step.
        """
        frame = {"model": model, "batch": batch, "loss_fn": self.loss_fn}
        for entry in _debug_get_cache_entry_list(self.closure.__code__):
            if entry.guard_manager.check(frame):
                if self.last is None or self.last.__code__ is not entry.code:
                    self.last = FunctionType(entry.code, self.closure.__globals__, closure=self.closure.__closure__)
                return self.last
        return None

    def guards(self, function: Callable[..., Tensor]) -> Any:
        """Dynamo's guards of a graph; None if the graph is gone."""
        entries = _debug_get_cache_entry_list(self.closure.__code__)
        return next((entry.guard_manager for entry in entries if entry.code is function.__code__), None)

    def failed_guard(self, guards: Any, model: nn.Module, batch: Sequence[Any]) -> str:
        """Dynamo's description of the guard that does not hold; empty if all hold."""
        if guards is None:
            return "the graph is gone"
        frame = {"model": model, "batch": batch, "loss_fn": self.loss_fn}
        if guards.check(frame):
            return ""
        failed = guards.check_verbose(frame).verbose_code_parts
        return "; ".join([part.partition("  #")[0].strip() for part in failed]) or "a guard"

    def inputs(self, function: Callable[..., Tensor], model: nn.Module, batch: Sequence[Any]) -> tuple[Runner, Sequence[Any]]:
        """The function that is called in place of the graph, and its inputs. The function is not run."""
        self.inputs_only = True
        try:
            with contextlib.suppress(InputsOnly):
                function(model, *batch)
        finally:
            self.inputs_only = False
            found, self.found = self.found, None
        assert found is not None, "TorchDynamo's code has run without its graph"
        return found

    def capture(self, model: nn.Module, batch: Sequence[Any]) -> None:
        """Capture a graph with Dynamo, without running it."""
        if len(self.runners) >= MAX_GRAPHS:
            raise TooManyGraphs(TOO_MANY)
        if self.compiled is self.closure:
            raise NotCaptured("TorchDynamo is turned off")
        try:
            with TRACING, capture_config():
                self.inputs(self.compiled, model, batch)
        except Exception as error:
            if isinstance(refusal := getattr(error, "inner_exception", None), NotCaptured):
                raise refusal from None
            raise NotCaptured(f"TorchDynamo cannot capture it: {reason_of(error)}") from error


def check_process() -> None:
    """Raise UnguardedState for global state that Dynamo does not guard."""
    if any(GLOBAL_HOOKS):
        raise UnguardedState(HAS_GLOBAL_HOOKS)
    if has_function_mode():
        raise UnguardedState(HAS_FUNCTION_MODE)
    if torch._dynamo.eval_frame._stance.stance != "default":
        raise UnguardedState("torch.compiler.set_stance has turned TorchDynamo off")


def aliases_of(batch: Sequence[Any]) -> Sequence[Any]:
    """The batch with new tensor objects that share its memory. A tensor that occurs twice remains one object.

    Without this, if a tensor of the batch is also a global variable that the code reads, Dynamo makes both one input without a
    guard.
    """
    leaves, spec = pytree.tree_flatten(batch)
    others = {id(leaf): leaf.detach() for leaf in leaves if type(leaf) is Tensor and not leaf.requires_grad}
    found: Sequence[Any] = pytree.tree_unflatten([others.get(id(leaf), leaf) for leaf in leaves], spec)
    return found


def has_function_mode() -> bool:
    """Whether a ``TorchFunctionMode`` is active that may change what operators do; ``torch.device``'s does not."""
    if not torch._C._len_torch_function_stack():
        return False
    return any(not isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


TOO_MANY = (
    f"there have been more than {MAX_GRAPHS} kinds of batches and of values that the model and the loss read; "
    "pass numbers that change as tensors"
)


@contextlib.contextmanager
def capture_config() -> Iterator[None]:
    """Dynamo's settings for a capture: guard everything that can be guarded, and capture recurrent layers."""
    from torch._dynamo import config

    settings: dict[str, Any] = {
        "skip_nnmodule_hook_guards": False,
        "allow_rnn": True,
        "accumulated_recompile_limit": 2**20,
        "record_runtime_overhead": False,  # it would report to a profiler at every call
        # To save time, Dynamo assumes that some values do not change. The defaults differ between versions of torch.
        "assume_dunder_attributes_remain_unchanged": False,
        "guard_nn_modules_using_dict_tags": False,
        "skip_guards_on_constant_func_defaults": False,
        "skip_no_tensor_aliasing_guards_on_parameters": False,
        "skip_tensor_guards_with_matching_dict_tags": False,
        "use_recursive_dict_tags_for_guards": False,
    }
    with config.patch({name: value for name, value in settings.items() if hasattr(config, name)}):
        yield


@functools.lru_cache(1)
def allow_losses() -> None:
    """Keep each of our losses as one operator of the graph, so that its rule applies. A loss reads only its arguments."""
    from torch._dynamo import allow_in_graph

    for name in losses.__all__:
        allow_in_graph(getattr(losses, name))


def forward_graph(graph: GraphModule) -> ForwardGraph:
    """Dynamo's graph without its last operator, the ``clone`` by which the closure marks the loss."""
    check_sources(graph)
    *_, mark, output = graph.graph.nodes
    outputs: Any = output.args[0]
    loss = outputs.index(mark)
    mark.replace_all_uses_with(mark.args[0])
    graph.graph.erase_node(mark)
    graph.recompile()
    for target in [node.target for node in graph.graph.nodes if node.op == "call_function"]:
        check_operator(target)
    return ForwardGraph(graph.forward, loss, len(outputs), is_pure(graph))


def output_graph() -> Any:
    """Dynamo's ``OutputGraph`` of the capture that is running."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def is_pure(graph: GraphModule) -> bool:
    """Whether the code that is being captured has no side effects in Python, and reads no tensor under two names."""
    output = output_graph()
    inputs = [node.meta["grapharg"].source for node in graph.graph.nodes if node.op == "placeholder" and "grapharg" in node.meta]
    twice = [guard.create_fn.keywords["source_b"] for guard in output.guards if guard.create_fn_name() == "DUPLICATE_INPUT"]
    return not {*inputs} & {*twice} and not has_side_effects(output.side_effects)


def has_side_effects(side_effects: Any) -> bool:
    """Whether the code changes objects that existed before; objects that it creates itself do not count."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew
    from torch._dynamo.variables.misc import CellVariable, NewGlobalVariable

    modified = [variable for variable in side_effects.id_to_variable.values() if side_effects.is_modified(variable)]
    return bool(side_effects.tensor_hooks) or any(
        not isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew))
        or isinstance(variable, (CellVariable, NewGlobalVariable))
        for variable in modified
    )


def captured_methods() -> list[tuple[type, str, Any]]:
    """The methods that are being captured, by class and name: Dynamo guards an object's class, but not the class's methods."""
    output = output_graph()
    codes = set(output.tracing_context.traced_code)
    owners = {type(vars(variable).get("value")) for variable in output.side_effects.id_to_variable.values()}
    found: list[tuple[type, str, Any]] = []
    for owner in owners:
        names = {name for base in owner.__mro__ for name, value in vars(base).items() if is_code_of(value, codes)}
        names.update(["__call__", "forward"] if issubclass(owner, nn.Module) else [])
        found += [(owner, name, getattr(owner, name)) for name in names if isinstance(getattr(owner, name), FunctionType)]
    return found


def is_code_of(value: Any, codes: set[Any]) -> bool:
    return isinstance(value, FunctionType) and value.__code__ in codes


UNGUARDED = {  # Dynamo does not guard values that this code reads
    os.getenv.__code__: "the environment",
    os.environ.encodekey.__code__: "the environment",
    Mapping.__contains__.__code__: "which keys a mapping has",
    Mapping.get.__code__: "which keys a mapping has",
}
UNGUARDED_NAMES = {"mapping_get": "which keys a mapping has"}  # Dynamo's own code for Mapping.get


def check_sources(graph: GraphModule) -> None:
    """Raise NotCaptured if the graph contains values that may change by the next step and are not guarded."""
    for code in output_graph().tracing_context.traced_code:
        if what := UNGUARDED.get(code) or UNGUARDED_NAMES.get(code.co_name):
            raise NotCaptured(f"it reads {what}, which TorchDynamo does not guard")
    if any(node.op == "placeholder" and str(node.target).startswith("random_value") for node in graph.graph.nodes):
        raise NotCaptured("it draws Python's random numbers, which TorchDynamo would draw at other times")


def check_operator(target: Any) -> None:
    """Raise NotCaptured for operators that Dynamo's graph would run differently than eager mode."""
    name = getattr(target, "__name__", str(target))
    if isinstance(target, HigherOrderOperator):
        what = KNOWN_HIGHER_ORDER.get(name, f"it uses {name}")
        raise NotCaptured(f"{what}, which TorchDynamo's graph does not hold as it is")
    if getattr(getattr(target, "f", None), "__module__", "").startswith(("torch._numpy.random", "numpy.random")):
        raise NotCaptured(f"it calls numpy.random.{target.f.__name__}, for which TorchDynamo would draw other numbers")
    if not is_found_by_name(target):
        raise NotCaptured(f"{name} has been replaced where it was defined, and the graph would call the replacement")
    if name in RANDOM_STATE:
        raise NotCaptured(f"it calls {name}, which sets the state of a random number generator")


def is_found_by_name(target: Any) -> bool:
    """Whether the name by which a graph calls this function still refers to it. The function may have been replaced."""
    if not isinstance(target, FunctionType) or target.__module__ not in sys.modules or "<locals>" in target.__qualname__:
        return True
    found = getattr(sys.modules[target.__module__], target.__qualname__, target)
    return found is target


KNOWN_HIGHER_ORDER = {
    "autograd_function_apply": "it uses a torch.autograd.Function of its own",
    "tag_activation_checkpoint": "it uses activation checkpoints",
}
RANDOM_STATE = {"manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"}


def reason_of(error: Exception) -> str:
    """Dynamo's reason in one line: the first line of the error message, and the explanation if there is one."""
    lines = [line.strip() for line in str(error).splitlines()]
    explanation = next((line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")), "")
    return f"{first_line(error)} ({explanation})" if explanation else first_line(error)
