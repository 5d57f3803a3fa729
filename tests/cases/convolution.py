"""Cases: convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .table import case, constant

case("conv1d", F.conv1d, (2, 3, 6), (4, 3, 3), (4,))
case("conv2d", F.conv2d, (2, 2, 4, 5), (3, 2, 3, 2), (3,))
case("conv3d", F.conv3d, (2, 2, 3, 3, 4), (2, 2, 2, 2, 2), (2,))
case("conv2d without bias", F.conv2d, (2, 2, 4, 5), (3, 2, 3, 2))
case("conv2d one sample", F.conv2d, (2, 4, 5), (3, 2, 3, 2), (3,))
case("conv2d input only", lambda x: F.conv2d(x, constant(x, 3, 2, 3, 2), constant(x, 3)), (2, 2, 4, 5))
case("conv2d weight only", lambda w: F.conv2d(constant(w, 2, 2, 4, 5), w, constant(w, 3)), (3, 2, 3, 2))
case("conv2d bias only", lambda b: F.conv2d(constant(b, 2, 2, 4, 5), constant(b, 3, 2, 3, 2), b), (3,))
case("conv2d first layer", lambda w, b: F.conv2d(constant(w, 2, 2, 4, 5), w, b), (3, 2, 3, 2), (3,))
case("conv2d stride, padding", lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2)), (2, 2, 5, 4), (3, 2, 3, 3), (3,))
case("conv2d dilation", lambda x, w, b: F.conv2d(x, w, b, dilation=(2, 1)), (2, 2, 5, 4), (3, 2, 2, 3), (3,))
case("conv2d valid", lambda x, w: F.conv2d(x, w, padding="valid"), (2, 2, 4, 4), (3, 2, 2, 3))
case("conv2d same", lambda x, w: F.conv2d(x, w, padding="same"), (2, 2, 4, 4), (3, 2, 3, 3))
case("conv2d same, one side more", lambda x, w: F.conv2d(x, w, padding="same"), (2, 2, 4, 4), (3, 2, 2, 3))
case("conv2d groups", lambda x, w, b: F.conv2d(x, w, b, groups=2), (2, 4, 4, 3), (6, 2, 2, 2), (6,))
case("conv2d depthwise", lambda x, w, b: F.conv2d(x, w, b, groups=3, padding=1), (2, 3, 4, 3), (6, 1, 3, 3), (6,))
case("conv2d 1×1", F.conv2d, (2, 3, 3, 3), (4, 3, 1, 1), (4,))
case(
    "conv2d channels last",
    lambda x, w: F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), stride=2),
    (2, 5, 4, 2),
    (3, 3, 2, 2),
)
case("conv2d strided input", lambda x, w: F.conv2d(x[:, ::2, :, 1:], w), (2, 4, 4, 5), (3, 2, 3, 2))
case("conv1d stride, padding, dilation, groups", lambda x, w: F.conv1d(x, w, None, 2, 1, 2, 2), (2, 4, 8), (4, 2, 3))
case("conv3d stride, padding", lambda x, w: F.conv3d(x, w, None, (1, 2, 1), (1, 0, 1)), (1, 2, 3, 4, 2), (2, 2, 2, 2, 2))
case("conv_transpose1d", F.conv_transpose1d, (2, 3, 4), (3, 4, 3), (4,))
case("conv_transpose2d", F.conv_transpose2d, (2, 3, 3, 4), (3, 2, 3, 2), (2,))
case("conv_transpose3d", F.conv_transpose3d, (1, 2, 2, 2, 3), (2, 2, 2, 2, 2), (2,))
case("conv_transpose2d one sample", F.conv_transpose2d, (3, 3, 4), (3, 2, 3, 2))
case(
    "conv_transpose2d all options",
    lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=(1, 0), groups=2, dilation=(2, 1)),
    (2, 4, 3, 3),
    (4, 2, 2, 3),
    (4,),
)
case(
    "_convolution",
    lambda x, w, b: torch._convolution(x, w, b, [2], [1], [1], False, [0], 1, False, False, False, False),
    (2, 3, 6),
    (4, 3, 3),
    (4,),
)
case("conv_tbc", lambda x, w, b: torch.conv_tbc(x, w, b, 1), (5, 2, 3), (3, 3, 4), (4,))
case("conv_tbc weight only", lambda w: torch.conv_tbc(constant(w, 5, 2, 3), w, constant(w, 4)), (3, 3, 4))
