"""Cases: fake quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .indexing import differentiable_twice
from .table import case, exactly

RANGE = (-8, 7)
STEPS = torch.tensor([0.1, 0.2, 0.05, 0.4])


def as_jacobian(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The linear function with the Jacobian that autograd has for this one, which it does not differentiate twice."""

    def linear(*inputs: Tensor) -> Tensor:
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.enable_grad():
            y = function(*leaves)
        rows = [
            torch.autograd.grad(y, leaves, unit.view_as(y), retain_graph=True) for unit in torch.eye(y.numel(), dtype=y.dtype)
        ]
        entries = [sum((j * x).sum() for j, x in zip(row, inputs, strict=True)) for row in rows]
        return torch.stack([torch.as_tensor(entry) for entry in entries]).view_as(y)

    return linear


def learnable(name: str, function: Callable[..., Tensor], *inputs: Any) -> None:
    """PyTorch's kernels take float32."""
    twice = differentiable_twice(function, as_jacobian(function))
    case(f"fake quantize learnable {name}", twice, *inputs, low_precision=False, dtype=torch.float32)


def moving_average(x: Tensor) -> Tensor:
    on, low, high = torch.tensor([1]), torch.tensor(-0.5), torch.tensor(0.5)
    scale, zero = torch.tensor([0.1]), torch.tensor([0], dtype=torch.int32)
    return torch.fused_moving_avg_obs_fake_quant(x, on, on, low, high, scale, zero, 0.01, *RANGE, 0)


case("fake quantize with an observer", moving_average, (3, 4), low_precision=False, dtype=torch.float32)
learnable(
    "per tensor",
    lambda x, scale, zero: torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, *RANGE, 0.5),
    (3, 4),
    exactly([0.1]),
    exactly([1.2]),
)
learnable(
    "per tensor, zero point fixed",
    lambda x, scale: torch._fake_quantize_learnable_per_tensor_affine(x, scale, torch.zeros_like(scale).detach(), *RANGE, 1.0),
    (3, 4),
    exactly([0.13]),
)
learnable(
    "per channel",
    lambda x, scale, zero: torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 1, *RANGE, 0.5),
    (3, 4, 2),
    exactly(STEPS.tolist()),
    exactly([0.0, 1.2, -1.0, 3.0]),
)
