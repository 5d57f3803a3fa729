"""Every floating dtype gives the float64 diagonal as closely as its digits allow, and float16 does not overflow on the way."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from case_runner import build, compute
from cases import CASES
from oracle import hessian_diagonal
from torch import nn

import hesscale

LOOSE = {torch.bfloat16: 0.1, torch.float16: 0.02, torch.float32: 1e-4, torch.float64: 1e-12}
HALVES = [torch.bfloat16, torch.float16]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


def convolutional() -> nn.Sequential:
    picture = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ELU(), nn.MaxPool2d(2)]
    return nn.Sequential(*picture, nn.Flatten(), nn.Linear(8, 4))


def cross_entropy(logits):
    return F.cross_entropy(logits, torch.arange(len(logits)) % 4)


def with_entropy(logits):
    """Needs double backward through the head."""
    return cross_entropy(logits) + 0.3 * (logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def diagonals(model, loss) -> list[torch.Tensor]:
    for p in model.parameters():
        p.grad = None
    hesscale.backward(loss)
    return [p.hess_diag for p in model.parameters()]


def assert_near(mine, truth, tolerance: float) -> None:
    """Within ``tolerance`` of the largest entry."""
    assert mine.isfinite().all()
    error = (mine.double() - truth).abs().max() if truth.numel() else 0
    assert error <= tolerance * truth.abs().max() if truth.numel() else True, f"off by {error:.3g} of {truth.abs().max():.3g}"


@pytest.mark.parametrize("loss", [cross_entropy, with_entropy])
@pytest.mark.parametrize("make", [perceptron, convolutional])
@pytest.mark.parametrize("dtype", LOOSE)
def test_models_in_every_dtype(dtype, make, loss):
    torch.manual_seed(0)
    model, x = make().to(dtype), torch.randn(8, 6).to(dtype)
    mine = [s.clone() for s in diagonals(model, loss(model(x)))]
    assert all(s.dtype == dtype for s in mine)
    model = model.double()
    for s, truth in zip(mine, diagonals(model, loss(model(x.double()))), strict=True):
        assert_near(s, truth, LOOSE[dtype])


@pytest.mark.parametrize("loss", [cross_entropy, with_entropy])
def test_autocast_forward(loss):
    """The forward pass in bfloat16, parameters and diagonals in float32."""
    torch.manual_seed(0)
    model, x = perceptron(), torch.randn(8, 6)
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model(x))
    mine = [s.clone() for s in diagonals(model, value)]
    assert all(s.dtype == torch.float32 for s in mine)
    model = model.double()
    for s, truth in zip(mine, diagonals(model, loss(model(x.double()))), strict=True):
        assert_near(s, truth, LOOSE[torch.bfloat16])


def test_float16_squares_do_not_overflow():
    """Activations of 400 square to 160,000, beyond float16's 65,504; the diagonal itself fits."""
    model = nn.Linear(3, 2).half()
    nn.init.constant_(model.weight, 300.0)
    x = torch.full((1, 3), 400.0, dtype=torch.float16, requires_grad=True)
    weight = model.weight.detach().requires_grad_()
    a = F.linear(x, weight) * 1e-3
    loss = (a * 1e-3).square().sum()
    _, (s_weight, s_x) = hesscale.grad(loss, [weight, x])
    torch.testing.assert_close(s_weight, torch.full((2, 3), 2e-12 * 400**2, dtype=torch.float16), rtol=0.02, atol=1e-7)
    torch.testing.assert_close(s_x, torch.full((1, 3), 4e-12 * 300**2, dtype=torch.float16), rtol=0.05, atol=1e-7)


@pytest.mark.parametrize("activation", [F.relu, F.leaky_relu, F.softplus, torch.square])
def test_float16_with_large_activations(activation):
    x = torch.tensor([[400.0, -3.0, 150.0]], dtype=torch.float16)
    weight = torch.tensor([[1.0, 0.5, -1.0], [0.25, 1.0, 1.0]], dtype=torch.float16, requires_grad=True)

    def diagonal(x, weight):
        h = activation(F.linear(x, weight)) / 64
        return hesscale.grad(F.mse_loss(h / 64, torch.ones_like(h)), weight)[1][0]

    assert_near(diagonal(x, weight), diagonal(x.double(), weight.detach().double().requires_grad_()), 0.02)


def curvature_in(name, dtype):
    """The case's diagonals in a low precision, and in float64 from the same rounded inputs."""
    inputs, outputs, draws = build(name, dtype)
    torch.autograd.grad(outputs, inputs, [g for g, _ in draws], retain_graph=True, allow_unused=True)
    torch.manual_seed(0)
    precise = [x.detach().double().requires_grad_() for x in inputs]
    precise_outputs = CASES[name].function(*precise)
    precise_outputs = [precise_outputs] if isinstance(precise_outputs, torch.Tensor) else list(precise_outputs)
    precise_outputs = [y for y in precise_outputs if y.requires_grad]
    precise_draws = [[draw.double() for draw in pair] for pair in draws]
    return lambda: compute(inputs, outputs, draws), lambda: compute(precise, precise_outputs, precise_draws)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.low_precision])
def test_rules_in_low_precision(name, dtype):
    try:
        mine, truth = curvature_in(name, dtype)
    except RuntimeError as error:
        pytest.skip(f"PyTorch itself does not: {str(error)[:80]}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", hesscale.CurvatureWarning)
        for s, expected in zip(mine(), truth(), strict=True):
            assert (s is None) == (expected is None)
            if s is not None:
                assert_near(s, expected, LOOSE[dtype])


def test_scalar_operands_keep_their_precision():
    """A Python number in a float64 model is not squared in the default dtype."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for loss in ((0.3 * x).square().sum(), (x / 0.7).square().sum()):
        torch.testing.assert_close(hesscale.grad(loss, x, retain_graph=True)[1][0], hessian_diagonal(loss, x), rtol=1e-14, atol=0)


def test_a_divisor_of_few_digits():
    """A float32 divisor is not squared in float32 where the quotient is float64."""
    x, y = torch.full((2,), 2.0, dtype=torch.float64, requires_grad=True), torch.full((2,), 1.5, dtype=torch.float32)
    (found,) = hesscale.grad(((x / y) ** 2).sum(), [x])[1]
    torch.testing.assert_close(found, torch.full_like(x, 2 / 1.5**2), rtol=1e-14, atol=0)


def mixed_norm(norm):
    """Normalized activations of 16 bits, with a weight and a bias of 32."""
    return lambda a, b: norm(a, b[0], b[1])


MIXED = {
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "power": lambda a, b: a**b,
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(torch.tensor([True, False, True]), a, b),
    "a cast before a product": lambda a, b: a @ b.to(a.dtype).T,
    "a product that is cast": lambda a, b: (a @ a.T).to(b.dtype) @ b,
    "in place": lambda a, b: (a * 1).mul_(b),
    "mse": lambda a, b: F.mse_loss(a, b),
    "cosine": lambda a, b: F.cosine_similarity(a, b),
    "soft labels": lambda a, b: F.cross_entropy(a, b.softmax(1)),
    "softmax": lambda a, b: a.softmax(1, dtype=torch.promote_types(a.dtype, b.dtype)) * b,
    "mean": lambda a, b: a.mean(0, dtype=b.dtype) * b,
    "rms norm": lambda a, b: F.rms_norm(a, (3,), b[0]),
    "layer norm": mixed_norm(lambda a, weight, bias: F.layer_norm(a, (3,), weight, bias)),
    "batch norm": mixed_norm(lambda a, weight, bias: F.batch_norm(a, None, None, weight, bias, training=True)),
    "group norm": mixed_norm(lambda a, weight, bias: F.group_norm(a, 1, weight, bias)),
}
PAIRS = [
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    *[pair for half in HALVES for pair in ((half, torch.float32), (torch.float32, half))],
]


@pytest.mark.parametrize("dtypes", PAIRS, ids=lambda pair: "-".join(str(dtype).removeprefix("torch.") for dtype in pair))
@pytest.mark.parametrize("name", MIXED)
def test_two_dtypes_in_one_model(name, dtypes):
    torch.manual_seed(0)
    inputs = [(torch.rand(4, 3) + 0.5).to(dtype).requires_grad_() for dtype in dtypes]
    try:
        y = MIXED[name](*inputs)
        torch.autograd.grad(y.sum(), inputs, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        pytest.skip(f"PyTorch itself does not: {str(error)[:80]}")
    precise = [x.detach().double().requires_grad_() for x in inputs]
    tolerance = max(LOOSE[dtype] for dtype in dtypes)
    wide = y if y.dtype in (torch.float32, torch.float64) else y.float()
    expected = hesscale.grad(MIXED[name](*precise).sin().square().sum(), precise)[1]
    for x, s, truth in zip(inputs, hesscale.grad(wide.sin().square().sum(), inputs)[1], expected, strict=True):
        assert s.dtype == x.dtype
        assert_near(s, truth, tolerance)
