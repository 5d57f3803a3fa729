"""The optimizers themselves: which Hessian diagonal each takes, and what its V averages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import estimators
from ..distributed.averaging import averaged_with_gradients
from ..distributed.draws import generator_for
from ..engine.arguments import check_loss
from ..engine.backward import own_pass
from ..engine.nodes import leaves_of
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
    """Adam; with ``trust_radius``, the paper's Scaled Adam, whose trust region uses HesScale diagonals."""

    method = "hesscale"
    squares_gradient = True


class Sampled(CurvatureOptimizer):
    """Optimizers whose Hessian diagonal is a random estimate.

    Args:
        num_samples: draws per step, whose mean is used.
        generator: where the draws come from; None for torch's default generator.
        args, options: as in :class:`CurvatureOptimizer`.
    """

    def __init__(self, params: Any, *args: Any, num_samples: int = 1, generator: torch.Generator | None = None, **options: Any):
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples!r} is out of range")
        self.num_samples, self.generator = num_samples, generator
        super().__init__(params, *args, **options)

    draws_signs: ClassVar[bool] = False  # of parameters, which several processes share, and not at the outputs of samples

    def fill_curvature(self, loss: Tensor, *, retain_graph: bool = False, scale: Tensor | None = None, **options: Any) -> None:
        check_loss(loss)
        with averaged_with_gradients(partial(leaves_of, loss), self.curvature_dtype):
            self.fill_curvature_alone(loss, scale=scale, **options)
            with own_pass():
                loss.backward(retain_graph=retain_graph)

    @property
    def estimator(self) -> str:
        """The estimate's name in :mod:`hesscale.estimators`."""
        return self.method

    def diagonals(self, loss: Tensor, params: list[Tensor], **options: Any) -> Sequence[Tensor | None]:
        """Estimates of the diagonals. ``head`` and ``fallback`` concern the recursion alone, and change nothing here."""
        return estimators.estimate(
            self.estimator,
            loss,
            params,
            num_samples=self.num_samples,
            outputs=options.get("outputs"),
            generator=self.generator or generator_for(params, self.param_groups[0]["step_count"], is_shared=self.draws_signs),
            retain_graph=True,
        )


class AdaHessian(Sampled):
    """:class:`AdaHesScale` with Hutchinson's estimate z∘Hz of the diagonal in V, as in the paper.

    Args:
        spatial_average: average |z∘Hz| over the window of a convolution's kernel.
    """

    method = "hutchinson"
    draws_signs = True

    def __init__(self, params: Any, *args: Any, spatial_average: bool = False, **options: Any):
        self.spatial_average = spatial_average
        super().__init__(params, *args, **options)

    def prepare(self, curvature: Tensor) -> Tensor:
        if not self.spatial_average or curvature.dim() < 3:
            return curvature
        window = tuple(range(2, curvature.dim()))
        return curvature.abs().mean(window, keepdim=True).expand_as(curvature)


class GGNMC(Sampled):
    """:class:`AdaHesScale` with a Monte-Carlo estimate of the Gauss-Newton diagonal in V.

    Args:
        per_sample: square the draw of each sample, as the paper does. By default, the draw of the whole batch is squared; that
            works for every model, but some entries are close to zero by chance.
    """

    method = "ggn_mc"

    def __init__(self, params: Any, *args: Any, per_sample: bool = False, **options: Any):
        self.per_sample = per_sample
        super().__init__(params, *args, **options)

    @property
    def estimator(self) -> str:
        return "ggn_mc_per_sample" if self.per_sample else self.method
