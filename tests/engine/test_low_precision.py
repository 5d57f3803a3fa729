"""``curvature_dtype``: the curvature's products in another dtype than the model's; gradients stay what they are, bit for bit."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from case_runner import build, expected, nodes_of
from cases import CASES
from oracle import Separable
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import hesscale
from hesscale.optim import BL89, GGNMC, AdaHesScale, AdaHesScaleGN, AdaHessian, Adam
from hesscale.rules import COMPLEX, RULES, attention, bilinear

PRODUCTS = {name for table in (RULES, COMPLEX) for name, rule in table.items() if rule.contraction}
LOW = torch.bfloat16
aten = torch.ops.aten


NAMES = [name for name in CASES if not PRODUCTS.isdisjoint(nodes_of(name))]


def test_every_product_has_a_case():
    recurrent = {name for name, rule in RULES.items() if rule.family == "recurrent"}
    elsewhere = {"LinearBackward0", *attention.NODES, *recurrent}  # test_attention.py, test_recurrent.py
    assert set().union(*map(nodes_of, NAMES)) >= PRODUCTS - elsewhere


def built(name: str, dtype: torch.dtype | None = None):
    """A case with positive curvature at its outputs, so that sums over them do not cancel."""
    inputs, outputs, draws = build(name, dtype)
    return inputs, outputs, [[g, s.abs()] for g, s in draws]


def compute(inputs, outputs, draws, curvature_dtype):
    loss = sum(Separable.apply(y, g, s) for y, (g, s) in zip(outputs, draws, strict=True))
    options = {"outputs": outputs, "head": "rules", "allow_unused": True, "retain_graph": True}
    return hesscale.grad(loss, inputs, curvature_dtype=curvature_dtype, **options)


def assert_near(mine, truth, tolerance: float) -> None:
    """Every entry within ``tolerance`` of itself, or of the largest one where terms of either sign may cancel."""
    if mine is None or not truth.numel():
        assert mine is not None or not truth.any()
        return
    truth = truth.to(mine.dtype)
    torch.testing.assert_close(mine, truth, rtol=tolerance, atol=0.5 * tolerance * float(truth.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_rules_in_bfloat16(name):
    case = built(name)
    gradients, diagonals = compute(*case, LOW)
    for mine, truth in zip(diagonals, expected(*case), strict=True):
        assert_near(mine, truth, 0.015)
        assert mine is None or mine.dtype == truth.dtype
    inputs, outputs, draws = case
    plain = torch.autograd.grad(outputs, inputs, [g for g, _ in draws], allow_unused=True)
    assert all((g is None and p is None) or torch.equal(g, p) for g, p in zip(gradients, plain, strict=True))


PAIRS = [
    (torch.float64, torch.float32, 1e-6),
    (torch.float64, torch.float64, 0),
    (torch.float32, torch.bfloat16, 0.015),
    (torch.float32, torch.float32, 0),
    (torch.float32, torch.float64, 1e-6),
    (torch.float16, torch.bfloat16, 0.015),
    (torch.bfloat16, torch.bfloat16, 0),
    (torch.bfloat16, torch.float32, 0.015),
]


@pytest.mark.parametrize(("dtype", "curvature_dtype", "tolerance"), PAIRS, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("name", NAMES)
def test_any_dtype_with_any_other(name, dtype, curvature_dtype, tolerance):
    """The model's own dtype changes no bit; another one as much as its digits, or the model's, say."""
    try:
        inputs, outputs, draws = built(name, dtype)
        torch.autograd.grad(outputs, inputs, [g for g, _ in draws], allow_unused=True, retain_graph=True)
    except RuntimeError as error:
        pytest.skip(f"PyTorch itself does not: {str(error)[:80]}")
    if any(y.dtype != dtype for y in outputs):
        pytest.skip("the model has more than one dtype, as there are no complex numbers of bfloat16")
    (g, s), (plain_g, plain_s) = (compute(inputs, outputs, draws, choice) for choice in (curvature_dtype, None))
    for mine, plain in zip((*g, *s), (*plain_g, *plain_s), strict=True):
        assert (mine is None) == (plain is None)
        if mine is not None and tolerance == 0:
            assert torch.equal(mine, plain)
    for mine, plain in zip(s, plain_s, strict=True):
        assert mine is None or mine.dtype == dtype
        if mine is not None:
            assert_near(mine, plain, tolerance)


def test_squares_are_rounded_once():
    """In the wider of the two dtypes: those of bfloat16 are exact in float32."""
    x = torch.randn(1000).to(torch.bfloat16)
    assert torch.equal(bilinear.squared(x, torch.zeros(())), x.float().square())
    assert torch.equal(bilinear.squared(x.float(), x), x.float().square().bfloat16())
    assert torch.equal(bilinear.squared(x.double() / 3, x), (x.double() / 3).square().bfloat16())


# what is computed in which dtype


class Products(TorchDispatchMode):
    """Counts matrix products and convolutions by operator and dtypes of their operands."""

    OPERATORS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution_backward, aten.mv, aten.addmv)

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in self.OPERATORS:
            self.seen[func.overloadpacket, frozenset(a.dtype for a in args if isinstance(a, torch.Tensor))] += 1
        return func(*args, **(kwargs or {}))


def products_of(run) -> Counter:
    with Products() as products:
        run()
    return products.seen


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.qkv(x.view(len(x), 4, 8)).chunk(3, -1)
        scores = torch.baddbmm(torch.zeros(()), q, k.mT, alpha=8**-0.5)
        return self.out(torch.bmm(scores.softmax(-1), v).mean(1))


MODELS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)), 5),
    "without bias": (lambda: nn.Sequential(nn.Linear(32, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)), 3),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 4, 4)),
            nn.Conv2d(2, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ELU(),
            nn.Conv2d(8, 4, 2, stride=2),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 2, 2),
            nn.Flatten(),
            nn.Linear(18, 4),
        ),
        5,
    ),
    "attention": (Attention, 7),
}


@pytest.mark.parametrize("model", MODELS)
def test_curvature_products_are_in_bfloat16_and_no_others(model):
    """What a pass with curvature computes beyond the plain one: two products per layer (one in the first), all in bfloat16."""
    make, count = MODELS[model]
    torch.manual_seed(0)
    model, x = make(), torch.randn(16, 32)
    plain, precise, low = (
        products_of(lambda run=run: run(F.cross_entropy(model(x), torch.arange(16) % 4)))
        for run in (torch.Tensor.backward, hesscale.backward, lambda loss: hesscale.backward(loss, curvature_dtype=LOW))
    )
    assert {dtypes for _, dtypes in low - plain} == {frozenset({torch.bfloat16})}
    assert {dtypes for _, dtypes in precise - plain} == {frozenset({torch.float32})}
    assert (low - plain).total() == (precise - plain).total() == count
    assert not plain - low


def test_linear_as_one_operator():
    """Only Apple GPUs make this node; the rule reads nothing else of it."""
    x, w = torch.randn(2, 3, 4), torch.randn(5, 4)
    edges = ((object(), 0),) * 3
    node = types.SimpleNamespace(_saved_input=x, _saved_weight=w, next_functions=edges, name=lambda: "LinearBackward0")
    s = torch.rand(2, 3, 5)
    for dtype, tolerance in ((torch.float32, 1e-6), (LOW, 0.015)):
        shares = bilinear.linear_layer(node, s.to(dtype))
        assert all(share.dtype == dtype for share in shares)
        truth = [s @ w.square(), torch.einsum("bto,bti->oi", s, x.square()), s]
        for share, expected_share in zip(shares, truth, strict=True):
            assert_near(share.float(), expected_share, tolerance)


# networks


def batch(seed: int = 0):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(16, 32, generator=generator, device="cpu").to(torch.get_default_device()), torch.arange(16) % 4


def filled(model, loss, **options):
    model.zero_grad()
    hesscale.backward(loss, **options)
    return [p.grad.clone() for p in model.parameters()], [p.hess_diag.clone() for p in model.parameters()]


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
@pytest.mark.parametrize("model", MODELS)
def test_networks(model, method):
    torch.manual_seed(0)
    model, (x, y) = MODELS[model][0](), batch()
    gradients, diagonals = filled(model, F.cross_entropy(model(x), y), method=method)
    low_gradients, low_diagonals = filled(model, F.cross_entropy(model(x), y), method=method, curvature_dtype=LOW)
    assert all(map(torch.equal, gradients, low_gradients))
    assert not all(map(torch.equal, diagonals, low_diagonals))
    for mine, precise in zip(low_diagonals, diagonals, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - precise).abs().sum() <= 0.02 * precise.abs().sum()


def test_the_share_of_a_bias_is_not_rounded():
    model, (x, y) = nn.Linear(32, 4), batch()
    _, (weight, bias) = filled(model, F.cross_entropy(model(x), y))
    _, (low_weight, low_bias) = filled(model, F.cross_entropy(model(x), y), curvature_dtype=LOW)
    assert torch.equal(bias, low_bias)
    assert not torch.equal(weight, low_weight)


@pytest.mark.parametrize("curvature_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", ["perceptron", "convolutional"])
def test_autocast(model, curvature_dtype):
    """The forward pass in bfloat16: factors and s are already, so that bfloat16 changes nothing."""
    torch.manual_seed(0)
    model, (x, y) = MODELS[model][0](), batch()

    def loss():
        with torch.autocast(x.device.type, torch.bfloat16):
            return F.cross_entropy(model(x), y)

    gradients, diagonals = filled(model, loss())
    low_gradients, low_diagonals = filled(model, loss(), curvature_dtype=curvature_dtype)
    assert all(map(torch.equal, gradients, low_gradients))
    for mine, plain in zip(low_diagonals, diagonals, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - plain).abs().sum() <= 0.02 * plain.abs().sum()
        assert curvature_dtype != LOW or torch.equal(mine, plain)


MANY = 20_000
SUMS = {
    "linear": (lambda: nn.Linear(3, 2), lambda: torch.randn(MANY, 3)),
    "conv1d": (lambda: nn.Conv1d(3, 2, 3), lambda: torch.randn(20, 3, MANY // 20)),
    "conv2d": (lambda: nn.Conv2d(3, 2, 3), lambda: torch.randn(MANY // 100, 3, 10, 10)),
    "conv2d depthwise": (lambda: nn.Conv2d(3, 3, 3, groups=3), lambda: torch.randn(MANY // 100, 3, 10, 10)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(3, 2, 3), lambda: torch.randn(MANY // 100, 3, 10, 10)),
    "embedding": (lambda: nn.Embedding(3, 2), lambda: torch.randint(3, (MANY,))),
    "embedding bag": (lambda: nn.EmbeddingBag(3, 2), lambda: torch.randint(3, (20, MANY // 20))),
    "embedding bag mean": (lambda: nn.EmbeddingBag(3, 2, mode="mean"), lambda: torch.randint(3, (20, MANY // 20))),
}


@pytest.mark.parametrize("name", SUMS)
def test_long_sums_do_not_stall(name):
    """A sum kept in bfloat16 would stop growing at 256 equal terms."""
    make, draw = SUMS[name]
    torch.manual_seed(0)
    model, x = make(), draw()

    def loss():
        return (model(x) - 0.3).square().pow(1.5).sum()

    _, diagonals = filled(model, loss())
    for mine, precise in zip(filled(model, loss(), curvature_dtype=LOW)[1], diagonals, strict=True):
        torch.testing.assert_close(mine, precise, rtol=0.01, atol=0)


def test_rules_with_several_outputs_keep_their_tuple():
    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x[:2].clone(), x[2:].clone()

        @staticmethod
        def backward(ctx, first, second):
            return torch.cat([first, second])

    @hesscale.register_rule("HalvesBackward", curved=False, many=True, contraction=True)
    def halves(node, g, s):
        """each half has its own"""
        return torch.cat(s)

    try:
        x = torch.randn(4, requires_grad=True)
        first, second = Halves.apply(x)
        hesscale.backward((first**2).sum() + (second**3).sum(), curvature_dtype=LOW)
    finally:
        del RULES["HalvesBackward"]
    torch.testing.assert_close(x.hess_diag, torch.cat([torch.full((2,), 2.0), 6 * x.detach()[2:]]))


# tracing


@pytest.mark.parametrize("model", MODELS)
def test_traced_and_mapped(model):
    """One flat graph of tensor operations with products in bfloat16, which vmap maps over networks."""
    torch.manual_seed(0)
    model, (x, y) = MODELS[model][0](), batch()
    names = [name for name, _ in model.named_parameters()]

    def diagonals(*params):
        params = [p.detach().requires_grad_() for p in params]
        buffers = dict(model.named_buffers())
        loss = F.cross_entropy(torch.func.functional_call(model, {**dict(zip(names, params, strict=True)), **buffers}, (x,)), y)
        return hesscale.grad(loss, params, curvature_dtype=LOW)[1]

    given = [p.detach() for p in model.eval().parameters()]
    with torch.autograd.set_multithreading_enabled(False):
        graph = make_fx(diagonals, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    dtypes = {
        n.meta["val"].dtype
        for n in graph.graph.nodes
        if n.op == "call_function" and n.target in (aten.mm.default, aten.bmm.default)
    }
    assert dtypes == {torch.float32, torch.bfloat16}
    mine = diagonals(*given)
    for one, two in zip(mine, graph(*given), strict=True):
        torch.testing.assert_close(one, two, rtol=0.01, atol=0.005 * float(one.abs().max()))
    several = [torch.stack([p, 2 * p]) for p in given]
    for one, two in zip(mine, torch.func.vmap(graph)(*several), strict=True):
        torch.testing.assert_close(one, two[0], rtol=0.02, atol=0.01 * float(one.abs().max()))


# the option


@pytest.mark.parametrize("wrong", [torch.float16, torch.int32, "bfloat16"])
def test_other_dtypes_are_refused(wrong):
    w = torch.randn(3, requires_grad=True)
    match = f"curvature_dtype={wrong!r} is not one of None, torch.bfloat16"
    with pytest.raises(ValueError, match=match):
        hesscale.backward((w**3).sum(), curvature_dtype=wrong)
    with pytest.raises(ValueError, match=match):
        hesscale.grad((w**3).sum(), w, curvature_dtype=wrong)
    with pytest.raises(ValueError, match=match):
        AdaHesScale([w], curvature_dtype=wrong)
    assert w.grad is None
    assert not hasattr(w, "hess_diag")


def trained(optimizer, fill=None, **options):
    """The parameters after a few steps; ``fill(loss)`` in place of the optimizer's own backward."""
    torch.manual_seed(0)
    model = MODELS["perceptron"][0]()
    opt = optimizer(model.parameters(), lr=0.01, **options)
    for i in range(4):
        x, y = batch(i)
        opt.zero_grad()
        (fill or opt.backward)(F.cross_entropy(model(x), y))
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"trust_radius": 1e-3}, {"weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("optimizer", [AdaHesScale, AdaHesScaleGN, BL89, Adam])
def test_optimizers_step_by_the_diagonals_of_their_dtype(optimizer, options):
    precise, low = (trained(optimizer, curvature_dtype=choice, **options) for choice in (None, LOW))
    filled = trained(optimizer, lambda loss: hesscale.backward(loss, method=optimizer.method, curvature_dtype=LOW), **options)
    assert all(map(torch.equal, low, filled))
    assert all(map(torch.equal, low, precise)) == (optimizer is Adam)  # whose trust region does not bind here


@pytest.mark.parametrize("optimizer", [AdaHessian, GGNMC])
def test_curvature_dtype_has_no_effect_on_sampled_optimizers(optimizer):
    precise, low = (
        trained(optimizer, curvature_dtype=choice, generator=torch.Generator("cpu").manual_seed(1)) for choice in (None, LOW)
    )
    assert all(map(torch.equal, precise, low))


def test_hooked_loops_take_the_optimizers_choice():
    """``hesscale.capture`` is for loops that call ``loss.backward()`` themselves."""
    torch.manual_seed(0)
    model, (x, y) = MODELS["perceptron"][0](), batch()
    opt = AdaHesScale(model.parameters(), curvature_dtype=LOW)
    with hesscale.capture(opt):
        F.cross_entropy(model(x), y).backward()
    captured = [p.hess_diag.clone() for p in model.parameters()]
    assert all(map(torch.equal, captured, filled(model, F.cross_entropy(model(x), y), curvature_dtype=LOW)[1]))


# the benchmark of the error

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def curvature_error(monkeypatch):
    """The benchmark, which is a script and not part of a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("curvature_error")
    for name in ("curvature_error", "learning"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["perceptron", "convolutional", "residual", "transformer"])
def test_measured_errors(curvature_error, name):
    """A few thousandths, and the exact diagonal left out; every diagonal is measured."""
    problem = curvature_error.Problem(getattr(curvature_error, name), curvature_error.digits().train, 1, 0.01, has_exact=False)
    model = problem.network(0)
    found = curvature_error.errors(model, problem)
    assert set(found["hesscale"]["error"]) == {name for name, _ in model.named_parameters()}
    assert all(0 < found[method]["all"] <= found[method]["worst"] < 0.01 for method in curvature_error.METHODS)
    assert found["hesscale"]["smallest_cosine"] > 0.9999
    assert "to_the_exact_diagonal" not in found


def test_distances(curvature_error):
    one, two = torch.tensor([1.0, -2.0]), torch.tensor([4.0])
    found = curvature_error.distances(["a", "b"], [one + torch.tensor([0.05, 0.4]), 1.5 * two], [one, two])
    assert found["error"] == pytest.approx({"a": 0.15, "b": 0.5}, rel=1e-3)
    assert found["all"] == pytest.approx(2.45 / 7, rel=1e-3)
    assert found["worst_parameter"] == "b"
    assert found["off_by_a_tenth"] == pytest.approx(2 / 3, rel=1e-3)
    assert found["cosine"]["b"] == 1


def test_training_of_the_benchmark(curvature_error):
    problem = curvature_error.Problem(curvature_error.perceptron, curvature_error.digits().train, 1, 0.01)
    options = types.SimpleNamespace(seeds=2, steps=3)
    found = curvature_error.compare(problem, AdaHesScaleGN, 0.003, options)
    assert set(found["mean"]) == {"float32", "bfloat16", "float64"}
    assert abs(found["difference"]["bfloat16"]["mean"]) < 0.01


def test_the_record_is_what_the_pages_say(curvature_error):
    folder = ROOT / "results/curvature_error"
    record = json.loads((folder / "curvature_error.json").read_text(encoding="utf-8"))
    written = (folder / "curvature_error.md").read_text(encoding="utf-8")
    assert curvature_error.markdown(record) == written
    page = (ROOT / "docs/precision.md").read_text(encoding="utf-8")
    tables = [line for line in page.splitlines() if line.startswith("|")]
    assert tables
    assert set(tables) <= set(written.splitlines())
    assert record["command"] in page
