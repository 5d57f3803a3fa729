"""The backend follows the conventions of laplace-torch, and has the same diagonal where HesScaleGN is exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hesscale.estimators import estimate
from hesscale.uses.gauss_newton import gauss_newton

laplace = pytest.importorskip("laplace")
from laplace.curvature import BackPackGGN, CurvlinopsGGN  # noqa: E402

from hesscale.uses.laplace import HesScaleGN  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Full backward hook:UserWarning"),
]
LIKELIHOODS = ("classification", "regression")


def loader(likelihood, count=7):
    x = torch.randn(count, 4)
    y = torch.randint(0, 3, (count,)) if likelihood == "classification" else torch.randn(count, 3)
    return DataLoader(TensorDataset(x, y), batch_size=3)


def deep():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def fitted(model, likelihood, batches, weights="all", **options):
    found = laplace.Laplace(copy.deepcopy(model), likelihood, weights, "diag", **options)  # BackPACK puts hooks on its model
    found.fit(batches)
    return found


class TestEqualsTheirs:
    """Where HesScaleGN is exact."""

    @pytest.mark.parametrize("backend", [BackPackGGN, CurvlinopsGGN])
    @pytest.mark.parametrize("likelihood", LIKELIHOODS)
    def test_one_layer(self, likelihood, backend):
        batches, model = loader(likelihood), nn.Linear(4, 3)
        ours = fitted(model, likelihood, batches, backend=HesScaleGN)
        theirs = fitted(model, likelihood, batches, backend=backend)
        self.compare(ours, theirs, batches)

    @pytest.mark.parametrize("likelihood", LIKELIHOODS)
    def test_last_layer(self, likelihood):
        batches, model = loader(likelihood), deep()
        ours = fitted(model, likelihood, batches, "last_layer", backend=HesScaleGN)
        theirs = fitted(model, likelihood, batches, "last_layer", backend=CurvlinopsGGN)
        assert ours.H.shape == (18,)
        self.compare(ours, theirs, batches)

    def test_the_last_two_layers_under_squared_error(self):
        batches, model = loader("regression"), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        ours = fitted(model, "regression", batches, backend=HesScaleGN, sigma_noise=0.3)
        theirs = fitted(model, "regression", batches, backend=CurvlinopsGGN, sigma_noise=0.3)
        self.compare(ours, theirs, batches)

    def test_frozen_parameters_and_some_of_a_network(self):
        batches, model = loader("regression"), nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        model[0].weight.requires_grad_(False)
        ours = fitted(model, "regression", batches, backend=HesScaleGN)
        theirs = fitted(model, "regression", batches, backend=CurvlinopsGGN)
        self.compare(ours, theirs, batches)
        some = torch.tensor([1, 5, 8, 20])
        of_some = [
            fitted(model, "regression", batches, "subnetwork", backend=backend, subnetwork_indices=some)
            for backend in (HesScaleGN, CurvlinopsGGN)
        ]
        torch.testing.assert_close(of_some[0].H, ours.H[some])
        torch.testing.assert_close(of_some[0].H, of_some[1].H)

    def compare(self, ours, theirs, batches):
        torch.testing.assert_close(ours.H, theirs.H)
        torch.testing.assert_close(ours.loss, theirs.loss)
        torch.testing.assert_close(ours.log_marginal_likelihood(), theirs.log_marginal_likelihood())
        x = batches.dataset.tensors[0]
        torch.testing.assert_close(ours(x, pred_type="glm"), theirs(x, pred_type="glm"))


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_methods_that_are_exact_or_right_on_average(likelihood):
    batches, model = loader(likelihood), deep()
    exact = fitted(model, likelihood, batches, backend=CurvlinopsGGN).H
    torch.testing.assert_close(fitted(model, likelihood, batches, backend=HesScaleGN, backend_kwargs={"method": "ggn"}).H, exact)
    for method in ("ggn_mc", "ggn_mc_per_sample"):
        options = {"method": method, "num_samples": 5000, "generator": torch.Generator().manual_seed(0)}
        found = fitted(model, likelihood, batches, backend=HesScaleGN, backend_kwargs=options).H
        assert (found - exact).norm() < 0.1 * exact.norm()


def test_calibration_makes_the_sum_of_each_parameter_right_and_keeps_the_rest():
    x, y = next(iter(loader("classification", 5)))
    model = deep()
    params = list(model.parameters())
    options = {"num_samples": 5000, "generator": torch.Generator().manual_seed(0)}
    calibrated = gauss_newton(nn.functional.cross_entropy(model(x), y), params, calibrate=True, **options)
    plain = gauss_newton(nn.functional.cross_entropy(model(x), y), params)
    exact = estimate("ggn", nn.functional.cross_entropy(model(x), y), params)
    for a, b, c in zip(calibrated, plain, exact, strict=True):
        torch.testing.assert_close(a.sum(), c.sum(), rtol=0.05, atol=0)
        torch.testing.assert_close(a / a.sum(), b / b.sum())
    assert abs(1 - plain[0].sum() / exact[0].sum()) > 0.1


def test_calibration_of_a_parameter_without_curvature():
    w = torch.ones(2, requires_grad=True)
    x = nn.Linear(1, 1)(torch.ones(1, 1))
    assert gauss_newton(x.square().sum() + 0 * w.sum(), [w], calibrate=True)[0].tolist() == [0, 0]


def test_what_it_does_not_compute_raises():
    batches = loader("classification")
    for structure in ("full", "kron"):
        with pytest.raises(NotImplementedError, match="diagonals only"):
            laplace.Laplace(deep(), "classification", "all", structure, backend=HesScaleGN).fit(batches)
    with pytest.raises(ValueError, match="not 'hesscale'"):
        fitted(deep(), "classification", batches, backend=HesScaleGN, backend_kwargs={"method": "hesscale"})
    with pytest.raises(ValueError, match="leave calibrate out"):
        fitted(deep(), "classification", batches, backend=HesScaleGN, backend_kwargs={"method": "ggn", "calibrate": True})


def test_outputs_with_several_rows_per_sample():
    """As in language models: each position is a row, and an ignored one has no curvature."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

    x, y = torch.randn(2, 5, 4), torch.randint(0, 3, (2, 5))
    y[0, 1] = -100
    model = Rows()
    _, h = HesScaleGN(model, "classification").diag(x, y)
    kept = y.flatten() != -100
    _, expected = HesScaleGN(model, "classification").diag(x.flatten(0, 1)[kept], y.flatten()[kept])
    torch.testing.assert_close(h, expected)
