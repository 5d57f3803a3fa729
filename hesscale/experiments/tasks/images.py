"""Image classification: digits, MNIST and CIFAR-100, without augmentation."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..vision.images import Images, load_images
from ..vision.images import Split as Bytes
from ..vision.problems import PROBLEMS, dense
from . import networks
from .problem import Problem, Split, Splits
from .transformers import ViT


def load(problem: str, root: Path | None, device: torch.device) -> Splits:
    """The splits of a problem of :mod:`hesscale.experiments.vision`, with its normalization."""
    images = load_images(PROBLEMS[problem], root, device)
    train, validation, test = (split_of(images, part) for part in (images.train, images.validation, images.test))
    return Splits(train, validation, test, images.classes)


def split_of(images: Images, part: Bytes) -> Split:
    def take(numbers: Tensor) -> tuple[Tensor, Tensor]:
        return images.inputs(part.images[numbers]), part.labels[numbers]

    return Split(len(part.labels), torch.arange(len(part.labels), device=part.labels.device), take)


def mlp(classes: int, activation: type[nn.Module], layers: int = 2) -> nn.Sequential:
    """An MLP with hidden layers of 64 for images of 8 × 8, with torch's default initialization."""
    return dense((64, *[64] * layers, classes), activation)


def deepobs(classes: int, problem: str) -> nn.Sequential:
    """A network of DeepOBS, with ReLU as in DeepOBS."""
    return PROBLEMS[problem].build(classes, nn.ReLU, "deepobs")


digits = partial(Problem, dataset="digits", load=partial(load, "digits-mlp"), batch=64)
mnist = partial(Problem, dataset="mnist", load=partial(load, "mnist-mlp"), batch=64)
cifar100 = partial(Problem, dataset="cifar100", load=partial(load, "cifar100-3c3d"), batch=128)
small_resnet = partial(networks.resnet, channels=1, widths=(16, 32), blocks=1)
small_vit = partial(ViT, channels=1, size=8, patch=2, width=32, depth=2)

IMAGE_PROBLEMS = [
    digits("digits-tanh", "MLP 64-64 with tanh on digits", build=partial(mlp, activation=nn.Tanh), steps=1000),
    digits("digits-relu", "MLP 64-64 with ReLU on digits", build=partial(mlp, activation=nn.ReLU), steps=1000),
    digits("digits-relu7", "MLP of 7 × 64 with ReLU on digits", build=partial(mlp, activation=nn.ReLU, layers=7), steps=1000),
    digits("digits-gapcnn", "CNN with global average pooling on digits", build=networks.gap_cnn, steps=1000),
    digits("digits-resnet", "Small ResNet, batch norm, on digits", build=small_resnet, steps=500),
    digits("digits-vit", "Small ViT on digits", build=small_vit, steps=1000),
    mnist("mnist-gelu-cnn", "CNN with GELU on MNIST", build=networks.gelu_cnn, steps=2000),
    cifar100("cifar100-3c3d", "3C3D on CIFAR-100", build=partial(deepobs, problem="cifar100-3c3d"), steps=5000),
    cifar100("cifar100-allcnnc", "All-CNN-C on CIFAR-100", build=partial(deepobs, problem="cifar100-allcnnc"), steps=5000),
    cifar100("cifar100-resnet18-bn", "ResNet-18, batch norm, on CIFAR-100", build=networks.resnet, steps=5000),
    cifar100(
        "cifar100-resnet18-gn",
        "ResNet-18, group norm, on CIFAR-100",
        build=partial(networks.resnet, norm=networks.group_norm),
        steps=5000,
    ),
    cifar100("cifar100-vit", "ViT of 4 blocks on CIFAR-100", build=ViT, steps=5000),
]
