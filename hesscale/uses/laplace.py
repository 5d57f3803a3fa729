"""A curvature backend for laplace-torch, which must be installed: ``Laplace(…, "diag", backend=HesScaleGN)``."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NoReturn

import torch
from laplace.curvature import GGNInterface
from torch import Tensor, nn

from .gauss_newton import METHODS, check_method, gauss_newton

__all__ = ["HesScaleGN"]


class HesScaleGN(GGNInterface):
    """The diagonal of the Gauss-Newton matrix by HesScaleGN, for laplace-torch's diagonal posteriors.

    It supports ``hessian_structure="diag"`` with ``subset_of_weights`` "all", "last_layer" and "subnetwork", for classification
    and regression. In the last layer, the diagonal is exact. A posterior precision must be positive. HesScaleGN is never negative
    for these likelihoods, but HesScale may be, so it is not supported.

    With the likelihood "reward_modeling", the model is applied to two inputs, and their outputs are compared. HesScaleGN is then
    not exact even in the last layer, so choose another method.

    Options are given as ``backend_kwargs``; laplace-torch sets the other arguments.

    Args:
        method: ``"hesscale_gn"``, or an estimator of the Gauss-Newton diagonal: ``"ggn_mc_per_sample"`` (unbiased, for linear
            layers and convolutions), ``"ggn_mc"`` (unbiased, noisier, for every model) or ``"ggn"`` (exact, for small batches).
        num_samples: how many draws the random methods and the calibration average for each batch.
        calibrate: scale HesScaleGN so that its sum over each parameter tensor and batch is that of a Monte-Carlo estimate.
        generator: random number generator of the draws; None for torch's default generator.

    Example:
        ``Laplace(model, "classification", "all", "diag", backend=HesScaleGN, backend_kwargs={"calibrate": True})``
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str,
        last_layer: bool = False,
        subnetwork_indices: torch.LongTensor | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        *,
        method: str = "hesscale_gn",
        num_samples: int = 1,
        calibrate: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        check_method(method, calibrate, METHODS)
        super().__init__(model, likelihood, last_layer, subnetwork_indices, dict_key_x, dict_key_y, num_samples=num_samples)
        self.method, self.calibrate, self.generator = method, calibrate, generator

    def diag(self, x: Tensor | MutableMapping[str, Any], y: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood of a batch, as a sum over samples without the constant, and its Gauss-Newton diagonal."""
        f = self.model(x)
        if self.likelihood == "classification":
            f, y = f.reshape(-1, f.shape[-1]), y.reshape(-1)
        loss = self.factor * self.lossfunc(f, y)
        diagonals = gauss_newton(
            loss,
            self.params,
            method=self.method,
            num_samples=self.num_samples,
            calibrate=self.calibrate,
            generator=self.generator,
        )
        vector = torch.cat([diagonal.flatten() for diagonal in diagonals])
        return loss.detach(), vector if self.subnetwork_indices is None else vector[self.subnetwork_indices]

    def full(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(ONLY_DIAGONALS)

    def kron(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(ONLY_DIAGONALS)


ONLY_DIAGONALS = (
    "HesScaleGN computes diagonals only: pass hessian_structure='diag', or use CurvlinopsGGN, laplace-torch's default backend"
)
