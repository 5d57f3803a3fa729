"""Plain values that a loss names are constants of a compiled step, and a change makes a new graph."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from torch import nn

import hesscale
from hesscale.compile.nearby import Near

pytestmark = pytest.mark.usefixtures("double_precision")


class TestSurroundings:
    """Plain values that the loss names are constants of the graph, and a change makes a new one."""

    @staticmethod
    def model():
        torch.manual_seed(0)
        return nn.Linear(3, 1).double()

    def check(self, loss_fn, change):
        """Losses follow the change at once, in a graph."""
        x = torch.ones(2, 3, dtype=torch.float64)
        eager, traced = self.model(), self.model()
        steps = [
            hesscale.compile_step(m, loss_fn, hesscale.AdaHesScale(m.parameters(), lr=0.01), backend=backend)
            for m, backend in ((eager, "eager"), (traced, "traced"))
        ]
        for i in range(9):
            if i in (3, 6):
                change(i)
            expected, found = (step(x) for step in steps)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        assert steps[1].mode == "traced"

    def test_a_variable_around_it(self):
        weight = 1.0

        def loss_fn(model, x):
            return weight * model(x).square().mean()

        def change(i):
            nonlocal weight
            weight = float(i)

        self.check(loss_fn, change)

    def test_an_entry_of_a_dict(self):
        settings = {"weight": 1.0, "unused": 0}

        def loss_fn(model, x):
            return settings["weight"] * model(x).square().mean()

        self.check(loss_fn, lambda i: settings.update(weight=float(i)))

    def test_an_attribute_of_whose_method_it_is(self):
        class Trainer:
            weight = 1.0
            calls = 0

            def loss(self, model, x):
                return self.weight * model(x).square().mean()

        trainer = Trainer()

        def change(i):
            trainer.weight = float(i)
            trainer.calls += 1

        self.check(trainer.loss, change)

    def test_an_entry_of_a_list_of_whose_method_it_is(self):
        class Trainer:
            def __init__(self):
                self.weights, self.criterion = [1.0], nn.HuberLoss()

            def loss(self, model, x):
                return self.weights[0] * self.criterion(model(x), torch.zeros_like(x[:, :1]))

        trainer = Trainer()
        self.check(trainer.loss, lambda i: trainer.weights.__setitem__(0, float(i)))
        self.check(trainer.loss, lambda i: setattr(trainer.criterion, "delta", 0.1 * i))

    @pytest.mark.parametrize("base", [object, nn.Module])
    def test_a_list_of_an_object_that_is_called(self, base):
        class Loss(base):
            def __init__(self):
                super().__init__()
                self.weights = [1.0]

            def forward(self, model, x):
                return self.weights[0] * model(x).square().mean()

        if base is object:
            Loss.__call__ = Loss.forward
            del Loss.forward
        loss = Loss()
        self.check(loss, lambda i: loss.weights.__setitem__(0, float(i)))

    def test_the_model_by_another_name_is_not_watched_twice(self):
        class Trainer:
            def __init__(self, model):
                self.model = model

            def loss(self, model, x):
                return self.model(x).square().mean()

        model = self.model()
        step = hesscale.compile_step(model, Trainer(model).loss, hesscale.AdaHesScale(model.parameters()), backend="traced")
        assert not [holder for holder, _ in step.subject.near.attributes if isinstance(holder, nn.Module)]

    def test_an_attribute_in_a_slot(self):
        class Trainer:
            __slots__ = ("weight",)

            def __init__(self):
                self.weight = 1.0

            def loss(self, model, x):
                return self.weight * model(x).square().mean()

        trainer = Trainer()
        self.check(trainer.loss, lambda i: setattr(trainer, "weight", float(i)))

    @pytest.mark.parametrize("box", [[1.0], collections.deque([1.0]), {0: 1.0}, {"a": 1.0, "b": 2.0}], ids=repr)
    def test_entries_that_are_not_named(self, box):
        def loss_fn(model, x):
            values = box.values() if isinstance(box, dict) else box
            return sum(values) * model(x).square().mean()

        self.check(loss_fn, lambda i: box.__setitem__("a" if "a" in box else 0, float(i)))

    def test_an_entry_that_comes_later(self):
        settings = {}

        def loss_fn(model, x):
            return settings.get("weight", 1.0) * model(x).square().mean()

        self.check(loss_fn, lambda i: settings.update(weight=float(i)))

    def test_a_criterion_in_a_list_and_in_a_partial(self):
        criteria = [nn.HuberLoss()]

        def loss_fn(model, x):
            return criteria[0](model(x), torch.zeros_like(x[:, :1]))

        def given(criterion, model, x):
            return criterion(model(x), torch.zeros_like(x[:, :1]))

        def change(i):
            criteria[0].delta = 0.1 * i

        self.check(loss_fn, change)
        self.check(functools.partial(given, criteria[0]), change)

    def test_an_entry_of_a_list_that_came_later(self):
        weights = [1.0]

        def loss_fn(model, x):
            return weights[0] * model(x).square().mean()

        def change(i):
            nonlocal weights
            weights = [2.0] if i == 3 else weights
            weights[0] *= 3

        self.check(loss_fn, change)

    def test_a_key_beside_others_that_are_not_named(self):
        weights = {0: 1.0, 1: 1.0, "ce": 1.0, None: 1.0, ("a", 1): 1.0}

        def all_of_them(model, x):
            return sum(weights[key] for key in weights) * weights["ce"] * model(x)[:, 0].square().mean()

        def unusual_keys(model, x):
            return weights[("a", 1)] * weights["ce"] * weights[None] * model(x).square().mean()

        def given_back(model, x):
            return (lambda: weights)()[1] * weights["ce"] * model(x).square().mean()

        self.check(all_of_them, lambda i: weights.update({1: float(i)}))
        self.check(unusual_keys, lambda i: weights.update({None: float(i)}))
        self.check(unusual_keys, lambda i: weights.update({("a", 1): float(i)}))
        self.check(given_back, lambda i: weights.update({1: float(i)}))

    def test_a_dict_that_is_named_in_words(self):
        class Trainer:
            def __init__(self):
                self.weights = {"a": 1.0, "b": 1.0}

            def by_word(self, model, x):
                return getattr(self, "weights")["a"] * model(x).square().mean()  # noqa: B009

            def both_ways(self, model, x):
                return getattr(self, "weights")["a"] * self.weights["b"] * model(x).square().mean()  # noqa: B009

        trainer = Trainer()
        for loss_fn in (trainer.by_word, trainer.both_ways):
            self.check(loss_fn, lambda i: trainer.weights.update(a=float(i)))

    def test_an_entry_that_goes(self):
        settings = {"weight": None}

        def loss_fn(model, x):
            return (2 if "weight" in settings else 1) * model(x).square().mean()

        self.check(loss_fn, lambda i: settings.pop("weight") if i == 3 else settings.update(weight=None))

    def test_boxes_of_a_criterion_and_of_defaults(self):
        class Criterion(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights, self.settings = [1.0], {"a": 1.0}

            def forward(self, output):
                return self.weights[0] * self.settings["a"] * output.square().mean()

        criterion, default = Criterion(), [1.0]

        def loss_fn(model, x, weights=default):
            return weights[0] * criterion(model(x))

        self.check(loss_fn, lambda i: criterion.weights.__setitem__(0, float(i)))
        self.check(loss_fn, lambda i: criterion.settings.update(a=float(i)))
        self.check(loss_fn, lambda i: default.__setitem__(0, float(i)))

    @pytest.mark.parametrize("kind", ["a list", "a list in a dict", "an entry", "other entries"])
    def test_logs_make_no_new_graph(self, kind):
        """Of tensors, by the loss, and of anything else, by the loop under other keys."""
        history, metrics, settings, model = [], collections.defaultdict(list), {"weight": 1.0, "step": 0}, self.model()

        def loss_fn(model, x):
            loss = settings["weight"] * model(x).square().mean()
            if kind == "a list":
                history.append(loss.detach())
            elif kind == "a list in a dict":
                metrics["loss"].append(loss.detach())
            elif kind == "an entry":
                settings["loss"] = model(x).max(1).values.detach()
            return loss

        step = hesscale.compile_step(model, loss_fn, hesscale.AdaHesScale(model.parameters(), lr=0.01), backend="traced")
        for _ in range(20):
            settings["step"] += 1
            history.append(step(torch.ones(2, 3, dtype=torch.float64)))
        assert step.mode == "traced"
        assert len(step.graphs) <= 2  # an entry that comes is another kind of step

    def test_long_lists_take_no_longer(self):
        box = list(range(10**6))
        near = Near()
        near.look_at(lambda: box[0])
        near.keep_named(lambda: box[0])
        assert near.boxes == [box]
        assert len(near.values()[-1]) <= 66

    def test_what_it_does_not_name_makes_no_new_graph(self):
        class Trainer:
            calls = 0

            def loss(self, model, x):
                return model(x).square().mean()

        trainer, model = Trainer(), self.model()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        step = hesscale.compile_step(model, trainer.loss, optimizer, backend="traced")
        for _ in range(5):
            trainer.calls += 1
            step(torch.ones(2, 3, dtype=torch.float64))
        assert len(step.graphs) == 1
