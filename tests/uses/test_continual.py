"""Importances equal the diagonals that they are named after, and the penalty is their quadratic form."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import hesscale
from hesscale.estimators import estimate
from hesscale.uses.continual import EWC, importance

pytestmark = pytest.mark.usefixtures("double_precision")


def task(count=7, batch=3):
    x, y = torch.randn(count, 4), torch.randint(0, 3, (count,))
    return x, y, DataLoader(TensorDataset(x, y), batch_size=batch)


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def mean_loss(model, x, y):
    return F.cross_entropy(model(x), y)


class TestImportance:
    def test_of_a_quadratic_loss_is_its_hessian(self):
        x, targets = torch.randn(7, 4), torch.randn(7, 2)
        model = nn.Linear(4, 2)
        found = importance(
            model, DataLoader(TensorDataset(x, targets), batch_size=3), lambda model, x, t: (model(x) - t).square().sum(1).mean()
        )
        torch.testing.assert_close(found["weight"], 2 * x.square().mean(0).expand(2, 4))
        torch.testing.assert_close(found["bias"], torch.full((2,), 2.0))

    def test_of_unequal_batches_is_that_of_all_samples(self):
        x, y, loader = task()
        model = network()
        for method in ("hesscale_gn", "ggn", "empirical_fisher"):
            parts = importance(model, loader, mean_loss, method=method)
            whole = importance(model, [(x, y)], mean_loss, method=method)
            torch.testing.assert_close(parts, whole)

    def test_the_empirical_fisher_sums_squares_of_samples(self):
        """It is not the square of the batch's gradient."""
        x, y, loader = task()
        model = network()
        expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for one, label in zip(x, y, strict=True):
            gradients = torch.autograd.grad(F.cross_entropy(model(one[None]), label[None]), model.parameters())
            for sum_, g in zip(expected.values(), gradients, strict=True):
                sum_ += g.square() / len(x)
        torch.testing.assert_close(importance(model, loader, mean_loss, method="empirical_fisher"), expected)

    def test_the_exact_diagonal_and_draws(self):
        x, y, loader = task()
        model = network()
        exact = estimate("ggn", F.cross_entropy(model(x), y), list(model.parameters()))
        for method, samples, tolerance in (("ggn", 1, 1e-12), ("ggn_mc", 5000, 0.1), ("ggn_mc_per_sample", 5000, 0.1)):
            generator = torch.Generator().manual_seed(0)
            found = importance(model, loader, mean_loss, method=method, num_samples=samples, generator=generator)
            for a, b in zip(found.values(), exact, strict=True):
                assert (a - b).norm() <= tolerance * b.norm()

    def test_calibrated(self):
        x, y, loader = task()
        model = network()
        exact = estimate("ggn", F.cross_entropy(model(x), y), list(model.parameters()))
        options = {"num_samples": 5000, "generator": torch.Generator().manual_seed(0)}
        found = importance(model, loader, mean_loss, calibrate=True, **options)
        for a, b in zip(found.values(), exact, strict=True):
            torch.testing.assert_close(a.sum(), b.sum(), rtol=0.05, atol=0)

    def test_is_of_the_model_in_eval_mode_and_leaves_it_as_it_was(self):
        x, y, _ = task()
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
        model[2].eval()
        model[0].bias.requires_grad_(False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = importance(model, [(x, y)], mean_loss)
        assert [module.training for module in model] == [True, True, False, True]
        torch.testing.assert_close(model.state_dict(), before)
        assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is None for p in model.parameters())
        expected = estimate("hesscale_gn", F.cross_entropy(model.eval()(x), y), [model[3].weight])[0]
        torch.testing.assert_close(found["3.weight"], expected)

    def test_restores_buffers_after_an_error_too(self):
        class Counts(nn.Linear):
            def __init__(self):
                super().__init__(4, 3)
                self.register_buffer("count", torch.zeros(()))

            def forward(self, x):
                self.count += 1
                return super().forward(x)

        x, y, _ = task()
        model = Counts()
        importance(model, [(x, y)], mean_loss)
        with pytest.raises(IndexError):
            importance(model, [(x, y + 3)], mean_loss)
        assert model.count == 0
        assert model.training

    def test_of_a_model_in_half_precision_adds_up_in_single(self):
        model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        batches = [torch.full((1, 1), 1.0, dtype=torch.bfloat16)] + 300 * [torch.full((1, 1), 0.0625, dtype=torch.bfloat16)]
        found = importance(model, batches, lambda model, x: model(x).square().sum())["weight"]
        torch.testing.assert_close(found.item(), 2 * (1 + 300 * 0.0625**2) / 301)
        EWC(model).consolidate({"weight": found})

    def test_calibrated_in_half_precision(self):
        """Each entry fits into float16, and their sum does not."""
        model = nn.Linear(300, 300, bias=False, dtype=torch.float16)
        x, targets = (torch.full((2, 300), value, dtype=torch.float16) for value in (20.0, 0.0))
        found = importance(
            model, [(x, targets)], lambda model, x, y: (model(x) - y).square().sum(1).mean(), calibrate=True, num_samples=100
        )
        torch.testing.assert_close(found["weight"].mean(), torch.tensor(800.0, dtype=torch.float32), rtol=0.1, atol=0)

    def test_that_is_not_finite_raises(self):
        y = torch.zeros(2, dtype=torch.int64)
        with pytest.raises(hesscale.NonFiniteError, match="the loss of batch 1 is not finite: nan"):
            importance(network(), [(torch.ones(2, 4), y), (torch.full((2, 4), torch.nan), y)], mean_loss)
        with pytest.raises(hesscale.NonFiniteError, match="the loss of batch 0 is not finite: nan"):
            importance(network(), [(torch.ones(2, 4), y - 100)], mean_loss)  # all labels ignored: gradients are zero
        with pytest.raises(hesscale.NonFiniteError, match="the importance of weight is not finite"):
            importance(nn.Linear(2, 1, bias=False), [torch.zeros(2, 2)], lambda model, x: model(x).square().sum().sqrt())

    def test_errors(self):
        model = network()
        with pytest.raises(ValueError, match="no batches"):
            importance(model, [], mean_loss)
        with pytest.raises(TypeError, match="module CrossEntropyLoss"):
            importance(model, [], nn.CrossEntropyLoss())
        with pytest.raises(ValueError, match="not 'hesscale'"):
            importance(model, [], mean_loss, method="hesscale")
        with pytest.raises(ValueError, match="leave calibrate out"):
            importance(model, [], mean_loss, method="empirical_fisher", calibrate=True)
        with pytest.raises(ValueError, match="requires gradients"):
            importance(model.requires_grad_(False), [], mean_loss)


@torch.no_grad()
def move(model, by):
    for p in model.parameters():
        p.add_(by)


def consolidated(decay=None):
    """Two tasks at weights [0, 0] and [1, 1], with importances [2, 0] and [1, 3]; the weights are now [3, 3]."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    ewc = EWC(model, decay=decay)
    ewc.consolidate({"weight": torch.tensor([[2.0, 0.0]])})
    move(model, 1)
    ewc.consolidate({"weight": torch.tensor([[1.0, 3.0]])})
    move(model, 2)
    return model, ewc


class TestPenalty:
    def test_before_the_first_task(self):
        model = network()
        assert EWC(model).penalty().item() == 0

    def test_and_its_gradient_by_hand(self):
        model, ewc = consolidated()
        assert ewc.penalty().item() == 0.5 * (2 * 9 + 1 * 4 + 3 * 4)
        ewc.penalty().backward()
        assert model.weight.grad.tolist() == [[2 * 3 + 1 * 2, 3 * 2]]

    def test_online(self):
        model, ewc = consolidated(decay=0.5)
        assert ewc.penalty().item() == 0.5 * (2 * 4 + 3 * 4)
        ewc.penalty().backward()
        assert model.weight.grad.tolist() == [[2 * 2, 3 * 2]]
        assert len(ewc.terms) == 1

    @pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "ggn", "exact"])
    def test_its_curvature_is_the_importance(self, method):
        x, y, _ = task()
        model = network()
        ewc, params = EWC(model), list(model.parameters())
        for _ in range(2):
            ewc.consolidate({name: torch.rand_like(p) for name, p in model.named_parameters()})
            move(model, 0.1)
        plain = estimate(method, mean_loss(model, x, y), params)
        held = estimate(method, mean_loss(model, x, y) + 10 * ewc.penalty(), params)
        for name, a, b in zip(ewc.terms[0]["importance"], plain, held, strict=True):
            torch.testing.assert_close(b, a + 10 * (ewc.terms[0]["importance"][name] + ewc.terms[1]["importance"][name]))

    @pytest.mark.parametrize("decay", [None, 0.5])
    def test_of_a_parameter_that_was_frozen_since(self, decay):
        model, ewc = consolidated(decay)
        before = ewc.penalty().item()
        model.register_parameter("other", nn.Parameter(torch.ones(1)))
        model.weight.requires_grad_(False)
        assert ewc.penalty().item() == before
        ewc.load_state_dict(ewc.state_dict())
        ewc.consolidate({"other": torch.ones(1)})
        assert ewc.penalty().item() == (0 if decay else before)  # the online variant moves θ*

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_of_a_model_in_half_precision_adds_up_in_single(self, dtype):
        model = nn.Linear(2, 1, bias=False, dtype=dtype)
        nn.init.zeros_(model.weight)
        ewc = EWC(model)
        ewc.consolidate({"weight": torch.full((1, 2), 1e-9)})
        ewc.load_state_dict(ewc.state_dict())
        move(model, 1)
        assert ewc.penalty().item() == pytest.approx(1e-9)
        (1e9 * ewc.penalty()).backward()
        assert model.weight.grad.tolist() == [[1, 1]]

    def test_what_is_remembered_does_not_change_with_the_model_or_the_argument(self):
        model = nn.Linear(2, 1, bias=False)
        ewc, given = EWC(model), torch.ones(1, 2)
        ewc.consolidate({"weight": given})
        given.zero_()
        move(model, 1)
        assert ewc.penalty().item() == pytest.approx(1)

    def test_errors(self):
        ewc = EWC(network())
        with pytest.raises(ValueError, match=r"3\.weight is not a parameter .* 0\.weight, 0\.bias"):
            ewc.consolidate({"3.weight": torch.ones(3)})
        with pytest.raises(ValueError, match=r"shape \(3,\), and the parameter \(5,\)"):
            ewc.consolidate({"0.bias": torch.ones(3)})
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match=r"negative or not finite"):
                ewc.consolidate({"0.bias": torch.full((5,), bad)})
        with pytest.raises(ValueError, match="between 0 and 1"):
            EWC(network(), decay=2)
        assert ewc.terms == []
        for decay in (None, 0.5):
            model, ewc = consolidated(decay)
            prune.identity(model, "weight")
            with pytest.raises(ValueError, match=r"has stored weight, .* it has weight_orig"):
                ewc.penalty()


class TestState:
    @pytest.mark.parametrize("decay", [None, 0.5])
    def test_continues_where_it_was(self, decay):
        model, ewc = consolidated(decay)
        file = io.BytesIO()
        torch.save(ewc.state_dict(), file)
        file.seek(0)
        other = EWC(model)
        other.load_state_dict(torch.load(file, weights_only=True))
        for _ in range(2):
            assert other.penalty().item() == ewc.penalty().item()
            for each in (ewc, other):
                each.consolidate({"weight": torch.ones(1, 2)})
            move(model, 1)

    def test_of_another_model_raises(self):
        _, ewc = consolidated()
        other = EWC(nn.Linear(3, 1, bias=False))
        with pytest.raises(ValueError, match=r"weight of shape \(1, 2\), and the model has one of shape \(1, 3\)"):
            other.load_state_dict(ewc.state_dict())
        with pytest.raises(ValueError, match=r"the model has none"):
            EWC(network()).load_state_dict(ewc.state_dict())
        assert other.terms == []
