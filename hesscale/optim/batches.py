"""The parameters of a step, in batches that one foreach call can update."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed
from torch._utils import _flatten_dense_tensors

from ..distributed.averaging import check_averaged
from ..distributed.sharding import check_undivided
from ..distributed.shards import local_parts, placed_like, shard_mesh
from .bounds import needs_adam
from .scalars import counter_dtype, is_on_host

if TYPE_CHECKING:
    from .base import CurvatureOptimizer
    from .packing import Pack, Packing

MISSING_CURVATURE = (
    "in place of a plain loss.backward(), call optimizer.backward(loss) or hesscale.backward(loss), or run the loop inside "
    "`with hesscale.capture(optimizer):`"
)


@dataclass
class Batch:
    """Parameters of one group on one device with one dtype, and what their update needs."""

    group: dict[str, Any]
    group_index: int
    params: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    curvatures: list[Tensor] = field(default_factory=list)  # empty between curvature updates
    momenta: list[Tensor] = field(default_factory=list)  # M
    gradient_squares: list[Tensor] = field(default_factory=list)  # V of Adam, also if ``graft`` compares with Adam
    curvature_squares: list[Tensor] = field(default_factory=list)  # V of the others, and of every trust region
    steps: list[Tensor] = field(default_factory=list)
    curvature_steps: list[Tensor] = field(default_factory=list)
    squares_gradient: bool = False  # whether the update divides by the root of ``gradient_squares``, as Adam's does
    mesh: Any = None  # of DTensors; every list then holds this process's shards
    numels: list[int] = field(default_factory=list)  # of the whole parameters, if there is a mesh or a pack
    pack: Pack | None = None  # if set, every list except ``params`` holds one flat tensor for all parameters

    def pack_like(self, tensors: list[Tensor]) -> list[Tensor]:
        """One tensor per parameter, in the form of this batch's other lists."""
        return tensors if self.pack is None else [_flatten_dense_tensors(tensors)]

    def sizes(self) -> list[int]:
        """How many entries each parameter has, at least 1."""
        return [count or 1 for count in self.numels or [p.numel() for p in self.params]]

    def replace_by_shards(self) -> None:
        """Replace DTensors by this process's parts of them, which share their memory."""
        self.numels, params = [p.numel() for p in self.params], self.params
        for name in ("params", "gradients", "curvatures", "momenta", "gradient_squares", "curvature_squares"):
            if tensors := getattr(self, name):
                setattr(self, name, local_parts([placed_like(t, p) for t, p in zip(tensors, params, strict=True)]))


def collect(optimizer: CurvatureOptimizer, packing: Packing) -> list[Batch]:
    """All parameters that have a gradient.

    Raises:
        RuntimeError: for sparse gradients, and for Hessian diagonals that are missing, have another shape or are not averaged.
    """
    check_averaged(optimizer.param_groups)
    if optimizer.param_groups[0]["step_count"] == 0:
        check_undivided(optimizer)
    found: list[Batch] = []
    for index in range(len(optimizer.param_groups)):
        packed = packing.packed_batch(optimizer, index)
        found += collect_group(optimizer, index, packing) if packed is None else [packed]
    check_curvature(optimizer, found)
    return found


def collect_group(optimizer: CurvatureOptimizer, index: int, packing: Packing) -> list[Batch]:
    """The parameters of a group that is not packed."""
    group = optimizer.param_groups[index]
    batches: dict[object, Batch] = {}
    may_shard = distributed.is_available() and distributed.is_initialized()
    for p in group["params"]:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            raise RuntimeError(f"{type(optimizer).__name__} takes dense gradients; build the embedding with sparse=False")
        mesh = shard_mesh(p) if may_shard else None
        key = (p.device, p.dtype, id(p) if group["foreach"] is False else None, mesh)
        if key not in batches:
            batches[key] = Batch(group, index, squares_gradient=optimizer.squares_gradient, mesh=mesh)
        add_parameter(batches[key], p, optimizer)
    found = list(batches.values())
    for batch in found:
        if batch.mesh is not None:
            batch.replace_by_shards()
    if packing.is_enabled and any(is_on_host(batch.steps[0]) and float(batch.steps[0]) > 0 for batch in found):
        packing.pack(optimizer, found)  # after loading a state: pack at once, to get the rounding of an uninterrupted run
        packed = packing.packed_batch(optimizer, index)
        return found if packed is None else [packed]
    return found


def add_parameter(batch: Batch, p: Tensor, optimizer: CurvatureOptimizer) -> None:
    """Add a parameter, its derivatives and its state to a batch."""
    state = optimizer.state[p]
    averages_gradient_squares = optimizer.squares_gradient or needs_adam(batch.group)
    if averages_gradient_squares and "step" in state and "exp_avg_sq" not in state:
        raise RuntimeError(
            "the optimizer's state has no exp_avg_sq, which Adam and graft need: earlier steps did not average squared gradients"
        )
    if not averages_gradient_squares:
        state.pop("exp_avg_sq", None)  # it would miss the steps from now on, and be wrong if graft is turned on again later
    batch.params.append(p)
    batch.gradients.append(p.grad)  # type: ignore[arg-type]
    batch.momenta.append(state_tensor(state, "exp_avg", p))
    batch.steps.append(state_tensor(state, "step", p))
    if averages_gradient_squares:
        batch.gradient_squares.append(state_tensor(state, "exp_avg_sq", p))
    if optimizer.uses_curvature:
        batch.curvature_squares.append(state_tensor(state, "exp_hess_sq", p))
        batch.curvature_steps.append(state_tensor(state, "curvature_step", p))
        curvature: Tensor | None = getattr(p, "hess_diag", None)
        if curvature is not None:
            if curvature.shape != p.shape:
                raise RuntimeError(f"hess_diag has shape {tuple(curvature.shape)}, but its parameter has {tuple(p.shape)}")
            batch.curvatures.append(curvature)


def prepare_curvature(optimizer: CurvatureOptimizer, batches: list[Batch]) -> None:
    """Apply the optimizer's :meth:`prepare` to the Hessian diagonals. For a pack, this has already been done."""
    for batch in batches:
        if batch.pack is None and batch.curvatures:
            pairs = zip(batch.curvatures, batch.params, strict=True)
            batch.curvatures = [optimizer.prepare(curvature, p) for curvature, p in pairs]


def state_tensor(state: dict[str, Any], name: str, p: Tensor) -> Tensor:
    """An entry of a parameter's state, created at zero: a step counter, or an average of the parameter's shape."""
    if name not in state:
        is_counter = name.endswith("step")
        state[name] = torch.zeros((), dtype=counter_dtype(p), device=p.device) if is_counter else torch.zeros_like(p)
    found: Tensor = state[name]
    return found


def is_initialization(optimizer: CurvatureOptimizer, batches: list[Batch]) -> bool:
    """Whether torch.distributed.checkpoint makes this step, to create the state that it loads into.

    It is a first step of size 0, with zero gradients and no Hessian diagonals.
    """
    groups = optimizer.param_groups
    if groups[0]["step_count"] or any(batch.curvatures for batch in batches) or not optimizer.uses_curvature:
        return False
    return all(float(group["lr"]) == 0 for group in groups) and not any(g.any() for batch in batches for g in batch.gradients)


def check_curvature(optimizer: CurvatureOptimizer, batches: list[Batch]) -> None:
    """Raise unless all parameters with a gradient have a new Hessian diagonal, or none has one and none is due."""
    wanted = sum([len(batch.curvature_squares) for batch in batches])
    present = sum([len(batch.curvatures) for batch in batches])
    if present == wanted:
        return
    if present:
        raise RuntimeError(
            f"{wanted - present} of {wanted} parameters with a gradient have no hess_diag; {MISSING_CURVATURE}. "
            "zero_grad(set_to_none=False) leaves zeros, which count as gradients: pass set_to_none=True"
        )
    if optimizer.is_curvature_due and not is_initialization(optimizer, batches):
        raise RuntimeError(f"{type(optimizer).__name__} needs hess_diag for this step and found none; {MISSING_CURVATURE}")
