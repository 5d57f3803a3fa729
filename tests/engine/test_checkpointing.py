"""Activation checkpointing recomputes tensors during the pass; diagonals are the same with and without it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import _Holder as Holder
from torch.utils.checkpoint import checkpoint

import hesscale


def test_checkpointing_changes_nothing():
    """Recomputed tensors are read twice in a pass, by the rule and by the node. Dropout draws the same mask again."""
    torch.manual_seed(0)
    parts = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6), nn.ELU()), nn.Linear(6, 2)
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 1, 0, 1])
    found = []
    for use in (False, True):
        torch.manual_seed(1)
        hidden = checkpoint(parts[0], x, use_reentrant=False) if use else parts[0](x)
        params = [p for part in parts for p in part.parameters()]
        found.append(hesscale.grad(F.cross_entropy(parts[1](hidden), y), params))
        assert not hasattr(Holder, "handles")
    for plain, kept in zip(*found, strict=True):
        for a, b in zip(plain, kept, strict=True):
            assert torch.equal(a, b)


def test_nested_checkpoints_and_a_failing_pass():
    inner, outer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
    x = torch.randn(3, 4)

    def both(t):
        return checkpoint(inner, outer(t).tanh(), use_reentrant=False)

    params = [*inner.parameters(), *outer.parameters()]
    plain = hesscale.grad(inner(outer(x).tanh()).square().sum(), params)[1]
    kept = hesscale.grad(checkpoint(both, x, use_reentrant=False).square().sum(), params)[1]
    for a, b in zip(plain, kept, strict=True):
        assert torch.equal(a, b)
    loss = checkpoint(both, x, use_reentrant=False).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        hesscale.backward(loss)
    assert not hasattr(Holder, "handles")


def test_reentrant_checkpointing_is_refused_with_a_reason():
    x = torch.randn(5, 4, requires_grad=True)
    with pytest.raises(hesscale.UnsupportedOperator, match="use_reentrant=False"):
        hesscale.backward(checkpoint(nn.Linear(4, 3), x, use_reentrant=True).square().sum())
