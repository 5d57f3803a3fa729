"""Problems: a data set and a network, as in DeepOBS (Schneider, Balles & Hennig 2019) for PyTorch, with ELU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lab.store import seeded

ACTIVATIONS: dict[str, type[nn.Module]] = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh}
PADDINGS = ("deepobs", "none")


@dataclass(frozen=True)
class Problem:
    """A data set and a network.

    Attributes:
        title: of the network.
        dataset: its name in :func:`hesscale.experiments.lab.data.load`.
        build: returns the network for a number of classes, an activation and a padding.
        epochs, batch: the number of epochs and the batch size in the paper.
        is_augmented: whether training images are augmented.
        mean, std: of the channels, for normalization.
    """

    title: str
    dataset: str
    build: Callable[[int, type[nn.Module], str], nn.Sequential]
    epochs: int
    batch: int
    is_augmented: bool = False
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def network(self, classes: int, seed: int, activation: str = "elu", padding: str = "deepobs") -> nn.Sequential:
        """The network. Its initial weights depend only on ``seed``."""
        with seeded(seed):
            return self.build(classes, ACTIVATIONS[activation], padding)


class Mean(nn.Module):
    """Global average pooling as a product with a frozen parameter, so that its result counts as the model's outputs."""

    def __init__(self, channels: int, pixels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(channels).repeat_interleave(pixels, 1) / pixels, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), self.weight)


def three_c_three_d(classes: int = 100, activation: type[nn.Module] = nn.ELU, padding: str = "deepobs") -> nn.Sequential:
    """3C3D, with torch's default initialization: three convolutions and three dense layers for images of 32 × 32.

    Without padding, as in the authors' code, the last convolution leaves a single pixel with 128 channels.

    Pooling in ceil mode ignores positions outside of the image. DeepOBS for PyTorch has zeros there. This is the same after ReLU,
    but after ELU, a zero may be the maximum of its window.
    """
    is_padded = padding == "deepobs"

    def pool() -> nn.Module:
        return nn.MaxPool2d(3, stride=2, ceil_mode=is_padded)

    return nn.Sequential(
        *(nn.Conv2d(3, 64, 5), activation(), pool()),
        *(nn.Conv2d(64, 96, 3), activation(), pool()),
        *(nn.Conv2d(96, 128, 3, padding=int(is_padded)), activation(), pool()),
        *(nn.Flatten(), nn.Linear(1152 if is_padded else 128, 512), activation()),
        *(nn.Linear(512, 256), activation(), nn.Linear(256, classes)),
    )


def deepobs_3c3d(classes: int, activation: type[nn.Module], padding: str) -> nn.Sequential:
    return initialized(three_c_three_d(classes, activation, padding), bias=0.0)


def all_cnn_c(classes: int, activation: type[nn.Module], padding: str) -> nn.Sequential:
    """All-CNN-C: nine convolutions, each with an activation, and global average pooling. The authors' code has no padding."""

    def layers() -> Iterator[nn.Module]:
        channels = (3, 96, 96, 96, 192, 192, 192, 192, 192, classes)
        for k, (inputs, outputs) in enumerate(itertools.pairwise(channels)):
            if k in (0, 3, 6):
                yield nn.Dropout(0.2 if k == 0 else 0.5)
            stride = 2 if k in (2, 5) else 1
            if padding == "deepobs" and stride == 2:
                yield nn.ZeroPad2d((0, 1, 0, 1))  # TensorFlow's "same" padding for an even number of pixels
            around = int(padding == "deepobs" and stride == 1 and k < 6)
            yield nn.Conv2d(inputs, outputs, 3 if k < 7 else 1, stride, around)
            yield activation()
        yield Mean(classes, 36 if padding == "deepobs" else 4)

    return initialized(nn.Sequential(*layers()), bias=0.1)


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def mnist_mlp(classes: int, activation: type[nn.Module], padding: str) -> nn.Sequential:
    """Hidden layers of 1000, 500 and 100, initialized from a truncated normal distribution."""
    model = dense((784, 1000, 500, 100, classes), activation)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.03, a=-0.06, b=0.06)
            nn.init.zeros_(layer.bias)
    return model


def digits_mlp(classes: int, activation: type[nn.Module], padding: str) -> nn.Sequential:
    """Two hidden layers of 64, smaller than all networks of DeepOBS."""
    return initialized(dense((64, 64, 64, classes), activation), bias=0.0)


def dense(sizes: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    layers = [module for a, b in itertools.pairwise(sizes) for module in (nn.Linear(a, b), activation())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def initialized(model: nn.Sequential, bias: float) -> nn.Sequential:
    """Xavier initialization: normal for convolutions, uniform for dense layers."""
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            (nn.init.xavier_normal_ if isinstance(layer, nn.Conv2d) else nn.init.xavier_uniform_)(layer.weight)
            nn.init.constant_(layer.bias, bias)  # type: ignore[arg-type]
    return model


def parameters_of(model: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in trained_parameters(model))


CIFAR100 = {
    "is_augmented": True,
    "mean": (0.50707516, 0.48654887, 0.44091784),
    "std": (0.26733429, 0.25643846, 0.27615047),
}
PROBLEMS = {
    "cifar100-3c3d": Problem("3C3D", "cifar100", deepobs_3c3d, 200, 128, **CIFAR100),  # type: ignore[arg-type]
    "cifar100-allcnnc": Problem("All-CNN-C", "cifar100", all_cnn_c, 350, 256, **CIFAR100),  # type: ignore[arg-type]
    "mnist-mlp": Problem("MLP 1000-500-100", "mnist", mnist_mlp, 100, 128),
    "digits-mlp": Problem("MLP 64-64", "digits", digits_mlp, 30, 32),
}
