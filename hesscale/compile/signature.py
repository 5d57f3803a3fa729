"""Signatures: everything about a batch except the values in its tensors. A graph is made for one signature."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


class Constant:
    """Compares equal only to values of the same type and repr: 0.0 differs from −0.0 and True from 1, but nan equals nan."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = type(value), repr(value) if isinstance(value, (float, complex)) else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Identity:
    """Compares equal only to an identity of the same object, and keeps the object alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class BatchSignature(NamedTuple):
    """Everything about a batch except the values in its tensors.

    Attributes:
        tensors: the signatures of its tensors.
        constants: its leaves that are not tensors; None in place of each tensor.
        spec: the structure of the batch; None for a plain sequence of tensors.
        obstacle: why no graph can take such a batch; empty if one can.
    """

    tensors: tuple[object, ...]
    constants: tuple[Constant | None, ...]
    spec: pytree.TreeSpec | None
    obstacle: str

    @staticmethod
    def of(batch: Sequence[Any]) -> tuple[list[Tensor], BatchSignature]:
        """The tensors of a batch, and its signature."""
        tensors = [value for value in batch if isinstance(value, Tensor)]
        spec: pytree.TreeSpec | None = None
        constants: tuple[Constant | None, ...] = ()
        if len(tensors) < len(batch):
            leaves, spec = pytree.tree_flatten(batch)
            if others := [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN))]:
                reason = f"the batch holds a {type(others[0]).__name__}, which is neither a tensor nor a constant"
                return [], BatchSignature((), (), None, reason)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            constants = tuple([None if isinstance(leaf, Tensor) else Constant(leaf) for leaf in leaves])
        kinds = tuple([tensor_signature(tensor) for tensor in tensors])
        return tensors, BatchSignature(kinds, constants, spec, "" if None not in kinds else UNUSUAL)

    def batch(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """A batch of this signature, with these tensors."""
        if self.spec is None:
            return tensors
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant.value for constant in self.constants]
        batch: Sequence[Any] = pytree.tree_unflatten(leaves, self.spec)
        return batch


UNUSUAL = "it takes a tensor that requires a gradient, is sparse, nested or conjugated, or is of a subclass of torch.Tensor"


def tensor_signature(tensor: Tensor) -> tuple[object, ...] | None:
    """Shape, strides, dtype and device, for which a graph is made; None for tensors that are not plain data."""
    if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
        return None
    if tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
