"""Character-level language models, on the text of Python's help."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..lab.text import TEXTS
from .problem import Problem, Split, Splits
from .transformers import GPT

CONTEXT = 64
ENDS = (0.8, 0.9)  # where the training text and the validation text end; the rest is for testing


@functools.lru_cache(maxsize=1)
def load(root: Path | None, device: torch.device, name: str = "python-topics") -> Splits:
    """Split a text into three parts by position. Each distinct character is a class. ``root`` is not used."""
    text = TEXTS[name]()
    known = {character: number for number, character in enumerate(sorted(set(text)))}
    classes = torch.tensor([known[character] for character in text], device=device)
    train, validation, test = classes.tensor_split([int(end * len(text)) for end in ENDS])
    return Splits(split_of(train), split_of(validation), split_of(test), len(known))


def split_of(part: Tensor) -> Split:
    """An example has CONTEXT characters from any position, and the next character of each. Evaluated examples do not overlap."""
    count = len(part) - CONTEXT
    offsets = torch.arange(CONTEXT, device=part.device)

    def take(numbers: Tensor) -> tuple[Tensor, Tensor]:
        found = numbers[..., None] + offsets
        return part[found], part[found + 1]

    return Split(count, torch.arange(0, count, CONTEXT, device=part.device), take)


class CharLSTM(nn.Module):
    """Predicts the next character at every position, from all characters up to it."""

    def __init__(self, classes: int, width: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(classes, width), nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(self.embed(x))[0])
        return y


characters = partial(Problem, dataset="python-topics", load=load, steps=2000, batch=16, metric="loss")
TEXT_PROBLEMS = [
    characters("char-gpt", "GPT of 2 blocks on characters", build=partial(GPT, context=CONTEXT)),
    characters("char-lstm", "LSTM on characters", build=CharLSTM),
]
