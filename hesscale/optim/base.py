"""What the optimizers share: they are torch optimizers that also consume ``hess_diag``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer, optimizer

from ..engine import backward as engine
from ..engine.arguments import check_choices, check_loss
from ..engine.nodes import edge_of, topological
from ..engine.propagate import accumulate
from ..errors import NonFiniteError
from . import update
from .nonfinite import Watch, counter
from .options import check_count, check_group, check_trust_region
from .packing import Pack, is_packable
from .update import Batch


class CurvatureOptimizer(Optimizer):
    """A torch optimizer that scales its step by Hessian diagonals.

    Args:
        params: parameters, or groups of them as dicts.
        lr: the step size α; a tensor or a scheduler may change it.
        betas: decay rates β₁ of the gradient and β₂ of the squares.
        eps: ε, added to the root in the denominator.
        weight_decay: λ of an L2 penalty ½λ‖W‖²: λW joins the gradient and λ the curvature. With ``decoupled_weight_decay`` the
            weights shrink by αλ instead, which is neither in the averages nor in what the trust region measures.
        trust_radius: Δ of the trust region (Algorithm 3); None for none.
        trust_region: ``"optimizer"`` scales all parameters by one η, as the paper does, ``"group"`` each group by its own.
        bias_correction: measure the trust region with the bias-corrected curvature average, as in Algorithm 3.
        curvature_every: :meth:`backward` computes curvature at every k-th step and a plain gradient at the others, whose update
            and trust region go on with the last average; its bias correction counts curvature updates.
        curvature_warmup: the first k Hessian diagonals only fill the averages, and weights wait: after one, V̂ is its square, and
            where that is next to zero by chance the step is as long as ε allows. Ten are enough for that.
        curvature_dtype: compute the curvature's matrix products and convolutions in this dtype, as in :func:`hesscale.backward`.
        on_nonfinite: a step with a non-finite gradient or curvature never reaches weights or averages; ``"raise"`` reports it
            (on CUDA once the result is there, without stalling), ``"skip"`` only counts it in ``nonfinite_steps``.
        maximize: ascend.
        foreach: update all parameters in a few calls (the default), or one by one with False.
        capturable: allow the step in a CUDA graph. It is written for that anyway; a graph repeats what was captured, so with
            ``curvature_every`` capture the two kinds of step apart, and read ``nonfinite_steps`` yourself: nothing is raised.
    """

    method: ClassVar[str]
    squares_gradient: ClassVar[bool] = False  # Adam's V holds F², not S²
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
        curvature_dtype: torch.dtype | None = None,
        on_nonfinite: str = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        check_count("curvature_every", curvature_every, 1)
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
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        self.option_names = tuple(defaults)
        self.trust_region = trust_region
        self.curvature_every = curvature_every
        self.curvature_dtype = curvature_dtype
        self.counters: dict[str, Tensor] = {}  # of steps, in place and on their device: "nonfinite", and two per trust region
        self.watch = Watch(on_nonfinite, self.counters)
        self._packs: dict[int, Pack] | None = {}  # by the number of a group; None for never
        self.eta: list[Tensor | None] = []  # of the last step, one per trust region; None, or compiled 1, where one took no part
        self.curvature_is_unscaled = False
        super().__init__(params, defaults)

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

    def __getstate__(self) -> dict[str, Any]:
        own = {
            name: value for name, value in self.__dict__.items() if name[0] != "_" and not callable(value)
        }  # no scheduler's step
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "curvature_warmup" not in self.defaults:  # of a version without it
            for options in (self.defaults, *self.param_groups):
                options["curvature_warmup"] = 0
            self.option_names = tuple(self.defaults)
        self._packs = None if self.__dict__.get("_packs", {}) is None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but tensors are copied, and options that the saved groups lack are this optimizer's.

        Step counters stay with their parameters.
        """
        super().load_state_dict(state_dict)
        self.check_radii()
        for group in self.param_groups:
            for name in self.option_names:
                group.setdefault(name, self.defaults[name])
            group.setdefault("step_count", 0)
            for p in group["params"]:
                state = self.state.get(p, {})
                for name in {"step", "curvature_step"} & state.keys():
                    state[name] = torch.as_tensor(state[name]).to(device=p.device, dtype=torch.float32)
                state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})

    def check_radii(self) -> None:
        """One trust region has one radius."""
        radii = [group["trust_radius"] for group in self.param_groups if "trust_radius" in group]
        is_plain = not any(isinstance(radius, Tensor) for radius in radii)
        if self.trust_region == "optimizer" and is_plain and len(set(radii)) > 1:
            raise ValueError("one trust region has one trust_radius; pass trust_region='group' to give each group its own")

    @property
    def uses_curvature(self) -> bool:
        """Whether this optimizer needs Hessian diagonals at all: Adam does for its trust region alone."""
        return not self.squares_gradient or any(group["trust_radius"] is not None for group in self.param_groups)

    @property
    def is_curvature_due(self) -> bool:
        """Whether the next step is one of those that take a new Hessian diagonal: every k-th, not counting steps left out."""
        return self.uses_curvature and self.param_groups[0]["step_count"] % self.curvature_every == 0

    def backward(
        self,
        loss: Tensor,
        *,
        scaler: torch.amp.GradScaler | None = None,
        outputs: Tensor | Sequence[Tensor] | None = None,
        retain_graph: bool = False,
        head: str = "exact",
        fallback: str = "error",
    ) -> None:
        """Fill what the next :meth:`step` needs: ``.grad``, and ``.hess_diag`` if it is due.

        Args:
            loss: the loss itself, not scaled by ``scaler``.
            scaler: scales the loss for the backward pass; the curvature comes out unscaled.
            outputs, retain_graph, head, fallback: as in :func:`hesscale.backward`.
        """
        check_choices(head=head, fallback=fallback)
        scaled = loss if scaler is None else scaler.scale(loss)
        if not self.is_curvature_due:
            scaled.backward(retain_graph=retain_graph)
            return
        scale = None if scaler is None else scaler.scale(torch.ones((), device=loss.device))
        self.fill_curvature(scaled, retain_graph=retain_graph, scale=scale, outputs=outputs, head=head, fallback=fallback)

    def fill_curvature(self, loss: Tensor, *, retain_graph: bool = False, scale: Tensor | None = None, **options: Any) -> None:
        """``.grad`` of every leaf as ``loss.backward()`` fills it, and ``hess_diag`` of this optimizer's parameters."""
        check_loss(loss)
        options = {"outputs": None, "head": "exact", "fallback": "error", "curvature_dtype": self.curvature_dtype, **options}
        with unscaled(self, scale) if scale is not None else nullcontext():
            engine.carry(lambda: loss.backward(retain_graph=retain_graph), loss, self.parameters(), method=self.method, **options)

    def fill_curvature_alone(self, loss: Tensor, *, scale: Tensor | None = None, **options: Any) -> None:
        """``hess_diag`` of this optimizer's parameters, in a pass of its own that keeps the graph and touches no ``.grad``."""
        reached = set(topological(edge_of(loss)[0]))
        params = [p for p in self.parameters() if edge_of(p)[0] in reached]
        if not params:
            return
        found = self.diagonals(loss, params, **options)
        with unscaled(self, scale) if scale is not None else nullcontext():
            for p, diagonal in zip(params, found, strict=True):
                accumulate(p, diagonal, p.grad is None, owned=True)

    def diagonals(self, loss: Tensor, params: list[Tensor], **options: Any) -> Sequence[Tensor | None]:
        """The Hessian diagonals that this optimizer averages."""
        options = {"curvature_dtype": self.curvature_dtype, **options}
        return engine.grad(loss, params, method=self.method, retain_graph=True, allow_unused=True, **options)[1]

    def parameters(self) -> list[Any]:
        """The parameters that may receive a gradient."""
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

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
        self.curvature_is_unscaled = False
        for group in self.param_groups:
            for p in group["params"]:
                p.hess_diag = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters and consume their Hessian diagonals; returns what ``closure`` returns.

        Raises:
            RuntimeError: if a Hessian diagonal is due and missing.
            NonFiniteError: see ``on_nonfinite``.
        """
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        if hooks or optimizer._global_optimizer_pre_hooks or optimizer._global_optimizer_post_hooks or is_profiled():
            return Optimizer.profile_hook_step(CurvatureOptimizer.step_once)(self, closure)
        return self.step_once(closure)

    step.hooked = True  # type: ignore[attr-defined]  # torch would run the above at every step: a fifth of what a small one costs

    @torch.no_grad()
    def step_once(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self.watch.report()
            batches = self.collect()
            if batches and self.apply(batches):
                for group in self.param_groups:
                    group["step_count"] += 1
                self.pack(batches)
        except BaseException as error:
            for name in ("grad_scale", "found_inf"):  # GradScaler takes its marks away only where step returns
                self.__dict__.pop(name, None)
            if isinstance(error, NonFiniteError):
                self.clear_curvature()
            raise
        self.clear_curvature()
        return loss

    def note_step(self, etas: Iterable[Tensor]) -> None:
        """Take note of a step that a compiled graph has made, as :meth:`step` does of its own."""
        self.eta = list(etas)
        if self.watch.note(self.param_groups[0]["step_count"]):
            for group in self.param_groups:
                group["step_count"] += 1

    def collect(self) -> list[tuple[dict[str, Any], Batch]]:
        """The parameters that have a gradient, in batches that one foreach call can serve."""
        found: list[tuple[dict[str, Any], Batch]] = []
        for i, group in enumerate(self.param_groups):
            packed = self.collect_packed(i, group)
            if packed is not None:
                found.append((group, packed))
                continue
            batches: dict[object, Batch] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} takes dense gradients; build the embedding with sparse=False")
                key = (p.device, p.dtype, id(p) if group["foreach"] is False else None)
                self.enter(p, batches.setdefault(key, Batch()))
            entered = [(group, batch) for batch in batches.values()]
            if any(update.is_on_host(batch.steps[0]) and float(batch.steps[0]) > 0 for _, batch in entered):
                self.pack(entered)  # a state that was loaded: the next step must round as it would have without
                packed = self.collect_packed(i, group)
            found += entered if packed is None else [(group, packed)]
        self.check_curvature([batch for _, batch in found])
        return found

    def collect_packed(self, i: int, group: dict[str, Any]) -> Batch | None:
        """The whole group as one tensor of each kind, where an earlier step has found that to be faster."""
        pack = None if self._packs is None else self._packs.get(i)
        if pack is None or group["foreach"] is False or hasattr(self, "found_inf"):
            return None
        if self.uses_curvature != bool(pack.batch.curvature_squares):  # a trust region has come or gone
            return None
        gradients = [p.grad for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        diagonals = [getattr(p, "hess_diag", None) for p in group["params"]] if self.uses_curvature else []
        curvatures = [diagonal for diagonal in diagonals if diagonal is not None]
        count = len(pack.params)
        if len(gradients) < count or len(curvatures) not in (0, count) or not pack.holds(group["params"], self.state):
            return None
        if any(curvature.shape != p.shape for curvature, p in zip(curvatures, pack.params, strict=False)):
            return None
        return pack.filled(gradients, [self.prepare(curvature) for curvature in curvatures])

    def pack(self, batches: list[tuple[dict[str, Any], Batch]]) -> None:
        """Keep the averages of small parameters in one tensor from the next step on."""
        for group, batch in batches:
            is_whole = batch.pack is None and len(batch.params) == len(group["params"]) and not hasattr(self, "found_inf")
            if is_whole and self._packs is not None and group["foreach"] is not False and is_packable(batch):
                self._packs[next(i for i, known in enumerate(self.param_groups) if known is group)] = Pack(batch, self.state)

    def unpack(self) -> None:
        """Give every parameter's state memory of its own, for good."""
        for pack in (self._packs or {}).values():
            for state in pack.states:
                state.update({name: value.clone() for name, value in state.items() if isinstance(value, Tensor)})
        self._packs = None

    def enter(self, p: Tensor, batch: Batch) -> None:
        """Put a parameter and its state into a batch."""
        state = self.state[p]
        if self.squares_gradient and state and "exp_avg_sq" not in state:
            raise RuntimeError(
                "the loaded state has no exp_avg_sq: it is that of an optimizer that does not average squared gradients"
            )
        batch.params.append(p)
        batch.gradients.append(p.grad)  # type: ignore[arg-type]
        batch.momenta.append(entry(state, "exp_avg", p))
        batch.steps.append(entry(state, "step", p))
        if self.squares_gradient:
            batch.gradient_squares.append(entry(state, "exp_avg_sq", p))
        if self.uses_curvature:
            batch.curvature_squares.append(entry(state, "exp_hess_sq", p))
            batch.curvature_steps.append(entry(state, "curvature_step", p))
            curvature: Tensor | None = getattr(p, "hess_diag", None)
            if curvature is not None:
                if curvature.shape != p.shape:
                    raise RuntimeError(f"hess_diag has shape {tuple(curvature.shape)}, its parameter {tuple(p.shape)}")
                batch.curvatures.append(self.prepare(curvature))

    def prepare(self, curvature: Tensor) -> Tensor:
        """The diagonal as this optimizer averages it."""
        return curvature

    def check_curvature(self, batches: list[Batch]) -> None:
        """Either every parameter with a gradient has a new Hessian diagonal, or none does and an older average can serve."""
        wanted = sum(len(batch.curvature_squares) for batch in batches)
        present = sum(len(batch.curvatures) for batch in batches)
        if present == wanted:
            return
        if present:
            raise RuntimeError(
                f"{wanted - present} of {wanted} parameters with a gradient have no hess_diag; {REMEDY}. Zeros that "
                "zero_grad(set_to_none=False) left are gradients too: pass set_to_none=True"
            )
        if self.is_curvature_due:
            raise RuntimeError(f"{type(self).__name__} needs hess_diag for this step and found none; {REMEDY}")

    def apply(self, batches: list[tuple[dict[str, Any], Batch]]) -> bool:
        """Algorithm 2, and 3 where there is a trust region; whether the step was taken, as far as the host can tell."""
        self.check_radii()
        self.unscale([batch for _, batch in batches])
        everything = [t for _, batch in batches for t in (*batch.gradients, *batch.curvatures)]
        alive = self.watch.admit(everything, getattr(self, "found_inf", None))
        if alive is not None and update.is_on_host(alive):
            return False
        self.watch.look_for_curvature([t for _, batch in batches for t in batch.curvatures])
        for group, batch in batches:
            self.average(group, batch, alive)
        names = "lr", "betas", "eps", "curvature_warmup"
        moves = [update.quotient(batch, *[group[name] for name in names]) for group, batch in batches]
        etas = self.trust(batches, moves, alive)
        for (group, batch), (denominators, factors), eta in zip(batches, moves, etas, strict=True):
            scale = eta if alive is None else (1 if eta is None else eta) * alive
            self.move(group, batch, denominators, factors, None if scale is None else scale.to(batch.params[0].device))
        return True

    def move(
        self, group: dict[str, Any], batch: Batch, denominators: list[Tensor], factors: list[Any], scale: Tensor | None
    ) -> None:
        """W ← W − scale · factor · M ⊘ denominator; ``scale`` is η, and 0 where the step must leave no trace."""
        if group["decoupled_weight_decay"] and is_set(group["weight_decay"]):
            decay = group["lr"] * group["weight_decay"]
            torch._foreach_mul_(batch.params, 1 - (decay if scale is None else decay * (scale > 0).to(batch.params[0].dtype)))
        batch.move(denominators, factors, scale)

    def average(self, group: dict[str, Any], batch: Batch, alive: Tensor | None) -> None:
        """Move the averages on, by gradients and curvature with their weight decay."""
        if group["maximize"]:
            batch.gradients = list(torch._foreach_neg(batch.gradients))
            batch.curvatures = list(torch._foreach_neg(batch.curvatures)) if batch.curvatures else []
        if is_set(group["weight_decay"]) and not group["decoupled_weight_decay"]:
            decay = list(torch._foreach_mul(batch.whole(batch.params), group["weight_decay"]))
            torch._foreach_add_(decay, batch.gradients)
            batch.gradients = decay
            if batch.curvatures:
                batch.curvatures = list(torch._foreach_add(batch.curvatures, group["weight_decay"]))
        if alive is not None:
            alive = alive.to(batch.params[0].device)
            batch.gradients = [torch.where(alive > 0, t, 0) for t in batch.gradients]
            batch.curvatures = [torch.where(alive > 0, t, 0) for t in batch.curvatures]
        update.average(batch, group["betas"], alive)

    def trust(
        self, batches: list[tuple[dict[str, Any], Batch]], moves: list[tuple[list[Tensor], Any]], alive: Tensor | None
    ) -> list[Tensor | None]:
        """η for each batch, None where no trust region holds it; a step that is left out does not count."""
        regions: dict[int, list[int]] = {}
        for i, (group, _) in enumerate(batches):
            if group["trust_radius"] is not None:
                region = next(k for k, known in enumerate(self.param_groups) if known is group)
                regions.setdefault(region if self.trust_region == "group" else 0, []).append(i)
        etas: list[Tensor | None] = [None] * len(batches)
        self.eta = [None] * (max(regions) + 1 if regions else 0)
        for region, members in regions.items():
            parts = []
            for i in members:
                group, batch = batches[i]
                parts.append(update.quadratic(batch, *moves[i], group["betas"][1], group["bias_correction"]))
            h = torch.stack([part.to(parts[0].device) for part in parts]).sum()
            eta = self.eta[region] = update.trust(h, batches[members[0]][0]["trust_radius"])
            counts = 1 if alive is None else (alive > 0).to(eta.device)
            counter(self.counters, f"measured {region}", eta.device).add_(counts)
            counter(self.counters, f"scaled {region}", eta.device).add_((eta < 1) * counts)
            for i in members:
                etas[i] = eta
        return etas

    @property
    def scaled_share(self) -> dict[int, Tensor]:
        """The share of steps that η < 1 made shorter, by trust region: 0 for the whole optimizer, else the group's number."""
        regions = [name.removeprefix("scaled ") for name in self.counters if name.startswith("scaled ")]
        return {int(region): self.counters[f"scaled {region}"] / self.counters[f"measured {region}"] for region in regions}

    @property
    def nonfinite_steps(self) -> int:
        """How many steps were left out for a non-finite number. Reading it waits for the device."""
        return int(self.counters.get("nonfinite", 0))

    def unscale(self, batches: list[Batch]) -> None:
        """Take a gradient scaler's factor out of gradients and curvature; GradScaler.unscale_ does it for gradients alone."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        curvature_is_unscaled, self.curvature_is_unscaled = self.curvature_is_unscaled, False
        for batch in batches:
            if scale is not None:
                torch._foreach_div_(batch.gradients, scale.to(batch.gradients[0].device))
            if not batch.curvatures or curvature_is_unscaled:
                continue
            if scale is not None:
                batch.curvatures = list(torch._foreach_div(batch.curvatures, scale.to(batch.curvatures[0].device)))
            elif hasattr(self, "found_inf"):
                raise RuntimeError(
                    "GradScaler.unscale_ unscaled the gradients but not hess_diag; call optimizer.backward(loss, scaler=scaler) "
                    "with the unscaled loss, or leave the unscaling to scaler.step"
                )


REMEDY = (
    "in place of a plain loss.backward(), call optimizer.backward(loss) or hesscale.backward(loss), or wrap the loop in "
    "`with hesscale.capture(optimizer):`"
)


def is_profiled() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


@contextmanager
def unscaled(optimizer: CurvatureOptimizer, scale: Tensor) -> Iterator[None]:
    """Divide the Hessian diagonals that arrive inside the block by a gradient scaler's factor."""
    earlier = [(p, getattr(p, "hess_diag", None), p.grad is None) for p in optimizer.parameters()]
    for p, _, _ in earlier:
        p.hess_diag = None
    try:
        yield
    except BaseException:
        for p, before, _ in earlier:
            p.hess_diag = before
        raise
    for p, before, afresh in earlier:
        if p.hess_diag is not None:
            p.hess_diag /= scale.to(p.device)
        if before is not None and not afresh:
            p.hess_diag = before if p.hess_diag is None else before.add_(p.hess_diag)
    optimizer.curvature_is_unscaled = True


def entry(state: dict[str, Any], name: str, p: Tensor) -> Tensor:
    """A parameter's state, made where it is first needed: a counter, or an average that starts at zero."""
    if name not in state:
        state[name] = torch.zeros((), device=p.device) if name.endswith("step") else torch.zeros_like(p)
    found: Tensor = state[name]
    return found


def is_set(value: float | Tensor) -> bool:
    return isinstance(value, Tensor) or value != 0
