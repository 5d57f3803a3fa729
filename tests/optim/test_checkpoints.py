"""State dicts, copies and pickles: training continues as if uninterrupted."""

from __future__ import annotations

import base64
import copy
import io
import math
import pickle
import zlib

import pytest
import torch
import torch.nn.functional as F
from training import OURS, assert_same, batches, make_model, train, weight

from hesscale.optim import GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam


@pytest.mark.parametrize("optimizer", OURS)
def test_state_survives_saving(optimizer):
    """Ten steps, saved and loaded (weights only), and ten more equal twenty in one go."""
    options = {"lr": 0.01, "trust_radius": 1e-3, "curvature_every": 3}
    whole, parts = make_model(), make_model()
    first = optimizer(whole.parameters(), **seeded(optimizer, 0), **options)
    train(whole, first, 20)
    second = optimizer(parts.parameters(), **seeded(optimizer, 0), **options)
    data = list(batches(20))
    run(parts, second, data[:10])
    buffer = io.BytesIO()
    torch.save({"model": parts.state_dict(), "optimizer": second.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    resumed = make_model()
    third = optimizer(resumed.parameters(), **options)
    if hasattr(second, "generator"):
        third.generator = second.generator
    resumed.load_state_dict(saved["model"])
    third.load_state_dict(saved["optimizer"])
    run(resumed, third, data[10:])
    assert_same(resumed, [p.detach() for p in whole.parameters()])


def seeded(optimizer, seed):
    return {"generator": torch.Generator().manual_seed(seed)} if optimizer in (AdaHessian, GGNMC) else {}


def run(model, opt, data):
    for x, y in data:
        opt.zero_grad()
        opt.backward(F.cross_entropy(model(x), y))
        opt.step()


def test_saving_is_weights_only():
    model = make_model()
    opt = AdaHesScale(model.parameters(), trust_radius=1e-3)
    train(model, opt, 2)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    assert not math.isnan(float(torch.load(buffer, weights_only=True)["state"][0]["curvature_step"]))


@pytest.mark.parametrize("optimizer", OURS)
@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_and_pickles_continue_training(optimizer, how):
    model = make_model()
    opt = optimizer(model.parameters(), lr=0.01, trust_radius=1e-3, curvature_every=2)
    train(model, opt, 3)
    twin, other = how((model, opt))
    state = torch.get_rng_state()
    train(model, opt, 3)
    torch.set_rng_state(state)
    train(twin, other, 3)
    assert_same(twin, [p.detach() for p in model.parameters()])


def test_counters_keep_counting_in_bfloat16():
    w = weight(dtype=torch.bfloat16)
    opt = AdaHesScale([w], lr=0.01)
    opt.backward((w**2).sum())
    opt.step()
    opt.state[w]["curvature_step"].fill_(301)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    opt.backward((w**2).sum())
    opt.step()
    assert float(opt.state[w]["curvature_step"]) == 302


def test_calibration_is_not_rounded_when_it_is_loaded():
    w = weight(dtype=torch.bfloat16)
    opt = AdaHesScaleGN([w], calibrate_every=1)
    opt.backward((w**2).sum())
    opt.step()
    opt.state[w]["calibration_sums"].copy_(torch.tensor([1.001, 1.003]))
    other = AdaHesScaleGN([w], calibrate_every=1)
    other.load_state_dict(opt.state_dict())
    assert torch.equal(other.state[w]["calibration_sums"], torch.tensor([1.001, 1.003]))


def test_an_optimizer_of_a_version_without_calibration():
    model = make_model()
    optimizer = AdaHesScaleGN(model.parameters())
    del optimizer.calibrate_every, optimizer.generator
    model, found = copy.deepcopy((model, optimizer))
    train(model, found, 2)
    assert found.calibrate_every is None


def test_states_of_other_optimizers():
    w = weight()
    theirs = torch.optim.Adam([w], lr=0.5)
    (w**2).sum().backward()
    theirs.step()
    ours = Adam([w], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert float(ours.state[w]["step"]) == 2
    bounded = AdaHesScale([w])
    bounded.load_state_dict(theirs.state_dict())
    assert (bounded.param_groups[0]["graft"], bounded.param_groups[0]["lr"]) == ((1.0, 1.0), 0.5)
    bounded.backward((w**2).sum())
    bounded.step()
    curvature = AdaHesScale.paper([w])
    curvature.backward((w**2).sum())
    curvature.step()
    w.grad = torch.ones(1, dtype=torch.float64)
    wrong = Adam([w])
    wrong.load_state_dict(curvature.state_dict())
    with pytest.raises(RuntimeError, match="exp_avg_sq"):
        wrong.step()


# (w, optimizer) after two steps and one that was not finite, written before the non-finite check had its present name
EARLIER_PICKLE = """
eNrdV01vG0UYXm/sxHGcNnw0UgSHFvrhNFXk2LGdcMCllAbJNIQWqb5Uq/HuxLOw3q+ZTWpQpPSQEqMRF4YDiB8AN64c+AOIIoHEoVeEkJCQKhAS
QqoE7+yuN26UgI8ke/Bo3332nZ3nfeaZ19vpj549oYQXn2SOr5N5jWGbOr7gpzQftwLTMrR13+lorOtibaMkPhQFno+hATMtKviTCTJ6N4LxTIgS
fPTNKKN8M56EwoDaWPApzXJQPEOryzAF1JV8SlG21fdz1qNPr/11+q3P1mbmt9Xrv4zA75anFJpT8Lmu7zBHdyxtA/vUdGwvBYDmJDyxTMYsrGHb
MJHtqbvNHATDr6fmO5h6I1teutDMQJASx2depqE2R+DOtJk32kg30zKHY7e9sUY6CGDOQnNMgqNP9hQ9XELuqhO0LHwziua8VFPyuLxYLS1VK6WF
WrG6WPSixLobeCMNdZV56Tcg3W1POQibQvNqVAnlq+8mL691H9b7o9gRN0RDaag7opHaEbt8AhZuYZ3BuoH+idd9A/vYuGrqDOibvSGY2BJ8nGBK
NSChLVYpgwx8RkZ0ZOF5x2VmJ/oFTnyZ5CUDvYrpTflYJrkLKQo8a+B1FFiMhneq5YuV+pcfy+sTnmlhhigEfv1GXvdX6g///PbB9Htz9wQfwS48
efGV7gc/FvkLPL+JzTZhmoF11BUr8TIVPg0BJ3AtbGiPIXqgMD+gTPORYQZyjrXW9e9/+/wRP9kyEdV0x/ej5QMZU3rgbyAW+FjbRH4ncIEqnu2g
O+HaINfYuuNjBEpc5TkduYBEUDnRC3iGMsSwIE/wiXihRsQhz0o9M1PSm45jsghkRvIwhu+4GtpoC5IpkIkjL9faYqlSLJerw8g1wQ7I9esf7k67
1d/r/XGfXHvkqVCSIMA0ZdiNWHv57/89ZdfAmtghjNWK5erC44ylDmMsxgJjKSW5Lscszc4O8DMhhRVuW+odG3HVyrX9VB0qrhg7IK6frvyx9oz2
c70/Hi6uE3s+cFxkVlparpYrpaFk1sf+t8wCyvMu8lFHa/vgvlTcDt19NIzJOzKDyJnE6Mlz5HlyNjFzci7xb3K+Ry4k3kwKu2S2oZCLPTK3Si71
eE6WAbw6sJloqAHieXngOLZmow4c9AVyBlKfJefIeXKBFMgsuUjmyCUmEvPHbenwfDw5pwQ/uVdkDAXrgggGY4YsD/h8NpxVHmxyZeO2Y6+btimt
PtxU6lHYVK8B5JAtVV6uVMvDyaKPHZBFfzzIgXIdjCgwaZwuHg+uKstFaLKGc+o+doAr9V+4yoa91LFhCs6p0uKwqoqxwzEFjdYmYvKvwNP7OtA4
nLkVjknbmZcmkexZaBveNsHPW0TnWR+7sHpsyI0/6PgYy14wBy+ajEIj2BWrQQv6UIakoYX1SR/5vxXVamVhaXGYCiXYgQpptx68+0Xtfv2ACiF+
ao9Lk2qBHWkbmuTWPTH/D/yfYRY=
"""


def test_pickles_of_earlier_versions_load():
    w, opt = pickle.loads(zlib.decompress(base64.b64decode(EARLIER_PICKLE)))
    assert (opt.nonfinite_steps, opt.on_nonfinite) == (1, "skip")
    assert float(opt.state[w]["step"]) == 2
    opt.backward((w**4).sum())
    opt.step()
    torch.testing.assert_close(w.detach(), torch.full((2,), 0.9758143678428991, dtype=torch.float64))
    again = pickle.loads(pickle.dumps(opt))
    assert again.nonfinite_steps == 1


def test_a_copy_of_an_optimizer_with_a_scheduler_moves_its_own_parameters():
    model = make_model()
    optimizer = AdaHesScale(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # wraps the optimizer's step
    other_model, other = copy.deepcopy((model, optimizer))
    before = model[0].weight.detach().clone()
    train(other_model, other, 1)
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(other_model[0].weight, before)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.1


def test_an_optimizer_of_a_version_without_curvature_warmup():
    model = make_model()
    optimizer = AdaHesScale(model.parameters())
    del optimizer.defaults["curvature_warmup"], optimizer.param_groups[0]["curvature_warmup"]
    optimizer.option_names = tuple(optimizer.defaults)
    model, found = copy.deepcopy((model, optimizer))
    train(model, found, 1)
    assert found.param_groups[0]["curvature_warmup"] == 0
    assert "curvature_warmup" in found.option_names
