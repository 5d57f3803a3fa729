"""Categorical policies, given by their logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .arguments import check_clip, check_constants, reduce
from .closed_form import ClosedForm, Known
from .surrogates import Outer, as_it_is, chain, clipped, weighted


def categorical(outer: Outer, needed: Sequence[bool], logits: Tensor, actions: Tensor, *constants: Tensor) -> Known:
    """φ(log q_a) with q = softmax(z). The derivatives of log q_a with respect to z are 1[k = a] − q_k and −(q_k − q_k²)."""
    log_q = logits.log_softmax(-1)
    q = log_q.exp()
    index = actions.unsqueeze(-1)
    log_prob = log_q.gather(-1, index)
    first = (-q).scatter_add(-1, index, torch.ones_like(log_prob))
    return chain(outer(log_prob.squeeze(-1), *constants), [(first, q * (q - 1))])


def entropy(needed: Sequence[bool], logits: Tensor) -> Known:
    """H = −Σ_k q_k log q_k, with the derivatives −q (log q + H) and −q ((1 − 2q)(log q + H) + 1 − q) with respect to z."""
    log_q = logits.log_softmax(-1)
    log_q = log_q.clamp(min=torch.finfo(log_q.dtype).min)  # a masked action has the logit −∞
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
    """Return log π(a|s) = log softmax(z)_a of each sample, as ``Categorical(logits=logits).log_prob(actions)`` does.

    With q = softmax(z), its derivatives with respect to z_k are 1[k = a] − q_k and −(q_k − q_k²) (Appendix B). If you write a
    loss as a function of these log-probabilities, sample by sample, its diagonal at the logits is exact as well.

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
    return CategoricalLogProb.evaluate(partial(categorical, as_it_is), [logits], actions)


def categorical_policy_gradient(logits: Tensor, actions: Tensor, advantages: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the policy gradient loss −log π(a|s) A of a categorical policy.

    Its diagonal at the logits is (q − q²) A (Appendix C).

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
    check_constants("logits", logits, logits.shape[:-1], advantages=advantages)
    formula = partial(categorical, weighted)
    return reduce(CategoricalPolicyGradient.evaluate(formula, [logits], actions, advantages), reduction)


def categorical_ppo(
    logits: Tensor,
    actions: Tensor,
    advantages: Tensor,
    old_log_prob: Tensor,
    *,
    clip: float = 0.2,
    reduction: str = "mean",
) -> Tensor:
    """Return PPO's surrogate −min(r A, clip(r, 1 − ε, 1 + ε) A) of a categorical policy, with r = π(a|s)/π_old(a|s).

    Where it is not clipped, its diagonal at the logits is −r A ((1[k = a] − q_k)² − q_k + q_k²). Where it is clipped, the
    diagonal is zero.

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
    check_constants("logits", logits, logits.shape[:-1], advantages=advantages, old_log_prob=old_log_prob)
    formula = partial(categorical, partial(clipped, check_clip(clip)))
    return reduce(CategoricalPPO.evaluate(formula, [logits], actions, advantages, old_log_prob), reduction)


def categorical_entropy(logits: Tensor, *, reduction: str = "mean") -> Tensor:
    """Return the entropy H = −Σ_k q_k log q_k of each sample, with q = softmax(z).

    For an entropy bonus, subtract it from a loss, times a coefficient. Its diagonal at the logits is
    −q ((1 − 2q)(log q + H) + 1 − q). A logit of −∞ masks an action.

    Args:
        logits: (…, K).
        reduction: ``"mean"`` or ``"sum"`` over samples, or ``"none"``.

    Example:
        >>> import torch
        >>> from hesscale import losses
        >>> losses.categorical_entropy(torch.zeros(8, 2))
        tensor(0.6931)
    """
    return reduce(CategoricalEntropy.evaluate(entropy, [logits]), reduction)


def check_actions(logits: Tensor, actions: Tensor) -> None:
    check_constants("logits", logits, logits.shape[:-1], actions=actions)
    if actions.dtype != torch.int64:
        raise TypeError(f"actions must be the indices of classes in int64, not {actions.dtype}. Pass actions.long()")
