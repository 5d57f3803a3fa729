"""A function that runs the engine, as one flat graph of tensor operations with no autograd left in it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..errors import NeedsEagerPass
from .verify import difference, is_coarse
from .workarounds.draw_order import set_apart
from .workarounds.strides import without_strides


class CannotTrace(RuntimeError):
    """A function does something that no flat graph of tensor operations can hold."""


def trace(function: Callable[..., Any], tensors: Sequence[Tensor]) -> GraphModule:
    """Record what ``function(*tensors)`` does, in-place changes to its arguments included, without running it on real data.

    Raises:
        CannotTrace: where the function looks at values, or uses tensors that are not among its arguments.
        NeedsEagerPass: where the engine has to see real numbers first.
    """

    def attentive(*given: Tensor) -> Any:
        with Attentive():
            return function(*given)

    try:
        with while_tracing(), noted_seeds() as seeds:
            graph = make_fx(attentive, tracing_mode="fake")(*[tensor.detach() for tensor in tensors])
    except (NeedsEagerPass, CannotTrace):
        raise
    except Exception as error:  # of whatever kind: the same function has run on real tensors
        raise CannotTrace(reason_of(error)) from error
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._local_scalar_dense.default:
            raise CannotTrace(LOOKS)
        if node.op == "get_attr" and not is_number(getattr(graph, node.target)):
            raise CannotTrace(MAKES)
        if seeds and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotTrace(SEEDS)
    return without_strides(graph)


def is_number(constant: Any) -> bool:
    """Whether a constant of a graph is what ``torch.tensor(0.5)`` makes: as constant as the number 0.5 itself."""
    return isinstance(constant, Tensor) and not isinstance(constant, FakeTensor) and constant.dim() == 0


@contextlib.contextmanager
def while_tracing() -> Iterator[None]:
    """What must hold while a graph is recorded: hooks run in this thread, nothing looks at values, operators are plain ones."""
    validates = Distribution._validate_args
    compiling = torch.compiler._is_compiling_flag
    fuses = torch._C._get_mkldnn_enabled()
    Distribution.set_default_validate_args(False)
    torch._C._set_mkldnn_enabled(False)  # recurrent layers in one piece, whose workspace no graph could hold
    torch.compiler._is_compiling_flag = True  # what torch's optimizers and ours ask before they look at a number
    try:
        with torch.autograd.set_multithreading_enabled(False), torch.no_grad():
            yield
    finally:
        Distribution.set_default_validate_args(validates)
        torch._C._set_mkldnn_enabled(fuses)
        torch.compiler._is_compiling_flag = compiling


@contextlib.contextmanager
def noted_seeds() -> Iterator[list[str]]:
    """Calls that set the state which random numbers come from; a graph would not repeat them."""
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


ACCESS = {"__get__", "__set__", "__delete__"}  # of attributes, such as requires_grad


class Attentive(TorchFunctionMode):
    """Sees what a trace would miss, a look at a tensor from outside, and takes operators on lists of tensors apart.

    vmap cannot map those, and TorchInductor does better without: what it makes of them is sometimes wrong on a GPU.
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
    """Whether a value is a tensor with numbers in it, which does not belong into a trace."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(value)


CLAMPS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # by numbers


def apply_to_each(name: str, *args: Any, **kwargs: Any) -> list[Tensor] | None:
    """A foreach operator by the one of its name for single tensors; what is no list is the same for all."""
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
    """In a line, why a function cannot be traced."""
    text = f"{type(error).__name__}: {error}"
    return next((reason for sign, reason in REASONS.items() if sign in text), text.partition("\n")[0])


LOOKS = "it looks at the values of tensors, as `if loss > 1` or .item() do"
OUTSIDE = "it uses a tensor that is neither in the model nor an argument: pass that to the step, or make it a buffer of the model"
SEEDS = "it sets the state that its random numbers come from, as checkpoints of dropout do"
DRAWS = "it draws from a generator of its own, which no graph can hold"
SIZED = "the shape of one of its tensors depends on values"
MAKES = "it makes a tensor of data that no graph would read again: pass that to the step, or make it a buffer of the model"
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


def compile_graph(graph: GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """TorchInductor's code for a flat graph and tensors like these; random numbers are those of eager mode."""
    from torch import _inductor
    from torch._inductor import config

    unchecked = [name for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)]  # the caller sees to that
    options: dict[str, Any] = {"fallback_random": True, **dict.fromkeys(unchecked, False)}
    faster = "combo_kernels" if tensors[0].is_cuda else "cpp_wrapper"  # small kernels in one; calls to kernels without Python
    with contextlib.suppress(Exception):  # which not every graph allows
        return checked(_inductor.compile, graph, tensors, {**options, faster: True})
    return checked(_inductor.compile, graph, tensors, options)


def for_cpu(graph: GraphModule) -> GraphModule:
    """A copy with :func:`tanh` and :func:`expm1` in place of torch's, in float32 on a CPU."""
    found, aten = copy.deepcopy(graph), torch.ops.aten
    own = {aten.tanh.default: tanh, aten.expm1.default: expm1}
    for node in list(found.graph.nodes):
        like = node.meta.get("val")
        if node.target in own and like.device.type == "cpu" and like.dtype is torch.float32:
            put_in_place(node, own[node.target])
    found.recompile()
    return found


def put_in_place(node: Node, function: Callable[[Tensor], Tensor]) -> None:
    """What a function makes of the node's first argument, in the node's place."""
    like = node.meta["val"]
    piece = make_fx(function, tracing_mode="fake")(torch.empty(like.shape, dtype=like.dtype, device=like.device)).graph
    argument: Any = node.args[0]
    with node.graph.inserting_before(node):
        found: Any = node.graph.graph_copy(piece, {next(iter(piece.nodes)): argument})
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)


def tanh(x: Tensor) -> Tensor:
    """(e²ˣ − 1)/(e²ˣ + 1): to four units in the last place of float32, in half the time that TorchInductor's takes."""
    is_small, (p, q) = x.abs() < 0.5, lambert(x * x)
    e = (2 * x.clamp_max(20)).exp()  # beyond, tanh is 1
    return torch.where(is_small, x * p, e - 1) / torch.where(is_small, q, e + 1)


def expm1(x: Tensor) -> Tensor:
    """eˣ − 1 = 2t/(1 − t), t = tanh(x/2), next to 0: TorchInductor subtracts 1 there too, which loses the digits."""
    p, q = lambert(x * x / 4)
    return torch.where(x.abs() < 0.5, x * p / (q - x * p / 2), x.exp() - 1)


def lambert(z: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of tanh(x) = xp/q, z = x² < ¼, by the continued fraction x/(1 + z/(3 + z/(5 + z/(7 + z/9))))."""
    return 1 + z * (1 / 9 + z / 945), 1 + z * (4 / 9 + z / 63)


MOST_CHECKED = 2**30  # bytes


def checked(compiler: Any, graph: GraphModule, tensors: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """Code that has been seen to do what the graph does, but for rounding."""
    with torch.no_grad():
        apart, draws = set_apart(graph)
        code: Callable[..., Any] = compiler(for_cpu(apart), [*tensors, *[draw.result.empty() for draw in draws]], options=options)
        compiled = (lambda *given: code(*given, *[draw() for draw in draws])) if draws else code
        if sum([tensor.nbytes for tensor in tensors]) <= MOST_CHECKED:
            with whole_precision():
                expected, found = (outcome(run, tensors) for run in (graph, compiled))
                where = difference(expected, found, tensors, functools.partial(outcome, graph), is_coarse(graph))
            if where:
                raise RuntimeError(f"what it compiles gives other numbers than the graph itself, {where}")
    return compiled


@contextlib.contextmanager
def whole_precision() -> Iterator[None]:
    """Without TF32, whose rounding depends on the kernel that is chosen and hides what else differs."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    kinds = cuda.matmul, cudnn.conv, cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def outcome(run: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a graph returns, and what it makes of its arguments, on copies of these."""
    copies = [twin(tensor) for tensor in tensors]
    with torch.random.fork_rng({tensor.device for tensor in tensors if tensor.is_cuda}):
        torch.manual_seed(0)
        return [*run(*copies), *copies]


def twin(tensor: Tensor) -> Tensor:
    """A copy with the same strides; a tensor that overlaps itself, which nothing can write to, stands for itself."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
