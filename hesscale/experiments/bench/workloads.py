"""The workloads by name: networks, batches and losses."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..vision.problems import three_c_three_d
from .networks import gpt, gpt2, nf_resnet, vit

CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class Workload:
    """A network, one fixed batch of random numbers, and a loss."""

    name: str
    description: str
    network: Callable[[], nn.Sequential]
    inputs: tuple[int, ...]
    outputs: int
    batch: dict[str, int]  # by device type
    loss: type[nn.Module] = nn.CrossEntropyLoss
    devices: tuple[str, ...] = (CPU, CUDA)  # devices on which it runs even if it is not selected by name
    size: int | None = None  # the quantity that a sweep varies
    left_out: dict[str, str] = field(default_factory=dict)  # methods that are not safe to run, and why
    vocabulary: int | None = None  # the number of tokens, if the inputs are tokens; each position then has a target

    def model(self, device: torch.device, seed: int = 0) -> nn.Sequential:
        """The network for a seed. Xavier initialization keeps signals in range at any depth."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.network()
            for layer in model:
                if isinstance(layer, nn.Linear | nn.Conv2d):
                    nn.init.xavier_normal_(layer.weight)
                    if layer.bias is not None:
                        nn.init.zeros_(layer.bias)
        return model.to(device)

    def data(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        size = self.batch[device.type]
        if self.vocabulary is not None:
            x = torch.randint(self.vocabulary, (size, *self.inputs), generator=generator, device=CPU)
            y = torch.randint(self.outputs, (x.numel(),), generator=generator, device=CPU)
            return x.to(device), y.to(device)
        x = torch.randn(size, *self.inputs, generator=generator, device=CPU)
        if self.loss is nn.CrossEntropyLoss:
            y = torch.randint(self.outputs, (size,), generator=generator, device=CPU)
        else:
            y = torch.randn(size, self.outputs, generator=generator, device=CPU)
        return x.to(device), y.to(device)


def mlp(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    sizes = [inputs, *[width] * layers]
    hidden = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def both(size: int) -> dict[str, int]:
    return {CPU: size, CUDA: size}


LIST = [
    Workload("mlp-64", "tanh MLP 64-64, 64 → 10", functools.partial(mlp, 64, 64, 2, 10), (64,), 10, both(64)),
    Workload(
        "mlp-64-rl", "tanh MLP 64-64, 17 → 6, squared error", functools.partial(mlp, 17, 64, 2, 6), (17,), 6, both(64), nn.MSELoss
    ),
    Workload("mlp-4x512", "tanh MLP 4×512, 784 → 10", functools.partial(mlp, 784, 512, 4, 10), (784,), 10, both(256)),
    Workload("mlp-4x512-b1", "tanh MLP 4×512, 784 → 10", functools.partial(mlp, 784, 512, 4, 10), (784,), 10, both(1)),
    Workload(
        "mlp-16x512-b1",
        "tanh MLP 16×512, 784 → 10",
        functools.partial(mlp, 784, 512, 16, 10),
        (784,),
        10,
        both(1),
        devices=(CUDA,),
    ),
    Workload(
        "mlp-4x4096",
        "tanh MLP 4×4096, 784 → 10",
        functools.partial(mlp, 784, 4096, 4, 10),
        (784,),
        10,
        both(4096),
        devices=(CUDA,),
    ),
    Workload(
        "3c3d",
        "3C3D with ELU, CIFAR-100",
        three_c_three_d,
        (3, 32, 32),
        100,
        {CPU: 32, CUDA: 1024},
        left_out={"backpack-h": "asks for more than 60 GB at batch 32"},
    ),
    Workload("vit", "ViT, 4 blocks of width 128, 65 tokens", vit, (3, 32, 32), 100, both(16), devices=()),
    Workload("gpt", "GPT, 4 blocks of width 128, 128 tokens", gpt, (128,), 256, both(8), devices=(), vocabulary=256),
    Workload(
        "gpt2",
        "GPT-2 small, 1,024 tokens, bfloat16 autocast",
        gpt2,
        (1024,),
        50257,
        {CUDA: 8},
        devices=(),
        vocabulary=50257,
    ),
    Workload("nf-resnet", "NF-ResNet-26, a quarter as wide", nf_resnet, (3, 32, 32), 100, both(16), devices=()),
    Workload("nf-resnet-b1", "NF-ResNet-26", functools.partial(nf_resnet, 256), (3, 32, 32), 100, both(1), devices=()),
]
WORKLOADS = {workload.name: workload for workload in LIST}


def sweep(kind: str) -> list[Workload]:
    """The networks of the paper's Appendix D, one sample at a time, as in its authors' code."""
    if kind == "outputs":
        return [point(kind, n, functools.partial(mlp, 64, 512, 1, n), n) for n in (16, 32, 64, 128, 256, 512)]
    return [point(kind, n, functools.partial(mlp, 64, 512, n, 100), 100) for n in (1, 2, 4, 8, 16, 32, 64, 128)]


SWEEPS = {
    "outputs": "one hidden layer of 512, 64 inputs, batch 1",
    "layers": "hidden layers of 512, 64 inputs, 100 outputs, batch 1",
}


def point(kind: str, size: int, network: Callable[[], nn.Sequential], outputs: int) -> Workload:
    return Workload(f"{kind}={size}", f"tanh MLP, {SWEEPS[kind]}", network, (64,), outputs, both(1), size=size)
