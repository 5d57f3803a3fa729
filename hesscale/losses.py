"""Losses of reinforcement learning whose derivatives at the model's outputs are closed forms (Appendices B and C of the paper).

A policy's loss is one number per sample, y = φ(l(x)): l is the log-probability of the action, x are the distribution's
parameters, and φ makes it a policy gradient or PPO's surrogate. So, entry by entry,

    ∂y/∂x = φ' ∂l/∂x        ∂²y/∂x² = φ'' (∂l/∂x)² + φ' ∂²l/∂x²

and that is all :func:`hesscale.backward` needs at the outputs: no double backward. To autograd each loss is what it would be if
written with ``torch.distributions``; it can be differentiated any number of times, and never waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "categorical_entropy",
    "categorical_log_prob",
    "categorical_policy_gradient",
    "categorical_ppo",
    "clipped_value_loss",
    "gaussian_entropy",
    "gaussian_log_prob",
    "gaussian_nll",
    "gaussian_policy_gradient",
    "gaussian_ppo",
    "value_loss",
]

# --- a function with known derivatives ---

Pair = tuple[Tensor, Tensor]  # ∂y/∂x and ∂²y/∂x², entry by entry


class Known(NamedTuple):
    """A function's value, one number per sample, and its derivatives by each input (None where they are not needed)."""

    value: Tensor
    derivatives: list[Pair | None]


Formula = Callable[..., Known]  # (needed, *inputs, *constants), in operators that autograd can differentiate


class ClosedForm(torch.autograd.Function):
    """y = f(x₁ …), whose derivatives are computed along with y, so that backward and curvature only multiply.

    One subclass per formula: what hesscale remembers of a graph from step to step, it remembers by class.
    """

    generate_vmap_rule = True

    @classmethod
    def evaluate(cls, formula: Formula, inputs: Sequence[Tensor], *constants: Tensor) -> Tensor:
        """f(inputs, constants), differentiable in the inputs."""
        with torch.no_grad():
            value, pairs = formula([x.requires_grad for x in inputs], *inputs, *constants)
        derivatives = [d for pair in pairs for d in pair or (None, None)]
        result: Tensor = cls.apply(formula, len(inputs), value, *inputs, *constants, *derivatives)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(formula: Formula, count: int, value: Tensor, *rest: Tensor | None) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.formula, ctx.count, _, *rest = inputs
        ctx.save_for_backward(*rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """∂y/∂x · g; with ∂y/∂x evaluated anew where it will be differentiated in turn."""
        inputs, constants, pairs = unpack(ctx)
        if torch.is_grad_enabled():
            pairs = ctx.formula(ctx.needs_input_grad[3 : 3 + ctx.count], *inputs, *constants).derivatives
        return per_argument(ctx, [spread(g, pair[0]) * pair[0] for pair in pairs if pair])

    @staticmethod
    def hess_diag(ctx: Any, g: Tensor | None, s: Tensor | None) -> tuple[Tensor | None, ...]:
        """closed form: (∂y/∂x)² s + ∂²y/∂x² g"""
        return per_argument(ctx, [curvature(pair, g, s) for pair in unpack(ctx)[2] if pair])


def unpack(ctx: Any) -> tuple[Sequence[Tensor], Sequence[Tensor], list[Pair | None]]:
    """Inputs, constants, and for each input that needs them its derivatives."""
    saved, count = ctx.saved_tensors, ctx.count
    firsts, seconds = saved[-2 * count :: 2], saved[1 - 2 * count :: 2]
    pairs = [None if first is None else (first, second) for first, second in zip(firsts, seconds, strict=True)]
    return saved[:count], saved[count : -2 * count], pairs


def per_argument(ctx: Any, given: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What belongs to the inputs that need it, with None for every other argument of forward."""
    remaining = iter(given)
    return tuple([next(remaining) if needed else None for needed in ctx.needs_input_grad])


def curvature(pair: Pair, g: Tensor | None, s: Tensor | None) -> Tensor | None:
    first, second = pair
    bent = None if g is None else spread(g, first) * second
    if s is None:
        return bent
    scaled = spread(s, first) * first.square()
    return scaled if bent is None else scaled + bent


def spread(per_sample: Tensor, like: Tensor) -> Tensor:
    """A number per sample, against the entries of each sample."""
    return per_sample.unsqueeze(-1) if per_sample.dim() < like.dim() else per_sample


# --- what a loss makes of a log-probability ---


class Phi(NamedTuple):
    """φ(l) with φ' and φ'', sample by sample; no φ'' where φ is linear."""

    value: Tensor
    slope: Tensor
    bend: Tensor | None


Outer = Callable[..., Phi]  # (log_prob, *constants)


def as_it_is(log_prob: Tensor) -> Phi:
    """φ(l) = l."""
    return Phi(log_prob, torch.ones_like(log_prob), None)


def weighted(log_prob: Tensor, advantages: Tensor) -> Phi:
    """φ(l) = −A l."""
    return Phi(-advantages * log_prob, -advantages, None)


def clipped(clip: float, log_prob: Tensor, advantages: Tensor, old_log_prob: Tensor) -> Phi:
    """φ(l) = −min(r A, clip(r) A) with r = exp(l − l_old); φ' = φ'' = −r A, or 0 where the clipped term is the smaller one.

    The two terms are equal inside the bounds, and there autograd's halves of both add up to the whole. Where they are equal
    outside, by rounding, only the half that belongs to r A is left.
    """
    ratio = (log_prob - old_log_prob).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    free, held = ratio * advantages, bounded * advantages
    slope = -torch.where(free > held, 0.0, free)
    slope = torch.where((free == held) & (ratio != bounded), slope / 2, slope)
    return Phi(-torch.minimum(free, held), slope, slope)


def chain(outer: Phi, pairs: Sequence[Pair | None]) -> Known:
    """φ(l(x)) from φ and the derivatives of l."""
    value, slope, bend = outer.value, outer.slope.unsqueeze(-1), outer.bend
    if bend is None:
        return Known(value, [pair and (slope * pair[0], slope * pair[1]) for pair in pairs])
    bend = bend.unsqueeze(-1)
    return Known(value, [pair and (slope * pair[0], bend * pair[0].square() + slope * pair[1]) for pair in pairs])


# --- Gaussian policies, their scale given in one of three ways ---


class Scale(NamedTuple):
    """One way to give σ: how to read (log σ, 1/σ) from it, and the derivatives of log N(a; μ, σ) by it, from z² and 1/σ."""

    read: Callable[[Tensor], tuple[Tensor, Tensor]]
    derivatives: Callable[[Tensor, Tensor], Pair]


SCALES = {
    "variance": Scale(
        lambda variance: (variance.log() / 2, variance.rsqrt()),
        lambda z2, inverse: ((z2 - 1) * inverse**2 / 2, (0.5 - z2) * inverse**4),
    ),
    "std": Scale(
        lambda std: (std.log(), std.reciprocal()),
        lambda z2, inverse: ((z2 - 1) * inverse, (1 - 3 * z2) * inverse**2),
    ),
    "log_std": Scale(
        lambda log_std: (log_std, (-log_std).exp()),
        lambda z2, inverse: (z2 - 1, -2 * z2),
    ),
}


def gaussian(
    outer: Outer, scale: Scale, needed: Sequence[bool], mean: Tensor, raw: Tensor, x: Tensor, *constants: Tensor
) -> Known:
    """φ(Σ_i log N(x_i; μ_i, σ_i)); by μ, log N has the derivatives z/σ and −1/σ² with z = (x − μ)/σ."""
    log_std, inverse = scale.read(raw)
    z = (x - mean) * inverse
    z2 = z * z
    log_prob = (-0.5 * z2 - log_std).sum(-1) - 0.5 * math.log(2 * math.pi) * mean.shape[-1]
    by_mean = (z * inverse, -inverse.square().expand_as(z)) if needed[0] else None
    by_scale = scale.derivatives(z2, inverse) if needed[1] else None
    if by_scale and raw.shape[-1:] != z.shape[-1:]:  # one σ for all entries of an action
        by_scale = by_scale[0].sum(-1, keepdim=True), by_scale[1].sum(-1, keepdim=True)
    return chain(outer(log_prob, *constants), [by_mean, by_scale])


class GaussianLogProb(ClosedForm):
    """l"""


class GaussianPolicyGradient(ClosedForm):
    """−A l"""


class GaussianPPO(ClosedForm):
    """−min(r A, clip(r) A)"""


def gaussian_log_prob(
    mean: Tensor,
    actions: Tensor,
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
) -> Tensor:
    """log π(a|s) = Σ_i log N(a_i; μ_i, σ_i) of each sample, as ``Independent(Normal(mean, std), 1).log_prob(actions)``.

    With z = (a − μ)/σ the derivatives of log N are

        by μ       z/σ               −1/σ²             (Appendix B)
        by σ²      (z² − 1)/(2σ²)    (½ − z²)/σ⁴       (Appendix B)
        by σ       (z² − 1)/σ        (1 − 3z²)/σ²
        by log σ   z² − 1            −2z²

    A loss that is written with these log-probabilities, sample by sample, has an exact diagonal at the outputs as well.

    Args:
        mean: (…, A).
        actions: (…, A), constants.
        variance, std, log_std: exactly one of them, of the mean's shape or one that broadcasts to it, like (A,) for a parameter
            that all states share. Detach it, or the mean, where the loss is to train only the other.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.gaussian_log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), std=torch.ones(2))
        tensor([-2.3379])
    """
    scale, raw = scale_of(mean, variance, std, log_std)
    check_constant("actions", actions, "mean", mean, mean.shape)
    return GaussianLogProb.evaluate(partial(gaussian, as_it_is, scale), [wide(mean), raw], actions)


def gaussian_policy_gradient(
    mean: Tensor,
    actions: Tensor,
    advantages: Tensor,
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """−log π(a|s) A for a Gaussian policy; its diagonals are those of the log-probability times −A (Appendix C).

    Args:
        mean, actions, variance, std, log_std: as in :func:`gaussian_log_prob`.
        advantages: (…), one per sample, constants.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> mean, variance = torch.zeros(1, 2, requires_grad=True), torch.tensor([1.0, 4.0])
        >>> loss = losses.gaussian_policy_gradient(mean, torch.ones(1, 2), torch.tensor([3.0]), variance=variance)
        >>> hesscale.backward(loss)
        >>> mean.hess_diag  # A / σ²
        tensor([[3.0000, 0.7500]])
    """
    scale, raw = scale_of(mean, variance, std, log_std)
    check_constant("actions", actions, "mean", mean, mean.shape)
    check_constant("advantages", advantages, "mean", mean, mean.shape[:-1])
    formula = partial(gaussian, weighted, scale)
    return reduce(GaussianPolicyGradient.evaluate(formula, [wide(mean), raw], actions, advantages), reduction)


def gaussian_ppo(
    mean: Tensor,
    actions: Tensor,
    advantages: Tensor,
    old_log_prob: Tensor,
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
    clip: float = 0.2,
    reduction: str = "mean",
) -> Tensor:
    """PPO's surrogate −min(r A, clip(r, 1 − ε, 1 + ε) A) for a Gaussian policy, with r = exp(log π(a|s) − log π_old(a|s)).

    Where the surrogate is not clipped, its diagonals are −r A ((∂l/∂x)² + ∂²l/∂x²) with l = log π (Appendix C, which leaves out
    the sign, 1/p_old and the clip); where it is, they are zero.

    Args:
        mean, actions, variance, std, log_std: as in :func:`gaussian_log_prob`.
        advantages: (…), one per sample, constants.
        old_log_prob: (…), log π_old(a|s) summed over the action's entries, constants.
        clip: ε.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> mean, log_std = torch.zeros(1, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
        >>> actions = torch.tensor([[1.0, 2.0]])
        >>> old = losses.gaussian_log_prob(mean, actions, log_std=log_std).detach()
        >>> hesscale.backward(losses.gaussian_ppo(mean, actions, torch.tensor([1.0]), old, log_std=log_std))
        >>> mean.hess_diag, log_std.hess_diag  # (1 − z²) A, (2z² − (z² − 1)²) A
        (tensor([[ 0., -3.]]), tensor([ 2., -1.]))
    """
    scale, raw = scale_of(mean, variance, std, log_std)
    check_constant("actions", actions, "mean", mean, mean.shape)
    check_constant("advantages", advantages, "mean", mean, mean.shape[:-1])
    check_constant("old_log_prob", old_log_prob, "mean", mean, mean.shape[:-1])
    formula = partial(gaussian, partial(clipped, check_clip(clip)), scale)
    return reduce(GaussianPPO.evaluate(formula, [wide(mean), raw], actions, advantages, old_log_prob), reduction)


def gaussian_nll(
    mean: Tensor,
    targets: Tensor,
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """−Σ_i log N(x_i; μ_i, σ_i) of each sample, the negative log-likelihood of Appendix B.

    ``F.gaussian_nll_loss`` averages over the entries of a sample too, and by default leaves out ½ log 2π.

    Args:
        mean, variance, std, log_std: as in :func:`gaussian_log_prob`.
        targets: (…, A), of the mean's shape, constants.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> variance = torch.tensor([[1.0, 2.0]], requires_grad=True)
        >>> hesscale.backward(losses.gaussian_nll(torch.zeros(1, 2), torch.tensor([[2.0, 2.0]]), variance=variance))
        >>> variance.hess_diag  # (z² − ½) / σ⁴
        tensor([[3.5000, 0.3750]])
    """
    scale, raw = scale_of(mean, variance, std, log_std)
    check_constant("targets", targets, "mean", mean, mean.shape)
    log_prob = GaussianLogProb.evaluate(partial(gaussian, as_it_is, scale), [wide(mean), raw], targets)
    return reduce(-log_prob, reduction)


def gaussian_entropy(
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Σ_i log σ_i + ½ log 2πe of each sample; subtract it from a loss, times a coefficient, as a bonus.

    Its second derivatives are −1/(2σ⁴) by σ², −1/σ² by σ and 0 by log σ.

    Args:
        variance, std, log_std: exactly one of them, (…, A). One of shape (A,), shared by all states, counts as one sample.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.gaussian_entropy(log_std=torch.zeros(8, 2))
        tensor(2.8379)
    """
    scale, raw = scale_of(None, variance, std, log_std)
    log_std, _ = scale.read(raw)
    return reduce(log_std.sum(-1) + 0.5 * (math.log(2 * math.pi) + 1) * raw.shape[-1], reduction)


# --- categorical policies, given by their logits ---


def categorical(outer: Outer, needed: Sequence[bool], logits: Tensor, actions: Tensor, *constants: Tensor) -> Known:
    """φ(log q_a) with q = softmax(z); by z, log q_a has the derivatives 1[k = a] − q_k and −(q_k − q_k²)."""
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    index = actions.unsqueeze(-1)
    log_prob = log_q.gather(-1, index)
    first = (-q).scatter_add(-1, index, torch.ones_like(log_prob))
    return chain(outer(log_prob.squeeze(-1), *constants), [(first, q * (q - 1))])


def entropy(needed: Sequence[bool], logits: Tensor) -> Known:
    """H = −Σ_k q_k log q_k: by z, −q (log q + H) and −q ((1 − 2q)(log q + H) + 1 − q)."""
    log_q = logits.log_softmax(-1)
    log_q = log_q.clamp(min=torch.finfo(log_q.dtype).min)  # an action that is ruled out has the logit −∞
    q = log_q.exp()
    value = -(q * log_q).sum(-1)
    excess = log_q + value.unsqueeze(-1)
    return Known(value, [(-q * excess, -q * ((1 - 2 * q) * excess + 1 - q))])


class CategoricalLogProb(ClosedForm):
    """l"""


class CategoricalPolicyGradient(ClosedForm):
    """−A l"""


class CategoricalPPO(ClosedForm):
    """−min(r A, clip(r) A)"""


class CategoricalEntropy(ClosedForm):
    """H"""


def categorical_log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """log π(a|s) = log softmax(z)_a of each sample, as ``Categorical(logits=logits).log_prob(actions)``.

    With q = softmax(z) its derivatives by z_k are 1[k = a] − q_k and −(q_k − q_k²) (Appendix B). A loss that is written with
    these log-probabilities, sample by sample, has an exact diagonal at the logits as well.

    Args:
        logits: (…, K).
        actions: (…), integers below K.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.categorical_log_prob(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor([-1.3863, -1.3863])
    """
    check_actions(logits, actions)
    return CategoricalLogProb.evaluate(partial(categorical, as_it_is), [wide(logits)], actions)


def categorical_policy_gradient(logits: Tensor, actions: Tensor, advantages: Tensor, *, reduction: str = "mean") -> Tensor:
    """−log π(a|s) A for a categorical policy: its diagonal at the logits is (q − q²) A (Appendix C).

    Args:
        logits, actions: as in :func:`categorical_log_prob`.
        advantages: (…), one per sample, constants.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> hesscale.backward(losses.categorical_policy_gradient(logits, torch.tensor([0]), torch.tensor([-2.0])))
        >>> logits.hess_diag
        tensor([[-0.5000, -0.5000]])
    """
    check_actions(logits, actions)
    check_constant("advantages", advantages, "logits", logits, logits.shape[:-1])
    formula = partial(categorical, weighted)
    return reduce(CategoricalPolicyGradient.evaluate(formula, [wide(logits)], actions, advantages), reduction)


def categorical_ppo(
    logits: Tensor,
    actions: Tensor,
    advantages: Tensor,
    old_log_prob: Tensor,
    *,
    clip: float = 0.2,
    reduction: str = "mean",
) -> Tensor:
    """PPO's surrogate −min(r A, clip(r, 1 − ε, 1 + ε) A) for a categorical policy, with r = π(a|s)/π_old(a|s).

    Where it is not clipped, its diagonal at the logits is −r A ((1[k = a] − q_k)² − q_k + q_k²); where it is, zero.

    Args:
        logits, actions: as in :func:`categorical_log_prob`.
        advantages: (…), one per sample, constants.
        old_log_prob: (…), log π_old(a|s), constants.
        clip: ε.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> logits, action = torch.zeros(1, 4, requires_grad=True), torch.tensor([0])
        >>> old = losses.categorical_log_prob(logits, action).detach()
        >>> hesscale.backward(losses.categorical_ppo(logits, action, torch.tensor([1.0]), old))
        >>> logits.hess_diag
        tensor([[-0.3750,  0.1250,  0.1250,  0.1250]])
    """
    check_actions(logits, actions)
    check_constant("advantages", advantages, "logits", logits, logits.shape[:-1])
    check_constant("old_log_prob", old_log_prob, "logits", logits, logits.shape[:-1])
    formula = partial(categorical, partial(clipped, check_clip(clip)))
    return reduce(CategoricalPPO.evaluate(formula, [wide(logits)], actions, advantages, old_log_prob), reduction)


def categorical_entropy(logits: Tensor, *, reduction: str = "mean") -> Tensor:
    """H = −Σ_k q_k log q_k of each sample, q = softmax(z); subtract it from a loss, times a coefficient, as a bonus.

    Its diagonal at the logits is −q ((1 − 2q)(log q + H) + 1 − q). A logit of −∞ rules an action out.

    Args:
        logits: (…, K).
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.categorical_entropy(torch.zeros(8, 2))
        tensor(0.6931)
    """
    return reduce(CategoricalEntropy.evaluate(entropy, [wide(logits)]), reduction)


# --- critics ---


class ClippedValue(ClosedForm):
    """max((v − R)², (v_c − R)²)"""


def farther(clip: float, needed: Sequence[bool], values: Tensor, returns: Tensor, old_values: Tensor) -> Known:
    """max((v − R)², (v_c − R)²) with v_c = v_old + clip(v − v_old, −ε, ε): each square counts half where they are equal."""
    change = values - old_values
    bounded = change.clamp(-clip, clip)
    inside = (change == bounded).to(values.dtype)
    error, held = values - returns, old_values + bounded - returns
    square, held_square = error * error, held * held
    share = ((square > held_square).to(error.dtype) + (square >= held_square).to(error.dtype)) / 2
    first = 2 * (share * error + (1 - share) * inside * held)
    return Known(torch.maximum(square, held_square), [(first, 2 * (share + (1 - share) * inside))])


def value_loss(values: Tensor, returns: Tensor, *, half: bool = False, reduction: str = "mean") -> Tensor:
    """(v − R)², or ½ (v − R)² with ``half=True``: second derivatives 2 and 1, divided by N where the loss is a mean.

    Appendix C has ones, that is ``half=True, reduction="sum"``.

    Args:
        values, returns: of one shape; returns are constants.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> values = torch.zeros(4, requires_grad=True)
        >>> hesscale.backward(losses.value_loss(values, torch.ones(4)))
        >>> values.hess_diag
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    check_constant("returns", returns, "values", values, values.shape)
    check_reduction(reduction)
    loss = F.mse_loss(values, returns, reduction=reduction)
    return loss / 2 if half else loss


def clipped_value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    *,
    clip: float = 0.2,
    half: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """PPO's max((v − R)², (v_c − R)²) with v_c = v_old + clip(v − v_old, −ε, ε), times ½ with ``half=True``.

    The second derivative is that of :func:`value_loss`, or 0 where the clipped term is the larger one.

    Args:
        values, returns, old_values: of one shape; only the first is differentiated.
        clip: ε.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.

    Example:
        >>> import torch, hesscale
        >>> from hesscale import losses
        >>> values = torch.tensor([0.1, 0.5], requires_grad=True)
        >>> hesscale.backward(losses.clipped_value_loss(values, torch.ones(2), torch.zeros(2), reduction="sum"))
        >>> values.hess_diag
        tensor([2., 0.])
    """
    check_constant("returns", returns, "values", values, values.shape)
    check_constant("old_values", old_values, "values", values, values.shape)
    loss = ClippedValue.evaluate(partial(farther, check_clip(clip)), [wide(values)], returns, old_values)
    return reduce(loss / 2 if half else loss, reduction)


# --- what they share ---

REDUCTIONS = ("mean", "sum", "none")


def reduce(per_sample: Tensor, reduction: str) -> Tensor:
    check_reduction(reduction)
    return per_sample.mean() if reduction == "mean" else per_sample.sum() if reduction == "sum" else per_sample


def wide(x: Tensor) -> Tensor:
    """Half precision as float32, as autocast does for losses."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def scale_of(mean: Tensor | None, *given: Tensor | None) -> tuple[Scale, Tensor]:
    """The one way in which σ is given, and its parameter."""
    named = [(name, raw) for name, raw in zip(SCALES, given, strict=True) if raw is not None]
    if len(named) != 1:
        met = " and ".join(name for name, _ in named) or "none"
        raise TypeError(f"the scale of a Gaussian must be given as exactly one of {', '.join(SCALES)}, but got {met}")
    name, raw = named[0]
    if not isinstance(raw, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(raw).__name__}")
    if mean is not None and raw.shape != mean.shape and not broadcasts(raw.shape, mean.shape):
        raise ValueError(
            f"{name} has shape {tuple(raw.shape)}, which does not match mean with shape {tuple(mean.shape)}. "
            f"Expected that shape, or one that broadcasts to it, like {tuple(mean.shape[-1:])} for all states"
        )
    return SCALES[name], wide(raw)


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def check_constant(name: str, constant: Tensor, of: str, parameter: Tensor, shape: torch.Size) -> None:
    """Constants match the parameter that they are compared with, and carry no gradient that would be lost."""
    if constant.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(constant.shape)}, which does not match {of} with shape {tuple(parameter.shape)}. "
            f"Expected {tuple(shape)}"
        )
    if constant.requires_grad:
        raise ValueError(f"{name} requires a gradient, but counts as constant in this loss. Pass {name}.detach()")


def check_actions(logits: Tensor, actions: Tensor) -> None:
    check_constant("actions", actions, "logits", logits, logits.shape[:-1])
    if actions.dtype != torch.int64:
        raise TypeError(f"actions must be the indices of classes in int64, not {actions.dtype}. Pass actions.long()")


def check_clip(clip: float) -> float:
    if not clip >= 0:
        raise ValueError(f"clip={clip} must not be negative")
    return clip


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r} is not one of {', '.join(map(repr, REDUCTIONS))}")
