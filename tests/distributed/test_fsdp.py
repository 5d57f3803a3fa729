"""Processes under fully_shard (FSDP2) train as one process does on the whole batch."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import run
from test_ddp import GPT, ROOT, STEPS, Branches, batch, convolutional, loss_of, mean_of_parts, part, perceptron, torchrun, volume
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import hesscale
from hesscale.distributed import fully_sharded


class Tied(nn.Module):
    """The output layer has the weights of the embedding, and a normalisation is frozen."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.norm = nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.norm(self.hidden(self.embedding(tokens)).tanh())).flatten(0, 1)


class Twice(nn.Module):
    """A layer that runs twice, and others whose activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.repeated, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = checkpoint(self.first, x, use_reentrant=False).tanh()
        h = self.repeated(self.repeated(h).tanh()).tanh()
        return checkpoint(self.last, h, use_reentrant=False)


MODELS = {
    "perceptron": (perceptron, (4,)),
    "convolutional": (convolutional, (1, 6, 6)),
    "GPT": (GPT, None),
    "tied": (Tied, None),
    "twice": (Twice, (4,)),
}
LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding)


def build(make, rank, *, layers=True, replicas=None, **options):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = make()
    if rank is None:
        return model
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    if replicas is not None:
        mesh = init_device_mesh(device, (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicas", "shards"))
    for module in list(model.modules()) if layers and make is not Tied else []:
        if isinstance(module, LAYERS):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(tensor):
    """The tensor of all processes, from a DTensor too."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    shards = [dim for dim, placement in enumerate(tensor.placements) if placement.is_shard()]
    if tensor.device.type == "cpu" or not shards:
        return tensor.full_tensor().clone()
    (dim,), mesh = shards, tensor.device_mesh  # full_tensor ends with a segmentation fault where gloo gathers CUDA tensors
    parts = [None] * mesh.size(dim)
    dist.all_gather_object(parts, tensor.to_local().cpu(), group=mesh.get_group(dim))
    return torch.cat(parts, tensor.placements[dim].dim).to(tensor.device)


def diagonals_of(model):
    """The whole Hessian diagonals. Each is placed as its parameter is."""
    for p in model.parameters():
        if p.requires_grad and isinstance(p, DTensor):
            assert p.hess_diag.placements == p.placements
            assert p.hess_diag.dtype == p.dtype
            assert p.hess_diag.to_local().shape == p.to_local().shape
    return [whole(p.hess_diag) for p in model.parameters() if p.requires_grad]


def recorded(model, optimizer):
    state = {name: whole(p.detach()) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        state |= {f"{name}.{key}": whole(value) for key, value in optimizer.state[p].items()}
    return {**state, "eta": optimizer.eta, "scaled": optimizer.scaled_share}


def take_step(optimizer, model, loss, how="optimizer"):
    if how == "optimizer":
        optimizer.backward(loss)
    elif how == "backward":
        hesscale.backward(loss)
    else:
        with hesscale.capture(optimizer):
            loss.backward()
    diagonals = diagonals_of(model)
    optimizer.step()
    optimizer.zero_grad()
    return diagonals


def mine(tensors, rank):
    return part(tensors, rank, dist.get_world_size() if rank is not None else 1)


# ways to train: each runs in every process with its rank, and in one with rank None


def trained(rank, name, how="optimizer", kind=hesscale.AdaHesScale, fsdp=None, count=2, **options):
    make, shape = MODELS[name]
    model = build(make, rank, **(fsdp or {}))
    optimizer = kind(model.parameters(), lr=0.01, **options)
    count = count if rank is None else dist.get_world_size()
    losses = (mean_of_parts(model, batch(shape, step), rank, count) for step in range(STEPS))
    diagonals = [take_step(optimizer, model, loss, how) for loss in losses]
    return {**recorded(model, optimizer), "diagonals": diagonals}


def in_groups(rank):
    """Two groups with a trust region each, and bounds that need means and lengths of whole parameters."""
    model = build(GPT, rank)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)]
    groups[0] |= {"weight_decay": 0.1, "graft": (0.5, 0.7)}
    bounds = {"trust_radius": 1e-3, "trust_region": "group", "damping": 0.3, "update_clip": 0.3, "maximize": True}
    optimizer = hesscale.AdaHesScale(groups, lr=0.01, curvature_warmup=2, **bounds)
    for step in range(STEPS):
        take_step(optimizer, model, loss_of(model, *mine(batch(None, step), rank)))
    return recorded(model, optimizer)


def accumulated(rank, synchronized=False):
    """Two parts of a batch before each step. Unless both are synchronized, nothing is reduced after the first."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    early = []
    for step in range(STEPS):
        x, y = batch((4,), step)
        for half in (0, 1):
            if rank is not None and not synchronized:
                model.set_requires_gradient_sync(half == 1)
                model.set_is_last_backward(half == 1)
            optimizer.backward(loss_of(model, *mine(part((x, y), half), rank)) / 2)
            if half == 0:
                early += [p.grad is None and getattr(p, "hess_diag", None) is None for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "early": early}


def occasional(rank):
    """Curvature at every third step; what is sent at the others."""
    model = build(perceptron, rank, layers=False)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, curvature_every=3)
    sent = []
    for step in range(STEPS):
        loss = loss_of(model, *mine(batch((4,), step), rank))
        if rank is None:
            optimizer.backward(loss)
        else:
            sent.append(volume(lambda: optimizer.backward(loss)))  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "sent": sent}


def unused(rank):
    """All processes use one of three branches at a time; a parameter that is not used has no diagonal."""
    model = build(Branches, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    for step in range(STEPS):
        loss = loss_of(partial(model, branch=step % 2), *mine(batch((4,), step), rank))
        optimizer.backward(loss)
        idle = [*model.branches[1 - step % 2].parameters(), *model.branches[2].parameters()]
        assert all(p.grad is None and getattr(p, "hess_diag", None) is None for p in idle)
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(p.detach()) for name, p in model.named_parameters()}


def reduced_early(rank):
    """The events of a pass in order: a gradient of the first module, and the diagonals of a module sent."""
    model, events = build(GPT, rank), []
    send = fully_sharded.REDUCE_SCATTER
    model.first_norm.register_full_backward_hook(lambda *_: events.append("first module"))
    loss = loss_of(model, *mine(batch(None, 0), rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            fully_sharded, "REDUCE_SCATTER", lambda *args, **options: (events.append("sent"), send(*args, **options))[1]
        )
        hesscale.backward(loss)
    return events


def divided(rank):
    """A divisor of one's own: gradients and diagonals of the sum of the losses."""
    model = build(perceptron, rank)
    if rank is not None:
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)
    count = 1 if rank is None else dist.get_world_size()
    hesscale.backward(loss_of(model, *mine(batch((4,), 0), rank)) / count)
    return {"gradients": [whole(p.grad) for p in model.parameters()], "diagonals": diagonals_of(model)}


def nonfinite(rank):
    """A step that is not finite in one process is left out in all."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, on_nonfinite="skip")
    for step in range(4):
        loss = loss_of(model, *mine(batch((4,), step), rank))
        optimizer.backward(loss)
        if step == 2 and rank in (0, None):  # the first entry of the first parameter is the first process's
            first = next(iter(model.parameters()))
            (first.grad if rank is None else first.grad.to_local()).view(-1)[0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "skipped": optimizer.nonfinite_steps}


def continued(rank, folder):
    """A run that goes on from a checkpoint of two processes."""
    model = build(GPT, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, trust_radius=0.05)
    if rank is None:
        for step in range(3):
            take_step(optimizer, model, loss_of(model, *batch(None, step)))
    else:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    assert optimizer.param_groups[0]["step_count"] == 3
    for step in range(3, 6):
        take_step(optimizer, model, loss_of(model, *mine(batch(None, step), rank)))
    return {key: value for key, value in recorded(model, optimizer).items() if key != "scaled"}


def saved(rank, folder):
    model = build(GPT, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, trust_radius=0.05)
    for step in range(3):
        take_step(optimizer, model, loss_of(model, *mine(batch(None, step), rank)))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


TRUST = {"trust_radius": 0.05}
KEPT = {"fsdp": {"reshard_after_forward": False}}
EQUAL = {
    "perceptron": (trained, ("perceptron",), {}),
    "GPT": (trained, ("GPT",), {}),
    "batch norm": (trained, ("convolutional",), {}),
    "tied and frozen weights": (trained, ("tied",), {}),
    "the paper's": (trained, ("perceptron",), {"kind": hesscale.AdaHesScale.paper}),
    "GPT, the paper's with a trust region": (trained, ("GPT",), {"kind": hesscale.AdaHesScale.paper, **TRUST}),
    "trust region": (trained, ("perceptron",), TRUST),
    "GPT, trust region": (trained, ("GPT",), TRUST),
    "one by one": (trained, ("perceptron",), {"foreach": False, **TRUST}),
    "update_clip, weight decay": (trained, ("perceptron",), {"update_clip": 0.5, "weight_decay": 0.1}),
    "not resharded": (trained, ("GPT",), KEPT),
    "resharded in part": (trained, ("GPT",), {"fsdp": {"reshard_after_forward": 2}}),
    "a layer that runs twice, and checkpoints": (trained, ("twice",), TRUST),
    "all bounds, in groups": (in_groups, (), {}),
    "root alone": (trained, ("GPT",), {"fsdp": {"layers": False}}),
    "root alone, resharded": (trained, ("perceptron",), {"fsdp": {"layers": False, "reshard_after_forward": True}}),
    "resharded": (trained, ("GPT",), {"fsdp": {"reshard_after_forward": True}}),
    "replicas": (trained, ("GPT",), {"fsdp": {"replicas": 2}, **TRUST}),
    "replicas in a mesh of one": (trained, ("perceptron",), {"fsdp": {"replicas": 1}}),
    "hesscale.backward": (trained, ("perceptron", "backward"), {}),
    "capture": (trained, ("perceptron", "capture"), {}),
    "Gauss-Newton": (trained, ("GPT",), {"kind": hesscale.AdaHesScaleGN}),
    "BL89": (trained, ("perceptron",), {"kind": hesscale.optim.BL89}),
    "Adam with a trust region": (trained, ("perceptron",), {"kind": hesscale.Adam, **TRUST}),
    "accumulated": (accumulated, (), {}),
    "accumulated, reduced twice": (accumulated, (), {"synchronized": True}),
    "curvature_every": (occasional, (), {}),
    "unused parameters": (unused, (), {}),
    "divisor": (divided, (), {}),
    "not finite": (nonfinite, (), {}),
}
FOUR = (
    "GPT",
    "perceptron",
    "replicas",
    "GPT, trust region",
    "accumulated",
    "resharded in part",
)  # in four processes, some shards are empty


def cases(rank, names):
    return {name: EQUAL[name][0](rank, *EQUAL[name][1], **EQUAL[name][2]) for name in names}


@pytest.fixture(scope="module")
def ranks():
    return run(cases, tuple(EQUAL))


@pytest.fixture
def alone():
    before = torch.get_default_dtype()
    yield lambda name: EQUAL[name][0](None, *EQUAL[name][1], **{k: v for k, v in EQUAL[name][2].items() if k != "fsdp"})
    torch.set_default_dtype(before)


def assert_equal(found, expected):
    if isinstance(found, dict):
        found, expected = ({k: v for k, v in result.items() if k not in ("sent", "early")} for result in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_train_like_one(name, ranks, alone):
    for rank in ranks:
        assert_equal(rank[name], alone(name))


@pytest.mark.slow
def test_four_processes_train_like_one(alone):
    for rank in run(cases, FOUR, world_size=4):
        for name in FOUR:
            assert_equal(rank[name], alone(name))


def test_nothing_is_reduced_before_the_last_part(ranks):
    assert all(all(rank["accumulated"]["early"]) for rank in ranks)


def test_diagonals_are_sent_once_where_gradients_are(ranks):
    for rank in ranks:
        sent = rank["curvature_every"]["sent"]
        ((size, one),) = {step for index, step in enumerate(sent) if index % 3}
        assert one == 1  # one group of parameters
        assert {step for index, step in enumerate(sent) if index % 3 == 0} == {(2 * size, 2)}


def refusals(rank):
    """What is said about what is not supported, and whether something has changed by then."""
    found = {}
    model = build(perceptron, rank)
    x, y = batch((4,), 0)
    optimizer = hesscale.AdaHesScale(model.parameters())
    compiling = partial(hesscale.compile_step, model, loss_of, optimizer)
    scaling = partial(optimizer.backward, loss_of(model, x, y), scaler=torch.amp.GradScaler("cpu"))
    logits = model(x)
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
    calls = {"compile_step": compiling, "gradient scaler": scaling, "head='rules'": partial(hesscale.backward, entropy)}
    for name, call in calls.items():
        found[name] = refused(model, call)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    offloaded = fully_shard(perceptron(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    replicated = build(perceptron, rank, replicas=2)
    replicated.set_requires_all_reduce(False)
    for name, model in {"CPUOffloadPolicy": offloaded, "set_requires_all_reduce": replicated}.items():
        x = x.to(next(model.parameters()).dtype)
        found[name] = refused(model, partial(hesscale.backward, loss_of(model, x, y)))
    return found


def refused(model, call):
    try:
        call()
    except (hesscale.UnsupportedOperator, ValueError) as error:
        return str(error), any(p.grad is not None or getattr(p, "hess_diag", None) is not None for p in model.parameters())
    return "", True


def in_bfloat16(rank):
    """Parameters in float32 that modules use in bfloat16: the mean of what each part gives in a model in bfloat16."""
    model = build(perceptron, None).float()
    low = copy.deepcopy(model).bfloat16()
    expected = []
    for k in range(dist.get_world_size()):
        x, y = mine(batch((4,), 0), k)
        low.zero_grad()
        hesscale.backward(loss_of(low, x.bfloat16(), y))
        expected.append([p.hess_diag.float() for p in low.parameters()])
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    x, y = mine(batch((4,), 0), rank)
    hesscale.backward(loss_of(model, x.float(), y))
    return diagonals_of(model), [torch.stack(parts).mean(0) for parts in zip(*expected, strict=True)]


def by_columns(rank):
    """Matrices that are sharded by columns."""
    model = build(perceptron, None)
    if rank is not None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else Shard(0))
    hesscale.backward(loss_of(model, *mine(batch((4,), 0), rank)))
    return diagonals_of(model)


def others(rank):
    return refusals(rank), in_bfloat16(rank), by_columns(rank), reduced_early(rank)


def test_other_settings_are_refused_or_right():
    before = torch.get_default_dtype()
    expected = by_columns(None)
    for said, (found, mean), columns, events in run(others):
        assert events[:3] == ["sent"] * 3  # modules close to the loss, before the pass has reached the first
        assert "first module" in events
        for name, (message, has_changed) in said.items():
            assert name in message, name
            assert not has_changed, name
        torch.testing.assert_close(found, mean, rtol=2e-2, atol=1e-4)
        torch.testing.assert_close(columns, expected, rtol=1e-9, atol=1e-12)
    torch.set_default_dtype(before)


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_is_loaded_in_another_number_of_processes(world_size, tmp_path):
    before = torch.get_default_dtype()
    run(saved, str(tmp_path))
    found = run(continued, str(tmp_path), world_size=world_size)
    expected = continued(None, None)
    torch.set_default_dtype(before)
    for rank in found:
        torch.testing.assert_close(rank, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_example_runs():
    assert "after 5 steps on 2 processes" in torchrun(ROOT / "examples/fsdp_gpt.py", "--steps", "5")
