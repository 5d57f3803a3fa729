"""Compare the speed of an eager loop, a compiled training step, and an ensemble of networks with different step sizes.

    python examples/compiled_training.py --steps 300

It takes a minute to compile everything. Then it prints the time of a step (for the ensemble: per member), and the loss of each
member. ``--backend traced`` needs no compiler.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

STEP_SIZES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16)
    return x, x.unflatten(1, (4, 4)).square().sum(2).argmax(1)


def optimizer(model: nn.Module, lr: float) -> hesscale.AdaHesScale:
    return hesscale.AdaHesScale(model.parameters(), lr=lr, eps=1e-4)


def train(step: Callable[..., Tensor], steps: int, warm_up: int = 3) -> tuple[float, Tensor]:
    """Seconds per step, and the last loss."""
    for _ in range(warm_up):
        loss = step(*batch())
    start = time.perf_counter()
    for _ in range(steps):
        loss = step(*batch())
    return (time.perf_counter() - start) / max(1, steps), loss


def main(steps: int, backend: str) -> None:
    torch.set_num_threads(1)
    model = network()
    single = optimizer(model, 3e-3)

    def eager(x: Tensor, y: Tensor) -> Tensor:
        single.zero_grad()
        loss = loss_fn(model, x, y)
        single.backward(loss)
        single.step()
        return loss.detach()

    seconds, _ = train(eager, steps)
    print(f"eager     {seconds * 1e6:8.0f} µs")

    model = network()
    step = hesscale.compile_step(model, loss_fn, optimizer(model, 3e-3), backend=backend)
    seconds, _ = train(step, steps)
    print(f"{step.mode:9s} {seconds * 1e6:8.0f} µs")

    models = [network() for _ in STEP_SIZES]
    optimizers = [optimizer(model, lr) for model, lr in zip(models, STEP_SIZES, strict=True)]
    together = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None, backend=backend)
    seconds, losses = train(together, steps)
    print(f"ensemble  {seconds / len(models) * 1e6:8.0f} µs per member")
    for lr, loss in zip(STEP_SIZES, losses.tolist(), strict=True):
        print(f"  step size {lr:g}: loss {loss:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "traced", "eager"))
    options = parser.parse_args()
    main(options.steps, options.backend)
