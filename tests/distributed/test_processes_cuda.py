"""What one GPU allows: two processes that share it and talk over gloo, and NCCL with one process."""

from __future__ import annotations

import sys

import pytest
import test_ddp
import test_fsdp
import test_tensor_parallel
import torch
from processes import run

import hesscale
from hesscale.distributed import averaging, overlap, replicas

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TABLES = {"ddp": test_ddp.EQUAL, "fsdp": test_fsdp.EQUAL}  # and no tensor parallelism: gloo does not gather CUDA tensors for it
ALONE = {  # cases for NCCL with one process, which has the whole batch
    "ddp": {name: (test_ddp.trained, (name,), {"count": 1}) for name in test_ddp.MODELS},
    "fsdp": {name: test_fsdp.EQUAL[name] for name in ("perceptron", "GPT", "GPT, trust region", "tied and frozen weights")},
}


@pytest.fixture(autouse=True)
def on_the_gpu():
    before = torch.get_default_dtype()
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(before)


def results(rank, kind):
    """What each case gives in a process, or the error that it ends with in all processes."""
    torch.set_default_device("cuda")
    found = {}
    for name, (function, args, options) in TABLES[kind].items():
        print(f"process {rank}: {kind}, {name}", file=sys.stderr, flush=True)  # pytest shows it if the process crashes
        try:
            found[name] = function(rank, *args, **options)
        except Exception as error:  # the other process meets it too: let the next cases run
            found[name] = error
    return found


def whole(kind, case):
    function, args, options = case
    return function(None, *args, **{name: value for name, value in options.items() if name != kind})


def compare(found, expected):
    if isinstance(found, Exception):
        raise found
    if isinstance(found, dict):
        found, expected = (
            {k: v for k, v in result.items() if k not in ("sent", "size", "early")} for result in (found, expected)
        )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)  # a bias before batch norm has noise for a gradient


@pytest.fixture(scope="module")
def ranks():
    return {}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table])
def test_two_processes_on_one_gpu_train_like_one(kind, name, ranks):
    if kind not in ranks:
        try:
            ranks[kind] = run(results, kind)
        except Exception as error:  # a process crashed: do not start them again for each case
            ranks[kind] = error
    if isinstance(ranks[kind], Exception):
        raise ranks[kind]
    expected = whole(kind, TABLES[kind][name])
    for found in ranks[kind][:1] if name == "around the module" else ranks[kind]:
        compare(found[name], expected)


def sent_early(rank):
    torch.set_default_device("cuda")
    return test_ddp.sent_early(rank)


def test_diagonals_are_sent_while_the_pass_goes_on():
    for events in run(sent_early):
        assert events.index("sent") < events.index("first_norm.weight") - 4


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("overlaps", [False, True], ids=["after the pass", "during the pass"])
@pytest.mark.parametrize("name", ALONE["ddp"])
def test_one_process_with_nccl_averages_over_itself(name, overlaps, monkeypatch):
    def modules():
        return [reference() for reference in replicas._known if reference() is not None]

    monkeypatch.setattr(averaging, "is_distributed", lambda: True)
    monkeypatch.setattr(replicas, "replicated_modules", modules)
    monkeypatch.setattr(overlap, "BACKENDS", {"nccl"} if overlaps else set())
    function, args, options = ALONE["ddp"][name]
    (found,) = run(lambda rank: function(rank, *args, **options, ddp=test_ddp.TINY), world_size=1, backend="nccl")
    monkeypatch.undo()
    compare(found, whole("ddp", ALONE["ddp"][name]))


@pytest.mark.parametrize("name", ALONE["fsdp"])
def test_one_process_with_nccl_trains_its_shards(name):
    function, args, options = ALONE["fsdp"][name]
    (found,) = run(lambda rank: function(rank, *args, **options), world_size=1, backend="nccl")
    compare(found, whole("fsdp", ALONE["fsdp"][name]))


@pytest.mark.parametrize("name", ["by heads and columns", "by sequences, bounded", "in DTensors", "at the input"])
def test_one_process_with_nccl_is_tensor_parallel(name):
    function, options = test_tensor_parallel.EQUAL[name]
    (found,) = run(lambda rank: function(rank, **options), world_size=1, backend="nccl")
    compare(found, function(None, **options))


def reduced(rank):
    """FSDP in bfloat16, with float32 shards, gathered in blocks: gradients and diagonals are finite, and arrive in float32."""
    torch.set_default_device("cuda")
    return test_fsdp.in_bfloat16(rank)


def test_mixed_precision_on_two_processes():
    for found, mean in run(reduced):
        torch.testing.assert_close(found, mean, rtol=2e-2, atol=1e-4)


def test_a_scaler_in_float16_under_nccl():
    """Autocast to float16 with a gradient scaler: the diagonals are those of the model without DDP."""
    expected = half(None)
    (found,) = run(half, world_size=1, backend="nccl")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def half(rank):
    model = test_ddp.build(test_ddp.perceptron, None).float()
    if rank is not None:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    for step in range(3):
        x, y = test_ddp.batch((4,), step)
        with torch.autocast("cuda", torch.float16):
            loss = test_ddp.loss_of(model, x.float(), y)
        optimizer.backward(loss, scaler=scaler)
        diagonals = [p.hess_diag.clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return diagonals
