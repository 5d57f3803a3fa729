"""Two processes under DistributedDataParallel train as one process does on the whole batch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import run
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hesscale
from hesscale.distributed import averaging, draws, replicas

STEPS = 10
ROOT = Path(__file__).parents[2]


class GPT(nn.Module):
    """One block of a decoder, with attention in one operator."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(11, 8), nn.Parameter(0.1 * torch.randn(6, 8))
        self.first_norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.second_norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.last_norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.first_norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return self.head(self.last_norm(x)).flatten(0, 1)


def perceptron():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 3))


def convolutional():
    """Batch norm in evaluation mode: in training its statistics are those of each process's part of the batch."""
    layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).eval()


class Branches(nn.Module):
    """Of two branches, each process uses one in turn; a third one is used by none."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(3)])

    def forward(self, x, branch=None):
        h = self.trunk(x).tanh()
        return self.branches[0](h) + self.branches[1](h) if branch is None else self.branches[branch](h)


MODELS = {
    "perceptron": (perceptron, (4,)),
    "convolutional": (convolutional, (1, 6, 6)),
    "GPT": (GPT, None),
}


def batch(shape, step, size=8):
    """The whole batch of a step; a process takes its part of it."""
    generator = torch.Generator().manual_seed(step)
    if shape is None:
        tokens = torch.randint(11, (size, 6), generator=generator)
        return tokens, tokens.roll(1, 1)
    return torch.randn(size, *shape, generator=generator), torch.randint(3, (size,), generator=generator)


def part(tensors, rank, count=2):
    return [x.chunk(count)[rank] for x in tensors] if rank is not None else tensors


def loss_of(model, x, y):
    return F.cross_entropy(model(x), y.flatten())


def build(make, rank, **options):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make()
    return model if rank is None else DistributedDataParallel(model, **options)


def recorded(model, optimizer):
    """Weights, averages and the measure of the trust region."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    state = {name: p.detach().clone() for name, p in inner.named_parameters()}
    for name, p in inner.named_parameters():
        state |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[p].items()}
    return {**state, "eta": optimizer.eta, "scaled": optimizer.scaled_share}


def count_sent(rank, call):
    """How many collectives the default process group runs in a call."""
    if rank is None:
        return call()
    before = dist.group.WORLD._get_sequence_number_for_group()
    call()
    return dist.group.WORLD._get_sequence_number_for_group() - before


# ways to train: each runs in two processes with rank 0 or 1, and in one with rank None


def trained(rank, name, how="optimizer", kind=hesscale.AdaHesScale, ddp=None, **options):
    make, shape = MODELS[name]
    model = build(make, rank, **(ddp or {}))
    optimizer = kind(model.parameters(), lr=0.01, trust_radius=0.05, **options)
    diagonals = []
    if how == "step":
        take = hesscale.compile_step(model, loss_of, optimizer, backend="eager")
        for step in range(STEPS):
            take(*part(batch(shape, step), rank))
        return recorded(model, optimizer)
    for step in range(STEPS):
        loss = loss_of(model, *part(batch(shape, step), rank))
        if how == "optimizer":
            optimizer.backward(loss)
        elif how == "backward":
            hesscale.backward(loss)
        else:
            with hesscale.capture(optimizer):
                loss.backward()
        diagonals += [p.hess_diag.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "diagonals": diagonals}


def accumulated(rank, forward_only=False):
    """Two parts of a batch before each step; nothing is sent after the first."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    sent = []
    for step in range(STEPS):
        x, y = batch((4,), step)
        for half in (0, 1):
            quiet = model.no_sync() if rank is not None and half == 0 else contextlib.nullcontext()
            with quiet:
                loss = loss_of(model, *part(part((x, y), half), rank)) / 2
                if not forward_only:
                    sent.append((half, count_sent(rank, lambda: optimizer.backward(loss))))  # noqa: B023
            if forward_only:
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "sent": sent}


def occasional(rank):
    """Curvature at every third step; what is sent at the others."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, curvature_every=3)
    sent = []
    for step in range(STEPS):
        loss = loss_of(model, *part(batch((4,), step), rank))
        sent.append(count_sent(rank, lambda: optimizer.backward(loss)))  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "sent": sent}


def unused(rank, **ddp):
    """Each process uses one of two branches, in turn. The whole is the mean of what the branches give."""
    model = build(Branches, rank, find_unused_parameters=True, **ddp)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = batch((4,), step)
        ranks = (0, 1) if rank is None else (rank,)
        losses = [loss_of(partial(model, branch=(step + k) % 2), *part((x, y), k)) for k in ranks]
        optimizer.backward(sum(losses) / len(losses))
        optimizer.step()
        optimizer.zero_grad()
    inner = model if rank is None else model.module
    idle = [p.grad is None and getattr(p, "hess_diag", None) is None for p in inner.branches[2].parameters()]
    return {**recorded(model, optimizer), "idle": idle}


def left_over(rank):
    """A diagonal of an earlier pass, at a parameter that this process does not use now, does not count."""
    model = build(Branches, rank, find_unused_parameters=True)
    x, y = batch((4,), 0)
    for step in (0, 1):
        ranks = (0, 1) if rank is None else (rank,)
        losses = [loss_of(partial(model, branch=(step + k) % 2), *part((x, y), k)) for k in ranks]
        model.zero_grad()  # leaves hess_diag
        hesscale.backward(sum(losses) / len(losses))
    inner = model if rank is None else model.module
    return {name: p.hess_diag for name, p in inner.named_parameters() if p.grad is not None}


def around(rank):
    """A pass around the DDP module sends nothing, also in one process alone."""
    model = build(perceptron, rank)
    x, y = part(batch((4,), 0), rank)
    hesscale.backward(loss_of(model, x, y))
    if rank in (0, None):
        model.zero_grad()
        inner = model if rank is None else model.module
        hesscale.backward(loss_of(inner, *batch((4,), 1)))
        return [p.hess_diag.clone() for p in inner.parameters()]
    return None


def without_sequence_numbers(rank):
    """A backend that does not count its collectives: DDP's own settings tell whether it has averaged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averaging, "count_collectives", lambda group: None)
        return accumulated(rank)


def imported_late(rank):
    """DDP modules that were made before hesscale was imported."""
    model = build(perceptron, rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "_known", [])
        replicas.note_earlier_modules()
        hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    return [p.hess_diag for p in model.parameters()]


def averaged_by_hand(rank):
    """Hooks of the user average the gradients: what is said."""
    model = build(perceptron, None)
    for p in model.parameters():
        p.register_hook(lambda gradient: dist.all_reduce(gradient) or gradient / 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    return [str(warning.message) for warning in caught if warning.category is hesscale.CurvatureWarning]


def calibrated(rank):
    """The sums of a calibration are averaged too: all processes multiply their diagonals by the same numbers."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScaleGN(model.parameters(), lr=0.01, calibrate_every=2)
    for step in range(4):
        x, y = part(batch((4,), step), rank)
        optimizer.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    return recorded(model, optimizer)


def two_modules(rank):
    """An actor and a critic, each with an optimizer, in one loss and in two."""
    actor, critic = build(perceptron, rank), build(perceptron, rank)
    optimizers = [hesscale.AdaHesScale(actor.parameters(), lr=0.01), hesscale.AdaHesScaleGN(critic.parameters(), lr=0.02)]
    for step in range(4):
        x, y = part(batch((4,), step), rank)
        with hesscale.capture(*optimizers):
            if step % 2:
                (loss_of(actor, x, y) + loss_of(critic, x, y)).backward()
            else:
                loss_of(actor, x, y).backward()
                loss_of(critic, x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"actor": recorded(actor, optimizers[0]), "critic": recorded(critic, optimizers[1])}


def nonfinite(rank):
    """A step that is not finite in one process is left out in all."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, on_nonfinite="skip")
    for step in range(4):
        x, y = batch((4,), step)
        x[0] *= torch.inf if step == 2 else 1  # which belongs to the first process
        optimizer.backward(loss_of(model, *part((x, y), rank)))
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "skipped": optimizer.nonfinite_steps}


def signs(rank):
    """z∘Hz with the same z in all processes, whatever their seeds; draws at the outputs that differ."""
    model = build(perceptron, rank)
    torch.manual_seed(100 + rank)
    x = torch.ones(2, 4)
    drawn = {}
    for kind in (hesscale.AdaHessian, hesscale.GGNMC):
        for step in range(2):
            optimizer = kind(model.parameters())
            local = optimizer.diagonals(loss_of(model, x, torch.tensor([0, 1])), list(model.parameters()))
            drawn[kind.__name__, step] = [diagonal.clone() for diagonal in local]
    return drawn


def scaled(rank, unscale=False):
    """A gradient scaler whose factor is divided out of what is averaged."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        x, y = batch((4,), step)
        for half in (0, 1):
            quiet = model.no_sync() if rank is not None and half == 0 else contextlib.nullcontext()
            with quiet:
                optimizer.backward(loss_of(model, *part(part((x, y), half), rank)) / 2, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return recorded(model, optimizer)


def refusals(rank):
    """What is said under settings that do not average, and whether something has changed by then."""
    found = {}
    model = build(perceptron, rank)
    x, y = part(batch((4,), 0), rank)
    with model.join():
        found["join"] = refused(model, lambda: hesscale.backward(loss_of(model, x, y)))
    optimizer = hesscale.AdaHesScale(model.parameters())
    found["compile_step"] = refused(model, lambda: hesscale.compile_step(model, loss_of, optimizer))
    dist.barrier()
    return found


def refused(model, call):
    try:
        call()
    except (hesscale.UnsupportedOperator, ValueError) as error:
        return str(error), any(p.grad is not None for p in model.parameters())
    return "", True


EQUAL = {
    **{name: (trained, (name,), {}) for name in MODELS},
    "hesscale.backward": (trained, ("perceptron", "backward"), {}),
    "capture": (trained, ("perceptron", "capture"), {}),
    "Gauss-Newton": (trained, ("GPT",), {"kind": hesscale.AdaHesScaleGN}),
    "Adam with a trust region": (trained, ("perceptron",), {"kind": hesscale.Adam}),
    "static_graph": (trained, ("perceptron",), {"ddp": {"static_graph": True}}),
    "gradient_as_bucket_view": (trained, ("GPT",), {"ddp": {"gradient_as_bucket_view": True}}),
    "find_unused_parameters": (trained, ("GPT",), {"ddp": {"find_unused_parameters": True}}),
    "no_sync": (accumulated, (), {}),
    "forward alone in no_sync": (accumulated, (), {"forward_only": True}),
    "imported late": (imported_late, (), {}),
    "no sequence numbers": (without_sequence_numbers, (), {}),
    "curvature_every": (occasional, (), {}),
    "unused parameters": (unused, (), {}),
    "unused parameters in views of buckets": (unused, (), {"gradient_as_bucket_view": True}),
    "left over": (left_over, (), {}),
    "an eager step": (trained, ("perceptron", "step"), {}),
    "around the module": (around, (), {}),
    "two modules": (two_modules, (), {}),
    "a gradient scaler": (scaled, (), {}),
    "not finite": (nonfinite, (), {}),
}
OTHERS = {
    "bfloat16": (trained, ("perceptron",), {"curvature_dtype": torch.bfloat16}),
    "calibrated": (calibrated, (), {}),
    "signs": (signs, (), {}),
    "by hand": (averaged_by_hand, (), {}),
    "refusals": (refusals, (), {}),
}
LOOPS = {"accelerate": ["accelerate", "transformers"], "trainer": ["accelerate", "transformers"], "lightning": ["lightning"]}


def all_cases(rank):
    return {name: function(rank, *args, **options) for name, (function, args, options) in {**EQUAL, **OTHERS}.items()}


@pytest.fixture(scope="module")
def ranks():
    return run(all_cases)


@pytest.fixture
def alone():
    before = torch.get_default_dtype()
    yield lambda name: EQUAL[name][0](None, *EQUAL[name][1], **{k: v for k, v in EQUAL[name][2].items() if k != "ddp"})
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_train_like_one(name, ranks, alone):
    expected = alone(name)
    for rank in ranks[:1] if name == "around the module" else ranks:
        found = rank[name]
        if isinstance(found, dict):
            found, expected = ({k: v for k, v in result.items() if k != "sent"} for result in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_processes_stay_equal_bit_for_bit(ranks):
    for name in {**EQUAL, "bfloat16": None, "calibrated": None}:
        if name != "around the module":
            torch.testing.assert_close(ranks[0][name], ranks[1][name], rtol=0, atol=0)


def test_nothing_is_sent_inside_no_sync(ranks):
    for rank in ranks:
        assert {count for half, count in rank["no_sync"]["sent"] if half == 0} == {0}
        assert min(count for half, count in rank["no_sync"]["sent"] if half == 1) >= 2


def test_nothing_more_is_sent_between_curvature_updates(ranks):
    for rank in ranks:
        sent = rank["curvature_every"]["sent"]
        plain = {count for step, count in enumerate(sent) if step % 3}
        with_curvature = {count for step, count in enumerate(sent) if step % 3 == 0}
        assert plain == {1}  # the gradients of a small model make one bucket
        assert with_curvature == {2}  # and so do its diagonals


def test_other_ways_to_average_are_told_that_hess_diag_is_not_averaged(ranks):
    assert all("average hess_diag as well" in rank["by hand"][0] and len(rank["by hand"]) == 1 for rank in ranks)


def test_unused_parameters_keep_none(ranks):
    assert all(all(rank["unused parameters"]["idle"]) for rank in ranks)


def test_diagonals_are_sent_in_the_dtype_of_the_curvature(ranks):
    means = ranks[0]["bfloat16"]["diagonals"]
    assert all(torch.equal(mean, mean.bfloat16().double()) for mean in means)


def test_signs_are_shared_and_samples_are_not(ranks):
    for step in range(2):
        ours, theirs = (rank["signs"]["AdaHessian", step] for rank in ranks)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        ours, theirs = (rank["signs"]["GGNMC", step] for rank in ranks)
        assert any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    first, second = (ranks[0]["signs"]["AdaHessian", step] for step in range(2))
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_does_not_average_is_refused_before_anything_changes(ranks):
    for rank in ranks:
        for name, (said, changed) in rank["refusals"].items():
            assert "DistributedDataParallel" in said, name
            assert not changed, name


def averaged_alone(rank, kind, **ddp):
    """A process that takes the mean over itself: its diagonals, those of the same model without DDP, and what it sent."""
    model = build(perceptron, rank, **ddp)
    plain = build(perceptron, None)
    x, y = batch((4,), 0)
    optimizers = [kind(m.parameters(), generator=torch.Generator().manual_seed(1)) for m in (model, plain)]
    sent = count_sent(rank, lambda: optimizers[0].backward(loss_of(model, x, y)))
    optimizers[1].backward(loss_of(plain, x, y))
    kind(model.parameters()).diagonals(loss_of(model, x, y), list(model.parameters()))  # from a generator of its own
    return sent, *[[p.hess_diag for p in m.parameters()] for m in (model, plain)]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("ddp", [{}, {"find_unused_parameters": True}], ids=["used", "perhaps unused"])
@pytest.mark.parametrize("kind", [hesscale.AdaHessian, hesscale.GGNMC])
def test_the_mean_over_one_process_changes_nothing(kind, ddp, monkeypatch):
    def modules():
        return [reference() for reference in replicas._known if reference() is not None]

    monkeypatch.setattr(averaging, "is_distributed", lambda: True)
    for user in (averaging, draws):
        monkeypatch.setattr(user, "replicated_modules", modules)
    before = torch.get_default_dtype()
    ((sent, found, expected),) = run(partial(averaged_alone, kind=kind, **ddp), world_size=1)
    torch.set_default_dtype(before)
    assert sent == (4 if ddp else 2)  # gradients and diagonals, and for each which of them are used
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def torchrun(script, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_other_peoples_loops_keep_the_processes_equal(name):
    for library in LOOPS[name]:
        pytest.importorskip(library)
    assert f"{name}: 2 processes" in torchrun(Path(__file__).parent / "ddp_loops.py", name)


@pytest.mark.slow
def test_the_example_runs():
    assert "after 5 steps on 2 processes" in torchrun(ROOT / "examples/ddp_gpt.py", "--steps", "5")
