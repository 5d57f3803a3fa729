"""Images on the device as bytes, and augmented batches of them: shifted, flipped and with colour jitter."""

from __future__ import annotations

import functools
import hashlib
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lab.data import load
from .problems import Problem

MAX_VALIDATION = 10_000  # validation takes a fifth of the training images, but at most this number
PAD = 2
BRIGHTNESS, CONTRAST, SATURATION = range(3)
FACTORS = ((1 - 63 / 255, 1 + 63 / 255), (0.2, 1.8), (0.5, 1.5))  # of these, from and to
ORDERS = tuple(itertools.permutations(range(3)))
UNIFORM = 7  # uniform random numbers for the augmentation of an image
GREY = (0.299, 0.587, 0.114)


class Split(NamedTuple):
    """Bytes as (images, channels, rows, columns), and labels."""

    images: Tensor
    labels: Tensor


class Images(NamedTuple):
    """A data set on a device, in disjoint splits that do not depend on the seed.

    (CIFAR-100 has duplicate images, so an image may still be in two splits.)

    Attributes:
        train: the images for training.
        validation: images that are held out from the data set's training images.
        test: the data set's test images.
        classes: the number of classes.
        scale: the value of the brightest possible pixel.
        mean, std: of the channels, as (channels, 1, 1).
    """

    train: Split
    validation: Split
    test: Split
    classes: int
    scale: int
    mean: Tensor
    std: Tensor

    def inputs(self, images: Tensor) -> Tensor:
        """Normalized inputs for a network, from bytes or from numbers in the same range."""
        return (images / self.scale - self.mean) / self.std

    @property
    def padded(self) -> Tensor:
        """Training images with black margins."""
        return F.pad(self.train.images, (PAD, PAD, PAD, PAD))


@functools.lru_cache(maxsize=1)
def load_images(problem: Problem, root: Path | None, device: torch.device) -> Images:
    dataset = load(problem.dataset, root)

    def split(images: Tensor, labels: Tensor) -> Split:
        return Split((images if images.dim() == 4 else images[:, None]).contiguous().to(device), labels.to(device))

    count = len(dataset.train_labels)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0), device="cpu")
    held_out, kept = order.tensor_split([min(count // 5, MAX_VALIDATION)])
    train, validation = (split(dataset.train_images[part], dataset.train_labels[part]) for part in (kept, held_out))
    mean, std = (torch.tensor(values, device=device)[:, None, None] for values in (problem.mean, problem.std))
    test = split(dataset.test_images, dataset.test_labels)
    return Images(train, validation, test, dataset.classes, dataset.scale, mean, std)


class Draws(NamedTuple):
    """The random numbers of one network for one epoch.

    Attributes:
        image: (steps, batch), the index of each image. No index occurs twice.
        uniform: (steps, batch, UNIFORM), in [0, 1), for :func:`augmented`.
    """

    image: Tensor
    uniform: Tensor


def draw(count: int, batch: int, seed: int, epoch: int) -> Draws:
    """The draws of an epoch, which depend only on seed and epoch. An incomplete last batch is left out."""
    generator = torch.Generator().manual_seed(number_of("images", seed, epoch))
    steps = count // batch
    image = torch.randperm(count, generator=generator, device="cpu")[: steps * batch].view(steps, batch)
    return Draws(image, torch.rand(steps, batch, UNIFORM, generator=generator, device="cpu"))


def number_of(*parts: object) -> int:
    """A seed derived from several values, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def augmented(padded: Tensor, draws: Draws, scale: int) -> Tensor:
    """Augmented images in [0, 1], as (…, channels, rows, columns) for draws of (…). ``padded`` has margins of PAD."""
    shape, channels = draws.image.shape, padded.shape[1]
    rows, columns = (size - 2 * PAD for size in padded.shape[2:])
    image, uniform = draws.image.flatten(), draws.uniform.flatten(0, -2)
    shift = (uniform[:, :2] * (2 * PAD + 1)).long()
    flip = uniform[:, 2:3] < 0.5
    channel, y, x = (torch.arange(size, device=padded.device) for size in (channels, rows, columns))
    y, x = shift[:, :1] + y, shift[:, 1:] + torch.where(flip, x.flip(0), x)
    found = padded[image[:, None, None, None], channel[None, :, None, None], y[:, None, :, None], x[:, None, None, :]]
    (low, high), orders = constants(padded.device)
    order = orders[(uniform[:, 6] * len(ORDERS)).long()]
    return jittered(found / scale, torch.lerp(low, high, uniform[:, 3:6]), order).view(*shape, channels, rows, columns)


@functools.lru_cache
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Constants on the device. They are cached, since copying them at every call would wait for the device."""
    return torch.tensor(FACTORS, device=device).T, torch.tensor(ORDERS, device=device)


def jittered(x: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Colour jitter. Each factor scales the difference from black, from the mean grey, or from the grey of each pixel."""
    for k in range(order.shape[1]):
        kind = order[:, k]
        factor = factors.gather(1, kind[:, None])[:, :, None, None]
        grey = (GREY[0] * x[:, :1]).add_(x[:, 1:2], alpha=GREY[1]).add_(x[:, 2:], alpha=GREY[2])
        kind = kind[:, None, None, None]
        grey = torch.where(kind == SATURATION, grey, grey.mean((2, 3), keepdim=True)).mul_(kind != BRIGHTNESS)
        x = torch.lerp(grey, x, factor).clamp_(0, 1)
    return x
