"""Work on large tensors in parts, on a CPU.

Allocating a tensor of several megabytes takes a CPU longer than the arithmetic on it: the operating system maps its pages one by
one, and unmaps them when the tensor is freed. A rule with several intermediate tensors therefore computes its share part by part.
The intermediate tensors then stay in the cache, and only the share itself needs new memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from .registry import Share

MAX_ENTRIES = 2**17  # of a part: half a megabyte in single precision
MIN_PARTS = 4  # a tensor that would have fewer parts is not divided


def by_parts(function: Callable[..., tuple[Share, Any]], dim: int, *operands: Share) -> tuple[Share, list[Any]]:
    """The first result of ``function(*operands)``, and a list of its second results for all parts.

    The first operand and the first result have the same shape. All operands that are not None are divided along ``dim``. The
    parts must be independent of each other.
    """
    like = operands[0]
    assert like is not None
    if not is_divided(like):
        share, other = function(*operands)
        return share, [other]
    size = max(1, like.shape[dim] * MAX_ENTRIES // like.numel())
    whole: Share = None
    start, others = 0, []
    for given in zip(*[repeat(None) if t is None else t.split(size, dim) for t in operands], strict=False):
        share, other = function(*given)
        others.append(other)
        if share is not None:
            whole = torch.empty_like(like, dtype=share.dtype) if whole is None else whole
            whole.narrow(dim, start, share.shape[dim]).copy_(share)
            start += share.shape[dim]
    return whole, others


def entrywise(function: Callable[..., Tensor], like: Tensor, *operands: Share) -> Tensor:
    """``function(like, *operands)`` for a function that works entry by entry."""
    tensors = (like, *operands)
    if not is_divided(like) or any(t is not None and t.shape != like.shape for t in operands):
        return function(*tensors)
    if all(t is None or t.is_contiguous() for t in tensors):
        tensors = tuple([None if t is None else t.view(-1) for t in tensors])
    share, _ = by_parts(lambda *given: (function(*given), None), 0, *tensors)
    assert share is not None
    return share.view(like.shape)


def is_divided(x: Tensor) -> bool:
    """Whether a tensor is so large that it is divided. A compiler fuses operators instead."""
    is_large = x.numel() >= MIN_PARTS * MAX_ENTRIES and x.device.type == "cpu"
    return is_large and not torch.compiler.is_compiling()
