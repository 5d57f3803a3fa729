"""Cases: softmax and its relatives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .table import case, exactly

MASKED = exactly([[1.0, -math.inf, 2.0], [-math.inf, 0.5, -0.3]])

case("softmax", lambda x: F.softmax(x, -1), (3, 4))
case("softmax dim", lambda x: F.softmax(x, 1), (3, 4, 2))
case("softmax scalar", lambda x: F.softmax(x, 0), ())
case("softmax masked", lambda x: F.softmax(x, -1), MASKED)
case("softmax not contiguous", lambda x: F.softmax(x.t(), -1), (3, 4))
case("softmin", lambda x: F.softmin(x, -2), (3, 4, 2))
case("safe_softmax", lambda x: torch._safe_softmax(x, -1), (3, 4))
case("safe_softmax masked", lambda x: torch._safe_softmax(x, -1), exactly([[1.0, -math.inf, 2.0], [-math.inf] * 3]))
case("log_softmax", lambda x: F.log_softmax(x, -1), (3, 4))
case("log_softmax dim", lambda x: F.log_softmax(x, 1), (3, 4, 2))
case("log_softmax scalar", lambda x: F.log_softmax(x, 0), ())
case("log_softmax far apart", lambda x: F.log_softmax(x, 0), exactly([300.0, -400.0, 299.0]))
