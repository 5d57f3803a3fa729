"""Several threads at once: each gets the same results as alone."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hesscale

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture
def frequent_switches():
    """Switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def cross_entropy(logits):
    return F.cross_entropy(logits, torch.arange(len(logits)) % 3)


def entropy(logits):
    """Needs double backward through the head."""
    return (logits.softmax(1) * logits.log_softmax(1)).sum()


def run_together(functions) -> None:
    """Each function in a thread of its own, all started at one moment; the first error is raised."""
    barrier, errors = threading.Barrier(len(functions)), []

    def work(function):
        barrier.wait()
        try:
            function()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("loss", [cross_entropy, entropy])
def test_networks_of_one_structure_in_threads_of_their_own(loss):
    """The threads share the schedule and the block structure, which are not known yet in the first round."""
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(4)]
    for size in (11, 12, 13):
        x = torch.randn(size, 4)
        found = [[] for _ in models]

        def work(model, into, x=x):
            for _ in range(5):
                into.append(hesscale.grad(loss(model(x)), list(model.parameters())))

        run_together([lambda m=m, i=i: work(m, i) for m, i in zip(models, found, strict=True)])
        for model, results in zip(models, found, strict=True):
            alone = hesscale.grad(loss(model(x)), list(model.parameters()))
            for result in results:
                torch.testing.assert_close(result, alone, rtol=0, atol=0)


@pytest.mark.usefixtures("frequent_switches")
def test_more_structures_than_the_cache_holds():
    """Threads that evict each other's schedules from the cache still get correct results."""
    weight = torch.randn(2, 1, requires_grad=True)

    def work():
        for size in range(1, 160):
            (found,) = hesscale.grad((torch.ones(size, 2) @ weight).square().sum(), weight)[1]
            torch.testing.assert_close(found, torch.full((2, 1), 2.0 * size))

    run_together([work, work])


@pytest.mark.usefixtures("frequent_switches")
def test_threads_may_share_leaves():
    """Its backward passes reach the same leaves, whose hooks must not take them for the pass that carries curvature."""
    leaves = [torch.randn(3, requires_grad=True) for _ in range(12)]
    done = threading.Event()

    def loss():
        h = leaves[0]
        for leaf in leaves:
            h = (h * leaf).tanh() + leaf**2
        return (h**2).sum()

    expected = hesscale.grad(loss(), leaves)[1]

    def other():
        while not done.is_set():
            sum(leaf.sum() for leaf in leaves).backward()

    def work():
        try:
            for _ in range(10):
                for leaf in leaves:
                    leaf.hess_diag = None
                hesscale.backward(loss())
                torch.testing.assert_close(tuple([leaf.hess_diag for leaf in leaves]), expected)
        finally:
            done.set()

    run_together([work, other])
