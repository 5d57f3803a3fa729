"""Mean gradients and curvature diagonals over the batches of a data set. Everything that the passes change is restored."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.backward import grad
from ..errors import NonFiniteError, UnsupportedOperator
from ..estimators import estimate, names

LossFunction = Callable[..., Tensor]
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # their weights have outputs in the second dimension
RECURSIONS = ("hesscale", "hesscale_gn", "bl89")  # one pass computes both the gradient and the diagonal


class Derivatives(NamedTuple):
    """The derivatives of the mean loss with respect to one parameter.

    Attributes:
        gradient: of the parameter's shape.
        diagonal: the curvature diagonal, of the same shape.
        ratio: an unbiased estimate of the sum of the Gauss-Newton diagonal, divided by the sum of HesScaleGN; None if it was not
            estimated or HesScaleGN is zero.
        ratio_error: the standard error of the ratio over batches; None for a single batch.
    """

    gradient: Tensor
    diagonal: Tensor
    ratio: float | None = None
    ratio_error: float | None = None


class Averages(NamedTuple):
    """The results of a pass over the data.

    Attributes:
        of: the derivatives by parameter name.
        loss: the mean loss.
        examples, batches: the numbers of examples and batches.
    """

    of: dict[str, Derivatives]
    loss: float
    examples: int
    batches: int


def mean_derivatives(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction,
    *,
    method: str = "hesscale_gn",
    num_samples: int = 0,
    calibrate: bool = False,
    max_batches: int | None = None,
    training: bool = False,
    seed: int = 0,
) -> Averages:
    """The gradient and a curvature diagonal of the mean loss, for each parameter that requires gradients.

    Batches are weighted by their numbers of examples: the lengths of their first tensors. The model is in evaluation mode during
    the pass. Afterwards, its modes, its buffers and torch's random number generators are restored. No ``.grad`` or ``hess_diag``
    changes.

    Args:
        loader: batches. A tuple or list is unpacked, anything else is one argument; tensors move to the model's device.
        loss_fn: ``loss_fn(model, *batch)``, the mean loss of a batch. A sum over examples would give large batches too
            much weight.
        method: one of :func:`hesscale.estimators.names`.
        num_samples: draws of ``ggn_mc`` per batch, to compare the sum of HesScaleGN with an unbiased estimate; 0 for no
            comparison. A random method averages the same number of its own draws, but at least one.
        calibrate: multiply each diagonal by the ratio of this comparison. Needs ``method="hesscale_gn"`` and at least one draw.
        max_batches: the maximum number of batches to use.
        training: put the model in training mode instead.
        seed: of the random draws, and of dropout in training mode.

    Example:
        >>> import torch
        >>> from hesscale.uses.derivatives import mean_derivatives
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> found = mean_derivatives(model, torch.tensor([[[1.0]], [[3.0]]]), lambda model, x: model(x).square().mean())
        >>> found.of["weight"].diagonal
        tensor([[10.]])
    """
    check(method, num_samples, calibrate)
    params = trained(model)
    sums = {name: (zeros(p), zeros(p)) for name, p in params.items()}
    ratios = {name: Ratio() for name in params}
    total_loss, examples, batches = 0.0, 0, 0
    generator = torch.Generator(next(iter(params.values())).device).manual_seed(seed)
    with undisturbed(model, training, seed), torch.enable_grad():
        for loss, size in losses(model, loader, loss_fn, max_batches):
            gradients, diagonals = derivatives(loss, list(params.values()), method, num_samples, generator)
            for (gradient_sum, diagonal_sum), g, h in zip(sums.values(), gradients, diagonals, strict=True):
                gradient_sum.add_(g, alpha=size)
                diagonal_sum.add_(h, alpha=size)
            if num_samples:
                compare(loss, list(params.values()), method, diagonals, num_samples, generator, size, list(ratios.values()))
            total_loss, examples, batches = total_loss + size * float(loss.detach()), examples + size, batches + 1
    found = {}
    for name, (gradient, diagonal) in sums.items():
        ratio = ratios[name]
        factor = (1.0 if ratio.value is None else ratio.value) if calibrate else 1.0
        found[name] = Derivatives(gradient / examples, diagonal * (factor / examples), ratio.value, ratio.error)
        if not (found[name].gradient.isfinite().all() and found[name].diagonal.isfinite().all()):
            raise NonFiniteError(f"the derivatives with respect to {name} are not finite, although the loss is")
    return Averages(found, total_loss / examples, examples, batches)


def check(method: str, num_samples: int, calibrate: bool) -> None:
    if method not in names():
        raise ValueError(f"no estimator is called {method!r}; there are {', '.join(map(repr, names()))}")
    if num_samples < 0:
        raise ValueError(f"num_samples must be at least 0, not {num_samples}")
    if calibrate and (method != "hesscale_gn" or not num_samples):
        raise ValueError(
            f"calibrate=True needs method='hesscale_gn' and num_samples of at least 1, not method={method!r} and "
            f"num_samples={num_samples}"
        )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ValueError("the model has no parameter that requires gradients")
    return params


def zeros(p: Tensor) -> Tensor:
    """Zeros of a parameter's shape, at least in single precision, for a sum over batches."""
    return torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)


def losses(
    model: nn.Module, loader: Iterable[Any], loss_fn: LossFunction, max_batches: int | None = None
) -> Iterator[tuple[Tensor, int]]:
    """The loss of each batch that is not empty, and the number of its examples."""
    if isinstance(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn is the module {type(loss_fn).__name__}, but it is called with the model and a batch. "
            "Pass a function, such as lambda model, x, y: criterion(model(x), y)"
        )
    device, is_empty = next(iter(trained(model).values())).device, True
    for number, batch in enumerate(itertools.islice(loader, max_batches)):
        arguments, size = arguments_of(batch, device)
        if size:
            is_empty = False
            loss = loss_fn(model, *arguments)
            if isinstance(loss, Tensor) and not loss.isfinite().all():
                raise NonFiniteError(f"the loss of batch {number} is not finite: {loss.detach().tolist()}")
            yield loss, size
    if is_empty:
        raise ValueError("the loader has no batches, or they are empty; if it is an iterator, create a new one")


def arguments_of(batch: Any, device: torch.device) -> tuple[tuple[Any, ...], int]:
    """The arguments of ``loss_fn`` after the model, on this device, and the number of examples."""
    moved = tree_map(lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf, batch)
    leaves = tree_leaves(tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, moved))
    sizes = [len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes:
        raise ValueError(
            f"a batch of type {type(batch).__name__} has no tensor, so its number of examples is unknown; "
            "a batch must be a tensor, or a tuple, list or mapping with one"
        )
    return tuple(moved) if isinstance(moved, tuple | list) else (moved,), sizes[0]


def derivatives(
    loss: Tensor, params: list[nn.Parameter], method: str, num_samples: int, generator: torch.Generator
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradient and the diagonal of one batch; zeros for parameters that the loss does not depend on."""
    gradients: Sequence[Tensor | None]
    diagonals: Sequence[Tensor | None]
    keep = num_samples > 0  # the comparison needs the graph again
    if method in RECURSIONS:
        gradients, diagonals = grad(loss, params, method=method, retain_graph=keep, allow_unused=True)
    else:
        gradients = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
        diagonals = estimate(method, loss, params, num_samples=max(1, num_samples), generator=generator, retain_graph=keep)
    return in_full(gradients, params), in_full(diagonals, params)


def in_full(found: Sequence[Tensor | None], params: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p) if t is None else t for t, p in zip(found, params, strict=True)]


def compare(
    loss: Tensor,
    params: list[nn.Parameter],
    method: str,
    diagonals: list[Tensor],
    num_samples: int,
    generator: torch.Generator,
    size: int,
    ratios: list[Ratio],
) -> None:
    """Add the sums of HesScaleGN and of draws of the Gauss-Newton diagonal on one batch."""
    try:
        if method != "hesscale_gn":
            diagonals = derivatives(loss, params, "hesscale_gn", num_samples, generator)[1]
        drawn = estimate("ggn_mc", loss, params, num_samples=num_samples, generator=generator)
    except (ValueError, UnsupportedOperator) as error:
        raise type(error)(f"{error}. To leave out the comparison with Monte-Carlo draws, pass num_samples=0") from error
    for ratio, a, b in zip(ratios, diagonals, drawn, strict=True):
        ratio.add(float(b.double().sum()), float(a.double().sum()), size)


@dataclass
class Ratio:
    """A ratio of two means over batches, with its standard error, estimated from the differences between batches."""

    pairs: list[tuple[float, float]] = field(default_factory=list)

    def add(self, above: float, below: float, weight: int) -> None:
        self.pairs.append((weight * above, weight * below))

    @property
    def value(self) -> float | None:
        below = sum(b for _, b in self.pairs)
        return sum(a for a, _ in self.pairs) / below if below else None

    @property
    def error(self) -> float | None:
        """By linearization: the spread of a − r b over the mean of b."""
        if (ratio := self.value) is None or len(self.pairs) < 2:
            return None
        spread = statistics.stdev([a - ratio * b for a, b in self.pairs])
        return spread / abs(statistics.fmean(b for _, b in self.pairs)) / math.sqrt(len(self.pairs))


@contextlib.contextmanager
def undisturbed(model: nn.Module, training: bool = False, seed: int | None = None) -> Iterator[None]:
    """Set the model's mode inside the block, and restore modes and buffers; with a seed, also random number generators."""
    modes = [(module, module.training) for module in model.modules()]
    held = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model.train(training)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            with torch.no_grad():
                for named, before in held:
                    named.update(before)
                for buffer, value in values:
                    buffer.copy_(value)
