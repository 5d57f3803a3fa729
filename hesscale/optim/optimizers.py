"""The optimizers: which Hessian diagonal each of them uses, and what its V averages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .. import estimators
from ..distributed.averaging import averaged_with_gradients
from ..distributed.draws import generator_for
from ..engine.arguments import check_loss
from ..engine.backward import own_pass
from ..engine.nodes import leaves_of
from .base import CurvatureOptimizer
from .batches import Batch
from .bounds import NEUTRAL, SAFE_DAMPING, SAFE_GRAFT
from .options import check_count, check_range
from .scalars import counter_dtype
from .update import divide

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from .signatures import CurvatureOptions, SampledOptions, SharedOptions


class BoundedOptimizer(CurvatureOptimizer):
    """Optimizers whose updates are bounded by default.

    Args:
        lr, betas, eps, weight_decay, damping, graft, options: as in :class:`CurvatureOptimizer`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        damping: float = SAFE_DAMPING,
        graft: tuple[float, float] | None = SAFE_GRAFT,
        **options: Unpack[SharedOptions],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, damping=damping, graft=graft, **options)

    @classmethod
    def paper(
        cls,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **options: Any,
    ) -> Self:
        """Create the optimizer of the paper's Algorithm 2, without bounds on the update, or of Algorithm 3 with ``trust_radius``.

        Example:
            >>> import torch, hesscale
            >>> w = torch.tensor([3.0, -2.0], requires_grad=True)
            >>> optimizer = hesscale.AdaHesScale.paper([w], lr=0.1)
            >>> optimizer.backward((torch.tensor([0.01, 100.0]) * w**2).sum())
            >>> optimizer.step()
            >>> w.detach()
            tensor([ 2.7000, -1.8000])
        """
        return cls(params, lr, betas, eps, weight_decay, **NEUTRAL, **options)


class AdaHesScale(BoundedOptimizer):
    """Adam whose V averages squared HesScale diagonals instead of squared gradients (Algorithm 2).

    With ``trust_radius``, it is Algorithm 3. By default, the update of each parameter tensor is as long as Adam's would be, and
    small curvature is damped (``graft=(1, 1), damping=0.03``). So you can use Adam's step sizes. On small networks,
    ``graft=(1, 3)`` learns faster. :meth:`paper` creates the optimizer without these bounds.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-3)
        >>> loss = model(torch.ones(2, 3)).square().mean()
        >>> optimizer.backward(loss)
        >>> optimizer.step()
    """

    method = "hesscale"


class AdaHesScaleGN(BoundedOptimizer):
    """:class:`AdaHesScale` with the Gauss-Newton diagonal, which leaves out the model's second derivatives.

    Args:
        calibrate_every: k; at every k-th step, a Monte-Carlo estimate of the exact Gauss-Newton diagonal measures how much of it
            HesScaleGN leaves out. The diagonal of each parameter tensor is then multiplied by one number, so that its sum is
            correct on average. This costs two more backward passes at these steps. None for no calibration.
        generator: the random number generator of the draws; None for torch's default generator.
        lr, betas, eps, weight_decay, options: as in :class:`AdaHesScale`.
    """

    method = "hesscale_gn"
    calibrate_every: int | None = None  # also in pickles of versions without it
    generator: torch.Generator | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        calibrate_every: int | None = None,
        generator: torch.Generator | None = None,
        **options: Unpack[CurvatureOptions],
    ) -> None:
        if calibrate_every is not None:
            check_count("calibrate_every", calibrate_every, minimum=1)
        self.calibrate_every, self.generator = calibrate_every, generator
        super().__init__(params, lr, betas, eps, weight_decay, **options)
        if self.period % self.curvature_every:
            raise ValueError(f"{calibrate_every=} must be a multiple of curvature_every={self.curvature_every}")

    @property
    def period(self) -> int:
        return self.calibrate_every or self.curvature_every

    def phase_at(self, step: int) -> tuple[bool, ...]:
        return (*super().phase_at(step), self.calibrate_every is not None and step % self.calibrate_every == 0)

    def fill_curvature(self, loss: Tensor, *, retain_graph: bool = False, scale: Tensor | None = None, **options: Any) -> None:
        with self.calibrated(loss, **options):
            super().fill_curvature(loss, retain_graph=retain_graph, scale=scale, **options)

    def fill_curvature_alone(self, loss: Tensor, *, scale: Tensor | None = None, **options: Any) -> None:
        with self.calibrated(loss, **options):
            super().fill_curvature_alone(loss, scale=scale, **options)

    @contextmanager
    def calibrated(self, loss: Tensor, **options: Any) -> Iterator[None]:
        """Wraps a backward pass of a loss. Calibrates before the pass if calibration is due."""
        if not self.phase_at(self.param_groups[0]["step_count"])[1]:
            yield
            return
        check_loss(loss)
        with averaged_with_gradients(partial(leaves_of, loss), self.curvature_dtype, also=self.all_calibration_sums):
            self.calibrate(loss, **options)
            yield

    def all_calibration_sums(self) -> list[tuple[Tensor, Tensor]]:
        return [(p, self.calibration_sums(p)) for p in self.parameters()]

    def calibrate(self, loss: Tensor, **options: Any) -> None:
        """Average the sums of both diagonals, unless they are not finite. Bias corrections would cancel in their ratio."""
        params = self.parameters_of(loss)
        if not params:
            return
        recursive = self.diagonals(loss, params, **options)
        outputs = options.get("outputs")
        generator = self.generator or generator_for(params, self.param_groups[0]["step_count"], is_shared=False)
        drawn = estimators.estimate("ggn_mc", loss, params, outputs=outputs, generator=generator, retain_graph=True)
        with torch.no_grad():
            for p, found, target in zip(params, recursive, drawn, strict=True):
                if found is not None and target is not None:
                    sums = self.calibration_sums(p)
                    new = torch.stack([target.sum(), found.sum()]).to(sums.dtype)
                    sums.copy_(torch.where(new.isfinite().all(), sums.lerp(new, 1 - CALIBRATION_DECAY), sums))

    def calibration_sums(self, p: Tensor) -> Tensor:
        """Two averages for a parameter: of the sum of its Monte-Carlo diagonal, and of the sum of its HesScaleGN diagonal."""
        state = self.state[p]
        if "calibration_sums" not in state:
            state["calibration_sums"] = torch.zeros(2, dtype=counter_dtype(p), device=p.device)
        found: Tensor = state["calibration_sums"]
        return found

    def prepare(self, curvature: Tensor, p: Tensor) -> Tensor:
        if self.calibrate_every is None:
            return curvature
        if "calibration_sums" not in self.state[p] and self.phase_at(self.param_groups[0]["step_count"])[1]:
            raise RuntimeError(
                "calibrate_every is set, but hess_diag was not calibrated for this step; call optimizer.backward(loss), or wrap "
                "the loop in `with hesscale.capture(optimizer):`"
            )
        target, found = self.calibration_sums(p).to(curvature.dtype).unbind()
        has_one_sign = target.sign() * found.sign() > 0  # both are negative for a loss that is to be maximized
        return curvature * torch.where(has_one_sign, target / found, 1.0)


CALIBRATION_DECAY = 0.9  # of the sums that a calibration averages, from one calibration to the next


class BL89(CurvatureOptimizer):
    """:class:`AdaHesScale` with the diagonal of Becker and LeCun."""

    method = "bl89"


class Adam(CurvatureOptimizer):
    """Adam. With ``trust_radius``, it is the paper's Scaled Adam, whose trust region uses HesScale diagonals."""

    method = "hesscale"
    squares_gradient = True


class Sampled(CurvatureOptimizer):
    """Optimizers whose Hessian diagonal is a random estimate.

    Args:
        num_samples: number of draws per step. The diagonal is their mean.
        generator: the random number generator of the draws; None for torch's default generator.
        lr, betas, eps, weight_decay, options: as in :class:`CurvatureOptimizer`.
    """

    draws_signs: ClassVar[bool] = False  # whether it draws signs for parameters, the same in all processes; else, at the outputs

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        num_samples: int = 1,
        generator: torch.Generator | None = None,
        **options: Unpack[CurvatureOptions],
    ) -> None:
        check_count("num_samples", num_samples, minimum=1)
        self.num_samples, self.generator = num_samples, generator
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def fill_curvature(self, loss: Tensor, *, retain_graph: bool = False, scale: Tensor | None = None, **options: Any) -> None:
        check_loss(loss)
        with averaged_with_gradients(partial(leaves_of, loss), self.curvature_dtype):
            self.fill_curvature_alone(loss, scale=scale, **options)
            with own_pass():
                loss.backward(retain_graph=retain_graph)

    @property
    def estimator(self) -> str:
        """The estimator's name in :mod:`hesscale.estimators`."""
        return self.method

    def diagonals(self, loss: Tensor, params: list[Tensor], **options: Any) -> Sequence[Tensor | None]:
        """Estimates of the diagonals. ``head`` and ``fallback`` have no effect here."""
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
    """:class:`AdaHesScale` whose V averages squares of Hutchinson's estimate z∘Hz of the diagonal, as in the paper.

    Args:
        lr, betas, eps, weight_decay, options: as in :class:`CurvatureOptimizer`.
        spatial_average: average |z∘Hz| over the spatial dimensions of a convolution's kernel.
    """

    method = "hutchinson"
    draws_signs = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        spatial_average: bool = False,
        **options: Unpack[SampledOptions],
    ) -> None:
        self.spatial_average = spatial_average
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def prepare(self, curvature: Tensor, p: Tensor) -> Tensor:
        if not self.spatial_average or curvature.dim() < 3:
            return curvature
        window = tuple(range(2, curvature.dim()))
        return curvature.abs().mean(window, keepdim=True).expand_as(curvature)


class GGNMC(Sampled):
    """:class:`AdaHesScale` whose V averages squares of a Monte-Carlo estimate of the Gauss-Newton diagonal.

    Args:
        lr, betas, eps, weight_decay, options: as in :class:`CurvatureOptimizer`.
        per_sample: square the gradient of each sample separately, as in the paper. By default, the gradient of the whole batch is
            squared. That works for every model, but some entries are close to zero by chance.
    """

    method = "ggn_mc"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        per_sample: bool = False,
        **options: Unpack[SampledOptions],
    ) -> None:
        self.per_sample = per_sample
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    @property
    def estimator(self) -> str:
        return "ggn_mc_per_sample" if self.per_sample else self.method


class SophiaG(GGNMC):
    """Sophia-G (Liu, Li, Hall, Liang and Ma 2024), a baseline: W ← W − α clip(M ⊘ max(ρH, ε), ±1).

    H averages the Gauss-Newton-Bartlett estimate of the diagonal, which is drawn at every tenth step. M and H have no bias
    correction. ``weight_decay`` is decoupled.

    Args:
        rho: ρ. The smaller it is, the more entries are clipped.
        options: ``num_samples``, ``generator``, ``curvature_dtype``, ``on_nonfinite``, ``maximize`` and ``foreach`` of
            :class:`CurvatureOptimizer`.

    Example:
        >>> import torch, hesscale
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = hesscale.optim.SophiaG(model.parameters(), lr=1e-3)
        >>> loss = torch.nn.functional.cross_entropy(model(torch.ones(4, 3)), torch.tensor([0, 1, 1, 0]))
        >>> optimizer.backward(loss)
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.96, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        rho: float = 0.05,
        curvature_every: int = 10,
        **options: Any,
    ) -> None:
        if unknown := options.keys() - SOPHIA_OPTIONS:
            raise TypeError(f"SophiaG takes no option {', '.join(sorted(unknown))}")
        check_range("rho", rho, rho > 0, "positive")
        check_range("eps", eps, eps > 0, "positive")
        self.rho = rho
        options = {"decoupled_weight_decay": True, "curvature_every": curvature_every, **options}
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if ignored := [name for name in NOT_OF_SOPHIA if param_group.get(name, self.defaults[name]) != self.defaults[name]]:
            raise ValueError(f"a group of SophiaG takes no option {', '.join(ignored)}")
        super().add_param_group(param_group)

    def prepare(self, curvature: Tensor, p: Tensor) -> Tensor:
        """√|S|, so that the average of squares is one of |S|. S is a sum of squares, negative for a loss to be maximized."""
        return curvature.abs().sqrt()

    def updates_of(self, batch: Batch) -> list[Tensor]:
        """An entry is clipped at ±1 by a denominator of at least |M|."""
        denominators = list(torch._foreach_mul(batch.curvature_squares, self.rho))
        torch._foreach_clamp_min_(denominators, batch.group["eps"])
        torch._foreach_maximum_(denominators, torch._foreach_abs(batch.momenta))
        updates = divide(batch, denominators)
        torch._foreach_mul_(updates, batch.group["lr"])
        return updates


SOPHIA_OPTIONS = {"num_samples", "generator", "curvature_dtype", "on_nonfinite", "maximize", "foreach"}
NOT_OF_SOPHIA = (*NEUTRAL, "trust_radius", "bias_correction", "curvature_warmup", "decoupled_weight_decay")
