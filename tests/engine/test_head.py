"""Where the head ends, which losses need double backward there, and that its diagonal is exact either way."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from oracle import hessian_diagonal
from torch import nn
from torch.distributions import Categorical, Independent, Normal

import hesscale

BATCH, CLASSES = 4, 3
TARGET = torch.tensor([0, 2, 1, 1])
ADVANTAGE = torch.tensor([0.7, -1.3, 0.4, 2.1], dtype=torch.float64)
ACTION = torch.linspace(-1, 1, BATCH * CLASSES, dtype=torch.float64).reshape(BATCH, CLASSES)
OLD = torch.tensor([-2.9, -3.1, -3.3, -2.8], dtype=torch.float64)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)


def notes(loss) -> list[str]:
    """What ``explain`` says of the tensors where the head ends."""
    return [row.note for row in hesscale.explain(loss).rows if row.note]


def output(samples: int = BATCH) -> torch.Tensor:
    """The output of a last Linear layer."""
    torch.manual_seed(0)
    return nn.Linear(5, CLASSES, dtype=torch.float64)(torch.randn(samples, 5, dtype=torch.float64))


def ppo(log_prob):
    ratio = (log_prob - OLD).exp()
    return -torch.min(ratio * ADVANTAGE, ratio.clamp(0.8, 1.2) * ADVANTAGE).mean()


BY_RULES = {
    "cross entropy": lambda z: F.cross_entropy(z, TARGET),
    "cross entropy, smoothed and weighted": lambda z: F.cross_entropy(
        z, TARGET, weight=torch.tensor([1.0, 2, 3], dtype=z.dtype), label_smoothing=0.1
    ),
    "masked mean": lambda z: (F.cross_entropy(z, TARGET, reduction="none") * MASK).sum() / MASK.sum(),
    "soft targets": lambda z: F.cross_entropy(z, ACTION.softmax(-1)),
    "squared error": lambda z: F.mse_loss(z, ACTION),
    "squared error written out": lambda z: ((z - ACTION) ** 2).mean(),
    "halved and scaled": lambda z: 0.5 * (z - ACTION).square().sum(-1).mean() * 3,
    "huber": lambda z: F.huber_loss(z, ACTION),
    "binary": lambda z: F.binary_cross_entropy_with_logits(z, ACTION.sigmoid()),
    "sigmoid and binary": lambda z: F.binary_cross_entropy(z.sigmoid(), ACTION.sigmoid()),
    "policy gradient": lambda z: -(Categorical(logits=z).log_prob(TARGET) * ADVANTAGE).mean(),
    "policy gradient in the mean": lambda z: -(Independent(Normal(z, 0.5), 1).log_prob(ACTION) * ADVANTAGE).mean(),
    "PPO in the mean": lambda z: ppo(Normal(z, torch.full_like(z, 0.5)).log_prob(ACTION).sum(-1)),
    "Q-learning": lambda z: F.smooth_l1_loss(z.gather(1, TARGET.unsqueeze(1)).squeeze(1), ADVANTAGE),
    "root of the mean squared error": lambda z: F.mse_loss(z, ACTION).sqrt(),
    "two terms": lambda z: F.cross_entropy(z, TARGET) + 0.1 * (z**2).mean(),
    "log-sum-exp": lambda z: z.logsumexp(-1).mean() - z[:, 0].mean(),
}
BY_DOUBLE_BACKWARD = {
    "entropy": lambda z: -Categorical(logits=z).entropy().mean(),
    "PPO in the scale": lambda z: ppo(Normal(ACTION.detach() * 0.3, z.exp()).log_prob(ACTION).sum(-1)),
    "focal": lambda z: ((1 - z.softmax(-1)) ** 2 * z.log_softmax(-1))[torch.arange(BATCH), TARGET].neg().sum(),
    "categorical probabilities": lambda z: -(Categorical(probs=z.softmax(-1)).log_prob(TARGET) * ADVANTAGE).mean(),
    "expectation, squared": lambda z: ((z.softmax(-1) * ACTION).sum(-1) - ADVANTAGE).square().mean(),
    "samples interact": lambda z: -z.softmax(-1).mean(0).log().sum(),
    "everything interacts": lambda z: (z / z.norm()).pow(3).sum(),
}


@pytest.mark.parametrize("name", BY_RULES)
def test_rules_are_enough(name):
    assert set(notes(BY_RULES[name](output()))) == {"exact by rules"}


@pytest.mark.parametrize("name", BY_DOUBLE_BACKWARD)
def test_rules_are_not_enough(name):
    assert any(note.startswith("exact by double backward") for note in notes(BY_DOUBLE_BACKWARD[name](output())))


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("name", BY_RULES | BY_DOUBLE_BACKWARD)
def test_exact_at_the_outputs(name, method):
    z = output()
    loss = (BY_RULES | BY_DOUBLE_BACKWARD)[name](z)
    (got,) = hesscale.grad(loss, z, method=method, retain_graph=True)[1]
    torch.testing.assert_close(got, hessian_diagonal(loss, z), rtol=1e-8, atol=1e-10)


def test_rules_alone_differ_where_they_are_inexact():
    z = output()
    loss = BY_DOUBLE_BACKWARD["entropy"](z)
    exact, rules = (hesscale.grad(loss, z, head=head, retain_graph=True)[1][0] for head in ("exact", "rules"))
    assert not torch.allclose(exact, rules)


def test_a_leaf_inside_the_head_is_exact_too():
    z, log_std = output(), torch.zeros(CLASSES, dtype=torch.float64, requires_grad=True)
    loss = ppo(Normal(z, log_std.exp()).log_prob(ACTION).sum(-1)) - 0.01 * Normal(z, log_std.exp()).entropy().mean()
    got = hesscale.grad(loss, [z, log_std], retain_graph=True)[1]
    for mine, tensor in zip(got, (z, log_std), strict=True):
        torch.testing.assert_close(mine, hessian_diagonal(loss, tensor), rtol=1e-8, atol=1e-10)


def test_a_tensor_that_also_feeds_the_body_gets_the_heads_part_exactly():
    """A hidden layer with a penalty of its own: head part exact, body part by the recursion."""
    hidden = output().tanh()
    last = nn.Linear(CLASSES, 2, dtype=torch.float64)
    z = last(hidden)
    penalty = -(hidden.softmax(-1) * hidden.log_softmax(-1)).sum()
    loss = (z**2).sum() + penalty
    (got,) = hesscale.grad(loss, hidden, retain_graph=True)[1]
    body = 2 * (last.weight.detach() ** 2).sum(0)
    torch.testing.assert_close(got, hessian_diagonal(penalty, hidden) + body)


def test_a_cross_term_between_head_and_body_is_not_the_heads():
    """loss = z·h with z = W h: the head is linear in each of them, so it contributes no curvature."""
    hidden = output()
    z = nn.Linear(CLASSES, CLASSES, dtype=torch.float64)(hidden)
    loss = (z * hidden).sum()
    for diagonal in hesscale.grad(loss, [hidden, z], retain_graph=True)[1]:
        assert not diagonal.any()


def test_tensors_inside_the_head_are_exact():
    log_prob = output().log_softmax(-1)
    loss = (log_prob.exp() * log_prob).sum().square()
    (got,) = hesscale.grad(loss, log_prob, retain_graph=True)[1]
    torch.testing.assert_close(got, hessian_diagonal(loss, log_prob))


def test_outputs_moves_the_end_of_the_head():
    hidden = output().tanh()
    z = nn.Linear(CLASSES, CLASSES, dtype=torch.float64)(hidden)
    loss = F.cross_entropy(z, TARGET)
    approximate, exact = (hesscale.grad(loss, hidden, outputs=o, retain_graph=True)[1][0] for o in (None, hidden))
    truth = hessian_diagonal(loss, hidden)
    assert not torch.allclose(approximate, truth)
    torch.testing.assert_close(exact, truth)


def test_too_many_products_keep_the_rules_value_and_say_so():
    """All 400 × 3 entries interact, so that the exact diagonal would take 1200 products."""
    z = output(samples=400)
    loss = BY_DOUBLE_BACKWARD["samples interact"](z)
    with pytest.warns(hesscale.CurvatureWarning, match="more than 1024 Hessian-vector products"):
        (got,) = hesscale.grad(loss, z, retain_graph=True)[1]
    torch.testing.assert_close(got, hesscale.grad(loss, z, head="rules")[1][0])


def test_products_in_several_batches_and_without_vmap(monkeypatch):
    """30 × 3 entries that all interact take 90 products, of which 64 are computed at once."""
    z = output(samples=30)
    loss = BY_DOUBLE_BACKWARD["samples interact"](z)
    (in_batches,) = hesscale.grad(loss, z, retain_graph=True)[1]
    torch.testing.assert_close(in_batches, hessian_diagonal(loss, z), rtol=1e-8, atol=1e-10)

    def refuses(*_):
        raise RuntimeError("vmap: no batching rule")

    monkeypatch.setattr("hesscale.engine.head_values.map_rows", refuses)
    (one_by_one,) = hesscale.grad(loss, z, retain_graph=True)[1]
    torch.testing.assert_close(in_batches, one_by_one)


def test_a_tensor_inside_the_head_is_filled_if_all_below_it_is_known():
    """Double backward gives the diagonal at z. The rules are needed only for the expectation itself."""
    z = output()
    expectation = (z.softmax(-1) * ACTION).sum(-1)
    loss = expectation.square().mean()
    truth = [hessian_diagonal(loss, expectation), hessian_diagonal(loss, z)]
    torch.testing.assert_close(list(hesscale.grad(loss, [expectation, z])[1]), truth)


def test_no_block_is_stored_if_all_products_are_zero():
    """With zero advantages, the curvature is zero, which says nothing about which entries interact."""
    z = output()

    def loss(scale):
        return scale * (z.softmax(-1) * ACTION).sum(-1).square().mean()

    zero = torch.zeros((), dtype=torch.float64)
    assert not hesscale.grad(loss(zero), z, retain_graph=True)[1][0].any()
    later = loss(zero + 1)
    torch.testing.assert_close(hesscale.grad(later, z, retain_graph=True)[1][0], hessian_diagonal(later, z))


def test_a_loss_that_cannot_be_differentiated_twice_keeps_the_rules_value():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad_output):
            return grad_output * 2 * ctx.saved_tensors[0]

        @staticmethod
        def hess_diag(ctx, g, s):
            (x,) = ctx.saved_tensors
            return (0 if s is None else 4 * x * x * s) + (0 if g is None else 2 * g)

    z = output()
    loss = Once.apply(z).sum().square()
    with pytest.warns(hesscale.CurvatureWarning, match="cannot differentiate this loss twice"):
        (got,) = hesscale.grad(loss, z, retain_graph=True)[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(got, hesscale.grad(loss, z, head="rules")[1][0])


def test_heads_that_differ_only_in_edges_are_distinguished():
    """The same operators on the same shapes, once side by side and once in a row."""
    a, b = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    hesscale.grad((a.cumsum(1) + b.cumsum(1)).square().sum(), [a, b])
    loss = (a.cumsum(1).cumsum(1) + b).square().sum()
    torch.testing.assert_close(hesscale.grad(loss, a, retain_graph=True)[1][0], hessian_diagonal(loss, a))


def test_heads_that_differ_only_in_rules_are_distinguished():
    """The same tensor at both inputs: the same function is then used for all elementwise operators, curved or not."""
    z = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    c = z.cumsum(1).cumsum(1)
    hesscale.grad((c + c).sum(), z)
    c = z.cumsum(1).cumsum(1)
    loss = torch.xlogy(c, c).sum()
    torch.testing.assert_close(hesscale.grad(loss, z, retain_graph=True)[1][0], hessian_diagonal(loss, z))


def test_one_sample_of_large_curvature_does_not_hide_errors():
    weight = torch.tensor([1e4, 1.0, 1.0, 1.0])

    def loss(z):
        entropy = (z.softmax(1) * z.log_softmax(1)).sum(1)
        return (weight.to(z) * z.square().sum(1)).sum() + 5 * (entropy * (weight == 1).to(z)).sum()

    torch.manual_seed(0)
    z = torch.randn(4, 3, requires_grad=True)
    exact = z.detach().double().requires_grad_()
    truth = hessian_diagonal(loss(exact), exact)
    torch.testing.assert_close(hesscale.grad(loss(z), z)[1][0].double(), truth, rtol=1e-4, atol=1e-4)


def test_a_product_of_entries_is_not_linear():
    z = torch.randn(3, dtype=torch.float64, requires_grad=True)
    loss = torch.ones(1, dtype=torch.float64).scatter_reduce(0, torch.zeros(3, dtype=torch.long), z.cumsum(0), "prod").sum()
    torch.testing.assert_close(hesscale.grad(loss, z, retain_graph=True)[1][0], hessian_diagonal(loss, z))


class Power(torch.autograd.Function):
    """a x², with an argument that is no tensor and an output that nobody uses."""

    @staticmethod
    def forward(ctx, x, a):
        ctx.a = a
        ctx.save_for_backward(x)
        return a * x.square(), x.clone()

    @staticmethod
    def backward(ctx, g, unused):
        return 2 * ctx.a * g * ctx.saved_tensors[0] + unused, None

    @staticmethod
    def hess_diag(ctx, g, s):
        (x,) = ctx.saved_tensors
        return (0 if s[0] is None else (2 * ctx.a * x) ** 2 * s[0]) + (0 if g[0] is None else 2 * ctx.a * g[0]), None


def test_custom_functions_pass_through_double_backward():
    z = output()
    loss = Power.apply(Power.apply(z, 2.0)[0], 3.0)[0].sum()
    torch.testing.assert_close(hesscale.grad(loss, z, retain_graph=True)[1][0], hessian_diagonal(loss, z))


def test_a_custom_function_without_a_graph_keeps_the_rules_value():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.detach()
            return x.square()

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.x * g.detach()

        @staticmethod
        def hess_diag(ctx, g, s):
            return (0 if s is None else 4 * ctx.x**2 * s) + (0 if g is None else 2 * g)

    z = output()
    with pytest.warns(hesscale.CurvatureWarning, match="without a graph"):
        (got,) = hesscale.grad(Hidden.apply(Hidden.apply(z)).sum(), z)[1]
    torch.testing.assert_close(got, 12 * z.detach() ** 2)


def entropy_at(x: torch.Tensor) -> torch.Tensor:
    q = F.softmax(x, 1)
    return -(q * q.log()).sum(1).mean()


@pytest.mark.parametrize("samples", [37, 601])
def test_no_block_is_stored_if_products_are_not_finite(samples):
    """Neither that all entries interact, nor that the exact diagonal takes too many products: a sample has three entries."""
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    x = torch.randn(samples, 5, dtype=torch.float64)
    logits = (x * torch.nan) @ weight
    with warnings.catch_warnings():
        warnings.simplefilter("error", hesscale.CurvatureWarning)
        _, (poisoned,) = hesscale.grad(entropy_at(logits), logits)
    assert poisoned.isnan().all()
    logits = x @ weight
    assert "exact by double backward (3 products)" in notes(entropy_at(logits))
    _, (found,) = hesscale.grad(entropy_at(logits), logits)
    torch.testing.assert_close(found, exact_entropy_diagonal(logits.detach()))


def test_samples_with_more_entries_than_one_batch_of_products():
    """Samples are found to be apart all the same, so that one product per entry of a sample is enough."""
    logits = torch.randn(4, 5, dtype=torch.float64) @ torch.randn(5, 70, dtype=torch.float64, requires_grad=True)
    assert "exact by double backward (70 products)" in notes(entropy_at(logits))
    _, (found,) = hesscale.grad(entropy_at(logits), logits)
    torch.testing.assert_close(found, exact_entropy_diagonal(logits.detach()))


def exact_entropy_diagonal(logits: torch.Tensor) -> torch.Tensor:
    hessian = torch.func.vmap(torch.func.hessian(lambda row: entropy_at(row.unsqueeze(0))))(logits)
    return hessian.diagonal(dim1=1, dim2=2) / len(logits)


def test_an_empty_batch_with_a_head_that_rules_get_wrong():
    weight = torch.randn(5, 3, requires_grad=True)
    q = F.softmax(torch.zeros(0, 5) @ weight, 1)
    hesscale.backward((q * q.log()).sum() + weight.square().sum())
    torch.testing.assert_close(weight.hess_diag, torch.full((5, 3), 2.0))


def policy_loss(logits, actions, advantages):
    """PPO's at its first minibatch: the ratio is 1, and nothing is clipped."""
    log_prob = torch.distributions.Categorical(logits=logits).log_prob(actions)
    ratio = (log_prob - log_prob.detach()).exp()
    return -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()


def count_products(loss) -> int:
    """How many Hessian-vector products the diagonal at the outputs takes."""
    return max([int(number) for note in notes(loss) for number in re.findall(r"(\d+) products?\)", note)])


def test_second_derivatives_that_cancel_do_not_couple_samples():
    """With probabilities near ½ the curvature of a policy loss is next to rounding, which says nothing about samples."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 5), torch.randn(5, 2, requires_grad=True)
    actions, advantages = torch.randint(0, 2, (64,)), torch.randn(64)
    for scale in (1e-3, 1e-5, 1.0):
        assert count_products(policy_loss(scale * (x @ weight), actions, advantages)) <= 2


def test_a_cheaper_structure_is_tried_again():
    """After one loss in which samples interact."""
    x, weight = torch.randn(8, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def loss_of(coupling: float) -> torch.Tensor:
        z = x @ weight
        return entropy_at(z) * (1 + coupling * z.sum())

    found = [count_products(loss_of(1.0 if step == 3 else 0.0)) for step in range(120)]
    assert (found[2], found[3], found[4], found[-1]) == (3, 24, 24, 3)


SUPPORT = torch.linspace(-1, 1, CLASSES, dtype=torch.float64)
MIXING = torch.randn(CLASSES, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
CONSTANT_PRODUCTS = {
    "expected value": lambda z: ((z.softmax(1) @ SUPPORT - ADVANTAGE) ** 2).mean(),
    "expected value by einsum": lambda z: ((torch.einsum("bi,i->b", z.softmax(1), SUPPORT) - ADVANTAGE) ** 2).mean(),
    "mixing matrix": lambda z: F.cross_entropy(z @ MIXING, TARGET),
    "mixing matrix, transposed": lambda z: F.cross_entropy(F.linear(z, MIXING), TARGET),
    "mixing matrix, from the left": lambda z: F.cross_entropy((MIXING @ z.t()).t(), TARGET),
    "mixing matrix and a sum": lambda z: F.cross_entropy(torch.addmm(torch.ones(CLASSES).double(), z, MIXING), TARGET),
    "by matrices": lambda z: F.cross_entropy(torch.bmm(z.unsqueeze(1), MIXING.expand(BATCH, -1, -1)).squeeze(1), TARGET),
    "dot": lambda z: z.softmax(1).flatten().dot(SUPPORT.repeat(BATCH)) ** 2,
}


@pytest.mark.parametrize("name", CONSTANT_PRODUCTS)
@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
def test_a_product_with_a_constant_belongs_to_the_head(name, method):
    z = output()
    loss = CONSTANT_PRODUCTS[name](z)
    truth = hessian_diagonal(CONSTANT_PRODUCTS[name](leaf := z.detach().requires_grad_()), leaf)
    _, (found,) = hesscale.grad(loss, z, method=method)
    torch.testing.assert_close(found, truth)


def test_a_frozen_parameter_ends_the_head():
    frozen = nn.Linear(CLASSES, CLASSES, dtype=torch.float64).requires_grad_(False)
    x = torch.randn(BATCH, 5, dtype=torch.float64)
    layer = nn.Linear(5, CLASSES, dtype=torch.float64)

    def diagonals(**options):
        loss = F.cross_entropy(z := frozen(layer(x)), TARGET)
        return hesscale.grad(loss, [layer.weight, layer.bias], **({"outputs": z} if options else {}))[1]

    torch.testing.assert_close(diagonals(), diagonals(at_outputs=True))


def test_the_weight_of_a_layer_is_no_constant():
    """Nor is its input, if that is data: the head of a model with one layer ends there."""
    layer, x = nn.Linear(5, CLASSES, dtype=torch.float64), torch.randn(BATCH, 5, dtype=torch.float64)
    loss = entropy_at(z := layer(x))
    _, diagonals = hesscale.grad(loss, [layer.weight, layer.bias], retain_graph=True)
    _, expected = hesscale.grad(loss, [layer.weight, layer.bias], outputs=z)
    torch.testing.assert_close(diagonals, expected)


def test_frozen_parameters_and_constants_are_distinguished():
    """The graphs are the same otherwise."""
    constant = MIXING.clone()
    frozen = nn.Parameter(constant.clone(), requires_grad=False)
    z = output()
    for matrix in (constant, frozen, constant, frozen):
        loss = F.cross_entropy(z @ matrix, TARGET)
        _, (found,) = hesscale.grad(loss, z, retain_graph=True)
        leaf = z.detach().requires_grad_()
        truth = hessian_diagonal(F.cross_entropy(leaf @ constant, TARGET), leaf)
        assert torch.allclose(found, truth) == (matrix is constant)


def test_exactness_has_a_budget(monkeypatch):
    """Two layer norms before a squared error take a product per feature, through a head that is most of this graph."""
    monkeypatch.setattr("hesscale.engine.head_structure.FREE_NUMBERS", 0)
    torch.manual_seed(0)
    x, layer = torch.randn(8, 4).double(), nn.Linear(4, 40).double()
    norm, target = nn.LayerNorm(40).double(), torch.randn(8, 40).double()

    def loss_of(z):
        return F.mse_loss(norm(norm(z).tanh()), target)

    def diagonal(**options):
        return hesscale.grad(loss_of(z := layer(x)), z, **options)[1][0]

    with pytest.warns(hesscale.CurvatureWarning, match=r"which take longer than a backward pass.*head='exact' to allow more"):
        found = diagonal()
    torch.testing.assert_close(found, diagonal(head="rules"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", hesscale.CurvatureWarning)
        torch.testing.assert_close(diagonal(), found)  # one warning is enough
        exact = diagonal(head="exact")
    z = layer(x).detach().requires_grad_()
    torch.testing.assert_close(exact, hessian_diagonal(loss_of(z), z))
    assert not torch.allclose(exact, found)


def test_a_frozen_parameter_under_autocast_ends_the_head():
    """Autocast multiplies by a copy of the parameter."""
    frozen = nn.Parameter(MIXING.float(), requires_grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        y = (z := output().float()) @ frozen
    loss = F.cross_entropy(y.float(), TARGET)
    _, found = hesscale.grad(loss, z, retain_graph=True)
    torch.testing.assert_close(found, hesscale.grad(loss, z, outputs=y)[1])


def test_a_frozen_parameter_of_float16_ends_the_head():
    y = (z := output().half()) @ nn.Parameter(MIXING.half(), requires_grad=False)
    loss = F.cross_entropy(y.float(), TARGET)
    _, found = hesscale.grad(loss, z, retain_graph=True)
    torch.testing.assert_close(found, hesscale.grad(loss, z, outputs=y)[1])
