"""What a graph is made for: all of a batch but the values in its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


class Constant:
    """A value that equals those of its type that are written alike: 0.0 is not −0.0 and True is not 1, but nan is nan."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = type(value), repr(value) if isinstance(value, (float, complex)) else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Shape(NamedTuple):
    """All of a batch but the values in its tensors."""

    tensors: tuple[object, ...]
    constants: tuple[Constant | None, ...]  # leaves that are no tensors; None where a tensor stands
    spec: pytree.TreeSpec | None  # None for a plain sequence of tensors
    obstacle: str  # why no graph can take such a batch

    @staticmethod
    def of(batch: Sequence[Any]) -> tuple[list[Tensor], Shape]:
        tensors = [value for value in batch if isinstance(value, Tensor)]
        spec: pytree.TreeSpec | None = None
        constants: tuple[Constant | None, ...] = ()
        if len(tensors) < len(batch):
            leaves, spec = pytree.tree_flatten(batch)
            if strangers := [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *CONSTANTS))]:
                reason = f"the batch holds a {type(strangers[0]).__name__}, which is neither a tensor nor a constant"
                return [], Shape((), (), None, reason)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            constants = tuple([None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves])
        kinds = tuple([kind_of(tensor) for tensor in tensors])
        return tensors, Shape(kinds, constants, spec, "" if None not in kinds else UNUSUAL)

    def batch(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        if self.spec is None:
            return tensors
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant.value for constant in self.constants]
        batch: Sequence[Any] = pytree.tree_unflatten(leaves, self.spec)
        return batch


UNUSUAL = "the batch holds a tensor that requires a gradient, or is sparse, nested, conjugated or of a class of its own"


def kind_of(tensor: Tensor) -> tuple[object, ...] | None:
    """What a graph is made for; None for tensors that are not plain data."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return None
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
