"""The block structure of a loss's Hessian at one tensor, as found by earlier passes, and checks on a GPU that it still holds.

The Hessian at a model's output is usually block diagonal: the loss is a sum over samples, so only entries of the same sample have
mixed second derivatives. The number of entries in a block is the number of Hessian-vector products that the exact diagonal takes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import Lock

import torch
from torch import Tensor

from ..errors import CurvatureWarning

Block = tuple[int, ...]  # the dimensions whose entries have mixed second derivatives; the other dimensions are samples


RETRY_INTERVAL = 100  # passes
MAX_PRODUCTS = 1024  # Hessian-vector products for one tensor


@cache
def candidate_blocks(rank: int) -> tuple[Block, ...]:
    """The blocks to try, cheapest first. The last one has all dimensions, which is always correct."""
    candidates: list[Block] = [(), (rank - 1,), (1,), tuple(range(1, rank)), tuple(range(rank))]
    return tuple(dict.fromkeys(block for block in candidates if all(0 <= d < rank for d in block)))


@dataclass(frozen=True, eq=False)
class Probes:
    """Two fixed random vectors of shape (block, samples), and the CUDA stream on which they were created."""

    first: Tensor
    second: Tensor
    stream: int | None

    @property
    def is_checked(self) -> bool:
        """Whether there are several samples. A product with ``second`` then checks that they do not interact."""
        return self.first.shape[1] > 1

    def matches(self, like: Tensor, count: int) -> bool:
        same_kind = (self.first.dtype, self.first.device) == (like.dtype, like.device)
        return self.first.shape[0] == count and same_kind and self.stream == current_stream(like.device)

    @cached_property
    def ratio(self) -> Tensor:
        """Factors that turn products with ``first`` into a prediction of the product with ``second``: (block, 1, samples)."""
        return (self.second / self.first).unsqueeze(1)

    @cached_property
    def all_rows(self) -> Tensor:
        return self.rows(0, len(self.first))

    def rows(self, start: int, stop: int) -> Tensor:
        """Vectors of shape (row, block, samples): one per entry of the block from ``first``, after ``second`` if it is needed."""
        z = self.first[start:stop]
        is_checked = self.is_checked and start == 0
        rows = torch.zeros(len(z) + is_checked, *self.first.shape, dtype=z.dtype, device=z.device)
        rows[is_checked:, start:stop].diagonal(dim1=0, dim2=1).copy_(z.T)
        if is_checked:
            rows[0] = self.second
        return rows


def current_stream(device: torch.device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def is_capturing() -> bool:
    """Whether the current CUDA stream is being captured into a CUDA graph. No kernel runs during a capture."""
    return torch.cuda.is_current_stream_capturing()


class AsyncCheck:
    """Copies the result of a check from the GPU to the host without synchronization.

    One pass starts the copy, and a later pass reads it when it has finished. There is at most one copy at a time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: tuple[Tensor, torch.cuda.Event, Block] | None = None

    def start(self, passed: Tensor, next_block: Block) -> None:
        """Start to copy the result to the host. If the check failed, ``next_block`` is the block to try next."""
        with self._lock:
            if self._pending is None and not is_capturing():
                event = torch.cuda.Event()
                on_host = passed.to("cpu", non_blocking=True)
                event.record()
                self._pending = on_host, event, next_block

    def poll(self) -> Block | None:
        """The block to try next if a check failed; None if it passed or its copy has not finished."""
        with self._lock:
            if self._pending is None or is_capturing() or not self._pending[1].query():
                return None
            (passed, _, next_block), self._pending = self._pending, None
        return None if bool(passed) else next_block


@dataclass(eq=False)
class BlockStructure:
    """What passes have found about the Hessian at one tensor.

    Threads may share it. Fields are only ever reassigned, not changed in place, and each pass verifies the block that it uses.
    """

    max_products: int = MAX_PRODUCTS
    block: Block | None = None  # None until a pass has found it
    is_out_of_reach: bool = False  # the last eager pass could not compute the exact diagonal and used the rules
    passes: int = 0
    probes: Probes | None = None
    check: AsyncCheck = field(default_factory=AsyncCheck)

    def read_check(self) -> None:
        """If the copy of an earlier check's result has finished, and the check failed, warn and switch to the next block."""
        next_block = self.check.poll()
        if next_block is not None:
            self.block = next_block
            warn(
                "entries of the model's outputs have mixed second derivatives now, unlike in earlier passes; the last diagonals "
                "there were not exact"
            )

    def is_left_to_rules(self) -> bool:
        """Whether to use the rules at this pass without trying, since an earlier pass could not compute the exact diagonal.

        Every ``RETRY_INTERVAL`` passes, all blocks are tried again, including cheaper ones that have failed before.
        """
        self.passes += 1
        if self.passes % RETRY_INTERVAL == 0:
            self.block = self.block if self.block == () else None
            return False
        return self.block is None and self.is_out_of_reach

    def probes_like(self, like: Tensor, count: int) -> Probes:
        """Two vectors of shape (block, samples) with irregular entries in ±[½, 3⁄2], the same at every call.

        They are cached on their device, since a copy to the GPU at every pass would make the GPU wait.
        """
        if torch.compiler.is_compiling():
            return make_probes(like, count, None)
        probes = self.probes
        if probes is None or not probes.matches(like, count):
            probes = make_probes(like, count, current_stream(like.device))
            if not like.is_cuda or not is_capturing():
                self.probes = probes
        return probes


def make_probes(like: Tensor, count: int, stream: int | None) -> Probes:
    positions = torch.arange(1, 2 * like.numel() + 1, dtype=torch.float32, device=like.device)
    noise = positions.view(2, count, like.numel() // max(count, 1)).sin() * 4e4
    first, second = (noise.frac() + noise.sign() / 2).to(like.dtype)
    return Probes(first, second, stream)


def warn(message: str) -> None:
    warnings.warn(message, CurvatureWarning, stacklevel=2)
