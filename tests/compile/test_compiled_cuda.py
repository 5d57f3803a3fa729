"""Compiled steps on a CUDA device: captured in a CUDA graph, and equal to eager mode."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from steps import Convolutional, ada, batches, cross_entropy, mlp, tensors_of, two_of
from torch import nn
from torch.optim import lr_scheduler

import hesscale
from hesscale.errors import CompileWarning
from hesscale.optim import AdaHesScale, AdaHesScaleGN, AdaHessian, Adam

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GRAPH = "compiled + CUDA graph"
OPTIMIZERS = {
    "AdaHesScale": lambda params: AdaHesScale(params, lr=0.01, trust_radius=1e-3),
    "AdaHesScaleGN": lambda params: AdaHesScaleGN(params, lr=0.01, weight_decay=0.01),
    "every third": lambda params: AdaHesScale(params, lr=0.01, curvature_every=3),
    "Adam": lambda params: Adam(params, lr=0.01, trust_radius=1e-3),
    "AdaHessian": lambda params: AdaHessian(params, lr=0.01),
    "torch's Adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "torch's SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double().cuda()


def loss_fn(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x.cuda(), torch.randint(0, 4, (size,), generator=generator).cuda()


def train(model, step, count, sizes=(32,)):
    torch.manual_seed(1)
    return torch.stack([step(*batch(sizes[i % len(sizes)])) for i in range(count)])


@pytest.mark.parametrize(("backend", "mode"), [("inductor", GRAPH), ("traced", "traced + CUDA graph")])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_equal_to_eager_mode(make, backend, mode):
    eager, compiled = network(), network()
    expected = train(eager, hesscale.compile_step(eager, loss_fn, make(eager.parameters()), backend="eager"), 30)
    step = hesscale.compile_step(compiled, loss_fn, make(compiled.parameters()), backend=backend)
    found = train(compiled, step, 30)
    assert step.mode == mode, step.reason
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # numbers such as the step size are float32 there
    for name, tensor in compiled.state_dict().items():
        torch.testing.assert_close(tensor, eager.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_losses_of_earlier_steps_are_not_overwritten():
    model = network()
    step = hesscale.compile_step(model, loss_fn, AdaHesScale(model.parameters(), lr=0.01))
    losses = [step(*batch()) for _ in range(10)]
    assert len({float(loss) for loss in losses}) == 10


def test_a_captured_step_does_not_wait_for_the_device():
    model = network()
    step = hesscale.compile_step(model, loss_fn, AdaHesScale(model.parameters(), trust_radius=1e-3))
    given = batch()
    for _ in range(5):
        step(*given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.mode == GRAPH


def test_dropout_masks_differ_between_steps_and_schedulers_work():
    model = network(dropout=0.5)
    optimizer = AdaHesScale(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.0)
    step = hesscale.compile_step(model, loss_fn, optimizer)
    losses = []
    for i in range(20):
        if i == 5:
            before = [p.detach().clone() for p in model.parameters()]
        losses.append(float(step(*batch())))
        scheduler.step()
    assert step.mode == GRAPH
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))  # a step size of zero
    assert len(set(losses[5:])) == 15  # of dropout alone


def test_new_shapes_and_loaded_state():
    eager, compiled = network(), network()
    make = OPTIMIZERS["AdaHesScale"]
    one, two = make(eager.parameters()), make(compiled.parameters())
    reference = hesscale.compile_step(eager, loss_fn, one, backend="eager")
    step = hesscale.compile_step(compiled, loss_fn, two)
    sizes = (32, 32, 7)
    train(eager, reference, 12, sizes)
    train(compiled, step, 12, sizes)
    saved, weights = two.state_dict(), {name: tensor.clone() for name, tensor in compiled.state_dict().items()}
    two.load_state_dict(saved)  # other tensors, at other addresses
    compiled.load_state_dict(weights)
    expected, found = train(eager, reference, 9, sizes), train(compiled, step, 9, sizes)
    assert step.mode == GRAPH
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_nonfinite_step_changes_nothing_and_is_reported():
    model = network()
    step = hesscale.compile_step(model, loss_fn, AdaHesScale(model.parameters(), lr=0.01))
    x, y = batch()
    for _ in range(5):
        step(x, y)
    before = [p.detach().clone() for p in model.parameters()]

    def go_on():
        for _ in range(40):
            step(x * torch.inf, y)
            torch.cuda.synchronize()

    with pytest.raises(hesscale.NonFiniteError):  # some steps later
        go_on()
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


def test_an_ensemble():
    models, singles = [[network() for _ in range(3)] for _ in range(2)]
    rates = (0.001, 0.01, 0.03)
    optimizers = [AdaHesScale(m.parameters(), lr=lr, trust_radius=1e-2) for m, lr in zip(models, rates, strict=True)]
    step = hesscale.func.ensemble(models, loss_fn, optimizers, batch_dims=None)
    losses = torch.stack([step(*batch()) for _ in range(12)])
    assert step.mode == GRAPH, step.reason
    for k, (model, lr) in enumerate(zip(singles, rates, strict=True)):
        optimizer = AdaHesScale(model.parameters(), lr=lr, trust_radius=1e-2)
        alone = hesscale.compile_step(model, loss_fn, optimizer, backend="eager")
        torch.testing.assert_close(losses[:, k], torch.stack([alone(*batch()) for _ in range(12)]), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("make", [ada, torch.optim.Adam, lambda p: torch.optim.SGD(p, 0.1, 0.9)], ids=["ours", "Adam", "SGD"])
def test_convolutions_with_schedules_and_loading(make):
    """Counters that were on the CPU before count on the device."""
    model = Convolutional().cuda()
    model.layers[3].p = 0.0  # random numbers on a device are not those of eager mode
    eager, other = two_of(model, make, backend="inductor")
    for step in (eager, other):
        optimizer = step.optimizer
        scheduler = lr_scheduler.StepLR(optimizer, 5, 0.5)
        for i, (x, y) in enumerate(batches(30)):
            step(x.cuda(), y.cuda())
            scheduler.step()
            if i == 15:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    found, expected = tensors_of(other), tensors_of(eager)
    torch.testing.assert_close(found, expected, check_dtype=False, check_device=False, rtol=1e-5, atol=1e-6)
    assert other.mode == GRAPH


@pytest.mark.usefixtures("double_precision")
def test_a_batch_on_the_cpu():
    model = mlp().cuda()
    step = hesscale.compile_step(model, lambda m, x, y: cross_entropy(m, x.cuda(), y.cuda()), ada(model.parameters()))
    with pytest.warns(CompileWarning, match="is on the cpu"):
        losses = [step(*batch) for batch in batches(1) * 5]
    assert losses[-1] < losses[0]
    assert step.mode == "compiled"


def test_function_transform():
    model = network()
    params, buffers = ({name: t.detach() for name, t in named} for named in (model.named_parameters(), model.named_buffers()))
    x, y = batch()

    def loss_of(params, buffers, x, y):
        return F.cross_entropy(torch.func.functional_call(model, (params, buffers), (x,)), y)

    transformed = hesscale.func.grad_and_hess_diag(loss_of)
    model.eval()
    _, _, expected = transformed(params, buffers, x, y)
    in_parts = torch.func.vmap(transformed, in_dims=(None, None, 0, 0))
    _, _, mapped = in_parts(params, buffers, x.view(2, 16, 6), y.view(2, 16))
    for name, diagonal in expected.items():
        torch.testing.assert_close(mapped[name].mean(0), diagonal)
