"""Cases: normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .table import case

aten = torch.ops.aten


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """A running mean and variance for the channels of x."""
    channels = torch.arange(x.shape[1], dtype=x.dtype)
    return channels / 5 - 0.3, channels / 3 + 0.5


def batch_norm(training: bool):
    return lambda x, *affine: F.batch_norm(x, *statistics(x), *affine, training=training)


def without_statistics(x: Tensor, *affine: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, *affine, training=True)


def cumulative(x: Tensor) -> Tensor:
    return nn.BatchNorm1d(x.shape[1], momentum=None, affine=False, dtype=x.dtype)(x)


for training in (True, False):
    mode = "training" if training else "evaluation"
    case(f"batch_norm {mode}", batch_norm(training), (5, 3), (3,), (3,))
    case(f"batch_norm {mode} 1d", batch_norm(training), (4, 3, 2), (3,), (3,))
    case(f"batch_norm {mode} 2d", batch_norm(training), (2, 3, 2, 2), (3,), (3,))
    case(f"batch_norm {mode} 3d", batch_norm(training), (2, 2, 2, 1, 2), (2,), (2,))
    case(f"batch_norm {mode} plain", batch_norm(training), (4, 3, 2))
    case(f"batch_norm {mode} weight", batch_norm(training), (4, 3, 2), (3,))
    case(
        f"batch_norm {mode} legit",
        lambda x, w, b, mode=training: aten._native_batch_norm_legit(x, w, b, *statistics(x), mode, 0.1, 1e-5)[0],
        (4, 3, 2),
        (3,),
        (3,),
    )
case("batch_norm without statistics", without_statistics, (4, 3, 2), (3,), (3,))
case("batch_norm channels last", lambda x: without_statistics(x.to(memory_format=torch.channels_last)), (2, 3, 2, 2))
case("batch_norm constant input", lambda w, b: without_statistics(torch.arange(12.0, dtype=w.dtype).view(4, 3), w, b), (3,), (3,))
case("batch_norm large epsilon", lambda x: F.batch_norm(x, None, None, training=True, eps=0.7), (4, 3))
case("batch_norm cumulative momentum", cumulative, (4, 3))
case(
    "batch_norm legit without statistics",
    lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0],
    (4, 3, 2),
    (3,),
    (3,),
)
case(
    "batch_norm legit no training",
    lambda x, w, b: aten._native_batch_norm_legit_no_training(x, w, b, *statistics(x), 0.1, 1e-5)[0],
    (4, 3, 2),
    (3,),
    (3,),
)
case(
    "batch_norm with update",
    lambda x, w, b: aten._batch_norm_with_update(x, w, b, *statistics(x), 0.1, 1e-5)[0],
    (4, 3, 2),
    (3,),
    (3,),
)
case(
    "batch_norm no update",
    lambda x, w, b: aten._batch_norm_no_update(x, w, b, *statistics(x), 0.1, 1e-5)[0],
    (4, 3, 2),
    (3,),
    (3,),
)
case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (2, 3, 5), (3,), (3,))
case("instance_norm plain", lambda x: F.instance_norm(x), (2, 3, 2, 2))
case(
    "instance_norm running statistics",
    lambda x: F.instance_norm(x, *statistics(x), use_input_stats=False),
    (2, 3, 5),
)

case("layer_norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), (2, 3, 5), (5,), (5,))
case("layer_norm plain", lambda x: F.layer_norm(x, (5,)), (3, 5))
case("layer_norm several dims", lambda x, w, b: F.layer_norm(x, (3, 4), w, b), (2, 3, 4), (3, 4), (3, 4))
case("layer_norm whole", lambda x: F.layer_norm(x, (6,), eps=0.3), (6,))
case("layer_norm no bias", lambda x, w: F.layer_norm(x, (5,), w), (3, 5), (5,))
case("layer_norm constant weight", lambda x, b: F.layer_norm(x, (5,), torch.arange(5.0, dtype=x.dtype), b), (3, 5), (5,))
case("layer_norm constant input", lambda w, b: F.layer_norm(torch.arange(10.0, dtype=w.dtype).view(2, 5), (5,), w, b), (5,), (5,))
case("layer_norm not contiguous", lambda x, w: F.layer_norm(x.transpose(0, 2), (3, 4), w), (4, 3, 2), (3, 4))

case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 3), (4,), (4,))
case("group_norm 2d", lambda x, w, b: F.group_norm(x, 3, w, b, eps=0.2), (2, 6, 2, 2), (6,), (6,))
case("group_norm flat", lambda x, w: F.group_norm(x, 2, w), (3, 6), (6,))
case("group_norm plain", lambda x: F.group_norm(x, 1), (2, 4, 3))
case("group_norm constant weight", lambda x: F.group_norm(x, 2, torch.arange(4.0, dtype=x.dtype)), (2, 4, 3))
case("group_norm channels last", lambda x: F.group_norm(x.to(memory_format=torch.channels_last), 2), (2, 4, 2, 2))
case("group_norm with its statistics", lambda x, w, b: aten.native_group_norm(x, w, b, 2, 4, 3, 2, 1e-5), (2, 4, 3), (4,), (4,))

# else in test_written_out.py: its double backward takes ‖v‖ for a constant
case("weight_norm constant direction", lambda g: torch._weight_norm(torch.arange(12.0, dtype=g.dtype).view(4, 3), g, 0), (4, 1))
