"""The optimizers on a CUDA device: the same numbers, no waiting for the device, and a step in a CUDA graph."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F
from training import batches, make_model

import hesscale
from hesscale.optim import BL89, AdaHesScale, AdaHesScaleGN, Adam

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIONS = [
    {},
    {"trust_radius": 1e-4},
    {"trust_radius": 1e-4, "curvature_every": 3},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"foreach": False},
]


def step(model, opt, x, y):
    device = next(model.parameters()).device
    opt.zero_grad()
    opt.backward(F.cross_entropy(model(x.to(device)), y.to(device)))
    opt.step()


def largest_difference(one, two) -> float:
    return max((p.cpu() - q.cpu()).abs().max().item() for p, q in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHesScaleGN, BL89, Adam])
def test_equal_to_a_cpu(optimizer, options):
    here, there = make_model(), make_model().cuda()
    one, two = (optimizer(model.parameters(), lr=0.01, **options) for model in (here, there))
    for x, y in batches(20):
        step(here, one, x, y)
        step(there, two, x, y)
    assert largest_difference(here, there) < 2e-6  # bias corrections are float32 numbers there


def test_no_step_waits_for_the_device():
    model = make_model().cuda()
    opt = AdaHesScale(model.parameters(), trust_radius=1e-3)
    x, y = (tensor.cuda() for tensor in next(batches(1)))
    step(model, opt, x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step(model, opt, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("before", [0, 3])
def test_a_nonfinite_step_changes_nothing(before):
    model = make_model().cuda()
    opt = AdaHesScale(model.parameters(), on_nonfinite="skip", weight_decay=0.1, decoupled_weight_decay=True, trust_radius=1e-3)
    for x, y in batches(before):
        step(model, opt, x, y)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict()["state"])
    opt.zero_grad()
    opt.backward(model(torch.full((1, 4), math.nan, dtype=torch.float64, device="cuda")).square().sum())
    opt.step()
    assert opt.nonfinite_steps == 1
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for i, entries in state.items():
        assert all(torch.equal(opt.state_dict()["state"][i][name], value) for name, value in entries.items())


def test_a_nonfinite_step_is_reported_later():
    model = make_model().cuda()
    opt = AdaHesScale(model.parameters())
    x, y = next(batches(1))
    torch.cuda._sleep(100_000_000)  # the first step's report is still under way when the second goes wrong
    step(model, opt, x, y)
    opt.zero_grad()
    opt.backward(model(torch.full((1, 4), math.nan, dtype=torch.float64, device="cuda")).square().sum())
    opt.step()
    reports = 0
    for _ in range(5):
        torch.cuda.synchronize()
        try:
            step(model, opt, x, y)
        except hesscale.NonFiniteError:
            reports += 1
    assert reports == 1


def test_a_silent_step_is_never_reported():
    model = make_model().cuda()
    opt = AdaHesScale(model.parameters())
    x, y = next(batches(1))
    with opt.without_nonfinite_errors():
        opt.backward(model(torch.full((1, 4), math.nan, dtype=torch.float64, device="cuda")).square().sum())
        opt.step()
    for _ in range(5):
        torch.cuda.synchronize()
        step(model, opt, x, y)
    assert opt.nonfinite_steps == 1


@pytest.mark.parametrize("options", [{}, {"trust_radius": 1e-4}])
@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHesScaleGN, Adam])
def test_a_whole_step_in_a_cuda_graph(optimizer, options):
    captured, eager = make_model().cuda(), make_model().cuda()
    one, two = (optimizer(model.parameters(), lr=0.01, capturable=True, **options) for model in (captured, eager))
    x, y = (tensor.cuda() for tensor in next(batches(1)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(captured, one, x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    one.zero_grad()
    with torch.cuda.graph(graph):
        step(captured, one, x, y)
    for _ in range(5):
        graph.replay()
    for _ in range(8):
        step(eager, two, x, y)
    assert largest_difference(captured, eager) == 0


@pytest.mark.parametrize(("source", "target"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_state_moves_between_devices(source, target):
    x, y = next(batches(1))
    first, second = make_model().to(source), make_model().to(target)
    one, two = (AdaHesScale(model.parameters(), trust_radius=1e-3) for model in (first, second))
    step(first, one, x, y)
    buffer = io.BytesIO()
    torch.save(one.state_dict(), buffer)
    buffer.seek(0)
    two.load_state_dict(torch.load(buffer, weights_only=True))
    step(second, two, x, y)
    assert float(two.state[second[0].weight]["curvature_step"]) == 2
