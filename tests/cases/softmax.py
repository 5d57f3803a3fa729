"""Cases: softmax and its relatives."""

from __future__ import annotations

import torch.nn.functional as F

from .table import case

case("log_softmax", lambda x: F.log_softmax(x, -1), (3, 4))
