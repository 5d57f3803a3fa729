"""The optimizers themselves: which diagonal they take, and what they square."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import estimators
from ..engine.arguments import check_loss
from ..engine.backward import own_pass
from .base import CurvatureOptimizer


class AdaHesScale(CurvatureOptimizer):
    """Adam with the HesScale diagonal in place of the gradient in V (Algorithm 2); with ``trust_radius``, Algorithm 3.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        >>> loss = model(torch.ones(2, 3)).square().mean()
        >>> optimizer.backward(loss)
        >>> optimizer.step()
    """

    method = "hesscale"


class AdaHesScaleGN(CurvatureOptimizer):
    """:class:`AdaHesScale` with the Gauss-Newton diagonal, which leaves out the model's second derivatives."""

    method = "hesscale_gn"


class BL89(CurvatureOptimizer):
    """:class:`AdaHesScale` with the diagonal of Becker and LeCun."""

    method = "bl89"


class Adam(CurvatureOptimizer):
    """Adam; with ``trust_radius`` the paper's Scaled Adam, whose trust region is measured by HesScale diagonals."""

    method = "hesscale"
    squares_gradient = True


class Sampled(CurvatureOptimizer):
    """Optimizers whose diagonal is a random estimate."""

    def __init__(self, params: Any, *args: Any, num_samples: int = 1, generator: torch.Generator | None = None, **options: Any):
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples!r} is out of range")
        self.num_samples, self.generator = num_samples, generator
        super().__init__(params, *args, **options)

    def fill_curvature(self, loss: Tensor, *, retain_graph: bool = False, scale: Tensor | None = None, **options: Any) -> None:
        check_loss(loss)
        self.fill_curvature_alone(loss, scale=scale, **options)
        with own_pass():
            loss.backward(retain_graph=retain_graph)

    @property
    def estimator(self) -> str:
        """The name of the estimate in :mod:`hesscale.estimators`."""
        return self.method

    def diagonals(self, loss: Tensor, params: list[Tensor], **options: Any) -> Sequence[Tensor | None]:
        """An estimate; ``head`` and ``fallback`` are for the recursion and do nothing here."""
        return estimators.estimate(
            self.estimator,
            loss,
            params,
            num_samples=self.num_samples,
            outputs=options.get("outputs"),
            generator=self.generator,
            retain_graph=True,
        )


class AdaHessian(Sampled):
    """Hutchinson's estimate z∘Hz in V, as the paper has it; ``spatial_average`` averages |z∘Hz| over a kernel's window."""

    method = "hutchinson"

    def __init__(self, params: Any, *args: Any, spatial_average: bool = False, **options: Any):
        self.spatial_average = spatial_average
        super().__init__(params, *args, **options)

    def prepare(self, curvature: Tensor) -> Tensor:
        if not self.spatial_average or curvature.dim() < 3:
            return curvature
        window = tuple(range(2, curvature.dim()))
        return curvature.abs().mean(window, keepdim=True).expand_as(curvature)


class GGNMC(Sampled):
    """The Monte-Carlo estimate of the Gauss-Newton diagonal in V; ``per_sample`` squares each sample's draw, as the paper does.

    Without, the draw of the whole batch is squared: for every model, but with entries that are next to zero by chance.
    """

    method = "ggn_mc"

    def __init__(self, params: Any, *args: Any, per_sample: bool = False, **options: Any):
        self.per_sample = per_sample
        super().__init__(params, *args, **options)

    @property
    def estimator(self) -> str:
        return "ggn_mc_per_sample" if self.per_sample else self.method
