"""The members of an ensemble: models of one architecture, with optimizers of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from ..optim import CurvatureOptimizer
from .aliasing import overlapping_group
from .cuda_graph import empty_like
from .optimizer import FunctionalOptimizer
from .signature import PLAIN, BatchSignature


class Members:
    """Models with their optimizers.

    Args:
        models: one per member.
        optimizers: one per member.
        batch_dims: the dimension of the batch's tensors that indexes the members, or None if all members share a tensor.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[FunctionalOptimizer],
        batch_dims: int | Sequence[int | None] | None,
    ) -> None:
        self.models, self.optimizers, self.batch_dims = models, optimizers, batch_dims
        self.check_alike()
        parameters = [id(p) for model in models for p in model.parameters()]
        if len({*parameters}) < len(parameters):
            raise ValueError("two members share parameters; give each a model of its own")
        for model in models[1:]:
            make_alike(model, models[0])

    # ---------------------------------------------------------------------------------------------------- what must be alike

    def check_alike(self) -> None:
        first, optimizer = self.models[0], self.optimizers[0]
        for k, (model, other) in enumerate(zip(self.models, self.optimizers, strict=True)):
            if architecture(model) != architecture(first):
                raise ValueError(f"model {k} differs from model 0 in its architecture or in the types of its tensors")
            if type(other.optimizer) is not type(optimizer.optimizer) or groups_of(other, model) != groups_of(optimizer, first):
                raise ValueError(f"optimizer {k} differs from optimizer 0 in its class or in its parameter groups")
            options, expected = plain_attributes(other.optimizer), plain_attributes(optimizer.optimizer)
            if differing := sorted(name for name in {**options, **expected} if options.get(name) != expected.get(name)):
                raise ValueError(f"member {k} has options that differ from member 0's but must not: {', '.join(differing)}")

    def signature(self) -> tuple[object, ...]:
        """The options that all optimizers have in common. Numbers that differ between members become arguments first."""
        self.check_phases()
        found = [optimizer.signature() for optimizer in self.optimizers]
        if any(other != found[0] for other in found):
            self.check_alike()
            self.make_differing_numbers_arguments()
            found = [optimizer.signature() for optimizer in self.optimizers]
        for k, other in enumerate(found):
            if other != found[0]:
                raise ValueError(
                    f"member {k} differs from member 0 in options of its optimizer, in hooks, or in whether it uses curvature"
                )
            # the same object is compared in less time
            self.optimizers[k].hyperparameters.constants = self.optimizers[0].hyperparameters.constants
        return found[0]

    def make_differing_numbers_arguments(self) -> None:
        hyperparameters = [optimizer.hyperparameters for optimizer in self.optimizers]
        values = hyperparameters[0].values
        differing = {option for known in hyperparameters for option in values if known.values.get(option) != values[option]}
        differing.update(*[known.arguments for known in hyperparameters])
        for known in hyperparameters:
            known.divide(known.values, differing)
        for k, known in enumerate(hyperparameters):
            if known.constants != hyperparameters[0].constants:
                pairs = known.values.items() ^ values.items()
                names = sorted({name for (_, name, _), _ in pairs if name != "lr"})
                raise ValueError(
                    f"member {k} has options that are not numbers and differ from member 0's, among {', '.join(names)}"
                )

    def check_phases(self) -> None:
        """Raise if curvature is not due for all members at the same steps."""
        every = getattr(self.optimizers[0].optimizer, "period", 1)
        if every > 1:
            counts = [member.optimizer.param_groups[0]["step_count"] for member in self.optimizers]
            if k := next((k for k, count in enumerate(counts) if (count - counts[0]) % every), 0):
                raise ValueError(
                    f"member {k} has made {counts[k]} steps and member 0 {counts[0]}, so that curvature is not due for both at "
                    f"the same steps (every {every}); load members together, or set step_count of their groups"
                )

    @property
    def curvature_warmup(self) -> float:
        return max([optimizer.curvature_warmup for optimizer in self.optimizers])

    def check_apart(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        """Raise if tensors of two members share memory, since both members would change them."""
        if (k := overlapping_group(tensors)) is not None:
            raise ValueError(
                f"member {k} shares memory of parameters, buffers or its optimizer's state with a member before it; give each "
                "tensors of its own, as copy.deepcopy does"
            )

    # -------------------------------------------------------------------------------------------------------------- batch

    def dims(self, tensors: Sequence[object]) -> list[int | None]:
        """For each tensor of a batch, the dimension that indexes the members."""
        if not isinstance(self.batch_dims, Sequence):
            return [self.batch_dims] * len(tensors)
        if len(self.batch_dims) != len(tensors):
            raise ValueError(f"batch_dims has {len(self.batch_dims)} entries for a batch of {len(tensors)} tensors")
        return list(self.batch_dims)

    def check_batch(self, tensors: Sequence[Tensor]) -> None:
        for tensor, dim in zip(tensors, self.dims(tensors), strict=True):
            if dim is not None and not (-tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] == len(self.models)):
                raise ValueError(
                    f"dimension {dim} of a tensor of shape {tuple(tensor.shape)} must have one entry for each of "
                    f"{len(self.models)} members; pass batch_dims=None for a batch that all members share"
                )

    def part(self, tensors: Sequence[Tensor], k: int) -> list[Tensor]:
        """Member k's part of the tensors of a batch."""
        return [t if dim is None else t.select(dim, k) for t, dim in zip(tensors, self.dims(tensors), strict=True)]

    # -------------------------------------------------------------------------------------------------------------- steps

    def eager(
        self,
        loss_fn: Callable[..., Tensor],
        tensors: Sequence[Tensor],
        signature: BatchSignature,
        before_each: Callable[[int], None] = lambda k: None,
    ) -> Tensor:
        """Make a step of each member in turn, and return their losses. A member with a non-finite number skips its step.

        ``before_each`` is called with the number of each member before its step.
        """
        self.check_alike()
        pairs = list(zip(self.models, self.optimizers, strict=True))
        held = [[*tensors_of(model), *optimizer.held()] for model, optimizer in pairs]
        self.check_apart([[x for x in found if isinstance(x, Tensor)] for found in held])
        losses = []
        for k, (model, optimizer) in enumerate(pairs):
            before_each(k)
            ours = optimizer.optimizer
            with ours.without_nonfinite_errors() if isinstance(ours, CurvatureOptimizer) else nullcontext():
                losses.append(optimizer.train_model(model, loss_fn, signature.batch(self.part(tensors, k))))
        self.align()
        return torch.stack(losses)

    def record_step(self, etas: Sequence[Tensor]) -> None:
        """Count a step that a graph has made."""
        parts = [eta.unbind() for eta in etas]
        for k, optimizer in enumerate(self.optimizers):
            optimizer.record_step([part[k] for part in parts], report=False)
        self.align()

    def align(self) -> None:
        """Count the step for members that skipped it too, so that curvature stays due for all members at the same steps."""
        groups = [optimizer.optimizer.param_groups for optimizer in self.optimizers]
        for same in zip(*groups, strict=True):
            if "step_count" in same[0]:
                count = max([group["step_count"] for group in same])
                for group in same:
                    group["step_count"] = count


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def architecture(model: nn.Module) -> object:
    modules = [(type_before_parametrizations(module), *getattr(module, "parametrizations", ())) for module in model.modules()]
    return modules, [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_of(model)]


def make_alike(model: nn.Module, first: nn.Module) -> None:
    """Give a model's tensors the strides of the first model's, and its parametrized modules the classes of the first model's."""
    for tensor, like in zip(tensors_of(model), tensors_of(first), strict=True):
        if tensor.stride() != like.stride():
            tensor.data = empty_like(like).copy_(tensor.detach())
    for module, other in zip(model.modules(), first.modules(), strict=True):
        if is_parametrized(module) and is_parametrized(other):
            module.__class__ = type(other)


def groups_of(optimizer: FunctionalOptimizer, model: nn.Module) -> list[list[int]]:
    """For each group, the indices of its parameters in the model."""
    place = {id(p): i for i, p in enumerate(model.parameters())}
    if others := [p for p in optimizer.parameters() if id(p) not in place]:
        shapes = ", ".join(str(tuple(p.shape)) for p in others[:3])
        raise ValueError(f"{len(others)} parameters of the optimizer are not in the model, such as of shape {shapes}")
    return [[place[id(p)] for p in group["params"]] for group in optimizer.optimizer.param_groups]


def plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name[0] != "_" and isinstance(value, PLAIN)}
