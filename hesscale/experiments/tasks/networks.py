"""Image networks that DeepOBS does not have: small convolutional networks, and a ResNet for small images."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def gap_cnn(classes: int, channels: int = 1, width: int = 16) -> nn.Sequential:
    """Three convolutions with ReLU, global average pooling, and a dense layer."""
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.ReLU()),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes)),
    )


def gelu_cnn(classes: int) -> nn.Sequential:
    """Two convolutions and two dense layers with GELU, for images of 28 × 28."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.GELU(), nn.Linear(64, classes)),
    )


def group_norm(channels: int) -> nn.GroupNorm:
    """Group norm with groups of four channels, and at most 32 groups."""
    return nn.GroupNorm(min(channels // 4, 32), channels)


class BasicBlock(nn.Module):
    """Two convolutions and a skip connection. The first convolution may halve the number of rows and columns."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(
    classes: int,
    norm: Norm = nn.BatchNorm2d,
    *,
    channels: int = 3,
    widths: Sequence[int] = (64, 128, 256, 512),
    blocks: int = 2,
) -> nn.Sequential:
    """A ResNet without the first pooling layer, for images of 32 × 32. By default, it is a ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 3, padding=1, bias=False), norm(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(BasicBlock(inputs, width, 2 if stage and not block else 1, norm))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
