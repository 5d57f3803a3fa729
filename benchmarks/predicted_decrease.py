"""Could a trust radius adapt to how well the decrease of the loss is predicted, as in classical trust-region methods?

Agents learn with Scaled AdaHesScale at step size 1 and constant radii. At every update, the gradient and the Hessian diagonal
predict how much the loss decreases. This is compared with the decrease on the same batch, and on the next batch. The table has
ratios of sums over all updates. A classical method enlarges the radius as long as the ratio on the same batch is near 1.

    python benchmarks/predicted_decrease.py --out results/predicted_decrease
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))  # from a checkout that is not installed, too

import torch
from records import header, made_by, save
from torch import Tensor

from hesscale.experiments.lab.markdown import markdown_table
from hesscale.experiments.rl.a2c import A2C
from hesscale.experiments.rl.config import Config
from hesscale.experiments.rl.learner import Algorithm
from hesscale.experiments.rl.ppo import PPO
from hesscale.losses import value_loss

ALGORITHMS: dict[str, type[Algorithm]] = {"a2c": A2C, "ppo": PPO}
PARTS = ("policy", "critic")


class Measurement:
    """Trains one agent, and adds up the decreases of its losses, as (policy, critic).

    Attributes:
        predicted: −Σ (g δ + ½ h δ²) for a step δ, with the gradient g and the Hessian diagonal h before the step.
        on_same: the decrease on the batch of the step.
        on_next: the decrease on the next batch.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.agent, self.optimizer = algorithm, algorithm.agents[0], algorithm.optimizers[0]
        self.predicted, self.on_same, self.on_next = torch.zeros(3, 2, dtype=torch.float64)
        self.weights_before_last_step: list[Tensor] | None = None
        algorithm.update = self.update  # type: ignore[method-assign]

    def train(self, steps: int) -> None:
        while self.algorithm.envs.steps < steps and self.algorithm.envs.active:
            self.algorithm.iterate(is_logged=False)

    def update(self, *batches: Tensor) -> None:
        batch = [tensor[0] for tensor in batches]
        weights = self.weights()
        before = self.losses(batch, weights)
        if self.weights_before_last_step is not None:
            self.on_next += self.losses(batch, self.weights_before_last_step) - before
        self.optimizer.zero_grad()
        self.optimizer.backward(self.algorithm.loss(self.agent, *batch))
        derivatives = [(p.grad, p.hess_diag) for p in self.agent.parameters()]  # type: ignore[attr-defined]
        self.optimizer.step()
        self.on_same += before - self.losses(batch, self.weights())
        for (name, p), old, (g, h) in zip(self.agent.named_parameters(), weights, derivatives, strict=True):
            step = p.detach() - old
            curvature = 0.0 if h is None else float((h * step * step).sum())
            self.predicted[int(name.startswith("critic."))] -= float((g * step).sum()) + 0.5 * curvature
        self.weights_before_last_step = weights

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.agent.parameters()]

    def losses(self, batch: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        """The losses of policy and critic with these weights."""
        observations, returns = batch[0], batch[3]
        agent, parameters, current = self.agent, list(self.agent.parameters()), self.weights()
        with torch.no_grad():
            torch._foreach_copy_(parameters, list(weights))
            critic = value_loss(agent.values(observations), returns, half=self.algorithm.config.half_value_loss)
            policy = self.algorithm.loss(agent, *batch) - critic
            torch._foreach_copy_(parameters, current)
        return torch.stack([policy / (len(agent.networks) - 1), critic]).double()  # each of the policy's networks has this loss


def measured(algo: str, env: str, radius: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The ratios for the policy and for the critic."""
    config = Config(algo, env, "scaled-adahesscale", 1.0, 0, options.steps, trust_radius=radius, backend="eager")
    measurement = Measurement(ALGORITHMS[algo]([config]))
    measurement.train(options.steps)
    same, following = (sums / measurement.predicted for sums in (measurement.on_same, measurement.on_next))
    return [
        {"algo": algo, "env": env, "radius": radius, "part": part, "same": float(same[i]), "next": float(following[i])}
        for i, part in enumerate(PARTS)
    ]


def table(rows: Sequence[dict[str, Any]], radii: Sequence[float]) -> str:
    """A line for each agent and part, with a column for each radius: ratios on the same batch / on the next batch."""
    cells: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        cells.setdefault((row["algo"], row["env"], row["part"]), []).append(f"{row['same']:.2f} / {row['next']:.2f}")
    header = ["algorithm", "environment", "loss of the", *[f"Δ = {radius:g}" for radius in radii]]
    return markdown_table(header, [[algo.upper(), env, part, *found] for (algo, env, part), found in cells.items()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n    ")[0])
    parser.add_argument("--algos", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--envs", nargs="+", default=["HalfCheetah-v5", "InvertedDoublePendulum-v5"])
    parser.add_argument("--radii", nargs="+", type=float, default=[1e-8, 1e-7, 1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=6_144, help="steps in the environment")
    parser.add_argument("--out", type=Path, default=Path("out/predicted_decrease"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for algo in options.algos:
        for env in options.envs:
            for radius in options.radii:
                rows += measured(algo, env, radius, options)
                print(f"{algo}, {env}, Δ = {radius:g}: done", file=sys.stderr)
    found = {**header(Path(__file__).name, arguments), "steps": options.steps, "rows": rows}
    text = (
        f"# Predicted and observed decrease of the loss\n\n{made_by(found)}\n"
        f"One agent of each kind, {options.steps:,} steps. Ratios of sums: the decrease on the same batch / on the next batch,\n"
        f"divided by the predicted decrease.\n\n{table(rows, options.radii)}"
    )
    save(options.out / "predicted_decrease", found, text)


if __name__ == "__main__":
    main()
