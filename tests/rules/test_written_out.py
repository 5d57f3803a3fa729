"""Rules that cannot be compared with double backward, against explicit formulas.

PyTorch differentiates some operators twice wrongly (weight_norm, logcumsumexp), has some on CUDA only, and is not finite where
others are singular.
"""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from oracle import Separable, finite_differences, hessian_diagonal, separable_loss

import hesscale
from hesscale.estimators import estimate
from hesscale.rules import RULES


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def diagonals(function, inputs, g, s, dtype=torch.float64):
    """The engine's diagonals for gradient g and curvature s (either None) at the function's output."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves)
    cotangent = torch.zeros_like(y) if g is None else g.to(dtype)
    loss = Separable.apply(y, cotangent, None if s is None else s.to(dtype))
    return hesscale.grad(loss, leaves, outputs=y, head="rules")[1]


def log_of_running_sum(x):
    """logcumsumexp along the last dimension."""
    n = x.shape[-1]
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    return torch.where(later, -math.inf, x.unsqueeze(-2).expand(*x.shape, n)).logsumexp(-1)


def direction_times_length(dim):
    def weight_norm(v, length):
        return v * (length / v.square().sum([d for d in range(v.dim()) if d != dim], keepdim=True).sqrt())

    return weight_norm


WRITTEN_OUT = {
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), log_of_running_sum, [draw(3, 7)]),
    "logcumsumexp dim": (lambda x: x.logcumsumexp(0), lambda x: log_of_running_sum(x.t()).t(), [draw(5, 2)]),
    "logcumsumexp far apart": (
        lambda x: x.logcumsumexp(-1),
        log_of_running_sum,
        [torch.tensor([-300.0, 400.0, 399.0, -500.0, 401.0], dtype=torch.float64)],
    ),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), direction_times_length(0), [draw(4, 3), draw(4, 1)]),
    "weight_norm of a convolution": (
        lambda v, g: torch._weight_norm(v, g, 0),
        direction_times_length(0),
        [draw(4, 3, 2), draw(4, 1, 1)],
    ),
    "weight_norm last": (
        lambda v, g: torch._weight_norm(v, g, 2),
        direction_times_length(2),
        [draw(4, 3, 2), draw(1, 1, 2)],
    ),
}


@pytest.mark.parametrize("use", ["both", "gradient", "curvature"])
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_rule_equals_the_formula(name, use):
    function, formula, inputs = WRITTEN_OUT[name]
    inputs = [x.clone().requires_grad_() for x in inputs]
    y = formula(*inputs)
    torch.testing.assert_close(function(*inputs), y)
    g, s = (None if use == without else draw(*y.shape, seed=seed) for without, seed in (("curvature", 1), ("gradient", 2)))
    mine = diagonals(function, [x.detach() for x in inputs], g, s)
    for diagonal, x in zip(mine, inputs, strict=True):
        truth = hessian_diagonal(separable_loss(y, g, s), x)
        torch.testing.assert_close(diagonal, truth, rtol=1e-8, atol=1e-10)


def test_logcumsumexp_of_minus_infinity():
    x = torch.tensor([-math.inf, -math.inf, 1.0, -math.inf, 3.0], dtype=torch.float64)
    (mine,) = diagonals(lambda x: x.logcumsumexp(0), [x], draw(5), draw(5, seed=1))
    (truth,) = diagonals(lambda x: x.logcumsumexp(0), [x[2:]], draw(5)[2:], draw(5, seed=1)[2:])
    torch.testing.assert_close(mine, torch.cat([torch.zeros(2, dtype=torch.float64), truth]))


ZEROS = [[1.5, 0.0, -2.0, 0.7], [0.0, 0.8, 0.0, 1.2], [0.0, 0.0, 0.0, 0.0], [0.9, -1.1, 2.0, 0.4]]
CONSTANT = [[1.0, 1.0, 1.0], [1.0, 2.0, 4.0]]
SINGULAR = {
    **{f"norm {p}": (lambda x, p=p: torch.linalg.vector_norm(x, p, -1), ZEROS) for p in (1, 1.5, 2, 2.5, 3, 0.5, -1, math.inf)},
    "dist": (lambda x: torch.dist(x, torch.zeros_like(x)), [0.0, 0.0]),
    "std": (lambda x: x.std(-1), CONSTANT),
    "std_mean": (lambda x: torch.std_mean(x, -1)[0], CONSTANT),
    "std of one": (lambda x: x.std(-1), [[1.0], [2.0]]),
    "var of one": (lambda x: x.var(-1), [[1.0], [2.0]]),
    "logsumexp of nothing": (lambda x: x.logsumexp(-1), [[-math.inf, -math.inf], [1.0, -math.inf]]),
}


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", SINGULAR)
def test_singular_points(name):
    """What double backward returns where that is finite, else zero."""
    function, values = SINGULAR[name]
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    y = function(x)
    g, s = draw(*y.shape), draw(*y.shape, seed=1)
    truth = hessian_diagonal(separable_loss(y, g, s), x)
    (mine,) = diagonals(function, [x.detach()], g, s)
    torch.testing.assert_close(mine, torch.where(truth.isfinite(), truth, 0))


@pytest.mark.parametrize("use", ["both", "gradient", "curvature"])
@pytest.mark.parametrize("affine", [True, False])
def test_fused_rms_norm_equals_its_operators(affine, use):
    """Fusion must not change the number: the kernel that only CUDA has gives what a CPU gives operator by operator."""
    x, weight = draw(3, 2, 5), draw(2, 5, seed=1) if affine else None
    g, s = (None if use == without else draw(3, 2, 5, seed=seed) for without, seed in (("curvature", 2), ("gradient", 3)))
    inputs = [x, weight] if affine else [x]
    operators = diagonals(lambda x, *weight: F.rms_norm(x, (2, 5), *weight, eps=0.1), inputs, g, s)
    node = stub(
        "FusedRmsNormBackward0",
        inputs=[True, affine],
        input=x,
        weight=weight,
        normalized_shape=(2, 5),
        result1=(x.square().mean((1, 2), keepdim=True) + 0.1).rsqrt(),
    )
    fused = RULES["FusedRmsNormBackward0"].function(node, g, s)
    torch.testing.assert_close(fused[0], operators[0])
    if affine:
        torch.testing.assert_close(torch.zeros_like(weight) if fused[1] is None else fused[1].sum(0), operators[1])


def stub(name, inputs, **saved):
    """A node of an operator that does not exist on this machine."""
    edges = tuple((object(), 0) if needed else (None, 0) for needed in inputs)
    return SimpleNamespace(name=lambda: name, next_functions=edges, **{f"_saved_{key}": value for key, value in saved.items()})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["CudnnBatchNormBackward0", "MiopenBatchNormBackward0"])
def test_gpu_batch_norm_equals_the_native_one(name, training):
    """They save the same statistics, under the same names but for epsilon."""
    x, weight, bias = draw(4, 3, 5).requires_grad_(), draw(3, seed=1).requires_grad_(), draw(3, seed=2).requires_grad_()
    running = {"running_mean": draw(3, seed=3), "running_var": draw(3, seed=4).abs()}
    g, s = draw(4, 3, 5, seed=5), draw(4, 3, 5, seed=6)
    native = F.batch_norm(x, **running, weight=weight, bias=bias, training=training, eps=0.1).grad_fn
    statistics = {key: getattr(native, f"_saved_{key}") for key in ("result1", "result2", "running_mean", "running_var")}
    node = stub(name, inputs=[True] * 3, input=x.detach(), weight=weight.detach(), training=training, epsilon=0.1, **statistics)
    for mine, truth in zip(RULES[name].function(node, g, s), RULES[native.name()].function(native, g, s), strict=True):
        torch.testing.assert_close(mine, truth.detach(), rtol=0, atol=0)


LARGE_GROUPS = {
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(64, 2, 32, 32), (2,), (2,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (65536,), w, b), [(2, 65536), (65536,), (65536,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(2, 8, 64, 64), (8,), (8,)]),
    "std": (lambda x: x.std(-1), [(2, 65536)]),
    "norm": (lambda x: x.norm(dim=-1), [(2, 65536)]),
    "logsumexp": (lambda x: x.logsumexp(-1), [(2, 65536)]),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), [(2, 16384)]),
    "softmax": (lambda x: x.softmax(-1), [(2, 65536)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(2, 65536)]),
}


@pytest.mark.parametrize("shift", [0, 30])
@pytest.mark.parametrize("name", LARGE_GROUPS)
def test_float32_over_large_groups(name, shift):
    function, shapes = LARGE_GROUPS[name]
    inputs = [draw(*shape, seed=seed).float().double() for seed, shape in enumerate(shapes)]
    inputs[0] = (inputs[0] + shift).float().double()
    y = function(*inputs)
    g, s = draw(*y.shape, seed=7).float(), draw(*y.shape, seed=8).float()
    for single, double in zip(diagonals(function, inputs, g, s, torch.float32), diagonals(function, inputs, g, s), strict=True):
        assert (single.double() - double).abs().max() <= 1e-4 * double.abs().max()


def cumulated(*weights):
    return lambda z: ((z.logcumsumexp(1) * torch.tensor(weights)).sum(1) ** 2).sum()


TARGETS = torch.tensor([0, 2])
X, BIAS = (2, 3), (3,)
# PyTorch's double backward is wrong in these losses
TWICE_WRONG = {
    "layer_norm": (lambda z, b: F.cross_entropy(F.layer_norm(z, (3,), None, b), TARGETS), X, BIAS),
    "layer_norm, all": (lambda z, b: F.cross_entropy(F.layer_norm(z, (2, 3), None, b), TARGETS), X, X),
    "batch_norm": (lambda z, b: F.cross_entropy(F.batch_norm(z, None, None, None, b, True), TARGETS), X, BIAS),
    "batch_norm, fixed": (
        lambda z, b: F.cross_entropy(F.batch_norm(z, torch.zeros(3), torch.ones(3), None, b, False), TARGETS),
        X,
        BIAS,
    ),
    "batch_norm, images": (lambda z, b: F.batch_norm(z, None, None, None, b, True).logsumexp(1).sum(), (2, 3, 2, 2), BIAS),
    "instance_norm": (lambda z, b: F.instance_norm(z, bias=b).logsumexp(1).sum(), (1, 3, 4), BIAS),
    "logcumsumexp": (cumulated(1.0, 2.0, -1.0), X),
    "logcumsumexp, zeros": (cumulated(1.0, -1.0, 0.0), X),
    "logcumsumexp, last": (cumulated(0.0, 0.0, 1.0), X),
    "logcumsumexp, rows": (lambda z: (z.logcumsumexp(-2)[1] ** 2).sum(), X),
    "weight_norm": (lambda v, g: F.cross_entropy(torch._weight_norm(v, g, 0), TARGETS), X, (2, 1)),
    "weight_norm, columns": (lambda v, g: F.cross_entropy(torch._weight_norm(v, g, 1), TARGETS), X, (1, 3)),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", TWICE_WRONG)
def test_losses_that_torch_differentiates_twice_wrongly(name):
    """Here the head is differentiated twice by operators that are written out, against finite differences of gradients."""
    function, *shapes = TWICE_WRONG[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    _, diagonals = hesscale.grad(function(*inputs), inputs)
    exact = estimate("exact", function(*inputs), inputs)
    for i, (found, ours) in enumerate(zip(diagonals, exact, strict=True)):
        truth = finite_differences(function, inputs, i)
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("double_precision")
def test_logcumsumexp_where_nothing_has_come_yet():
    z = torch.tensor([[-torch.inf, 0.3, 1.0]], requires_grad=True)
    (gradient,), (found,) = hesscale.grad((z.logcumsumexp(1)[:, 1:].sum(1) ** 2).sum(), [z])
    rest = z.detach()[:, 1:].requires_grad_()
    (expected,), (exact,) = hesscale.grad(cumulated(1.0, 1.0)(rest), [rest])
    torch.testing.assert_close(gradient[:, 1:], expected)
    torch.testing.assert_close(found[:, 1:], exact)


CTC = {  # the loss, and whether PyTorch's mean divides by the targets' lengths
    "padded targets": (torch.tensor([[1, 2], [3, 3]]), [4, 5], [2, 2]),
    "targets in a row": (torch.tensor([1, 2, 3, 1]), [5, 4], [3, 1]),
    "unequal lengths": (torch.tensor([[1, 2, 1], [3, 0, 0]]), [5, 2], [3, 1]),
    "without an alignment": (torch.tensor([[1, 1], [3, 2]]), [2, 5], [2, 2]),
    "no symbols": (torch.tensor([[1, 1], [3, 2]]), [5, 5], [0, 2]),
}


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("name", CTC)
def test_ctc_is_exact_at_the_logits(name, how):
    """By double backward through the recursion over alignments, which PyTorch does not have."""
    targets, lengths, sizes = CTC[name]

    def loss(x):
        return F.ctc_loss(x.log_softmax(-1), targets, lengths, sizes, reduction=how, zero_infinity=True)

    x = draw(5, 2, 4).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", hesscale.CurvatureWarning)
        _, (found,) = hesscale.grad(loss(x), [x])
    torch.testing.assert_close(found, finite_differences(loss, [x], 0), rtol=1e-5, atol=1e-8)
