"""Convolutions of any rank, stride, padding, dilation and grouping, plain and transposed (Theorem F.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bilinear import squared
from .registry import Node, Share, linear, needs, saved


@linear("ConvolutionBackward0", "ConvolutionBackward1", contraction=True)
def convolution(node: Node, s: Tensor) -> Any:
    """y = w ⋆ x + b: the operator's own backward, applied to s with x and w squared"""
    wanted = [needs(node, i) for i in range(3)]
    x, w = saved(node, "input"), saved(node, "weight")
    return torch.ops.aten.convolution_backward.default(
        s,
        squared(x, s) if wanted[1] else x.to(s.dtype),  # otherwise only its shape is read
        squared(w, s) if wanted[0] else w.to(s.dtype),
        saved(node, "bias_sym_sizes_opt"),
        saved(node, "stride"),
        saved(node, "padding"),
        saved(node, "dilation"),
        saved(node, "transposed"),
        saved(node, "output_padding"),
        saved(node, "groups"),
        wanted,
    )


@linear("ConvTbcBackward0", contraction=True)
def conv_tbc(node: Node, s: Tensor) -> list[Share]:
    """y = w ⋆ x + b over (time, batch, channel): as above"""
    x, w = saved(node, "self"), saved(node, "weight")
    bias = saved(node, "bias").to(s.dtype)
    return list(torch.ops.aten.conv_tbc_backward.default(s, squared(x, s), squared(w, s), bias, saved(node, "pad")))
