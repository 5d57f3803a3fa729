"""The paper written out literally, as loops over plain numbers, against the engine."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import hessian_diagonal
from torch import nn
from torch.distributions import Categorical, Normal

import hesscale

pytestmark = pytest.mark.usefixtures("double_precision")


def sigmoid(a: float) -> float:
    return 1 / (1 + math.exp(-a))


# σ in PyTorch; σ, σ' and σ'' in plain numbers
ACTIVATIONS = {
    "tanh": (
        torch.tanh,
        math.tanh,
        lambda a: 1 - math.tanh(a) ** 2,
        lambda a: -2 * math.tanh(a) * (1 - math.tanh(a) ** 2),
    ),
    "sigmoid": (
        torch.sigmoid,
        sigmoid,
        lambda a: sigmoid(a) * (1 - sigmoid(a)),
        lambda a: sigmoid(a) * (1 - sigmoid(a)) * (1 - 2 * sigmoid(a)),
    ),
    "softplus": (
        F.softplus,
        lambda a: math.log1p(math.exp(a)),
        sigmoid,
        lambda a: sigmoid(a) * (1 - sigmoid(a)),
    ),
    "sin": (torch.sin, math.sin, math.cos, lambda a: -math.sin(a)),
    "relu": (F.relu, lambda a: max(a, 0.0), lambda a: float(a > 0), lambda a: 0.0),
}


def softmax(a: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in a)
    return [math.exp(value) / total for value in a]


def cross_entropy(a: list[float], target: int) -> tuple[list[float], list[float]]:
    """∂L/∂a_L and ∂²L/∂a_L² of Appendix B.1: q − p and q − q²."""
    q = softmax(a)
    return [q_i - (i == target) for i, q_i in enumerate(q)], [q_i - q_i**2 for q_i in q]


def squared_error(a: list[float], target: list[float]) -> tuple[list[float], list[float]]:
    """∂L/∂a_L and ∂²L/∂a_L² of ½ Σ (a − t)²."""
    return [a_i - t_i for a_i, t_i in zip(a, target, strict=True)], [1.0] * len(a)


def becker_lecun(a: list[float], target: int) -> tuple[list[float], list[float]]:
    """Eq. 4 at the last layer too: σ is the softmax, as if elementwise, and L = −log q_target."""
    q = softmax(a)
    gradient, diagonal = cross_entropy(a, target)
    for i, q_i in enumerate(q):
        p_i = float(i == target)
        first, second = q_i - q_i**2, (q_i - q_i**2) * (1 - 2 * q_i)
        diagonal[i] = first**2 * p_i / q_i**2 - second * p_i / q_i
    return gradient, diagonal


def rows_of(layer: nn.Linear) -> list[list[float]]:
    """W with the bias as its last column, as in the paper's footnote."""
    return [[*row, bias] for row, bias in zip(layer.weight.tolist(), layer.bias.tolist(), strict=True)]


def algorithm_1(layers, x, target, activation, last_layer, gauss_newton=False):
    """HesScale: ∂L/∂W_l and the estimate of ∂²L/∂W_l² for every layer, by Eq. 1 to 4."""
    _, sigma, sigma_1, sigma_2 = ACTIVATIONS[activation]
    W = [rows_of(layer) for layer in layers]
    a, h = [], [[*x, 1.0]]
    for rows in W:
        a.append([sum(w * h_j for w, h_j in zip(row, h[-1], strict=True)) for row in rows])
        h.append([*map(sigma, a[-1]), 1.0])
    results = []
    for l in reversed(range(len(W))):
        if l == len(W) - 1:
            first, second = last_layer(a[l], target)
        else:
            below = range(len(a[l]))
            above = range(len(a[l + 1]))
            back = [sum(first[k] * W[l + 1][k][i] for k in above) for i in below]
            bend = [0.0 if gauss_newton else sigma_2(a[l][i]) * back[i] for i in below]
            second = [sigma_1(a[l][i]) ** 2 * sum(second[k] * W[l + 1][k][i] ** 2 for k in above) + bend[i] for i in below]
            first = [sigma_1(a[l][i]) * back[i] for i in below]
        gradient_W = [[first[i] * h_j for h_j in h[l]] for i in range(len(a[l]))]
        second_W = [[second[i] * h_j**2 for h_j in h[l]] for i in range(len(a[l]))]
        results.insert(0, (torch.tensor(gradient_W), torch.tensor(second_W)))
    return results


def forward(layers, x, activation):
    for layer in layers[:-1]:
        x = ACTIVATIONS[activation][0](layer(x))
    return layers[-1](x)


def assert_same(layers, results):
    for layer, (gradient, diagonal) in zip(layers, results, strict=True):
        torch.testing.assert_close(layer.weight.grad, gradient[:, :-1])
        torch.testing.assert_close(layer.bias.grad, gradient[:, -1])
        torch.testing.assert_close(layer.weight.hess_diag, diagonal[:, :-1], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(layer.bias.hess_diag, diagonal[:, -1], rtol=1e-10, atol=1e-13)


def network():
    return [nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 6), nn.Linear(6, 3)]


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_algorithm_1_with_softmax_cross_entropy(activation, method):
    layers, x, target = network(), torch.randn(3), 1
    hesscale.backward(F.cross_entropy(forward(layers, x[None], activation), torch.tensor([target])), method=method)
    assert_same(layers, algorithm_1(layers, x.tolist(), target, activation, cross_entropy, method == "hesscale_gn"))


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_algorithm_1_with_squared_error(activation, method):
    layers, x, target = network(), torch.randn(3), torch.randn(3)
    hesscale.backward(0.5 * F.mse_loss(forward(layers, x[None], activation), target[None], reduction="sum"), method=method)
    assert_same(layers, algorithm_1(layers, x.tolist(), target.tolist(), activation, squared_error, method == "hesscale_gn"))


@pytest.mark.parametrize("loss", ["cross_entropy", "softmax"])
def test_bl89_applies_equation_4_to_the_softmax(loss):
    layers, x, target = network(), torch.randn(3), 1
    logits = forward(layers, x[None], "tanh")
    if loss == "cross_entropy":
        hesscale.backward(F.cross_entropy(logits, torch.tensor([target])), method="bl89")
    else:
        hesscale.backward(-logits.softmax(1).log()[0, target], method="bl89")
    assert_same(layers, algorithm_1(layers, x.tolist(), target, "tanh", becker_lecun))


def test_a_batch_is_the_mean_of_its_samples():
    layers, x, targets = network(), torch.randn(4, 3), [0, 2, 1, 2]
    hesscale.backward(F.cross_entropy(forward(layers, x, "tanh"), torch.tensor(targets)))
    samples = [algorithm_1(layers, x_n.tolist(), y_n, "tanh", cross_entropy) for x_n, y_n in zip(x, targets, strict=True)]
    assert_same(layers, [tuple(sum(part) / 4 for part in zip(*layer, strict=True)) for layer in zip(*samples, strict=True)])


Grid = dict[tuple[int, int], float]  # a matrix by its places


def grid(matrix: torch.Tensor) -> Grid:
    return {(i, j): value for i, row in enumerate(matrix.tolist()) for j, value in enumerate(row)}


def tensor(entries: Grid) -> torch.Tensor:
    rows, columns = max(entries)
    return torch.tensor([[entries[i, j] for j in range(columns + 1)] for i in range(rows + 1)])


def convolve(H: Grid, W: Grid) -> Grid:
    """A_{i,j} = Σ_m Σ_n W_{m,n} H_{i+m,j+n}"""
    (rows, columns), (k_1, k_2) = max(H), max(W)
    places = itertools.product(range(rows - k_1 + 1), range(columns - k_2 + 1))
    return {(i, j): sum(w * H[i + m, j + n] for (m, n), w in W.items()) for i, j in places}


def theorem_f1(filters: list[Grid], last: list[Grid], x: Grid, target: int, activation: str) -> list[Grid]:
    """The estimates for every filter, with one filter a layer, and a fully connected layer at the end.

    Read with k_{l+1,1} and k_{l+1,2} in the first sums, and with the second sums over all of A_l: h_l − k_{l,1} is its last row
    where h_l is the height of the layer's input.
    """
    _, sigma, sigma_1, sigma_2 = ACTIVATIONS[activation]
    A, H = [], [x]
    for W in filters:
        A.append(convolve(H[-1], W))
        H.append({place: sigma(a) for place, a in A[-1].items()})
    outputs = range(len(last))
    first, second = cross_entropy([sum(last[k][place] * h for place, h in H[-1].items()) for k in outputs], target)
    results: list[Grid] = []
    for l in reversed(range(len(filters))):
        if l == len(filters) - 1:  # Eq. 4
            back = {place: sum(first[k] * last[k][place] for k in outputs) for place in A[l]}
            spread = {place: sum(second[k] * last[k][place] ** 2 for k in outputs) for place in A[l]}
        else:
            W = filters[l + 1]
            back = {(i, j): sum(first.get((i - m, j - n), 0) * w for (m, n), w in W.items()) for i, j in A[l]}
            spread = {(i, j): sum(second.get((i - m, j - n), 0) * w**2 for (m, n), w in W.items()) for i, j in A[l]}
        first = {place: sigma_1(a) * back[place] for place, a in A[l].items()}
        second = {place: sigma_1(a) ** 2 * spread[place] + sigma_2(a) * back[place] for place, a in A[l].items()}
        H_squared = {place: h**2 for place, h in H[l].items()}
        results.insert(0, {(i, j): sum(s * H_squared[i + m, j + n] for (m, n), s in second.items()) for i, j in filters[l]})
    return results


@pytest.mark.parametrize("activation", ["tanh", "softplus"])
def test_theorem_f1(activation):
    filters = [torch.randn(1, 1, *shape).requires_grad_() for shape in [(3, 2), (2, 3), (2, 2)]]
    x, last, target = torch.randn(7, 8), torch.randn(3, 3 * 4).requires_grad_(), 2
    h = x[None, None]
    for W in filters:
        h = ACTIVATIONS[activation][0](F.conv2d(h, W))
    hesscale.backward(F.cross_entropy(F.linear(h.flatten(1), last), torch.tensor([target])))
    rows = [grid(row.view(3, 4)) for row in last]
    paper = theorem_f1([grid(W[0, 0]) for W in filters], rows, grid(x), target, activation)
    for W, diagonal in zip(filters, paper, strict=True):
        torch.testing.assert_close(W.hess_diag[0, 0], tensor(diagonal), rtol=1e-10, atol=1e-13)


def diagonals(loss, *outputs):
    return hesscale.grad(loss, outputs)[1]


def test_appendix_b_softmax():
    theta, target = torch.randn(2, 5, requires_grad=True), torch.tensor([1, 4])
    q = theta.detach().softmax(1)
    (diagonal,) = diagonals(F.cross_entropy(theta, target, reduction="sum"), theta)
    torch.testing.assert_close(diagonal, q - q**2)


def gaussian(actions: int = 3, batch: int = 4):
    """x, μ and σ² of Appendix B.2."""
    x, mu = torch.randn(2, batch, actions)
    return x, mu.requires_grad_(), (torch.rand(batch, actions) + 0.5).requires_grad_()


def log_likelihood(x, mu, var):
    """Appendix B.2, with the log-determinant Σ log σ²."""
    return -0.5 * ((x - mu) ** 2 / var).sum(1) - 0.5 * var.log().sum(1) - 0.5 * x.shape[1] * math.log(2 * math.pi)


def likelihood_diagonals(x, mu, var):
    return -1 / var, (0.5 - (x - mu) ** 2 / var) / var**2


@pytest.mark.parametrize("likelihood", [log_likelihood, lambda x, mu, var: Normal(mu, var.sqrt()).log_prob(x).sum(1)])
def test_appendix_b_gaussian(likelihood):
    x, mu, var = gaussian()
    torch.testing.assert_close(likelihood(x, mu, var), log_likelihood(x, mu, var))
    for mine, paper in zip(diagonals(likelihood(x, mu, var).sum(), mu, var), likelihood_diagonals(x, mu, var), strict=True):
        torch.testing.assert_close(mine, paper)


def test_appendix_c_policy_gradient_of_a_gaussian():
    x, mu, var = gaussian()
    advantage = torch.randn(4, 1)
    loss = -(Normal(mu, var.sqrt()).log_prob(x) * advantage).sum()
    for mine, paper in zip(diagonals(loss, mu, var), likelihood_diagonals(x, mu, var), strict=True):
        torch.testing.assert_close(mine, -advantage * paper)


def test_appendix_c_policy_gradient_of_a_softmax():
    theta, advantage = torch.randn(4, 5, requires_grad=True), torch.randn(4)
    loss = -(Categorical(logits=theta).log_prob(torch.tensor([0, 3, 3, 1])) * advantage).sum()
    q = theta.detach().softmax(1)
    torch.testing.assert_close(diagonals(loss, theta)[0], advantage[:, None] * (q - q**2))


def test_appendix_c_value_loss():
    value, target = torch.randn(4, requires_grad=True), torch.randn(4)
    torch.testing.assert_close(diagonals(0.5 * (value - target).square().sum(), value)[0], torch.ones(4))


def ppo_loss(log_prob, old_log_prob, advantage, epsilon=0.2):
    ratio = (log_prob - old_log_prob).exp()
    return -torch.min(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).sum()


def ppo_diagonals(a, mu, var, old_log_prob, advantage, epsilon=0.2):
    """Appendix C.3 with the minus and the power of 2π in the density, and with 1/p_old, the clip and the loss's minus."""
    p = log_likelihood(a, mu, var).exp()[:, None]
    first_mu, first_var = p * (a - mu) / var, p * ((a - mu) ** 2 / var - 1) / (2 * var)
    second_mu = ((a - mu) * first_mu - p) / var
    second_var = (var * first_var - p) * ((a - mu) ** 2 / var - 1) / (2 * var**2) - 0.5 * p * (a - mu) ** 2 / var**3
    p_old = old_log_prob.exp()[:, None]
    ratio, A = p / p_old, advantage[:, None]
    clipped = ((A > 0) & (ratio > 1 + epsilon)) | ((A < 0) & (ratio < 1 - epsilon))
    return [torch.where(clipped, 0.0, -A / p_old * second) for second in (second_mu, second_var)]


def test_appendix_c_ppo():
    a, mu, var = gaussian(batch=6)
    log_prob = Normal(mu, var.sqrt()).log_prob(a).sum(1)
    old = log_prob.detach() + torch.tensor([0.0, 0.1, -0.1, 0.5, -0.5, -0.5])  # the fourth and fifth ratios are clipped
    advantage = torch.tensor([1.0, -2.0, 0.5, -1.0, 1.5, -1.0])
    mine = diagonals(ppo_loss(log_prob, old, advantage), mu, var)
    paper = ppo_diagonals(a, mu.detach(), var.detach(), old, advantage)
    assert (paper[0] == 0).any(1).tolist() == [False, False, False, True, True, False]
    for mine_part, paper_part in zip(mine, paper, strict=True):
        torch.testing.assert_close(mine_part, paper_part)


def test_appendix_e_diagonal_weights_are_exact():
    """With W diagonal, every H_l is diagonal and Eq. 4 leaves nothing out."""
    x, target = torch.randn(4), torch.randn(4)
    weights = [torch.diag(torch.randn(4)).requires_grad_() for _ in range(3)]
    h = x[None]
    for W in weights:
        h = torch.tanh(F.linear(h, W))
    loss = (h - target).square().sum()
    exact = [hessian_diagonal(loss, W) for W in weights]
    hesscale.backward(loss)
    for W, truth in zip(weights, exact, strict=True):
        torch.testing.assert_close(W.hess_diag, truth)


def test_appendix_e_gaussian_weights_are_exact_on_average():
    """H = αI: the law of W does not change when columns change sign, and over all signs the off-diagonals of WᵀHW cancel."""
    alpha, W, V, x = 0.7, torch.randn(4, 3), torch.randn(3, 5), torch.randn(5, requires_grad=True)
    approximate, exact = [], []
    for signs in itertools.product([-1.0, 1.0], repeat=3):
        flipped = W * torch.tensor(signs)
        loss = 0.5 * alpha * F.linear(F.linear(x[None], V), flipped).square().sum()
        exact.append(hessian_diagonal(loss, x))
        approximate.append(diagonals(loss, x)[0])
    torch.testing.assert_close(torch.stack(approximate).mean(0), torch.stack(exact).mean(0))
    assert not torch.allclose(approximate[0], exact[0])
