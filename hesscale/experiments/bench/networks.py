"""Deep networks that are small enough for one core: transformers for images and text, and a normalizer-free ResNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SILU_GAIN = 1.7881  # scales SiLU(x) to variance one, for x of variance one
BRANCH_GAIN = 0.2


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        rows: Tensor = self.outputs(y.transpose(1, 2).reshape(batch, length, width))
        return rows


class Residual(nn.Module):
    """x + f(norm x)."""

    def __init__(self, width: int, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(width), branch

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.branch(self.norm(x))
        return y


def transformer(width: int, heads: int, blocks: int, *, is_causal: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        layers += [Residual(width, Attention(width, heads, is_causal)), Residual(width, mlp)]
    return nn.Sequential(*layers, nn.LayerNorm(width))


class Patches(nn.Module):
    """An image as a sequence: a class token, and one token per patch."""

    def __init__(self, width: int, patches: int, size: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, size, size)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(patches + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.position


class Tokens(nn.Module):
    """Embeddings of tokens and of their positions."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embed(x) + self.position
        return y


class First(nn.Module):
    """The first token of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


def vit(width: int = 128, heads: int = 4, blocks: int = 4, classes: int = 100) -> nn.Sequential:
    """A vision transformer for images of 32 × 32 in patches of 4 × 4."""
    body = transformer(width, heads, blocks, is_causal=False)
    return nn.Sequential(Patches(width, 64, 4), body, First(), nn.Linear(width, classes))


def gpt(width: int = 128, heads: int = 4, blocks: int = 4, vocabulary: int = 256, length: int = 128) -> nn.Sequential:
    """A causal transformer, with a row of outputs for each token of each sequence."""
    body = transformer(width, heads, blocks, is_causal=True)
    return nn.Sequential(Tokens(vocabulary, length, width), body, nn.Flatten(0, 1), nn.Linear(width, vocabulary))


class Autocast(nn.Sequential):
    """Layers under bfloat16 autocast. The result is in single precision."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return y.float()


def gpt2(width: int = 768, heads: int = 12, blocks: int = 12, vocabulary: int = 50257, length: int = 1024) -> Autocast:
    """GPT-2's smallest model without dropout, under autocast. The last layer's weight is that of the embedding."""
    tokens, head = Tokens(vocabulary, length, width), nn.Linear(width, vocabulary, bias=False)
    tokens.embed.weight = head.weight
    return Autocast(tokens, transformer(width, heads, blocks, is_causal=True), nn.Flatten(0, 1), head)


class StandardizedConv(nn.Conv2d):
    """A convolution whose weight is standardized by output channel, with a gain for each (Brock et al. 2021)."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, size // 2)
        self.gain = nn.Parameter(torch.full((outputs,), (inputs * size * size) ** -0.5))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.view(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, weight=self.gain, training=True, eps=1e-6).view_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class ScaledSiLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x) * SILU_GAIN


class Bottleneck(nn.Module):
    """shortcut(x) + α g f(β SiLU(x)), where β compensates for the variance that earlier blocks add, and g is learned."""

    def __init__(self, inputs: int, outputs: int, stride: int, beta: float) -> None:
        super().__init__()
        middle = outputs // 4
        self.beta, self.activation = beta, ScaledSiLU()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.shortcut: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.AvgPool2d(stride), StandardizedConv(inputs, outputs, 1))
        self.branch = nn.Sequential(
            *(StandardizedConv(inputs, middle, 1), ScaledSiLU(), StandardizedConv(middle, middle, 3, stride), ScaledSiLU()),
            StandardizedConv(middle, outputs, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(x) * self.beta
        rest = x if self.shortcut is None else self.shortcut(y)
        total: Tensor = self.branch(y) * BRANCH_GAIN * self.gain + rest
        return total


def nf_resnet(width: int = 64, blocks: int = 2, classes: int = 100) -> nn.Sequential:
    """A normalizer-free ResNet for images of 32 × 32, with four stages whose widths double."""
    layers: list[nn.Module] = [StandardizedConv(3, 64, 3)]
    channels = 64
    for stage in range(4):
        variance = 1.0
        for block in range(blocks):
            outputs, stride = width * 2**stage, 2 if stage and not block else 1
            layers.append(Bottleneck(channels, outputs, stride, variance**-0.5))
            channels, variance = outputs, (variance if block else 1.0) + BRANCH_GAIN**2
    return nn.Sequential(*layers, ScaledSiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
