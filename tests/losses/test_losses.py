"""Whole losses: exact at the outputs of the last layer and at leaves of the loss, and so in the last layer's parameters."""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from cases.losses import multi_margin, written_out
from oracle import hessian_diagonal
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import hesscale


@dataclass(frozen=True)
class Leaf:
    """A parameter of the loss itself."""

    value: Tensor


@dataclass(frozen=True)
class Loss:
    """``function`` of the outputs of linear layers (given by their shapes) and of leaves."""

    function: Callable[..., Tensor]
    inputs: tuple[tuple[int, ...] | Leaf, ...]
    separate: bool  # a sum over samples: then the last layer's parameters are exact, too


LOSSES: dict[str, Loss] = {}


def loss(name: str, function: Callable[..., Tensor], *inputs: tuple[int, ...] | Leaf, separate: bool = True) -> None:
    """Add a line to the table."""
    assert name not in LOSSES, name
    LOSSES[name] = Loss(function, inputs, separate)


def build(name: str) -> tuple[Tensor, list[Tensor], list[nn.Linear], list[Tensor]]:
    """The loss, the outputs, the layers that made them, and the leaves."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    torch.manual_seed(zlib.crc32(name.encode()))
    arguments, outputs, layers, leaves = [], [], [], []
    for given in LOSSES[name].inputs:
        if isinstance(given, Leaf):
            leaves.append(given.value.clone().requires_grad_())
            arguments.append(leaves[-1])
            continue
        *rows, width = given
        features = torch.randn(*rows, 5, generator=generator, dtype=torch.float64)
        body, layer = nn.Linear(5, 5, dtype=torch.float64), nn.Linear(5, width, dtype=torch.float64)
        outputs.append(layer(torch.tanh(body(features))))
        layers.append(layer)
        arguments.append(outputs[-1])
    return LOSSES[name].function(*arguments), outputs, layers, leaves


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


GENERATOR = torch.Generator().manual_seed(0)
N, C = 4, 5
CLASSES = torch.tensor([2, 0, 4, 1])
TARGETS, SIGNS, ADVANTAGES, WEIGHTS = draw(N, C), draw(N, C).sign(), draw(N), draw(N).exp()
PROBABILITIES, CLASS_WEIGHTS = draw(N, C).softmax(-1), draw(C).exp()
BINARY, COUNTS, SIGN = (draw(N, C) > 0).double(), torch.tensor([[0, 1, 2, 7, 3]] * N).double(), draw(N).sign()
SEQUENCE = torch.tensor([[2, 0, 3], [1, 4, 2], [0, 0, 1], [2, 3, 4]])
IMAGE = torch.stack([SEQUENCE, (SEQUENCE + 2) % C], -1)

# --- losses of torch.nn.functional ---

for reduction in ("mean", "sum"):
    how = {"reduction": reduction}
    loss(f"cross entropy {reduction}", lambda z, how=how: F.cross_entropy(z, CLASSES, **how), (N, C))
    loss(
        f"cross entropy, everything {reduction}",
        lambda z, how=how: F.cross_entropy(z, CLASSES, CLASS_WEIGHTS, ignore_index=4, label_smoothing=0.1, **how),
        (N, C),
    )
    loss(
        f"cross entropy, everything with probabilities {reduction}",
        lambda z, how=how: F.cross_entropy(z, PROBABILITIES, CLASS_WEIGHTS, label_smoothing=0.1, **how),
        (N, C),
    )
    loss(f"nll {reduction}", lambda z, how=how: F.nll_loss(z.log_softmax(-1), CLASSES, CLASS_WEIGHTS, **how), (N, C))
    loss(f"mse {reduction}", lambda z, how=how: F.mse_loss(z, TARGETS, **how), (N, C))
    loss(f"l1 {reduction}", lambda z, how=how: F.l1_loss(z, TARGETS, **how), (N, C))
    loss(f"smooth l1 {reduction}", lambda z, how=how: F.smooth_l1_loss(z, TARGETS, beta=0.5, **how), (N, C))
    loss(f"huber {reduction}", lambda z, how=how: F.huber_loss(z, TARGETS, delta=0.5, **how), (N, C))
    loss(f"bce {reduction}", lambda z, how=how: F.binary_cross_entropy(z.sigmoid(), BINARY, **how), (N, C))
    loss(f"bce with logits {reduction}", lambda z, how=how: F.binary_cross_entropy_with_logits(z, BINARY, **how), (N, C))
    loss(f"poisson nll {reduction}", lambda z, how=how: F.poisson_nll_loss(z, COUNTS, full=True, **how), (N, C))
    loss(f"soft margin {reduction}", lambda z, how=how: F.soft_margin_loss(z, SIGNS, **how), (N, C))
    loss(f"hinge embedding {reduction}", lambda z, how=how: F.hinge_embedding_loss(z.square(), SIGNS, **how), (N, C))
    loss(
        f"multilabel soft margin {reduction}",
        lambda z, how=how: F.multilabel_soft_margin_loss(z, BINARY, CLASS_WEIGHTS, **how),
        (N, C),
    )
    loss(
        f"gaussian nll {reduction}",
        lambda m, v, how=how: F.gaussian_nll_loss(m, TARGETS, F.softplus(v), full=True, **how),
        (N, C),
        (N, C),
    )
    loss(f"cosine embedding {reduction}", lambda a, b, how=how: F.cosine_embedding_loss(a, b, SIGN, **how), (N, C), (N, C))
    loss(
        f"margin ranking {reduction}",
        lambda a, b, how=how: F.margin_ranking_loss(a[:, 0] ** 2, b[:, 0] ** 2, SIGN, margin=0.5, **how),
        (N, 1),
        (N, 1),
    )
    loss(f"triplet margin {reduction}", lambda a, p, n, how=how: F.triplet_margin_loss(a, p, n, **how), *[(N, C)] * 3)

for reduction in ("batchmean", "sum"):
    how = {"reduction": reduction}
    loss(f"kl div {reduction}", lambda z, how=how: F.kl_div(z.log_softmax(-1), PROBABILITIES, **how), (N, C))
    loss(
        f"kl div of logs {reduction}",
        lambda z, how=how: F.kl_div(z.log_softmax(-1), PROBABILITIES.log(), log_target=True, **how),
        (N, C),
    )

loss("cross entropy, weighted samples", lambda z: (WEIGHTS * F.cross_entropy(z, CLASSES, reduction="none")).mean(), (N, C))
loss("cross entropy, one sample", lambda z: F.cross_entropy(z, CLASSES[0]), (C,))
loss("cross entropy, sequence", lambda z: F.cross_entropy(z.transpose(1, 2), SEQUENCE), (N, 3, C))
loss(
    "cross entropy, sequence with everything",
    lambda z: F.cross_entropy(z.transpose(1, 2), SEQUENCE, CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.1),
    (N, 3, C),
)
loss("cross entropy, flattened sequence", lambda z: F.cross_entropy(z.flatten(0, 1), SEQUENCE.flatten()), (N, 3, C))
loss("cross entropy, image", lambda z: F.cross_entropy(z.permute(0, 3, 1, 2), IMAGE, CLASS_WEIGHTS), (N, 3, 2, C))
loss("cross entropy, image summed", lambda z: F.cross_entropy(z.movedim(-1, 1), IMAGE, reduction="sum"), (N, 3, 2, C))
loss("nll, image", lambda z: F.nll_loss(z.movedim(-1, 1).log_softmax(1), IMAGE, ignore_index=1), (N, 3, 2, C))
loss("nll of log of softmax", lambda z: F.nll_loss(z.softmax(-1).log(), CLASSES), (N, C))
loss("mse, weighted", lambda z: F.mse_loss(z, TARGETS, weight=TARGETS.exp()), (N, C))
loss("mse, weighted samples", lambda z: (WEIGHTS * F.mse_loss(z, TARGETS, reduction="none").mean(-1)).mean(), (N, C))
loss("mse of two heads", F.mse_loss, (N, C), (N, C))
loss("mse of tanh", lambda z: F.mse_loss(z.tanh(), TARGETS), (N, C))
loss("mse of softmax", lambda z: F.mse_loss(z.softmax(-1), PROBABILITIES), (N, C))
loss("mse written out", lambda z: ((z - TARGETS) ** 2).mean(), (N, C))
loss("huber, weighted", lambda z: F.huber_loss(z, TARGETS, weight=TARGETS.exp()), (N, C))
loss("smooth l1 of two heads", F.smooth_l1_loss, (N, C), (N, C))
loss("bce, weight", lambda z: F.binary_cross_entropy(z.sigmoid(), BINARY, CLASS_WEIGHTS), (N, C))
loss("bce of softmax", lambda z: F.binary_cross_entropy(z.softmax(-1), PROBABILITIES), (N, C))
loss(
    "bce with logits, weight, pos_weight",
    lambda z: F.binary_cross_entropy_with_logits(z, BINARY, WEIGHTS.unsqueeze(1), pos_weight=CLASS_WEIGHTS),
    (N, C),
)
loss("bce with logits of two heads", lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()), (N, C), (N, C))
loss("poisson nll of rates", lambda z: F.poisson_nll_loss(F.softplus(z), COUNTS, log_input=False), (N, C))
loss("gaussian nll, one variance", lambda m, v: F.gaussian_nll_loss(m, TARGETS, v.exp()), (N, C), (N, 1))
loss("gaussian nll, chunks", lambda z: F.gaussian_nll_loss(z[:, :C], TARGETS, z[:, C:].exp()), (N, 2 * C))
loss(
    "kl div of two heads",
    lambda a, b: F.kl_div(a.log_softmax(-1), b.log_softmax(-1), reduction="sum", log_target=True),
    (N, C),
    (N, C),
)
loss("kl div to a probability head", lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="sum"), (N, C), (N, C))
loss("cosine embedding, margin", lambda a, b: F.cosine_embedding_loss(a, b, SIGN, margin=-0.5), (N, C), (N, C))
loss("triplet margin, swap, p = 3", lambda a, p, n: F.triplet_margin_loss(a, p, n, p=3, swap=True), *[(N, C)] * 3)
loss(
    "triplet margin with distance",
    lambda a, p, n: F.triplet_margin_with_distance_loss(
        a, p, n, distance_function=lambda u, v: 1 - F.cosine_similarity(u, v), margin=2.0
    ),
    *[(N, C)] * 3,
)
loss(
    "squared multi margin",
    lambda z: (
        written_out(
            lambda z: F.multi_margin_loss(z, CLASSES, margin=0.8, weight=CLASS_WEIGHTS, reduction="none"),
            lambda z: multi_margin(z, CLASSES, 1, CLASS_WEIGHTS, "none"),
        )(z)
        .square()
        .mean()
    ),
    (N, C),
)
loss(
    "multi margin, p = 2",
    written_out(
        lambda z: F.multi_margin_loss(z, CLASSES, 2, 0.8, CLASS_WEIGHTS),
        lambda z: multi_margin(z, CLASSES, 2, CLASS_WEIGHTS, "mean"),
    ),
    (N, C),
)
loss("l1, both heads", lambda a, b: F.l1_loss(a.tanh(), b.sigmoid()), (N, C), (N, C))

# --- classification, written out ---


def focal(z: Tensor) -> Tensor:
    log_p = z.log_softmax(-1).gather(1, CLASSES.unsqueeze(1)).squeeze(1)
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def binary_focal(z: Tensor) -> Tensor:
    cross_entropy = F.binary_cross_entropy_with_logits(z, BINARY, reduction="none")
    p = z.sigmoid()
    p_true = p * BINARY + (1 - p) * (1 - BINARY)
    return ((0.25 * BINARY + 0.75 * (1 - BINARY)) * (1 - p_true) ** 2 * cross_entropy).mean()


def smoothed_by_hand(z: Tensor) -> Tensor:
    log_p = z.log_softmax(-1)
    return (0.9 * -log_p.gather(1, CLASSES.unsqueeze(1)).squeeze(1) - 0.1 * log_p.mean(-1)).mean()


def evidential(z: Tensor) -> Tensor:
    """Dirichlet evidence: expected cross entropy plus KL to the uniform Dirichlet."""
    alpha = F.softplus(z) + 1
    expected = (PROBABILITIES * (torch.digamma(alpha.sum(-1, keepdim=True)) - torch.digamma(alpha))).sum(-1)
    return (expected + 0.1 * D.kl_divergence(D.Dirichlet(alpha), D.Dirichlet(torch.ones_like(alpha)))).mean()


def poly(z: Tensor) -> Tensor:
    cross_entropy = F.cross_entropy(z, CLASSES, reduction="none")
    return (cross_entropy + 1 - torch.exp(-cross_entropy)).mean()


def generalized(z: Tensor) -> Tensor:
    p = z.softmax(-1)[torch.arange(N), CLASSES]
    return ((1 - p**0.7) / 0.7).mean()


def symmetric_cross_entropy(z: Tensor) -> Tensor:
    return F.cross_entropy(z, CLASSES) - (z.softmax(-1) * PROBABILITIES.clamp_min(1e-4).log()).sum(-1).mean()


def jensen_shannon(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.softmax(-1), b.softmax(-1)
    m = ((p + q) / 2).log()
    return (F.kl_div(m, p, reduction="batchmean") + F.kl_div(m, q, reduction="batchmean")) / 2


def distillation(z: Tensor) -> Tensor:
    soft = F.kl_div((z / 3).log_softmax(-1), PROBABILITIES, reduction="batchmean") * 9
    return 0.3 * F.cross_entropy(z, CLASSES) + 0.7 * soft


def margin_softmax(z: Tensor) -> Tensor:
    """AM-softmax on normalized scores."""
    z = F.normalize(z, dim=-1) * 4
    return F.cross_entropy(z - 0.3 * F.one_hot(CLASSES, C), CLASSES)


loss("focal", focal, (N, C))
loss("focal, binary", binary_focal, (N, C))
loss("label smoothing by hand", smoothed_by_hand, (N, C))
loss("evidential", evidential, (N, C))
loss("entropy, sequence", lambda z: -D.Categorical(logits=z).entropy().mean(), (N, 3, C))
loss("mse of softmax, sequence", lambda z: F.mse_loss(z.softmax(-1), PROBABILITIES.unsqueeze(1).expand(N, 3, C)), (N, 3, C))
loss("poly", poly, (N, C))
loss("generalized cross entropy", generalized, (N, C))
loss("symmetric cross entropy", symmetric_cross_entropy, (N, C))
loss("jensen-shannon", jensen_shannon, (N, C), (N, C))
loss("distillation", distillation, (N, C))
loss("margin softmax", margin_softmax, (N, C))
loss("confidence penalty", lambda z: F.cross_entropy(z, CLASSES) + 0.1 * (z.softmax(-1) * z.log_softmax(-1)).sum() / N, (N, C))
loss("z-loss", lambda z: F.cross_entropy(z, CLASSES) + 1e-2 * z.logsumexp(-1).square().mean(), (N, C))
loss("capped logits", lambda z: F.cross_entropy(5 * torch.tanh(z / 5), CLASSES), (N, C))
loss("squared hinge", lambda z: F.relu(1 - SIGNS * z).square().mean(), (N, C))
loss("ordinal", lambda z: F.binary_cross_entropy_with_logits(z.cumsum(-1), BINARY), (N, C))
loss("pairwise ranking", lambda z: -F.logsigmoid(z.unsqueeze(-1) - z.unsqueeze(-2)).mean(), (N, C))

# --- regression ---


def mixture_density(z: Tensor) -> Tensor:
    """Three components: logits, means and log standard deviations."""
    logits, means, log_stds = z.chunk(3, dim=-1)
    y = TARGETS[:, :1]
    log_p = -0.5 * ((y - means) / log_stds.exp()) ** 2 - log_stds - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(logits.log_softmax(-1) + log_p, -1).mean()


def mixture_same_family(logits: Tensor, means: Tensor, log_stds: Tensor) -> Tensor:
    mixture = D.MixtureSameFamily(D.Categorical(logits=logits), D.Normal(means, log_stds.exp()), validate_args=False)
    return -mixture.log_prob(TARGETS[:, 0]).mean()


def expectile(z: Tensor) -> Tensor:
    error = TARGETS - z
    return ((0.7 - (error < 0).double()).abs() * error**2).mean()


def pinball(z: Tensor) -> Tensor:
    error = (TARGETS - z.tanh()).unsqueeze(-1)
    levels = torch.tensor([0.1, 0.5, 0.9]).double()
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def negative_binomial(rate: Tensor, dispersion: Tensor) -> Tensor:
    r, m = F.softplus(dispersion) + 0.1, F.softplus(rate) + 0.1
    log_p = torch.lgamma(COUNTS + r) - torch.lgamma(r) - torch.lgamma(COUNTS + 1)
    return -(log_p + r * torch.log(r / (r + m)) + COUNTS * torch.log(m / (r + m))).mean()


def beta_nll(mean: Tensor, raw: Tensor) -> Tensor:
    variance = F.softplus(raw)
    return (F.gaussian_nll_loss(mean, TARGETS, variance, reduction="none") * variance.detach() ** 0.5).mean()


loss("mixture density network", mixture_density, (N, 9))
loss("mixture, same family", mixture_same_family, *[(N, 3)] * 3)
loss("expectile", expectile, (N, C))
loss("pinball", pinball, (N, C))
loss("negative binomial", negative_binomial, (N, C), (N, C))
loss("gaussian nll, variance-weighted", beta_nll, (N, C), (N, C))
loss("log-cosh", lambda z: (z - TARGETS).cosh().log().mean(), (N, C))
loss("cauchy", lambda z: torch.log1p((z - TARGETS) ** 2).mean(), (N, C))
loss("charbonnier", lambda z: torch.sqrt((z - TARGETS) ** 2 + 1e-3).mean(), (N, C))
loss("euclidean distance", lambda z: (z - TARGETS).norm(dim=-1).mean(), (N, C))
loss("relative error", lambda z: ((z - TARGETS) / TARGETS).abs().pow(1.5).mean(), (N, C))
loss("softmax, expectation, square", lambda z: (((z.softmax(-1) * TARGETS).sum(-1) - 1) ** 2).mean(), (N, C))
loss("expected value of bins", lambda z: F.huber_loss((z.softmax(-1) * CLASS_WEIGHTS).sum(-1), ADVANTAGES), (N, C))
loss("product of two heads", lambda a, b: ((a * b - TARGETS) ** 2).mean(), (N, C), (N, C))
loss("weibull", lambda a, b: (WEIGHTS.unsqueeze(1).pow(a.exp()) * b.exp() - a - b).mean(), (N, C), (N, C))

# --- reinforcement learning ---


def ppo(log_prob: Tensor, noise: float = 0.3) -> Tensor:
    """The clipped surrogate, with some ratios clipped (or all at a tie, without noise)."""
    old = log_prob.detach() + noise * torch.tensor([-1.0, -0.3, 0.3, 1.0]).double()
    ratio = (log_prob - old).exp()
    return -torch.min(ratio * ADVANTAGES, ratio.clamp(0.8, 1.2) * ADVANTAGES).mean()


def cleanrl_ppo(z: Tensor, value: Tensor) -> Tensor:
    """Policy, clipped value and entropy terms as in CleanRL."""
    policy = D.Categorical(logits=z, validate_args=False)
    log_ratio = policy.log_prob(CLASSES) - PROBABILITIES[:, 0].log()
    ratio = log_ratio.exp()
    surrogate = torch.max(-ADVANTAGES * ratio, -ADVANTAGES * torch.clamp(ratio, 0.8, 1.2)).mean()
    value, returns, old = value.view(-1), TARGETS[:, 0], TARGETS[:, 1]
    clipped = old + torch.clamp(value - old, -0.2, 0.2)
    value_loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
    return surrogate - 0.01 * policy.entropy().mean() + 0.5 * value_loss


def gaussian(mean: Tensor, log_std: Tensor) -> D.Independent:
    return D.Independent(D.Normal(mean, log_std.exp(), validate_args=False), 1, validate_args=False)


def a2c(z: Tensor, value: Tensor) -> Tensor:
    policy = D.Categorical(logits=z, validate_args=False)
    actor = -(policy.log_prob(CLASSES) * ADVANTAGES).mean() - 0.01 * policy.entropy().mean()
    return actor + 0.5 * F.mse_loss(value.squeeze(-1), TARGETS[:, 0])


def sac_actor(mean: Tensor, log_std: Tensor) -> Tensor:
    """CleanRL's squashed Gaussian: the action feeds a quadratic critic, its log-probability the entropy term."""
    log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
    normal = D.Normal(mean, log_std.exp(), validate_args=False)
    x = mean + log_std.exp() * TARGETS
    action = torch.tanh(x)
    log_prob = normal.log_prob(x) - torch.log(1 - action.pow(2) + 1e-6)
    critic = -((action - 0.3) ** 2).sum(-1)
    return (0.2 * log_prob.sum(-1) - critic).mean()


def squashed(mean: Tensor, log_std: Tensor) -> D.TransformedDistribution:
    base = D.Normal(mean, log_std.exp(), validate_args=False)
    return D.TransformedDistribution(base, [D.TanhTransform(cache_size=1)], validate_args=False)


def sac_distribution(mean: Tensor, log_std: Tensor) -> Tensor:
    torch.manual_seed(0)
    policy = squashed(mean, log_std)
    action = policy.rsample()
    return (0.2 * policy.log_prob(action).sum(-1) + ((action - 0.3) ** 2).sum(-1)).mean()


def beta_policy(a: Tensor, b: Tensor) -> Tensor:
    policy = D.Beta(F.softplus(a) + 1, F.softplus(b) + 1, validate_args=False)
    return ppo(policy.log_prob(PROBABILITIES[:, :1]).sum(-1)) - 0.01 * policy.entropy().mean()


def quantile_huber(z: Tensor) -> Tensor:
    """QR-DQN: every quantile against every target sample."""
    error = TARGETS.unsqueeze(1) - z.unsqueeze(2)
    levels = (torch.arange(C).double() + 0.5) / C
    huber = F.huber_loss(z.unsqueeze(2).expand_as(error), TARGETS.unsqueeze(1).expand_as(error), reduction="none")
    return ((levels.view(1, -1, 1) - (error.detach() < 0).double()).abs() * huber).mean(2).sum(1).mean()


def c51(z: Tensor) -> Tensor:
    """The distributional cross-entropy of the taken action, from logits (batch, actions × atoms)."""
    log_p = z.view(N, 3, C).log_softmax(-1)[torch.arange(N), CLASSES % 3]
    atoms = torch.linspace(-1, 1, C).double()
    position = ((0.3 * ADVANTAGES.unsqueeze(1) + 0.9 * atoms).clamp(-1, 1) + 1) / (2 / (C - 1))
    low, high = position.floor().long(), position.ceil().long()
    projected = torch.zeros(N, C).double()
    projected.scatter_add_(1, low, PROBABILITIES * (high - position + (low == high)))
    projected.scatter_add_(1, high, PROBABILITIES * (position - low))
    return -(projected * log_p).sum(-1).mean()


def double_q(z: Tensor) -> Tensor:
    q = z.gather(1, CLASSES.unsqueeze(1)).squeeze(1)
    return F.smooth_l1_loss(q, TARGETS[:, 0])


def twin_critics(a: Tensor, b: Tensor) -> Tensor:
    return F.mse_loss(a.view(-1), TARGETS[:, 0]) + F.mse_loss(b.view(-1), TARGETS[:, 0])


def conservative_q(z: Tensor) -> Tensor:
    taken = z[torch.arange(N), CLASSES]
    return (z.logsumexp(1) - taken).mean() + 0.5 * F.mse_loss(taken, TARGETS[:, 0])


def direct_preference(chosen: Tensor, rejected: Tensor) -> Tensor:
    """DPO: log-probabilities of two sequences, with constant references."""

    def log_prob(z: Tensor) -> Tensor:
        return z.log_softmax(-1).gather(-1, SEQUENCE.unsqueeze(-1)).squeeze(-1).sum(-1)

    return -F.logsigmoid(0.5 * (log_prob(chosen) - log_prob(rejected) + ADVANTAGES)).mean()


def soft_actor_discrete(z: Tensor) -> Tensor:
    p, log_p = z.softmax(-1), z.log_softmax(-1)
    return (p * (0.2 * log_p - TARGETS)).sum(-1).mean()


def trust_region(z: Tensor) -> Tensor:
    policy, old = D.Categorical(logits=z), D.Categorical(probs=PROBABILITIES)
    return -(policy.log_prob(CLASSES) * ADVANTAGES).mean() + 0.5 * D.kl_divergence(old, policy).mean()


loss("policy gradient", lambda z: -(D.Categorical(logits=z).log_prob(CLASSES) * ADVANTAGES).mean(), (N, C))
loss("entropy of logits", lambda z: -D.Categorical(logits=z).entropy().mean(), (N, C))
loss("entropy of probabilities", lambda z: -D.Categorical(probs=z.softmax(-1)).entropy().mean(), (N, C))
loss(
    "policy gradient, probabilities",
    lambda z: -(D.Categorical(probs=z.softmax(-1)).log_prob(CLASSES) * ADVANTAGES).mean(),
    (N, C),
)
loss("a2c", a2c, (N, C), (N, 1))
loss("ppo, categorical", lambda z: ppo(D.Categorical(logits=z).log_prob(CLASSES)), (N, C))
loss("ppo, categorical, first epoch", lambda z: ppo(D.Categorical(logits=z).log_prob(CLASSES), 0), (N, C))
loss("ppo, categorical, all of cleanrl", cleanrl_ppo, (N, C), (N, 1))
loss("ppo, gaussian", lambda m, s: ppo(gaussian(m, s).log_prob(TARGETS)), (N, C), (N, C))
loss("ppo, gaussian, one output", lambda z: ppo(gaussian(z[:, :C], z[:, C:]).log_prob(TARGETS)), (N, 2 * C))
loss("ppo, gaussian, first epoch", lambda m, s: ppo(gaussian(m, s).log_prob(TARGETS), 0), (N, C), (N, C))
loss("ppo, gaussian, softplus", lambda m, s: ppo(D.Normal(m, F.softplus(s)).log_prob(TARGETS).sum(-1)), (N, C), (N, C))
loss(
    "ppo, gaussian, a log-std for all states",
    lambda m, s: ppo(gaussian(m, s.expand_as(m)).log_prob(TARGETS)) - 0.01 * gaussian(m, s.expand_as(m)).entropy().mean(),
    (N, C),
    Leaf(draw(C) * 0.3),
)
loss("sac actor", sac_actor, (N, C), (N, C))
loss("sac actor, tanh transform", sac_distribution, (N, C), (N, C))
loss("squashed gaussian", lambda m, s: -squashed(m, s).log_prob(TARGETS.tanh()).mean(), (N, C), (N, C))
loss("ppo, squashed gaussian", lambda m, s: ppo(squashed(m, s).log_prob(TARGETS.tanh()).sum(-1)), (N, C), (N, C))
loss("ppo, beta", beta_policy, (N, 1), (N, 1))
loss("ppo, bernoulli", lambda z: ppo(D.Bernoulli(logits=z).log_prob(BINARY).sum(-1)), (N, C))
loss("quantile huber", quantile_huber, (N, C))
loss("c51", c51, (N, 3 * C))
loss("double q", double_q, (N, C))
loss("twin critics", twin_critics, (N, 1), (N, 1))
loss("conservative q", conservative_q, (N, C))
loss("dpo", direct_preference, (N, 3, C), (N, 3, C), separate=False)  # the layer meets three tokens of a sample
loss("discrete sac", soft_actor_discrete, (N, C))
loss("trust region", trust_region, (N, C))
loss("squared q difference", lambda z: (z.gather(1, CLASSES.unsqueeze(1)) - z.mean(1, keepdim=True)).square().mean(), (N, C))

# --- samples that interact ---


def info_nce(a: Tensor, b: Tensor) -> Tensor:
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    return F.cross_entropy((a.unsqueeze(1) * b.unsqueeze(0)).sum(-1) / 0.5, torch.arange(N))


def clip(z: Tensor) -> Tensor:
    return (F.cross_entropy(z, torch.arange(N)) + F.cross_entropy(z.T, torch.arange(N))) / 2


def dice(z: Tensor) -> Tensor:
    p = z.sigmoid()
    return 1 - (2 * (p * BINARY).sum() + 1) / (p.sum() + BINARY.sum() + 1)


def cox(z: Tensor) -> Tensor:
    """Partial likelihood of survival times in the order of the batch."""
    risk = z.squeeze(-1)
    return -(risk - risk.flip(0).logcumsumexp(0).flip(0)).mean()


def variance_covariance(z: Tensor) -> Tensor:
    """VICReg's hinge on the standard deviation of every feature over the batch."""
    return F.relu(2 - torch.sqrt(z.var(0) + 1e-4)).mean()


loss("rmse", lambda z: torch.sqrt(F.mse_loss(z, TARGETS)), (N, C), separate=False)
loss("rmse written out", lambda z: ((z - TARGETS) ** 2).mean().sqrt(), (N, C), separate=False)
loss("log of mse", lambda z: F.mse_loss(z, TARGETS).log(), (N, C), separate=False)
loss("frobenius norm", lambda z: (z - TARGETS).norm(), (N, C), separate=False)
loss("info-nce", info_nce, (N, C), (N, C), separate=False)
loss("contrastive logits", lambda z: F.cross_entropy(z / 0.1, torch.arange(N)), (N, N))
loss("contrastive logits, both ways", clip, (N, N), separate=False)
loss("dice", dice, (N, C), separate=False)
loss("cox", cox, (N, 1), separate=False)
loss("spread over the batch", variance_covariance, (N, C), separate=False)
loss("product of losses", lambda a, b: F.mse_loss(a, TARGETS) * F.cross_entropy(b, CLASSES), (N, C), (N, C), separate=False)
loss("entropy of the mean policy", lambda z: (z.softmax(-1).mean(0) * z.softmax(-1).mean(0).log()).sum(), (N, C), separate=False)

# --- sums, scales, leaves ---


def variational(mean: Tensor, log_var: Tensor) -> Tensor:
    """The two terms of an autoencoder's bound, with a reconstruction that is elementwise in the latent."""
    latent = mean + torch.exp(0.5 * log_var) * TARGETS
    divergence = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(-1)
    return (F.mse_loss(latent.sin(), TARGETS, reduction="none").sum(-1) + divergence).mean()


def uncertainty_weighted(a: Tensor, b: Tensor, log_variances: Tensor) -> Tensor:
    """Two tasks, each scaled by a learned variance."""
    tasks = torch.stack([F.mse_loss(a, TARGETS), F.cross_entropy(b, CLASSES)])
    return (tasks * (-log_variances).exp() + log_variances).sum()


loss("scaled", lambda z: 128 * F.cross_entropy(z, CLASSES), (N, C))
loss("scaled and divided", lambda z: F.mse_loss(z, TARGETS) * 3 / 7, (N, C))
loss("negated", lambda z: -F.cross_entropy(z, CLASSES), (N, C))
loss("two heads", lambda a, b: F.cross_entropy(a, CLASSES) + 0.5 * F.mse_loss(b, TARGETS), (N, C), (N, C))
loss("two losses on one head", lambda z: F.cross_entropy(z, CLASSES) + 0.1 * F.mse_loss(z, TARGETS), (N, C))
loss("temperature", lambda z, t: F.cross_entropy(z / t, CLASSES), (N, C), Leaf(torch.tensor(1.7).double()))
loss("log temperature", lambda z, t: F.cross_entropy(z * t.exp(), CLASSES), (N, C), Leaf(torch.tensor([0.4]).double()))
loss("log-std", lambda m, s: -D.Normal(m, s.exp()).log_prob(TARGETS).mean(), (N, C), Leaf(draw(C) * 0.3))
loss("l2 penalty", lambda z, w: F.mse_loss(z, TARGETS) + 0.1 * w.pow(2).sum(), (N, C), Leaf(draw(3, 2)))
loss("l2 norm penalty", lambda z, w: F.mse_loss(z, TARGETS) + 0.1 * w.norm(), (N, C), Leaf(draw(3, 2)))
loss("learned class weights", lambda z, w: F.cross_entropy(z + w.log_softmax(0), CLASSES), (N, C), Leaf(draw(C)))
loss("variational", variational, (N, C), (N, C))
loss("uncertainty-weighted tasks", uncertainty_weighted, (N, C), (N, C), Leaf(draw(2)))


def assert_exact(got: Tensor | None, truth: Tensor) -> None:
    torch.testing.assert_close(got if got is not None else torch.zeros_like(truth), truth, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("name", LOSSES)
def test_exact_at_the_outputs(name: str, method: str) -> None:
    value, outputs, _, leaves = build(name)
    _, diagonals = hesscale.grad(value, outputs + leaves, method=method, retain_graph=True)
    for tensor, diagonal in zip(outputs + leaves, diagonals, strict=True):
        assert_exact(diagonal, hessian_diagonal(value, tensor))


@pytest.mark.parametrize("name", LOSSES)
def test_exact_in_the_last_layer(name: str) -> None:
    value, _, layers, leaves = build(name)
    parameters = [p for layer in layers for p in layer.parameters()] if LOSSES[name].separate else []
    hesscale.backward(value, retain_graph=True)
    for tensor in parameters + leaves:
        assert_exact(tensor.hess_diag, hessian_diagonal(value, tensor))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_works_with_rules_only(name: str) -> None:
    value, _, layers, _ = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hesscale.backward(value, head="rules")
    assert all(layer.weight.hess_diag.isfinite().all() for layer in layers)
