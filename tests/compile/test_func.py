"""``grad_and_hess_diag`` equals the engine, by itself and under vmap, functional_call and torch.compile."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from oracle import hessian_diagonal
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hesscale
from hesscale import func
from hesscale.compile.make_fx import CannotTrace
from hesscale.errors import NeedsEagerPass
from hesscale.func import grad_and_hess_diag

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **options})


def assert_same(got, expected, **tolerances):
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True)
    for mine, truth in pairs:
        torch.testing.assert_close(mine, truth, **tolerances)


def part(tree, *index):
    return pytree.tree_map(lambda tensor: tensor[index], tree)


def mlp_loss(params, x, y):
    hidden = torch.tanh(x @ params["first"] + params["bias"])
    return F.cross_entropy(hidden @ params["second"], y)


def mlp():
    params = {"first": torch.randn(4, 5), "bias": torch.randn(5), "second": torch.randn(5, 3)}
    return params, torch.randn(6, 4), torch.randint(3, (6,))


def tanh_loss(w, x):
    return torch.tanh(x @ w).square().sum()


SCALE = 1.0


class Settings:
    scale = 1.0


class TestAlone:
    @pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
    def test_equals_hesscale_grad(self, method):
        params, x, y = mlp()
        loss, grads, hess_diags = grad_and_hess_diag(mlp_loss, method=method)(params, x, y)
        leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
        expected = mlp_loss(leaves, x, y)
        found = hesscale.grad(expected, list(leaves.values()), method=method)
        assert_same((loss, grads, hess_diags), (expected.detach(), *[dict(zip(leaves, part, strict=True)) for part in found]))
        assert list(grads) == list(hess_diags) == list(params)

    def test_is_exact_in_one_layer(self):
        w, x, y = torch.randn(3, 4), torch.randn(5, 4), torch.randint(3, (5,))
        leaf = w.clone().requires_grad_()
        truth = hessian_diagonal(F.cross_entropy(x @ leaf.T, y), leaf)
        transform = grad_and_hess_diag(lambda w, x, y: F.cross_entropy(x @ w.T, y))
        assert_same(transform(w, x, y)[2], truth, rtol=1e-10, atol=1e-10)
        assert_same(part(vmap(transform, (0, None, None))(w.expand(2, 3, 4), x, y)[2], 1), truth, rtol=1e-10, atol=1e-10)
        assert_same(compiled(transform)(w, x, y)[2], truth, rtol=1e-10, atol=1e-10)

    def test_nested_parameters_keep_their_structure(self):
        params = {"a": [torch.randn(3), (torch.randn(3),)], "b": torch.randn(())}

        def loss_fn(p):
            return (p["a"][0] * p["a"][1][0]).square().sum() * p["b"] ** 3

        _, grads, hess_diags = grad_and_hess_diag(loss_fn)(params)
        structure = pytree.tree_structure(params)
        assert pytree.tree_structure(grads) == pytree.tree_structure(hess_diags) == structure
        total = (params["a"][0] * params["a"][1][0]).square().sum()
        assert_same(hess_diags["b"], 6 * params["b"] * total)

    @pytest.mark.parametrize("argnums", [1, -2, (1,), (0, 1), (1, 0), (-3, 1)])
    def test_argnums(self, argnums):
        a, b, x = torch.randn(3), torch.randn(3), torch.randn(3)
        _, grads, hess_diags = grad_and_hess_diag(lambda a, b, x: (a**2 * b**3 * x).sum(), argnums)(a, b, x)
        truth = {0: (2 * a * b**3 * x, 2 * b**3 * x), 1: (3 * a**2 * b**2 * x, 6 * a**2 * b * x)}
        if isinstance(argnums, int):
            assert_same((grads, hess_diags), truth[1])
        else:
            assert isinstance(grads, tuple)
            assert_same((grads, hess_diags), tuple(zip(*[truth[place % 3] for place in argnums], strict=True)))

    @pytest.mark.parametrize("argnums", [2, -3, (0, 0), (0, -2), ()])
    def test_invalid_argnums_are_refused(self, argnums):
        with pytest.raises(ValueError, match="must be different indices of the positional arguments, of which there are 2"):
            grad_and_hess_diag(lambda a, b: (a * b).sum(), argnums)(torch.ones(2), torch.ones(2))

    def test_has_aux(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)

        def loss_fn(w, x):
            y = x @ w
            return y.square().sum(), {"y": y, "w": [w]}

        for transform in (grad_and_hess_diag(loss_fn, has_aux=True), compiled(grad_and_hess_diag(loss_fn, has_aux=True))):
            (loss, aux), grads, _ = transform(w, x)
            assert_same((loss, aux["y"], aux["w"][0]), ((x @ w).square().sum(), x @ w, w))
            assert not any(t.requires_grad for t in (loss, aux["y"], aux["w"][0], grads))
        (loss, aux), _, _ = vmap(grad_and_hess_diag(loss_fn, has_aux=True), (None, 0))(w, x)
        assert_same(aux["y"], x @ w)
        with pytest.raises(TypeError, match=r"pair \(loss, aux\)"):
            grad_and_hess_diag(tanh_loss, has_aux=True)(w, x)

    def test_unused_parameters_get_zeros(self):
        params = {"used": torch.randn(3), "unused": torch.randn(2, 2)}
        _, grads, hess_diags = grad_and_hess_diag(lambda p: p["used"].square().sum())(params)
        assert_same((grads["unused"], hess_diags["unused"]), (torch.zeros(2, 2), torch.zeros(2, 2)))

    def test_keyword_arguments(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)

        def loss_fn(w, *, x, scale=1.0):
            return scale * tanh_loss(w, x)

        transform = grad_and_hess_diag(loss_fn)
        expected = grad_and_hess_diag(tanh_loss)(w, x)
        assert_same(transform(w, x=x, scale=2.0), pytree.tree_map(lambda t: 2 * t, expected))
        mapped = vmap(lambda w, x: transform(w, x=x, scale=2.0), (None, 0))(w, x.unsqueeze(0))
        assert_same(part(mapped, 0), transform(w, x=x, scale=2.0))
        assert_same(compiled(transform)(w, x=x, scale=2.0), transform(w, x=x, scale=2.0))

    def test_results_have_no_graph_and_grad_does_not_change(self):
        w, x = torch.randn(4, 2, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        for transform in (grad_and_hess_diag(tanh_loss), compiled(grad_and_hess_diag(tanh_loss))):
            assert not any(tensor.requires_grad for tensor in transform(w, x))
        assert not any(tensor.requires_grad for tensor in vmap(grad_and_hess_diag(tanh_loss), (None, 0))(w, x))
        assert w.grad is None
        assert x.grad is None
        assert not hasattr(w, "hess_diag")

    def test_works_under_no_grad(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)
        with torch.no_grad():
            assert_same(grad_and_hess_diag(tanh_loss)(w, x), grad_and_hess_diag(tanh_loss)(w, x))

    @pytest.mark.parametrize(
        ("stranger", "name"),
        [(torch.ones(2, dtype=torch.int64), "a tensor of torch.int64"), (3.0, "a float"), (None, "a NoneType")],
    )
    def test_non_float_parameters_are_named_in_the_error(self, stranger, name):
        def loss_fn(x, params):
            return (params["layers"][0] * x).sum()

        with pytest.raises(TypeError, match=rf"argument 1\['layers'\]\[1\] is {name}"):
            grad_and_hess_diag(loss_fn, 1)(torch.ones(2), {"layers": [torch.ones(2), stranger]})

    def test_other_mistakes(self):
        with pytest.raises(ValueError, match="must be a scalar"):
            grad_and_hess_diag(lambda w: w * 2)(torch.ones(2))
        with pytest.raises(ValueError, match="method='newton'"):
            grad_and_hess_diag(tanh_loss, method="newton")

    def test_options_reach_the_engine(self):
        def loss_fn(logits):
            p = logits.softmax(-1)
            return (p * p.log()).sum()

        logits = torch.randn(2, 3)
        exact, rules = (grad_and_hess_diag(loss_fn, head=head)(logits)[2] for head in ("exact", "rules"))
        leaf = logits.clone().requires_grad_()
        assert_same(exact, hessian_diagonal(loss_fn(leaf), leaf))
        assert not torch.allclose(exact, rules)


class TestFunctionalCall:
    def test_modules(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        hesscale.backward(F.cross_entropy(model(x), y))
        params = dict(model.named_parameters())
        transform = grad_and_hess_diag(lambda p, x, y: F.cross_entropy(functional_call(model, p, (x,)), y))
        for run in (transform, compiled(transform)):
            _, grads, hess_diags = run(params, x, y)
            assert_same(grads, {name: p.grad for name, p in params.items()})
            assert_same(hess_diags, {name: p.hess_diag for name, p in params.items()})

    def test_buffers_change_as_in_eager_mode(self):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        params = {name: p.detach() for name, p in model.named_parameters()}
        x = torch.randn(3, 6, 4)

        def loss_fn(params, buffers, x):
            return functional_call(model, (params, buffers), (x,)).square().mean()

        def fresh():
            return {name: b.clone() for name, b in model.named_buffers()}

        transform = grad_and_hess_diag(loss_fn)
        one_by_one = [fresh() for _ in x]
        expected = [transform(params, buffers, batch) for buffers, batch in zip(one_by_one, x, strict=True)]
        stacked = {name: b.expand(3, *b.shape).clone() for name, b in fresh().items()}
        for calls in (1, 2):
            got = vmap(transform, (None, 0, 0))(params, stacked, x)
            for k in range(3):
                assert_same(part(got, k), expected[k])
            assert stacked["1.num_batches_tracked"].tolist() == [calls] * 3
            if calls == 1:
                assert_same(part(stacked, 2), one_by_one[2])
        buffers = fresh()
        assert_same(compiled(transform)(params, buffers, x[0]), expected[0])
        assert_same(buffers, one_by_one[0])

    def test_members_of_an_ensemble(self):
        models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(3)]
        params, _ = stack_module_state(models)
        x = torch.randn(6, 4)
        transform = grad_and_hess_diag(lambda p, x: functional_call(models[0], p, (x,)).square().mean())
        _, _, hess_diags = vmap(transform, (0, None))(params, x)
        for k, model in enumerate(models):
            hesscale.backward(model(x).square().mean())
            assert_same(part(hess_diags, k), {name: p.hess_diag for name, p in model.named_parameters()})

    @pytest.mark.parametrize("randomness", ["different", "same"])
    def test_dropout(self, randomness):
        model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(), nn.Linear(50, 1))
        params, x = dict(model.named_parameters()), torch.randn(1, 4)
        transform = grad_and_hess_diag(lambda p, x: functional_call(model, p, (x,)).square().sum())
        mapped = vmap(transform, (None, 0), randomness=randomness)
        torch.manual_seed(1)
        losses, grads, _ = first = mapped(params, x.expand(3, 1, 4))
        assert torch.allclose(losses[0], losses[1]) == (randomness == "same")
        dead = grads["2.weight"] == 0
        assert 5 < dead[0].sum() < 45
        assert torch.equal(dead[0], dead[1]) == (randomness == "same")
        torch.manual_seed(1)
        assert_same(mapped(params, x.expand(3, 1, 4)), first)

    def test_dropout_under_vmap_without_randomness_is_refused(self):
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(grad_and_hess_diag(lambda w, x: tanh_loss(w, F.dropout(x))), (None, 0))(torch.randn(4, 2), torch.randn(3, 4))

    def test_compiled_dropout_draws_the_same_masks_as_eager_mode(self):
        model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(), nn.Linear(50, 1))
        params, x = dict(model.named_parameters()), torch.randn(1, 4)
        transform = grad_and_hess_diag(lambda p, x: functional_call(model, p, (x,)).square().sum())
        run = compiled(transform)
        run(params, x)
        torch.manual_seed(1)
        got = run(params, x)
        torch.manual_seed(1)
        assert_same(got, transform(params, x))


class TestVmap:
    def test_results_over_samples_add_up_to_the_batch(self):
        params, x, y = mlp()

        def loss_fn(params, x, y):
            return mlp_loss(params, x, y) * len(x)

        whole = grad_and_hess_diag(loss_fn)(params, x, y)
        parts = vmap(grad_and_hess_diag(loss_fn), (None, 0, 0))(params, x.unsqueeze(1), y.unsqueeze(1))
        assert_same(pytree.tree_map(lambda t: t.sum(0), parts), whole)

    def test_over_parameters(self):
        _, x, y = mlp()
        members = [mlp()[0] for _ in range(3)]
        stacked = pytree.tree_map(lambda *tensors: torch.stack(tensors), *members)
        transform = grad_and_hess_diag(mlp_loss)
        got = vmap(transform, (0, None, None))(stacked, x, y)
        for k, member in enumerate(members):
            assert_same(part(got, k), transform(member, x, y))

    def test_nested(self):
        w, x = torch.randn(2, 4, 2), torch.randn(3, 5, 4)
        transform = grad_and_hess_diag(tanh_loss)
        got = vmap(vmap(transform, (None, 0)), (0, None))(w, x)
        for i in range(2):
            for j in range(3):
                assert_same(part(got, i, j), transform(w[i], x[j]))

    @pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
    def test_every_dimension(self, dim):
        w, x = torch.randn(3, 4, 2), torch.randn(5, 4)
        transform = grad_and_hess_diag(tanh_loss)
        got = vmap(transform, (dim, None))(w.movedim(0, dim), x)
        got_contiguous = vmap(transform, (dim, None))(w.movedim(0, dim).contiguous(), x)
        for k in range(3):
            assert_same(part(got, k), transform(w[k], x))
            assert_same(part(got_contiguous, k), transform(w[k], x))

    def test_in_dims_of_a_dict(self):
        params, x, y = mlp()
        biases = torch.randn(3, 5)
        dims = {"first": None, "bias": 0, "second": None}
        transform = grad_and_hess_diag(mlp_loss)
        got = vmap(transform, (dims, None, None))({**params, "bias": biases}, x, y)
        for k in range(3):
            assert_same(part(got, k), transform({**params, "bias": biases[k]}, x, y))

    def test_chunks(self):
        w, x = torch.randn(4, 2), torch.randn(5, 3, 4)
        transform = grad_and_hess_diag(tanh_loss)
        assert_same(vmap(transform, (None, 0), chunk_size=2)(w, x), vmap(transform, (None, 0))(w, x))

    def test_convolutions_views_and_layouts(self):
        def loss_fn(w, x):
            return F.max_pool2d(torch.tanh(F.conv2d(x, w)), 2).reshape(len(x), -1).square().sum()

        w, x = torch.randn(3, 2, 3, 3), torch.randn(4, 5, 2, 6, 6)
        transform = grad_and_hess_diag(loss_fn)
        for layout in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT):
            assert_same(part(vmap(transform, (None, 0))(w, layout), 3), transform(w, x[3]))
            assert_same(part(vmap(transform, (0, 0))(w.expand(4, 3, 2, 3, 3), layout), 1), transform(w, x[1]))

    def test_autocast_is_recorded_not_repeated(self):
        w, x = torch.randn(4, 2, dtype=torch.float32), torch.randn(3, 5, 4, dtype=torch.float32)
        transform = grad_and_hess_diag(lambda w, x: torch.tanh(torch.tanh(x @ w) @ w.T).square().sum())
        with torch.autocast("cpu", torch.bfloat16):
            low = transform(w, x[1])
            assert_same(part(vmap(transform, (None, 0))(w, x), 1), low)
        high = transform(w, x[1])
        assert_same(part(vmap(transform, (None, 0))(w, x), 1), high)
        assert not torch.equal(low[2], high[2])

    def test_values_read_by_the_function_become_constants(self, monkeypatch):
        """As with ``jax.jit``, an existing transform does not notice that the value has changed, but a new one does."""
        w, x, settings = torch.randn(4, 2), torch.randn(3, 4), Settings()

        def loss_fn(w, x):
            return SCALE * settings.scale * tanh_loss(w, x)

        transform = grad_and_hess_diag(loss_fn)
        mapped, run = vmap(transform, (None, 0)), compiled(transform)
        before = mapped(w, x), run(w, x)
        settings.scale = 2.0
        monkeypatch.setitem(globals(), "SCALE", 3.0)
        assert_same((mapped(w, x), run(w, x)), before)
        new = grad_and_hess_diag(loss_fn)
        assert_same((vmap(new, (None, 0))(w, x), compiled(new)(w, x)), pytree.tree_map(lambda tensor: 6 * tensor, before))

    def test_arguments_other_than_tensors(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)

        def loss_fn(w, x, power, kind):
            return (x @ w).pow(power).sum() * (1 if kind is True else 2)

        transform = grad_and_hess_diag(loss_fn)
        for power, kind in ((2, True), (2.0, 1), (3, 1), (3, True), (2, 1)):
            got = vmap(transform, (None, 0, None, None))(w, x, power, kind)
            assert_same(part(got, 2), transform(w, x[2], power, kind))

    def test_the_number_of_recorded_graphs_is_bounded(self, monkeypatch):
        monkeypatch.setattr(func, "MAX_RECORDS", 2)
        calls = []

        def loss_fn(w, x):
            calls.append(len(x))
            return tanh_loss(w, x)

        mapped = vmap(grad_and_hess_diag(loss_fn), (None, 0))
        w = torch.randn(4, 2)
        for n, is_new in ((1, True), (1, False), (2, True), (1, False), (3, True), (2, False), (1, True)):
            calls.clear()
            mapped(w, torch.randn(5, n, 4))
            assert (n in calls) == is_new

    def test_captured_tensors_are_refused(self):
        w, x, scale = torch.randn(4, 2), torch.randn(3, 4), torch.tensor([1.0, 2.0])
        transform = grad_and_hess_diag(lambda w, x: tanh_loss(w * scale, x))
        before = transform(w, x)[0]
        scale.mul_(2)
        assert transform(w, x)[0] != before
        for _ in range(2):
            with pytest.raises(CannotTrace, match="a tensor that is not among its arguments: pass it as one"):
                vmap(transform, (None, 0))(w, x)
        made = grad_and_hess_diag(lambda w, x: tanh_loss(w * torch.tensor([1.0, 2.0]), x))
        with pytest.raises(CannotTrace, match="make the tensor outside, and pass it as an argument"):
            vmap(made, (None, 0))(w, x)
        numbers = grad_and_hess_diag(lambda w, x: tanh_loss(w * scale[0].item(), x))
        with pytest.raises(CannotTrace, match="argument"):
            vmap(numbers, (None, 0))(w, x)

    def test_captured_tensors_that_are_mapped_are_refused(self):
        w, x, scales = torch.randn(4, 2), torch.randn(3, 4), torch.tensor([1.0, 2.0, 3.0])

        def scaled(scale, x):
            return grad_and_hess_diag(lambda w, x: tanh_loss(w * scale, x))(w, x)

        with pytest.raises(CannotTrace, match="not among its arguments"):
            vmap(scaled)(scales, x)
        with pytest.raises(CannotTrace, match="not among its arguments"):
            vmap(scaled, (0, None))(scales, x)

    def test_reading_values_is_refused(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)
        with pytest.raises(CannotTrace, match="reads the values"):
            vmap(grad_and_hess_diag(lambda w, x: tanh_loss(w, x) if x.sum() > 0 else tanh_loss(2 * w, x)), (None, 0))(w, x)

    def test_reading_memory_addresses_is_refused(self):
        with pytest.raises(CannotTrace, match="as_strided"):
            vmap(grad_and_hess_diag(lambda w: w.as_strided((2,), (2,)).square().sum()))(torch.randn(3, 4))

    def test_errors_are_the_same_as_without_vmap(self):
        w, x = torch.randn(4, 2), torch.randn(3, 5, 4)
        with pytest.raises(ValueError, match="must be a scalar"):
            vmap(grad_and_hess_diag(lambda w, x: x @ w), (None, 0))(w, x)
        with pytest.raises(TypeError, match=r"argument 0 is a tensor of torch\.int64"):
            vmap(grad_and_hess_diag(tanh_loss), (None, 0))(w.long(), x)
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            vmap(grad_and_hess_diag(tanh_loss), (None, 0))(w.T, x)


def entropy(params, x, actions, advantages):
    """A policy gradient with an entropy bonus."""
    policy = Categorical(logits=torch.tanh(x @ params["hidden"]) @ params["out"])
    return (-policy.log_prob(actions[:, 0].long()) * advantages - 0.1 * policy.entropy()).mean()


def ppo(params, x, actions, advantages):
    """PPO's clipped surrogate of a Gaussian policy."""
    policy = Independent(Normal(torch.tanh(x @ params["hidden"]) @ params["out"], params["log_std"].exp()), 1)
    old = Independent(Normal(torch.zeros_like(actions), torch.ones_like(actions)), 1)
    ratio = (policy.log_prob(actions) - old.log_prob(actions)).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped * advantages).mean()


@pytest.mark.parametrize("loss_fn", [entropy, ppo])
class TestDoubtfulHeads:
    """Losses whose head needs double backward."""

    @staticmethod
    def inputs(count):
        """Tests have different numbers of samples, since the engine caches the structure of a head by shape."""
        params = {"hidden": torch.randn(4, 5), "out": 0.1 * torch.randn(5, 2), "log_std": torch.zeros(2)}
        return params, torch.randn(count, 4), torch.rand(count, 2) + 0.1, torch.rand(count)

    def test_under_vmap(self, loss_fn):
        params, *batch = self.inputs(26)
        transform = grad_and_hess_diag(loss_fn)
        got = vmap(transform, (None, 0, 0, 0))(params, *[torch.stack([t, t.flip(0), 1 - t]) for t in batch])
        for k, change in enumerate((lambda t: t, lambda t: t.flip(0), lambda t: 1 - t)):
            assert_same(part(got, k), transform(params, *[change(t) for t in batch]))

    def test_compiled(self, loss_fn):
        inputs = self.inputs(27)
        transform = grad_and_hess_diag(loss_fn)
        with (
            pytest.warns(hesscale.CompileWarning, match="call this function once without vmap and torch.compile"),
            pytest.raises(torch._dynamo.exc.Unsupported),
        ):
            compiled(transform)(*inputs)
        with pytest.warns(hesscale.CompileWarning, match="eager mode"):
            assert_same(compiled(transform, fullgraph=False)(*inputs), transform(*inputs))
        torch._dynamo.reset()
        params, *batch = inputs
        other = (pytree.tree_map(lambda t: t + 0.1, params), *[t.flip(0) for t in batch])
        run = compiled(transform)
        assert_same(run(*inputs), transform(*inputs))
        assert_same(run(*other), transform(*other))


def test_a_first_sample_without_curvature():
    """The structure of the head is found from the first sample that is mapped."""

    def loss_fn(w, x, weight):
        p = (x @ w).softmax(-1)
        return weight * (p * p.log()).sum()

    transform = grad_and_hess_diag(loss_fn)
    w, x, weights = torch.randn(4, 3), torch.randn(2, 28, 4), torch.tensor([0.0, 1.0])
    with pytest.raises(NeedsEagerPass, match="where it is curved"):
        vmap(transform, (None, 0, 0))(w, x, weights)
    expected = transform(w, x[1], weights[1])
    assert_same(part(vmap(transform, (None, 0, 0))(w, x, weights), 1), expected)


def test_a_sample_with_another_structure_gets_nan():
    """The first sample shows which outputs have mixed second derivatives. A recorded graph cannot check the others."""

    def loss_fn(w, x, weight):
        z = x @ w
        p = z.softmax(-1)
        return (p * z.log_softmax(-1)).sum() + weight * (p.sum(0) ** 2 * z.logsumexp(0)).sum()

    transform = grad_and_hess_diag(loss_fn)
    w, x, weights = torch.randn(4, 3), torch.randn(2, 29, 4), torch.tensor([0.0, 1.0])
    loss, grads, hess_diags = vmap(transform, (None, 0, 0))(w, x, weights)
    assert_same(part((loss, grads, hess_diags), 0), transform(w, x[0], weights[0]))
    assert_same(part((loss, grads), 1), transform(w, x[1], weights[1])[:2])
    assert hess_diags[1].isnan().all()


class TestDifferentiation:
    """A Hessian diagonal cannot be differentiated, so this raises an error in place of returning zero."""

    @pytest.mark.parametrize("outer", ["grad", "jacrev", "jacfwd", "hessian", "vjp", "jvp", "functionalize"])
    @pytest.mark.parametrize("place", ["inside", "around vmap", "inside vmap", "captured"])
    def test_is_refused(self, outer, place):
        w, x = torch.randn(4, 2), torch.randn(3, 4)
        transform = grad_and_hess_diag(tanh_loss)

        def plain(w):
            return transform(w, x)[2].sum()

        def mapped(w):
            return vmap(transform, (None, 0))(w, x)[2].sum()

        def captured(scale):
            return grad_and_hess_diag(lambda w: tanh_loss(w * scale, x))(w)[2].sum()

        function = {"around vmap": mapped, "captured": captured}.get(place, plain)
        transformed = {
            "vjp": lambda w: torch.func.vjp(function, w)[1](torch.ones(())),
            "jvp": lambda w: torch.func.jvp(function, (w,), (w,)),
        }.get(outer) or getattr(torch.func, outer)(function)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            (vmap(transformed) if place == "inside vmap" else transformed)(w.expand(2, 4, 2) if place == "inside vmap" else w)

    def test_is_refused_when_compiled(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)
        transform = grad_and_hess_diag(tanh_loss)
        run = compiled(lambda w: torch.func.grad(lambda w: transform(w, x)[0])(w))
        with pytest.warns(hesscale.CompileWarning, match="cannot be differentiated"), pytest.raises(Exception, match="nonstrict"):
            run(w)

    def test_autograd_finds_no_graph(self):
        w, x = torch.randn(4, 2, requires_grad=True), torch.randn(3, 4)
        _, _, hess_diag = grad_and_hess_diag(tanh_loss)(w, x)
        with pytest.raises(RuntimeError, match="does not require grad"):
            hess_diag.sum().backward()


class TestCompile:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
    def test_equals_eager_mode(self, backend):
        params, x, y = mlp()
        transform = grad_and_hess_diag(mlp_loss)
        assert_same(compiled(transform, backend=backend)(params, x, y), transform(params, x, y))

    def test_as_part_of_a_step(self):
        params, x, y = mlp()
        transform = grad_and_hess_diag(mlp_loss, method="hesscale_gn")

        def step(params, x, y):
            _, grads, hess_diags = transform(params, 2 * x, y)
            return {name: p - 0.1 * grads[name] / (hess_diags[name].abs() + 0.1) for name, p in params.items()}

        assert_same(compiled(step)(params, x, y), step(params, x, y))

    def test_new_shapes(self):
        params, x, y = mlp()
        transform = grad_and_hess_diag(mlp_loss)
        run = compiled(transform)
        for count in (6, 4, 1, 6):
            assert_same(run(params, x[:count], y[:count]), transform(params, x[:count], y[:count]))

    def test_vmap_inside(self):
        params, x, y = mlp()
        transform = grad_and_hess_diag(mlp_loss)

        def step(params, x, y):
            return vmap(transform, (None, 0, 0))(params, x.unsqueeze(1), y.unsqueeze(1))

        run = compiled(step)
        for count in (6, 4):
            assert_same(run(params, x[:count], y[:count]), step(params, x[:count], y[:count]))

    def test_vmap_outside(self):
        params, x, y = mlp()
        transform = grad_and_hess_diag(mlp_loss)
        got = compiled(vmap(transform, (None, 0, 0)))(params, x.unsqueeze(1), y.unsqueeze(1))
        assert_same(part(got, 2), transform(params, x[2:3], y[2:3]))

    def test_made_inside(self):
        params, x, y = mlp()
        run = compiled(lambda *args: grad_and_hess_diag(mlp_loss)(*args), fullgraph=False)
        assert_same(run(params, x, y), grad_and_hess_diag(mlp_loss)(params, x, y))

    def test_functions_that_cannot_be_compiled_run_in_eager_mode(self):
        w, x = torch.randn(4, 2), torch.randn(3, 4)
        scale = torch.tensor(2.0)
        for loss_fn, reason in (
            (lambda w, x: tanh_loss(w, x) if x.sum() > 0 else tanh_loss(2 * w, x), "reads the values"),
            (lambda w, x: tanh_loss(scale * w, x), "argument"),
        ):
            transform = grad_and_hess_diag(loss_fn)
            run = compiled(transform, fullgraph=False)
            with pytest.warns(hesscale.CompileWarning, match=reason):
                assert_same(run(w, x), transform(w, x))
            scale.mul_(2)
            assert_same(run(w, -x), transform(w, -x))

    def test_errors_are_the_same_as_in_eager_mode(self):
        run = compiled(grad_and_hess_diag(lambda w, x: x @ w), fullgraph=False)
        with pytest.warns(hesscale.CompileWarning), pytest.raises(ValueError, match="must be a scalar"):
            run(torch.randn(4, 2), torch.randn(3, 4))


def test_importing_hesscale_does_not_import_the_compilers():
    code = "import sys, hesscale.func; print([m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
