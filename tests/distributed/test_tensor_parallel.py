"""Processes under tensor parallelism (parallelize_module) train as one process does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import run
from test_ddp import ROOT, batch, loss_of, part, perceptron, torchrun
from test_fsdp import refused, whole
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.rules import tensor_parallel

STEPS, WIDTH = 3, 8
BOUNDS = {"trust_radius": 1e-3, "damping": 0.2, "graft": (0.5, 0.7), "update_clip": 0.5}


class Block(nn.Module):
    """A block of a decoder that knows the size of its heads, and not their number: a process may have some of them."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        # without a bias at the keys, whose gradient would be rounding alone
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=bias) for bias in (True, False, True))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    def __init__(self, is_checkpointed=False):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(11, WIDTH), nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(self.norm(x)).flatten(0, 1)


def mesh():
    return init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))


def build(make, rank, parallelize):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make()
    if rank is not None:
        parallelize(model)
    return model


def heads_and_columns(model, over=None, head=None):
    """Each process has some of the heads and some columns of the hidden layers; the other modules are not parallel."""
    over = over or mesh()
    for block in model.blocks:
        column, row = ColwiseParallel(), RowwiseParallel()
        parallelize_module(block, over, {**dict.fromkeys(("q", "k", "v", "up"), column), "out": row, "down": row})
    parallelize_module(model, over, {"head": head or ColwiseParallel(output_layouts=Replicate())})


def sequences(model, over=None):
    """Between the layers, each process has some positions of the sequences; embedding and norms are parallel too."""
    over = over or mesh()
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, over, outer)
    for block in model.blocks:
        column, row = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
        plan = {**dict.fromkeys(("q", "k", "v", "up"), column), "out": row, "down": row}
        parallelize_module(block, over, plan | dict.fromkeys(("norms.0", "norms.1"), SequenceParallel()))


def embedding_by_columns(model):
    parallelize_module(model, mesh(), {"embedding": ColwiseParallel(output_layouts=Replicate())})


class Residual(nn.Module):
    """Activations and sums that may be of DTensors."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = F.silu(F.gelu(self.first(x).tanh()))
        return self.last(F.relu(self.third(h + self.second(h))))


def in_dtensors(model):
    kept = {"use_local_output": False}
    plan = {
        "first": ColwiseParallel(output_layouts=Replicate(), **kept),
        "second": ColwiseParallel(output_layouts=Replicate(), **kept),
        "third": RowwiseParallel(input_layouts=Replicate(), **kept),
        "last": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh(), plan)


def recorded(model, optimizer):
    state = {name: whole(p.detach()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[p].items()}
    return {**state, "eta": optimizer.eta, "scaled": optimizer.scaled_share}


def derivatives(model):
    """The whole gradients and diagonals. Each diagonal is placed as its parameter is."""
    found = {}
    for name, p in model.named_parameters():
        hess_diag = getattr(p, "hess_diag", None)
        if p.grad is not None:
            assert not isinstance(p, DTensor) or (p if hess_diag is None else hess_diag).placements == p.placements
            found[name] = [whole(value) for value in (p.grad, hess_diag) if value is not None]
    return found


# ways to train: each runs in every process with its rank, and in one with rank None


def trained(rank, make=GPT, parallelize=heads_and_columns, how="optimizer", kind=hesscale.AdaHesScale, parts=1, **options):
    model = build(make, rank, parallelize)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=0.01, **options)
    shape = (4,) if make in (Residual, perceptron) else None
    for step in range(STEPS):
        for index in range(parts):
            loss = loss_of(model, *batch(shape, parts * step + index))
            if how == "optimizer":
                optimizer.backward(loss)
            elif how == "backward":
                hesscale.backward(loss)
            else:
                with hesscale.capture(optimizer):
                    loss.backward()
        found = derivatives(model)
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "derivatives": found}


def sharded_as_well(rank, parallelize=heads_and_columns, parts=1, **options):
    """Pairs of processes are tensor-parallel, and fully_shard divides batches and parameters among the pairs."""
    place = (0, 1)  # among the pairs, and their number

    def parallelize_both(model):
        nonlocal place
        pairs = dist.get_world_size() // 2
        meshes = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("pairs", "tensor"))
        parallelize(model, meshes["tensor"])
        for module in (*model.blocks, model):
            fully_shard(module, mesh=meshes["pairs"])
        place = meshes["pairs"].get_local_rank(), pairs

    model = build(GPT, rank, parallelize_both)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, **options)
    for step in range(STEPS):
        for index in range(parts):
            if rank is not None:
                model.set_requires_gradient_sync(index == parts - 1)
            optimizer.backward(loss_of(model, *part(batch(None, parts * step + index), *place)))
        found = derivatives(model)
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "derivatives": found}


def of_some(rank):
    """An optimizer that has only some of the parameters."""
    model = build(GPT, rank, heads_and_columns)
    optimizer = hesscale.AdaHesScale(list(model.parameters())[3:9], lr=0.01, trust_radius=1e-3)
    for step in range(STEPS):
        optimizer.backward(loss_of(model, *batch(None, step)))
        optimizer.step()
        model.zero_grad()
    return recorded(model, optimizer)


def at_the_input(rank):
    """The diagonal at a tensor that all processes have: the sum of their shares."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = build(perceptron, rank, lambda model: parallelize_module(model, mesh(), plan))
    x, y = batch((4,), 0)
    x.requires_grad_()
    hesscale.backward(loss_of(model, x, y))
    return derivatives(model), x.grad, x.hess_diag


def frozen(rank):
    """Some parameters of parallel layers need no gradient."""
    model = build(GPT, rank, heads_and_columns)
    for name, p in model.named_parameters():
        p.requires_grad_("q" not in name and "down.weight" not in name)
    hesscale.backward(loss_of(model, *batch(None, 0)))
    return derivatives(model)


EQUAL = {
    "by heads and columns": (trained, {}),
    "by sequences": (trained, {"parallelize": sequences}),
    "by sequences, bounded": (trained, {"parallelize": sequences, **BOUNDS}),
    "embedding by columns": (trained, {"parallelize": embedding_by_columns}),
    "in DTensors": (trained, {"make": Residual, "parallelize": in_dtensors}),
    "bounded": (trained, BOUNDS),
    "one by one": (trained, {"foreach": False, "weight_decay": 0.1, **BOUNDS}),
    "Gauss-Newton": (trained, {"kind": hesscale.AdaHesScaleGN}),
    "BL89": (trained, {"kind": hesscale.optim.BL89}),
    "Adam with a trust region": (trained, {"kind": hesscale.Adam, "trust_radius": 1e-3}),
    "hesscale.backward": (trained, {"how": "backward"}),
    "capture": (trained, {"how": "capture"}),
    "accumulated": (trained, {"parts": 2}),
    "checkpointed": (trained, {"make": partial(GPT, is_checkpointed=True)}),
    "curvature_every": (trained, {"curvature_every": 2, **BOUNDS}),
    "of some parameters": (of_some, {}),
    "sharded as well": (sharded_as_well, {"parts": 2}),
    "by sequences, bounded and sharded as well": (sharded_as_well, {"parallelize": sequences, **BOUNDS}),
    "at the input": (at_the_input, {}),
    "frozen": (frozen, {}),
}
FOUR = ("by heads and columns", "bounded", "embedding by columns", "hesscale.backward")
FOUR_IN_PAIRS = ("sharded as well", "by sequences, bounded and sharded as well")


def cases(rank, names):
    return {name: EQUAL[name][0](rank, **EQUAL[name][1]) for name in names}


@pytest.fixture(scope="module")
def ranks():
    return run(cases, tuple(EQUAL))


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def assert_equal(found, name):
    torch.testing.assert_close(found, EQUAL[name][0](None, **EQUAL[name][1]), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::hesscale.CurvatureWarning")
@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_train_like_one(name, ranks):
    for rank in ranks:
        assert_equal(rank[name], name)


@pytest.mark.slow
@pytest.mark.parametrize(("names", "world_size"), [(FOUR, 1), (FOUR + FOUR_IN_PAIRS, 4)])
def test_other_numbers_of_processes_train_like_one(names, world_size):
    for rank in run(cases, names, world_size=world_size):
        for name in names:
            assert_equal(rank[name], name)


def saved(rank, folder):
    model = build(GPT, rank, heads_and_columns)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, trust_radius=1e-3)
    for step in range(STEPS):
        if step == STEPS // 2 and rank is not None:
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        optimizer.backward(loss_of(model, *batch(None, step)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value for key, value in recorded(model, optimizer).items() if key != "scaled"}


def continued(rank, folder):
    model = build(GPT, rank, heads_and_columns)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, trust_radius=1e-3)
    weights, state = get_state_dict(model, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for step in range(STEPS // 2, STEPS):
        optimizer.backward(loss_of(model, *batch(None, step)))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value for key, value in recorded(model, optimizer).items() if key != "scaled"}


def test_a_checkpoint_is_loaded_in_one_process(tmp_path):
    run(saved, str(tmp_path))
    (found,) = run(continued, str(tmp_path), world_size=1)
    torch.testing.assert_close(found, saved(None, None), rtol=1e-9, atol=1e-12)


def sent(rank):
    """How many collectives a backward pass takes, and how many one with curvature."""
    found = []
    for run_backward in (torch.autograd.backward, hesscale.backward):
        loss = loss_of(build(GPT, rank, heads_and_columns), *batch(None, 0))
        with CommDebugMode() as counted:
            run_backward(loss)
        found.append(counted.get_total_counts())
    return found


def refusals(rank):
    """What is said about what is not supported, and whether something has changed by then."""
    found = {}
    model = build(GPT, rank, heads_and_columns)
    tokens, targets = batch(None, 0)
    params = list(model.parameters())
    logits = model(tokens)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    loss = loss_of(model, tokens, targets)
    calls = {
        "head='rules'": partial(hesscale.backward, entropy),
        "hesscale.grad": partial(hesscale.grad, loss, params),
        "inputs=": partial(hesscale.backward, loss, inputs=params),
        "gradient scaler": partial(hesscale.AdaHesScale(params).backward, loss, scaler=torch.amp.GradScaler("cpu")),
        "AdaHessian": partial(hesscale.AdaHessian(params).backward, loss),
        "GGNMC": partial(hesscale.GGNMC(params).backward, loss),
        "calibrate_every": partial(hesscale.AdaHesScaleGN(params, calibrate_every=1).backward, loss),
        "compile_step": partial(hesscale.compile_step, model, loss_of, hesscale.AdaHesScale(params)),
    }
    for name, call in calls.items():
        found[name] = refused(model, call)
    column = ColwiseParallel(use_local_output=False)
    model = build(GPT, rank, partial(heads_and_columns, head=column))
    with loss_parallel():
        found["full_tensor"] = refused(model, partial(hesscale.backward, loss_of(model, tokens, targets)))
    found["SoftmaxBackward0"] = refused(model, partial(hesscale.backward, model(tokens).softmax(-1).full_tensor().square().sum()))
    return found


def others(rank):
    return sent(rank), refusals(rank)


def test_each_collective_is_doubled_and_the_rest_is_refused_before_anything_changes():
    for (plain, curved), found in run(others):
        assert 0 < 2 * plain == curved
        for name, (said, has_changed) in found.items():
            assert name in said, (name, said)
            assert not has_changed, name


def test_a_sum_that_is_scaled_is_refused():
    """A mean over processes: DTensor hands on the gradient without the factor of the mean, and so would the rule."""

    class Mean:
        reduce_op = "avg"

        def is_partial(self):
            return True

    class Function:
        def __init__(self):
            self.forward_input_placements = (Mean(),)

    assert "reduced other than by a sum" in tensor_parallel.refuse(Function())


@pytest.mark.slow
def test_the_example_runs():
    assert "after 5 steps on 2 processes" in torchrun(ROOT / "examples/tp_gpt.py", "--steps", "5")
