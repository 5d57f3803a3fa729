"""The methods to measure: a whole training step of each, in every mode.

A step clears the gradients, runs the forward pass, runs the backward pass with the method's curvature, and updates the weights.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hesscale

from ..colours import COLOURS
from ..lab.choices import Choices
from ..optimizers import OPTIMIZERS
from . import exact

EAGER, COMPILED, GRAPH, AGAIN = "eager", "compiled", "graph", "again"
MODES = {EAGER: "eager", COMPILED: "compiled", GRAPH: "compiled + CUDA graph", AGAIN: "compiled, by again"}
BASELINE = "adam"
STEP_SIZE = 1e-8  # so small that thousands of steps on one batch do not diverge
TRUST_RADIUS = 1e-8


class NotMeasured(Exception):
    """A method is skipped, for a reason other than a failure."""


@dataclass(frozen=True)
class Method:
    """An optimizer, and the source of its Hessian diagonal."""

    name: str
    label: str
    optimizer: Callable[..., torch.optim.Optimizer]
    period: int = 1  # the number of steps after which its costs repeat
    source: str = ""  # a BackPACK extension, "exact" or "exact-ggn"; the optimizer's own backward otherwise
    colour: str | None = None

    @property
    def modes(self) -> tuple[str, ...]:
        return (EAGER,) if self.source else tuple(MODES)


def method(optimizer: str, name: str = "") -> Method:
    """One of the experiments' optimizers with its own curvature."""
    spec = OPTIMIZERS[optimizer]
    options: dict[str, Any] = {"trust_radius": TRUST_RADIUS} if spec.is_scaled else {}
    make = functools.partial(spec.make, lr=STEP_SIZE, **options)
    name, period = name or spec.name, spec.options.get("curvature_every", 1)
    return Method(name, spec.cost_label or spec.label, make, period, colour=spec.colour)


def method_of(source: str, name: str, label: str) -> Method:
    """AdaHesScale with a diagonal from another source."""
    make = functools.partial(OPTIMIZERS["adahesscale"].make, lr=STEP_SIZE)
    return Method(name, label, make, source=source, colour=COLOURS[name])


METHODS = Choices(
    [
        method(BASELINE),
        method("sgd"),
        method("adamw"),
        method("our-adam"),
        method("adahesscale"),
        method("adahesscale-gn"),
        method("adahesscale-default"),
        method("adahesscale-gn-default"),
        method("adahesscale-every10"),
        method("adahesscale-bf16"),
        method("adahesscale-gn-bf16"),
        method("adahesscale-gn-bf16-every10"),
        method("scaled-adahesscale"),
        method("bl89"),
        method("adahessian"),
        method("ggnmc-batch", name="ggnmc"),
        method_of("DiagGGNMC", "backpack-ggn-mc", "BackPACK DiagGGNMC"),
        method_of("DiagGGNExact", "backpack-ggn", "BackPACK DiagGGNExact (exact GGN)"),
        method_of("DiagHessian", "backpack-h", "BackPACK DiagHessian (exact H)"),
        method_of("exact-ggn", "exact-ggn", "exact GGN, dense recursion"),
        method_of("exact", "exact-h", "exact H, dense recursion"),
    ],
    aliases={"adahesscale-trust": "scaled-adahesscale"},
)


class Step:
    """One training step of a method on a fixed batch, ready to be called."""

    def __init__(
        self, method: Method, mode: str, model: nn.Sequential, criterion: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> None:
        self.method, self.mode = method, mode
        self.model, self.criterion, self.batch = model, criterion, batch
        self.optimizer: Any = method.optimizer(model.parameters())
        self.run: Callable[[], Any] = self.eager
        self.backward_times: list[float] = []  # seconds of each eager backward pass, without waiting for a GPU
        self.backward: Callable[[Any], None] = self.own
        if mode != EAGER:
            self.compiled = compiled_step(model, criterion, self.optimizer, mode)
            self.run = functools.partial(self.compiled.again if mode == AGAIN else self.compiled, *batch)
        elif method.source.startswith("exact"):
            if not exact.can_be_exact(model):
                raise NotMeasured("left out: the dense recursion is written for networks of Linear and Tanh alone")
            self.backward = functools.partial(exact.backward, gauss_newton=method.source == "exact-ggn")
        elif method.source:
            self.extend()
            self.backward = self.backpack

    @property
    def ran_as(self) -> str:
        """The mode of the last call. A compiled step may have fallen back to another one."""
        if self.mode == EAGER or (self.mode == AGAIN and self.compiled.repeat is not None):
            return MODES[self.mode]
        return str(self.compiled.mode)

    def rest(self) -> None:
        """Free gradients before other methods run."""
        if self.mode == EAGER:
            self.optimizer.zero_grad()

    def eager(self) -> None:
        self.update(self.forward())

    def forward(self) -> Any:
        """Clear the gradients and run the forward pass. Returns the loss, for :meth:`update`."""
        self.optimizer.zero_grad()
        if self.method.source.startswith("exact"):
            return exact.forward(self.model, self.criterion, *self.batch)
        return self.criterion(self.model(self.batch[0]), self.batch[1])

    def update(self, loss: Any) -> None:
        """The backward pass with the method's curvature, and the optimizer's step."""
        start = time.perf_counter()
        self.backward(loss)
        self.backward_times.append(time.perf_counter() - start)
        self.optimizer.step()

    def own(self, loss: Tensor) -> None:
        if isinstance(self.optimizer, hesscale.optim.CurvatureOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def extend(self) -> None:
        """Extend the network and the loss with BackPACK."""
        try:
            package: Any = importlib.import_module("backpack")
            self.extension: Any = getattr(importlib.import_module("backpack.extensions"), self.method.source)
        except ImportError as error:
            raise NotMeasured(f"BackPACK is not installed ({error}): pip install backpack-for-pytorch") from None
        self.extending = package.backpack
        self.model, self.criterion = package.extend(self.model), package.extend(self.criterion)
        self.field: str = self.extension().savefield

    def backpack(self, loss: Tensor) -> None:
        """The backward pass with BackPACK's diagonal, for the update of AdaHesScale."""
        with self.extending(self.extension()):
            loss.backward()
        for p in self.model.parameters():
            p.hess_diag = getattr(p, self.field)  # type: ignore[attr-defined]
            delattr(p, self.field)


def compiled_step(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> Any:
    make = getattr(hesscale, "compile_step", None)
    if make is None:
        raise NotMeasured("this version of hesscale has no compile_step")
    return make(model, loss_by(criterion), optimizer, backend="inductor", cuda_graph=mode in (GRAPH, AGAIN))


def loss_by(criterion: nn.Module) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The loss as a function of the model and a batch."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = criterion(model(x), y)
        return loss

    return loss_fn
