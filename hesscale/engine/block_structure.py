"""What earlier passes have learned about the Hessian of a loss at one tensor, and how a GPU reports that it has changed.

The Hessian at a model's output is block diagonal as a rule: the loss is a sum over samples, so only entries of one sample share
second derivatives. Which dimensions make up a block decides how many Hessian-vector products the exact diagonal takes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cache, cached_property
from threading import Lock

import torch
from torch import Tensor

from ..errors import CurvatureWarning

Block = tuple[int, ...]  # the dimensions whose entries share second derivatives; the other dimensions are samples


RETRY_INTERVAL = 100  # passes
MAX_PRODUCTS = 1024  # Hessian-vector products for one tensor


@cache
def candidate_blocks(rank: int) -> tuple[Block, ...]:
    """The blocks to try, cheapest first. The last one, all dimensions, is always right."""
    candidates: list[Block] = [(), (rank - 1,), (1,), tuple(range(1, rank)), tuple(range(rank))]
    return tuple(dict.fromkeys(block for block in candidates if all(0 <= d < rank for d in block)))


@dataclass(frozen=True, eq=False)
class Probes:
    """Two fixed random vectors in the shape (block, samples), and the CUDA stream that they were made on."""

    first: Tensor
    second: Tensor
    stream: int | None

    @property
    def is_checked(self) -> bool:
        """Whether there are several samples, so that a product with ``second`` has to check whether they interact."""
        return self.first.shape[1] > 1

    def fit(self, like: Tensor, count: int) -> bool:
        same_kind = (self.first.dtype, self.first.device) == (like.dtype, like.device)
        return self.first.shape[0] == count and same_kind and self.stream == current_stream(like.device)

    @cached_property
    def ratio(self) -> Tensor:
        """What to multiply products with the first probe by, to predict that with the second: (block, 1, samples)."""
        return (self.second / self.first).unsqueeze(1)

    @cached_property
    def all_rows(self) -> Tensor:
        return self.rows(0, len(self.first))

    def rows(self, start: int, stop: int) -> Tensor:
        """Vectors in the shape (row, block, samples): ``second`` if it is needed and comes first, then ``first`` by entry."""
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
    """Whether the current CUDA stream is being captured into a CUDA graph, where nothing runs yet."""
    return torch.cuda.is_current_stream_capturing()


class AsyncCheck:
    """The outcome of a check on a GPU, on its way to the host.

    Reading it at once would make the host wait for the GPU. So one pass starts the transfer, and a later pass reads what has
    arrived. One transfer is under way at a time.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pending: tuple[Tensor, torch.cuda.Event, Block] | None = None

    def start(self, passed: Tensor, next_block: Block) -> None:
        """Send the outcome to the host, with the block to go on to if the check failed."""
        with self._lock:
            if self._pending is None and not is_capturing():
                event = torch.cuda.Event()
                on_host = passed.to("cpu", non_blocking=True)
                event.record()
                self._pending = on_host, event, next_block

    def poll(self) -> Block | None:
        """The block to go on to if a check has failed, None if it has passed or is still under way."""
        with self._lock:
            if self._pending is None or is_capturing() or not self._pending[1].query():
                return None
            (passed, _, next_block), self._pending = self._pending, None
        return None if bool(passed) else next_block


@dataclass(eq=False)
class BlockStructure:
    """What is remembered of one tensor from pass to pass.

    Threads may share it. Every field is replaced as a whole, and each pass verifies the block that it uses.
    """

    max_products: int = MAX_PRODUCTS
    block: Block | None = None  # None until a pass has found it
    is_out_of_reach: bool = False  # the last eager pass had to leave the tensor to the rules
    passes: int = 0
    probes: Probes | None = None
    check: AsyncCheck = field(default_factory=AsyncCheck)

    def read_check(self) -> None:
        """Take in the outcome of an earlier check on a GPU, if it has arrived."""
        next_block = self.check.poll()
        if next_block is not None:
            self.block = next_block
            warn(
                "entries of the model's outputs have come to share second derivatives, unlike in earlier passes; the last "
                "diagonals there were not exact"
            )

    def is_left_to_rules(self) -> bool:
        """Whether to leave the tensor to the rules at this pass too, since an exact diagonal was out of reach.

        At some passes everything is tried again, cheaper blocks that have failed once among them.
        """
        self.passes += 1
        if self.passes % RETRY_INTERVAL == 0:
            self.block = self.block if self.block == () else None
            return False
        return self.block is None and self.is_out_of_reach

    def probes_like(self, like: Tensor, count: int) -> Probes:
        """Two vectors of shape (block, samples) with irregular entries in ±[½, 3⁄2], the same at every call.

        They are kept on their device, since moving them to a GPU at every pass would make the GPU wait.
        """
        if torch.compiler.is_compiling():
            return make_probes(like, count, None)
        probes = self.probes
        if probes is None or not probes.fit(like, count):
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
