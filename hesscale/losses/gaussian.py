"""Gaussian policies and likelihoods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from .arguments import check_clip, check_constants, reduce
from .closed_form import ClosedForm, Known, wide
from .scales import Scale, scale_of
from .surrogates import Outer, as_it_is, chain, clipped, weighted


def gaussian(
    outer: Outer, scale: Scale, needed: Sequence[bool], mean: Tensor, raw: Tensor, x: Tensor, *constants: Tensor
) -> Known:
    """φ(Σ_i log N(x_i; μ_i, σ_i)). With z = (x − μ)/σ, the derivatives of log N with respect to μ are z/σ and −1/σ²."""
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
    """Return log π(a|s) = Σ_i log N(a_i; μ_i, σ_i) of each sample, as ``Independent(Normal(mean, std), 1).log_prob`` does.

    With z = (a − μ)/σ, the first and second derivatives of log N are

        by μ       z/σ               −1/σ²             (Appendix B)
        by σ²      (z² − 1)/(2σ²)    (½ − z²)/σ⁴       (Appendix B)
        by σ       (z² − 1)/σ        (1 − 3z²)/σ²
        by log σ   z² − 1            −2z²

    If you write a loss as a function of these log-probabilities, sample by sample, its diagonal at the outputs is exact as well.

    Args:
        mean: (…, A).
        actions: (…, A), constants.
        variance, std, log_std: exactly one of them. Its shape is that of the mean, or broadcasts to it, such as (A,) for a
            parameter that all states share. To train only the mean, detach the scale. To train only the scale, detach the mean.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.gaussian_log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), std=torch.ones(2))
        tensor([-2.3379])
    """
    scale, raw = scale_of(mean, variance, std, log_std)
    check_constants("mean", mean, mean.shape, actions=actions)
    return GaussianLogProb.evaluate(partial(gaussian, as_it_is, scale), [mean, raw], actions)


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
    """Return the policy gradient loss −log π(a|s) A of a Gaussian policy.

    Its diagonals are those of the log-probability times −A (Appendix C).

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
    check_constants("mean", mean, mean.shape, actions=actions)
    check_constants("mean", mean, mean.shape[:-1], advantages=advantages)
    formula = partial(gaussian, weighted, scale)
    return reduce(GaussianPolicyGradient.evaluate(formula, [mean, raw], actions, advantages), reduction)


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
    """Return PPO's surrogate −min(r A, clip(r, 1 − ε, 1 + ε) A) of a Gaussian policy, with r = π(a|s)/π_old(a|s).

    Where the surrogate is not clipped, its diagonals are −r A ((∂l/∂x)² + ∂²l/∂x²) with l = log π. (Appendix C leaves out the
    sign, 1/p_old and the clipping.) Where it is clipped, they are zero.

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
    check_constants("mean", mean, mean.shape, actions=actions)
    check_constants("mean", mean, mean.shape[:-1], advantages=advantages, old_log_prob=old_log_prob)
    formula = partial(gaussian, partial(clipped, check_clip(clip)), scale)
    return reduce(GaussianPPO.evaluate(formula, [mean, raw], actions, advantages, old_log_prob), reduction)


def gaussian_nll(
    mean: Tensor,
    targets: Tensor,
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return −Σ_i log N(x_i; μ_i, σ_i) of each sample, the negative log-likelihood of Appendix B.

    Unlike this function, ``F.gaussian_nll_loss`` also averages over the entries of a sample, and by default leaves out ½ log 2π.

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
    check_constants("mean", mean, mean.shape, targets=targets)
    return reduce(-gaussian_log_prob(mean, targets, variance=variance, std=std, log_std=log_std), reduction)


def gaussian_entropy(
    *,
    variance: Tensor | None = None,
    std: Tensor | None = None,
    log_std: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return the entropy Σ_i log σ_i + ½ log 2πe of each sample.

    For an entropy bonus, subtract it from a loss, times a coefficient. Its second derivatives are −1/(2σ⁴) with respect to σ²,
    −1/σ² with respect to σ, and 0 with respect to log σ.

    Args:
        variance, std, log_std: exactly one of them, (…, A). A scale of shape (A,), shared by all states, counts as one sample.
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.gaussian_entropy(log_std=torch.zeros(8, 2))
        tensor(2.8379)
    """
    scale, raw = scale_of(None, variance, std, log_std)
    log_std, _ = scale.read(wide(raw))
    return reduce(log_std.sum(-1) + 0.5 * (math.log(2 * math.pi) + 1) * raw.shape[-1], reduction)
