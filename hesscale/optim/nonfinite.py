"""Keep non-finite numbers out of weights and averages, without waiting for the device."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..distributed.shards import holds_everywhere, local_parts
from ..errors import CurvatureWarning, NonFiniteError
from .scalars import counter, is_on_host

CHOICES = ("raise", "skip")
MAX_NAMES = 3  # of parameters in an error
CHECK_INTERVAL = 32  # compiled steps on a GPU between two copies of the count to the host


class NonFiniteCheck:
    """Checks the gradients and curvature of every step.

    On a CPU, a non-finite step is reported at once. On a GPU it is masked on the device, and reported at a later step, when the
    count of such steps has been copied to the host.
    """

    def __init__(self, on_nonfinite: str, counters: dict[str, Tensor]) -> None:
        if on_nonfinite not in CHOICES:
            raise ValueError(f"on_nonfinite={on_nonfinite!r} is not one of {', '.join(map(repr, CHOICES))}")
        self.on_nonfinite = on_nonfinite
        self.counters = counters  # "nonfinite" counts the masked steps, on their device
        self.reported_count = 0
        self.pending_copy: tuple[Tensor, torch.cuda.Event] | None = None  # of the count, to the host
        self.has_silent_steps = False  # whether a GPU may have counted steps that must not be reported
        self.has_seen_curvature = False

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "pending_copy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        renamed = {EARLIER_NAMES.get(name, name): value for name, value in state.items()}
        self.__dict__.update({"has_silent_steps": False, **renamed})

    def check(
        self,
        tensors: Sequence[Tensor],
        found_inf: Tensor | None,
        meshes: Collection[Any] = (),
        where: Callable[[], str] = str,
    ) -> Tensor | None:
        """Count the step if a number is not finite, and report it as ``on_nonfinite`` says.

        If there are ``meshes``, the tensors are shards of DTensors. A non-finite number then skips the step in all processes.
        A gradient scaler sets ``found_inf``. The overflows that it has found are masked, but neither counted nor reported.
        ``where`` names the parameters, for the error.

        Returns:
            None if the host knows that all numbers are finite; otherwise a mask, 1 for a step that counts and 0 for one that
            must change nothing. A mask on the host is always 0.
        """
        if found_inf is None and is_true_everywhere(meshes, is_finite_on_host(tensors), tensors[0].device):
            counter(self.counters, "nonfinite", tensors[0].device)
            return None
        flags = [is_finite(group) for group in by_device_and_dtype(tensors)]
        finite = flags[0]
        for flag in flags[1:]:
            finite = finite & flag.to(finite.device)
        finite = holds_everywhere(meshes, finite)
        mask, bad = finite, ~finite
        if found_inf is not None:
            overflow = (found_inf != 0).to(finite.device)
            mask, bad = finite & ~overflow, ~finite & ~overflow
        nonfinite = counter(self.counters, "nonfinite", finite.device)
        if is_on_host(finite) and bool(mask):
            return None
        nonfinite += bad
        self.report_count(where)
        return mask.to(torch.float32)

    def report_count(self, where: Callable[[], str] = str) -> None:
        """Report new non-finite steps: now on a CPU; on a GPU, start a copy of their count to the host."""
        count = self.counters["nonfinite"]
        if torch.compiler.is_compiling():
            return
        if count.device.type == "cpu":
            self.raise_if_new(int(count), "", where)
        elif self.on_nonfinite == "raise" and self.pending_copy is None and not is_capturing():
            event = torch.cuda.Event()
            host = count.to("cpu", non_blocking=True)
            event.record()
            self.pending_copy = host, event

    def report_earlier_steps(self) -> None:
        """Report non-finite steps if the copy of their count to the host has finished."""
        if self.pending_copy is None and not self.has_silent_steps:
            return
        if torch.compiler.is_compiling() or is_capturing():
            return
        if self.pending_copy is not None and self.pending_copy[1].query():
            host, self.pending_copy = self.pending_copy[0], None
            self.raise_if_new(int(host), "an earlier step: ")
        if self.has_silent_steps and self.on_nonfinite == "raise":
            self.acknowledge()

    def record_compiled_step(self, step: int, *, report: bool) -> bool:
        """Record a step that a compiled graph has taken, or masked out because a number was not finite.

        Returns:
            False if the host knows that the step was masked.
        """
        count = self.counters["nonfinite"]
        if not count.is_cpu:
            if report:
                self.report_earlier_steps()
                if step % CHECK_INTERVAL == 0:
                    self.report_count()
            else:
                self.note_silent_step()
            return True
        found = int(count)
        is_taken = found <= self.reported_count
        if report:
            self.raise_if_new(found, "")
        self.reported_count = found
        return is_taken

    def note_silent_step(self) -> None:
        """Record that the last step must not be reported. On a CPU, this is not needed, since its count has already been read."""
        count = self.counters.get("nonfinite")
        self.has_silent_steps |= count is not None and not count.is_cpu

    def acknowledge(self) -> None:
        """Treat all non-finite steps so far as reported. On a GPU, this waits for the device."""
        self.reported_count = int(self.counters.get("nonfinite", 0))
        self.pending_copy, self.has_silent_steps = None, False

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside the block, count non-finite steps, but never report them."""
        before, self.on_nonfinite = self.on_nonfinite, "skip"
        try:
            yield
        finally:
            self.on_nonfinite = before
            self.note_silent_step()

    def raise_if_new(self, count: int, when: str, where: Callable[[], str] = str) -> None:
        is_new, self.reported_count = count > self.reported_count, count
        if is_new and self.on_nonfinite == "raise":
            raise NonFiniteError(
                f"{when}a gradient or Hessian diagonal, or its square, is not finite{where()}. The step was skipped; weights and "
                "averages have not changed. Lower the step size, set trust_radius, or pass on_nonfinite='skip' to skip without "
                "an error"
            )

    def warn_if_zero(self, curvatures: Sequence[Tensor], meshes: Collection[Any] = ()) -> None:
        """Warn if the first curvature is zero everywhere. Only on a CPU, where the check costs nothing."""
        if self.has_seen_curvature or not curvatures or not is_on_host(curvatures[0]):
            return
        self.has_seen_curvature = True
        is_zero = not any(bool(curvature.any()) for curvature in curvatures)
        if is_true_everywhere(meshes, is_zero, curvatures[0].device):
            warnings.warn(
                "the Hessian diagonal is zero for every parameter (piecewise linear model and loss?), so the step does not use "
                "it. Use a loss with curvature, or an optimizer that needs none, such as Adam",
                CurvatureWarning,
                stacklevel=5,  # the line that called step
            )


# names of the class and its attributes in pickles from earlier versions
Watch = NonFiniteCheck
EARLIER_NAMES = {"reported": "reported_count", "on_its_way": "pending_copy", "curvature_seen": "has_seen_curvature"}


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured. The host must not read anything then. The counter in the graph still counts.

    CUDA is asked only if the process has used it, since the call fails if torch was built with CUDA but there is no driver.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_finite_on_host(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are finite and on the CPU, in a dtype that can hold their squares. It takes one product per tensor."""
    return all(
        is_on_host(tensor) and tensor.dtype in (torch.float32, torch.float64) and math.isfinite(float(torch.dot(flat, flat)))
        for tensor in tensors
        for flat in (tensor.reshape(-1),)
    )


def nonfinite_parameters(groups: Sequence[dict[str, Any]]) -> str:
    """The parameters with a non-finite number, by the names that the optimizer was given, or by group and position."""
    found = []
    for index, group in enumerate(groups):
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            values = {what: getattr(p, what, None) for what in ("grad", "hess_diag")}
            bad = [what for what, value in values.items() if value is not None and not is_finite(local_parts_of(value))]
            if bad:
                found.append(f"{' and '.join(bad)} of {name}")
    more = f", and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return f" ({', '.join(found[:MAX_NAMES])}{more})" if found else ""


def local_parts_of(value: Any) -> list[Tensor]:
    return local_parts([value]) if hasattr(value, "to_local") else [value]


def is_true_everywhere(meshes: Collection[Any], is_true: bool, device: torch.device) -> bool:
    """Whether something is true in all processes of these meshes, or in this one if there are none."""
    return bool(holds_everywhere(meshes, torch.tensor(is_true, device=device))) if meshes else is_true


def is_finite(tensors: list[Tensor]) -> Tensor:
    """Whether all sums of squares are finite: V averages squares, so a square that overflows counts as infinite too."""
    dtype = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    if tensors[0].device.type == "cpu":  # a compiler merges sums over tensors of the same shape into one loop
        sums: Sequence[Tensor] = [tensor.to(dtype or tensor.dtype).square().sum() for tensor in tensors]
    else:
        sums = torch._foreach_norm(tensors, 2, dtype=dtype)  # one kernel for all tensors
    if torch.compiler.is_compiling():  # one kernel, where stacking would take one for each tensor
        return functools.reduce(torch.add, sums).isfinite()
    return torch.stack(list(sums)).isfinite().all()


def by_device_and_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
