"""Keeps non-finite numbers away from weights and averages, without ever making the device wait."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CurvatureWarning, NonFiniteError
from .update import is_on_host

CHOICES = ("raise", "skip")
LOOK_EVERY = 32  # compiled steps, at which a GPU sends the number of those that were not finite


class Watch:
    """Looks at every step's gradients and curvature.

    On a CPU a bad step is known, and reported, at once. On a GPU it is masked there, and reported at a later step, when
    the flag has arrived on the host by itself.
    """

    def __init__(self, on_nonfinite: str, counters: dict[str, Tensor]) -> None:
        if on_nonfinite not in CHOICES:
            raise ValueError(f"on_nonfinite={on_nonfinite!r} is not one of {', '.join(map(repr, CHOICES))}")
        self.on_nonfinite = on_nonfinite
        self.counters = counters  # "nonfinite": steps that were masked, counted where they happened
        self.reported = 0
        self.curvature_seen = False
        self.on_its_way: tuple[Tensor, torch.cuda.Event] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "on_its_way": None}

    def admit(self, tensors: Sequence[Tensor], found_inf: Tensor | None) -> Tensor | None:
        """None if all is finite, as far as the host can tell without waiting; else a 0-d tensor, 1 for go and 0 for leave."""
        if found_inf is None and is_finite_on_host(tensors):
            counter(self.counters, "nonfinite", tensors[0].device)
            return None
        flags = [is_finite(group) for group in by_device(tensors)]
        finite = flags[0]
        for flag in flags[1:]:
            finite = finite & flag.to(finite.device)
        alive, bad = finite, ~finite
        if found_inf is not None:  # a gradient scaler looks for these itself
            overflow = (found_inf != 0).to(finite.device)
            alive, bad = finite & ~overflow, ~finite & ~overflow
        nonfinite = counter(self.counters, "nonfinite", finite.device)
        if is_on_host(finite) and bool(alive):
            return None
        nonfinite += bad
        self.send()
        return alive.to(torch.float32)

    def send(self) -> None:
        """Report bad steps: now on a CPU, else once their count has travelled."""
        count = self.counters["nonfinite"]
        if torch.compiler.is_compiling():
            return
        if count.device.type == "cpu":
            self.complain(int(count), "")
        elif self.on_nonfinite == "raise" and self.on_its_way is None and not is_capturing():
            event = torch.cuda.Event()
            host = count.to("cpu", non_blocking=True)
            event.record()
            self.on_its_way = host, event

    def report(self) -> None:
        """Raise for an earlier step, if its flag has arrived."""
        if (
            self.on_its_way is not None
            and not torch.compiler.is_compiling()
            and not is_capturing()
            and self.on_its_way[1].query()
        ):
            host, self.on_its_way = self.on_its_way[0], None
            self.complain(int(host), "an earlier step: ")

    def note(self, step: int) -> bool:
        """After a step that a compiled graph has made, and masked if need be: whether it was taken, as far as is known."""
        count = self.counters["nonfinite"]
        if not count.is_cpu:
            self.report()
            if step % LOOK_EVERY == 0:
                self.send()
            return True
        found = int(count)
        is_taken = found <= self.reported
        self.complain(found, "")
        return is_taken

    def complain(self, count: int, when: str) -> None:
        new, self.reported = count > self.reported, count
        if new and self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"{when}a gradient or Hessian diagonal, or its square, is not finite; weights and averages were left as they "
                "were. Lower the step size, set trust_radius, or pass on_nonfinite='skip' to leave such steps out"
            )

    def look_for_curvature(self, curvatures: Sequence[Tensor]) -> None:
        """Warn once where the first curvature is zero everywhere, on a CPU, where looking costs nothing."""
        if self.curvature_seen or not curvatures or not is_on_host(curvatures[0]):
            return
        self.curvature_seen = True
        if not any(bool(curvature.any()) for curvature in curvatures):
            warnings.warn(
                "the Hessian diagonal is zero for every parameter (piecewise linear model and loss?), so the step divides by eps "
                "alone; use a loss with curvature, or an optimizer of the gradient",
                CurvatureWarning,
                stacklevel=4,
            )


def counter(counters: dict[str, Tensor], name: str, device: torch.device) -> Tensor:
    """A counter to add to in place, so that a captured CUDA graph counts too."""
    if name not in counters:
        counters[name] = torch.zeros((), dtype=torch.long, device=device)
    return counters[name]


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, which no host may look into; ``count`` goes on counting in it."""
    return torch.cuda.is_current_stream_capturing()


def is_finite_on_host(tensors: Sequence[Tensor]) -> bool:
    """The same at the cost of a product per tensor, where all of them are on the CPU in a precision that has room for squares."""
    return all(
        is_on_host(tensor) and tensor.dtype in (torch.float32, torch.float64) and math.isfinite(float(torch.dot(flat, flat)))
        for tensor in tensors
        for flat in (tensor.reshape(-1),)
    )


def is_finite(tensors: list[Tensor]) -> Tensor:
    """By sums of squares: V averages squares, so that what overflows there counts as infinite too."""
    dtype = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    if tensors[0].device.type == "cpu":  # as few sums as there are shapes: a compiler makes a loop of each
        sums: Sequence[Tensor] = [tensor.to(dtype or tensor.dtype).square().sum() for tensor in tensors]
    else:
        sums = torch._foreach_norm(tensors, 2, dtype=dtype)  # one kernel for all of them
    if torch.compiler.is_compiling():  # one kernel, where stacking takes as many as there are tensors
        return functools.reduce(torch.add, sums).isfinite()
    return torch.stack(list(sums)).isfinite().all()


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
