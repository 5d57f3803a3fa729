"""Cases: activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .table import case, exactly


def hardsigmoid(x: Tensor) -> Tensor:
    """PyTorch cannot differentiate this backward; for the oracle a hook puts one there that it can."""
    y = F.hardsigmoid(x)
    y.grad_fn.register_hook(lambda _, gradients: (torch.where(x.abs() < 3, gradients[0] / 6, 0),))
    return y


PLAIN = {
    "relu": F.relu,
    "relu6": lambda x: F.relu6(4 * x.detach() + x - x.detach()),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.4),
    "softshrink": lambda x: F.softshrink(x, 0.4),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "leaky_relu of a negative slope": lambda x: F.leaky_relu(x, -0.3),
    "rrelu in evaluation": lambda x: F.rrelu(x, 0.1, 0.5),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "elu": F.elu,
    "elu alpha": lambda x: F.elu(x, 0.7),
    "selu": F.selu,
    "celu": F.celu,
    "celu alpha": lambda x: F.celu(x, 0.5),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "softplus beta": lambda x: F.softplus(x, 2.5, 1.0),
}
for name, function in PLAIN.items():
    case(name, function, (3, 4))
for name in ("tanh", "sigmoid", "elu", "gelu", "gelu tanh", "silu", "mish", "softplus", "logsigmoid"):
    case(f"{name} far out", PLAIN[name], exactly([-60.0, -12.0, -4.0, 4.0, 12.0, 60.0]), low_precision=name != "tanh")
for name in ("relu", "leaky_relu", "elu", "elu alpha", "selu", "gelu", "silu", "hardtanh"):
    case(f"{name} at its kinks", PLAIN[name], exactly([-0.5, 0.0, 0.3]))
for name in ("relu", "tanh", "sigmoid", "elu", "gelu", "silu"):
    case(f"{name} of a number", PLAIN[name], ())
    case(f"{name} of nothing", PLAIN[name], (0, 3))
    case(f"{name} of a transpose", lambda x, f=PLAIN[name]: f(x.t()), (3, 4))

WIDE = exactly([[-5.0, -3.0, -2.0, -0.1], [0.0, 1.5, 3.0, 7.0]])
case("hardswish", F.hardswish, WIDE)
case("hardsigmoid", hardsigmoid, WIDE)
case("relu6 inside and outside", F.relu6, WIDE)
case("rrelu in training", lambda x: F.rrelu(x, 0.1, 0.5, training=True), (3, 4), low_precision=False)
case(
    "rrelu functional",
    lambda x: torch.ops.aten.rrelu_with_noise_functional(x, torch.full_like(x, 0.3), 0.1, 0.5, True)[0],
    (3, 4),
)

IN_PLACE = {
    "relu": F.relu_,
    "threshold": lambda x: F.threshold_(x, 0.1, 20.0),
    "leaky_relu": lambda x: F.leaky_relu_(x, 0.3),
    "leaky_relu of no slope": lambda x: F.leaky_relu_(x, 0.0),
    "elu": F.elu_,
    "elu alpha": lambda x: F.elu_(x, 0.7),
    "selu": F.selu_,
    "celu alpha": lambda x: F.celu_(x, 0.5),
    "silu": lambda x: F.silu(x, inplace=True),
    "hardtanh": F.hardtanh_,
    "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_,
}
for name, function in IN_PLACE.items():
    case(f"{name} in place", lambda x, f=function: f(x.clone()), (3, 4))
case("elu in place at its kink", lambda x: F.elu_(x.clone(), 0.7), exactly([-0.5, 0.0, 0.3]))
case("rrelu in place", lambda x: F.rrelu_(x.clone(), 0.1, 0.5, training=True), (3, 4), low_precision=False)
case("rrelu in place, in evaluation", lambda x: F.rrelu_(x.clone(), 0.1, 0.5), (3, 4))

case("prelu", F.prelu, (3, 4), (1,))
case("prelu of channels", F.prelu, (2, 3, 4, 2), (3,))
case("prelu of constant weight", lambda x: F.prelu(x, torch.full((4,), 0.2, dtype=x.dtype)), (3, 4))
case("prelu of constant input", lambda w: F.prelu(torch.linspace(-2, 2, 8, dtype=w.dtype).view(2, 4), w), (4,))
case("prelu by itself", lambda x: torch._prelu_kernel(x, x), (3, 4))

case("glu", F.glu, (3, 6))
case("glu of channels", lambda x: F.glu(x, 1), (2, 4, 3))
case("glu of a negative dim", lambda x: F.glu(x, -2), (2, 4, 3))
case("glu of a transpose", lambda x: F.glu(x.t(), 0), (3, 4))
