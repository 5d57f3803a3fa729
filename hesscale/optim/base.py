"""The base class of the optimizers: a torch optimizer that also consumes ``hess_diag``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

from ..engine.arguments import check_choices
from ..errors import CurvatureWarning, NonFiniteError
from . import trust_region as algorithm_3
from .amp import clear_scaler_attributes, unscale
from .batches import Batch, collect, is_initialization, prepare_curvature
from .bounds import LONG_ENTRY, SAFE_DAMPING, SAFE_GRAFT, WATCHED_STEPS
from .checkpoints import complete_loaded_state, picklable_attributes, upgrade_pickle
from .derivatives import DerivativeOptimizer, is_profiled
from .nonfinite import NonFiniteCheck, is_capturing, nonfinite_parameters
from .options import check_count, check_group, check_trust_region
from .packing import Packing
from .scalars import is_on_host
from .signatures import full_signature
from .update import apply_update, longest_entry, regularize, update_averages, updates_of


class CurvatureOptimizer(DerivativeOptimizer):
    """A torch optimizer that scales its step by Hessian diagonals.

    Args:
        params: parameters, or groups of them as dicts.
        lr: the step size α. It may be a tensor, and a scheduler may change it.
        betas: decay rates β₁ of the average of gradients and β₂ of the average of squares.
        eps: ε, added to the root in the denominator.
        weight_decay: λ of an L2 penalty ½λ‖W‖², which adds λW to the gradient and λ to the curvature.
        decoupled_weight_decay: shrink the weights by αλW instead, as in AdamW. Neither the averages nor the trust region include
            this part.
        trust_radius: Δ of the trust region (Algorithm 3); None for none.
        trust_region: ``"optimizer"`` scales all parameters by one η, as in the paper. ``"group"`` scales each group by its own η.
        bias_correction: let the trust region use the bias-corrected average of curvature, as in Algorithm 3.
        curvature_every: k; :meth:`backward` computes curvature at every k-th step, and only the gradient at all other steps,
            which use the average of curvature as it is. The bias correction of this average counts curvature updates, not steps.
        curvature_warmup: k; the first k Hessian diagonals only update the averages, and the weights do not change. Without it, V̂
            is a single squared diagonal at the first step. Some of its entries are close to zero by chance, and only ε would
            bound their steps. Ten diagonals are enough.
        damping: δ; adds δ times the mean of √V̂ over the parameter tensor to the denominator. 0 for no damping.
        update_clip: γ; clips the entries of M̂ ⊘ (√V̂ + ε) at ±γ, before the step size is applied. None for no clipping.
        graft: (a, b); makes the update of each parameter tensor at least a times and at most b times as long as Adam's would be
            with the same step size. With (1, 1), which is known as grafting, the curvature sets only the direction. This option
            needs an average of squared gradients, one more tensor per parameter. None for updates of any length.
        curvature_dtype: compute the curvature's matrix products and convolutions in this dtype, as in :func:`hesscale.backward`.
        on_nonfinite: what to do at a step with a non-finite gradient or curvature. Such a step never changes weights or averages.
            ``"raise"`` raises :class:`hesscale.NonFiniteError`. On a CPU, it does so at once, with the names of the parameters if
            the optimizer was made from ``model.named_parameters()``. On CUDA, it does so at a later step, to avoid waiting for
            the device. ``"skip"`` only counts the step in ``nonfinite_steps``.
        maximize: maximize the loss instead of minimizing it.
        foreach: update all parameters in a few calls (the default), or one by one with False.
        capturable: has no effect, since every step can be captured in a CUDA graph. A CUDA graph repeats the captured step, so
            with ``curvature_every``, capture steps with and without curvature separately. A replay raises no errors, so check
            ``nonfinite_steps`` yourself.

    Attributes:
        eta: η of the last step, one tensor per trust region. For a group without gradients or without a trust radius, it is None,
            or 1 if the step was compiled.
        counters: counts of steps, as tensors that every step updates in place on the device. ``"nonfinite"`` counts non-finite
            steps. For trust region i, ``"measured i"`` counts all steps, and ``"scaled i"`` those with η < 1.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled_weight_decay: bool = False,
        trust_radius: float | None = None,
        trust_region: str = "optimizer",
        bias_correction: bool = True,
        curvature_every: int = 1,
        curvature_warmup: int = 0,
        damping: float = 0.0,
        update_clip: float | None = None,
        graft: tuple[float, float] | None = None,
        curvature_dtype: torch.dtype | None = None,
        on_nonfinite: str = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        check_count("curvature_every", curvature_every, minimum=1)
        check_choices(curvature_dtype=curvature_dtype)
        check_trust_region(trust_region)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "trust_radius": trust_radius,
            "bias_correction": bias_correction,
            "curvature_warmup": curvature_warmup,
            "damping": damping,
            "update_clip": update_clip,
            "graft": graft,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        self.option_names = tuple(defaults)
        self.trust_region = trust_region
        self.curvature_every = curvature_every
        self.curvature_dtype = curvature_dtype
        self.counters: dict[str, Tensor] = {}
        self._has_warned_of_length = False
        self.eta: list[Tensor | None] = []
        self.curvature_is_unscaled = False
        self.nonfinite_check = NonFiniteCheck(on_nonfinite, self.counters)
        self._packing = Packing()
        super().__init__(params, defaults)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:
            cls.__signature__ = full_signature(cls)  # type: ignore[attr-defined]

    # --- groups and saved state ---

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("step_count", 0)
        try:
            check_group(group)
            self.check_radii()
        except ValueError:
            self.param_groups.pop()
            raise

    def check_radii(self) -> None:
        """Raise ValueError if the groups give one trust region different radii."""
        algorithm_3.check_radii(self.param_groups, self.trust_region)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **picklable_attributes(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state from a pickle, from a copy, or from what torch's load_state_dict has read."""
        super().__setstate__(state)
        upgrade_pickle(self)
        known: Packing | None = self.__dict__.get("_packing")
        self._packing = Packing(is_enabled=known is None or known.is_enabled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict as torch does, but copy its tensors. Options that the saved groups lack keep this optimizer's values.

        Step counters are moved to the devices of their parameters.
        """
        super().load_state_dict(state_dict)
        self.check_radii()
        complete_loaded_state(self, state_dict)

    # --- the step ---

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters and consume their Hessian diagonals. Returns what ``closure`` returns.

        Raises:
            RuntimeError: if a Hessian diagonal is due and missing.
            NonFiniteError: see ``on_nonfinite``.
        """
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if hooks or optimizer._global_optimizer_pre_hooks or optimizer._global_optimizer_post_hooks or is_profiled():
            return Optimizer.profile_hook_step(CurvatureOptimizer.step_once)(self, closure)
        return self.step_once(closure)

    # Torch would wrap ``step`` in its profiler hook, which costs a fifth of a small step; ``step`` calls the hook if needed.
    step.hooked = True  # type: ignore[attr-defined]

    def step_once(self, closure: Callable[[], Any] | None = None) -> Any:
        """:meth:`step` without its hooks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with torch.no_grad():
                self.nonfinite_check.report_earlier_steps()
                batches = collect(self, self._packing)
                if batches and not is_initialization(self, batches) and self.apply(batches):
                    self.count_step()
                    self._packing.pack(self, batches)
        except BaseException as error:
            clear_scaler_attributes(self)
            if isinstance(error, NonFiniteError):
                self.clear_curvature()
            raise
        self.clear_curvature()
        return loss

    def apply(self, batches: list[Batch]) -> bool:
        """Apply Algorithm 2, and Algorithm 3 in trust regions. Returns False if the host knows that the step was skipped."""
        self.check_radii()
        unscale(self, batches)
        prepare_curvature(self, batches)  # after unscaling, since it need not be linear
        derivatives = [t for batch in batches for t in (*batch.gradients, *batch.curvatures)]
        meshes = dict.fromkeys([batch.mesh for batch in batches if batch.mesh is not None])  # in the same order in all processes
        where = partial(nonfinite_parameters, self.param_groups)
        mask = self.nonfinite_check.check(derivatives, getattr(self, "found_inf", None), meshes, where)
        if mask is not None and is_on_host(mask):
            return False
        self.nonfinite_check.warn_if_zero([t for batch in batches for t in batch.curvatures], meshes)
        for batch in batches:
            regularize(batch, mask)
            update_averages(batch, mask)
        updates = [self.updates_of(batch) for batch in batches]
        self.eta, etas = algorithm_3.step_scales(batches, updates, self.trust_region, self.counters, mask)
        self.warn_if_long(batches, updates, etas)
        for batch, update, eta in zip(batches, updates, etas, strict=True):
            apply_update(batch, update, eta, mask)
        return True

    def updates_of(self, batch: Batch) -> list[Tensor]:
        """U of a batch, from averages that include this step. Subclasses may override it."""
        return updates_of(batch)

    def warn_if_long(self, batches: list[Batch], updates: list[list[Tensor]], etas: list[Tensor | None]) -> None:
        """Warn once if an entry of one of the first steps is far larger than the step size. It waits for a GPU once."""
        if not self.uses_curvature or self._has_warned_of_length or torch.compiler.is_compiling():
            return
        waits = not all(is_on_host(batch.steps[0]) for batch in batches)
        if self.param_groups[0]["step_count"] >= (1 if waits else WATCHED_STEPS) or (waits and is_capturing()):
            return
        longest = max([longest_entry(*parts) for parts in zip(batches, updates, etas, strict=True)])
        if longest > LONG_ENTRY:
            self._has_warned_of_length = True
            warnings.warn(
                f"{type(self).__name__}: a step changes a weight by more than {LONG_ENTRY} times the step size, since the "
                f"weight's curvature is nearly zero. Bound the steps with damping={SAFE_DAMPING} and graft={SAFE_GRAFT}, or "
                "pass curvature_warmup=10 to average ten Hessian diagonals before the first step",
                CurvatureWarning,
                stacklevel=5,  # the line that called step
            )

    def count_step(self) -> None:
        for group in self.param_groups:
            group["step_count"] += 1

    def record_compiled_step(self, etas: Iterable[Tensor], *, report: bool = True) -> None:
        """Record a step that a compiled graph has taken in place of :meth:`step`.

        Args:
            etas: η of each trust region, for :attr:`eta`.
            report: False to count a non-finite step without ever raising an error, whatever ``on_nonfinite`` says.

        Raises:
            NonFiniteError: see ``on_nonfinite``.
        """
        self.eta = list(etas)
        if self.nonfinite_check.record_compiled_step(self.param_groups[0]["step_count"], report=report):
            self.count_step()

    @property
    def scaled_share(self) -> dict[int, Tensor]:
        """The share of steps with η < 1, by trust region: key 0 for the whole optimizer, or else the index of the group."""
        return algorithm_3.scaled_shares(self.counters)

    # --- non-finite steps ---

    @property
    def on_nonfinite(self) -> str:
        """What happens at a non-finite step: ``"raise"`` or ``"skip"``."""
        return self.nonfinite_check.on_nonfinite

    @property
    def nonfinite_steps(self) -> int:
        """How many steps were skipped because of a non-finite number. Reading it waits for the device."""
        return int(self.counters.get("nonfinite", 0))

    def without_nonfinite_errors(self) -> AbstractContextManager[None]:
        """Skip and count steps with non-finite numbers inside the block, without raising an error, not even later.

        Example:
            >>> import torch, hesscale
            >>> w = torch.ones(2, requires_grad=True)
            >>> optimizer = hesscale.AdaHesScale([w])
            >>> optimizer.backward((w / 0).square().sum())
            >>> with optimizer.without_nonfinite_errors():
            ...     optimizer.step()
            >>> optimizer.nonfinite_steps, optimizer.on_nonfinite
            (1, 'raise')
        """
        return self.nonfinite_check.silenced()

    def acknowledge_nonfinite_steps(self) -> None:
        """Treat the steps in ``nonfinite_steps`` as reported.

        Call it after changing ``counters``, for example to those of a saved run. On CUDA, it waits for the device.
        """
        self.nonfinite_check.acknowledge()

    # --- memory of the averages ---

    @property
    def is_packed(self) -> bool:
        """Whether the averages of several parameters are now views of one tensor, which makes steps of small networks faster."""
        return self._packing.is_packed

    def unpack(self) -> None:
        """Move the averages back into one tensor per parameter. They stay there, even after :meth:`load_state_dict`.

        Example:
            >>> import torch, hesscale
            >>> model = torch.nn.Linear(3, 1)
            >>> optimizer = hesscale.AdaHesScale(model.parameters())
            >>> optimizer.backward(model(torch.ones(2, 3)).square().mean())
            >>> optimizer.step()
            >>> optimizer.is_packed
            True
            >>> optimizer.unpack()
            >>> optimizer.is_packed
            False
        """
        self._packing.unpack()
