"""A compiled step in a CUDA graph: one launch instead of one for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor


class CudaGraph:
    """A CUDA graph of some code. It reads some arguments in place, and copies the others to its own memory before each replay.

    Args:
        run: the code.
        arguments: its arguments.
        copied: the indices of the arguments that are different tensors at every step.
    """

    def __init__(self, run: Callable[..., Sequence[Any]], arguments: Sequence[Tensor], copied: Collection[int]) -> None:
        if elsewhere := [tensor.device for tensor in arguments if not tensor.is_cuda]:
            raise RuntimeError(f"a tensor of the batch or the model is on the {elsewhere[0]}")
        self.copied = {i: empty_like(arguments[i]).copy_(arguments[i]) for i in copied}
        self.fixed = [i for i in range(len(arguments)) if i not in self.copied]
        self.addresses = [arguments[i].data_ptr() for i in self.fixed]
        self.kept = [self.copied.get(i, tensor) for i, tensor in enumerate(arguments)]  # references, so that no memory is freed
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = list(run(*self.kept))

    def moved(self, arguments: Sequence[Tensor]) -> set[int]:
        """The indices of the arguments that are not copied, but are at another address now."""
        addresses = [*map(Tensor.data_ptr, map(arguments.__getitem__, self.fixed))]
        if addresses == self.addresses:
            return set()
        return {i for i, now, then in zip(self.fixed, addresses, self.addresses, strict=True) if now != then}

    def replay(self, arguments: Sequence[Tensor]) -> list[Any]:
        for i, held in self.copied.items():
            held.copy_(arguments[i], non_blocking=True)
        self.graph.replay()
        return [output.clone() for output in self.outputs]


def empty_like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides, dtype and device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
