"""What is not supported for parameters that are sharded over processes raises an error before anything changes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor

import hesscale


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def fsdp1(strategy, use_orig_params):
    return lambda mesh: FullyShardedDataParallel(
        perceptron(), sharding_strategy=strategy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


def fsdp2(layers=(), root=True, **options):
    def make(mesh):
        model = perceptron()
        for layer in layers:
            fully_shard(model[layer], mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options) if root else model

    return make


MODELS = {
    **{
        f"FSDP1 {strategy.name} use_orig_params={original}": fsdp1(strategy, original)
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        for original in (False, True)
    },
    "FSDP2 root": fsdp2(),
    "FSDP2 root and layers": fsdp2(layers=(0, 2)),
    "FSDP2 root, not resharded": fsdp2(reshard_after_forward=False),
    "FSDP2 first layer alone": fsdp2(layers=(0,), root=False),
    "FSDP2 last layer alone": fsdp2(layers=(2,), root=False, reshard_after_forward=False),
    "FSDP2 in bfloat16": fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
}


def captured(optimizer, loss):
    with hesscale.capture(optimizer):
        loss.backward()


PASSES = {
    "hesscale.backward": lambda model: lambda loss: hesscale.backward(loss),
    "AdaHesScale.backward": lambda model: hesscale.AdaHesScale(model.parameters()).backward,
    "AdaHessian.backward": lambda model: hesscale.AdaHessian(model.parameters()).backward,
    "GGNMC.backward": lambda model: hesscale.GGNMC(model.parameters()).backward,
    "calibrate_every": lambda model: hesscale.AdaHesScaleGN(model.parameters(), calibrate_every=1).backward,
    "hesscale.grad": lambda model: lambda loss: hesscale.grad(loss, list(model.parameters())),
    "inputs": lambda model: lambda loss: hesscale.backward(loss, inputs=list(model.parameters())),
    "capture": lambda model: partial(captured, hesscale.AdaHesScale(model.parameters())),
}


def answers(rank):
    """For every way to shard a model and to start a pass: what is said, and whether something has changed by then."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    found = {}
    for name, make in MODELS.items():
        for kind, prepare in PASSES.items():
            if name.startswith("FSDP2") and kind in SUPPORTED:
                continue
            model = make(mesh)
            backward = prepare(model)
            try:
                backward(model(torch.randn(5, 3)).square().mean())
                said = "nothing"
            except hesscale.UnsupportedOperator as error:
                said = str(error)
            changed = [p for p in model.parameters() if p.grad is not None or getattr(p, "hess_diag", None) is not None]
            found[name, kind] = said, bool(changed)
    return found


SUPPORTED = ("hesscale.backward", "AdaHesScale.backward", "capture")


@pytest.mark.filterwarnings("ignore")  # FSDP1 is deprecated, and says so in several ways
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sharded_parameters_are_refused_before_anything_changes(world_size):
    for found in run(answers, world_size=world_size):
        for (name, kind), (said, changed) in found.items():
            assert "has sharded a parameter" in said, (name, kind, said)
            assert name[:5].rstrip("1") in said
            assert not changed, (name, kind)


def of_dtensors(rank):
    """What is said about models wholly of DTensors, on a mesh of one dimension and on one of two."""
    found = []
    for shape in ((1,), (1, 1)):
        mesh = init_device_mesh("cpu", shape)
        model = distribute_module(perceptron(), mesh)
        loss = model(distribute_tensor(torch.randn(5, 3), mesh)).square().mean()
        with pytest.raises(hesscale.UnsupportedOperator) as caught:
            hesscale.backward(loss if len(shape) == 1 else loss.full_tensor(), fallback="exact")
        assert all(p.grad is None and getattr(p, "hess_diag", None) is None for p in model.parameters())
        found.append(str(caught.value))
    return found


def test_dtensors_are_refused_elsewhere():
    ((of_the_loss, of_the_mesh),) = run(of_dtensors, world_size=1)
    assert "the loss is a DTensor" in of_the_loss
    assert "several dimensions" in of_the_mesh
