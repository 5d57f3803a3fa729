"""Diagonal dominance of Hessians at pre-activations: Figure 3, Table 1 and Appendix E.

ρ(A) = ‖diag A‖_F / ‖A‖_F of ∇²_{a_l} L in each hidden layer of an MLP, before and after training. Settings that the paper does
not mention are those of the authors' code: nn.Linear's initialization, Adam with step size 1e-4, pixels in [−1, 1], and the
Hessian of the loss of one training example. An exception is the activation: it is tanh, with which the values are close to the
published ones. With the ReLU of the authors' code, they are not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..lab.choices import check_least, check_numbers
from ..lab.data import load, names
from ..lab.experiment import Experiment, Watched, option
from ..lab.store import Run
from ._dominance_figures import LAYERS, WIDTH, rho, sections

BLOCK = 5  # networks trained together; the weights of more networks do not fit into the cache of one core
CHECKPOINT_SECONDS = 5.0

# f, and f' and f'' from h = f(a)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "tanh": (torch.tanh, lambda h: (1 - h * h, -2 * h * (1 - h * h))),
    "relu": (torch.relu, lambda h: ((h > 0).to(h.dtype), torch.zeros_like(h))),
}


@dataclass(frozen=True)
class Settings:
    dataset: str = option("digits", f"data set: {', '.join(names()[:-1])} or {names()[-1]}; the paper uses emnist")
    seeds: int = option(10, "number of networks")
    iterations: int = option(1000, "number of training steps of each network")
    batch: int = option(32, "number of examples in a batch")
    step_size: float = option(1e-4, "Adam's step size")
    activation: str = option("tanh", f"activation function: {' or '.join(ACTIVATIONS)}")
    samples: int = option(1, "number of training examples whose Hessians are computed, before and after training")
    seed: int = option(0, "seed of all random numbers")


@dataclass(frozen=True)
class Task:
    """A block of ``count`` networks, starting with number ``first``. A network is the same in any block, up to rounding."""

    dataset: str
    first: int
    count: int
    iterations: int
    batch: int
    step_size: float
    activation: str
    samples: int
    seed: int


def tasks(settings: Settings) -> list[Task]:
    shared = asdict(settings)
    check_least(settings, {"seeds": 1, "iterations": 1, "batch": 1, "samples": 1, "seed": 0})
    check_numbers(settings, positive=["step_size"])
    for name, known in {"activation": [*ACTIVATIONS], "dataset": names()}.items():
        if shared[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {shared[name]!r}")
    seeds = shared.pop("seeds")
    return [Task(first=first, count=min(BLOCK, seeds - first), **shared) for first in range(0, seeds, BLOCK)]


def work(settings: Settings) -> str:
    training = f"{settings.iterations:,} steps of {settings.batch} examples of {settings.dataset}"
    return f"{settings.seeds:,} networks of {LAYERS} {settings.activation} layers, each trained for {training}"


@dataclass
class Networks:
    """MLPs with stacked weights (network, out, in) and biases (network, 1, out)."""

    weights: list[Tensor]
    biases: list[Tensor]
    activation: str

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.weights, *self.biases]

    def double(self) -> Networks:
        return Networks([W.double() for W in self.weights], [b.double() for b in self.biases], self.activation)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The inputs of every layer, (network, example, in), and the logits."""
        f, _ = ACTIVATIONS[self.activation]
        h = [x]
        for W, b in zip(self.weights, self.biases, strict=True):
            a = torch.baddbmm(b, h[-1], W.transpose(1, 2))
            h.append(f(a) if len(h) < len(self.weights) else a)
        return h

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Set ``.grad`` to the gradients of each network's mean cross-entropy. Returns the logits."""
        _, derivatives = ACTIVATIONS[self.activation]
        *h, logits = self.forward(x)
        g = softmax_gradient(logits, y) / y.shape[1]
        for l in reversed(range(len(h))):
            self.weights[l].grad, self.biases[l].grad = torch.bmm(g.transpose(1, 2), h[l]), g.sum(1, keepdim=True)
            if l:
                g = torch.bmm(g, self.weights[l]) * derivatives(h[l])[0]
        return logits

    def hessians(self, x: Tensor, y: Tensor) -> Iterator[Tensor]:
        """∇²_{a_l} L for one example of each network, (network, unit, unit), from the last hidden layer to the first.

        ∇²_{a_{l−1}} L = D Wᵀ ∇²_{a_l} L W D + diag(f'' ∘ Wᵀ g), with D = diag f'.
        """
        _, derivatives = ACTIVATIONS[self.activation]
        *h, logits = self.forward(x.unsqueeze(1))
        g, H = softmax_gradient(logits, y.unsqueeze(1)), softmax_hessian(logits)
        for l in reversed(range(1, len(h))):
            W, (d1, d2) = self.weights[l], derivatives(h[l])
            g = torch.bmm(g, W)
            H = d1.transpose(1, 2) * (W.transpose(1, 2) @ H @ W) * d1 + torch.diag_embed((d2 * g).squeeze(1))
            g = g * d1
            yield H


def softmax_gradient(logits: Tensor, y: Tensor) -> Tensor:
    """q − onehot(y)."""
    q = logits.softmax(2)
    return q.scatter_add(2, y.unsqueeze(2), -torch.ones_like(q[:, :, :1]))


def softmax_hessian(logits: Tensor) -> Tensor:
    """diag q − q qᵀ. The diagonal is computed from the rows, which sum to zero, to avoid cancellation for q close to 1."""
    q = logits.softmax(2)
    H = -q.transpose(1, 2) * q
    H.diagonal(dim1=1, dim2=2).zero_()
    return H - torch.diag_embed(H.sum(2))


def random_numbers(task: Task, network: int, epoch: int) -> np.random.Generator:
    """The random numbers of one network: for its initialization in epoch 0, and for the order of examples in later epochs."""
    return np.random.default_rng([task.seed, task.first + network, epoch])


def new_networks(task: Task, inputs: int, outputs: int, examples: int) -> tuple[Networks, Tensor]:
    """Networks initialized as in nn.Linear, and the examples for the Hessians of each, (network, sample)."""
    pairs = [*itertools.pairwise([inputs, *[WIDTH] * LAYERS, outputs])]
    weights = [torch.empty(task.count, m, n, dtype=torch.float32, device="cpu") for n, m in pairs]
    biases = [torch.empty(task.count, 1, m, dtype=torch.float32, device="cpu") for _, m in pairs]
    chosen = []
    for k in range(task.count):
        random = random_numbers(task, k, 0)
        for p, (n, _) in zip([*weights, *biases], [*pairs, *pairs], strict=True):
            p[k] = torch.from_numpy(random.uniform(-1, 1, p.shape[1:])) / math.sqrt(n)
        chosen.append(torch.from_numpy(random.choice(examples, task.samples, replace=False)))
    return Networks(weights, biases, task.activation), torch.stack(chosen)


def epoch_order(task: Task, epoch: int, examples: int) -> Tensor:
    """The order in which each network sees the examples, (network, example)."""
    return torch.from_numpy(np.stack([random_numbers(task, k, epoch).permutation(examples) for k in range(task.count)]))


def curvature(networks: Networks, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of ρ over samples, (network, layer), and of |∇²_{a_l} L| over samples and networks, (layer, unit, unit)."""
    networks, samples = networks.double(), y.shape[1]
    ratios, magnitudes = [], torch.zeros(LAYERS, WIDTH, WIDTH, dtype=torch.float64, device="cpu")
    for s in range(samples):
        H = torch.stack([*networks.hessians(x[:, s].double(), y[:, s])][::-1], 1)
        if not H.isfinite().all():
            raise ArithmeticError("a Hessian is not finite: training diverged; take a smaller step_size")
        ratios.append(rho(H))
        magnitudes += H.abs().mean(0) / samples
    return torch.stack(ratios).nanmean(0), magnitudes.float()


def run(task: Task, run: Run, data: Path | None) -> dict[str, Any]:
    found = load(task.dataset, data)
    images, labels = found.train_images.flatten(1), found.train_labels
    if max(task.batch, task.samples) > len(labels):
        raise ValueError(
            f"{task.dataset} has {len(labels)} training examples: batch {task.batch} or samples {task.samples} is too large"
        )
    networks, chosen = new_networks(task, images.shape[1], found.classes, len(labels))
    values: dict[str, Any] = {"title": found.title}

    def inputs(bytes: Tensor) -> Tensor:
        return bytes.float().mul_(2 / found.scale).sub_(1)

    def measure(when: str) -> None:
        values[f"rho_{when}"], values[f"magnitude_{when}"] = curvature(networks, inputs(images[chosen]), labels[chosen])
        parts = [inputs(part).expand(task.count, -1, -1) for part in found.test_images.flatten(1).split(1000)]
        logits = torch.cat([networks.forward(part)[-1] for part in parts], 1)
        values[f"accuracy_{when}"] = (logits.argmax(2) == found.test_labels).float().mean(1)

    measure("before")
    train(task, run, networks, lambda batch: (inputs(images[batch]), labels[batch]), len(labels))
    measure("after")
    return values


def train(task: Task, run: Run, networks: Networks, batch_of: Callable[[Tensor], tuple[Tensor, Tensor]], examples: int) -> None:
    """Train all networks with Adam, from the last checkpoint. Each epoch has a new order, and only full batches."""
    adam = torch.optim.Adam(networks.parameters, lr=task.step_size, fused=True)
    begin = 0
    if run.state is not None:
        begin = run.state["step"]
        adam.load_state_dict(run.state["adam"])
        for p, saved in zip(networks.parameters, run.state["parameters"], strict=True):
            p.copy_(saved)
    steps_in_epoch, order, saved_at = examples // task.batch, None, time.monotonic()
    for step in range(begin, task.iterations):
        epoch, i = divmod(step, steps_in_epoch)
        if order is None or i == 0:
            order = epoch_order(task, epoch + 1, examples)
        x, y = batch_of(order[:, i * task.batch : (i + 1) * task.batch])
        logits = networks.backward(x, y)
        adam.step()
        if step % max(1, task.iterations // 100) == 0:
            loss, right = cross_entropy(logits.flatten(0, 1), y.flatten()), logits.argmax(2) == y
            run.log(step, loss=float(loss), accuracy=float(right.float().mean()))
        run.progress(step + 1, task.iterations)
        if time.monotonic() - saved_at > CHECKPOINT_SECONDS:
            run.checkpoint({"step": step + 1, "parameters": networks.parameters, "adam": adam.state_dict()})
            saved_at = time.monotonic()


EXPERIMENT = Experiment(
    name="dominance",
    title="The diagonal dominance of Hessians at pre-activations, before and after training (Fig. 3, Table 1, Appendix E).",
    settings=Settings,
    presets={
        "smoke": Settings(seeds=2, iterations=50),
        "small": Settings(),
        "paper": Settings(dataset="emnist", seeds=300, iterations=10_000),
    },
    task=Task,
    tasks=tasks,
    work=work,
    run=run,
    sections=sections,
    amount=lambda task: task.iterations * task.count,
    watched=Watched("loss", "loss"),
    examples=("--seeds 20 --iterations 2000", "--preset paper --data DATA"),
)
