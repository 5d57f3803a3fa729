"""``backward`` and ``grad`` apart from the diagonals: gradients, accumulation, errors, and removal of hooks."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from case_runner import build, compute
from cases import CASES
from oracle import hessian_diagonal, separable_loss
from torch import nn

import hesscale
from hesscale.engine.propagate import Propagation
from hesscale.rules import RULES, brute_force

pytestmark = pytest.mark.usefixtures("double_precision")

METHODS = ["hesscale", "hesscale_gn", "bl89"]


@pytest.fixture
def rules(monkeypatch):
    """The table of rules, which a test may change. It is restored afterwards."""
    for name, rule in RULES.items():
        monkeypatch.setitem(RULES, name, rule)
    before = set(RULES)
    yield RULES
    for name in set(RULES) - before:
        del RULES[name]


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))


class Tied(nn.Module):
    """Shared weights, a residual connection, branches, and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.leave = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(10, 3)

    def forward(self, x):
        h = F.elu(self.enter(x), inplace=True)
        h = h + torch.tanh(self.middle(h))
        return self.leave(torch.cat([F.relu(self.middle(h), inplace=True), h * torch.sigmoid(h)], 1))


class Images(nn.Module):
    """Convolutions and batch norm on a 4-vector folded into a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3)
        self.second, self.last = nn.Conv2d(3, 2, 2, stride=2, bias=False), nn.Linear(2, 3)

    def forward(self, x):
        h = F.softplus(self.norm(self.first(x.reshape(-1, 1, 2, 2))))
        return self.last(torch.tanh(self.second(h)).flatten(1))


MODELS = {"perceptron": perceptron, "tied": Tied, "images": Images}


def batch(size: int = 5):
    return torch.randn(size, 4), torch.randint(3, (size,))


def loss_of(model, data=None):
    x, y = data or batch()
    return F.cross_entropy(model(x), y)


def entropy_loss(model):
    """Needs double backward through the head."""
    logits = model(batch()[0])
    return (logits.softmax(1) * logits.log_softmax(1)).sum()


def diagonals(model) -> list[torch.Tensor]:
    return [p.hess_diag.clone() for p in model.parameters()]


def forget(model) -> None:
    for p in model.parameters():
        p.grad = p.hess_diag = None


def diagonals_of(model, loss, **options) -> list[torch.Tensor]:
    """The diagonals from a separate call."""
    forget(model)
    hesscale.backward(loss, **options)
    found = diagonals(model)
    forget(model)
    return found


def assert_close(mine, truth) -> None:
    torch.testing.assert_close(mine, truth, rtol=1e-10, atol=1e-13)


def propagations_alive() -> int:
    gc.collect()
    return sum(type(thing) is Propagation for thing in gc.get_objects())


@pytest.fixture
def no_hook_left():
    """A hook that is not removed keeps its propagation alive, in a reference cycle through C++ that is never collected."""
    before = propagations_alive()
    yield
    assert propagations_alive() <= before


# gradients


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_are_pytorchs_bit_for_bit(make, method, dtype):
    model = make().to(dtype)
    x, y = batch()
    loss = F.cross_entropy(model(x.to(dtype)), y)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    hesscale.backward(loss, method=method)
    for p, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, gradient)
        assert p.hess_diag.shape == p.shape
        assert p.hess_diag.dtype == p.dtype


def test_gradients_are_pytorchs_with_double_backward_in_the_head():
    model = perceptron()
    loss = entropy_loss(model)
    expected = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    hesscale.backward(loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize("make_loss", [loss_of, entropy_loss])
def test_results_are_reproducible(make_loss):
    model = perceptron()
    loss = make_loss(model)
    first = diagonals_of(model, loss, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, diagonals_of(model, loss), strict=True))


# accumulation


def test_diagonals_accumulate_like_gradients():
    model = perceptron()
    data = [batch(), batch()]
    single = [diagonals_of(model, loss_of(model, d)) for d in data]
    for d in data:
        hesscale.backward(loss_of(model, d))
    assert_close(diagonals(model), [a + b for a, b in zip(*single, strict=True)])


@pytest.mark.parametrize("make_loss", [loss_of, entropy_loss])
def test_a_second_pass_through_a_kept_graph_doubles(make_loss):
    model = perceptron()
    loss = make_loss(model)
    hesscale.backward(loss, retain_graph=True)
    once, gradients = diagonals(model), [p.grad.clone() for p in model.parameters()]
    hesscale.backward(loss)
    assert_close(diagonals(model), [2 * s for s in once])
    assert_close([p.grad for p in model.parameters()], [2 * g for g in gradients])


def test_diagonals_are_overwritten_if_the_gradient_is_none():
    model = perceptron()
    loss = loss_of(model)
    hesscale.backward(loss, retain_graph=True)
    once = diagonals(model)
    model.zero_grad()
    hesscale.backward(loss, retain_graph=True)
    assert_close(diagonals(model), once)
    model.zero_grad(set_to_none=False)
    hesscale.backward(loss)
    assert_close(diagonals(model), [2 * s for s in once])


def test_diagonals_of_inner_tensors_are_overwritten():
    x = torch.randn(3, requires_grad=True)
    h = x.tanh()
    h.retain_grad()
    loss = (h**3).sum()
    for _ in range(2):
        h.grad = None
        hesscale.backward(loss, inputs=[h], retain_graph=True)
    assert_close(h.grad, 3 * h.detach() ** 2)
    assert_close(h.hess_diag, 6 * h.detach())
    hesscale.backward(loss, inputs=[h])
    assert_close(h.hess_diag, 12 * h.detach())


# linearity in the loss


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_diagonals_scale_with_the_loss(make, method):
    model, data = make().eval(), batch()
    once = diagonals_of(model, loss_of(model, data), method=method)
    assert_close(diagonals_of(model, -3 * loss_of(model, data), method=method), [-3 * s for s in once])
    assert_close(diagonals_of(model, loss_of(model, data) / 1024, method=method), [s / 1024 for s in once])


@pytest.mark.parametrize("method", METHODS)
def test_a_sum_of_losses_has_the_sum_of_their_diagonals(method):
    model, data = perceptron(), batch()
    other = [lambda: model(data[0]).square().mean(), lambda: F.mse_loss(model(data[0][:2]), torch.ones(2, 3))]
    parts = [loss_of(model, data), *(make() for make in other)]
    single = [diagonals_of(model, part, method=method) for part in parts]
    total = sum(make() for make in (lambda: loss_of(model, data), *other))
    assert_close(diagonals_of(model, total, method=method), [sum(s) for s in zip(*single, strict=True)])


def test_several_networks_in_one_loss():
    actor, critic = perceptron(), nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 1))
    x, y = batch()
    alone = diagonals_of(actor, F.cross_entropy(actor(x), y)), diagonals_of(critic, 0.5 * critic(x).square().mean())
    hesscale.backward(F.cross_entropy(actor(x), y) + 0.5 * critic(x).square().mean())
    assert_close((diagonals(actor), diagonals(critic)), alone)


def test_a_weight_decay_term_adds_its_own_curvature():
    model, data = perceptron(), batch()
    without = diagonals_of(model, loss_of(model, data))
    penalty = sum(p.square().sum() for p in model.parameters())
    assert_close(diagonals_of(model, loss_of(model, data) + 0.1 * penalty), [s + 0.2 for s in without])


# which leaves get a diagonal, and what it is like


def test_a_leaf_with_a_gradient_but_no_curvature_gets_zeros():
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)
    hesscale.backward((w * x).sum())
    assert torch.equal(w.hess_diag, torch.zeros(3))


def test_a_leaf_that_is_not_reached_keeps_none():
    w, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    hesscale.backward((w**2).sum())
    assert unused.grad is None
    assert getattr(unused, "hess_diag", None) is None


def test_a_frozen_parameter_keeps_none():
    model = perceptron()
    model[0].weight.requires_grad_(False)
    hesscale.backward(loss_of(model))
    assert model[0].weight.grad is None
    assert getattr(model[0].weight, "hess_diag", None) is None
    assert model[0].bias.hess_diag is not None


def test_group_norm_of_no_samples():
    x, weight = torch.zeros(0, 4, 3, requires_grad=True), torch.ones(4, requires_grad=True)
    hesscale.backward(F.group_norm(x, 2, weight).square().sum())
    assert x.hess_diag.shape == x.shape
    assert torch.equal(weight.hess_diag, torch.zeros(4))


def test_the_loss_may_be_a_leaf():
    w = torch.tensor(2.0, requires_grad=True)
    hesscale.backward(w)
    assert w.grad == 1
    assert w.hess_diag == 0


def test_the_loss_may_have_one_entry_and_a_shape():
    w = torch.tensor([[2.0]], requires_grad=True)
    hesscale.backward(w**3)
    assert_close(w.hess_diag, torch.tensor([[12.0]]))


def test_diagonals_own_their_memory():
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    c = torch.randn(3, 4, requires_grad=True)
    hesscale.backward(((a + b) ** 2).sum() + c.sum() ** 2)
    tensors = [t for leaf in (a, b, c) for t in (leaf, leaf.grad, leaf.hess_diag)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    for leaf in (a, b, c):
        assert leaf.hess_diag.is_contiguous()
        assert not leaf.hess_diag.requires_grad
        assert leaf.hess_diag.untyped_storage().nbytes() == 12 * 8


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("size", [1, 4])
def test_no_two_diagonals_share_memory(make, size):
    model = make()
    hesscale.backward(loss_of(model, batch(size)))
    tensors = [t for p in model.parameters() for t in (p, p.grad, p.hess_diag)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


class HalfSquare(torch.autograd.Function):
    """y = x²/2, whose rule may return the gradient itself."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2 / 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]

    @staticmethod
    def hess_diag(ctx, g, s):
        return g if s is None else s * ctx.saved_tensors[0] ** 2 + g


class Twice(torch.autograd.Function):
    """Two copies of x, with the curvature of one of them handed on, uncopied."""

    @staticmethod
    def forward(ctx, x):
        return x.clone(), x.clone()

    @staticmethod
    def backward(ctx, g, h):
        return g + h

    @staticmethod
    def hess_diag(ctx, g, s):
        return s[0] if s[1] is None else s[0] + s[1]


class Same(nn.Module):
    def forward(self, x):
        return x


def hooked(x):
    module = Same()
    module.register_full_backward_hook(lambda *args: None)
    return module(x)


ALIASES = {
    "identity": (hooked, lambda x: x * 1, torch.square),
    "one of two outputs": (lambda x: Twice.apply(x)[0], lambda x: x * 1, torch.square),
    "view": (lambda x: x.view(3), lambda x: x * 1, torch.square),
    "gradient": (HalfSquare.apply, lambda x: x**2 / 2, lambda y: y * torch.arange(1.0, 4.0)),
}


@pytest.mark.parametrize("name", ALIASES)
def test_shares_that_alias_s_are_not_changed_in_place(name):
    """x is met again, further down, while the tensor beside y still waits for its turn with the same g and s."""
    operator, plain, after = ALIASES[name]
    x, c = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def results(operator):
        h, beside = x * 1, c.tanh()
        again = h**4
        return hesscale.grad(after(operator(h) + beside).sum() + again.sum(), [x, c])

    assert_close(results(operator), results(plain))


def test_diagonals_have_the_layout_of_their_parameter():
    w = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    hesscale.backward(F.conv2d(torch.randn(2, 3, 5, 5), w).square().sum())
    assert w.hess_diag.stride() == w.stride()


def test_grad_returns_tensors_that_share_no_memory():
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    gradients, found = hesscale.grad(((a + b) ** 2).sum(), [a, b, a])
    assert len({t.untyped_storage().data_ptr() for t in found}) == 3
    assert not {t.untyped_storage().data_ptr() for t in found} & {t.untyped_storage().data_ptr() for t in gradients}


# inputs=


def test_inputs_restrict_as_in_backward():
    model = perceptron()
    loss = loss_of(model)
    everything = diagonals_of(model, loss, retain_graph=True)
    hesscale.backward(loss, inputs=[model[2].weight, model[4].bias])
    filled = {name for name, p in model.named_parameters() if p.grad is not None}
    assert filled == {"2.weight", "4.bias"}
    assert {name for name, p in model.named_parameters() if getattr(p, "hess_diag", None) is not None} == filled
    assert_close([model[2].weight.hess_diag, model[4].bias.hess_diag], [everything[2], everything[5]])


def test_inputs_may_be_one_tensor():
    x = torch.randn(3, requires_grad=True)
    hesscale.backward((x**2).sum(), inputs=x)
    assert_close(x.hess_diag, torch.full((3,), 2.0))


def test_inputs_may_be_inner_tensors():
    model, (x, y) = perceptron(), batch()
    h = model[:2](x)
    logits = model[2:](h)
    loss = F.cross_entropy(logits, y)
    gradients, found = hesscale.grad(loss, [h, logits, model[4].weight], retain_graph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hesscale.backward(loss, inputs=[h, logits, model[4].weight])
    for tensor, g, s in zip((h, logits, model[4].weight), gradients, found, strict=True):
        assert torch.equal(tensor.grad, g)
        assert torch.equal(tensor.hess_diag, s)
    assert model[0].weight.grad is None
    assert model[2].weight.grad is None


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.inputs) > 1])
def test_a_single_input_gets_the_same_diagonal(name):
    """PyTorch's nodes then leave out what the other inputs would get."""
    inputs, outputs, draws = build(name)
    everything = compute(inputs, outputs, draws)
    for x, s in zip(inputs, everything, strict=True):
        torch.testing.assert_close(compute([x], outputs, draws)[0], s)


def test_the_same_input_twice_counts_once():
    w = torch.randn(3, requires_grad=True)
    hesscale.backward((w**3).sum())
    hesscale.backward((w**3).sum(), inputs=[w, w])
    torch.testing.assert_close(w.hess_diag, 12 * w.detach())


# grad()


def test_grad_changes_no_attributes():
    model = perceptron()
    loss = loss_of(model)
    _, found = hesscale.grad(loss, list(model.parameters()), retain_graph=True)
    assert all(p.grad is None and getattr(p, "hess_diag", None) is None for p in model.parameters())
    assert_close(list(found), diagonals_of(model, loss))


def test_grad_of_one_tensor_returns_tuples_of_length_one():
    x = torch.randn(3, requires_grad=True)
    (gradient,), (diagonal,) = hesscale.grad((x**3).sum(), x)
    assert_close((gradient, diagonal), (3 * x.detach() ** 2, 6 * x.detach()))


def test_grad_at_every_intermediate_tensor():
    """Pre-activations, activations, logits, log-probabilities and the loss itself; the last layers are exact."""
    model, (x, y) = perceptron(), batch()
    tensors = [x.requires_grad_()]
    for layer in model:
        tensors.append(layer(tensors[-1]))
    tensors.append(tensors[-1].log_softmax(1))
    loss = F.nll_loss(tensors[-1], y, reduction="sum")
    gradients, found = hesscale.grad(loss, [*tensors, loss], retain_graph=True)
    for tensor, g, s in zip([*tensors, loss], gradients, found, strict=True):
        assert torch.equal(g, torch.autograd.grad(loss, tensor, retain_graph=True)[0])
        assert s.shape == tensor.shape
    for tensor, s in zip([*tensors[-2:], loss], found[-3:], strict=True):
        assert_close(s, hessian_diagonal(loss, tensor))
    for tensor, s in zip(tensors, found[:-1], strict=True):  # asking for one tensor gives the same as asking for all
        assert_close(hesscale.grad(loss, tensor, retain_graph=True)[1][0], s)


def test_grad_inside_a_head_that_needs_double_backward():
    logits = torch.randn(4, 3, requires_grad=True)
    a = logits * 2
    p, log_p = a.softmax(1), a.log_softmax(1)
    loss = (p * log_p).sum()
    for tensor, s in zip((logits, a, p, log_p), hesscale.grad(loss, [logits, a, p, log_p], retain_graph=True)[1], strict=True):
        assert_close(s, hessian_diagonal(loss, tensor))


def test_grad_of_repeated_tensors():
    x = torch.randn(3, requires_grad=True)
    h = x**2
    gradients, found = hesscale.grad((h**2).sum(), [x, h, x, h])
    assert_close(gradients[0], gradients[2])
    assert_close((found[0], found[1]), (found[2], found[3]))
    assert_close(found[0], 12 * x.detach() ** 2)


def test_grad_of_unused_tensors():
    x, unused = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        hesscale.grad((x**2).sum(), [x, unused])
    gradients, found = hesscale.grad((x**2).sum(), [x, unused], allow_unused=True)
    assert gradients[1] is None
    assert found[1] is None
    assert_close(found[0], torch.full((3,), 2.0))


def test_the_head_ends_at_outputs():
    """Gauss-Newton drops second derivatives below the outputs only: here above or below the tanh."""
    x = torch.randn(3, requires_grad=True)
    a = x * 1
    h = a.tanh()
    loss = (h**3).sum()
    y = h.detach()
    bend = -2 * y * (1 - y**2) * 3 * y**2
    dropped, kept = (hesscale.grad(loss, x, method="hesscale_gn", outputs=o, retain_graph=True)[1][0] for o in (h, [a]))
    assert_close(dropped, 6 * y * (1 - y**2) ** 2)
    assert_close(kept, dropped + bend)


# bad input


@pytest.mark.parametrize("option", ["method", "head", "fallback"])
def test_unknown_choices(option):
    x = torch.randn(3, requires_grad=True)
    for call in (lambda **o: hesscale.backward((x**2).sum(), **o), lambda **o: hesscale.grad((x**2).sum(), x, **o)):
        with pytest.raises(ValueError, match=f"{option}='nonsense' is not one of"):
            call(**{option: "nonsense"})
    assert x.grad is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x**2, ValueError, "scalar"),
        (lambda x: (x * 1j).sum(), ValueError, "complex"),
        (lambda x: (x.detach() ** 2).sum(), ValueError, "no graph"),
        (lambda x: 1.5, TypeError, "must be a tensor, not float"),
        (lambda x: None, TypeError, "must be a tensor, not NoneType"),
    ],
    ids=["vector", "complex", "no graph", "float", "None"],
)
def test_bad_losses(make, error, message):
    x = torch.randn(3, requires_grad=True)
    for call in (hesscale.backward, lambda loss: hesscale.grad(loss, x)):
        with pytest.raises(error, match=message):
            call(make(x))
    assert x.grad is None


@pytest.mark.parametrize("make_loss", [loss_of, entropy_loss])
def test_a_freed_graph(make_loss, no_hook_left):
    model = perceptron()
    loss = make_loss(model)
    hesscale.backward(loss)
    before = diagonals(model)
    with pytest.raises(RuntimeError, match="second time"):
        hesscale.backward(loss)
    assert all(torch.equal(s, t) for s, t in zip(diagonals(model), before, strict=True))


TRUNKS = {
    "linear": (lambda: nn.Linear(6, 6), (4, 6)),
    "convolution": (lambda: nn.Conv1d(3, 2, 2), (4, 3, 4)),
    "embedding": (lambda: nn.Embedding(9, 6), None),
    "LSTM": (lambda: nn.LSTM(3, 2, batch_first=True), (4, 3, 3)),
}


@pytest.mark.parametrize("name", TRUNKS)
@pytest.mark.parametrize("plain", [False, True])
def test_freed_layers_shared_by_two_losses(name, plain, no_hook_left):
    """PyTorch would notice it only during the pass, after it has filled the gradients of the second head."""
    make, shape = TRUNKS[name]
    torch.manual_seed(0)
    trunk, head = make(), nn.Linear(6, 2)
    h = trunk(torch.randn(shape) if shape else torch.arange(4))
    h = (h[0] if isinstance(h, tuple) else h).flatten(1).tanh()
    first, second = h.square().sum(), head(h).square().sum()
    first.backward() if plain else hesscale.backward(first)
    with pytest.raises(RuntimeError, match=r"second time.*retain_graph=True"):
        hesscale.backward(second)
    assert all(p.grad is None and getattr(p, "hess_diag", None) is None for p in head.parameters())
    hesscale.backward(second, inputs=list(head.parameters()))  # which does not need the trunk


def test_outputs_outside_the_graph():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="not in the graph"):
        hesscale.backward((x**2).sum(), outputs=x * 2)
    assert x.grad is None


@pytest.mark.parametrize("name", ["inputs", "outputs"])
def test_bad_tensors(name):
    x = torch.randn(3, requires_grad=True)
    loss = (x**2).sum()
    with pytest.raises(ValueError, match=f"{name} is empty"):
        hesscale.backward(loss, **{name: []})
    with pytest.raises(TypeError, match=f"{name} must hold tensors, not str"):
        hesscale.backward(loss, **{name: ["x"]})
    with pytest.raises(ValueError, match=f"{name} contains a tensor that does not require a gradient"):
        hesscale.backward(loss, **{name: torch.ones(3)})
    assert x.grad is None


# operators without a rule


class Cube(torch.autograd.Function):
    """x³ in reverse order: a custom function without a rule, and not elementwise."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x**3).flip(0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g.flip(0)


class CubeWithRule(Cube):
    @staticmethod
    def hess_diag(ctx, g, s):
        (x,) = ctx.saved_tensors
        return (0 if s is None else 9 * x**4 * s.flip(0)) + (0 if g is None else 6 * x * g.flip(0))


class Scaled(torch.autograd.Function):
    """y = k x² w: arguments that are no tensors, and two inputs."""

    @staticmethod
    def forward(ctx, k, x, name, w):
        ctx.save_for_backward(x, w)
        ctx.k = k
        return k * x**2 * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return None, 2 * ctx.k * x * w * g, None, ctx.k * x**2 * g

    @staticmethod
    def hess_diag(ctx, g, s):
        x, w = ctx.saved_tensors
        s, g = (torch.zeros_like(x) if t is None else t for t in (s, g))
        return None, (2 * ctx.k * x * w) ** 2 * s + 2 * ctx.k * w * g, None, (ctx.k * x**2) ** 2 * s


class Both(torch.autograd.Function):
    """x² and x³: two outputs, whose curvatures come as tuples."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2, x**3

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return 2 * x * g + 3 * x**2 * h

    @staticmethod
    def hess_diag(ctx, g, s):
        (x,) = ctx.saved_tensors
        g, s = ([torch.zeros_like(x) if t is None else t for t in pair] for pair in (g, s))
        return 4 * x**2 * s[0] + 9 * x**4 * s[1] + 2 * g[0] + 6 * x * g[1]


def test_an_operator_without_a_rule_is_named_before_anything_changes(monkeypatch, no_hook_left):
    model = perceptron()
    loss = loss_of(model)
    monkeypatch.delitem(RULES, "SigmoidBackward0")
    with pytest.raises(hesscale.UnsupportedOperator, match=r"no curvature rule for SigmoidBackward0.*register_rule.*fallback"):
        hesscale.backward(loss)
    assert all(p.grad is None and getattr(p, "hess_diag", None) is None for p in model.parameters())
    loss.backward()


def test_unneeded_operators_need_no_rule(monkeypatch):
    model = perceptron()
    loss = loss_of(model)
    monkeypatch.delitem(RULES, "TanhBackward0")
    hesscale.backward(loss, inputs=list(model[4].parameters()))
    assert model[4].weight.hess_diag is not None


def test_register_rule(rules):
    del rules["TanhBackward0"]

    @hesscale.register_rule("TanhBackward0", fan_in=False, fan_out=False)
    def doubled(node, g, s):
        """not tanh's rule"""
        return 2 * (s if s is not None else g)

    x = torch.randn(3, requires_grad=True)
    assert_close(hesscale.grad((x.tanh() ** 2).sum(), x)[1][0], torch.full((3,), 4.0))
    assert rules["TanhBackward0"].family == "custom"
    assert rules["TanhBackward0"].summary == "not tanh's rule"


def test_register_rule_with_an_unknown_fact_changes_nothing(rules):
    before = rules["TanhBackward0"]
    with pytest.raises(TypeError):
        hesscale.register_rule("TanhBackward0", nonsense=True)(lambda node, g, s: s)
    assert rules["TanhBackward0"] is before


def test_custom_functions_without_a_rule_are_refused():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(hesscale.UnsupportedOperator, match=r"CubeBackward.*\.Cube, which defines no hess_diag"):
        hesscale.backward(Cube.apply(x).sum())
    assert x.grad is None


@pytest.mark.parametrize("method", METHODS)
def test_custom_functions_may_define_hess_diag(method):
    x = torch.randn(3, requires_grad=True)
    plain = (torch.sin(x**3) ** 2).sum()
    custom = (torch.sin(CubeWithRule.apply(x)) ** 2).sum()
    assert_close(hesscale.grad(custom, x, method=method), hesscale.grad(plain, x, method=method))


def test_custom_functions_with_other_arguments():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    plain, custom = 1.5 * x**2 * w, Scaled.apply(1.5, x, "name", w)
    truth = [hessian_diagonal((plain**2).sum(), t) for t in (x, w)]
    assert_close(list(hesscale.grad((custom**2).sum(), [x, w])[1]), truth)
    only_x = Scaled.apply(1.5, x, "name", w.detach())
    assert_close(hesscale.grad((only_x**2).sum(), x)[1][0], truth[0])
    only_w = Scaled.apply(1.5, x.detach(), "name", w)
    assert_close(hesscale.grad((only_w**2).sum(), w)[1][0], truth[1])


def test_custom_functions_with_several_outputs():
    x = torch.randn(3, requires_grad=True)
    y, z = Both.apply(x)
    assert_close(hesscale.grad((y**2).sum() + z.sum(), x)[1][0], 12 * x.detach() ** 2 + 6 * x.detach())
    y, z = Both.apply(x)
    assert_close(hesscale.grad((z**2).sum(), x)[1][0], 30 * x.detach() ** 4)


# fallback="exact"

BRUTE = {
    "linear": ("CumsumBackward0", lambda x: x.cumsum(0)),
    "elementwise": ("TanhBackward0", torch.tanh),
    "dense": ("LogSoftmaxBackward0", lambda x: x.log_softmax(0)),
    "two inputs": ("MulBackward0", lambda x, y: x * y),
    "broadcast": ("MulBackward0", lambda x, y: x * y[0]),
    "one tensor twice": ("MulBackward0", lambda x: x * x),
    "product": ("MmBackward0", lambda x, y: x.t() @ y),
    "several outputs": ("UnbindBackward0", lambda x: torch.stack(x.unbind(0)[:1])),
}


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn"])
@pytest.mark.parametrize("name", BRUTE)
def test_brute_force_is_exact_on_a_separable_loss(name, method, rules):
    node, function = BRUTE[name]
    inputs = [torch.randn(3, 2, requires_grad=True) for _ in range(function.__code__.co_argcount if name != "elementwise" else 1)]
    y = function(*inputs)
    g, s = torch.randn_like(y), torch.randn_like(y)
    truth = [hessian_diagonal(separable_loss(y, g if method == "hesscale" else None, s), x) for x in inputs]
    loss = (g * y + 0.5 * s * (y - y.detach()) ** 2).sum()
    rules.pop(node, None)
    with pytest.warns(hesscale.CurvatureWarning, match=f"{node} by brute force"):
        found = hesscale.grad(loss, inputs, method=method, outputs=y, head="rules", fallback="exact")[1]
    for mine, expected in zip(found, truth, strict=True):
        assert_close(mine, expected)


def test_brute_force_works_for_custom_functions():
    x = torch.randn(3, requires_grad=True)
    y = Cube.apply(x)
    with pytest.warns(hesscale.CurvatureWarning, match="CubeBackward by brute force"):
        hesscale.backward((y**2).sum(), fallback="exact")
    assert_close(x.hess_diag, 30 * x.detach() ** 4)


def test_brute_force_has_a_limit():
    x = torch.randn(brute_force.MAX_ENTRIES + 1, requires_grad=True)
    with pytest.raises(hesscale.UnsupportedOperator, match=f"at most {brute_force.MAX_ENTRIES} entries"):
        hesscale.backward(Cube.apply(x).sum(), fallback="exact")
    assert x.grad is None


def test_brute_force_is_not_used_where_rules_exist(recwarn):
    model = perceptron()
    loss = loss_of(model)
    with_rules = diagonals_of(model, loss, retain_graph=True)
    assert_close(diagonals_of(model, loss, fallback="exact"), with_rules)
    assert not [w for w in recwarn if issubclass(w.category, hesscale.CurvatureWarning)]


# refused by name


def refuses(loss, name: str, leaves, fallback: str = "error") -> str:
    """Check that this loss is refused with the node's name, before anything changes. Returns the message."""
    with pytest.raises(hesscale.UnsupportedOperator, match=name) as caught:
        hesscale.backward(loss, fallback=fallback)
    assert all(leaf.grad is None and getattr(leaf, "hess_diag", None) is None for leaf in leaves)
    return str(caught.value)


@pytest.mark.parametrize("fallback", ["error", "exact"])
def test_complex_tensors_are_refused(fallback):
    x = torch.randn(3, requires_grad=True)
    assert "complex" in refuses(torch.fft.fft(x).exp().abs().sum(), "ExpBackward0", [x], fallback)
    assert "complex" in refuses(torch.fft.fft(x).angle().sum(), "AngleBackward0", [x], fallback)
    z = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    assert "complex" in refuses(z.abs().sum(), "Accumulate", [z], fallback)


def test_complex_tensors_have_no_diagonal_of_their_own():
    x = torch.randn(3, requires_grad=True)
    z = torch.fft.fft(x)
    with pytest.raises(hesscale.UnsupportedOperator, match="real and imaginary parts"):
        hesscale.grad(z.abs().sum(), [z])
    with pytest.raises(hesscale.UnsupportedOperator, match="real tensors as outputs="):
        hesscale.grad(torch.view_as_real(z).softmax(-1).square().sum(), [x], outputs=z)


def test_eigenvectors_are_refused():
    x = torch.randn(3, 3, requires_grad=True)
    assert "output 0" in refuses(torch.linalg.eigh(x @ x.mT)[1].square().sum(), "LinalgEighBackward0", [x])
    u, values, _ = torch.linalg.svd(x)
    assert "output 1" in refuses((u * values).square().sum(), "LinalgSvdBackward0", [x])


def sparse_matrix(values):
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [2, 0, 1]]), values, (3, 3))


SPARSE = {
    "made sparse": lambda x: x.to_sparse().to_dense().square().sum(),
    "sum": lambda x: torch.sparse.sum(x.to_sparse()) ** 2,
    "values": lambda x: torch.sparse.mm(sparse_matrix(x[0]), x).square().sum(),
}


@pytest.mark.parametrize("fallback", ["error", "exact"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_refused(name, fallback):
    x = torch.randn(3, 3, requires_grad=True)
    assert "sparse" in refuses(SPARSE[name](x), "Backward", [x], fallback).lower()


@pytest.mark.parametrize("fallback", ["error", "exact"])
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_parameters_are_refused(make, fallback):
    x, other = make(torch.eye(3)).requires_grad_(), torch.randn(3, 3, requires_grad=True)
    assert "sparse" in refuses((x @ other).square().sum() + other.sum(), "dense", [x, other], fallback)


def test_sparse_adjacency_error_mentions_torch_geometric():
    x = torch.randn(3, 2, requires_grad=True)
    constant = sparse_matrix(torch.tensor([1.0, 2.0, 3.0])).to_sparse_csr()
    assert "edge_index" in refuses(torch.sparse.mm(constant, x, "mean").square().sum(), "SparseMmReduce", [x])


@pytest.mark.parametrize("product", [torch.matmul, torch.sparse.mm])
def test_a_constant_sparse_factor_is_correct_or_refused(product):
    """A graph network's product with its adjacency matrix is an ordinary matrix product to autograd."""
    x = torch.randn(3, 2, requires_grad=True)
    try:
        hesscale.backward(product(sparse_matrix(torch.tensor([1.0, 2.0, 3.0])), x).square().sum())
    except hesscale.UnsupportedOperator:
        assert x.grad is None
    else:
        assert_close(x.hess_diag, torch.tensor([8.0, 18.0, 2.0])[:, None].expand(3, 2))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", ["bmm", "csr", "csc"])
def test_sparse_constants_count_like_dense_ones(name):
    torch.manual_seed(0)
    full, x = torch.randn(2, 4, 4).relu(), torch.randn(2, 4, 3, requires_grad=True)
    if name == "bmm":
        found = hesscale.grad(torch.bmm(full.to_sparse(), x).square().sum(), x)[1][0]
    else:
        full, x = full[0], x.detach()[0].requires_grad_()
        constant = full.to_sparse_csr() if name == "csr" else full.to_sparse_csc()
        found = hesscale.grad((constant @ x).square().sum(), x)[1][0]
    torch.testing.assert_close(found, hesscale.grad((full @ x).square().sum(), x)[1][0])


def test_a_parameter_without_data_is_refused():
    w = torch.ones(3, requires_grad=True)
    loss = (w**3).sum()
    with torch.no_grad():
        w.untyped_storage().resize_(0)
    with pytest.raises(hesscale.UnsupportedOperator, match="FullyShardedDataParallel"):
        hesscale.backward(loss)


@pytest.mark.parametrize("fallback", ["error", "exact"])
def test_nested_tensors_are_refused(fallback):
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls them a prototype
        nested = torch.nested.as_nested_tensor([a, b])
        loss = torch.nested.to_padded_tensor(torch.tanh(nested), 0.0).square().sum()
        assert "nested" in refuses(loss, "Backward", [a, b], fallback)


NESTED = {
    "made of leaves": lambda a, b, **layout: (torch.nested.as_nested_tensor([a, b], **layout), [a, b]),
    "a leaf itself": lambda a, b, **layout: [torch.nested.nested_tensor([a, b], requires_grad=True, **layout)] * 2,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_of_either_layout_are_refused(name, layout):
    nested, leaves = NESTED[name](torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True), layout=layout)
    weight = torch.randn(2, 3, requires_grad=True)
    loss = torch.nested.to_padded_tensor(F.linear(nested, weight), 0.0).square().sum() + weight.sum()
    assert "padded" in refuses(loss, "nested", [weight, *([leaves] if isinstance(leaves, torch.Tensor) else leaves)])


@pytest.mark.parametrize("fallback", ["error", "exact"])
@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_embedding_options_without_a_meaning_for_curvature_are_refused(option, fallback):
    table, tokens = torch.randn(5, 3, requires_grad=True), torch.tensor([1, 1, 4])
    factor = torch.randn(3, requires_grad=True)
    loss = (F.embedding(tokens, table, **{option: True}) * factor).square().sum()
    assert option in refuses(loss, "EmbeddingBackward0", [table, factor], fallback)
    bag = F.embedding_bag(tokens[None], table, mode="sum", **{option: True})
    assert option in refuses((bag * factor).square().sum(), "EmbeddingBag", [table, factor], fallback)


@pytest.mark.parametrize("fallback", ["error", "exact"])
def test_sparse_gradients_of_gather_are_refused(fallback):
    x, factor = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    loss = (torch.gather(x, 0, torch.ones(2, 3, dtype=torch.long), sparse_grad=True) * factor).square().sum()
    assert "sparse_grad=True" in refuses(loss, "GatherBackward0", [x, factor], fallback)


class FlashAttnFunc(Cube):
    """A kernel of another library, by its name."""


class Varlen_attn(Cube):
    pass


class GeneratedBackwardFor_transformers_grouped_mm_fallback_default(Cube):
    pass


class SyncBatchNorm(Cube):
    pass


KERNELS = {
    SyncBatchNorm: ("group or layer norm",),
    FlashAttnFunc: ("attn_implementation='eager'", "sdpa_kernel(SDPBackend.MATH)"),
    Varlen_attn: ("attn_implementation='eager'", "sdpa_kernel(SDPBackend.MATH)"),
    GeneratedBackwardFor_transformers_grouped_mm_fallback_default: ("set_experts_implementation('eager')",),
}


@pytest.mark.parametrize("fallback", ["error", "exact"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_the_error_for_an_attention_kernel_names_an_alternative(kernel, fallback):
    x = torch.randn(3, requires_grad=True)
    said = refuses(kernel.apply(x).square().sum(), kernel.__name__, [x], fallback)
    assert all(way in said for way in KERNELS[kernel])
    assert "fallback=" not in said  # which would not work


@pytest.mark.parametrize("fallback", ["error", "exact"])
def test_onednn_tensors_are_refused(fallback):
    x = torch.randn(2, 3, dtype=torch.float32, requires_grad=True)
    said = refuses(x.to_mkldnn().relu().to_dense().square().sum(), "Backward", [x], fallback)
    assert "dense" in said or "to_mkldnn" in said
    assert "fallback=" not in said


class Opaque(Cube):
    """Its backward leaves no graph, as that of a kernel."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x.detach() ** 2 * g.detach()


class OnceDifferentiable(Cube):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


@pytest.mark.filterwarnings("ignore:computing the curvature")
@pytest.mark.parametrize("function", [Opaque, OnceDifferentiable])
def test_brute_force_needs_second_derivatives(function):
    """It asks for them before the pass starts, and Gauss-Newton does not need them."""
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    h = function.apply(x)
    loss = ((weight * h).sin().square()).sum()
    assert "twice" in refuses(loss, function.__name__, [x, weight], "exact")
    hesscale.backward(loss, method="hesscale_gn", fallback="exact", outputs=h)
    assert x.hess_diag is not None


def test_graphs_of_a_double_backward_are_refused():
    x = torch.randn(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
    (x_gradient,) = torch.autograd.grad(F.softplus(x).sum(), x, create_graph=True)
    refuses(gradient.square().sum(), "TanhBackwardBackward0", [x])
    refuses(x_gradient.square().sum(), "SoftplusBackwardBackward0|SoftplusDoubleBackward", [x])


def test_compiled_functions_are_refused():
    model = torch.compile(perceptron(), backend="aot_eager")
    said = refuses(loss_of(model), "CompiledFunctionBackward", list(model.parameters()))
    assert "set_stance('force_eager')" in said
    assert "hesscale.compile_step" in said
    with torch.compiler.set_stance("force_eager"):
        hesscale.backward(loss_of(model))


def test_scripted_functions_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        function = torch.jit.script(gated)
    x = torch.randn(3, requires_grad=True)
    for _ in range(3):  # the first calls run operator by operator
        y = function(x)
    said = refuses(y.square().sum(), "no curvature rule for DifferentiableGraphBackward", [x])
    assert "PYTORCH_JIT=0" in said


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "householder"])
def test_the_error_for_orthogonal_layers_names_a_supported_map(orthogonal_map):
    def loss(orthogonal_map):
        layer = nn.utils.parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map=orthogonal_map)
        return layer(torch.ones(2, 3)).tanh().square().sum(), list(layer.parameters())

    value, parameters = loss(orthogonal_map)
    assert "orthogonal_map='cayley'" in refuses(value, "no curvature rule for Linalg", parameters)
    value, parameters = loss("cayley")
    hesscale.backward(value)
    assert all(p.hess_diag.isfinite().all() and p.hess_diag.any() for p in parameters)


def gated(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * x


# nothing stays behind


def test_all_hooks_are_removed(no_hook_left):
    model = perceptron()
    loss = loss_of(model)
    hesscale.backward(loss, retain_graph=True)
    hesscale.grad(entropy_loss(model), list(model.parameters()))
    before = diagonals(model)
    loss.backward()
    assert all(torch.equal(s, t) for s, t in zip(diagonals(model), before, strict=True))


@pytest.mark.parametrize("make_loss", [loss_of, entropy_loss])
def test_hooks_are_removed_after_an_error(make_loss, rules, no_hook_left):
    class Broken(Exception):
        pass

    model = perceptron()
    loss = make_loss(model)
    working = rules["TanhBackward0"]

    @hesscale.register_rule("TanhBackward0")
    def broken(node, g, s):
        raise Broken

    with pytest.raises(Broken):
        hesscale.backward(loss, retain_graph=True)
    rules["TanhBackward0"] = working
    before = [None if p.grad is None else p.hess_diag.clone() for p in model.parameters()]
    loss.backward(retain_graph=True)
    after = [getattr(p, "hess_diag", None) for p in model.parameters()]
    assert all(t is None if s is None else torch.equal(s, t) for s, t in zip(before, after, strict=True))
    fresh = diagonals_of(model, loss)
    assert all(s.isfinite().all() for s in fresh)


# beside other users of autograd


def test_autocast_does_not_affect_the_rules():
    """PyTorch's own backward does compute in low precision there, so without g: Gauss-Newton."""
    model = perceptron().float()
    x, y = batch()
    loss = F.cross_entropy(model(x.float()), y)
    outside = diagonals_of(model, loss, method="hesscale_gn", retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        inside = diagonals_of(model, loss, method="hesscale_gn")
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_no_grad_around_the_call_changes_nothing():
    model = perceptron()
    for loss in (loss_of(model), entropy_loss(model)):
        outside = diagonals_of(model, loss, retain_graph=True)
        with torch.no_grad():
            assert all(torch.equal(a, b) for a, b in zip(outside, diagonals_of(model, loss), strict=True))


@pytest.mark.parametrize("needs_double_backward", [False, True])
def test_tensor_hooks_and_retained_gradients_are_as_in_backward(needs_double_backward):
    """Also where the head is differentiated twice: hooks run once, gradients are kept once."""
    model, (x, y) = perceptron(), batch()

    def pass_through(call):
        forget(model)
        calls = []
        h = model[:2](x)
        logits = model[2:](h)
        p = logits.softmax(1)
        for tensor in (h, logits, p):
            tensor.retain_grad()
            tensor.register_hook(lambda g: calls.append(1) or 2 * g)
        call((p * logits.log_softmax(1)).sum() if needs_double_backward else F.nll_loss(p.log(), y))
        return [t.grad.clone() for t in (h, logits, p, *model.parameters())], len(calls)

    expected, count = pass_through(lambda loss: loss.backward())
    mine, my_count = pass_through(hesscale.backward)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    assert my_count == count == 3


def test_hooks_on_leaves_see_the_diagonal():
    """An optimizer may step in a post-accumulate hook."""
    w = torch.randn(3, requires_grad=True)
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.hess_diag.clone()))
    hesscale.backward((w**3).sum())
    torch.testing.assert_close(seen, [6 * w.detach()])


def test_a_flat_leaf_is_zero_even_if_a_hook_clears_its_gradient():
    w = torch.randn(3, requires_grad=True)
    w.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    hesscale.backward((w**3).sum())
    hesscale.backward((2 * w).sum())
    assert not w.hess_diag.any()


DIFFERENTIATED_BY_THEIR_RULES = {
    "pow": lambda h: torch.pow(h, h),
    "i1": torch.special.i1,
    "addcmul": lambda h: torch.addcmul(h, h, h),
    "write into a view": lambda h: write_power(h),
}


def write_power(h):
    copy = h * 1
    copy[:].pow_(h)
    return copy


@pytest.mark.parametrize("name", DIFFERENTIATED_BY_THEIR_RULES)
def test_rules_that_differentiate_run_no_hooks_of_the_user(name):
    h = torch.randn(3, requires_grad=True).abs() + 1
    h.retain_grad()
    calls = []
    h.register_hook(lambda g: calls.append(g))
    loss = DIFFERENTIATED_BY_THEIR_RULES[name](h).sum()
    hesscale.backward(loss, retain_graph=True)
    mine, h.grad = h.grad, None
    assert len(calls) == 1
    loss.backward()
    assert torch.equal(mine, h.grad)


def test_module_hooks_change_nothing():
    model, data, seen = perceptron(), batch(), []
    plain = diagonals_of(model, loss_of(model, data))
    model[2].register_full_backward_hook(lambda module, g_in, g_out: seen.append("backward"))
    model[2].register_full_backward_pre_hook(lambda module, g_out: seen.append("before"))
    assert_close(diagonals_of(model, loss_of(model, data)), plain)
    assert seen == ["before", "backward"]


# graphs that are not chains, where the recursion is exact

EXACT = {
    "x·x": lambda x: (x * x).sum(),
    "x+x": lambda x: ((x + x) ** 2).sum(),
    "dot": lambda x: torch.dot(x, x),
    "maximum": lambda x: (torch.maximum(x, x) ** 2).sum(),
    "inplace activation": lambda x: (F.elu(x * 2, inplace=True) ** 2).sum(),
    "inplace arithmetic": lambda x: (x * 2).add_(1).mul_(3).tanh_().pow(2).sum(),
    "write into a view": lambda x: (torch.zeros(6).index_copy(0, torch.tensor([4, 1, 2]), x) ** 3).sum(),
    "branches that do not meet": lambda x: (x[:2].tanh() ** 2).sum() + x[2] ** 3,
    "branches that add up": lambda x: x.tanh().sum() + (x**3).sum() + x.exp().sum(),
    "shared weights on two samples": lambda x: sum(
        (F.linear(torch.tensor([[a, -a, 2 * a]]), x.expand(2, 3)) ** 2).sum() for a in (0.3, 1.7)
    ),
    "detached branch": lambda x: (x * x.detach().tanh()).square().sum(),
    "functional": lambda x: torch.einsum("i,ij->j", x, torch.arange(6.0).view(3, 2)).square().sum(),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    x = torch.randn(3, requires_grad=True)
    truth = hessian_diagonal(EXACT[name](x), x)
    assert_close(hesscale.grad(EXACT[name](x), x)[1][0], truth)
