"""torch.distributions on the outputs of a linear layer: log-probabilities, entropies and divergences are exact there."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import pytest
import torch
from oracle import hessian_diagonal
from torch import Tensor, nn
from torch import distributions as D
from torch.nn.functional import softplus

import hesscale

Make = Callable[[Tensor], D.Distribution]
N, C = 4, 3


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


GENERATOR = torch.Generator().manual_seed(0)
REAL, POSITIVE, UNIT, SIMPLEX = draw(N, C), draw(N, C).exp(), draw(N, C).sigmoid(), draw(N, C).softmax(-1)
BINARY, COUNTS = (draw(N, C) > 0).double(), torch.tensor([[0, 1, 4]] * N).double()
CLASSES, ONE_HOT = torch.tensor([2, 0, 1, 1]), torch.eye(C).double()[[2, 0, 1, 1]]


def halves(z: Tensor) -> tuple[Tensor, Tensor]:
    """Two parameters of shape (N, C): one real, one positive."""
    real, raw = z.chunk(2, dim=-1)
    return real, softplus(raw) + 0.1


def positives(z: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (softplus(z) + 0.5).chunk(2, dim=-1)
    return a, b


def normal(z: Tensor) -> D.Normal:
    return D.Normal(*halves(z))


def transformed(*transforms: D.Transform) -> Make:
    return lambda z: D.TransformedDistribution(normal(z), list(transforms))


def mixture(z: Tensor) -> D.MixtureSameFamily:
    weights, means, raw = z.chunk(3, dim=-1)
    return D.MixtureSameFamily(D.Categorical(logits=weights), D.Normal(means, softplus(raw) + 0.1))


# name: how the distribution is made, the width of its parameters z, a value it may take
DISTRIBUTIONS: dict[str, tuple[Make, int, Tensor]] = {
    "Normal": (normal, 2 * C, REAL),
    "Normal, exp": (lambda z: D.Normal(z[:, :C], z[:, C:].exp()), 2 * C, REAL),
    "Independent Normal": (lambda z: D.Independent(normal(z), 1), 2 * C, REAL),
    "LogNormal": (lambda z: D.LogNormal(*halves(z)), 2 * C, POSITIVE),
    "Laplace": (lambda z: D.Laplace(*halves(z)), 2 * C, REAL),
    "Cauchy": (lambda z: D.Cauchy(*halves(z)), 2 * C, REAL),
    "Gumbel": (lambda z: D.Gumbel(*halves(z)), 2 * C, REAL),
    "HalfNormal": (lambda z: D.HalfNormal(softplus(z)), C, POSITIVE),
    "HalfCauchy": (lambda z: D.HalfCauchy(softplus(z)), C, POSITIVE),
    "StudentT": (lambda z: D.StudentT(softplus(z[:, 2 * C :]) + 2, *halves(z[:, : 2 * C])), 3 * C, REAL),
    "VonMises": (lambda z: D.VonMises(*halves(z)), 2 * C, REAL),
    "Beta": (lambda z: D.Beta(*positives(z)), 2 * C, UNIT),
    "Gamma": (lambda z: D.Gamma(*positives(z)), 2 * C, POSITIVE),
    "InverseGamma": (lambda z: D.InverseGamma(*positives(z)), 2 * C, POSITIVE),
    "Chi2": (lambda z: D.Chi2(softplus(z) + 0.5), C, POSITIVE),
    "Weibull": (lambda z: D.Weibull(*positives(z)), 2 * C, POSITIVE),
    "Pareto": (lambda z: D.Pareto(torch.tensor(0.01).double(), softplus(z)), C, POSITIVE),
    "Kumaraswamy": (lambda z: D.Kumaraswamy(*positives(z)), 2 * C, UNIT),
    "Dirichlet": (lambda z: D.Dirichlet(softplus(z) + 0.5), C, SIMPLEX),
    "Exponential": (lambda z: D.Exponential(softplus(z)), C, POSITIVE),
    "Poisson": (lambda z: D.Poisson(z.exp()), C, COUNTS),
    "Geometric": (lambda z: D.Geometric(logits=z), C, COUNTS),
    "Geometric of probs": (lambda z: D.Geometric(probs=z.sigmoid()), C, COUNTS),
    "NegativeBinomial": (lambda z: D.NegativeBinomial(softplus(z[:, :C]), logits=z[:, C:]), 2 * C, COUNTS),
    "Binomial": (lambda z: D.Binomial(5, logits=z), C, COUNTS),
    "Bernoulli": (lambda z: D.Bernoulli(logits=z), C, BINARY),
    "Bernoulli of probs": (lambda z: D.Bernoulli(probs=z.sigmoid()), C, BINARY),
    "ContinuousBernoulli": (lambda z: D.ContinuousBernoulli(logits=z), C, UNIT),
    "RelaxedBernoulli": (lambda z: D.RelaxedBernoulli(torch.tensor(0.7).double(), logits=z), C, UNIT),
    "Categorical": (lambda z: D.Categorical(logits=z), C, CLASSES),
    "Categorical of probs": (lambda z: D.Categorical(probs=z.softmax(-1)), C, CLASSES),
    "Categorical of weights": (lambda z: D.Categorical(probs=softplus(z)), C, CLASSES),
    "OneHotCategorical": (lambda z: D.OneHotCategorical(logits=z), C, ONE_HOT),
    "OneHotCategorical of probs": (lambda z: D.OneHotCategorical(probs=z.softmax(-1)), C, ONE_HOT),
    "Multinomial": (lambda z: D.Multinomial(5, logits=z), C, COUNTS),
    "RelaxedOneHotCategorical": (lambda z: D.RelaxedOneHotCategorical(torch.tensor(0.7).double(), logits=z), C, SIMPLEX),
    "MixtureSameFamily": (mixture, 3 * C, REAL[:, 0]),
    "tanh": (transformed(D.TanhTransform()), 2 * C, REAL.tanh()),
    "sigmoid": (transformed(D.SigmoidTransform()), 2 * C, UNIT),
    "affine": (transformed(D.AffineTransform(1.0, -2.0)), 2 * C, REAL),
    "affine, tanh": (transformed(D.AffineTransform(0.1, 2.0), D.TanhTransform()), 2 * C, REAL.tanh()),
    "tanh, affine, event": (
        transformed(D.TanhTransform(), D.AffineTransform(0.1, 2.0, event_dim=1)),
        2 * C,
        2 * REAL.tanh() + 0.1,
    ),
    "exp": (transformed(D.ExpTransform()), 2 * C, POSITIVE),
    "power": (transformed(D.ExpTransform(), D.PowerTransform(torch.tensor(2.0).double())), 2 * C, POSITIVE),
    "softplus": (transformed(D.SoftplusTransform()), 2 * C, POSITIVE),
    "learned affine": (
        lambda z: D.TransformedDistribution(D.Normal(z.new_zeros(N, C), z.new_ones(N, C)), [D.AffineTransform(*halves(z))]),
        2 * C,
        REAL,
    ),
}
REPARAMETRISED = ("Normal", "Independent Normal", "LogNormal", "Laplace", "Gumbel", "Cauchy", "tanh", "sigmoid", "affine, tanh")
DIVERGENCES = (
    "Normal",
    "Independent Normal",
    "LogNormal",
    "Laplace",
    "Gumbel",
    "HalfNormal",
    "Beta",
    "Gamma",
    "Dirichlet",
    "Exponential",
    "Poisson",
    "Geometric",
    "Bernoulli",
    "Bernoulli of probs",
    "Categorical",
    "Categorical of probs",
    "OneHotCategorical",
)


def parameters(name: str, width: int, which: int = 0) -> Tensor:
    """What a linear layer makes of a nonlinear body."""
    torch.manual_seed(zlib.crc32(name.encode()) + which)
    body, layer = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, width, dtype=torch.float64)
    return layer(torch.tanh(body(torch.randn(N, 5, dtype=torch.float64))))


def check(loss: Tensor, *outputs: Tensor) -> None:
    for method in ("hesscale", "hesscale_gn"):
        _, diagonals = hesscale.grad(loss, outputs, method=method, retain_graph=True)
        for z, diagonal in zip(outputs, diagonals, strict=True):
            torch.testing.assert_close(diagonal, hessian_diagonal(loss, z), rtol=1e-8, atol=1e-11)
    hesscale.backward(loss, head="rules")


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_log_prob(name: str) -> None:
    make, width, value = DISTRIBUTIONS[name]
    z = parameters(name, width)
    check(-make(z).log_prob(value).mean(), z)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_surrogate(name: str) -> None:
    """A ratio of probabilities, as policy gradients use it."""
    make, width, value = DISTRIBUTIONS[name]
    z = parameters(name, width)
    log_prob = make(z).log_prob(value)
    check((log_prob - log_prob.detach() - 0.1).exp().mean(), z)


def has_entropy(name: str) -> bool:
    make, width, _ = DISTRIBUTIONS[name]
    try:
        return make(torch.zeros(N, width).double()).entropy() is not None
    except NotImplementedError:
        return False


@pytest.mark.parametrize("name", list(filter(has_entropy, DISTRIBUTIONS)))
def test_entropy(name: str) -> None:
    make, width, _ = DISTRIBUTIONS[name]
    z = parameters(name, width)
    check(-make(z).entropy().mean(), z)


@pytest.mark.parametrize("name", REPARAMETRISED)
def test_reparametrised_sample(name: str) -> None:
    make, width, _ = DISTRIBUTIONS[name]
    z = parameters(name, width)
    distribution = make(z)
    sample = distribution.rsample()
    check((sample**2 - 0.1 * distribution.log_prob(sample).reshape(N, -1)).mean(), z)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence(name: str) -> None:
    make, width, _ = DISTRIBUTIONS[name]
    p, q = parameters(name, width), parameters(name, width, 1)
    check(D.kl_divergence(make(p), make(q)).mean(), p, q)


def test_a_gaussian_with_a_triangular_factor() -> None:
    """MultivariateNormal solves a triangular system."""
    z = parameters("MultivariateNormal", 2 * C)
    scale = torch.diag_embed(softplus(z[:, C:]) + 0.1)
    check(-D.MultivariateNormal(z[:, :C], scale_tril=scale).log_prob(REAL).mean(), z)
