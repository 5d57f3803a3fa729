"""Elastic weight consolidation: a penalty that keeps parameters that are important for earlier tasks near their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from ..estimators import estimate
from .derivatives import LossFunction, losses, trained, undisturbed, zeros
from .gauss_newton import METHODS, check_method, gauss_newton

__all__ = ["EWC", "importance"]
EMPIRICAL_FISHER = "empirical_fisher"


def importance(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction,
    *,
    method: str = "hesscale_gn",
    num_samples: int = 1,
    calibrate: bool = False,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The importance of each parameter for the data of a loader: the curvature of the mean loss, by parameter name.

    The model is in evaluation mode during the pass. Its modes and buffers are restored afterwards. No ``.grad`` changes.
    Parameters that do not require gradients are left out.

    Args:
        loader: batches. A tuple or list is unpacked, anything else is one argument; tensors move to the model's device.
        loss_fn: ``loss_fn(model, *batch)``, the mean loss of a batch. Batches are weighted by their numbers of examples: the
            lengths of their first tensors.
        method: ``"hesscale_gn"``; ``"ggn"`` (exact), ``"ggn_mc"`` or ``"ggn_mc_per_sample"`` for the Gauss-Newton diagonal; or
            ``"empirical_fisher"`` for the mean of the squared gradients of single samples.
        num_samples: how many draws the random methods and the calibration average for each batch.
        calibrate: scale HesScaleGN so that its sum over each parameter and batch is that of a Monte-Carlo estimate. Use this for
            convolutional networks, in whose first layers HesScaleGN is far too small.
        generator: random number generator of the draws; None for torch's default generator.

    Example:
        >>> import torch
        >>> from hesscale.uses.continual import importance
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 2.0], [3.0, 0.0]])
        >>> importance(model, [x], lambda model, x: model(x).square().mean())
        {'weight': tensor([[10.,  4.]])}
    """
    check_method(method, calibrate, (*METHODS, EMPIRICAL_FISHER))
    if method == EMPIRICAL_FISHER:
        diagonals = partial(estimate, method)
    else:
        diagonals = partial(gauss_newton, method=method, num_samples=num_samples, calibrate=calibrate, generator=generator)
    params, examples = trained(model), 0
    total = {name: zeros(p) for name, p in params.items()}
    with undisturbed(model), torch.enable_grad():
        for loss, size in losses(model, loader, loss_fn):
            for sum_, diagonal in zip(total.values(), diagonals(loss, list(params.values())), strict=True):
                sum_.add_(diagonal, alpha=size)
            examples += size
    found = {name: sum_ / examples for name, sum_ in total.items()}
    for name, mean in found.items():
        if not mean.isfinite().all():
            raise NonFiniteError(f"the importance of {name} is not finite, although the loss is")
    return found


class EWC:
    """Elastic weight consolidation (Kirkpatrick et al., 2017), with any importance in place of the Fisher diagonal.

    After each task, :meth:`consolidate` stores the parameters θ* and their importance F. While the next task is trained, add λ
    times :meth:`penalty` to the loss:

        ½ Σ_t Σ_i F_ti (θ_i − θ*_ti)²

    With ``decay=γ``, this is the online variant (Schwarz et al., 2018), which needs no memory for further tasks: it stores only
    the θ* of the latest task, and F ← γ F + F_t.

    Args:
        model: the penalty applies to its parameters that require gradients.
        decay: γ, from 0 to 1; None for one term per task.

    Example:
        >>> import torch
        >>> from hesscale.uses.continual import EWC
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> ewc = EWC(model)
        >>> ewc.consolidate({"weight": torch.tensor([[10.0, 4.0]])})
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1)
        >>> ewc.penalty()
        tensor(7., grad_fn=<MulBackward0>)
    """

    def __init__(self, model: nn.Module, *, decay: float | None = None) -> None:
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"{decay=} must be between 0 and 1, or None for one term per task")
        self.model, self.decay = model, decay
        self.terms: list[dict[str, dict[str, Tensor]]] = []

    @torch.no_grad()
    def consolidate(self, importance: Mapping[str, Tensor]) -> None:
        """Store the current parameters and their importance. ``importance`` has a nonnegative tensor for each parameter name."""
        named = trained(self.model)
        if set(importance) - set(named):
            unknown = ", ".join(sorted(set(importance) - set(named)))
            raise ValueError(f"{unknown} is not a parameter of the model that requires gradients; these are {', '.join(named)}")
        for name, value in importance.items():
            check(name, value, named[name])
        weights = {name: stored(value, named[name]) for name, value in importance.items()}
        before = [] if self.decay is None else self.terms
        for term in before:
            for name, value in term["importance"].items():
                weights.setdefault(name, torch.zeros_like(value)).add_(value, alpha=self.decay)
        params = self.held(weights)
        before.clear()
        self.terms.append({"importance": weights, "anchor": {name: p.detach().clone() for name, p in params.items()}})

    def penalty(self) -> Tensor:
        """½ Σ_t Σ_i F_ti (θ_i − θ*_ti)²; zero before the first :meth:`consolidate`."""
        total = zeros(next(self.model.parameters()).new_zeros(()))
        for term in self.terms:
            params = self.held(term["importance"])
            for name, value in term["importance"].items():
                total = total + (value * (params[name] - term["anchor"][name]).to(value).square()).sum()
        return 0.5 * total

    def held(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """The model's parameters of these names."""
        params = dict(self.model.named_parameters())
        if missing := [name for name in names if name not in params]:
            raise ValueError(
                f"an earlier task has stored {', '.join(missing)}, which the model no longer has; it has {', '.join(params)}. If "
                "a parameter was renamed, for example by torch.nn.utils.prune, rename it in state_dict(), and load that"
            )
        return {name: params[name] for name in names}

    def state_dict(self) -> dict[str, Any]:
        """The stored parameters and their importance. A file of it can be loaded by ``torch.load(…, weights_only=True)``."""
        return {"decay": self.decay, "terms": [{kind: dict(tensors) for kind, tensors in term.items()} for term in self.terms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`. It does not contain the model's current parameters, so load these separately."""
        params = dict(self.model.named_parameters())
        terms = []
        for term in state["terms"]:
            for kind in ("importance", "anchor"):
                for name, value in term[kind].items():
                    if name not in params or params[name].shape != value.shape:
                        found = f"one of shape {tuple(params[name].shape)}" if name in params else "none"
                        raise ValueError(
                            f"the state has a parameter {name} of shape {tuple(value.shape)}, and the model has {found}; "
                            "load the state into an EWC of the model for which it was saved"
                        )
            weights = {name: stored(value, params[name]) for name, value in term["importance"].items()}
            anchors = {name: value.detach().to(params[name], copy=True) for name, value in term["anchor"].items()}
            terms.append({"importance": weights, "anchor": anchors})
        self.decay, self.terms = state["decay"], terms


def stored(importance: Tensor, p: Tensor) -> Tensor:
    """A copy for this parameter, at least in single precision, since half precision would round small values to zero."""
    return importance.detach().to(zeros(p), copy=True)


def check(name: str, value: Tensor, p: Tensor) -> None:
    if value.shape != p.shape:
        raise ValueError(f"the importance of {name} has shape {tuple(value.shape)}, and the parameter {tuple(p.shape)}")
    lowest = float(value.min()) if value.numel() else 0.0
    if not (lowest >= 0 and math.isfinite(float(value.sum()))):
        raise ValueError(
            f"the importance of {name} has entries that are negative or not finite (the smallest is {lowest:g}), so the penalty "
            "would have no minimum; use a method that is never negative for your loss, such as 'empirical_fisher'"
        )
