"""Fake quantization with straight-through gradients: the Jacobian that autograd uses, as if it were constant.

Fake quantization with a fixed scale is among the elementwise operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .registry import Node, Share, dimension, linear, needs, saved, signed, zero_one

aten = torch.ops.aten

zero_one("FusedMovingAvgObsFqHelperBackward0", summary="f' = 1 inside the range of the quantized values, 0 outside")


@linear("FakeQuantizeLearnablePerTensorAffineBackward0")
def learnable_per_tensor(node: Node, s: Tensor) -> list[Share]:
    """f' = 1 inside, 0 outside; for the scale c (y − x)/scale inside, c y/scale outside; for the zero point 0 and −c scale"""
    x, *step, low, high, factor = arguments(node)
    inside = aten._fake_quantize_learnable_per_tensor_affine_backward(torch.ones_like(x), x, *step, low, high, factor)[0]
    y = aten._fake_quantize_learnable_per_tensor_affine(x, *step, low, high, factor)
    return learnable_shares(node, s, inside, y, step[0])


@linear("FakeQuantizeLearnablePerChannelAffineBackward0")
def learnable_per_channel(node: Node, s: Tensor) -> list[Share]:
    """as above, with a scale and a zero point for every channel"""
    x, *step, low, high, factor = arguments(node)
    axis = dimension(saved(node, "axis"), x.dim())
    inside = aten._fake_quantize_learnable_per_channel_affine_backward(torch.ones_like(x), x, *step, axis, low, high, factor)[0]
    y = aten._fake_quantize_learnable_per_channel_affine(x, *step, axis, low, high, factor)
    shares = learnable_shares(node, s, inside, y, step[0].reshape(-1, *[1] * (x.dim() - 1 - axis)))
    others = [d for d in range(x.dim()) if d != axis]
    return [shares[0], *(share.sum(others) if share is not None and others else share for share in shares[1:])]


def arguments(node: Node) -> list[Any]:
    tensors = [saved(node, name) for name in ("self", "scale", "zero_point")]
    return [*tensors, signed(saved(node, "quant_min")), signed(saved(node, "quant_max")), saved(node, "grad_factor")]


def learnable_shares(node: Node, s: Tensor, inside: Tensor, y: Tensor, scale: Tensor) -> list[Share]:
    factor = saved(node, "grad_factor")
    return [
        s * inside if needs(node, 0) else None,
        s * ((y - inside * saved(node, "self")) / scale * factor).square() if needs(node, 1) else None,
        s * ((1 - inside) * scale * factor).square() if needs(node, 2) else None,
    ]
