"""The cached block structure of a Hessian, and asynchronous checks on a GPU, which is simulated here."""

from __future__ import annotations

import pytest
import torch

from hesscale.engine.block_structure import AsyncCheck, BlockStructure, candidate_blocks
from hesscale.errors import CurvatureWarning

PASSED, FAILED = torch.tensor(True), torch.tensor(False)


class Gpu:
    """Whether the work before an event is done, and whether a CUDA graph is being captured."""

    is_done = False
    is_capturing = False


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return gpu.is_done

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.is_capturing)
    return gpu


@pytest.mark.parametrize(
    ("rank", "blocks"),
    [(0, [()]), (1, [(), (0,)]), (2, [(), (1,), (0, 1)]), (3, [(), (2,), (1,), (1, 2), (0, 1, 2)])],
)
def test_candidates_are_ordered_by_cost(rank, blocks):
    assert list(candidate_blocks(rank)) == blocks


def test_a_result_is_read_once_its_copy_has_finished(gpu):
    check = AsyncCheck()
    check.start(FAILED, (1,))
    assert check.poll() is None
    gpu.is_done = True
    assert check.poll() == (1,)
    assert check.poll() is None


def test_a_check_that_passed_changes_nothing(gpu):
    check = AsyncCheck()
    check.start(PASSED, (1,))
    gpu.is_done = True
    assert check.poll() is None


def test_only_one_copy_is_pending_at_a_time(gpu):
    check = AsyncCheck()
    check.start(FAILED, (1,))
    check.start(PASSED, (0, 1))
    gpu.is_done = True
    assert check.poll() == (1,)


def test_no_copies_during_cuda_graph_capture(gpu):
    check = AsyncCheck()
    gpu.is_done = gpu.is_capturing = True
    check.start(FAILED, (1,))
    gpu.is_capturing = False
    assert check.poll() is None
    check.start(FAILED, (1,))
    gpu.is_capturing = True
    assert check.poll() is None
    gpu.is_capturing = False
    assert check.poll() == (1,)


def test_a_failed_check_widens_the_block_and_warns(gpu):
    structure = BlockStructure(block=())
    structure.check.start(FAILED, (1,))
    structure.read_check()
    assert structure.block == ()
    gpu.is_done = True
    with pytest.warns(CurvatureWarning, match="have mixed second derivatives now"):
        structure.read_check()
    assert structure.block == (1,)
