"""TorchInductor's code for a flat graph, compared with the graph before it is used."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .verify import difference, uses_16_bits
from .workarounds import draw_order
from .workarounds.cpu_math import with_own_math


def compile_graph(graph: GraphModule, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """TorchInductor's code for a flat graph and tensors like these. It draws the same random numbers as eager mode."""
    from torch import _inductor
    from torch._inductor import config

    unchecked = [name for name in ("size_asserts", "alignment_asserts") if hasattr(config, name)]  # the caller checks
    options: dict[str, Any] = {"fallback_random": True, **draw_order.options(), **dict.fromkeys(unchecked, False)}
    faster = "combo_kernels" if tensors[0].is_cuda else "cpp_wrapper"  # fuses small kernels; calls kernels from C++
    with contextlib.suppress(Exception):  # not every graph can be compiled with it
        return checked(_inductor.compile, graph, tensors, {**options, faster: True})
    return checked(_inductor.compile, graph, tensors, options)


MAX_CHECKED = 2**30  # bytes


def checked(compiler: Any, graph: GraphModule, tensors: Sequence[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile the graph, and check that the code gives the same results as the graph, except for rounding."""
    with torch.no_grad():
        compiled: Callable[..., Any] = compiler(with_own_math(graph), tensors, options=options)
        if sum([tensor.nbytes for tensor in tensors]) <= MAX_CHECKED:
            with whole_precision():
                expected, found = (outcome(run, tensors) for run in (graph, compiled))
                where = difference(expected, found, tensors, functools.partial(outcome, graph), uses_16_bits(graph))
            if where:
                raise RuntimeError(f"what it compiles gives other numbers than the graph itself, {where}")
    return compiled


@contextlib.contextmanager
def whole_precision() -> Iterator[None]:
    """Turn off TF32. Its rounding depends on the choice of the kernel, and would hide other differences."""
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    kinds = cuda.matmul, cudnn.conv, cudnn.rnn
    before = [kind.fp32_precision for kind in kinds]
    try:
        for kind in kinds:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


def outcome(run: Callable[..., Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the outputs of a graph, and of its arguments after the run, on the CPU. The arguments are restored."""
    before = on_cpu(tensors)
    try:
        with torch.random.fork_rng({tensor.device for tensor in tensors if tensor.is_cuda}):
            torch.manual_seed(0)
            return on_cpu([*run(*tensors), *tensors])
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            if not has_same_bytes(tensor, value):  # the memory of a batch may be read-only
                tensor.copy_(value)


def has_same_bytes(tensor: Tensor, value: Tensor) -> bool:
    now, before = (x.cpu().contiguous().reshape(-1).view(torch.uint8) for x in (tensor, value))
    return torch.equal(now, before)


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.to("cpu", copy=True) for tensor in tensors]
