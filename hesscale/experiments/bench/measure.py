"""Time and memory of steps. Each round times one block of calls of every method, in a new random order."""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .methods import AGAIN, BASELINE, EAGER, GRAPH, MODES, Method, NotMeasured, Step
from .workloads import Workload

MEASURED = "measured"  # the label of the part of a profile in which the peak is measured


class Runnable(Protocol):
    """An object to time: a call of ``run`` is a step, and ``rest`` is called between blocks."""

    @property
    def run(self) -> Callable[[], Any]: ...

    def rest(self) -> None: ...


@dataclass
class Case:
    """A warmed-up step to time."""

    step: Runnable
    calls: int  # in one block
    peak_bytes: int | None = None
    ran_as: str = ""

    def forget_backward(self) -> None:
        """Discard the times of backward passes during warm-up."""
        if isinstance(self.step, Step):
            self.step.backward_times.clear()

    def backward_ms(self, device: torch.device) -> list[float] | None:
        """Milliseconds of a backward pass, block by block, if it is timed separately from the rest of a step."""
        found = self.step.backward_times if isinstance(self.step, Step) and device.type == "cpu" else []
        return [1e3 * statistics.fmean(found[i : i + self.calls]) for i in range(0, len(found), self.calls)] or None


def prepare(workload: Workload, method: Method, mode: str, batch: tuple[Tensor, Tensor], *, block: float, limit: float) -> Case:
    """Build a step, and warm it up. A block of calls should take ``block`` seconds, and a step at most ``limit`` seconds."""
    device = batch[0].device
    ways: set[str] = set()

    def warmed() -> Step:
        if method.name in workload.left_out:
            raise NotMeasured(f"left out: {workload.left_out[method.name]}")
        step = Step(method, mode, workload.model(device), workload.loss(), batch)
        spent = timed(step.run, 1, device)
        if spent > limit:
            raise NotMeasured(f"too slow: the first step took {spent:.1f} s, the limit is {limit:g} s")
        for _ in range(3 * method.period + 1):
            step.run()
        return step

    def period(step: Step) -> None:
        for _ in range(method.period):
            step.run()
            ways.add(step.ran_as)

    step, peak = with_peak(warmed, period, device, from_the_start=mode in (GRAPH, AGAIN))
    spent = min(timed(step.run, method.period, device) for _ in range(3))
    calls = method.period * max(1, math.ceil(block / max(spent, 1e-9)))
    own = None if peak is None else peak + sum(t.nbytes for t in batch)
    return Case(step, calls, own, " and ".join(sorted(ways)))


def timed(run: Callable[[], Any], calls: int, device: torch.device) -> float:
    """The seconds of ``calls`` calls, with a synchronization of the device before and after them."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Eager steps whose updates (everything after the loss) are timed separately too. ``update_ms`` has one mean per block."""

    def __init__(self, step: Step) -> None:
        self.step, self.device = step, step.batch[0].device
        self.update_ms: list[float] = []
        self.spent, self.calls = 0.0, 0

    def run(self) -> None:
        loss = self.step.forward()
        self.spent += timed(lambda: self.step.update(loss), 1, self.device)
        self.calls += 1

    def rest(self) -> None:
        self.update_ms.append(1e3 * self.spent / self.calls)
        self.spent, self.calls = 0.0, 0
        self.step.rest()


def with_peak(
    build: Callable[[], Step], use: Callable[[Step], None], device: torch.device, *, from_the_start: bool
) -> tuple[Step, int | None]:
    """A step, and the peak memory in bytes of all tensors during its use, including those of model and optimizer.

    A CUDA graph allocates memory when it is captured, not when it runs. ``from_the_start`` includes the capture.
    """
    gc.collect()
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step = build()
        if not from_the_start:
            wait(device)
            torch.cuda.reset_peak_memory_stats(device)
        use(step)
        wait(device)
        return step, torch.cuda.max_memory_allocated(device) - before
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with silence():
        profile.start()
    try:
        step = build()
        with torch.profiler.record_function(MEASURED):
            use(step)
    finally:
        with silence():
            profile.stop()
    return step, peak_of(profile)


@contextmanager
def silence() -> Iterator[None]:
    """Silence standard error, to which some builds of torch print when a profiler starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_of(profile: Any) -> int | None:
    """The peak of allocated memory in the measured part; None if this version of torch does not report it."""
    try:
        events = profile.profiler.kineto_results.events()
        begins = min(event.start_ns() for event in events if event.name() == MEASURED)
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    except (AttributeError, ValueError):
        return None
    live, peak = 0, None
    for moment, change in changes:
        live += change
        if moment >= begins:
            peak = max(live, peak or 0)
    return peak


def interleave(
    cases: Sequence[Case], rounds: int, device: torch.device, seed: int = 0
) -> tuple[dict[int, list[float]], dict[int, str]]:
    """Milliseconds per step, by case and round. For a case that fails, the error is returned instead."""
    order = random.Random(seed)
    times: dict[int, list[float]] = {k: [] for k in range(len(cases))}
    errors: dict[int, str] = {}
    gc.collect()
    gc.freeze()  # excludes existing objects from garbage collection during blocks
    try:
        for _ in range(rounds):
            for k in order.sample(sorted(times), len(times)):
                try:
                    times[k].append(1e3 * timed(cases[k].step.run, cases[k].calls, device) / cases[k].calls)
                    cases[k].step.rest()
                except Exception as error:
                    errors[k] = message(error)
                    del times[k]
    finally:
        gc.unfreeze()
    return times, errors


def quartiles(values: Iterable[float]) -> dict[str, float]:
    """Median and quartiles, to five digits."""
    values = list(values)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": digits(middle), "q1": digits(low), "q3": digits(high)}


def ratios(times: Sequence[float], base: Sequence[float] | None) -> dict[str, float] | None:
    """Median and quartiles of the ratios over rounds."""
    return None if base is None else quartiles(a / b for a, b in zip(times, base, strict=True))


def digits(value: float) -> float:
    return float(f"{value:.5g}")


def message(error: BaseException) -> str:
    """The first informative line of an error, shortened for a table."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {line}" if line and not isinstance(error, NotMeasured) else line or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"


def rows_of(
    workload: Workload,
    chosen: Sequence[tuple[Method, str]],
    device: torch.device,
    *,
    rounds: int,
    block: float,
    limit: float,
    log: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for every method and mode: time, its ratios to Adam in the same mode and to eager Adam, and memory; or the error."""
    batch = workload.data(device)
    rows: list[dict[str, Any]] = [{"method": method.name, "label": method.label, "mode": mode} for method, mode in chosen]
    cases: dict[int, Case] = {}
    for k, (method, mode) in enumerate(chosen):
        start = time.perf_counter()
        try:
            cases[k] = prepare(workload, method, mode, batch, block=block, limit=limit)
            text = f"ready in {time.perf_counter() - start:.1f} s, blocks of {cases[k].calls}"
            if cases[k].ran_as != MODES[mode]:
                text += f", runs as {cases[k].ran_as}"
        except Exception as error:
            text = rows[k]["error"] = message(error)
        log(f"{workload.name}, {MODES[mode]}, {method.label}: {text}")
    if not cases:
        return rows
    log(f"{workload.name}: {rounds} rounds of {len(cases)} blocks")
    keys = list(cases)
    for case in cases.values():
        case.forget_backward()
    times, errors = interleave([cases[k] for k in keys], rounds, device)
    by_row = {keys[i]: found for i, found in times.items()}
    for i, error_text in errors.items():
        rows[keys[i]]["error"] = error_text
        log(f"{workload.name}, {rows[keys[i]]['mode']}, {rows[keys[i]]['label']}: {error_text}")
    base = {row["mode"]: k for k, row in enumerate(rows) if row["method"] == BASELINE and k in by_row}
    for k, found in by_row.items():
        case, row = cases[k], rows[k]
        same = base.get(row["mode"])
        backward = case.backward_ms(device)
        adam_backward = None if same is None else cases[same].backward_ms(device)
        adam_peak = None if same is None else cases[same].peak_bytes
        row.update(
            ms=quartiles(found),
            ratio=ratios(found, None if same is None else by_row[same]),
            ratio_to_eager_adam=ratios(found, by_row[base[EAGER]] if EAGER in base else None),
            backward_ratio=None if backward is None else ratios(backward, adam_backward),
            peak_bytes=case.peak_bytes,
            memory_ratio=digits(case.peak_bytes / adam_peak) if case.peak_bytes and adam_peak else None,
            ran_as=case.ran_as,
            calls=case.calls,
            times_ms=[digits(value) for value in found],
        )
    return rows
