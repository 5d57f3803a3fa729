"""Which tensors share memory. A compiled graph assumes that its arguments do not overlap, so overlapping ones must be found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor


def overlaps(tensors: Sequence[Tensor]) -> list[int]:
    """A group number for each tensor. Tensors whose memory overlaps, directly or through others, have the same number."""
    spans = sorted([(str(t.device), *span(t), i) for i, t in enumerate(tensors)])
    found, end_of_cluster, first = [0] * len(spans), ("", 0), 0
    for device, start, end, i in spans:
        if start == end:  # an empty tensor overlaps with nothing
            found[i] = i
            continue
        first = i if (device, start) >= end_of_cluster else first
        found[i], end_of_cluster = first, max(end_of_cluster, (device, end))
    return found


def has_overlap(tensors: Sequence[Tensor]) -> bool:
    return len(set(overlaps(tensors))) < len(tensors)


def overlapping_group(groups: Iterable[Iterable[Tensor]]) -> int | None:
    """The number of the first group with a tensor that overlaps with a tensor of an earlier group; None if there is none."""
    pairs = [(k, tensor) for k, tensors in enumerate(groups) for tensor in tensors]
    owners: dict[int, int] = {}
    for (k, _), cluster in zip(pairs, overlaps([tensor for _, tensor in pairs]), strict=True):
        if owners.setdefault(cluster, k) != k:
            return k
    return None


def span(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's first byte, and that of the first byte after it."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
