"""Cases: losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .table import between, case, exactly

CLASSES = torch.tensor([2, 0, 1, 2])
PIXELS = torch.tensor([[[2, 0], [1, 2]], [[0, 0], [2, 1]]])
LABELS = torch.tensor([[0, 3, -1, 1], [2, -1, 0, 1], [1, 2, 3, -1]])
SIGNS = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]])
REDUCTIONS = ("none", "mean", "sum")


def constant(*shape: int) -> Tensor:
    return torch.linspace(0.2, 0.9, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def like(t: Tensor, x: Tensor) -> Tensor:
    return t.to(x.dtype)


for how in REDUCTIONS:
    case(f"mse {how}", lambda x, t, how=how: F.mse_loss(x, t, reduction=how), (3, 4), (3, 4))
    case(f"smooth_l1 {how}", lambda x, t, how=how: F.smooth_l1_loss(x, t, reduction=how, beta=0.7), (3, 4), (3, 4))
    case(f"huber {how}", lambda x, t, how=how: F.huber_loss(x, t, reduction=how, delta=0.7), (3, 4), (3, 4))
    case(f"soft_margin {how}", lambda x, how=how: F.soft_margin_loss(x, like(SIGNS, x), reduction=how), (2, 3))
    case(
        f"bce {how}",
        lambda x, t, how=how: F.binary_cross_entropy(x, t, reduction=how),
        between(0.1, 0.9, 3, 4),
        between(0.1, 0.9, 3, 4),
    )
    case(
        f"bce weight {how}",
        lambda x, t, how=how: F.binary_cross_entropy(x, t, like(constant(4), x), reduction=how),
        between(0.1, 0.9, 3, 4),
        between(0.1, 0.9, 3, 4),
    )
    case(
        f"bce_with_logits {how}",
        lambda x, t, how=how: F.binary_cross_entropy_with_logits(x, t, reduction=how),
        (3, 4),
        between(0.1, 0.9, 3, 4),
    )
    case(
        f"bce_with_logits weight, pos_weight {how}",
        lambda x, t, how=how: F.binary_cross_entropy_with_logits(
            x, t, like(constant(3, 1), x), reduction=how, pos_weight=like(3 * constant(4), x)
        ),
        (3, 4),
        between(0.1, 0.9, 3, 4),
    )
    case(f"nll {how}", lambda x, how=how: F.nll_loss(x, CLASSES, reduction=how), (4, 3))
    case(
        f"nll weight, ignore_index {how}",
        lambda x, how=how: F.nll_loss(x, CLASSES, like(constant(3), x), ignore_index=0, reduction=how),
        (4, 3),
    )
    case(f"nll one sample {how}", lambda x, how=how: F.nll_loss(x, CLASSES[0], reduction=how), (3,))
    case(f"nll2d {how}", lambda x, how=how: F.nll_loss(x, PIXELS, reduction=how), (2, 3, 2, 2))
    case(
        f"nll2d weight, ignore_index {how}",
        lambda x, how=how: F.nll_loss(x, PIXELS, like(constant(3), x), ignore_index=1, reduction=how),
        (2, 3, 2, 2),
    )

case("mse input only", lambda x: F.mse_loss(x, like(constant(3, 4), x)), (3, 4))
case("mse target only", lambda t: F.mse_loss(like(constant(3, 4), t), t), (3, 4))
case("mse scalar", F.mse_loss, (), ())
case("mse transposed", lambda x, t: F.mse_loss(x.T, t), (3, 4), (4, 3))
case("mse same", lambda x: F.mse_loss(x, x), (3, 4))
case("smooth_l1 same", lambda x: F.smooth_l1_loss(x, x, reduction="sum"), (3, 4))
case("smooth_l1 beta 0", lambda x, t: torch.ops.aten.smooth_l1_loss(x, t, 1, 0.0), (3, 4), (3, 4))
case("smooth_l1 at the bound", lambda x: F.smooth_l1_loss(x, torch.zeros_like(x), beta=0.5), exactly([-0.5, 0.0, 0.5, 0.75]))
case("huber at the bound", lambda x: F.huber_loss(x, torch.zeros_like(x), delta=0.5), exactly([-0.5, 0.0, 0.5, 0.75]))
case("huber same", lambda x: F.huber_loss(x, x, reduction="none"), (3, 4))
case("bce same", lambda x: F.binary_cross_entropy(x, x), between(0.1, 0.9, 3, 4))
case("bce same none", lambda x: F.binary_cross_entropy(x, x, reduction="none"), between(0.1, 0.9, 3, 4))
case("bce right and certain", lambda x: F.binary_cross_entropy(x, x.detach()), exactly([0.0, 1.0]))
case("bce_with_logits same", lambda x: F.binary_cross_entropy_with_logits(x, x, reduction="sum"), (3, 4))
case(
    "bce_with_logits extreme",
    lambda x: F.binary_cross_entropy_with_logits(x, torch.tensor([1.0, 0.0, 1.0, 0.0]).to(x.dtype)),
    exactly([-80.0, -80.0, 80.0, 80.0]),
)
case("soft_margin broadcast target", lambda x: F.soft_margin_loss(x, like(SIGNS[0], x)), (2, 3))
case("nll all ignored", lambda x: F.nll_loss(x, torch.tensor([0, 0]), ignore_index=0, reduction="sum"), (2, 3))


def written_out(fused: Callable[..., Tensor], plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A fused loss that PyTorch differentiates once only: its gradient is made that of the same loss in plain operators."""

    def function(x: Tensor) -> Tensor:
        def differentiable(_: Any, g: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            return torch.autograd.grad(plain(x), x, g[0], create_graph=True) if torch.is_grad_enabled() else None

        y = fused(x)
        y.grad_fn.register_hook(differentiable)
        return y

    return function


def reduce(y: Tensor, how: str) -> Tensor:
    return y if how == "none" else y.mean() if how == "mean" else y.sum()


def multi_margin(x: Tensor, t: Tensor, p: int, weight: Tensor, how: str) -> Tensor:
    others = torch.ones_like(x).scatter(-1, t.unsqueeze(-1), 0)
    gaps = (0.8 - x.gather(-1, t.unsqueeze(-1)) + x).clamp_min(0) ** p
    return reduce((others * gaps).sum(-1) * weight[t] / x.shape[-1], how)


def multilabel_margin(x: Tensor, labels: Tensor, how: str) -> Tensor:
    first = (labels < 0).cumsum(-1) == 0  # labels end at the first −1
    is_target = torch.zeros_like(x).scatter_add(-1, labels.clamp_min(0), first.to(x.dtype))
    gaps = (1 - x.unsqueeze(-1) + x.unsqueeze(-2)).clamp_min(0) * is_target.unsqueeze(-1) * (1 - is_target.unsqueeze(-2))
    return reduce(gaps.sum((-1, -2)) / x.shape[-1], how)


for how in REDUCTIONS:
    for p in (1, 2):
        case(
            f"multi_margin p={p} {how}",
            written_out(
                lambda x, p=p, how=how: F.multi_margin_loss(x, CLASSES, p, 0.8, like(constant(3), x), reduction=how),
                lambda x, p=p, how=how: multi_margin(x, CLASSES, p, like(constant(3), x), how),
            ),
            (4, 3),
            low_precision=False,
        )
    case(
        f"multilabel_margin {how}",
        written_out(
            lambda x, how=how: F.multilabel_margin_loss(x, LABELS, reduction=how),
            lambda x, how=how: multilabel_margin(x, LABELS, how),
        ),
        (3, 4),
        low_precision=False,
    )
case(
    "multi_margin one sample",
    written_out(
        lambda x: F.multi_margin_loss(x, CLASSES[0], 2, 0.8),
        lambda x: multi_margin(x, CLASSES[0], 2, torch.ones_like(x), "mean"),
    ),
    (3,),
    low_precision=False,
)


def alignments(symbols: int, steps: int, target: list[int], blank: int) -> Tensor:
    """Every sequence of so many symbols that reads as the target, once repeats and then blanks are left out."""
    found = []
    for path in itertools.product(range(symbols), repeat=steps):
        merged = [symbol for i, symbol in enumerate(path) if i == 0 or path[i - 1] != symbol]
        if [symbol for symbol in merged if symbol != blank] == target:
            found.append(path)
    return torch.tensor(found, dtype=torch.long).reshape(-1, steps)


def ctc_by_alignments(x: Tensor, targets: list[list[int]], lengths: list[int], blank: int) -> Tensor:
    """−log P + Σ p, whose gradient PyTorch calls that of −log P; 0 where no alignment exists."""
    losses = []
    for n, (target, steps) in enumerate(zip(targets, lengths, strict=True)):
        paths = alignments(x.shape[2], steps, target, blank)
        rows = x[:steps, n]
        scores = sum(rows[t, paths[:, t]] for t in range(steps))
        losses.append(rows.exp().sum() - scores.logsumexp(0) if len(paths) else 0 * rows.sum())
    return torch.stack(losses)


def ctc_case(name: str, targets: list[list[int]], lengths: list[int], blank: int = 0, flat: bool = False, tensors: bool = False):
    width = max(map(len, targets))
    padded = torch.tensor([[*target, *[1] * (width - len(target))] for target in targets], dtype=torch.long)
    given = torch.tensor([symbol for target in targets for symbol in target]) if flat else padded
    sizes = [lengths, [len(target) for target in targets]]
    sizes = [torch.tensor(size) for size in sizes] if tensors else sizes

    def fused(x: Tensor) -> Tensor:
        return torch.ops.aten._ctc_loss(x, given, *sizes, blank, True)[0]

    case(
        f"ctc {name}",
        written_out(fused, lambda x: ctc_by_alignments(x, targets, lengths, blank)),
        (max(lengths), len(targets), 4),
        low_precision=False,
    )


ctc_case("", [[1, 2], [3, 3], [2]], [4, 4, 4])
ctc_case("blank last", [[1, 2], [0, 0], [2]], [4, 4, 4], blank=3)
ctc_case("lengths", [[1, 2], [3, 1], [2]], [2, 4, 3])
ctc_case("without an alignment", [[1, 2], [3, 3], [2, 1]], [1, 2, 4])
ctc_case("without symbols", [[], [3, 3]], [3, 4])
ctc_case("targets in a row", [[1, 2], [3], [2, 2, 1]], [4, 4, 4], flat=True)
ctc_case("lengths in tensors", [[1, 2], [3, 1], [2]], [2, 4, 3], tensors=True)
