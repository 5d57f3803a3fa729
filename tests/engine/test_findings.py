"""What a hostile reader found: numbers that were wrong without an error, each as small as it can be said."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from oracle import hessian_diagonal
from torch import nn
from torch.utils.checkpoint import _Holder as Holder
from torch.utils.checkpoint import checkpoint

import hesscale


def test_the_same_input_twice_counts_once():
    w = torch.randn(3, requires_grad=True)
    hesscale.backward((w**3).sum())
    hesscale.backward((w**3).sum(), inputs=[w, w])
    torch.testing.assert_close(w.hess_diag, 12 * w.detach())


SELF = {
    "pow": lambda h: torch.pow(h, h),
    "i1": torch.special.i1,
    "addcmul": lambda h: torch.addcmul(h, h, h),
    "write into a view": lambda h: write_power(h),
}


def write_power(h):
    copy = h * 1
    copy[:].pow_(h)
    return copy


@pytest.mark.parametrize("name", SELF)
def test_rules_that_differentiate_run_no_hooks_of_the_user(name):
    h = torch.randn(3, requires_grad=True).abs() + 1
    h.retain_grad()
    calls = []
    h.register_hook(lambda g: calls.append(g))
    loss = SELF[name](h).sum()
    hesscale.backward(loss, retain_graph=True)
    mine, h.grad = h.grad, None
    assert len(calls) == 1
    loss.backward()
    assert torch.equal(mine, h.grad)


def test_a_flat_leaf_is_zero_even_if_a_hook_clears_its_gradient():
    w = torch.randn(3, requires_grad=True)
    w.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    hesscale.backward((w**3).sum())
    hesscale.backward((2 * w).sum())
    assert not w.hess_diag.any()


def test_post_accumulate_hooks_see_the_diagonal():
    w = torch.randn(3, requires_grad=True)
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.hess_diag.clone()))
    hesscale.backward((w**3).sum())
    torch.testing.assert_close(seen, [6 * w.detach()])


def test_another_thread_that_shares_leaves_takes_nothing_away():
    leaves = [torch.randn(3, requires_grad=True) for _ in range(40)]
    stop = threading.Event()

    def other():
        while not stop.is_set():
            sum(leaf.sum() for leaf in leaves).backward()

    def loss():
        h = leaves[0]
        for leaf in leaves:
            h = (h * leaf).tanh() + leaf**2
        return (h**2).sum()

    expected = hesscale.grad(loss(), leaves)[1]
    thread = threading.Thread(target=other)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(50):
            for leaf in leaves:
                leaf.hess_diag = None
            hesscale.backward(loss())
            for leaf, truth in zip(leaves, expected, strict=True):
                torch.testing.assert_close(leaf.hess_diag, truth)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_checkpointing_changes_nothing():
    """Recomputed tensors are read twice in a pass, by the rule and by the node; dropout draws the same again."""
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


def test_a_parameter_without_data_is_refused():
    w = torch.ones(3, requires_grad=True)
    loss = (w**3).sum()
    with torch.no_grad():
        w.untyped_storage().resize_(0)
    with pytest.raises(hesscale.UnsupportedOperator, match="FSDP"):
        hesscale.backward(loss)


def test_numbers_keep_their_digits():
    """A Python number in a float64 model is not squared in the default dtype."""
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    for loss in ((0.3 * x).square().sum(), (x / 0.7).square().sum()):
        torch.testing.assert_close(hesscale.grad(loss, x, retain_graph=True)[1][0], hessian_diagonal(loss, x), rtol=1e-14, atol=0)
