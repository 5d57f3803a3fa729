"""Random estimates under DistributedDataParallel (DDP).

Hutchinson's estimate z∘Hz draws z for the parameters. An estimate for the mean loss needs the same z in all processes. Other
estimates draw numbers for each sample. Samples differ between processes, so the processes must draw these numbers independently.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from .replicas import replicated_modules

# the seed of each DDP module, and how often it has been used
_seeds: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
seeds_sent: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the number of broadcasts in a process group


def generator_for(params: Sequence[Tensor], step: int, *, is_shared: bool) -> torch.Generator | None:
    """A generator for one pass over these parameters, or None if no DDP module of several processes holds them.

    Its seed derives from that of the first process's default generator, which is broadcast once.

    Args:
        step: the number of the step. It makes sure that a run that resumes from a checkpoint does not repeat earlier draws.
        is_shared: whether all processes draw the same numbers.
    """
    wanted = {id(p) for p in params}
    for module in replicated_modules():
        if any(id(p) in wanted for p in module._module_parameters):
            if module not in _seeds:
                _seeds[module] = [common_seed(module), 0]
            seed, served = _seeds[module]
            _seeds[module][1] += 1
            rank = -1 if is_shared else distributed.get_rank(module.process_group)
            key = hashlib.sha256(repr((seed, step, served, rank)).encode()).digest()
            return torch.Generator("cpu").manual_seed(int.from_bytes(key[:7], "little"))
    return None


def common_seed(module: Any) -> int:
    device = next(iter(module._module_parameters)).device
    seed = torch.tensor(torch.initial_seed() % 2**62, dtype=torch.int64, device=device)
    distributed.broadcast(seed, distributed.get_global_rank(module.process_group, 0), group=module.process_group)
    seeds_sent[module.process_group] = seeds_sent.get(module.process_group, 0) + 1
    return int(seed)
