"""What an installed wheel must do where nothing but torch is installed. `make dist` runs it; it is no test of pytest's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import torch
from torch import nn
from torch.nn import functional as F

import hesscale


def main() -> None:
    assert importlib.util.find_spec("typer") is None, "this environment has more than torch; run `make dist`"
    assert "site-packages" in hesscale.__file__, f"hesscale is imported from {hesscale.__file__}, not from the wheel"

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    hesscale.backward(F.cross_entropy(model(x), y))
    probabilities = model(x).softmax(-1)
    expected = (probabilities - probabilities**2).mean(0)  # of the last bias; the mean over samples
    torch.testing.assert_close(model[2].bias.hess_diag, expected.detach())

    optimizer = hesscale.AdaHesScale(model.parameters(), lr=1e-2)
    step = hesscale.compile_step(model, lambda model, x, y: F.cross_entropy(model(x), y), optimizer, backend="traced")
    losses = [float(step(x, y)) for _ in range(20)]
    assert losses[-1] < losses[0], losses
    print(f"hesscale {hesscale.__version__} with torch {torch.__version__}: loss {losses[0]:.3f} to {losses[-1]:.3f}")

    found = subprocess.run([sys.executable, "-m", "hesscale.experiments.cli", "--help"], capture_output=True, text=True)
    print("without the extra experiments, the command says:", (found.stdout + found.stderr).strip().splitlines()[-1])


if __name__ == "__main__":
    main()
