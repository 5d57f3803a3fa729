"""Diagonal dominance of Hessians at pre-activations: Figure 3, Table 1 and Appendix E.

ρ(A) = ‖diag A‖_F / ‖A‖_F of ∇²_{a_l} L in each hidden layer of an MLP, before and after training. Where the paper's text is
silent, the values are those of its authors' code: nn.Linear's initialization, Adam with step size 1e-4, pixels in [−1, 1], and
the Hessian of the loss of one training example. The activation is tanh, not their ReLU: with tanh the values are close to the
published ones, and with ReLU they are not.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..lab.data import load, names
from ..lab.experiment import Experiment, Watched, option
from ..lab.plots import Heat, Plot, Section, Series, Table
from ..lab.store import Result, Run

LAYERS, WIDTH = 4, 128
BLOCK = 5  # networks trained together: the fastest on one core, where the weights of more leave its cache
CHECKPOINT_SECONDS = 5.0
RANDOM_MATRICES = 100
PUBLISHED = {"before": (0.94, 0.91, 0.89, 0.91), "after": (0.75, 0.54, 0.81, 0.98)}
OF_PAPER = "The paper's values are of 300 networks on EMNIST."
COLOURS = {"before": "#1f77b4", "after": "#d62728"}
AVERAGED = {"before": "#17becf", "after": "#ff7f0e"}  # colours of values that are averaged over networks first

# f, and f' and f'' from h = f(a)
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], tuple[Tensor, Tensor]]]] = {
    "tanh": (torch.tanh, lambda h: (1 - h * h, -2 * h * (1 - h * h))),
    "relu": (torch.relu, lambda h: ((h > 0).to(h.dtype), torch.zeros_like(h))),
}


@dataclass(frozen=True)
class Settings:
    dataset: str = option("digits", f"{', '.join(names()[:-1])} or {names()[-1]}; the paper has emnist")
    seeds: int = option(10, "number of networks")
    iterations: int = option(1000, "training steps of each network")
    batch: int = option(32, "examples in a step")
    step_size: float = option(1e-4, "Adam's step size")
    activation: str = option("tanh", f"activation function: {' or '.join(ACTIVATIONS)}")
    samples: int = option(
        1, "training examples at which each network's Hessians are computed, the same before and after training"
    )
    seed: int = option(0, "seed of all random numbers")


@dataclass(frozen=True)
class Task:
    """A block of ``count`` networks, from number ``first`` on. Each is the same in any block, up to rounding."""

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
    for name, least in {"seeds": 1, "iterations": 1, "batch": 1, "samples": 1, "seed": 0}.items():
        if shared[name] < least:
            raise ValueError(f"{name} is {shared[name]}; it must be at least {least}")
    if not 0 < settings.step_size < math.inf:
        raise ValueError(f"step_size is {settings.step_size}; it must be positive and finite")
    for name, known in {"activation": [*ACTIVATIONS], "dataset": names()}.items():
        if shared[name] not in known:
            raise ValueError(f"{name} is {shared[name]!r}; it must be one of {', '.join(known)}")
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
    """diag q − q qᵀ. Its rows sum to zero, which gives the diagonal without cancellation where a class is almost certain."""
    q = logits.softmax(2)
    H = -q.transpose(1, 2) * q
    H.diagonal(dim1=1, dim2=2).zero_()
    return H - torch.diag_embed(H.sum(2))


def rho(A: Tensor) -> Tensor:
    """ρ of each matrix: 1 if it is diagonal, 0 if its diagonal is zero, nan if the whole matrix is zero."""
    found: Tensor = A.diagonal(dim1=-2, dim2=-1).norm(dim=-1) / torch.linalg.matrix_norm(A)
    return found


def random_numbers(task: Task, network: int, epoch: int) -> np.random.Generator:
    """The random numbers of one network: epoch 0 is for its initialization, later epochs are for the order of its examples."""
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
    """Means over samples of ρ, (network, layer), and of |∇²_{a_l} L|, over networks too, (layer, unit, unit)."""
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
    """Train all networks with Adam, from the last checkpoint on. Each epoch has its own order, and only full batches."""
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


def sections(results: list[Result]) -> list[Section]:
    groups: dict[Task, dict[int, Result]] = {}
    for result in sorted(results, key=lambda result: (result.task.first, result.task.count)):
        group = replace(result.task, first=0, count=0)
        groups.setdefault(group, {})[result.task.first] = result  # of two blocks with the same first network, the larger
    apart = [field.name for field in fields(Task) if len({getattr(task, field.name) for task in groups}) > 1]
    found = []
    for task, blocks in groups.items():
        name = "-".join([task.dataset, *[f"{name}-{getattr(task, name)}" for name in apart if name != "dataset"]])
        found.append(section(name.replace(".", "_"), task, [*blocks.values()]))
    return [*found, appendix_e()]


def section(name: str, task: Task, blocks: list[Result]) -> Section:
    n, title = sum(block.task.count for block in blocks), f"{blocks[0].values['title']}, {task.activation}"
    setting = (
        f"{title}: {n} networks, {task.iterations:,} Adam steps of {task.batch} examples with step size "
        f"{task.step_size:g}; Hessians of {task.samples} training example{'s' * (task.samples > 1)} for each network"
    )
    ratios, magnitudes, accuracies = {}, {}, []
    for when in PUBLISHED:
        ratios[when] = torch.cat([block.values[f"rho_{when}"] for block in blocks])
        magnitudes[when] = torch.stack(
            [block.values[f"magnitude_{when}"].double() * block.task.count / n for block in blocks]
        ).sum(0)
        accuracies.append(f"{torch.cat([block.values[f'accuracy_{when}'] for block in blocks]).mean():.3f} {when} training")
    text = (
        "The paper finds the Hessians of the loss at pre-activations diagonally dominant, before and after training, and "
        "explains by it why little is lost when only their diagonals are propagated. ρ is the norm of a matrix's diagonal over "
        f"that of the matrix.\n\n{setting}. Mean test accuracy: {', '.join(accuracies)}.\n\n"
        "ρ is averaged over networks. The authors' code averages |H| over networks and takes ρ of that, which is what to compare "
        "with the paper's values."
    )
    zero = sum(int(ratio.isnan().sum()) for ratio in ratios.values())
    if zero:
        text += (
            f"\n\n{zero} times all Hessians of a layer were zero, for want of an active unit, and are left out of the means of ρ."
        )
    items: list[Plot | Heat | Table] = [
        table(name, title, setting, ratios, magnitudes),
        plot(name, title, setting, ratios, magnitudes),
    ]
    for when, matrices in magnitudes.items():
        panels: list[tuple[str, Sequence[Sequence[float]]]] = [(f"layer {l + 1}", H.tolist()) for l, H in enumerate(matrices)]
        items.append(Heat(f"{name}-{when}", f"Mean |∇²L| at pre-activations {when} training, {title}", panels, caption=setting))
    return Section(f"Diagonal dominance, {title}", text, items)


def table(name: str, title: str, setting: str, ratios: dict[str, Tensor], magnitudes: dict[str, Tensor]) -> Table:
    header = ["layer", *[column for when in PUBLISHED for column in (f"ρ {when}", f"ρ of mean |H| {when}", "paper")]]
    rows: list[Sequence[str]] = []
    for l in range(LAYERS):
        row = [str(l + 1)]
        for when, published in PUBLISHED.items():
            mean, error = mean_and_error(ratios[when][:, l])
            row += [spread(mean, error), f"{rho(magnitudes[when])[l]:.3f}", f"{published[l]:.2f}"]
        rows.append(row)
    mean, error = mean_and_error(rho(gaussian(RANDOM_MATRICES, WIDTH, WIDTH)))
    rows.append([f"random Gaussian {WIDTH} × {WIDTH}", spread(mean, error), "", "0.09", "", "", ""])
    caption = f"{setting}. ± is the standard error. {OF_PAPER}"
    return Table(f"{name}-table", f"Diagonal dominance before and after training, {title}", header, rows, caption)


def plot(name: str, title: str, setting: str, ratios: dict[str, Tensor], magnitudes: dict[str, Tensor]) -> Plot:
    layers, series = [float(l) for l in range(LAYERS)], []
    for when, published in PUBLISHED.items():
        x, y, colour = layers * len(ratios[when]), ratios[when].flatten().tolist(), COLOURS[when]
        means, errors = zip(*[mean_and_error(ratio) for ratio in ratios[when].T], strict=True)
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        series.append(Series(f"{when}, each network", x, y, kind="dots", colour=colour))
        series.append(Series(f"{when}, mean", layers, means, low, high, colour=colour))
        series.append(Series(f"{when}, of mean |H|", layers, rho(magnitudes[when]).tolist(), colour=AVERAGED[when]))
        series.append(Series(f"{when}, of mean |H|, paper", layers, published, colour=AVERAGED[when], dashed=True))
    random = float(rho(gaussian(RANDOM_MATRICES, WIDTH, WIDTH)).mean())
    series.append(Series("random Gaussian matrix", layers, [random] * LAYERS, colour="#7f7f7f", dashed=True))
    title, caption = f"Diagonal dominance at pre-activations, {title}", f"{setting}. Bands are standard errors. {OF_PAPER}"
    numbers = [str(l + 1) for l in range(LAYERS)]
    return Plot(f"{name}-layers", title, series, "hidden layer", "ρ", categories=numbers, caption=caption)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean and its standard error."""
    values = values[~values.isnan()]
    return float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def spread(mean: float, error: float) -> str:
    return f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}"


def gaussian(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape))


def off_diagonal_gradient(W: Tensor, h: Tensor) -> Tensor:
    """∇_W J, with J = ‖A − A ∘ I‖²_F, A = Wᵀ H W and H = diag h held fixed: 4 Σ_{n≠j} A_{jn} W_{in} H_{ii} at (i, j)."""
    A = W.mT @ (h.unsqueeze(1) * W)
    return 4 * h.unsqueeze(1) * (W @ (A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))))


def appendix_e() -> Section:
    """The two cases in which ∇J is zero, the second on average, and one in which it is not."""
    W, h, alpha = gaussian(RANDOM_MATRICES, WIDTH, WIDTH), gaussian(WIDTH).abs(), 0.5 * torch.ones_like(gaussian(WIDTH))
    rows: list[Sequence[str]] = []
    for case, weights, hessian in (
        ("W diagonal, H diagonal", torch.diag_embed(W.diagonal(dim1=1, dim2=2)), h),
        ("W Gaussian, H = αI", W, alpha),
        ("for contrast: W Gaussian without its signs, H = αI", W.abs(), alpha),
    ):
        gradients = off_diagonal_gradient(weights, hessian)
        one, mean = (float(g.square().mean().sqrt()) for g in (gradients, gradients.mean(0)))
        ratio = rho(weights.mT @ (hessian.unsqueeze(1) * weights)).mean()
        rows.append([case, f"{ratio:.3f}", f"{one:.3g}", f"{mean:.3g}", f"{one / math.sqrt(len(weights)):.3g}"])
    text = (
        "J is the sum of the squares off the diagonal of WᵀHW, where H is diagonal and held fixed. The paper names two cases "
        "in which ∇J, its gradient in W, is zero: W diagonal; and, on average, H = αI with W Gaussian. The second does not make "
        f"WᵀHW diagonal: with a square W, ρ is near √((n + 2) / (2n + 1)), here {math.sqrt((WIDTH + 2) / (2 * WIDTH + 1)):.3f}. "
        "Nor does it need H = αI: ∇J is odd in W, so that any law of W that is symmetric about zero does."
    )
    header = ["case", "ρ(WᵀHW)", "∇J", f"mean ∇J of {RANDOM_MATRICES} W", "that of independent ∇J with mean zero"]
    caption = (
        f"{WIDTH} × {WIDTH} matrices; W has standard normal entries, α = 0.5. Sizes of ∇J are root mean squares of its elements."
    )
    found = Table("appendix-e", "Weights for which ∇J is zero", header, rows, caption)
    return Section("Weights that keep Hessians diagonal (Appendix E)", text, [found])


EXPERIMENT = Experiment(
    name="dominance",
    title="Diagonal dominance of Hessians at pre-activations, before and after training (Fig. 3, Table 1, Appendix E).",
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
