"""The checks of every model: it runs, its gradients are PyTorch's, and its diagonals are those of the recursion."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import graph_recursion
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hesscale


class Case(NamedTuple):
    """One model: how it is made, and a loss of it. Neither imports a library before it is called."""

    library: str  # the module to import
    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    what: str = ""  # what the name does not say


class Outcome(NamedTuple):
    """What was found; a word for each column of the page."""

    runs: str  # "yes", or the refusal
    gradients: str  # "identical", or what differs
    diagonals: str  # "equal", or what differs, or why they were not compared
    nodes: int = 0
    costs: tuple[float, float] | None = None


DTYPES = (torch.float32, torch.float64)
MODES = (True, False)  # training, eval
EQUAL = "equal"
TOLERANCE = 1e-7  # of an entry, in float64
LOW_PRECISION = 0.005  # of a model's whole diagonal, in float32


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in the default dtype, the same in every dtype."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(torch.get_default_dtype())


def in_full_precision(case: Case) -> Case:
    """For a library that casts to float32 what its networks then do not accept in float64."""

    def loss(model: nn.Module) -> Tensor:
        is_double = torch.get_default_dtype() is torch.float64
        with graph_recursion.DoublePrecision() if is_double else contextlib.nullcontext():
            return case.loss(model)

    return case._replace(loss=loss)


def examine(case: Case, *, rounds: int = 0) -> Outcome:
    """Everything about one model. A refusal by hesscale is an outcome; an error of the model itself is raised."""
    with quiet():
        diagonals, gradients, nodes = {}, "identical", 0
        for dtype in DTYPES:
            for training in MODES:
                plain, ours = (prepared(case, dtype, training) for _ in range(2))
                loss_of(case, plain, dtype).backward()
                loss = loss_of(case, ours, dtype)
                nodes = len(graph_recursion.topological([loss.grad_fn]))
                try:
                    hesscale.backward(loss)
                except hesscale.UnsupportedOperator as error:
                    return Outcome(f"raises: {shortened(str(error))}", "", with_fallback(case), nodes)
                gradients = difference(plain, ours) or gradients
                diagonals[dtype, training] = [diagonal_of(p) for p in ours.parameters()]
        verdicts = [lost_precision(diagonals), *(compare(case, training) for training in MODES)]
        verdict = next((verdict for verdict in verdicts if verdict != EQUAL), EQUAL)
        return Outcome("yes", gradients, verdict, nodes, costs_of(case, rounds) if rounds else None)


def with_fallback(case: Case) -> str:
    """The same comparison where only ``fallback="exact"`` will do."""
    try:
        verdicts = [compare(case, training, fallback="exact") for training in MODES]
    except hesscale.UnsupportedOperator:
        return ""
    return "with fallback: " + next((verdict for verdict in verdicts if verdict != EQUAL), EQUAL)


def shortened(message: str) -> str:
    """Its first sentence."""
    return message.partition(". ")[0].rstrip(".")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Libraries warn of much that does not matter here, and choose default dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(case: Case) -> nn.Module:
    """A model with random parameters. Those that start at zero would hide what stands behind them, so all are moved."""
    torch.manual_seed(0)
    model = case.make()
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(0.1 * torch.randn_like(p))
    return model


def prepared(case: Case, dtype: torch.dtype, training: bool) -> nn.Module:
    """The model, the same at every call. PyTorch has no product by groups of experts in float64: there they take turns."""
    model = build(case).to(dtype).train(training)
    if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def loss_of(case: Case, model: nn.Module, dtype: torch.dtype) -> Tensor:
    """The loss, with the same dropout at every call."""
    with default_dtype(dtype):
        torch.manual_seed(1)
        return case.loss(model)


def diagonal_of(p: nn.Parameter) -> Tensor | None:
    if p.grad is None:
        return None
    assert p.hess_diag.shape == p.shape
    assert p.hess_diag.dtype == p.dtype
    return p.hess_diag


def difference(plain: nn.Module, ours: nn.Module) -> str | None:
    """The first parameter whose gradient is not the same to the last bit."""
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        same = p.grad is q.grad if p.grad is None or q.grad is None else torch.equal(p.grad, q.grad)
        if not same:
            return f"{name} differs"
    return None


def lost_precision(diagonals: dict[Any, list[Tensor | None]]) -> str:
    """Whether the diagonals of a whole model in float32 are near those in float64: in eval mode, so without dropout."""
    low, high = (torch.cat([d.double().flatten() for d in diagonals[dtype, False] if d is not None]) for dtype in DTYPES)
    error = float((low - high).norm() / high.norm().clamp_min(1e-30))
    return EQUAL if error < LOW_PRECISION else f"DIFFER in float32 from float64 by {error:.1g}"


def compare(case: Case, training: bool, **options: Any) -> str:
    """Whether the diagonals are those of the slow recursion, in float64."""
    slow, fast = (prepared(case, torch.float64, training) for _ in range(2))
    with graph_recursion.DoublePrecision():
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            loss = loss_of(case, slow, torch.float64)
        ours = loss_of(case, fast, torch.float64)
    hesscale.backward(ours, head="rules", **options)
    try:
        expected = graph_recursion.diagonals(loss)
    except graph_recursion.TooLarge as error:
        return f"not compared: {error}"
    except graph_recursion.Once as error:
        return f"not compared: PyTorch cannot differentiate {error} twice"
    largest = max((float(d.abs().max()) for d in expected.values() if d.numel()), default=0.0)
    for (name, p), q in zip(fast.named_parameters(), slow.parameters(), strict=True):
        if p.grad is None and id(q) not in expected:
            continue
        found, wanted = p.hess_diag, expected[id(q)]
        margin = 1e-3 * TOLERANCE * float(wanted.abs().max() if wanted.numel() else 0) + 1e-13 * largest
        if not torch.allclose(found, wanted, rtol=TOLERANCE, atol=margin):
            return f"DIFFER at {name} by {float((found - wanted).abs().max() / wanted.abs().max()):.1g}"
    return EQUAL


def costs_of(case: Case, rounds: int) -> tuple[float, float]:
    """The time of hesscale.backward over that of loss.backward(), with the exact head and with rules alone.

    In float32 and train mode; the medians over interleaved rounds. It is the time of this process, since others may run.
    """
    trained = prepared(case, torch.float32, True)
    ways = (torch.autograd.backward, hesscale.backward, partial(hesscale.backward, head="rules"))
    ratios = []
    for _ in range(rounds + 2):
        times = []
        for backward in ways:
            trained.zero_grad()
            loss = loss_of(case, trained, torch.float32)
            start = time.process_time()
            backward(loss)
            times.append(time.process_time() - start)
        ratios.append((times[1] / times[0], times[2] / times[0]))
    exact, rules = zip(*ratios[2:], strict=True)
    return statistics.median(exact), statistics.median(rules)
