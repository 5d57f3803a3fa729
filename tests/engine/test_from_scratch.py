"""The example that everything else generalizes: its numbers are those of ``hesscale.backward``."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hesscale

pytestmark = pytest.mark.usefixtures("double_precision")

PATH = Path(__file__).parents[2] / "examples" / "hesscale_from_scratch.py"
SAMPLES, WIDTHS = 7, (4, 6, 5, 3)


@pytest.fixture(scope="module")
def scratch():
    spec = importlib.util.spec_from_file_location("hesscale_from_scratch", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_layers():
    return [(torch.randn(n, m), torch.randn(n)) for m, n in itertools.pairwise(WIDTHS)]


LOSSES = {
    "cross_entropy": (F.cross_entropy, lambda: torch.randint(WIDTHS[-1], (SAMPLES,))),
    "squared_error": (F.mse_loss, lambda: torch.randn(SAMPLES, WIDTHS[-1])),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_diagonals_are_those_of_the_engine(scratch, name):
    loss_function, make_targets = LOSSES[name]
    layers, x, targets = make_layers(), torch.randn(SAMPLES, WIDTHS[0]), make_targets()
    inputs, outputs = scratch.forward(layers, x)
    found = scratch.backward(layers, inputs, *getattr(scratch, name)(outputs, targets))

    leaves = [(W.clone().requires_grad_(), b.clone().requires_grad_()) for W, b in layers]
    hesscale.backward(loss_function(scratch.forward(leaves, x)[1], targets))
    gradients = [(W.grad, b.grad) for W, b in leaves]
    diagonals = [(W.hess_diag, b.hess_diag) for W, b in leaves]
    torch.testing.assert_close(found, (gradients, diagonals), rtol=1e-12, atol=1e-14)


def test_the_script_prints_a_comparison(scratch, capsys):
    scratch.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert len(rows) == 3
    assert all(float(number) < 1e-6 for _, *numbers in rows for number in numbers)
