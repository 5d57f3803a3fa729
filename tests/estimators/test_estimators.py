"""Each estimator against its definition written out with torch.func in float64; the random ones by their mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import hesscale
from hesscale import estimators
from hesscale.estimators import ESTIMATORS, estimate, names

pytestmark = pytest.mark.usefixtures("double_precision")


# ---------------------------------------------------------------------------------------------------------------------- problems


@dataclass
class Problem:
    """A loss in two parts: ``model(params) -> outputs``, and ``head(outputs, params)``, which meets the params in ``leaves``."""

    params: list[Tensor]
    model: Callable[[list[Tensor]], list[Tensor]]
    head: Callable[[list[Tensor], list[Tensor]], Tensor]
    leaves: tuple[int, ...] = ()

    def loss(self, params: list[Tensor] | None = None) -> Tensor:
        params = self.params if params is None else params
        return self.head(self.model(params), params)

    def at(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [part.view_as(p) for part, p in zip(parts, self.params, strict=True)]

    def flat(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.params])

    def exact(self) -> list[Tensor]:
        return self.at(hessian(lambda flat: self.loss(self.at(flat)))(self.flat()).diagonal())

    def jacobian_and_hessian(self) -> tuple[Tensor, Tensor]:
        """J of the outputs, with the leaves that the head meets appended to them, and H of the head there."""

        def outputs(flat: Tensor) -> Tensor:
            params = self.at(flat)
            return torch.cat([z.flatten() for z in [*self.model(params), *(params[k] for k in self.leaves)]])

        shapes = [z.shape for z in [*self.model(self.params), *(self.params[k] for k in self.leaves)]]

        def loss(z: Tensor) -> Tensor:
            parts = [part.view(shape) for part, shape in zip(z.split([math.prod(s) for s in shapes]), shapes, strict=True)]
            count = len(parts) - len(self.leaves)
            params = [p.detach() for p in self.params]
            for k, leaf in zip(self.leaves, parts[count:], strict=True):
                params[k] = leaf
            return self.head(parts[:count], params)

        return jacrev(outputs)(self.flat()), hessian(loss)(outputs(self.flat()))

    def ggn(self) -> list[Tensor]:
        J, H = self.jacobian_and_hessian()
        return self.at(torch.einsum("ip,ij,jp->p", J, H, J))


def of_module(module: nn.Module, x: Tensor, head: Callable[[Tensor], Tensor]) -> Problem:
    keys = [name for name, _ in module.named_parameters()]

    def model(params: list[Tensor]) -> list[Tensor]:
        return [functional_call(module, dict(zip(keys, params, strict=True)), x)]

    return Problem(list(module.parameters()), model, lambda outputs, _: head(outputs[0]))


def mlp(*widths: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def cross_entropy(**options) -> Problem:
    y = torch.tensor([0, 2, 1, 2, 0])
    return of_module(mlp(3, 4, 3), torch.randn(5, 3), lambda z: F.cross_entropy(z, y, **options))


def squared_error(reduction: str = "mean") -> Problem:
    y = torch.randn(5, 2)
    return of_module(mlp(3, 4, 2), torch.randn(5, 3), lambda z: F.mse_loss(z, y, reduction=reduction))


def binary() -> Problem:
    y = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    return of_module(mlp(3, 4, 1), torch.randn(5, 3), lambda z: F.binary_cross_entropy_with_logits(z.squeeze(1), y))


def policy_gradient() -> Problem:
    """Softmax with weights of both signs."""
    y, advantage = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([1.0, -2.0, 0.5, 0.0, -1.0])
    return of_module(mlp(3, 4, 3), torch.randn(5, 3), lambda z: (F.cross_entropy(z, y, reduction="none") * advantage).mean())


def not_convex() -> Problem:
    return of_module(mlp(3, 4, 3), torch.randn(5, 3), lambda z: (z.sin() * z.roll(1, 1)).sum(1).mean())


def elementwise_not_convex() -> Problem:
    return of_module(mlp(3, 4, 2), torch.randn(5, 3), lambda z: (3 * z).sin().sum())


def interacting_samples() -> Problem:
    """Root mean square error: the Hessian at the outputs couples the samples."""
    return of_module(mlp(3, 4, 2), torch.randn(5, 3), lambda z: (z - 1).square().mean().sqrt())


def convolutional() -> Problem:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Linear(2, 3)
    )
    y = torch.tensor([0, 2, 1])
    return of_module(net, torch.randn(3, 1, 4, 4), lambda z: F.cross_entropy(z, y))


def pixels() -> Problem:
    """Outputs of shape (batch, class, height, width)."""
    y = torch.randint(3, (2, 2, 2))
    return of_module(
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 3, 1)), torch.randn(2, 1, 3, 3), lambda z: F.cross_entropy(z, y)
    )


def sequence() -> Problem:
    """A Linear over (batch, time, feature), whose logits are viewed in another shape on the way to the loss."""
    y = torch.tensor([0, 2, 1, 2, 0, 1])
    net = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 3, bias=False))
    return of_module(net, torch.randn(2, 3, 2), lambda z: F.cross_entropy(z.reshape(-1, 3), y))


def residual_and_norm() -> Problem:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.norm(self.first(x)).tanh()
            return self.last(x + self.first(x).tanh())

    y = torch.randn(4, 2)
    return of_module(Net(), torch.randn(4, 3), lambda z: F.smooth_l1_loss(z, y))


def gaussian() -> Problem:
    """Two outputs that share second derivatives."""
    trunk, mean, deviation = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2)
    params = [p for layer in (trunk, mean, deviation) for p in layer.parameters()]
    x, y = torch.randn(5, 3), torch.randn(5, 2)

    def model(p: list[Tensor]) -> list[Tensor]:
        h = F.linear(x, *p[:2]).tanh()
        return [F.linear(h, *p[2:4]), F.linear(h, *p[4:6])]

    return Problem(params, model, lambda z, _: F.gaussian_nll_loss(z[0], y, F.softplus(z[1])))


def log_std() -> Problem:
    """A leaf in the head: a standard deviation that does not depend on the input, with an L2 term on a weight as well."""
    net, deviation = mlp(3, 4, 2), torch.randn(2, requires_grad=True)
    x, y = torch.randn(5, 3), torch.randn(5, 2)

    def model(p: list[Tensor]) -> list[Tensor]:
        return [F.linear(F.linear(x, *p[:2]).tanh(), *p[2:4])]

    def head(z: list[Tensor], p: list[Tensor]) -> Tensor:
        return -torch.distributions.Normal(z[0], p[4].exp(), validate_args=False).log_prob(y).mean() + 0.1 * (p[0] ** 4).sum()

    return Problem([*net.parameters(), deviation], model, head, leaves=(0, 4))


def tied(head: Callable[[Tensor, Tensor], Tensor]) -> Problem:
    """A bias that the head meets again, so that its mixed derivatives with the outputs count."""
    weight, bias, x = torch.randn(3, 2, requires_grad=True), torch.randn(3, requires_grad=True), torch.randn(4, 2)
    return Problem([weight, bias], lambda p: [F.linear(x, p[0], p[1])], lambda z, p: head(z[0], p[1]), leaves=(1,))


def sum_of_outputs() -> Problem:
    """Two outputs whose gradients are one tensor."""
    a, b = nn.Linear(3, 2), nn.Linear(3, 2)
    x = torch.randn(4, 3)

    def model(p: list[Tensor]) -> list[Tensor]:
        return [F.linear(x, *p[:2]), F.linear(x.exp(), *p[2:])]

    return Problem([*a.parameters(), *b.parameters()], model, lambda z, _: (z[0] + z[1]).cos().mean())


def softmax_twice(nested: bool) -> Problem:
    """Two log-softmaxes, of the same logits or one of the other."""
    y, other = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([1, 1, 1, 0, 0])

    def head(z: Tensor) -> Tensor:
        return F.cross_entropy(2 * z.log_softmax(1), y) if nested else F.cross_entropy(z, y) + F.cross_entropy(z, other)

    return of_module(mlp(3, 4, 3), torch.randn(5, 3), head)


def two_depths() -> Problem:
    """An output that another output is made from."""
    first, last = nn.Linear(3, 2), nn.Linear(2, 2)
    x = torch.randn(4, 3)

    def model(p: list[Tensor]) -> list[Tensor]:
        z = F.linear(x, *p[:2])
        return [z, F.linear(z.tanh(), *p[2:])]

    return Problem([*first.parameters(), *last.parameters()], model, lambda z, _: (z[0] * z[1]).exp().mean())


CLASSES = torch.tensor([0, 2, 1, 1])
PROBLEMS: dict[str, Callable[[], Problem]] = {
    "cross entropy": cross_entropy,
    "cross entropy, weighted": lambda: cross_entropy(weight=torch.tensor([0.5, 1.0, 2.0]), reduction="sum"),
    "cross entropy, smoothed and ignoring": lambda: cross_entropy(label_smoothing=0.3, ignore_index=2),
    "squared error": squared_error,
    "squared error, summed": lambda: squared_error("sum"),
    "binary": binary,
    "policy gradient": policy_gradient,
    "not convex": not_convex,
    "not convex, elementwise": elementwise_not_convex,
    "interacting samples": interacting_samples,
    "convolutional": convolutional,
    "pixels": pixels,
    "sequence": sequence,
    "residual and norm": residual_and_norm,
    "gaussian": gaussian,
    "two depths": two_depths,
    "log std": log_std,
    "sum of outputs": sum_of_outputs,
    "softmax twice": lambda: softmax_twice(False),
    "softmax of softmax": lambda: softmax_twice(True),
    "tied": lambda: tied(lambda z, b: F.cross_entropy(z * b.exp(), CLASSES)),
    "tied, linear": lambda: tied(lambda z, b: F.cross_entropy(z + b, CLASSES)),
    "tied, diagonal": lambda: tied(lambda z, b: (z * b).square().mean()),
}
LINEAR_LAYERS = [name for name in PROBLEMS if name not in ("residual and norm", "log std") and "tied" not in name]
NOT_CONVEX = ("policy gradient", "not convex", "not convex, elementwise", "interacting samples", "gaussian", "two depths")
NOT_CONVEX += ("sum of outputs", "softmax of softmax")

each_problem = pytest.mark.parametrize("name", PROBLEMS)


def close(found, expected) -> None:
    torch.testing.assert_close([*found], [*expected], rtol=1e-9, atol=1e-12)


def mean_is(method: str, loss: Tensor, params: list[Tensor], expected: list[Tensor]) -> None:
    """The mean of many draws is within five standard errors of what is expected, entry by entry."""
    generator = torch.Generator().manual_seed(0)
    calls = [estimate(method, loss, params, num_samples=100, generator=generator, retain_graph=True) for _ in range(50)]
    draws = torch.stack([torch.cat([d.flatten() for d in call]) for call in calls])
    truth = torch.cat([e.detach().flatten() for e in expected])
    error, standard_error = (draws.mean(0) - truth).abs(), draws.std(0) / len(draws) ** 0.5
    assert (error <= 5 * standard_error + 1e-9 * truth.abs().max()).all(), (error / standard_error).max()
    assert standard_error.max() < 0.1 * truth.abs().max()  # so that the bound above means something


# ------------------------------------------------------------------------------------------------------------------------- exact


@each_problem
def test_exact_is_the_diagonal_of_the_hessian(name):
    problem = PROBLEMS[name]()
    found = estimate("exact", problem.loss(), problem.params)
    close(found, problem.exact())
    close(found, oracle.hessian_diagonals(lambda *p: problem.loss([*p]), problem.params))


def test_exact_through_few_outputs_of_a_wide_layer():
    """Fewer entries in y = x W than in W: with alpha and beta, either way round, and next to plain double backward."""
    weight, other = torch.randn(7, 2, requires_grad=True), torch.randn(2, 9, requires_grad=True)
    bias, x = torch.randn(2, requires_grad=True), torch.randn(3, 7)
    loss = (torch.addmm(bias, x, weight, alpha=0.5, beta=3).tanh() @ other).exp().mean().log()  # in which samples interact
    assert set(estimators.products_of_weights(request_of(loss, [weight, other, bias]))) == {0}
    close(estimate("exact", loss, [weight, other, bias]), [oracle.hessian_diagonal(loss, p) for p in (weight, other, bias)])


def test_exact_of_a_wide_weight_that_is_used_twice():
    layer, x = nn.Linear(6, 6), torch.randn(1, 6)
    loss = layer(layer(x).tanh()).exp().sum()
    close(estimate("exact", loss, [*layer.parameters()]), [oracle.hessian_diagonal(loss, p) for p in layer.parameters()])


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("method", ["exact", "ggn", "empirical_fisher"])
def test_chunks_do_not_matter(method, at_once, monkeypatch):
    problem = gaussian()
    whole = estimate(method, problem.loss(), problem.params)
    monkeypatch.setattr(estimators, "MAX_ROWS", at_once)
    close(estimate(method, problem.loss(), problem.params), whole)


class Unbatched(torch.autograd.Function):
    """x² with a backward that vmap does not support, since it reads a value."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        assert g.sum().item() == g.sum().item()
        return 2 * x * g

    @staticmethod
    def hess_diag(ctx, g, s):
        raise NotImplementedError


@pytest.mark.parametrize("method", ["exact", "ggn", "hutchinson"])
def test_operators_that_vmap_does_not_support_run_row_by_row(method):
    weight, x = torch.randn(3, 2, requires_grad=True), torch.randn(4, 2)
    y = torch.tensor([0, 1, 2, 1])

    def loss(square):
        return F.cross_entropy(square(F.linear(square(F.linear(x, weight)), weight.T)) @ weight.T, y)

    def found(square):
        return estimate(method, loss(square), [weight], num_samples=3, generator=torch.Generator().manual_seed(0))

    close(found(Unbatched.apply), found(torch.square))


# --------------------------------------------------------------------------------------------------------------------------- ggn


@each_problem
def test_ggn_is_the_diagonal_of_jhj(name):
    problem = PROBLEMS[name]()
    close(estimate("ggn", problem.loss(), problem.params), problem.ggn())


def test_ggn_with_outputs_named():
    """With the hidden layer named as the output, what lies above belongs to the loss."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 3)
    x, y = torch.randn(5, 3), torch.tensor([0, 2, 1, 2, 0])
    params = [*first.parameters()]
    problem = Problem(params, lambda p: [F.linear(x, *p)], lambda z, _: F.cross_entropy(last(z[0].tanh()), y))
    h = first(x)
    close(estimate("ggn", F.cross_entropy(last(h.tanh()), y), params, outputs=h), problem.ggn())
    z = last(first(x).tanh())
    below = estimate("ggn", F.cross_entropy(z, y), params, outputs=z)
    close(below, estimate("ggn", F.cross_entropy(last(first(x).tanh()), y), params))


def test_ggn_of_an_entropy_bonus():
    """A head that no rule gets right."""
    y = torch.tensor([0, 2, 1, 2, 0])

    def head(z):
        log_q = z.log_softmax(1)
        return F.nll_loss(log_q, y) + 0.5 * (log_q.exp() * log_q).sum(1).mean()

    problem = of_module(mlp(3, 4, 3), torch.randn(5, 3), head)
    close(estimate("ggn", problem.loss(), problem.params), problem.ggn())


def test_ggn_equals_the_hessian_of_a_linear_model():
    problem = of_module(nn.Linear(3, 3), torch.randn(5, 3), lambda z: z.exp().prod(1).mean())
    close(estimate("ggn", problem.loss(), problem.params), problem.exact())


# ------------------------------------------------------------------------------------------------------------------ random draws


@each_problem
def test_ggn_mc_is_unbiased(name):
    problem = PROBLEMS[name]()
    mean_is("ggn_mc", problem.loss(), problem.params, problem.ggn())


@pytest.mark.parametrize("name", ["cross entropy", "gaussian", "convolutional"])
def test_hutchinson_is_unbiased(name):
    problem = PROBLEMS[name]()
    mean_is("hutchinson", problem.loss(), problem.params, problem.exact())


def test_hutchinson_is_z_times_hz():
    """One draw, worked out by hand: for a loss of two numbers, H₁₁ ± H₁₂."""
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    found = estimate("hutchinson", w[0] ** 2 * w[1] ** 3, [w])[0]  # H = [[16, 24], [24, 12]]
    assert found.tolist() in ([40, 36], [-8, -12])


@pytest.mark.parametrize("method", ["hutchinson", "ggn_mc", "kfac"])
def test_num_samples_is_a_mean_of_draws(method, monkeypatch):
    """With one row at a time the draws come in the same order, so their mean is that of single calls."""
    monkeypatch.setattr(estimators, "MAX_ROWS", 1)
    problem = gaussian()
    loss, params = problem.loss(), problem.params
    generator = torch.Generator().manual_seed(3)
    single = [estimate(method, loss, params, generator=generator, retain_graph=True) for _ in range(4)]
    several = estimate(method, loss, params, num_samples=4, generator=generator.manual_seed(3))
    close(several, [torch.stack(draws).mean(0) for draws in zip(*single, strict=True)])


def test_ggn_mc_draws_labels_for_softmax():
    """For one sample every draw is the squared gradient of the loss at some label, as often as the model predicts it."""
    net, x = mlp(3, 4, 3), torch.randn(1, 3)
    params = [*net.parameters()]
    of_label = [estimate("squared_gradient", F.cross_entropy(net(x), torch.tensor([k])), params)[0] for k in range(3)]
    loss = F.cross_entropy(net(x), torch.tensor([1]))
    counts = [0, 0, 0]
    for _ in range(400):
        (drawn,) = estimate("ggn_mc", loss, params[:1], retain_graph=True)
        matches = [k for k in range(3) if torch.allclose(drawn, of_label[k], rtol=1e-9)]
        assert len(matches) == 1
        counts[matches[0]] += 1
    q = net(x).softmax(1)[0]
    expected = 400 * q
    assert ((torch.tensor(counts) - expected).abs() < 5 * (expected * (1 - q)).sqrt()).all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cross entropy", "labels"),
        ("cross entropy, smoothed and ignoring", "labels"),
        ("policy gradient", "labels"),
        ("pixels", "labels"),
        ("sequence", "labels"),
        ("squared error", "diagonal"),
        ("binary", "diagonal"),
        ("not convex, elementwise", "diagonal"),
        ("not convex", "signs"),
        ("gaussian", "signs"),
        ("interacting samples", "signs"),
        ("softmax twice", "labels"),
        ("softmax of softmax", "signs"),
        ("tied", "signs"),
    ],
)
def test_how_ggn_mc_draws(name, kind):
    problem = PROBLEMS[name]()
    outputs = request_of(problem.loss(), problem.params).model_outputs
    with torch.no_grad():
        labels = bool(outputs.softmaxes)
        found = "labels" if labels else "signs" if outputs.tied or outputs.diagonal is None else "diagonal"
    assert found == kind


def test_ggn_mc_is_positive_where_the_loss_is_convex():
    for name in ("cross entropy", "squared error", "binary", "pixels"):
        problem = PROBLEMS[name]()
        for diagonal in estimate("ggn_mc", problem.loss(), problem.params, num_samples=3):
            assert (diagonal >= 0).all()
            assert diagonal.any()


@pytest.mark.parametrize("method", ["hutchinson", "ggn_mc", "kfac"])
def test_a_generator_makes_draws_reproducible(method):
    problem = cross_entropy()

    def draw(seed):
        return estimate(method, problem.loss(), problem.params, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    close(draw(1), draw(1))
    assert not all(torch.equal(a, b) for a, b in zip(draw(1), draw(2), strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["exact", "ggn", "ggn_mc", "hesscale"])
def test_estimates_of_a_single_number(name):
    """A temperature: 0-d, and a leaf of the head."""
    scale, z = torch.tensor(0.7, requires_grad=True), torch.randn(4, 3)
    loss = F.cross_entropy(nn.Linear(3, 3)(z) * scale, torch.tensor([0, 1, 2, 0]))
    (got,) = estimate(name, loss, [scale], retain_graph=True)
    torch.testing.assert_close(got, oracle.hessian_diagonal(loss, scale))


def test_a_small_softmax_beside_a_large_square_is_not_lost():
    """float32: the actor's curvature is a thousandth of the critic's."""
    torch.set_default_dtype(torch.float32)
    actor, critic, x = nn.Linear(4, 3), nn.Linear(4, 1), torch.randn(16, 4)
    advantage = 2e-3 * torch.rand(16)
    log_prob = F.log_softmax(actor(x), 1)[torch.arange(16), torch.arange(16) % 3]
    loss = -(log_prob * advantage).mean() + 0.5 * F.mse_loss(critic(x).squeeze(1), torch.ones(16))
    params = [actor.weight, critic.weight]
    truth = estimate("ggn", loss, params, retain_graph=True)
    generator = torch.Generator().manual_seed(0)
    drawn = estimate("ggn_mc", loss, params, num_samples=4000, generator=generator, retain_graph=True)
    for mine, exact in zip(drawn, truth, strict=True):
        assert float((mine - exact).abs().sum() / exact.abs().sum()) < 0.2


def test_a_log_likelihood_has_negative_curvature():
    layer, x = nn.Linear(4, 3), torch.randn(8, 4)
    loss = F.log_softmax(layer(x), 1).mean()
    (truth,) = estimate("ggn", loss, [layer.weight], retain_graph=True)
    generator = torch.Generator().manual_seed(0)
    (drawn,) = estimate("ggn_mc", loss, [layer.weight], num_samples=4000, generator=generator, retain_graph=True)
    assert (truth < 0).all()
    assert float((drawn - truth).abs().sum() / truth.abs().sum()) < 0.2


# --------------------------------------------------------------------------------------------------------- gradients of samples


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_empirical_fisher(reduction):
    net, x, y = mlp(3, 4, 3), torch.randn(5, 3), torch.tensor([0, 2, 1, 2, 0])
    params = [*net.parameters()]
    found = estimate("empirical_fisher", F.cross_entropy(net(x), y, reduction=reduction), params)
    squares = [estimate("squared_gradient", F.cross_entropy(net(x[n : n + 1]), y[n : n + 1]), params) for n in range(5)]
    total = [torch.stack(of).sum(0) for of in zip(*squares, strict=True)]
    close(found, [t / 5 if reduction == "mean" else t * 5 for t in total])


def test_empirical_fisher_of_two_outputs():
    problem = gaussian()
    found = estimate("empirical_fisher", problem.loss(), problem.params)
    z = problem.model(problem.params)
    g = torch.autograd.grad(problem.head(z, problem.params), z, retain_graph=True)
    rows = [torch.autograd.grad([t[n] for t in z], problem.params, [t[n] for t in g], retain_graph=True) for n in range(5)]
    close(found, [5 * torch.stack(of).square().sum(0) for of in zip(*rows, strict=True)])


def test_empirical_fisher_of_outputs_without_further_dimensions():
    w, x = torch.randn(3, requires_grad=True), torch.randn(4, 3)
    close(estimate("empirical_fisher", (x @ w).square().mean(), [w]), [(4 * (x @ w)[:, None] ** 2 * x**2).mean(0).detach()])


def test_empirical_fisher_needs_to_know_the_samples():
    problem = log_std()
    with pytest.raises(ValueError, match=r"depends on params\[0\], of shape \(4, 3\), other than .* Leave it out of params"):
        estimate("empirical_fisher", problem.loss(), problem.params)
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    loss = a(torch.randn(3, 2)).exp().sum() + b(torch.randn(4, 2)).exp().sum()
    with pytest.raises(ValueError, match=r"shapes \(., 2\), \(., 2\)\. Pass outputs="):
        estimate("empirical_fisher", loss, [a.weight, b.weight])


def test_squared_gradient():
    problem = cross_entropy()
    g = torch.autograd.grad(problem.loss(), problem.params)
    close(estimate("squared_gradient", problem.loss(), problem.params), [t * t for t in g])


# ------------------------------------------------------------------------------------------------------------------------- K-FAC


def test_kfac_of_one_sample_is_the_ggn():
    """One row: A and B are of a single sample, and their product is the Gauss-Newton matrix."""
    problem = of_module(mlp(3, 4, 1), torch.randn(1, 3), lambda z: (z - 2).square().sum())  # one output: every draw is exact
    close(estimate("kfac", problem.loss(), problem.params), problem.ggn())


@pytest.mark.parametrize("shape", [(5,), (2, 4)], ids=["batch", "batch and time"])
def test_kfac_of_linear_layers(shape):
    """diag(A) ⊗ diag(B) written out, with B from all columns of a square root of H."""
    first, last = nn.Linear(3, 4), nn.Linear(4, 2, bias=False)
    x, y = torch.randn(*shape, 3), torch.randn(*shape, 2)
    a = first(x)
    h = a.tanh()
    loss = (last(h) - y).square().sum() / math.prod(shape)
    slope = (1 - h**2).detach().view(-1, 4)  # ∂h/∂a
    B_last = torch.full((2,), 2.0)  # Σ_r 2/R
    B_first = 2 / len(slope) * ((slope[:, :, None] * last.weight.T) ** 2).sum((0, 2))
    A = (x.view(-1, 3) ** 2).mean(0)
    expected = [torch.outer(B_first, A), B_first, torch.outer(B_last, (h.view(-1, 4) ** 2).mean(0))]
    params = [*first.parameters(), *last.parameters()]
    mean_is("kfac", loss, params, expected)


def test_kfac_of_a_convolution():
    conv, x = nn.Conv2d(2, 3, 2, stride=2, padding=1), torch.randn(4, 2, 5, 5)
    scale = torch.rand(4, 3, 3, 3)
    loss = 0.5 * (scale * conv(x) ** 2).sum()  # draws at the output are ±√scale: B is known exactly
    patches = F.unfold(x, 2, padding=1, stride=2)  # (batch, patch, position)
    A = (patches**2).mean((0, 2)).view(2, 2, 2)
    B = scale.sum((0, 2, 3))
    close(estimate("kfac", loss, [conv.weight, conv.bias]), [B[:, None, None, None] * A, B])


def test_kfac_of_layers_written_with_other_operators():
    """x W, x Wᵀ, and a bias that is added afterwards, as PyTorch does for inputs that are not contiguous."""
    weight, bias, x = torch.randn(3, 2, requires_grad=True), torch.randn(2, requires_grad=True), torch.randn(2, 4, 3)
    A, B = (x**2).mean((0, 1)), torch.full((2,), 8.0)
    for y in (x @ weight + bias, F.linear(x.mT.contiguous().mT, weight.T, bias), x.flatten(0, 1) @ weight.T.mT.t().T + bias):
        close(estimate("kfac", 0.5 * (y**2).sum(), [weight, bias], outputs=y), [torch.outer(A, B), B])


@pytest.mark.parametrize("name", LINEAR_LAYERS)
def test_kfac_runs_and_is_positive_for_convex_losses(name):
    problem = PROBLEMS[name]()
    for diagonal in estimate("kfac", problem.loss(), problem.params, num_samples=2):
        assert diagonal.isfinite().all()
        assert (diagonal >= 0).all() or name in NOT_CONVEX


def test_kfac_names_parameters_that_are_no_weights():
    problem = residual_and_norm()
    with pytest.raises(ValueError, match=r"params\[2\], of shape \(3,\), is input 1 of NativeLayerNormBackward0.*linear layers"):
        estimate("kfac", problem.loss(), problem.params)
    problem = log_std()
    with pytest.raises(ValueError, match=r"params\[0\], of shape \(4, 3\), is input 0 of PowBackward0"):
        estimate("kfac", problem.loss(), problem.params[:2])
    layer = nn.Linear(3, 3)
    h = torch.randn(2, 3, requires_grad=True) * 2
    with pytest.raises(ValueError, match="other than through the model's outputs, and K-FAC is defined for layers below"):
        estimate("kfac", layer(h).exp().sum(), [layer.weight], outputs=h)


# ----------------------------------------------------------------------------------------------------- what holds for all of them


def request_of(loss: Tensor, params: list[Tensor]) -> estimators.Request:
    return estimators.Request(loss, tuple(params), 1, None, None, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("method", names())
def test_shapes_dtypes_and_memory(method, dtype):
    torch.set_default_dtype(dtype)
    net, x = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)), torch.randn(4, 1, 3, 3)
    params = [*net.parameters()]
    unused = nn.Linear(2, 2).weight
    for p in params:
        p.grad = torch.ones_like(p)
    loss = F.cross_entropy(net(x), torch.tensor([0, 1, 2, 0]))
    found = estimate(method, loss, [*params, unused], num_samples=2)
    assert isinstance(found, tuple)
    for diagonal, p in zip(found, [*params, unused], strict=True):
        assert (diagonal.shape, diagonal.dtype, diagonal.device) == (p.shape, p.dtype, p.device)
        assert diagonal.stride() == p.stride()
        assert not diagonal.requires_grad
        assert diagonal.isfinite().all()
        assert diagonal.any() == (p is not unused)
    assert len({d.untyped_storage().data_ptr() for d in found}) == len(found)
    assert all(torch.equal(p.grad, torch.ones_like(p)) and not hasattr(p, "hess_diag") for p in params)


@pytest.mark.parametrize("method", names())
def test_a_loss_without_curvature(method):
    net, x = nn.Linear(3, 2), torch.randn(4, 3)
    found = estimate(method, net(x).sum(), [*net.parameters()])
    assert all(bool(d.any()) == (method in ("squared_gradient", "empirical_fisher")) for d in found)


@pytest.mark.parametrize("method", names())
def test_the_graph_is_kept_when_asked(method):
    problem = cross_entropy()
    loss = problem.loss()
    first, second = (
        estimate(method, loss, problem.params, generator=torch.Generator().manual_seed(0), retain_graph=True) for _ in range(2)
    )
    close(first, second)
    loss.backward()


@pytest.mark.parametrize("method", names())
def test_one_tensor_for_params_and_no_grad_mode(method):
    layer = nn.Linear(3, 2)
    loss = F.mse_loss(layer(torch.randn(4, 3)), torch.randn(4, 2))
    with torch.no_grad():
        (found,) = estimate(method, loss, layer.weight)
    assert found.any()


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_the_recursions_are_those_of_the_engine(method):
    problem = cross_entropy()
    _, expected = hesscale.grad(problem.loss(), problem.params, method=method)
    close(estimate(method, problem.loss(), problem.params), expected)


def test_names():
    assert names() == tuple(ESTIMATORS)
    assert all(function.__doc__ for function in ESTIMATORS.values())


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"no estimator is called 'fisher'; there are 'exact', 'hesscale', .*'kfac'"):
        estimate("fisher", torch.ones((), requires_grad=True) * 2, [torch.ones(1, requires_grad=True)])


def test_wrong_arguments():
    w = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="num_samples must be at least 1, not 0"):
        estimate("hutchinson", w.sum(), [w], num_samples=0)
    with pytest.raises(ValueError, match="must be a scalar"):
        estimate("exact", w * 2, [w])
    with pytest.raises(ValueError, match="params is empty"):
        estimate("exact", w.sum(), [])
    with pytest.raises(ValueError, match="not in the graph of the loss"):
        estimate("ggn", w.sum(), [w], outputs=w * 2)


def test_where_no_outputs_are_found():
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)
    with pytest.raises(ValueError, match=r"DotBackward0 computes the loss itself.*outputs="):
        estimate("ggn", (w * x).dot(w), [w])
    z = w * x
    close(estimate("ggn", z.dot(z), [w], outputs=z), [2 * x**2])


def test_an_unknown_operator_in_the_head():
    class FlippedSquare(torch.autograd.Function):
        """Not elementwise, so that it needs a rule."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.flip(0).square()

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g.flip(0)

    layer = nn.Linear(2, 2)
    z = layer(torch.randn(3, 2))
    with pytest.raises(hesscale.UnsupportedOperator, match=r"whether FlippedSquareBackward belongs to the model or to the loss"):
        estimate("ggn", FlippedSquare.apply(z).sum(), [layer.weight])
    expected = estimate("ggn", z.square().sum(), [layer.weight], retain_graph=True)
    close(estimate("ggn", FlippedSquare.apply(z).sum(), [layer.weight], outputs=z), expected)


def test_a_tensor_between_outputs_and_loss_has_no_ggn():
    z = nn.Linear(2, 2)(torch.randn(3, 2))
    h = z.exp()
    with pytest.raises(ValueError, match=r"params\[0\], of shape \(3, 2\), lies between the model's outputs and the loss"):
        estimate("ggn", h.square().sum(), [h])


def test_losses_that_cannot_be_differentiated_twice():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g

        @staticmethod
        def hess_diag(ctx, g, s):
            return s

    layer, x = nn.Linear(2, 2), torch.randn(3, 2)
    for method in ("exact", "ggn", "ggn_mc", "hutchinson", "kfac"):
        with pytest.raises(hesscale.UnsupportedOperator, match="PyTorch cannot differentiate this loss twice"):
            estimate(method, Once.apply(layer(x)).square().sum(), [layer.weight])
    for method in ("squared_gradient", "empirical_fisher"):
        assert estimate(method, Once.apply(layer(x)).square().sum(), [layer.weight])[0].any()


# ---------------------------------------------------------------------------------------------------------------- what others say


def small_net(kind: str) -> tuple[nn.Sequential, Tensor]:
    if kind == "dense":
        return nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)), torch.randn(6, 4)
    layers = nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Conv2d(2, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers), torch.randn(4, 1, 5, 5)


@pytest.mark.parametrize("loss", ["cross entropy", "squared error"])
@pytest.mark.parametrize("kind", ["dense", "convolutional"])
@pytest.mark.parametrize(("method", "quantity"), [("exact", "DiagHessian"), ("ggn", "DiagGGNExact")])
def test_backpack_agrees(method, quantity, kind, loss):
    backpack = pytest.importorskip("backpack", reason="BackPACK is not installed")
    extensions = pytest.importorskip("backpack.extensions")
    net, x = small_net(kind)
    y = torch.randint(3, (len(x),)) if loss == "cross entropy" else torch.randn(len(x), 3)
    function = nn.CrossEntropyLoss() if loss == "cross entropy" else nn.MSELoss()
    params = [*net.parameters()]
    found = estimate(method, function(net(x), y), params)
    net, function = backpack.extend(net), backpack.extend(function)
    extension = getattr(extensions, quantity)()
    with backpack.backpack(extension):
        function(net(x), y).backward()
    close(found, [getattr(p, extension.savefield) for p in params])


def test_backpack_agrees_on_kfac():
    """One output and squared error: the factors hold no chance."""
    backpack = pytest.importorskip("backpack", reason="BackPACK is not installed")
    extensions = pytest.importorskip("backpack.extensions")
    net, x, y = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid(), nn.Linear(5, 1)), torch.randn(6, 4), torch.randn(6, 1)
    params = [*net.parameters()]
    found = estimate("kfac", F.mse_loss(net(x), y), params)
    net, function = backpack.extend(net), backpack.extend(nn.MSELoss())
    with backpack.backpack(extensions.KFLR()):
        function(net(x), y).backward()
    expected = []
    for p in params:
        diagonals = [factor.diagonal() for factor in p.kflr]
        expected.append((torch.outer(*diagonals) if len(diagonals) == 2 else diagonals[0]).view_as(p))
    close(found, expected)


def curvlinops_diagonal(operator: str, net: nn.Module, function: nn.Module, x: Tensor, y: Tensor, **options) -> list[Tensor]:
    """The diagonal of one of curvlinops' linear operators, as a matrix."""
    curvlinops = pytest.importorskip("curvlinops", reason="curvlinops is not installed")
    params = [*net.parameters()]
    matrix = getattr(curvlinops, operator)(net, function, params, [(x, y)], **options)
    diagonal = (matrix @ torch.eye(sum(p.numel() for p in params))).diagonal()
    return [d.view_as(p) for d, p in zip(diagonal.split([p.numel() for p in params]), params, strict=True)]


@pytest.mark.parametrize("kind", ["dense", "convolutional"])
@pytest.mark.parametrize(
    ("method", "operator"),
    [("exact", "HessianLinearOperator"), ("ggn", "GGNLinearOperator"), ("empirical_fisher", "EFLinearOperator")],
)
def test_curvlinops_agrees(method, operator, kind):
    net, x = small_net(kind)
    function, y = nn.CrossEntropyLoss(), torch.randint(3, (len(x),))
    expected = curvlinops_diagonal(operator, net, function, x, y)
    close(estimate(method, function(net(x), y), [*net.parameters()]), expected)


@pytest.mark.parametrize("kind", ["dense", "convolutional"])
def test_curvlinops_agrees_on_kfac(kind):
    net, x = small_net(kind)
    function, y = nn.CrossEntropyLoss(), torch.randint(3, (len(x),))
    expected = curvlinops_diagonal("KFACLinearOperator", net, function, x, y, fisher_type="type-2")
    mean_is("kfac", function(net(x), y), [*net.parameters()], expected)
