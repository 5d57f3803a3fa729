"""The optimizers of all experiments: their names on command lines, labels and colours in figures, classes and options."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam, SophiaG
from ..optim.bounds import NEUTRAL, SAFE_DAMPING
from .colours import COLOURS
from .lab.choices import Choices, choose

CURVATURE_WARMUP = 10  # Hessian diagonals that are averaged before the weights move


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer that experiments can choose.

    Attributes:
        name: on command lines and in records.
        label: in figures and tables.
        build: the class.
        options: the keyword arguments of this variant of the class.
        family: the name of the optimizer of which this is a variant; by default, its own name. A family shares a colour.
        is_scaled: whether it has a trust region. The experiment then has to pass the radius.
        cost_label: the label in tables of costs, where the implementation and the number of draws matter; by default, ``label``.
    """

    name: str
    label: str
    build: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    family: str = ""
    is_scaled: bool = False
    cost_label: str = ""

    def make(self, params: Iterable[Any], lr: float, **options: Any) -> torch.optim.Optimizer:
        return self.build(params, lr=lr, **self.options, **options)

    @property
    def colour(self) -> str:
        return COLOURS[self.family or self.name]

    @property
    def is_variant(self) -> bool:
        return bool(self.family)


class Muon(torch.optim.Optimizer):
    """Torch's Muon for matrices, and AdamW for all other parameters, which Muon does not support, at the same step size.

    Muon's updates are scaled to the length of AdamW's, by an option of torch's Muon.
    """

    def __init__(self, params: Iterable[Any], lr: float, eps: float = 1e-8) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        matrices, others = ([p for p in params if (p.dim() == 2) is wanted] for wanted in (True, False))
        self.parts: list[torch.optim.Optimizer] = []
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(torch.optim.AdamW(others, lr=lr, eps=eps, weight_decay=0.0))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.param_groups[0]["lr"]
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts], "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state_dict["lr"]
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


WARMED_UP = {"curvature_warmup": CURVATURE_WARMUP}
LONGER = {"graft": (1.0, 3.0)}
CAPPED = {**NEUTRAL, "damping": SAFE_DAMPING, "graft": (0.0, 3.0)}
CLIPPED = {**NEUTRAL, "damping": SAFE_DAMPING, "update_clip": 1.0}
OPTIMIZERS = Choices(
    [
        OptimizerSpec("sgd", "SGD", torch.optim.SGD, cost_label="SGD (torch)"),
        OptimizerSpec("adam", "Adam", torch.optim.Adam, cost_label="Adam (torch)"),
        OptimizerSpec("our-adam", "Adam (ours)", Adam),
        OptimizerSpec("adahessian", "AdaHessian", AdaHessian, cost_label="AdaHessian, 1 draw"),
        OptimizerSpec("bl89", "BL89", BL89),
        OptimizerSpec("ggnmc", "GGN-MC", GGNMC, {"per_sample": True}),
        OptimizerSpec("ggnmc-batch", "GGN-MC, batch", GGNMC, family="ggnmc", cost_label="GGN-MC, 1 draw"),
        OptimizerSpec("adahesscale", "AdaHesScale", AdaHesScale.paper),
        OptimizerSpec("adahesscale-gn", "AdaHesScaleGN", AdaHesScaleGN.paper),
        OptimizerSpec(
            "adahessian-spatial",
            "AdaHessian, averaged over kernels",
            AdaHessian,
            {"spatial_average": True},
            family="adahessian",
        ),
        OptimizerSpec("adahessian-warm", "AdaHessian, curvature warmed up", AdaHessian, WARMED_UP, family="adahessian"),
        OptimizerSpec("adahesscale-warm", "AdaHesScale, curvature warmed up", AdaHesScale.paper, WARMED_UP, family="adahesscale"),
        OptimizerSpec(
            "adahesscale-gn-warm", "AdaHesScaleGN, curvature warmed up", AdaHesScaleGN.paper, WARMED_UP, family="adahesscale-gn"
        ),
        OptimizerSpec(
            "adahesscale-bf16",
            "AdaHesScale, curvature in bf16",
            AdaHesScale.paper,
            {"curvature_dtype": torch.bfloat16},
            family="adahesscale",
        ),
        OptimizerSpec(
            "adahesscale-gn-bf16",
            "AdaHesScaleGN, curvature in bf16",
            AdaHesScaleGN.paper,
            {"curvature_dtype": torch.bfloat16},
            family="adahesscale-gn",
        ),
        OptimizerSpec(
            "adahesscale-gn-bf16-every10",
            "AdaHesScaleGN, curvature in bf16, every 10th step",
            AdaHesScaleGN.paper,
            {"curvature_dtype": torch.bfloat16, "curvature_every": 10},
            family="adahesscale-gn",
        ),
        OptimizerSpec(
            "adahesscale-every10",
            "AdaHesScale, curvature every 10th step",
            AdaHesScale.paper,
            {"curvature_every": 10},
            family="adahesscale",
        ),
        OptimizerSpec("sgd-momentum", "SGD, momentum 0.9", torch.optim.SGD, {"momentum": 0.9}, family="sgd"),
        OptimizerSpec("adamw", "AdamW", torch.optim.AdamW),
        OptimizerSpec("muon", "Muon", Muon),
        OptimizerSpec("sophia-g", "Sophia-G", SophiaG),
        *(
            OptimizerSpec(f"{family}-{name}", f"{label}, {what}", build, options, family=family)
            for family, label, build in (
                ("adahesscale", "AdaHesScale", AdaHesScale),
                ("adahesscale-gn", "AdaHesScaleGN", AdaHesScaleGN),
            )
            for name, what, options in (
                ("default", "grafted (default)", {}),
                ("long", "1 to 3 times Adam's length", LONGER),
                ("cap", "at most 3 times Adam's length", CAPPED),
                ("clip", "entries clipped at 1", CLIPPED),
            )
        ),
        OptimizerSpec(
            "adahesscale-gn-calibrated",
            "AdaHesScaleGN, 1 to 3 times Adam's length, calibrated every 10th step",
            AdaHesScaleGN,
            {**LONGER, "calibrate_every": 10},
            family="adahesscale-gn",
        ),
        OptimizerSpec("scaled-adam", "Scaled Adam", Adam, family="adam", is_scaled=True),
        OptimizerSpec("scaled-adahesscale", "Scaled AdaHesScale", AdaHesScale.paper, family="adahesscale", is_scaled=True),
        OptimizerSpec(
            "scaled-adahesscale-gn", "Scaled AdaHesScaleGN", AdaHesScaleGN.paper, family="adahesscale-gn", is_scaled=True
        ),
    ]
)


def untrained(params: Iterable[Any], lr: float, **options: Any) -> Adam:
    """An optimizer that never changes the weights, as a baseline for scores."""
    return Adam(params, lr=0.0, **options)


def tuning_free(name: str) -> Callable[..., Any]:
    """A function that creates an optimizer of another package from parameters and step size, and ignores all other options."""

    def build(params: Iterable[Any], lr: float, **_: Any) -> Any:
        from .rl.tuning_free import TuningFree

        return TuningFree(name, params, lr)

    return build


UNTRAINED = "untrained"
# Agents need to skip non-finite steps, and may have a trust region. Only our Adam supports this.
AGENT_OPTIMIZERS = Choices(
    [
        replace(OPTIMIZERS["our-adam"], name="adam", label="Adam"),
        *(OPTIMIZERS[name] for name in ("adahessian", "adahesscale", "adahesscale-gn", "scaled-adam", "scaled-adahesscale")),
        *(OPTIMIZERS[name] for name in ("adahesscale-default", "adahesscale-gn-default", "adahesscale-long")),
        OptimizerSpec("prodigy", "Prodigy", tuning_free("prodigy")),
        OptimizerSpec("dog", "DoG", tuning_free("dog")),
        OptimizerSpec("schedule-free", "schedule-free AdamW", tuning_free("schedule-free")),
        OptimizerSpec(UNTRAINED, "untrained", untrained),
    ]
)
IMAGE_OPTIMIZERS = Choices(
    [spec for name, spec in OPTIMIZERS.items() if name not in ("our-adam", "adahesscale-gn-bf16", "adahesscale-gn-bf16-every10")],
    aliases={
        "adahesscale-10th": "adahesscale-every10",
        "adahesscale-graft": "adahesscale-default",
        "adahesscale-gn-graft": "adahesscale-gn-default",
    },
)

HELP = "optimizers, separated by commas; name@0.01 sets the step size of one optimizer"


def with_step_sizes(optimizers: str, step_sizes: str, known: Mapping[str, object]) -> list[tuple[str, float]]:
    """Optimizers with each of their step sizes, from text: ``adam,adahesscale@1e-4`` and ``1e-4,3e-4``.

    An optimizer with a step size after @ has only that one. Other optimizers have all of ``step_sizes``.
    """
    found: dict[tuple[str, float], None] = {}
    for text in filter(str.strip, optimizers.split(",")):
        name, at, own = text.strip().partition("@")
        if not name or (at and not own):
            raise ValueError(f"optimizer: {text.strip()!r} must be a name, or name@step_size")
        choose(name, known, "optimizer")
        for size in [positive(own, "step_size")] if own else positives(step_sizes, "step_size"):
            found[name, size] = None
    if not found:
        raise ValueError("optimizer names no optimizer")
    return list(found)


def positives(text: str, setting: str) -> list[float]:
    """The numbers in a comma-separated list, each once."""
    return list(dict.fromkeys(positive(part, setting) for part in text.split(",")))


def positive(text: str, setting: str) -> float:
    what = setting.replace("_", " ")
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{setting}: a {what} must be a number, not {text!r}; separate several by commas") from None
    if not 0 < number < math.inf:
        raise ValueError(f"{setting}: a {what} must be positive, not {text}")
    return number
