"""Compare the step of an ensemble with the same number of single compiled steps, one after another."""

from __future__ import annotations

from typing import Any

import torch

import hesscale.func

from .measure import Case, digits, interleave, quartiles, timed
from .methods import COMPILED, METHODS, Step, loss_by
from .workloads import WORKLOADS

MEMBERS = 32
METHOD, WORKLOAD = METHODS["adahesscale"], WORKLOADS["mlp-64"]
WARM_UP = 4


def ensemble_row(device: torch.device, *, rounds: int, block: float) -> dict[str, Any]:
    """``ratio``: member-steps per second of an ensemble, divided by those of single runs; median and quartiles over rounds.

    The single runs are the same number of steps of one network. Its weights may stay in the cache, which favours the single runs.
    """
    together = Together(device)
    alone = Step(METHOD, COMPILED, WORKLOAD.model(device), WORKLOAD.loss(), WORKLOAD.data(device))
    for step in (together, alone):
        for _ in range(WARM_UP):
            step.run()
    calls = max(1, round(block / timed(together.run, 1, device)))
    times, errors = interleave([Case(together, calls), Case(alone, calls * MEMBERS)], rounds, device)
    if errors:
        return {"members": MEMBERS, "error": "; ".join(errors.values())}
    return {
        "members": MEMBERS,
        "method": METHOD.name,
        "ratio": quartiles(MEMBERS * one / whole for whole, one in zip(times[0], times[1], strict=True)),
        "ran_as": " and ".join(sorted({together.ran_as, alone.ran_as})),
        "ensemble_ms": [digits(value) for value in times[0]],
        "single_ms": [digits(value) for value in times[1]],
    }


class Together:
    """One step of all members, each with its own seed, batch and step size."""

    def __init__(self, device: torch.device) -> None:
        models = [WORKLOAD.model(device, seed) for seed in range(MEMBERS)]
        optimizers = [METHOD.optimizer(model.parameters()) for model in models]
        for k, optimizer in enumerate(optimizers):
            optimizer.param_groups[0]["lr"] *= 1 + k / MEMBERS
        batches = zip(*(WORKLOAD.data(device, seed) for seed in range(MEMBERS)), strict=True)
        self.batch = [torch.stack(column) for column in batches]
        self.step = hesscale.func.ensemble(models, loss_by(WORKLOAD.loss()), optimizers, cuda_graph=False)

    def run(self) -> None:
        self.step(*self.batch)

    def rest(self) -> None:
        """Do nothing, since a compiled step holds no gradients."""

    @property
    def ran_as(self) -> str:
        return str(self.step.mode)
