"""The DistributedDataParallel (DDP) modules of this process.

An autograd graph does not show that DDP averages the gradients of its leaves. So every DDP module is registered when it is
created. The order of creation is the same in all processes.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator

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


register_module_module_registration_hook(note_wrapper)
note_earlier_modules()


def replicated_modules() -> Iterator[DistributedDataParallel]:
    """The DDP modules whose process group has more than one process."""
    if _known and distributed.is_initialized():
        for reference in list(_known):
            module = reference()
            if module is not None and hasattr(module, "_module_parameters") and module.process_group.size() > 1:
                yield module


def is_replicated(params: Iterable[Tensor]) -> bool:
    """Whether a DDP module of more than one process holds one of these parameters."""
    held = {id(p) for module in replicated_modules() for p in module._module_parameters}
    return bool(held) and any(id(p) in held for p in params)
