"""hesscale.losses against torch.distributions: values, gradients and Hessian diagonals, by closed form and by double backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from oracle import hessian_diagonal
from torch import Tensor, nn
from torch import distributions as D
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import hesscale
from hesscale import losses
from hesscale.engine.head_structure import Head
from hesscale.losses.arguments import reduce
from hesscale.losses.surrogates import clipped

N, A, K = 7, 3, 5
GENERATOR = torch.Generator().manual_seed(0)
REDUCTIONS = ("mean", "sum", "none")
SCALES = ("variance", "std", "log_std")
TO_STD: dict[str, Callable[[Tensor], Tensor]] = {"variance": torch.sqrt, "std": lambda std: std, "log_std": torch.exp}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


MEAN, LOG_STD, ACTIONS = draw(N, A), 0.4 * draw(N, A), draw(N, A)
LOGITS, CLASSES = draw(N, K), torch.tensor([0, 4, 2, 2, 1, 3, 0])
ADVANTAGES = torch.tensor([1.5, -2.0, 0.0, 0.7, -0.3, 1.0, -1.0]).double()
DRIFT = torch.tensor([0.05, 0.5, 0.4, -0.6, -0.7, 0.9, 0.1]).double()  # log r: inside, clipped or not, on either side
VALUES, RETURNS, OLD_VALUES = draw(N), draw(N), draw(N)
OLD_VALUES[:3] = VALUES[:3] + torch.tensor([0.05, -0.1, 0.2]).double()


def raw(scale: str, log_std: Tensor = LOG_STD) -> Tensor:
    return {"variance": (2 * log_std).exp(), "std": log_std.exp(), "log_std": log_std.clone()}[scale]


def normal_log_prob(mean: Tensor, x: Tensor, scale: str, given: Tensor) -> Tensor:
    return D.Independent(D.Normal(mean, TO_STD[scale](given).expand_as(mean)), 1).log_prob(x)


def class_log_prob(logits: Tensor) -> Tensor:
    return D.Categorical(logits=logits).log_prob(CLASSES)


def surrogate(log_prob: Tensor, old: Tensor, clip: float = 0.2) -> Tensor:
    ratio = (log_prob - old).exp()
    return -torch.min(ratio * ADVANTAGES, ratio.clamp(1 - clip, 1 + clip) * ADVANTAGES)


def farther(values: Tensor, clip: float = 0.2) -> Tensor:
    held = OLD_VALUES + (values - OLD_VALUES).clamp(-clip, clip)
    return torch.max((values - RETURNS) ** 2, (held - RETURNS) ** 2)


def old_log_prob(scale: str, log_std: Tensor = LOG_STD) -> Tensor:
    return normal_log_prob(MEAN, ACTIONS, scale, raw(scale, log_std)) - DRIFT


OLD_CLASS = class_log_prob(LOGITS) - DRIFT


class Case(NamedTuple):
    """``ours`` with a reduction against ``theirs`` per sample, as functions of ``inputs``."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


CASES: dict[str, Case] = {}


def case(name: str, ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    assert name not in CASES, name
    CASES[name] = Case(ours, theirs, inputs)


SHARED = {"": LOG_STD, ", shared": LOG_STD[0], ", one for all": LOG_STD[0, 0], ", per sample": LOG_STD[:, :1]}
for scale in SCALES:
    full = old_log_prob(scale)
    for shape, log_std in SHARED.items():
        old = old_log_prob(scale, log_std)
        case(
            f"policy gradient, {scale}{shape}",
            lambda m, v, k=scale, **how: losses.gaussian_policy_gradient(m, ACTIONS, ADVANTAGES, **{k: v}, **how),
            lambda m, v, k=scale: -normal_log_prob(m, ACTIONS, k, v) * ADVANTAGES,
            MEAN,
            raw(scale, log_std),
        )
        case(
            f"ppo, {scale}{shape}",
            lambda m, v, k=scale, old=old, **how: losses.gaussian_ppo(m, ACTIONS, ADVANTAGES, old, **{k: v}, **how),
            lambda m, v, k=scale, old=old: surrogate(normal_log_prob(m, ACTIONS, k, v), old),
            MEAN,
            raw(scale, log_std),
        )
        case(
            f"nll, {scale}{shape}",
            lambda m, v, k=scale, **how: losses.gaussian_nll(m, ACTIONS, **{k: v}, **how),
            lambda m, v, k=scale: -normal_log_prob(m, ACTIONS, k, v),
            MEAN,
            raw(scale, log_std),
        )
    case(
        f"ppo on log-probabilities, {scale}",
        lambda m, v, k=scale, old=full, reduction="mean": reduce(
            surrogate(losses.gaussian_log_prob(m, ACTIONS, **{k: v}), old), reduction
        ),
        lambda m, v, k=scale, old=full: surrogate(normal_log_prob(m, ACTIONS, k, v), old),
        MEAN,
        raw(scale),
    )
    case(
        f"entropy, {scale}",
        lambda v, k=scale, **how: losses.gaussian_entropy(**{k: v}, **how),
        lambda v, k=scale: D.Independent(D.Normal(torch.zeros_like(v), TO_STD[k](v)), 1).entropy(),
        raw(scale),
    )
case(
    "policy gradient, logits",
    lambda z, **how: losses.categorical_policy_gradient(z, CLASSES, ADVANTAGES, **how),
    lambda z: -class_log_prob(z) * ADVANTAGES,
    LOGITS,
)
case(
    "ppo, logits",
    lambda z, **how: losses.categorical_ppo(z, CLASSES, ADVANTAGES, OLD_CLASS, **how),
    lambda z: surrogate(class_log_prob(z), OLD_CLASS),
    LOGITS,
)
case(
    "ppo on log-probabilities, logits",
    lambda z, reduction="mean": reduce(surrogate(losses.categorical_log_prob(z, CLASSES), OLD_CLASS), reduction),
    lambda z: surrogate(class_log_prob(z), OLD_CLASS),
    LOGITS,
)
case("entropy, logits", losses.categorical_entropy, lambda z: D.Categorical(logits=z).entropy(), LOGITS)
case("value", lambda v, **how: losses.value_loss(v, RETURNS, **how), lambda v: (v - RETURNS) ** 2, VALUES)
case("value, half", lambda v, **how: losses.value_loss(v, RETURNS, half=True, **how), lambda v: (v - RETURNS) ** 2 / 2, VALUES)
case("value, clipped", lambda v, **how: losses.clipped_value_loss(v, RETURNS, OLD_VALUES, **how), farther, VALUES)
case(
    "value, clipped, half",
    lambda v, **how: losses.clipped_value_loss(v, RETURNS, OLD_VALUES, clip=0.5, half=True, **how),
    lambda v: farther(v, 0.5) / 2,
    VALUES,
)


def total(per_sample: Tensor, reduction: str) -> Tensor:
    """A scalar: "none" is tried with a different weight, of either sign, for each sample."""
    if reduction == "none":
        return (per_sample * torch.arange(-3.0, 4.0, dtype=per_sample.dtype)).sum()
    return reduce(per_sample, reduction)


def ours_and_theirs(name: str, reduction: str, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    ours, theirs, _ = CASES[name]
    loss = ours(*inputs, reduction=reduction)
    assert loss.shape == ((N,) if reduction == "none" else ())
    return total(loss, "none" if reduction == "none" else "sum"), total(theirs(*inputs), reduction)


def equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture
def without_double_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(loss: Tensor, head: Head) -> dict:
        assert not head.inexact
        return {}

    monkeypatch.setattr("hesscale.engine.propagate.exact_diagonals", forbidden)


# --- each against autograd ---


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_gradient_and_diagonal_are_autograds(name: str, reduction: str, without_double_backward: None) -> None:
    inputs = [x.clone().requires_grad_() for x in CASES[name].inputs]
    loss, reference = ours_and_theirs(name, reduction, inputs)
    equal(loss, reference)
    gradients, diagonals = hesscale.grad(loss, inputs, retain_graph=True)
    for x, gradient, diagonal in zip(inputs, gradients, diagonals, strict=True):
        equal(gradient, torch.autograd.grad(reference, x, retain_graph=True)[0])
        equal(diagonal, hessian_diagonal(reference, x))
        equal(hessian_diagonal(loss, x), hessian_diagonal(reference, x))


@pytest.mark.parametrize("name", CASES)
def test_all_second_derivatives_by_double_backward(name: str) -> None:
    """Those between entries, between mean and scale, and by the weights of the samples too."""
    inputs = CASES[name].inputs

    def hessian(function: Callable[..., Tensor]) -> Tensor:
        sizes = [x.numel() for x in inputs]

        def of_flat(flat: Tensor) -> Tensor:
            parts = [part.view_as(x) for part, x in zip(flat[:-N].split(sizes), inputs, strict=True)]
            return (function(*parts) * flat[-N:]).sum()

        return torch.autograd.functional.hessian(of_flat, torch.cat([*(x.flatten() for x in inputs), ADVANTAGES + 2]))

    equal(hessian(lambda *x: CASES[name].ours(*x, reduction="none")), hessian(CASES[name].theirs))


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.inputs) == 2])
def test_with_its_partner_detached(name: str, which: int, without_double_backward: None) -> None:
    inputs = [x.clone().requires_grad_(i == which) for i, x in enumerate(CASES[name].inputs)]
    loss, reference = ours_and_theirs(name, "mean", inputs)
    hesscale.backward(loss)
    equal(inputs[which].grad, torch.autograd.grad(reference, inputs[which], retain_graph=True)[0])
    equal(inputs[which].hess_diag, hessian_diagonal(reference, inputs[which]))
    assert inputs[1 - which].grad is None


PLAIN = [name for name in CASES if name.startswith(("ppo on", "entropy, variance", "entropy, std", "entropy, log_std"))]


@pytest.mark.parametrize("name", [name for name in CASES if name not in PLAIN])
def test_with_curvature_above_it(name: str, without_double_backward: None) -> None:
    """A nonlinear function of each sample's loss sends both g and s; those written in several operators need double backward."""
    inputs = [x.clone().requires_grad_() for x in CASES[name].inputs]
    loss = (0.25 * CASES[name].ours(*inputs, reduction="none")).tanh().sum()
    reference = (0.25 * CASES[name].theirs(*inputs)).tanh().sum()
    for x, diagonal in zip(inputs, hesscale.grad(loss, inputs)[1], strict=True):
        equal(diagonal, hessian_diagonal(reference, x))


# --- ties and bounds ---


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0, 1e-320])
@pytest.mark.parametrize("ratio", [1.0, 1.25, 0.75, math.nextafter(1.25, 2), math.nextafter(0.75, 0), 1.3, 0.7, 1e9, 0.0])
def test_surrogate_at_a_ratio(ratio: float, advantage: float) -> None:
    """The bounds count as inside; by a tiny advantage the two terms are equal outside of them as well."""
    log_prob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    ratio_of = log_prob.exp()
    reference = -torch.min(ratio_of * advantages, ratio_of.clamp(0.75, 1.25) * advantages).sum()
    value, slope, bend = clipped(0.25, log_prob.detach(), advantages, torch.zeros(1).double())
    assert value == reference
    (gradient,) = torch.autograd.grad(reference, log_prob, retain_graph=True)
    assert slope == gradient
    assert bend == hessian_diagonal(reference, log_prob)


@pytest.mark.parametrize("sign", [1, -1])
def test_surrogate_of_a_policy_at_the_bound(sign: int) -> None:
    """Standard normal against N(0, 4) at its mean: the ratio is ½ in floating point too."""
    mean, log_std = torch.zeros(1, 1).double().requires_grad_(), torch.zeros(1).double().requires_grad_()
    actions, advantages = torch.zeros(1, 1).double(), torch.tensor([float(sign)]).double()
    old = (losses.gaussian_log_prob(mean, actions, log_std=log_std) + math.log(2)).detach()
    ratio = (losses.gaussian_log_prob(mean, actions, log_std=log_std) - old).exp()
    clip = 1 - ratio.item()
    assert clip == pytest.approx(0.5)
    reference = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()
    loss = losses.gaussian_ppo(mean, actions, advantages, old, log_std=log_std, clip=clip)
    _, diagonals = hesscale.grad(loss, [mean, log_std])
    for x, diagonal in zip((mean, log_std), diagonals, strict=True):
        equal(diagonal, hessian_diagonal(reference, x))
    assert diagonals[0].item() == pytest.approx(0.5 * sign)


def test_a_ratio_that_overflows_is_clipped() -> None:
    mean = torch.zeros(2, 1, requires_grad=True)
    old, advantages = torch.tensor([-500.0, -500.0]), torch.tensor([1.0, 2.0])
    hesscale.backward(losses.gaussian_ppo(mean, torch.ones(2, 1), advantages, old, std=torch.ones(1)))
    assert not mean.grad.any()
    assert not mean.hess_diag.any()


@pytest.mark.parametrize("value", [0.0, 0.25, -0.25, 0.5, 1.0, -0.5])
@pytest.mark.parametrize("target", [0.0, 0.375, -2.0, 2.0])
def test_clipped_value_at_a_value(value: float, target: float) -> None:
    """At v = ½ with R = 3⁄8 both squares are equal though v is clipped: half of the curvature is left."""
    values, target_, zero = (torch.tensor([x], dtype=torch.float64) for x in (value, target, 0.0))
    values.requires_grad_()
    reference = torch.max((values - target_) ** 2, (values.clamp(-0.25, 0.25) - target_) ** 2).sum()
    loss = losses.clipped_value_loss(values, target_, zero, clip=0.25)
    (gradient,), (diagonal,) = hesscale.grad(loss, [values], retain_graph=True)
    assert loss == reference
    assert gradient == torch.autograd.grad(reference, values, retain_graph=True)[0]
    assert diagonal == hessian_diagonal(reference, values) == hessian_diagonal(loss, values)
    if (value, target) == (0.5, 0.375):
        assert diagonal == 1


# --- in networks ---


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, width)).double()


FEATURES = draw(N, 4)


def diagonals_of(loss: Tensor, *modules: nn.Module) -> list[Tensor]:
    parameters = [p for module in modules for p in module.parameters()]
    for p in parameters:
        p.grad = None
    hesscale.backward(loss, retain_graph=True)
    return [p.hess_diag.clone() for p in parameters]


@pytest.mark.parametrize("surrogate_", [False, True], ids=["policy gradient", "ppo"])
@pytest.mark.parametrize("detached", [None, "mean", "scale"])
@pytest.mark.parametrize("scale", SCALES)
def test_networks_for_mean_and_scale(scale: str, detached: str | None, surrogate_: bool) -> None:
    """What hesscale finds for torch.distributions, and without its double backward."""
    torch.manual_seed(0)
    actor, spread = network(A), network(A)
    mean, given = actor(FEATURES), spread(FEATURES)
    given = given if scale == "log_std" else given.exp()
    mean = mean.detach() if detached == "mean" else mean
    given = given.detach() if detached == "scale" else given
    trained = [module for module, name in ((actor, "mean"), (spread, "scale")) if name != detached]
    log_prob = normal_log_prob(mean, ACTIONS, scale, given)
    old = log_prob.detach() - DRIFT
    if surrogate_:
        loss = losses.gaussian_ppo(mean, ACTIONS, ADVANTAGES, old, **{scale: given})
        reference = surrogate(log_prob, old).mean()
    else:
        loss = losses.gaussian_policy_gradient(mean, ACTIONS, ADVANTAGES, **{scale: given})
        reference = -(log_prob * ADVANTAGES).mean()
    assert "double backward" not in str(hesscale.explain(loss))
    for found, expected in zip(diagonals_of(loss, *trained), diagonals_of(reference, *trained), strict=True):
        equal(found, expected)


def test_a_whole_ppo_loss_of_logits(without_double_backward: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Surrogate, entropy and value on two heads of one body."""
    torch.manual_seed(0)
    body, policy, critic = network(6), nn.Linear(6, K).double(), nn.Linear(6, 1).double()
    h = body(FEATURES).tanh()
    logits, values = policy(h), critic(h).squeeze(-1)
    loss = losses.categorical_ppo(logits, CLASSES, ADVANTAGES, OLD_CLASS) - 0.01 * losses.categorical_entropy(logits)
    loss = loss + 0.5 * losses.clipped_value_loss(values, RETURNS, OLD_VALUES)
    found = diagonals_of(loss, body, policy, critic)

    monkeypatch.undo()
    h = body(FEATURES).tanh()
    logits, values = policy(h), critic(h).squeeze(-1)
    reference = surrogate(class_log_prob(logits), OLD_CLASS).mean() - 0.01 * D.Categorical(logits=logits).entropy().mean()
    reference = reference + 0.5 * farther(values).mean()
    assert "double backward" in str(hesscale.explain(reference))
    for ours, theirs in zip(found, diagonals_of(reference, body, policy, critic), strict=True):
        equal(ours, theirs)


@pytest.mark.parametrize("part", [lambda z: z.chunk(2, -1), lambda z: (z[:, :A], z[:, A:])], ids=["chunk", "slices"])
@pytest.mark.parametrize("name", [f"{loss}, {scale}" for loss in ("policy gradient", "ppo", "nll") for scale in SCALES])
def test_mean_and_scale_from_one_output(name: str, part: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """Their mixed derivatives are between entries of one tensor: no matter to its diagonal."""
    z = torch.cat(CASES[name].inputs, -1).requires_grad_()
    loss, reference = CASES[name].ours(*part(z)), CASES[name].theirs(*part(z)).mean()
    equal(hesscale.grad(loss, z)[1][0], hessian_diagonal(reference, z))


def test_one_tensor_behind_mean_and_scale() -> None:
    """Here the mixed derivatives do matter, and double backward finds them."""
    z = MEAN.clone().requires_grad_()
    loss = losses.gaussian_nll(z.sin(), ACTIONS, log_std=z.cos())
    reference = -normal_log_prob(z.sin(), ACTIONS, "log_std", z.cos()).mean()
    assert "double backward" in str(hesscale.explain(loss))
    equal(hesscale.grad(loss, z)[1][0], hessian_diagonal(reference, z))


def test_an_expanded_scale_is_found_by_double_backward() -> None:
    log_std = LOG_STD[0].clone().requires_grad_()
    old = old_log_prob("log_std", LOG_STD[0])
    loss = losses.gaussian_ppo(MEAN, ACTIONS, ADVANTAGES, old, log_std=log_std.expand(N, A))
    reference = surrogate(normal_log_prob(MEAN, ACTIONS, "log_std", log_std), old).mean()
    assert "double backward" in str(hesscale.explain(loss))
    equal(hesscale.grad(loss, log_std)[1][0], hessian_diagonal(reference, log_std))


def test_samples_of_more_dimensions() -> None:
    mean, logits = MEAN[:6].view(2, 3, A).clone().requires_grad_(), LOGITS[:6].view(2, 3, K).clone().requires_grad_()
    weights, actions, classes = ADVANTAGES[:6].view(2, 3), ACTIONS[:6].view(2, 3, A), CLASSES[:6].view(2, 3)
    gaussian = losses.gaussian_policy_gradient(mean, actions, weights, log_std=LOG_STD[0])
    categorical = losses.categorical_policy_gradient(logits, classes, weights)
    reference = -(normal_log_prob(mean, actions, "log_std", LOG_STD[0]) * weights).mean()
    other = -(D.Categorical(logits=logits).log_prob(classes) * weights).mean()
    equal(hesscale.grad(gaussian, mean)[1][0], hessian_diagonal(reference, mean))
    equal(hesscale.grad(categorical, logits)[1][0], hessian_diagonal(other, logits))


# --- the paper's formulas ---


def test_appendix_b() -> None:
    """Diagonals of the log-likelihoods: −1 ⊘ σ², [½ − (x − μ)² ⊘ σ²] ⊘ σ⁴, and of the cross entropy q − q²."""
    x, mean, variance, logits = ACTIONS, *(t.clone().requires_grad_() for t in (MEAN, raw("variance"), LOGITS))
    log_q = losses.gaussian_log_prob(mean, x, variance=variance).sum()
    by_mean, by_variance = hesscale.grad(log_q, [mean, variance])[1]
    v, q = variance.detach(), LOGITS.softmax(-1)
    equal(by_mean, -1 / v)
    equal(by_variance, (0.5 - (x - MEAN) ** 2 / v) / v**2)
    equal(hesscale.grad(-losses.categorical_log_prob(logits, CLASSES).sum(), logits)[1][0], q - q * q)


def test_appendix_c_ppo() -> None:
    """The printed diagonals of p, with −A / p_old and the clip: p the density with a minus in its exponent and (2π)^(k/2)."""
    mean, variance = MEAN.clone().requires_grad_(), raw("variance").requires_grad_()
    a, mu, v = ACTIONS, MEAN, raw("variance")
    p = (torch.exp(-((a - mu) ** 2) / (2 * v)) / (2 * math.pi * v).sqrt()).prod(-1, keepdim=True)
    p_old = p / DRIFT.exp().unsqueeze(-1)
    by_mu, by_v = p * (a - mu) / v, p * ((a - mu) ** 2 / v - 1) / (2 * v)
    printed = ((a - mu) * by_mu - p) / v, (v * by_v - p) * ((a - mu) ** 2 / v - 1) / (2 * v**2) - 0.5 * p * (a - mu) ** 2 / v**3
    ratio = DRIFT.exp()
    free = torch.where(ADVANTAGES > 0, ratio <= 1.2, ratio >= 0.8).unsqueeze(-1)
    old = p_old.squeeze(-1).log()
    loss = losses.gaussian_ppo(mean, ACTIONS, ADVANTAGES, old, variance=variance, reduction="sum")
    for found, of_p in zip(hesscale.grad(loss, [mean, variance])[1], printed, strict=True):
        equal(found, -ADVANTAGES.unsqueeze(-1) * of_p / p_old * free)


def test_appendix_c_value() -> None:
    """Ones for ½ (v − R)², 2/N for the mean squared error."""
    values = VALUES.clone().requires_grad_()
    equal(hesscale.grad(losses.value_loss(values, RETURNS, half=True, reduction="sum"), values)[1][0], torch.ones(N).double())
    equal(hesscale.grad(losses.value_loss(values, RETURNS), values)[1][0], torch.full((N,), 2 / N, dtype=torch.float64))


def test_gaussian_nll_of_torch() -> None:
    """F.gaussian_nll_loss averages over the entries of a sample too."""
    found = losses.gaussian_nll(MEAN, ACTIONS, variance=raw("variance"))
    equal(found, A * F.gaussian_nll_loss(MEAN, ACTIONS, raw("variance"), full=True))


# --- precision, masks, transforms ---


FUNCTIONS = {"policy gradient": losses.gaussian_policy_gradient, "ppo": losses.gaussian_ppo, "nll": losses.gaussian_nll}


@pytest.mark.parametrize("name", [f"{loss}, {scale}" for loss in FUNCTIONS for scale in SCALES])
@pytest.mark.parametrize("log_std", [-5.0, -2.0, 0.0, 2.0])
def test_float32(name: str, log_std: float) -> None:
    """Actions as the policy draws them: as exact as float32 allows, from σ = 0.007 to σ = 7."""
    kind, _, scale = name.rpartition(", ")
    found = []
    for dtype in (torch.float32, torch.float64):
        mean, given = (
            MEAN.to(dtype, copy=True).requires_grad_(),
            raw(scale, torch.full((N, A), log_std)).to(dtype).requires_grad_(),
        )
        actions = (MEAN.float() + math.exp(log_std) * (ACTIONS - 0.1).float()).to(dtype)
        rest = {
            "policy gradient": [ADVANTAGES],
            "ppo": [ADVANTAGES, normal_log_prob(mean, actions, scale, given).detach() - DRIFT],
            "nll": [],
        }[kind]
        loss = FUNCTIONS[kind](mean, actions, *(x.to(dtype) for x in rest), **{scale: given})
        found.append(hesscale.grad(loss, [mean, given])[1])
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-3, atol=1e-4 * float(double.abs().max()))


def test_half_precision_is_evaluated_in_float32() -> None:
    mean = MEAN.bfloat16().requires_grad_()
    loss = losses.gaussian_nll(mean, ACTIONS.bfloat16(), log_std=LOG_STD.bfloat16())
    assert loss.dtype == torch.float32
    hesscale.backward(loss)
    torch.testing.assert_close(mean.hess_diag, ((-2 * LOG_STD.bfloat16().float()).exp() / N).bfloat16())
    assert losses.gaussian_entropy(log_std=LOG_STD.bfloat16()).dtype == torch.float32


def test_squares_beyond_half_precision() -> None:
    values, returns = torch.full((3,), 300.0, dtype=torch.float16, requires_grad=True), torch.zeros(3, dtype=torch.float16)
    for loss in (losses.value_loss(values, returns), losses.clipped_value_loss(values, returns, returns, clip=math.inf)):
        assert loss == 90_000
        assert hesscale.grad(loss, values)[1][0].tolist() == pytest.approx([2 / 3] * 3, rel=1e-3)


def test_masked_actions() -> None:
    """A logit of −∞ gets zeros, and the others what they get without it."""
    masked = LOGITS.masked_fill(torch.arange(K) == 3, -math.inf).requires_grad_()
    rest = [0, 1, 2, 4]
    kept = LOGITS[:, rest].clone().requires_grad_()
    classes = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    for z in (masked, kept):
        hesscale.backward(losses.categorical_entropy(z) + losses.categorical_ppo(z, classes, ADVANTAGES, OLD_CLASS))
    equal(masked.hess_diag[:, rest], kept.hess_diag)
    equal(masked.grad[:, rest], kept.grad)
    assert not masked.hess_diag[:, 3].any()
    assert not masked.grad[:, 3].any()


@pytest.mark.parametrize("name", CASES)
def test_vmap(name: str) -> None:
    """Over ensembles of policies, gradients and second derivatives too."""
    ours, _, inputs = CASES[name]
    ensembles = [torch.stack([x, x + 0.1, x * 0.9]) for x in inputs]
    gradient = torch.func.grad(ours)

    def along(*x: Tensor) -> Tensor:
        return torch.func.grad(lambda *y: gradient(*y).sin().sum())(*x)

    for function in (ours, gradient, along):
        mapped = torch.func.vmap(function)(*ensembles)
        for i, found in enumerate(mapped):
            equal(found, function(*(x[i] for x in ensembles)))


@pytest.mark.parametrize("name", CASES)
def test_tracing_reads_no_values(name: str) -> None:
    """Fake tensors have no values: a step that waited for one, or branched on it, would raise."""
    ours, _, inputs = CASES[name]

    def diagonals(*x: Tensor) -> tuple[Tensor | None, ...]:
        x = tuple(t.detach().requires_grad_() for t in x)
        return hesscale.grad(ours(*x), x)[1]

    with torch.autograd.set_multithreading_enabled(False):
        traced = make_fx(diagonals, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    other = [0.9 * x for x in inputs]
    for found, expected in zip(traced(*other), diagonals(*other), strict=True):
        equal(found, expected)


# --- errors ---

ERRORS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "actions": (
        lambda: losses.gaussian_nll(MEAN, ACTIONS[:, :2], std=MEAN.exp()),
        r"targets has shape \(7, 2\), which does not match mean with shape \(7, 3\). Expected \(7, 3\)",
    ),
    "advantages": (
        lambda: losses.gaussian_policy_gradient(MEAN, ACTIONS, ADVANTAGES.unsqueeze(-1), log_std=LOG_STD),
        r"advantages has shape \(7, 1\), .* Expected \(7,\)",
    ),
    "old log-probabilities": (
        lambda: losses.gaussian_ppo(MEAN, ACTIONS, ADVANTAGES, ACTIONS, log_std=LOG_STD),
        r"old_log_prob has shape \(7, 3\), .* Expected \(7,\)",
    ),
    "scale": (lambda: losses.gaussian_log_prob(MEAN, ACTIONS, std=torch.ones(2)), r"std has shape \(2,\), .* like \(3,\)"),
    "larger scale": (lambda: losses.gaussian_log_prob(MEAN[0], ACTIONS[0], std=MEAN.exp()), r"std has shape \(7, 3\)"),
    "classes": (lambda: losses.categorical_log_prob(LOGITS, CLASSES.unsqueeze(-1)), r"actions has shape \(7, 1\)"),
    "float classes": (
        lambda: losses.categorical_log_prob(LOGITS, CLASSES.double()),
        r"int64, not torch.float64. Pass actions.long",
    ),
    "values": (lambda: losses.value_loss(VALUES.unsqueeze(-1), RETURNS), r"returns has shape \(7,\), .* Expected \(7, 1\)"),
    "old values": (lambda: losses.clipped_value_loss(VALUES, RETURNS, MEAN), r"old_values has shape \(7, 3\)"),
    "no scale": (lambda: losses.gaussian_log_prob(MEAN, ACTIONS), "exactly one of variance, std, log_std, but got none"),
    "two scales": (lambda: losses.gaussian_entropy(std=MEAN, log_std=MEAN), "got std and log_std"),
    "number": (lambda: losses.gaussian_log_prob(MEAN, ACTIONS, std=0.5), "std must be a tensor, not float"),
    "gradient": (
        lambda: losses.categorical_policy_gradient(LOGITS, CLASSES, ADVANTAGES.clone().requires_grad_()),
        r"advantages requires a gradient, .* Pass advantages.detach\(\)",
    ),
    "clip": (
        lambda: losses.categorical_ppo(LOGITS, CLASSES, ADVANTAGES, OLD_CLASS, clip=-0.1),
        "clip must not be negative, but is -0.1",
    ),
    "reduction": (
        lambda: losses.categorical_entropy(LOGITS, reduction="max"),
        "reduction='max' is not one of 'mean', 'sum', 'none'",
    ),
    "reduction of values": (lambda: losses.value_loss(VALUES, RETURNS, reduction="max"), "reduction='max'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()
