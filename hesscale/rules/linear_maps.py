"""Linear maps with constant Jacobian entries: s_x = (J∘J)ᵀ s.

If all entries are 0 or 1, J∘J = J, and the node's own backward computes the share. Otherwise, each entry is squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .registry import Node, Share, linear, needs, zero_one

zero_one(
    "AliasBackward0",
    "AliasBackward0_copy",
    "ChannelShuffleBackward0",
    "CloneBackward0",
    "FlipBackward0",
    "LazyCloneBackward0",
    "LiftBackward0",
    "LiftFreshBackward0",
    "LiftFreshBackward0_copy",
    "PermuteBackward0",
    "PermuteBackward0_copy",
    "PinMemoryBackward0",
    "PixelShuffleBackward0",
    "PixelUnshuffleBackward0",
    "ReshapeAliasBackward0",
    "ReshapeAliasBackward0_copy",
    "ReshapeCopyBackward0",
    "RollBackward0",
    "Rot90Backward0",
    "SqueezeBackward0",
    "SqueezeBackward0_copy",
    "SqueezeBackward1",
    "SqueezeBackward1_copy",
    "SqueezeBackward2",
    "SqueezeBackward2_copy",
    "SqueezeBackward3",
    "SqueezeBackward4",
    "SqueezeBackward5",
    "TBackward0",
    "TBackward0_copy",
    "TBackward1",
    "TransposeBackward0",
    "TransposeBackward0_copy",
    "TransposeBackward1",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "UnsqueezeBackward0_copy",
    "UnsqueezeBackward1",
    "ViewBackward0",
    "ViewBackward0_copy",
    summary="the same entries in other positions",
)
zero_one(
    "DiagonalBackward0",
    "DiagonalBackward0_copy",
    "NarrowCopyBackward0",
    "PackPaddedSequenceBackward0",
    "SelectBackward0",
    "SelectBackward0_copy",
    "SliceBackward0",
    "SliceBackward0_copy",
    "TrilBackward0",
    "TriuBackward0",
    summary="some of the entries; zero for the others",
)
zero_one("ConstantPadNdBackward0", "DiagEmbedBackward0", summary="the entries among constants")
zero_one(
    "SplitBackward0",
    "SplitBackward0_copy",
    "SplitWithSizesBackward0",
    "SplitWithSizesBackward0_copy",
    "UnbindBackward0",
    "UnbindBackward0_copy",
    "UnsafeSplitBackward0",
    "UnsafeSplitWithSizesBackward0",
    many=True,
    summary="each part's entries, back in their positions",
)
zero_one("BlockDiagBackward0", "CatBackward0", "StackBackward0", mixed=False, summary="the entries of each input")
zero_one(
    "DiagonalScatterBackward0",
    "SelectScatterBackward0",
    "SliceScatterBackward0",
    mixed=False,
    summary="the source's entries in the part that was overwritten, the other input's elsewhere",
)
zero_one(
    "AsStridedScatterBackward0",
    mixed=False,
    fan_out=True,
    refuse=lambda node: AS_STRIDED_SCATTER if needs(node, 0) else None,
    summary="the source's entries in the part that was overwritten",
)
AS_STRIDED_SCATTER = "PyTorch's own gradient of the tensor written into is wrong. Use slice_scatter, or y = x.clone(); y[...] = z"
zero_one(
    "ExpandBackward0",
    "ExpandBackward0_copy",
    "Im2ColBackward0",
    "RepeatBackward0",
    "UnfoldBackward0",
    "UnfoldBackward0_copy",
    fan_out=True,
    summary="repeated entries: each gets the sum of its shares",
)
zero_one("Col2ImBackward0", "TraceBackward0", fan_in=True, summary="sums of entries: each entry gets the share of its sum")


@linear("NegViewBackward0", "NegViewBackward0_copy", "ToCopyBackward0", fan_in=False, fan_out=False)
def same_entries(node: Node, s: Tensor) -> Share:
    """J = ±1, whatever the dtype and device"""
    return s


@linear("torch::autograd::CopyBackwards", joint=False, mixed=False, fan_in=False, fan_out=False, broadcast=True)
def copy(node: Node, s: Tensor) -> list[Share]:
    """y = the source, broadcast: J = 0 for the overwritten tensor, 1 for the source"""
    return [None, s]


@linear("FillBackward1", "FillBackward3", joint=False, mixed=False, fan_in=False, fan_out=False, broadcast=True)
def fill(node: Node, s: Tensor) -> list[Share]:
    """y = the value everywhere: J = 0 for the overwritten values, 1 for the value"""
    return [None, s]


@linear("FillBackward0", "FillBackward2", "ZeroBackward0", fan_in=False, fan_out=False)
def constant(node: Node, s: Tensor) -> Share:
    """J = 0 for the overwritten values"""
    return None


@linear(
    "BackwardHookFunctionBackward",
    "RegisterPostBackwardFunctionBackward",
    "_DDPSinkBackward",
    joint=False,
    mixed=False,
    fan_in=False,
    fan_out=False,
    many=True,
)
def identities(node: Node, s: tuple[Share, ...]) -> Sequence[Share]:
    """yᵢ = xᵢ: nodes that only run hooks (module hooks, DDP, FSDP)"""
    return s


@linear("AsStridedBackward0", "AsStridedBackward0_copy", "AsStridedBackward1")
def as_strided(node: Node, s: Tensor) -> Share:
    """J = 1 where y reads x's memory; 1/c where c entries of x share that memory, as in autograd"""
    with SquaredShareOfMemory():  # type: ignore[no-untyped-call]
        return node(s)


class SquaredShareOfMemory(TorchDispatchMode):
    """Divide twice by the number of x's entries at one memory location, by which the backward of as_strided divides once."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.div_.Tensor:
            function(*args)
        return function(*args, **(kwargs or {}))
