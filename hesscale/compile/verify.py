"""Whether compiled code does what its graph does, but for rounding: compilers err, and would do so silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

TOLERANCE, COARSE_TOLERANCE, CHANGE_TOLERANCE = 0.01, 0.05, 0.25  # shares of both numbers by which they may differ
MAX_OUTLIERS = 0.1  # of a tensor's entries, for a step divides by curvature that may be next to nothing
FLOAT32_EPS = torch.finfo(torch.float32).eps  # of sums, whatever they are rounded to


def difference(
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    before: Sequence[Tensor],
    rerun: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    uses_16_bits: bool = False,
) -> str:
    """Where code does something else than its graph, in words; nothing if it does not.

    Args:
        expected: what the graph returns, and then what it makes of its arguments.
        found: the same of the code.
        before: what the arguments were. A small step hardly shows in what they are afterwards.
        rerun: gives ``expected`` for other arguments. Where slightly different ones change it as much, rounding alone decides: a
            bias before batch norm has a gradient of nothing else, and an optimizer makes a whole step of that.
        uses_16_bits: the graph computes with 16 bits.
    """
    scale, returned = largest(expected), len(expected) - len(before)
    is_near, share = (is_close_in_16_bits, COARSE_TOLERANCE) if uses_16_bits else (is_close, TOLERANCE)
    others: list[tuple[list[Tensor], Sequence[Tensor]]] = []
    for number, outcomes in enumerate(zip(expected, found, strict=True), -returned):
        device = before[max(number, 0)].device
        a, b = (tensor.to(device) for tensor in outcomes)
        if a.shape != b.shape:
            return f"shape {tuple(b.shape)} in place of {tuple(a.shape)}"
        is_alike, outliers = is_near(a, b, scale), 0.0
        if number >= 0 and can_be_perturbed(a):
            was = before[number]
            outliers = outlier_share(a - was, b - was, was)
            if (not is_alike or outliers > MAX_OUTLIERS) and torch.equal(a.isfinite(), b.isfinite()):
                if not others:
                    perturbed = [[perturb(tensor, every, uses_16_bits) for tensor in before] for every in (2, 3)]
                    others = [(given, rerun(given)[returned:]) for given in perturbed]
                changed = [(given[number], after[number].to(device)) for given, after in others]
                is_alike = is_alike or not all(is_near(a, after, scale) for _, after in changed)
                rounded = max(outlier_share(a - was, after - given, was) for given, after in changed)
                outliers = 0.0 if outliers <= 4 * rounded else outliers
        where = f"in a tensor of shape {tuple(a.shape)}"
        if not is_alike:
            return f"{count_outliers(a, b, share, rounding(a, scale))} of {a.numel()} {where}"
        if outliers > MAX_OUTLIERS:
            return f"changes {where}"
    return ""


def can_be_perturbed(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 1  # which no counter is


def perturb(tensor: Tensor, every: int, uses_16_bits: bool) -> Tensor:
    """As different as rounding would make it: one in ``every`` entries larger, the others smaller."""
    if not can_be_perturbed(tensor):
        return tensor
    by = 2**-9 if uses_16_bits else 8 * torch.finfo(tensor.dtype).eps
    is_up = (torch.arange(tensor.numel(), device=tensor.device) % every == 0).view(tensor.shape)
    return tensor + tensor * torch.where(is_up, by, -by).to(tensor.dtype)


def uses_16_bits(graph: GraphModule) -> bool:
    """Whether it computes with 16 bits, between which compiled code rounds less often."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    return any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in values)


def is_close(a: Tensor, b: Tensor, scale: float, share: float = TOLERANCE, outliers: float = MAX_OUTLIERS) -> bool:
    """But for rounding, and for some entries of a tensor."""
    return count_outliers(a, b, share, rounding(a, scale)) <= (max(1, int(outliers * a.numel())) if can_be_perturbed(a) else 0)


def is_close_in_16_bits(a: Tensor, b: Tensor, scale: float) -> bool:
    """In most entries, or as a whole where entries are rounding alone."""
    if not a.is_floating_point() or not torch.equal(a.isfinite(), b.isfinite()):
        return torch.equal(a, b)
    if is_close(a, b, scale, COARSE_TOLERANCE, outliers=0.25):
        return True
    a, b = (tensor.double().nan_to_num(0, 0, 0) for tensor in (a, b))
    return float((a - b).norm()) <= COARSE_TOLERANCE * float(a.norm() + b.norm()) + 16 * FLOAT32_EPS * scale


def outlier_share(change: Tensor, other: Tensor, before: Tensor) -> float:
    """Of all entries, those that do not change the same way and about as far; not counting one."""
    margin = rounding(change, largest([change])) + 8 * torch.finfo(before.dtype).eps * before.abs()
    return max(0, count_outliers(change, other, CHANGE_TOLERANCE, margin) - 1) / change.numel()


def count_outliers(a: Tensor, b: Tensor, share: float, margin: float | Tensor) -> int:
    """How many differ, by more than this share and margin if they are no integers."""
    is_near = (a == b) | (a.isnan() & b.isnan())
    if a.is_floating_point():
        is_near |= (a - b).abs() <= share * (a.abs() + b.abs()) + margin
    return int((~is_near).sum())


def rounding(like: Tensor, scale: float) -> float:
    """Of sums of numbers as large as that."""
    return 16 * min(torch.finfo(like.dtype).eps, FLOAT32_EPS) * scale if like.is_floating_point() else 0.0


def largest(tensors: Sequence[Tensor]) -> float:
    values = [t.detach().abs().nan_to_num(0, 0, 0).amax() for t in tensors if t.is_floating_point() and t.numel()]
    return max([float(value) for value in values], default=0.0)
