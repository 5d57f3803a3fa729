"""Hessian diagonals of functions, for code in the style of ``torch.func``, and training of many models at once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters, temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode, tracing
from torch._subclasses.fake_tensor import fake_tensor_tls
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from .compile.ensemble import Ensemble as Ensemble
from .compile.ensemble import ensemble as ensemble
from .compile.make_fx import MAKES, OUTSIDE, CannotTrace, trace
from .compile.signature import PLAIN, Constant, Identity
from .compile.workarounds.vmap import functional
from .engine import backward as engine
from .engine.arguments import check_choices, check_loss
from .errors import CompileWarning, NeedsEagerPass

__all__ = ["Ensemble", "ensemble", "grad_and_hess_diag"]
MAX_RECORDS = 64
ONLY_VMAP = "Hessian diagonals cannot be differentiated: of torch.func's transforms, only vmap can be applied to this function"
ADVICE = {  # what to do about a tensor that a recorded graph cannot contain
    OUTSIDE: "it uses a tensor that is not among its arguments: pass it as one",
    MAKES: "it makes a tensor of Python data, which is read only once: make the tensor outside, and pass it as an argument",
}
ESCAPED = "it uses a tensor that vmap maps over, but that is not among its arguments: pass it as one"


def grad_and_hess_diag(
    fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    method: str = "hesscale",
    head: str = "auto",
    fallback: str = "error",
    curvature_dtype: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Return a function that computes the loss of ``fn``, its gradients and its Hessian diagonals.

    The function maps ``(*args)`` to ``(loss, grads, hess_diags)``. Gradients and diagonals have the structure of the arguments
    that ``argnums`` names, which may be nested dicts, lists and tuples of tensors. With ``has_aux``, ``fn`` returns ``(loss,
    aux)``, and the new function returns ``((loss, aux), grads, hess_diags)``. No ``.grad`` changes. The results have no graph, so
    applying ``torch.func.grad`` raises an error. ``torch.func.vmap``, ``functional_call`` and ``torch.compile`` work.

    Under ``vmap`` and ``torch.compile``, ``fn`` is recorded as a graph once for each new set of shapes, as under ``jax.jit``.
    Values that ``fn`` reads besides its arguments are then constants of the graph. All tensors that it uses must be among its
    arguments, and it must not read their values, for example in an ``if``. The first sample determines which of the model's
    outputs interact in the loss. If they interact differently in another sample, the diagonals of that sample are NaN.

    Args:
        fn: returns a scalar loss; the model's parameters are among its arguments.
        argnums: the arguments to differentiate with respect to. If the loss does not depend on a parameter, its results are zero.
        has_aux: whether ``fn`` returns a pair of the loss and something else.
        method, head, fallback, curvature_dtype: as in :func:`hesscale.backward`.

    Example:
        >>> import torch
        >>> from hesscale.func import grad_and_hess_diag
        >>> def loss_fn(params, x):
        ...     return (params["w"] * x).square().sum()
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> loss, grads, hess_diags = grad_and_hess_diag(loss_fn)(params, torch.tensor([3.0, 1.0]))
        >>> loss, grads["w"], hess_diags["w"]
        (tensor(13.), tensor([18.,  4.]), tensor([18.,  2.]))
        >>> batches = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
        >>> torch.func.vmap(grad_and_hess_diag(loss_fn), in_dims=(None, 0))(params, batches)[2]["w"]
        tensor([[18.,  2.],
                [ 0.,  8.]])
    """
    options = {"method": method, "head": head, "fallback": fallback, "curvature_dtype": curvature_dtype}
    check_choices(**options)
    transform = Transform(fn, argnums, has_aux, options)
    from torch._dynamo import disable, nonstrict_trace  # takes seconds to import

    apply = disable(transform)

    @nonstrict_trace
    def call(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return apply(args, kwargs)

    @wraps(fn, updated=())
    def transformed(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    code = transformed.__code__.replace(co_name=transform.name)  # type: ignore[attr-defined]
    transformed.__code__ = code  # type: ignore[attr-defined]  # its own: torch.compile keeps its graphs by code object
    return transformed


class Transform:
    """A function to differentiate, and the graphs that have been recorded for it; see :func:`grad_and_hess_diag`."""

    def __init__(self, fn: Callable[..., Any], argnums: int | tuple[int, ...], has_aux: bool, options: dict[str, Any]) -> None:
        self.fn, self.argnums, self.has_aux, self.options = fn, argnums, has_aux, options
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.records: dict[object, tuple[GraphModule, pytree.TreeSpec]] = {}

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        around = {interpreter.key().name for interpreter in retrieve_all_functorch_interpreters()}
        if not around and not is_traced():
            return self.differentiate(args, kwargs)
        try:
            if around - {"Vmap"}:
                raise RuntimeError(ONLY_VMAP)
            return self.replay(args, kwargs)
        except Exception as error:
            if is_traced():  # torch.compile does not show the error
                warnings.warn(f"torch.compile runs {self.name} in eager mode: {error}", CompileWarning, stacklevel=2)
            raise

    def differentiate(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The loss, its gradients and its Hessian diagonals, computed by the engine."""
        places = self.places(len(args))
        chosen, spec = pytree.tree_flatten([args[place] for place in places])
        for leaf in chosen:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                raise TypeError(f"{self.name_of(leaf, args)}; derivatives exist with respect to floating-point tensors only")
        leaves = [leaf.detach().requires_grad_() for leaf in chosen]
        given = list(args)
        for place, value in zip(places, pytree.tree_unflatten(leaves, spec), strict=True):
            given[place] = value
        with torch.enable_grad():
            result = self.fn(*given, **kwargs)
        if self.has_aux and not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise TypeError("with has_aux=True, fn must return a pair (loss, aux)")
        loss, aux = result if self.has_aux else (result, None)
        check_loss(loss)
        gradients, diagonals = engine.grad(loss, leaves, allow_unused=True, **self.options)
        found = []
        for tensors in (gradients, diagonals):
            filled = [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, chosen, strict=True)]
            values = pytree.tree_unflatten(filled, spec)
            found.append(values[0] if isinstance(self.argnums, int) else tuple(values))
        loss, aux = pytree.tree_map_only(Tensor, torch.detach, (loss, aux))
        return (loss, aux) if self.has_aux else loss, *found

    def places(self, count: int) -> list[int]:
        """The positions of the arguments to differentiate with respect to, among ``count`` arguments."""
        argnums = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        places = [place + count if place < 0 else place for place in argnums]
        if not places or len(set(places)) < len(places) or not all(0 <= place < count for place in places):
            raise ValueError(
                f"argnums={self.argnums} must be different indices of the positional arguments, of which there are {count}"
            )
        return places

    def name_of(self, leaf: Any, args: Sequence[Any]) -> str:
        """The position of a leaf among the arguments, and its type."""
        what = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        paths, _ = pytree.tree_flatten_with_path([args[place] for place in self.places(len(args))])
        first, *path = next(path for path, other in paths if other is leaf)
        return f"argument {self.places(len(args))[first.idx]}{pytree.keystr(tuple(path))} is {what}"  # type: ignore[attr-defined]

    def replay(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Like :meth:`differentiate`, but by a recorded graph, which vmap can map and torch.compile can trace."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        flat = [fixed(leaf) for leaf in flat]
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        key = (
            spec,
            tuple([layout_of(t) for t in tensors]),
            tuple(
                [Constant(leaf) if isinstance(leaf, PLAIN) else Identity(leaf) for leaf in flat if not isinstance(leaf, Tensor)]
            ),
            torch.get_default_dtype(),
            *[torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
        )
        if key not in self.records:
            if len(self.records) >= MAX_RECORDS:
                self.records.pop(next(iter(self.records)))
            self.records[key] = self.record(flat, spec, tensors)
        graph, structure = self.records[key]
        with torch.no_grad(), without_autocast({t.device.type for t in tensors}):  # the graph contains its casts
            return pytree.tree_unflatten(graph(*tensors), structure)

    def record(self, flat: list[Any], spec: pytree.TreeSpec, tensors: list[Tensor]) -> tuple[GraphModule, pytree.TreeSpec]:
        """Record :meth:`differentiate` for one sample of vmap as a graph. Also returns the structure of the result."""
        structure = None

        def flattened(*given: Tensor) -> list[Any]:
            nonlocal structure
            rest = iter(given)
            args, kwargs = pytree.tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in flat], spec)
            leaves, structure = pytree.tree_flatten(self.differentiate(args, kwargs))
            return leaves

        layouts = [layout_of(tensor) for tensor in tensors]
        values = None if is_traced() else [first_of(tensor) for tensor in tensors]
        with nothing_around():
            samples = values or [torch.empty_strided(*where, dtype=dtype, device=device) for *where, dtype, device in layouts]
            try:
                if values is not None:  # an eager call raises errors unchanged, and finds what tracing needs
                    with torch.random.fork_rng([value.device for value in values if value.is_cuda]):
                        flattened(*[value.clone() for value in values])
                graph = functional(trace(flattened, samples), samples)
            except CannotTrace as error:
                reason = ADVICE.get(str(error), str(error))
                raise CannotTrace(f"under vmap and torch.compile, this function cannot be recorded: {reason}") from error
            except NeedsEagerPass as error:
                raise NeedsEagerPass(
                    f"{error}: call this function once without vmap and torch.compile, at a point where it is curved"
                ) from error
            except RuntimeError as error:
                if "escaped from inside a function being vmapped" not in str(error):
                    raise
                raise CannotTrace(f"under vmap, this function cannot be recorded: {ESCAPED}") from error
        assert structure is not None
        return graph, structure


def is_traced() -> bool:
    """Whether torch.compile or make_fx is recording."""
    return detect_fake_mode() is not None or get_proxy_mode() is not None


@contextlib.contextmanager
def nothing_around() -> Iterator[None]:
    """Turn off vmap and tracing inside the block."""
    allowed = fake_tensor_tls.allow_non_fake_inputs_override  # torch.compile would treat other tensors as constants
    fake_tensor_tls.allow_non_fake_inputs_override = None
    try:
        with temporarily_clear_interpreter_stack(), tracing(None), _disable_current_modes():
            yield
    finally:
        fake_tensor_tls.allow_non_fake_inputs_override = allowed


@contextlib.contextmanager
def without_autocast(devices: Iterable[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def fixed(leaf: Any) -> Any:
    """The current value of a number that torch.compile represents by a symbol."""
    kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}.get(type(leaf))
    return leaf if kind is None else kind(leaf)


def layout_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]:
    shape, strides = [int(n) for n in tensor.shape], [int(n) for n in tensor.stride()]
    return tuple(shape), tuple(strides), tensor.dtype, tensor.device


def first_of(tensor: Tensor) -> Tensor:
    """The first of the samples that vmap maps over."""
    dims = []
    while torch._C._functorch.is_batchedtensor(tensor):
        dims.append(torch._C._functorch.maybe_get_bdim(tensor))
        tensor = torch._C._functorch.get_unwrapped(tensor)
    with temporarily_clear_interpreter_stack():
        for dim in reversed(dims):
            tensor = tensor.select(dim, 0)
        return tensor.detach()
