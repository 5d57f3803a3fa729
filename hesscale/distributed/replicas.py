"""The DistributedDataParallel (DDP) modules of this process.

An autograd graph does not show that DDP averages the gradients of its leaves. So every DDP module is registered when it is
created. The order of creation is the same in all processes.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, distributed, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

_known: list[weakref.ref[DistributedDataParallel]] = []


def note(module: DistributedDataParallel) -> None:
    if not any(reference() is module for reference in _known):
        _known.append(weakref.ref(module, _known.remove))


def note_wrapper(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """PyTorch calls this whenever a submodule is registered. In a DDP module, that is the model that it wraps."""
    if name == "module" and isinstance(module, DistributedDataParallel):
        note(module)


def note_earlier_modules() -> None:
    """Register DDP modules that were created before hesscale was imported. Without a process group there are none."""
    if distributed.is_available() and distributed.is_initialized():
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                note(thing)


def note_copies() -> None:
    """Register DDP modules that are copied or unpickled, too: PyTorch does not register a submodule then."""
    restore: Any = DistributedDataParallel.__setstate__

    @functools.wraps(restore)
    def restore_and_note(module: DistributedDataParallel, state: Any) -> None:
        restore(module, state)
        note(module)

    DistributedDataParallel.__setstate__ = restore_and_note  # type: ignore[method-assign]


register_module_module_registration_hook(note_wrapper)
note_earlier_modules()
note_copies()


def replicated_modules() -> Iterator[DistributedDataParallel]:
    """The DDP modules whose process group has more than one process, the newest first."""
    if _known and distributed.is_initialized():
        for reference in _known[::-1]:
            module = reference()
            if module is not None and hasattr(module, "_module_parameters") and module.process_group.size() > 1:
                yield module


def taking_part(leaves: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DDP modules that average gradients in a pass to these leaves.

    Several modules may hold the same parameter without being in the graph, for example if a model was wrapped twice, or if two
    models share layers. A module is left out if others average all of its parameters. It may also have been deleted. Processes
    may collect such garbage at different times, so their decisions must not depend on it.
    """
    modules = [(module, {id(p) for p in module._module_parameters if p.requires_grad}) for module in replicated_modules()]
    if not modules:
        return []
    touched = {id(leaf) for leaf in leaves}
    candidates = []
    for module, params in modules:
        is_whole = module.find_unused_parameters or module.static_graph or params <= touched
        if not params.isdisjoint(touched):
            candidates.append((is_whole, module, params if is_whole else params & touched))
    held: dict[Any, set[int]] = {}  # by process group
    found = []
    for _, module, averaged in sorted(candidates, key=lambda candidate: not candidate[0]):
        others = held.setdefault(module.process_group, set())
        if not averaged <= others:
            found.append(module)
            others |= averaged
    return found


def is_replicated(params: Iterable[Tensor]) -> bool:
    """Whether a DDP module of more than one process holds one of these parameters."""
    held = {id(p) for module in replicated_modules() for p in module._module_parameters}
    return bool(held) and any(id(p) in held for p in params)
