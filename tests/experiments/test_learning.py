"""Optimizers learn digits in a stated number of steps, the benchmark runs, and the bounds of docs/convergence.md hold."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from hesscale.optim import AdaHesScale, AdaHesScaleGN, AdaHessian

PATH = Path(__file__).parent.parent.parent / "benchmarks/learning.py"


@pytest.fixture(scope="module")
def learning():
    """The benchmark, which is a script and not part of a package."""
    spec = importlib.util.spec_from_file_location("learning", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["learning"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["learning"]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("optimizer", "step_size", "steps"),
    [(AdaHesScale, 0.01, 80), (AdaHesScaleGN, 0.01, 80), (torch.optim.Adam, 0.01, 80), (AdaHessian, 0.1, 150)],
)
def test_reaches_a_training_loss_of_0_3(learning, optimizer, step_size, steps):
    for seed in range(2):
        run = learning.train(optimizer, learning.digits(), seed, step_size, steps=steps, draws=optimizer is AdaHessian)
        assert run.losses[0] > 2
        assert run.steps_to(0.3) is not None, run.losses


def test_a_run_is_reproducible(learning):
    one, two = (learning.train(AdaHessian, learning.digits(), 3, 0.1, steps=10, draws=True) for _ in range(2))
    assert one == two


def test_a_diverged_run_never_wins(learning):
    run = learning.train(AdaHesScale, learning.digits(), 0, 1e30, steps=20)
    assert run.losses[-1] == run.validation_loss == math.inf
    assert len(run.losses) == 5
    assert run.steps_to(0.3) is None
    assert learning.summary(run.losses) == {"mean": None, "se": None}


def test_the_benchmark_writes_its_record_table_and_figure(learning, tmp_path, monkeypatch, capsys):
    names = ["AdaHesScale", "AdaHessian", "Scaled Adam, Δ = 1e-4"]
    monkeypatch.setattr(learning, "OPTIMIZERS", {name: learning.OPTIMIZERS[name] for name in names})
    monkeypatch.setattr(learning, "STEP_SIZES", (1e-3, 1e-2, 1e30))
    learning.main(["--seeds", "2", "--tuning-seeds", "1", "--steps", "30", "--out", str(tmp_path / "out")])
    assert "[3/3] Scaled Adam" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"learning.json", "learning.md", "learning.png"}
    record = json.loads((tmp_path / "out/learning.json").read_text())
    assert list(record["results"]) == names
    found = record["results"]["AdaHesScale"]
    assert found["step_size"] == 0.01
    assert found["validation_loss_by_step_size"]["1e+30"] is None
    assert len(found["steps_to"]["0.3"]) == 2
    assert len(found["training_loss"]) == 7
    assert (tmp_path / "out/learning.md").read_text().count("\n| ") == 1 + 1 + 3


def test_the_stored_table_is_that_of_the_stored_record(learning):
    folder = PATH.parent.parent / "results/learning"
    record = json.loads((folder / "learning.json").read_text(encoding="utf-8"))
    assert set(record["results"]) == set(learning.OPTIMIZERS) == set(learning.STYLES)
    assert learning.markdown(record) == (folder / "learning.md").read_text(encoding="utf-8")


class Waves:
    """Sample losses ℒ(θ, s) = Σ_k w_sk cos(u_sk·θ + p_sk): smooth, with every constant of docs/convergence.md known."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        samples, self.dimensions, waves = (int(torch.randint(1, 5, (), generator=generator)) for _ in range(3))
        shape = (samples, waves)
        self.w, self.p = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        self.u = torch.randn(*shape, self.dimensions, dtype=torch.float64, generator=generator)
        size = self.w.abs().unsqueeze(2)
        self.L = float((size * self.u.square().sum(2, keepdim=True)).sum(1).max())
        self.G = float((size * self.u.abs()).sum(1).max())
        self.H = float((size * self.u.square()).sum(1).max())

    def loss(self, theta):
        return (self.w * (self.u @ theta + self.p).cos()).sum(1).mean()

    def gradients(self, theta):
        return -((self.w * (self.u @ theta + self.p).sin()).unsqueeze(2) * self.u).sum(1)  # (sample, dimension)

    def curvatures(self, theta):
        return -((self.w * (self.u @ theta + self.p).cos()).unsqueeze(2) * self.u**2).sum(1)


@pytest.mark.parametrize("seed", range(40))
def test_one_step_inequalities_of_the_convergence_page(seed):
    """Both bounds on E f(θₜ₊₁), with the expectation over all samples and a batch of one."""
    f = Waves(seed)
    torch.manual_seed(seed)
    d, L, G, H = f.dimensions, f.L, f.G, f.H
    theta = torch.randn(d, dtype=torch.float64)
    before = torch.rand(d, dtype=torch.float64) * H**2
    beta2, epsilon = float(torch.rand(())), float(10 ** (2 * torch.rand(()) - 1))
    alpha = float(torch.rand(())) * 2 * epsilon / L
    g, v = f.gradients(theta), beta2 * before + (1 - beta2) * f.curvatures(theta) ** 2
    moved = theta - alpha * g / (v.sqrt() + epsilon)
    after = sum(f.loss(m) for m in moved) / len(moved)
    slope, variance = g.mean(0), (g - g.mean(0)).square().mean(0)

    gain = (alpha / epsilon - L * alpha**2 / (2 * epsilon**2)) * slope.square().sum()
    noise = (L * alpha**2 * variance.sum() + 4 * alpha * epsilon * d * G**2) / (2 * epsilon**2)
    assert after <= f.loss(theta) - gain + noise + 1e-12

    D = (beta2 * before).sqrt() + epsilon
    kappa = math.sqrt(1 - beta2) * H / (math.sqrt(1 - beta2) * H + epsilon)
    gain = alpha / 2 * (1 - kappa - L * alpha / epsilon) * (slope.square() / D).sum()
    noise = alpha / 2 * (kappa**2 / (1 - kappa) + L * alpha / epsilon) * (variance / D).sum()
    assert after <= f.loss(theta) - gain + noise + 1e-12


def test_the_known_denominator_is_close_and_the_factor_is_sharp():
    """0 ≤ 1/D − 1/(√v + ε) ≤ κ/D for |h| ≤ H, with equality for the first batch and |h| = H."""
    H, epsilon = 2.0, 0.1
    for beta2 in (0.0, 0.5, 0.999):
        before, h = torch.meshgrid(torch.linspace(0, H**2, 50), torch.linspace(-H, H, 51), indexing="ij")
        before, h = before.double(), h.double()
        D = (beta2 * before).sqrt() + epsilon
        kappa = math.sqrt(1 - beta2) * H / (math.sqrt(1 - beta2) * H + epsilon)
        share = 1 - D / ((beta2 * before + (1 - beta2) * h**2).sqrt() + epsilon)
        assert share.min() >= 0
        assert share.max() <= kappa + 1e-12
        assert share[0, 0] == pytest.approx(kappa)


def test_the_corrected_bound_is_the_sum_of_its_steps_and_the_printed_one_is_not():
    sympy = pytest.importorskip("sympy")
    alpha, epsilon, L, G, sigma, b, d, T, drop = sympy.symbols("α ε L G σ b d T drop", positive=True)
    gain = alpha / epsilon - L * alpha**2 / (2 * epsilon**2)
    noise = (L * alpha**2 * sigma**2 + 4 * alpha * epsilon * b * d * G**2) / (2 * b * epsilon**2)
    summed = (drop + T * noise) / (T * gain)
    start = 2 * epsilon**2 * drop / (T * alpha * (2 * epsilon - L * alpha))
    corrected = start + (L * alpha * sigma**2 + 4 * epsilon * b * d * G**2) / (b * (2 * epsilon - L * alpha))
    printed = start + 2 * epsilon**2 * (L * alpha * sigma**2 + 4 * b * G**2) / (b * (2 * epsilon - L * alpha))
    assert sympy.simplify(summed - corrected) == 0
    assert sympy.simplify(summed - printed) != 0
    assert sympy.simplify((summed - printed).subs(d, 1)) != 0
