"""Transformers: a block, a network for images (ViT), and a network for characters (GPT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITION_STD = 0.02


class Block(nn.Module):
    """A pre-norm transformer block: attention and two dense layers, each with a layer norm and a skip connection."""

    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y: Tensor = x + self.mlp(self.norms[1](x))
        return y

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return y


class ViT(nn.Module):
    """Classifies the mean over a sequence of image patches."""

    def __init__(
        self, classes: int, *, channels: int = 3, size: int = 32, patch: int = 4, width: int = 128, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.position = nn.Parameter(POSITION_STD * torch.randn((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads, is_causal=False) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).mT + self.position  # (batch, length, width)
        y: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return y


class GPT(nn.Module):
    """Predicts the next character at every position, from all characters up to it."""

    def __init__(self, classes: int, *, context: int = 64, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(classes, width)
        self.position = nn.Parameter(POSITION_STD * torch.randn(context, width))
        self.blocks = nn.Sequential(*[Block(width, heads, is_causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.position)))
        return y
