"""Traces a function that runs the engine into one flat graph of tensor operations, without autograd."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import NeedsEagerPass
from .workarounds.strides import without_strides

TRACING = threading.RLock()  # the settings while a graph is captured or recorded affect all threads


class CannotTrace(RuntimeError):
    """A function does something that a flat graph of tensor operations cannot represent."""


def trace(function: Callable[..., Any], tensors: Sequence[Tensor], *, constants: bool = False) -> GraphModule:
    """Record the operations of ``function(*tensors)``, including in-place changes of its arguments, without real data.

    Args:
        function: does not read the values of tensors, and uses no tensors besides its arguments.
        tensors: examples of its arguments.
        constants: the graph may contain tensors made from Python data, because the data is known not to change.

    Raises:
        CannotTrace: if the function reads values, or uses tensors that are not among its arguments.
        NeedsEagerPass: if the engine needs a pass with real numbers first.
    """

    def checked(*given: Tensor) -> Any:
        with TraceChecks():
            return function(*given)

    try:
        with TRACING, while_tracing(), noted_seeds() as seeds:
            graph = make_fx(checked, tracing_mode="fake")(*[tensor.detach() for tensor in tensors])
    except (NeedsEagerPass, CannotTrace):
        raise
    except Exception as error:  # any kind: the function has run on real tensors, so tracing is the cause
        raise CannotTrace(reason_of(error)) from error
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise CannotTrace(LOOKS)
        if node.op == "get_attr" and not can_be_constant(getattr(graph, node.target), constants):
            raise CannotTrace(MAKES)
        if seeds and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotTrace(SEEDS)
    return without_strides(graph)


def can_be_constant(value: Any, constants: bool) -> bool:
    """Whether the graph may contain this tensor as a constant. A single number, such as ``torch.tensor(0.5)``, always may be."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and (constants or value.dim() == 0)


@contextlib.contextmanager
def while_tracing() -> Iterator[None]:
    """Settings while a graph is recorded: hooks run in this thread, nothing reads values, and fused CPU kernels are off."""
    validates = Distribution._validate_args
    compiling = torch.compiler._is_compiling_flag
    fuses = torch._C._get_mkldnn_enabled()
    Distribution.set_default_validate_args(False)
    torch._C._set_mkldnn_enabled(False)  # it fuses recurrent layers, whose workspace a graph cannot contain
    torch.compiler._is_compiling_flag = True  # torch's optimizers and ours check it before they read a number
    try:
        with torch.autograd.set_multithreading_enabled(False), torch.no_grad():
            yield
    finally:
        Distribution.set_default_validate_args(validates)
        torch._C._set_mkldnn_enabled(fuses)
        torch.compiler._is_compiling_flag = compiling


@contextlib.contextmanager
def noted_seeds() -> Iterator[list[str]]:
    """A list of the calls in the block that set the state of a random number generator; a graph would not repeat them."""
    seen: list[str] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(function.__name__)
            return function(*args, **kwargs)

        return call

    setters = "set_rng_state", "manual_seed", "manual_seed_all", "seed"
    modules = torch, torch.random, torch.cuda, torch.cuda.random
    places = [(module, name) for module in modules for name in setters if hasattr(module, name)]
    before = [getattr(*place) for place in places]
    try:
        for place, function in zip(places, before, strict=True):
            setattr(*place, noted(function))
        yield seen
    finally:
        for place, function in zip(places, before, strict=True):
            setattr(*place, function)


ACCESS = {"__get__", "__set__", "__delete__"}  # access to attributes, such as requires_grad


class TraceChecks(TorchFunctionMode):
    """Refuses tensors that are not arguments, which a trace would not notice, and splits foreach operators into single calls.

    vmap cannot map foreach operators, and TorchInductor's code for them is sometimes wrong on a GPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        values = pytree.tree_leaves((args, kwargs))
        if any(isinstance(value, torch.Generator) for value in values):
            raise CannotTrace(DRAWS)
        if name not in ACCESS and any(is_real(value) for value in values):
            raise CannotTrace(OUTSIDE)
        if not name.startswith("_foreach_"):
            return func(*args, **kwargs)
        return apply_to_each(name.removeprefix("_foreach_"), *args, **kwargs)


def is_real(value: Any) -> bool:
    """Whether a value is a tensor with real data, which must not occur in a trace."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


CLAMPS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # if the other operand is a number


def apply_to_each(name: str, *args: Any, **kwargs: Any) -> list[Tensor] | None:
    """Apply the operator of this name to each tensor, as ``_foreach_<name>`` does. Arguments that are not lists are shared."""
    in_place = name.endswith("_")
    given = list(args)
    if name.startswith(("addcmul", "addcdiv")) and len(given) == 4:
        kwargs["value"] = given.pop()
    elif name.startswith("lerp") and isinstance(given[2], Tensor):
        given[2] = given[2].to(given[0][0].dtype)
    elif name.removesuffix("_") in CLAMPS and not any(isinstance(t, Tensor) for t in pytree.tree_leaves(given[1])):
        name = name.replace(name.removesuffix("_"), CLAMPS[name.removesuffix("_")])
    operator = getattr(Tensor if in_place else torch, name, None) or functools.partial(written_back, name.removesuffix("_"))
    count = next(len(arg) for arg in given if isinstance(arg, (list, tuple)))

    def part(value: Any, i: int) -> Any:
        return value[i] if isinstance(value, (list, tuple)) else value

    results = [operator(*[part(arg, i) for arg in given], **{k: part(v, i) for k, v in kwargs.items()}) for i in range(count)]
    return None if in_place else results


def written_back(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x.copy_(getattr(torch, name)(x, *args, **kwargs))


def reason_of(error: Exception) -> str:
    """Why a function cannot be traced, in one line."""
    text = f"{type(error).__name__}: {error}"
    return next((reason for sign, reason in REASONS.items() if sign in text), text.partition("\n")[0])


LOOKS = "it reads the values of tensors, as `if loss > 1` or .item() do"
OUTSIDE = "it uses a tensor that is neither in the model nor an argument: pass it to the step, or make it a buffer of the model"
SEEDS = "it sets the state of a random number generator, as checkpointing with dropout does"
DRAWS = "it draws from its own torch.Generator, which a graph cannot do"
SIZED = "the shape of one of its tensors depends on values"
MAKES = "it makes a tensor of Python data, which is read only once: pass the tensor to the step, or make it a buffer of the model"
REASONS = {
    "DataDependentOutputException": LOOKS,
    "GuardOnDataDependentSymNode": LOOKS,
    "DynamicOutputShapeException": SIZED,
    "SymInt": SIZED,
    "convert all Tensors to FakeTensors": OUTSIDE,
    "fake mode": OUTSIDE,
    "Cannot access data pointer": LOOKS,
    "data is not allocated yet": LOOKS,
    "Boolean value of Tensor": LOOKS,
    ".numpy() is not supported": LOOKS,
}


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
