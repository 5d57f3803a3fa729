"""Small networks run fastest on one thread."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
