"""Cases: products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .table import case

case("addmm", lambda b, x, w: torch.addmm(b, x, w, alpha=2, beta=3), (5,), (3, 4), (4, 5))
case("linear", F.linear, (3, 4), (5, 4), (5,))
