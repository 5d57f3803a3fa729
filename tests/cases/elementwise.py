"""Cases: elementwise operators."""

from __future__ import annotations

import torch

from .table import between, case

case("tanh", torch.tanh, (3, 4))
case("mul", torch.mul, (3, 4), (3, 4))
case("mul broadcast", torch.mul, (3, 1, 4), (2, 1))
case("mul same", lambda x: x * x, (3, 4))
case("add alpha", lambda x, y: torch.add(x, y, alpha=3), (3, 4), (4,))
case("add same", lambda x: torch.add(x, x, alpha=3), (3, 4))
case("pow", lambda x: x**3, (3, 4))
case("erfinv", torch.erfinv, between(-0.9, 0.9, 3, 4))
