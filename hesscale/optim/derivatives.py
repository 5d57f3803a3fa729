"""The half of the base class that computes gradients and Hessian diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed.averaging import averaged_with_gradients
from ..distributed.sharding import check_unsharded
from ..engine import backward as engine
from ..engine.arguments import check_choices, check_loss
from ..engine.nodes import edge_of, leaves_of, topological
from ..engine.propagate import accumulate
from .amp import unscaled_curvature


class DerivativeOptimizer(Optimizer):
    """A torch optimizer whose :meth:`backward` fills ``.grad``, and ``.hess_diag`` at the steps that need it."""

    method: ClassVar[str]  # of :func:`hesscale.backward`, or the name of an estimator
    squares_gradient: ClassVar[bool] = False  # whether V averages F², as in Adam, instead of S²
    curvature_every: int
    curvature_dtype: torch.dtype | None
    curvature_is_unscaled: bool  # whether ``hess_diag`` has already been divided by a gradient scaler's factor

    def parameters(self) -> list[Any]:
        """The parameters that may receive a gradient."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @property
    def uses_curvature(self) -> bool:
        """Whether this optimizer needs Hessian diagonals at all. Adam needs them only for a trust region."""
        return not self.squares_gradient or any(group["trust_radius"] is not None for group in self.param_groups)

    @property
    def is_curvature_due(self) -> bool:
        """Whether the next step needs a new Hessian diagonal: every ``curvature_every``-th does. Skipped steps do not count."""
        return self.phase_at(self.param_groups[0]["step_count"])[0]

    @property
    def period(self) -> int:
        """The number of steps after which :meth:`phase_at` repeats."""
        return self.curvature_every

    def phase_at(self, step: int) -> tuple[bool, ...]:
        """What :meth:`backward` computes at step number ``step``. The first entry says whether it computes a Hessian diagonal."""
        return (self.uses_curvature and step % self.curvature_every == 0,)

    def backward(
        self,
        loss: Tensor,
        *,
        scaler: torch.amp.GradScaler | None = None,
        outputs: Tensor | Sequence[Tensor] | None = None,
        retain_graph: bool = False,
        head: str = "auto",
        fallback: str = "error",
    ) -> None:
        """Compute what the next :meth:`step` needs: ``.grad``, and ``.hess_diag`` if it is due.

        Args:
            loss: the loss itself, not scaled by ``scaler``.
            scaler: scales the loss for the backward pass; the resulting curvature is unscaled.
            outputs, retain_graph, head, fallback: as in :func:`hesscale.backward`.

        Example:
            >>> import torch, hesscale
            >>> w = torch.ones(2, requires_grad=True)
            >>> optimizer = hesscale.AdaHesScale([w], lr=0.1)
            >>> optimizer.backward((3 * w**2).sum())
            >>> w.grad, w.hess_diag
            (tensor([6., 6.]), tensor([6., 6.]))
        """
        check_choices(head=head, fallback=fallback)
        scaled = loss if scaler is None else scaler.scale(loss)
        if not self.is_curvature_due:
            scaled.backward(retain_graph=retain_graph)
            return
        scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        self.fill_curvature(scaled, retain_graph=retain_graph, scale=scale, outputs=outputs, head=head, fallback=fallback)

    def fill_curvature(self, loss: Tensor, *, retain_graph: bool = False, scale: Tensor | None = None, **options: Any) -> None:
        """Fill ``.grad`` of every leaf as ``loss.backward()`` does, and ``hess_diag`` of this optimizer's parameters.

        Args:
            scale: the factor of a gradient scaler in the loss; ``hess_diag`` is divided by it.
            options: ``outputs``, ``head`` and ``fallback`` of :func:`hesscale.backward`.
        """
        check_loss(loss)
        options = {"outputs": None, "head": "auto", "fallback": "error", "curvature_dtype": self.curvature_dtype, **options}
        averaged = averaged_with_gradients(partial(leaves_of, loss), self.curvature_dtype, changes_later=scale is not None)
        with averaged, unscaled_curvature(self, scale):
            engine.fill_hess_diags(
                lambda: loss.backward(retain_graph=retain_graph), loss, self.parameters(), method=self.method, **options
            )

    def fill_curvature_alone(self, loss: Tensor, *, scale: Tensor | None = None, **options: Any) -> None:
        """Fill ``hess_diag`` of this optimizer's parameters in a pass of its own, which keeps the graph and every ``.grad``."""
        params = self.parameters_of(loss)
        if not params:
            return
        found = self.diagonals(loss, params, **options)
        with unscaled_curvature(self, scale):
            for p, diagonal in zip(params, found, strict=True):
                accumulate(p, diagonal, p.grad is None, owned=True)

    def parameters_of(self, loss: Tensor) -> list[Tensor]:
        """The parameters that the loss depends on."""
        reached = set(topological(edge_of(loss)[0]))
        check_unsharded(leaves_of(loss))
        return [p for p in self.parameters() if edge_of(p)[0] in reached]

    def diagonals(self, loss: Tensor, params: list[Tensor], **options: Any) -> Sequence[Tensor | None]:
        """The Hessian diagonals of these parameters, by this optimizer's method."""
        options = {"curvature_dtype": self.curvature_dtype, **options}
        return engine.grad(loss, params, method=self.method, retain_graph=True, allow_unused=True, **options)[1]

    def prepare(self, curvature: Tensor, p: Tensor) -> Tensor:
        """A parameter's Hessian diagonal in the form that this optimizer averages. Subclasses may override it."""
        return curvature

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and Hessian diagonals."""
        if not set_to_none or is_profiled():
            super().zero_grad(set_to_none)
        self.curvature_is_unscaled = False
        for group in self.param_groups:
            for p in group["params"]:
                p.hess_diag = None
                if set_to_none:
                    p.grad = None

    def clear_curvature(self) -> None:
        """Clear only the Hessian diagonals."""
        self.curvature_is_unscaled = False
        for group in self.param_groups:
            for p in group["params"]:
                p.hess_diag = None


def is_profiled() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)
