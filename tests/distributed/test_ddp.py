"""Two processes under DistributedDataParallel train as one process does on the whole batch."""

from __future__ import annotations

import contextlib
import copy
import gc
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hesscale
from hesscale.distributed import averaging, draws, fully_sharded, replicas

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
    layers = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers)


class Tied(nn.Module):
    """The output layer has the weights of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)).tanh()).flatten(0, 1)


class Branches(nn.Module):
    """Of two branches, each process uses one in turn; a third one is used by none."""

    def __init__(self, count=3):
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.branches = nn.ModuleList([nn.Linear(5, 3) for _ in range(count)])

    def forward(self, x, branch=None, first=None):
        h = self.trunk(x).tanh()
        if first is not None:
            return self.branches[first](h).tanh() + self.branches[1 - first](h).tanh()
        return self.branches[0](h) + self.branches[1](h) if branch is None else self.branches[branch](h)


MODELS = {
    "perceptron": (perceptron, (4,)),
    "convolutional": (convolutional, (1, 6, 6)),
    "GPT": (GPT, None),
    "tied": (Tied, None),
}
TINY = {"bucket_cap_mb": 1e-4}  # a bucket for nearly every parameter


def batch(shape, step, size=8):
    """The whole batch of a step; a process takes its part of it."""
    generator, device = torch.Generator("cpu").manual_seed(step), torch.get_default_device()
    if shape is None:
        tokens = torch.randint(11, (size, 6), generator=generator, device="cpu").to(device)
        return tokens, tokens.roll(1, 1)
    x = torch.randn(size, *shape, generator=generator, device="cpu")
    return x.to(device), torch.randint(3, (size,), generator=generator, device="cpu").to(device)


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


def volume(call):
    """How many numbers this process gives to reductions in a call, and how many there are. DDP's count if a hook sends them."""
    sizes = []

    def counted(send):
        def sent(*tensors, **options):
            sizes.append((tensors[-1] if tensors else options["input"]).numel())  # all_reduce(it), reduce_scatter(output, it)
            return send(*tensors, **options)

        return sent

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                patch.setattr(dist, name, counted(getattr(dist, name)))
        patch.setattr(fully_sharded, "REDUCE_SCATTER", counted(fully_sharded.REDUCE_SCATTER))
        call()
    return sum(sizes), len(sizes)


def build_counted(rank, **options):
    """A perceptron whose gradients are sent by a hook, for :func:`volume` to count them."""
    model = build(perceptron, rank, **options)
    if rank is not None:
        model.register_comm_hook(None, allreduce_hook)
    return model


def mean_of_parts(model, tensors, rank, count=2, sizes=None):
    """The loss of this process's part of a batch; in one process alone, the mean of the losses of all parts."""
    ranks = range(count) if rank is None else [rank]
    parts = [part(tensors, k, count) if sizes is None else [x.split(sizes)[k] for x in tensors] for k in ranks]
    return torch.stack([loss_of(model, *tensors) for tensors in parts]).mean()


# ways to train: each runs in two processes with rank 0 or 1, and in one with rank None


def trained(rank, name, how="optimizer", kind=hesscale.AdaHesScale, ddp=None, count=2, **options):
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
        loss = mean_of_parts(model, batch(shape, step), rank, count)  # batch norm treats each part alone
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
    model = build_counted(rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    sent = []
    for step in range(STEPS):
        x, y = batch((4,), step)
        for half in (0, 1):
            quiet = model.no_sync() if rank is not None and half == 0 else contextlib.nullcontext()
            with quiet:
                loss = loss_of(model, *part(part((x, y), half), rank)) / 2
                if not forward_only and rank is not None and step < 2:
                    sent.append(volume(lambda: optimizer.backward(loss)))  # noqa: B023
                elif not forward_only:
                    optimizer.backward(loss)
            if forward_only:
                optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "sent": sent}


def occasional(rank, **options):
    """Curvature at every third step; what is sent at each."""
    model = build_counted(rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01, curvature_every=3, **options)
    sent = []
    for step in range(STEPS):
        loss = loss_of(model, *part(batch((4,), step), rank))
        if rank is None:
            optimizer.backward(loss)
        else:
            sent.append(volume(lambda: optimizer.backward(loss)))  # noqa: B023
        optimizer.step()
        optimizer.zero_grad()
    return {**recorded(model, optimizer), "sent": sent, "size": sum(p.numel() for p in model.parameters())}


def uneven(rank):
    """Batches of five and three samples: the mean of the processes' losses, not of the samples'."""
    model = build(perceptron, rank)
    hesscale.backward(mean_of_parts(model, batch((4,), 0), rank, sizes=[5, 3]))
    return [(p.grad, p.hess_diag) for p in model.parameters()]


def in_another_order(rank):
    """The processes run two branches in opposite orders, so that their diagonals arrive in opposite orders."""
    model = build(partial(Branches, 2), rank, **TINY)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    for step in range(STEPS):
        ranks = (0, 1) if rank is None else (rank,)
        losses = [loss_of(partial(model, first=k), *part(batch((4,), step), k)) for k in ranks]
        optimizer.backward(sum(losses) / len(losses))
        optimizer.step()
        optimizer.zero_grad()
    return recorded(model, optimizer)


def in_a_group_of_its_own(rank):
    """A process group that is not the default one, in a model that is wrapped twice."""
    model = build(perceptron, None)
    if rank is not None:
        model = DistributedDataParallel(DistributedDataParallel(model, process_group=dist.new_group([0, 1])))
    hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    return [(p.grad, p.hess_diag) for p in model.parameters()]


def among_other_groups(rank):
    """The first process has one group more than the second, so PyTorch would give a new group another name in each."""
    model = build(perceptron, None)
    if rank is not None:
        pair, first = dist.new_group([0, 1]), dist.new_group([0])
        model = DistributedDataParallel(model, process_group=pair)
    for step in range(3):
        hesscale.backward(loss_of(model, *part(batch((4,), step), rank)))
    if rank == 0:
        dist.destroy_process_group(first)
    return [(p.grad, p.hess_diag) for p in model.parameters()]


def another_leaf(rank):
    """One process alone asks for the gradient of its input, so its optimizer has only some of the leaves."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = part(batch((4,), step), rank)
        x.requires_grad_(rank == 0)
        optimizer.backward(loss_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    return recorded(model, optimizer)


def hooked(rank):
    """A communication hook sends gradients in a group of its own."""
    model = build(perceptron, rank)
    if rank is not None:
        model.register_comm_hook(dist.new_group([0, 1]), allreduce_hook)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.backward(loss_of(model, *part(batch((4,), step), rank)))
        optimizer.step()
        optimizer.zero_grad()
    return recorded(model, optimizer)


def wrapped_again(rank):
    """A model is wrapped again. Only one process still has the first DDP module, which is garbage in the other."""
    model = build(perceptron, None)
    if rank is not None:
        earlier, model = DistributedDataParallel(model), DistributedDataParallel(model)
        if rank == 1:
            del earlier
            gc.collect()
    for step in range(3):
        hesscale.backward(loss_of(model, *part(batch((4,), step), rank)))
    return [(p.grad, p.hess_diag) for p in model.parameters()]


def copied(rank):
    """A DDP module that is a copy: its constructor has not run."""
    model = copy.deepcopy(build(perceptron, rank))
    hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    return [(p.grad, p.hess_diag) for p in model.parameters()]


def shared_trunk(rank, passes):
    """Two modules share a trunk: one loss at each step, in turn; or both, in a pass each."""
    inner = build(partial(Branches, 2), None)
    models = [nn.Sequential(inner.trunk, nn.Tanh(), branch) for branch in inner.branches]
    used = models if rank is None else [DistributedDataParallel(model) for model in models]
    optimizer = hesscale.AdaHesScale(inner.parameters(), lr=0.01, trust_radius=0.01)
    for step in range(4):
        for model in used if passes == 2 else [used[step % 2]]:
            optimizer.backward(loss_of(model, *part(batch((4,), step), rank)))
        optimizer.step()
        optimizer.zero_grad()
    return recorded(inner, optimizer)


def left_behind(rank):
    """Curvature in the first of two parts alone, inside no_sync: its diagonals are not averaged, and the gradients are."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters())
    x, y = part(batch((4,), 0), rank)
    with model.no_sync():
        optimizer.backward(loss_of(model, x, y))
    loss_of(model, x, y).backward()
    with pytest.raises(RuntimeError, match="later pass averaged the gradients without them"):
        optimizer.step()
    optimizer.zero_grad()
    with model.no_sync():
        optimizer.backward(loss_of(model, x, y))
    optimizer.step()  # of each process alone, as its gradients are
    optimizer.zero_grad()
    with model.no_sync():
        optimizer.backward(loss_of(model, x, y))
    loss_of(model, x, y).backward()
    with torch.no_grad():
        model(x)  # an evaluation, after which DDP's flags no longer show the averaging
    with pytest.raises(RuntimeError, match="later pass averaged the gradients without them"):
        optimizer.step()
    return True


def cleared(rank):
    """What a pass inside no_sync has left is dropped with its gradients."""
    model = build(perceptron, rank)
    quiet = model.no_sync() if rank is not None else contextlib.nullcontext()
    with quiet:
        hesscale.backward(loss_of(model, *part(batch((4,), 1), rank)))
    model.zero_grad()  # which leaves hess_diag
    hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    return [(p.grad, p.hess_diag) for p in model.parameters()]


def sent_early(rank):
    """The events of a pass in order: this parameter's gradient, and a bucket of diagonals sent."""
    model, events = build(GPT, rank, **TINY), []
    send = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        for name, p in model.module.named_parameters():
            p.register_hook(lambda gradient, name=name: events.append(name))
        patch.setattr(dist, "all_reduce", lambda *args, **options: (events.append("sent"), send(*args, **options))[1])
        for step in range(2):
            events.clear()
            hesscale.backward(loss_of(model, *part(batch(None, step), rank)))
    return events


def changed_meanwhile(rank):
    """A hook changes a diagonal that has been sent."""
    model = build(perceptron, rank, **TINY)
    hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    first, *_, last = model.parameters()

    def double(gradient):
        last.hess_diag *= 2

    first.register_hook(double)
    loss = loss_of(model, *part(batch((4,), 1), rank))
    with pytest.raises(RuntimeError, match="after it was sent"):
        hesscale.backward(loss)
    return True


def left_out(rank):
    """A pass leaves out parameters that DDP waits for, after it has sent others: an error instead of waiting."""
    model = build(partial(Branches, 2), rank, **TINY)
    x, y = part(batch((4,), 0), rank)
    hesscale.backward(loss_of(model, x, y))
    loss = loss_of(partial(model, branch=1), x, y)
    with pytest.raises(RuntimeError, match=r"branches.0.weight, branches.0.bias. Pass find_unused_parameters=True"):
        hesscale.backward(loss)
    return True


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


def drawn_around(rank):
    """A first pass around the DDP module with random estimates, for which a seed is broadcast: no diagonals are sent."""
    model = build(perceptron, rank)
    hesscale.AdaHessian(model.parameters()).backward(loss_of(model.module, *part(batch((4,), 0), rank)))
    return [p.hess_diag for p in model.parameters()]


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


DRAWS = 200


def drawn(rank, kind):
    """Averaged random estimates of one diagonal."""
    model = build(perceptron, rank)
    torch.manual_seed(rank)
    optimizer = kind(model.parameters())
    found = []
    for _ in range(DRAWS):
        optimizer.backward(loss_of(model, *part(batch((4,), 0), rank)))
        found.append(torch.cat([p.hess_diag.flatten() for p in model.parameters()]))
        optimizer.zero_grad()
    return torch.stack(found)


def pairs(rank):
    """Two models in two processes each."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])] if rank is not None else []
    found = []
    for pair in (0, 1) if rank is None else [rank // 2]:
        model = build(perceptron, rank, **({"process_group": groups[pair], **TINY} if groups else {}))
        for step in range(3):
            model.zero_grad()
            hesscale.backward(loss_of(model, *part(batch((4,), 10 * pair + step), rank and rank % 2)))
        found.append([(p.grad, p.hess_diag) for p in model.parameters()])
    return found


def scaled(rank, unscale=False):
    """A gradient scaler whose factor is divided out of what is averaged."""
    model = build(perceptron, rank)
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=64.0)
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
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("batches", "tensor"))
    inner = parallelize_module(build(perceptron, None), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallel = DistributedDataParallel(inner, device_mesh=mesh["batches"])
    found["tensor parallelism"] = refused(parallel, lambda: hesscale.backward(loss_of(parallel, x, y)))
    dist.barrier()
    return found


def divided(rank):
    """An optimizer whose processes each have some of the parameters: η would not be that of all."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which other tests do without

    model = build(perceptron, rank)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), hesscale.AdaHesScale, trust_radius=1e-9)
    hesscale.backward(loss_of(model, *part(batch((4,), 0), rank)))
    with pytest.raises(hesscale.UnsupportedOperator, match="ZeroRedundancyOptimizer"):
        optimizer.step()
    return all(torch.equal(p, earlier) for p, earlier in zip(model.parameters(), before, strict=True))


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
    "small buckets": (trained, ("GPT",), {"ddp": TINY}),
    "small buckets, views of them": (trained, ("convolutional",), {"ddp": {**TINY, "gradient_as_bucket_view": True}}),
    "in another order": (in_another_order, (), {}),
    "in a group of its own": (in_a_group_of_its_own, (), {}),
    "among other groups": (among_other_groups, (), {}),
    "another leaf": (another_leaf, (), {}),
    "a hook": (hooked, (), {}),
    "wrapped again": (wrapped_again, (), {}),
    "copied": (copied, (), {}),
    "a shared trunk, in turn": (shared_trunk, (1,), {}),
    "a shared trunk, in two passes": (shared_trunk, (2,), {}),
    "cleared": (cleared, (), {}),
    "uneven": (uneven, (), {}),
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
    "curvature_every in bfloat16": (occasional, (), {"curvature_dtype": torch.bfloat16}),
    "sent early": (sent_early, (), {}),
    "changed meanwhile": (changed_meanwhile, (), {}),
    "left out": (left_out, (), {}),
    "left behind": (left_behind, (), {}),
    "signs": (signs, (), {}),
    "AdaHessian": (drawn, (hesscale.AdaHessian,), {}),
    "GGN-MC": (drawn, (hesscale.GGNMC,), {}),
    "drawn around the module": (drawn_around, (), {}),
    "by hand": (averaged_by_hand, (), {}),
    "refusals": (refusals, (), {}),
    "divided": (divided, (), {}),
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
            found, expected = ({k: v for k, v in result.items() if k not in ("sent", "size")} for result in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_processes_stay_equal_bit_for_bit(ranks):
    for name in {**EQUAL, "bfloat16": None, "calibrated": None}:
        if name != "around the module":
            torch.testing.assert_close(ranks[0][name], ranks[1][name], rtol=0, atol=0)


def test_diagonals_are_sent_once_where_gradients_are(ranks):
    for rank in ranks:
        for name in ("curvature_every", "curvature_every in bfloat16"):
            size = rank[name]["size"]
            for step, sent in enumerate(rank[name]["sent"]):
                assert sent == ((size, 1) if step % 3 else (2 * size, 2)), (name, step)
        size = rank["curvature_every"]["size"]
        assert rank["no_sync"]["sent"] == [(0, 0), (2 * size, 2)] * 2


def test_diagonals_are_sent_while_the_pass_goes_on(ranks):
    for rank in ranks:
        events = rank["sent early"]
        assert events.count("sent") > 10
        assert events.index("sent") < events.index("first_norm.weight") - 4
        assert ranks[0]["sent early"] == events


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


def test_a_seed_is_not_taken_for_gradients(ranks):
    found, others = (rank["drawn around the module"] for rank in ranks)
    assert not any(torch.equal(a, b) for a, b in zip(found, others, strict=True))


@pytest.mark.parametrize(("name", "estimator"), [("AdaHessian", "exact"), ("GGN-MC", "ggn")])
def test_the_mean_of_random_estimates_is_that_of_the_whole_batch(name, estimator, ranks, alone):
    model = build(perceptron, None)
    exact = hesscale.estimators.estimate(estimator, loss_of(model, *batch((4,), 0)), list(model.parameters()))
    found = ranks[0][name]
    error = found.mean(0) - torch.cat([diagonal.flatten() for diagonal in exact])
    assert (error.abs() < 5 * found.std(0) / DRAWS**0.5 + 1e-9).all()


def test_what_does_not_average_is_refused_before_anything_changes(ranks):
    for rank in ranks:
        for name, (said, changed) in rank["refusals"].items():
            assert "DistributedDataParallel" in said, name
            assert not changed, name


def test_an_optimizer_of_some_parameters_in_each_process_is_refused(ranks):
    assert all(rank["divided"] for rank in ranks)


def averaged_alone(rank, kind, **ddp):
    """A process that takes the mean over itself: its diagonals, those of the same model without DDP, and what it sent."""
    model = build_counted(rank, **ddp)
    plain = build(perceptron, None)
    x, y = batch((4,), 0)
    optimizers = [kind(m.parameters(), generator=torch.Generator().manual_seed(1)) for m in (model, plain)]
    _, sent = volume(lambda: optimizers[0].backward(loss_of(model, x, y)))
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
    for user in (replicas, draws):
        monkeypatch.setattr(user, "replicated_modules", modules)
    before = torch.get_default_dtype()
    ((sent, found, expected),) = run(partial(averaged_alone, kind=kind, **ddp), world_size=1)
    torch.set_default_dtype(before)
    assert sent == (3 if ddp else 2)  # gradients and diagonals, and which diagonals exist
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


FOUR = {
    **{name: (trained, (name,), {"count": 4}) for name in MODELS},
    "small buckets": (trained, ("GPT",), {"ddp": TINY, "count": 4}),
    "pairs": (pairs, (), {}),
}


def four_cases(rank):
    return {name: function(rank, *args, **options) for name, (function, args, options) in FOUR.items()}


@pytest.mark.slow
def test_four_processes_train_like_one():
    before = torch.get_default_dtype()
    ranks = run(four_cases, world_size=4)
    for name, (function, args, options) in FOUR.items():
        expected = function(None, *args, **{key: value for key, value in options.items() if key != "ddp"})
        for index, rank in enumerate(ranks):
            wanted = expected[index // 2 : index // 2 + 1] if name == "pairs" else expected
            torch.testing.assert_close(rank[name], wanted, rtol=1e-9, atol=1e-12, msg=lambda said: f"{name}: {said}")  # noqa: B023
    torch.set_default_dtype(before)


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
def test_the_others_stop_when_a_process_is_killed(tmp_path):
    command = [sys.executable, str(Path(__file__).parent / "killed.py"), str(tmp_path), "5", "3"]
    started = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT | {"RANK": str(rank)}) for rank in (0, 1)
    ]
    _, said = started[0].communicate(timeout=120)
    started[1].wait(timeout=120)
    assert started[0].returncode == 1
    assert started[1].returncode == -9
    assert "RuntimeError" in said
    assert "by peer" in said  # gloo says that the connection was closed or reset by peer


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_numbers(tmp_path):
    ends = []
    for name, killed in (("whole", []), ("killed", ["3"])):
        folder = tmp_path / name
        folder.mkdir()
        torchrun(Path(__file__).parent / "killed.py", str(folder), "6", *killed, options=["--max-restarts", "1"])
        ends.append(torch.load(folder / "end"))
    assert [end["begun"] for end in ends] == [0, 3]
    torch.testing.assert_close(ends[1]["found"], ends[0]["found"], rtol=0, atol=0)


def torchrun(script, *arguments, world_size=2, options=()):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size), *options]
    done = subprocess.run([*command, str(script), *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_other_peoples_loops_train_like_one_process(name, tmp_path):
    for library in LOOPS[name]:
        pytest.importorskip(library)
    script, folder = Path(__file__).parent / "ddp_loops.py", str(tmp_path)
    subprocess.run([sys.executable, str(script), name, folder], check=True, capture_output=True, env=ENVIRONMENT, timeout=240)
    expected = torch.load(tmp_path / "1_0")
    assert len(expected["diagonals"]) == STEPS
    assert all(weight.dtype == torch.float64 for weight in expected["weights"])
    torchrun(script, name, folder)
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"2_{rank}"), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_the_example_runs():
    assert "after 5 steps on 2 processes" in torchrun(ROOT / "examples/ddp_gpt.py", "--steps", "5")
