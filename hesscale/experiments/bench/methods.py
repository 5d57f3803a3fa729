"""What trains: every method's whole step (clear, forward, backward with its curvature, update), in every mode."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hesscale

from . import exact

EAGER, COMPILED, GRAPH = "eager", "compiled", "graph"
MODES = {EAGER: "eager", COMPILED: "compiled", GRAPH: "compiled + CUDA graph"}
BASELINE = "adam"
STEP_SIZE = 1e-8  # weights stay where they are: thousands of steps on one batch must not diverge, and cost the same


class LeftOut(Exception):
    """A method is not measured, for a reason that is no failure of its own."""


@dataclass(frozen=True)
class Method:
    """An optimizer, and where its Hessian diagonal comes from."""

    name: str
    label: str
    optimizer: Callable[..., torch.optim.Optimizer]
    period: int = 1  # steps after which its cost repeats
    source: str = ""  # a BackPACK extension, "exact" or "exact-ggn"; the optimizer's own backward otherwise

    @property
    def modes(self) -> tuple[str, ...]:
        return (EAGER,) if self.source else tuple(MODES)


def ours(optimizer: Any, **options: Any) -> Callable[..., torch.optim.Optimizer]:
    return functools.partial(optimizer, lr=STEP_SIZE, **options)


LIST = [
    Method(BASELINE, "Adam (torch)", ours(torch.optim.Adam)),
    Method("sgd", "SGD (torch)", ours(torch.optim.SGD)),
    Method("our-adam", "Adam (ours)", ours(hesscale.Adam)),
    Method("adahesscale", "AdaHesScale", ours(hesscale.AdaHesScale)),
    Method("adahesscale-gn", "AdaHesScaleGN", ours(hesscale.AdaHesScaleGN)),
    Method("adahesscale-every10", "AdaHesScale, curvature every 10th step", ours(hesscale.AdaHesScale, curvature_every=10), 10),
    Method("adahesscale-bf16", "AdaHesScale, curvature in bf16", ours(hesscale.AdaHesScale, curvature_dtype=torch.bfloat16)),
    Method(
        "adahesscale-gn-bf16", "AdaHesScaleGN, curvature in bf16", ours(hesscale.AdaHesScaleGN, curvature_dtype=torch.bfloat16)
    ),
    Method("adahesscale-trust", "AdaHesScale with a trust region", ours(hesscale.AdaHesScale, trust_radius=1e-8)),
    Method("bl89", "BL89", ours(hesscale.BL89)),
    Method("adahessian", "AdaHessian, 1 draw", ours(hesscale.AdaHessian)),
    Method("ggnmc", "GGN-MC, 1 draw", ours(hesscale.GGNMC)),
    Method("backpack-ggn-mc", "BackPACK DiagGGNMC", ours(hesscale.AdaHesScale), source="DiagGGNMC"),
    Method("backpack-ggn", "BackPACK DiagGGNExact (exact GGN)", ours(hesscale.AdaHesScale), source="DiagGGNExact"),
    Method("backpack-h", "BackPACK DiagHessian (exact H)", ours(hesscale.AdaHesScale), source="DiagHessian"),
    Method("exact-ggn", "exact GGN, dense recursion", ours(hesscale.AdaHesScale), source="exact-ggn"),
    Method("exact-h", "exact H, dense recursion", ours(hesscale.AdaHesScale), source="exact"),
]
METHODS = {method.name: method for method in LIST}


class Step:
    """One training step of a method on a fixed batch, ready to be called."""

    def __init__(
        self, method: Method, mode: str, model: nn.Sequential, criterion: nn.Module, batch: tuple[Tensor, Tensor]
    ) -> None:
        self.method, self.mode = method, mode
        self.model, self.criterion, self.batch = model, criterion, batch
        self.optimizer: Any = method.optimizer(model.parameters())
        self.run: Callable[[], Any] = self.eager
        self.backward: Callable[[Any], None] = self.own
        if mode != EAGER:
            self.compiled = compiled_step(model, criterion, self.optimizer, mode)
            self.run = functools.partial(self.compiled, *batch)
        elif method.source.startswith("exact"):
            if not exact.can_be_exact(model):
                raise LeftOut("left out: the dense recursion is written for networks of Linear and Tanh alone")
            self.backward = functools.partial(exact.backward, gauss_newton=method.source == "exact-ggn")
        elif method.source:
            self.extend()
            self.backward = self.backpack

    @property
    def ran_as(self) -> str:
        """How the last call ran: a compiled step may fall back."""
        return MODES[EAGER] if self.mode == EAGER else str(self.compiled.mode)

    def rest(self) -> None:
        """Hold no gradients while other methods run."""
        if self.mode == EAGER:
            self.optimizer.zero_grad()

    def eager(self) -> None:
        self.update(self.forward())

    def forward(self) -> Any:
        """Clear, and go forward, to what :meth:`update` takes."""
        self.optimizer.zero_grad()
        if self.method.source.startswith("exact"):
            return exact.forward(self.model, self.criterion, *self.batch)
        return self.criterion(self.model(self.batch[0]), self.batch[1])

    def update(self, loss: Any) -> None:
        """Backward, with the method's curvature, and the optimizer's step."""
        self.backward(loss)
        self.optimizer.step()

    def own(self, loss: Tensor) -> None:
        if isinstance(self.optimizer, hesscale.optim.CurvatureOptimizer):
            self.optimizer.backward(loss)
        else:
            loss.backward()

    def extend(self) -> None:
        """Make the network and the loss BackPACK's."""
        try:
            package: Any = importlib.import_module("backpack")
            self.extension: Any = getattr(importlib.import_module("backpack.extensions"), self.method.source)
        except ImportError as error:
            raise LeftOut(f"BackPACK is not installed ({error}): pip install backpack-for-pytorch") from None
        self.extending = package.backpack
        self.model, self.criterion = package.extend(self.model), package.extend(self.criterion)
        self.field: str = self.extension().savefield

    def backpack(self, loss: Tensor) -> None:
        """BackPACK's diagonal, for the update of AdaHesScale."""
        with self.extending(self.extension()):
            loss.backward()
        for p in self.model.parameters():
            p.hess_diag = getattr(p, self.field)  # type: ignore[attr-defined]
            delattr(p, self.field)


def compiled_step(model: nn.Module, criterion: nn.Module, optimizer: torch.optim.Optimizer, mode: str) -> Any:
    make = getattr(hesscale, "compile_step", None)
    if make is None:
        raise LeftOut("this version of hesscale has no compile_step")
    return make(model, loss_by(criterion), optimizer, backend="inductor", cuda_graph=mode == GRAPH)


def loss_by(criterion: nn.Module) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
    """The loss as a function of the model and a batch."""

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = criterion(model(x), y)
        return loss

    return loss_fn
