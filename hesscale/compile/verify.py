"""Check that compiled code gives the same results as its graph, except for rounding, to detect bugs of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule

TOLERANCE, COARSE_TOLERANCE, CHANGE_TOLERANCE = 0.01, 0.05, 0.25  # the allowed differences, relative to both numbers
MAX_OUTLIERS = 0.1  # of a tensor's entries, since a step divides by curvature that may be close to zero
FLOAT32_EPS = torch.finfo(torch.float32).eps  # sums are computed in float32 or better, and may be rounded afterwards


def difference(
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    before: Sequence[Tensor],
    rerun: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    uses_16_bits: bool = False,
) -> str:
    """A description of where the results of the code differ from those of its graph; empty if they agree.

    Args:
        expected: what the graph returns, followed by its arguments after the run.
        found: the same for the code.
        before: the arguments before the run. Their changes are compared, since a small step hardly affects their values.
        rerun: returns ``expected`` for other arguments. If slightly perturbed arguments change it as much as the code does, the
            difference is rounding. For example, the gradient of a bias before batch norm consists of rounding errors only, and an
            optimizer scales them up to a whole step.
        uses_16_bits: the graph computes in a 16-bit dtype.
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
    return tensor.is_floating_point() and tensor.numel() > 1  # counters have one entry


def perturb(tensor: Tensor, every: int, uses_16_bits: bool) -> Tensor:
    """The tensor, changed by about a rounding error: one in ``every`` entries becomes larger, the others smaller."""
    if not can_be_perturbed(tensor):
        return tensor
    by = 2**-9 if uses_16_bits else 8 * torch.finfo(tensor.dtype).eps
    is_up = (torch.arange(tensor.numel(), device=tensor.device) % every == 0).view(tensor.shape)
    return tensor + tensor * torch.where(is_up, by, -by).to(tensor.dtype)


def uses_16_bits(graph: GraphModule) -> bool:
    """Whether the graph computes in a 16-bit dtype; compiled code rounds to it less often."""
    values = [node.meta.get("val") for node in graph.graph.nodes]
    return any(isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) for value in values)


def is_close(a: Tensor, b: Tensor, scale: float, share: float = TOLERANCE, outliers: float = MAX_OUTLIERS) -> bool:
    """Whether two tensors agree, except for rounding and a fraction of outliers."""
    return count_outliers(a, b, share, rounding(a, scale)) <= (max(1, int(outliers * a.numel())) if can_be_perturbed(a) else 0)


def is_close_in_16_bits(a: Tensor, b: Tensor, scale: float) -> bool:
    """Whether two tensors agree in most entries, or in norm if single entries are dominated by rounding errors."""
    if not a.is_floating_point() or not torch.equal(a.isfinite(), b.isfinite()):
        return torch.equal(a, b)
    if is_close(a, b, scale, COARSE_TOLERANCE, outliers=0.25):
        return True
    a, b = (tensor.double().nan_to_num(0, 0, 0) for tensor in (a, b))
    return float((a - b).norm()) <= COARSE_TOLERANCE * float(a.norm() + b.norm()) + 16 * FLOAT32_EPS * scale


def outlier_share(change: Tensor, other: Tensor, before: Tensor) -> float:
    """The fraction of entries that do not change in the same direction by about the same amount. One such entry is allowed."""
    margin = rounding(change, largest([change])) + 8 * torch.finfo(before.dtype).eps * before.abs()
    return max(0, count_outliers(change, other, CHANGE_TOLERANCE, margin) - 1) / change.numel()


def count_outliers(a: Tensor, b: Tensor, share: float, margin: float | Tensor) -> int:
    """How many entries differ. Floating point numbers may differ by ``share`` times both, plus ``margin``."""
    is_near = (a == b) | (a.isnan() & b.isnan())
    if a.is_floating_point():
        is_near |= (a - b).abs() <= share * (a.abs() + b.abs()) + margin
    return int((~is_near).sum())


def rounding(like: Tensor, scale: float) -> float:
    """The rounding error of sums of numbers as large as ``scale``."""
    return 16 * min(torch.finfo(like.dtype).eps, FLOAT32_EPS) * scale if like.is_floating_point() else 0.0


def largest(tensors: Sequence[Tensor]) -> float:
    values = [t.detach().abs().nan_to_num(0, 0, 0).amax() for t in tensors if t.is_floating_point() and t.numel()]
    return max([float(value) for value in values], default=0.0)
