"""Training compares optimizers fairly, goes on where it was, and reports divergence as a result."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from hesscale.experiments import _learning, training
from hesscale.lab.data import Dataset
from hesscale.lab.experiment import as_task
from hesscale.lab.marks import check
from hesscale.lab.store import Result, Store

EXPERIMENT = training.EXPERIMENT
TINY = training.Settings(step_sizes="0.01", seeds=1, steps=8, batch=6, width=5, measure_every=2)
TASK = training.Task("digits", "adam", 0.01, 0, 8, 6, 5, 2, 2)


@pytest.fixture(autouse=True)
def data(monkeypatch):
    """Forty images of three classes, a pixel of which tells the class."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        labels = torch.arange(count, device="cpu") % 3
        images = torch.randint(0, 50, (count, 2, 3), generator=generator, dtype=torch.uint8, device="cpu")
        images[torch.arange(count, device="cpu"), 0, labels] = 255
        return images, labels

    dataset = Dataset("digits", *some(40), *some(10), 3, "Digits")
    monkeypatch.setattr(_learning, "load", lambda name, root: dataset)
    _learning.splits.cache_clear()
    yield dataset
    _learning.splits.cache_clear()


def done(folder, tasks):
    store, tasks = Store(folder), [as_task(task) for task in tasks]
    for task in tasks:
        EXPERIMENT.do(store, task, None)
    return EXPERIMENT.results(store, tasks)


def test_splits_share_no_image(data):
    found = _learning.splits("digits", None)
    assert [len(labels) for _, labels in found[:3]] == [32, 8, 10]
    rows = torch.cat([found.train[0], found.validation[0]])
    assert sorted(rows.tolist()) == sorted(data.inputs("train").tolist())
    assert torch.equal(found.test[0], data.inputs("test"))
    assert all(bool((images[torch.arange(len(labels)), labels] == 1).all()) for images, labels in found[:3])


def test_batches_take_each_image_once_in_an_epoch():
    first = list(itertools.islice(_learning.batches(7, 3, seed=1), 4))
    assert all(len(set(torch.cat(first[k : k + 2]).tolist())) == 6 for k in (0, 2))
    assert not torch.equal(torch.cat(first[:2]), torch.cat(first[2:]))
    with pytest.raises(ValueError, match="a batch of 8 cannot be had from 7 images"):
        next(_learning.batches(7, 8, seed=1))


def test_every_optimizer_of_a_seed_has_the_same_network_and_batches(tmp_path, monkeypatch):
    seen = {}

    def record(model, optimizer, images, labels):
        seen.setdefault(now, []).append((images, [p.detach().clone() for p in model.parameters()]))

    monkeypatch.setattr(training, "take_step", record)
    for now, seed in (("adam", 0), ("adahessian", 0), ("bl89", 1)):
        done(tmp_path, [dataclasses.replace(TASK, optimizer=now, seed=seed)])
    one, other, third = seen.values()
    assert len(one) == 1 + 8
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(one[1][0], third[1][0])
    assert not torch.equal(one[1][1][0], third[1][1][0])


def test_a_run_learns_and_says_so(tmp_path):
    (result,) = done(tmp_path, [dataclasses.replace(TASK, step_size=0.05, steps=60, measure_every=25)])
    losses = dict(result.metrics["training_loss"])
    assert list(losses) == [0, 25, 50, 60]
    assert losses[0] > 1 > 0.3 > losses[60]
    assert result.values["test_accuracy"] == 1
    assert result.values["diverged_at"] is None
    seconds = [value for _, value in result.metrics["seconds"]]
    assert seconds == sorted(seconds)
    assert seconds[-1] == result.values["seconds"]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("name", ["adam", "adahesscale", "adahessian", "ggnmc-16", "bl89", "scaled-adam-1e-4"])
def test_an_interrupted_run_ends_with_the_same_numbers(name, tmp_path, monkeypatch):
    task = dataclasses.replace(TASK, optimizer=name)
    (whole,) = done(tmp_path / "whole", [task])
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", -1)
    take_step, steps = training.take_step, itertools.count()

    def stop(*arguments):
        if next(steps) == 6:  # the first is to warm up, so that five steps are done and four saved
            raise Interrupted
        take_step(*arguments)

    monkeypatch.setattr(training, "take_step", stop)
    with pytest.raises(Interrupted):
        done(tmp_path / "parts", [task])
    steps = itertools.count(7)
    (result,) = done(tmp_path / "parts", [task])
    assert next(steps) == 7 + 1 + 4
    for metric in ("training_loss", "validation_accuracy"):
        assert result.metrics[metric] == whole.metrics[metric]
    assert {**result.values, "seconds": 0} == {**whole.values, "seconds": 0}
    assert result.facts["resumed"] == 1


@pytest.mark.parametrize("name", ["adam", "adahesscale", "adahessian"])
def test_divergence_is_a_result(name, tmp_path):
    (result,) = done(tmp_path, [dataclasses.replace(TASK, optimizer=name, step_size=1e37)])
    assert set(result.values) == {"diverged_at"}
    assert 0 <= result.values["diverged_at"] <= TASK.steps


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dataset": "nothing"}, "no data set is called 'nothing'; there are digits"),
        ({"optimizers": "adam,nothing"}, "no optimizer is called 'nothing'; there are adahesscale"),
        ({"step_sizes": "0.1;0.2"}, "numbers separated by commas, not '0.1;0.2'"),
        ({"step_sizes": "0.1,-1"}, "must be positive"),
        ({"step_sizes": "nan"}, "must be positive"),
        ({"steps": 0}, "must be positive"),
    ],
)
def test_what_is_not_known_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        training.tasks(dataclasses.replace(TINY, **changed))


def test_presets_ask_for_every_combination():
    small = training.tasks(EXPERIMENT.presets["small"])
    assert {task.optimizer for task in small} == {"adahesscale", "adahesscale-gn", "adam", "adahessian"}
    assert len({(task.optimizer, task.step_size, task.seed) for task in small}) == len(small) == 4 * 7 * 2
    assert "4 optimizers, 7 step sizes, 2 seeds, 300 steps on digits" in EXPERIMENT.work(EXPERIMENT.presets["small"])
    assert {task.optimizer for task in training.tasks(EXPERIMENT.presets["paper"])} == set(training.OPTIMIZERS)


def trained(optimizer, step_size, seed, *, loss=1.0, accuracy=0.5, diverged=None, curve=(2.0, 0.2), **changed):
    """A run with two measurements; ``loss`` is on the validation split at the end."""
    values = {"diverged_at": diverged}
    if diverged is None:
        values |= {"validation_loss": loss, "test_accuracy": accuracy, "seconds": 0.004}
    points = {"training_loss": curve, "validation_accuracy": (0.1, accuracy), "seconds": (0.0, 0.004)}
    metrics = {name: list(zip((0, 8), values, strict=True)) for name, values in points.items()}
    task = dataclasses.replace(TASK, optimizer=optimizer, step_size=step_size, seed=seed, **changed)
    return Result(task, values, metrics, {})


def row_of(results):
    (section,) = EXPERIMENT.sections(results)
    for item in section.items:
        check(item)
    (row,) = section.items[0].rows
    return dict(zip(section.items[0].header, row, strict=True))


def test_the_step_size_is_chosen_on_the_validation_split():
    results = [
        *(trained("adam", 0.1, seed, loss=2.0, accuracy=0.9) for seed in (0, 1)),
        *(trained("adam", 0.01, seed, loss=0.5, accuracy=0.6 + 0.2 * seed, curve=(2.0, 0.2 - 0.15 * seed)) for seed in (0, 1)),
        *(trained("adam", 0.001, seed, loss=1.0, accuracy=0.9) for seed in (0, 1)),
    ]
    row = row_of(results)
    assert row["step size"] == "0.01"
    assert row["test accuracy, %"] == "70.0 ± 10.0"
    assert row["steps to 0.3"] == "8 ± 0"
    assert row["steps to 0.1"] == "8 (1 of 2 seeds)"
    assert row["ms a step"] == "0.50 ± 0.00"
    assert row["diverged"] == "none"
    (section,) = EXPERIMENT.sections(results)
    items = {item.name: item for item in section.items}
    (line,) = items["training-loss-steps"].series
    assert (line.x, line.y) == ([0, 8], [2.0, pytest.approx(0.125)])
    assert line.high[1] - line.y[1] == pytest.approx(0.075)
    assert items["validation-accuracy-seconds"].series[0].x == [0, 0.004]
    (sizes,) = items["step-sizes"].series
    assert (sizes.x, sizes.y) == ([0.001, 0.01, 0.1], [1.0, 0.5, 2.0])


def test_a_step_size_with_which_a_seed_diverged_never_wins():
    results = [
        trained("adam", 0.1, 0, loss=0.1),
        trained("adam", 0.1, 1, diverged=4),
        *(trained("adam", 0.01, seed) for seed in (0, 1)),
    ]
    row = row_of(results)
    assert row["step size"] == "0.01 (edge of the grid)"
    assert row["diverged"] == "0.1: 1 of 2"
    (section,) = EXPERIMENT.sections(results)
    assert section.items[-1].series[0].x == [0.01]


def test_step_sizes_are_compared_by_the_seeds_that_they_share():
    results = [trained("adam", 0.1, 0, loss=0.1), trained("adam", 0.01, 0, loss=0.2), trained("adam", 0.01, 1, loss=0.0)]
    assert row_of(results)["step size"].startswith("0.1 ")
    lonely = trained("adam", 0.001, 7, loss=0.0)
    assert row_of([*results, lonely])["step size"].startswith("0.1 ")


def test_an_optimizer_that_always_diverged_is_still_named():
    row = row_of([trained("adam", 0.1, 0, diverged=4)])
    assert row["step size"] == "diverged at every one"
    assert row["diverged"] == "0.1: 1 of 1"


def test_settings_are_kept_apart():
    first, second = EXPERIMENT.sections([trained("adam", 0.1, 0, width=width) for width in (5, 6)])
    assert "layers of 6 tanh" in second.text
    assert not {item.name for item in first.items} & {item.name for item in second.items}


def test_means_have_standard_errors():
    assert training.summary([1.0, 3.0]) == (2.0, pytest.approx(1.0))
    assert training.summary([1.0]).text(".1f") == "1.0"
    assert math.isinf(training.Trained("", {0.1: [trained("adam", 0.1, 0, diverged=1)]}).loss(0.1))
