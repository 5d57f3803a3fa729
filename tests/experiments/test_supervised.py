"""Image classification: DeepOBS's networks, its augmentation, and training that is the same together, alone and resumed."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import hesscale
from hesscale.experiments.figures import supervised
from hesscale.experiments.lab.data import Dataset
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.plots import Plot
from hesscale.experiments.lab.series_layout import check, lay_out
from hesscale.experiments.lab.store import Pause, Result, Store
from hesscale.experiments.optimizers import IMAGE_OPTIMIZERS
from hesscale.experiments.vision import images, members, problems, trainer
from hesscale.experiments.vision.config import optimizer_of

EXPERIMENT = supervised.EXPERIMENT
CPU = torch.device("cpu")
SETTINGS = supervised.Settings(task="toy", optimizer="adam", step_size="0.01", seeds=1, device="cpu", backend="eager")
NUMBERS = [f"{split}_{what}" for split in ("train", "validation", "test") for what in ("loss", "accuracy")]


def toy(classes, activation, padding):
    """Small, with dropout as in All-CNN-C."""
    layers = (nn.Conv2d(3, 4, 3), activation(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 2 * 2, classes))
    return problems.initialized(nn.Sequential(*layers), 0.1)


def dense(classes, activation, padding):
    """Layers under vmap, if several networks train together."""
    return problems.initialized(nn.Sequential(nn.Flatten(), nn.Linear(48, 5), activation(), nn.Linear(5, classes)), 0.1)


@pytest.fixture(autouse=True)
def data(monkeypatch):
    """Fifty coloured images of three classes, the colour of which tells the class."""
    generator = torch.Generator().manual_seed(0)

    def some(count):
        labels = torch.arange(count, device="cpu") % 3
        pixels = torch.randint(0, 90, (count, 3, 4, 4), generator=generator, dtype=torch.uint8, device="cpu")
        pixels[torch.arange(count, device="cpu"), labels] += 150
        return pixels, labels

    dataset = Dataset("digits", *some(50), *some(10), 3, "Digits")
    monkeypatch.setattr(images, "load", lambda name, root: dataset)
    problem = problems.Problem("Toy", "digits", toy, 3, 8, True, (0.4, 0.5, 0.6), (0.3, 0.2, 0.1))
    monkeypatch.setitem(problems.PROBLEMS, "toy", problem)
    monkeypatch.setitem(problems.PROBLEMS, "dense", replace(problem, build=dense))
    images.load_images.cache_clear()
    yield dataset
    images.load_images.cache_clear()


def loaded():
    return images.load_images(problems.PROBLEMS["toy"], None, CPU)


def done(folder, tasks, *, together=1, **options):
    store, tasks = Store(folder, **options), [as_task(task) for task in tasks]
    for k in range(0, len(tasks), together):
        EXPERIMENT.do_together(store, tasks[k : k + together], None)
    return EXPERIMENT.results(store, tasks)


def tasks(**changed):
    return supervised.tasks(replace(SETTINGS, **changed))


# ---------------------------------------------------------------------------------------------------------------- networks


def shapes_of(model, x):
    shapes = []
    for layer in model:
        x = layer(x)
        if isinstance(layer, nn.Conv2d | nn.MaxPool2d | nn.Linear):
            shapes.append(tuple(x.shape[1:]))
    return shapes, tuple(x.shape[1:])


@pytest.mark.parametrize(
    ("padding", "count", "expected"),
    [
        ("deepobs", 918_340, [(64, 28, 28), (64, 14, 14), (96, 12, 12), (96, 6, 6), (128, 6, 6), (128, 3, 3)]),
        ("none", 394_052, [(64, 28, 28), (64, 13, 13), (96, 11, 11), (96, 5, 5), (128, 3, 3), (128, 1, 1)]),
    ],
)
def test_3c3d_is_that_of_deepobs(padding, count, expected):
    model = problems.PROBLEMS["cifar100-3c3d"].network(100, 0, padding=padding)
    assert problems.parameters_of(model) == count
    assert shapes_of(model, torch.zeros(1, 3, 32, 32)) == ([*expected, (512,), (256,), (100,)], (100,))
    assert sum(isinstance(layer, nn.ELU) for layer in model) == 5
    assert all(not layer.bias.any() for layer in model if isinstance(layer, nn.Conv2d | nn.Linear))
    first, last = model[0].weight, model[-1].weight
    assert float(first.detach().std()) == pytest.approx(math.sqrt(2 / (25 * (3 + 64))), rel=0.05)
    assert float(last.detach().abs().max()) == pytest.approx(math.sqrt(6 / (256 + 100)), rel=0.01)


@pytest.mark.parametrize(
    ("padding", "sizes"), [("deepobs", (32, 32, 16, 16, 16, 8, 6, 6, 6)), ("none", (30, 28, 13, 11, 9, 4, 2, 2, 2))]
)
def test_all_cnn_c_is_that_of_deepobs(padding, sizes):
    model = problems.PROBLEMS["cifar100-allcnnc"].network(100, 0, padding=padding)
    channels = (96, 96, 96, 192, 192, 192, 192, 192, 100)
    assert problems.parameters_of(model) == 1_387_108
    expected = [(channel, size, size) for channel, size in zip(channels, sizes, strict=True)]
    assert shapes_of(model, torch.zeros(1, 3, 32, 32)) == (expected, (100,))
    assert [layer.p for layer in model if isinstance(layer, nn.Dropout)] == [0.2, 0.5, 0.5]
    assert [type(model[k]) for k in (-2, -1)] == [nn.ELU, problems.Mean]
    assert all(bool((layer.bias == 0.1).all()) for layer in model if isinstance(layer, nn.Conv2d))


def test_all_cnn_c_has_its_outputs_after_the_mean():
    model = problems.PROBLEMS["cifar100-allcnnc"].network(100, 0, padding="none").eval()
    before, x = model[:-1], torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x), before(x).mean((2, 3)))
    loss = nn.functional.cross_entropy(model(x), torch.zeros(2, dtype=torch.long))
    assert [row.operator for row in hesscale.explain(loss).rows if row.part == "head"][-1] == "LogSoftmaxBackward0"


def test_convolutions_with_strides_pad_as_tensorflow_does():
    model = problems.PROBLEMS["cifar100-allcnnc"].network(100, 0).eval()
    k = next(k for k, layer in enumerate(model) if isinstance(layer, nn.ZeroPad2d))
    x = torch.randn(1, 96, 32, 32, requires_grad=True)
    y = model[k : k + 2](x)
    (corner,) = torch.autograd.grad(y[0, :, 0, 0].sum(), x, retain_graph=True)
    (last,) = torch.autograd.grad(y[0, :, 15, 15].sum(), x)
    assert corner[0, 0].any(1).nonzero().flatten().tolist() == [0, 1, 2]
    assert last[0, 0].any(1).nonzero().flatten().tolist() == [30, 31]


def test_small_networks():
    mnist = problems.PROBLEMS["mnist-mlp"].network(10, 0, activation="relu")
    assert problems.parameters_of(mnist) == 1_336_610
    assert sum(isinstance(layer, nn.ReLU) for layer in mnist) == 3
    weights = mnist[1].weight
    assert 0.0599 < float(weights.detach().abs().max()) <= 0.06
    assert problems.parameters_of(problems.PROBLEMS["digits-mlp"].network(10, 0)) == 8_970


def test_networks_depend_only_on_the_seed():
    problem, state = problems.PROBLEMS["toy"], torch.random.get_rng_state()
    first, again, other = (list(problem.network(3, seed).parameters()) for seed in (4, 4, 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(torch.random.get_rng_state(), state)


# ------------------------------------------------------------------------------------------------------------------ images


def test_splits_share_no_image(data):
    found = loaded()
    assert [len(split.labels) for split in found[:3]] == [40, 10, 10]
    both = torch.cat([found.train.images, found.validation.images])
    assert sorted(both.flatten(1).tolist()) == sorted(data.train_images.flatten(1).tolist())
    assert torch.equal(found.test.images, data.test_images)
    assert all(bool((split.images.float().mean((2, 3)).argmax(1) == split.labels).all()) for split in found[:3])


def test_an_epoch_has_each_image_once():
    first, again, later, other = (images.draw(43, 8, seed, epoch) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert first.image.shape == (5, 8)
    assert len(set(first.image.flatten().tolist())) == 40
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(not torch.equal(a, b) for draws in (later, other) for a, b in zip(first, draws, strict=True))


def by_hand(image, uniform):
    """One image as torchvision's Pad(2), RandomCrop, RandomHorizontalFlip and ColorJitter change it, pixel by pixel."""
    size, grey = image.shape[1], lambda p: 0.299 * p[0] + 0.587 * p[1] + 0.114 * p[2]
    down, right = (min(int(5 * u), 4) for u in uniform[:2])
    pixels = {}
    for row, column in itertools.product(range(size), range(size)):
        y = row + down - 2
        x = (size - 1 - column if uniform[2] < 0.5 else column) + right - 2
        is_inside = 0 <= y < size and 0 <= x < size
        pixels[row, column] = [int(image[c, y, x]) / 255 if is_inside else 0.0 for c in range(3)]
    ranges = [(1 - 63 / 255, 1 + 63 / 255), (0.2, 1.8), (0.5, 1.5)]
    factors = [low + (high - low) * u for (low, high), u in zip(ranges, uniform[3:6], strict=True)]
    for kind in list(itertools.permutations(range(3)))[int(6 * uniform[6])]:
        mean = sum(map(grey, pixels.values())) / size**2
        for place, p in pixels.items():
            other = (0.0, mean, grey(p))[kind]
            pixels[place] = [min(max(factors[kind] * value + (1 - factors[kind]) * other, 0), 1) for value in p]
    return torch.tensor([[[pixels[r, c][k] for c in range(size)] for r in range(size)] for k in range(3)], dtype=torch.float64)


def test_augmentation_is_that_of_deepobs():
    found, draws = loaded(), images.draw(40, 20, 3, 0)
    changed = images.augmented(found.padded, draws, 255)
    assert changed.shape == (2, 20, 3, 4, 4)
    expected = [
        by_hand(found.train.images[image], uniform)
        for image, uniform in zip(draws.image.flatten().tolist(), draws.uniform.flatten(0, 1).tolist(), strict=True)
    ]
    torch.testing.assert_close(changed.flatten(0, 1).double(), torch.stack(expected), rtol=0, atol=2e-6)


def test_the_largest_draw_is_within_bounds():
    largest = math.nextafter(1.0, 0.0)
    uniform = torch.full((1, 1, 7), largest, dtype=torch.float64).float().clamp(max=1 - 2**-24)
    draws = images.Draws(torch.zeros(1, 1, dtype=torch.long), uniform)
    assert images.augmented(loaded().padded, draws, 255).isfinite().all()


def test_batches_are_normalized_and_have_their_labels():
    (task,) = tasks()
    found = loaded()
    members = trainer.members_of([task], found)
    draws = images.draw(40, 8, 0, 0)
    x, y = members.batches(images.Draws(*[part[:, None] for part in draws]))
    changed = images.augmented(found.padded, draws, 255)
    torch.testing.assert_close(x[:, 0] * found.std + found.mean, changed, rtol=0, atol=1e-6)
    assert torch.equal(y[:, 0], found.train.labels[draws.image])
    plain = trainer.members_of(tasks(augment=False), found)
    x, y = plain.batches(images.Draws(*[part[:, None] for part in draws]))
    torch.testing.assert_close(x[:, 0], found.inputs(found.train.images)[draws.image])


# ---------------------------------------------------------------------------------------------------------------- training


def numbers(result):
    return {name: result.metrics[name] for name in NUMBERS} | {name: result.values[name] for name in NUMBERS}


@pytest.mark.parametrize("name", IMAGE_OPTIMIZERS)
def test_every_optimizer_learns(name, tmp_path):
    size = {"sgd": 0.1, "adam": 0.02, "adahessian": 0.02, "ggnmc-batch": 5e-6}.get(name, 0.003)
    (result,) = done(tmp_path, tasks(optimizer=f"{name}@{size}", epochs=20, evaluate_every=10))
    losses = dict(result.metrics["train_loss"])
    assert list(losses) == [0, 10, 20]
    assert losses[20] < 0.7 * losses[0]
    assert result.values["diverged_at"] is None
    assert result.values["test_loss"] == dict(result.metrics["test_loss"])[20]
    assert 0 < result.values["outside_steps"] < 1
    assert result.values["seconds"] == pytest.approx(result.metrics["seconds"][-1][1])
    assert result.values["images_per_second"] > 0


@pytest.mark.parametrize("name", ["adam", "scaled-adahesscale"])
def test_members_equal_networks_trained_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr(toy, "__code__", without_dropout.__code__)
    asked = [replace(task, seed=seed) for seed, task in enumerate(tasks(optimizer=name, step_size="0.001,0.003"))]
    together = done(tmp_path / "together", [replace(task, backend="traced") for task in asked], together=2)
    alone = done(tmp_path / "alone", asked)
    assert {result.values["together"] for result in together} == {2}
    assert len({result.values["test_loss"] for result in together}) == 2
    for one, member in zip(alone, together, strict=True):
        torch.testing.assert_close(numbers(member), numbers(one), rtol=1e-4, atol=1e-5)


def without_dropout(classes, activation, padding):
    layers = (nn.Conv2d(3, 4, 3), activation(), nn.Flatten(), nn.Linear(4 * 2 * 2, classes))
    return problems.initialized(nn.Sequential(*layers), 0.1)


@pytest.mark.parametrize(
    ("name", "together", "backend"),
    [
        *itertools.product(("sgd", "adam", "adahessian", "ggnmc", "scaled-adahesscale"), (1, 2), ["eager"]),
        ("ggnmc", 2, "traced"),
        ("adahesscale-10th", 2, "traced"),
        ("adam", 1, "traced"),
    ],
)
def test_an_interrupted_run_ends_with_the_same_numbers(name, together, backend, tmp_path, monkeypatch):
    asked = tasks(optimizer=name, step_size="0.001", seeds=together, backend=backend)
    whole = done(tmp_path / "whole", asked, together=together)
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", -1)
    for _ in range(2):
        with pytest.raises(Pause):
            done(tmp_path / "parts", asked[:together], together=together, seconds=-1)
    parts = done(tmp_path / "parts", asked, together=together)
    assert parts[0].facts["resumed"] == 2
    for one, other in zip(whole, parts, strict=True):
        assert numbers(one) == numbers(other)
        for value in ("nonfinite_steps", "scaled_share"):
            assert one.values.get(value) == other.values.get(value)


def test_dense_members_equal_networks_trained_alone_even_if_resumed(tmp_path, monkeypatch):
    asked = tasks(task="dense", optimizer="adahesscale", step_size="0.001,0.002", backend="traced")
    alone = done(tmp_path / "alone", asked)
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", -1)
    with pytest.raises(Pause):
        done(tmp_path / "parts", asked, together=2, seconds=-1)
    for one, other in zip(alone, done(tmp_path / "parts", asked, together=2), strict=True):
        assert other.values["test_loss"] == pytest.approx(one.values["test_loss"], rel=1e-4)


def test_checkpoints_of_different_epochs_train_separately(tmp_path, monkeypatch):
    asked = tasks(seeds=2)
    whole = done(tmp_path / "whole", asked)
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", -1)
    with pytest.raises(Pause):
        done(tmp_path / "parts", asked[:1], seconds=-1)
    parts = done(tmp_path / "parts", asked, together=2)
    assert [numbers(result) for result in parts] == [numbers(result) for result in whole]
    assert [result.values["together"] for result in parts] == [1, 1]


def test_a_checkpoint_contains_only_one_member():
    members = trainer.members_of(tasks(seeds=2, backend="traced"), loaded())
    members.warm_up()
    for tensor in (tensor for value in members.state(1).values() for tensor in value if isinstance(tensor, torch.Tensor)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_evaluation_is_of_whole_splits_without_dropout():
    found = loaded()
    members = trainer.members_of(tasks(), found)
    (first,), (again,) = members.evaluate([0]), members.evaluate([0])
    assert first == again
    model = members.models[0].eval()
    for name, split in {"train": images.Split(*[part[:10] for part in found.train]), "test": found.test}.items():
        outputs = model(found.inputs(split.images))
        assert first[name].loss == pytest.approx(float(nn.functional.cross_entropy(outputs, split.labels).detach()))
        assert first[name].accuracy == pytest.approx(float((outputs.argmax(1) == split.labels).double().mean()))


def test_warm_up_changes_nothing():
    for asked in (tasks(optimizer="scaled-adahesscale"), tasks(optimizer="adam", seeds=2, backend="traced")):
        members = trainer.members_of(asked, loaded())
        before = [p.detach().clone() for model in members.models for p in model.parameters()]
        members.warm_up()
        after = [p for model in members.models for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(not tensor.any() for k in range(len(asked)) for tensor in members.state(k)["averages"])
        assert members.state(0)["step_counts"] == [0]


@pytest.mark.parametrize("together", [1, 2])
def test_warm_up_compiles_every_kind_of_step(together):
    members = trainer.members_of(tasks(optimizer="adahesscale-10th", seeds=together, backend="traced"), loaded())
    members.warm_up()
    assert members.step.modes == ["traced"]
    assert members.step.compilations == 2


@pytest.mark.parametrize("name", ["sgd", "adahesscale"])
def test_a_diverged_network_does_not_stop_the_others(name, tmp_path):
    asked = tasks(optimizer=name, step_size="1e30,0.001")
    bad, good = done(tmp_path, asked, together=2)
    assert bad.values["diverged_at"] in (1, 2, 3)
    assert "test_loss" not in bad.values
    assert max(epoch for epoch, _ in bad.metrics["test_loss"]) < bad.values["diverged_at"]
    assert good.values["diverged_at"] is None
    assert math.isfinite(good.values["test_loss"])
    (alone,) = done(tmp_path / "alone", asked[:1])
    assert alone.values["diverged_at"] == bad.values["diverged_at"]


def test_a_network_whose_steps_are_skipped_has_diverged(tmp_path, monkeypatch):
    """Finite losses, and gradients that are not: the optimizer leaves all steps out."""

    def loss_of(model, x, y):
        return nn.functional.cross_entropy(model(x), y) + (model[0].weight.sum() * 0).sqrt()

    monkeypatch.setattr(members, "loss_of", loss_of)
    (result,) = done(tmp_path, tasks(optimizer="adahesscale", epochs=4))
    assert result.values["diverged_at"] == 1
    assert result.values["nonfinite_steps"] == 5
    assert "test_loss" not in result.values


def test_counters_of_a_diverged_optimizer_are_recorded(tmp_path):
    asked = tasks(optimizer="adahesscale", step_size="1e30,0.001", epochs=6)
    bad, _ = done(tmp_path, asked, together=2)
    (alone,) = done(tmp_path / "alone", asked[:1])
    assert bad.values["nonfinite_steps"] == alone.values["nonfinite_steps"]


def test_untrainable_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a batch of 50 is larger than the 40 training images"):
        trainer.members_of(tasks(batch=50), loaded())
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch finds no GPU"):
            tasks(device="cuda")


def test_on_a_gpu_one_group_at_a_time():
    assert EXPERIMENT.is_alone([as_task(replace(task, device="cuda")) for task in tasks()])
    assert not EXPERIMENT.is_alone([as_task(task) for task in tasks()])


def test_the_pace_is_that_of_the_median_epoch():
    progress = trainer.Progress(epoch_seconds=[1.0, 1.0, 7.0], at_once=[2, 2, 2], step_seconds=8.0)
    assert progress.values(40, 2) == {
        "diverged_at": None,
        "together": 2,
        "seconds": 9.0,
        "images_per_second": 40.0,
        "outside_steps": pytest.approx(1 / 9),
    }


def test_the_pace_after_an_interruption_is_that_of_as_many_networks():
    """Four shared the machine until some were done."""
    epoch = trainer.Epoch([0.0], 4.0, 4.0)
    progress = trainer.Progress(epoch_seconds=[5.0])  # of a version that did not note how many
    for number, together in enumerate([4, 4, 1], 2):
        progress.add(number, epoch, 0, together, {}, 1)
    assert progress.seconds == 5 + 1 + 1 + 4
    assert progress.values(40, 1)["images_per_second"] == 10
    assert progress.values(40, 4)["images_per_second"] == 40
    assert math.isnan(progress.values(40, 3)["images_per_second"])


def test_divergence_is_detected_between_evaluations(tmp_path):
    (result,) = done(tmp_path, tasks(optimizer="sgd", step_size="1e30", epochs=5, evaluate_every=5))
    assert result.values["diverged_at"] in (1, 2)


def test_the_last_weights_are_evaluated(tmp_path):
    """With one step an epoch, its loss is that of the weights before."""
    (result,) = done(tmp_path, tasks(optimizer="sgd", step_size="1e38", batch=40, epochs=1))
    assert result.values["diverged_at"] == 1


def test_sgd_may_train_longer(tmp_path):
    short, long = done(tmp_path, tasks(optimizer="adam,sgd", epochs=1, sgd_epochs=3))
    assert [result.metrics["test_loss"][-1][0] for result in (short, long)] == [1, 3]
    assert len(EXPERIMENT.sections([short, long])) == 1


def test_every_optimizer_of_a_seed_has_the_same_start_and_images(monkeypatch):
    seen = {}
    for name in ("adam", "bl89"):
        (task,) = tasks(optimizer=name)
        members = trainer.members_of([task], loaded())
        members.warm_up()
        batches = members.batches(images.Draws(*[part[:, None] for part in trainer.draw_all([task], loaded(), 2)[0]]))
        seen[name] = [*batches, *members.models[0].parameters()]
    assert all(torch.equal(a, b) for a, b in zip(*seen.values(), strict=True))


def test_l2_applies_only_to_weights():
    for name in ("adam", "adahesscale"):
        (task,) = tasks(optimizer=name, l2=0.002)
        weights, biases = optimizer_of(task, problems.PROBLEMS["toy"].network(3, 0)).param_groups
        assert (weights["weight_decay"], biases["weight_decay"]) == (0.002, 0)
        assert {p.dim() for p in weights["params"]} == {2, 4}
        assert {p.dim() for p in biases["params"]} == {1}


def test_bf16(tmp_path):
    plain, low = done(tmp_path, [*tasks(optimizer="adahesscale"), *tasks(optimizer="adahesscale", precision="bf16")])
    assert plain.values["test_loss"] != low.values["test_loss"]
    assert low.values["test_loss"] == pytest.approx(plain.values["test_loss"], rel=0.2)


# ---------------------------------------------------------------------------------------------------------- settings and figures


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "nothing"}, "no task is called 'nothing'; there are cifar100-3c3d"),
        ({"optimizer": "adam,nothing"}, "no optimizer is called 'nothing'; there are sgd"),
        ({"optimizer": "adam@fast"}, "a step size must be a number, not 'fast'"),
        ({"optimizer": ""}, "optimizer names no optimizer"),
        ({"step_size": "0.1;0.2"}, "a step size must be a number, not '0.1;0.2'"),
        ({"step_size": "0.1,-1"}, "must be positive"),
        ({"seeds": 0}, "seeds must be at least 1, not 0"),
        ({"epochs": -1}, "epochs must be at least 0, not -1"),
        ({"l2": -1.0}, "l2 must be 0 or positive and finite, not -1.0"),
        ({"precision": "fp8"}, "precision='fp8' is not one of float32, tf32, bf16"),
        ({"padding": "same"}, "padding='same' is not one of deepobs, none"),
    ],
)
def test_unknown_names_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        tasks(**changed)


def test_only_tasks_of_a_kind_train_together(tmp_path):
    mixed = [*tasks(optimizer="adam"), *tasks(optimizer="sgd")]
    with pytest.raises(ValueError, match="only if nothing but their step sizes and seeds differs"):
        trainer.run_together(mixed, [None, None], None)
    assert len({EXPERIMENT.kind(task) for task in tasks(step_size="0.1,0.2", seeds=2)}) == 1


def test_presets_ask_for_the_paper():
    paper = supervised.tasks(EXPERIMENT.presets["paper"])
    assert len(paper) == 2 * 7 * 6 * 30
    assert {(task.problem, task.epochs, task.batch) for task in paper} == {
        ("cifar100-3c3d", 200, 128),
        ("cifar100-allcnnc", 350, 256),
    }
    assert {(task.augment, task.activation, task.l2, task.padding) for task in paper} == {(True, "elu", 0.0, "deepobs")}
    assert "12 networks (digits-mlp), 24 epochs" in EXPERIMENT.work(EXPERIMENT.presets["smoke"])
    own = tasks(optimizer="sgd@0.5,adam,scaled-adam", step_size="0.1,0.2", trust_radius=1e-3, backend="auto")
    assert [(task.optimizer, task.step_size, task.trust_radius) for task in own] == [
        ("sgd", 0.5, 0.0),
        *(("adam", size, 0.0) for size in (0.1, 0.2)),
        *(("scaled-adam", size, 1e-3) for size in (0.1, 0.2)),
    ]
    assert (own[0].device, own[0].backend, own[0].precision) == ("cpu", "traced", "float32")


def trained(optimizer, step_size, seed, *, accuracy=0.5, test=0.4, diverged=None, pace=100.0, **changed):
    values = {"diverged_at": diverged, "together": 1, "seconds": 2.0, "images_per_second": pace, "outside_steps": 0.05}
    final = dict.fromkeys(NUMBERS, test) | {"validation_accuracy": accuracy}
    (task,) = tasks(optimizer=optimizer, step_size=str(step_size), **changed)
    metrics = {name: [(0, 0.1), (3, value)] for name, value in final.items()} | {"seconds": [(0, 0.0), (3, 2.0)]}
    values |= final if diverged is None else {}
    return Result(replace(task, seed=seed), values, metrics, {})


def row_of(results):
    (section,) = EXPERIMENT.sections(results)
    for item in section.items:
        check(item)
    accuracies, speeds = section.items[:2]
    header = [*accuracies.header, *speeds.header]
    return [dict(zip(header, [*a, *b], strict=True)) for a, b in zip(accuracies.rows, speeds.rows, strict=True)], section


def test_the_step_size_is_chosen_on_the_validation_split():
    results = [
        *(trained("adam", 0.1, seed, accuracy=0.4, test=0.9) for seed in (0, 1)),
        *(trained("adam", 0.01, seed, accuracy=0.6, test=0.2 + 0.2 * seed) for seed in (0, 1)),
        *(trained("adam", 0.001, seed, accuracy=0.5, test=0.9) for seed in (0, 1)),
        trained("adahesscale", 0.1, 0, pace=80.0),
    ]
    (adam, other), section = row_of(results)
    assert adam["step size"] == "0.01"
    assert adam["test accuracy, %"] == "30.0 ± 10.0"
    assert (adam["relative to Adam"], other["relative to Adam"]) == ("1.00", "0.80")
    assert other["outside steps, %"] == "5.0"
    items = {item.name: item for item in section.items}
    line = items["test-accuracy-seconds"].series[0]
    assert (line.x, line.y, line.high) == ([0, 2], [0.1, pytest.approx(0.3)], [0.1, pytest.approx(0.4)])
    assert items["validation-loss-epochs"].series[0].x == [0, 3]
    sizes = items["step-sizes-test-loss"].series[0]
    assert (sizes.x, sizes.y) == ([0.001, 0.01, 0.1], [0.9, pytest.approx(0.3), 0.9])


def test_a_seed_that_diverged_counts_as_accuracy_0():
    results = [
        trained("adam", 0.1, 0, accuracy=0.9),
        trained("adam", 0.1, 1, diverged=4),
        *(trained("adam", 0.01, seed, accuracy=0.5) for seed in (0, 1)),
    ]
    (row,), _ = row_of(results)
    assert row["step size"] == "0.01 (edge of the grid)"
    assert row["diverged"] == "0.1: 1 of 2"
    (row,), section = row_of([trained("adam", 0.1, 0, diverged=4)])
    assert (row["step size"], row["images/s"], row["diverged"]) == ("–", "–", "0.1: 1 of 1")
    assert not section.items[2].series


def test_accuracies_state_their_number_of_seeds():
    results = [trained("adam", 0.1, 0, test=0.9), *(trained("adam", 0.1, seed, diverged=4) for seed in (1, 2))]
    (row,), section = row_of(results)
    assert row["test accuracy, %"] == "90.0 (1 of 3 seeds)"
    (row,), section = row_of([trained("adam", 0.01, 0), trained("adam", 0.1, 0, diverged=4)])
    sizes = next(item for item in section.items if item.name == "step-sizes-test-loss").series[0]
    assert sizes.x == [0.01, 0.1]
    assert math.isnan(sizes.y[1])  # where a line breaks
    sizes = next(item for item in section.items if item.name == "step-sizes-test-accuracy").series[0]
    assert sizes.y[1] == 0


def test_an_optimizer_has_the_same_colour_whatever_else_is_shown():
    def looks(*optimizers):
        _, section = row_of([trained(name, 0.1, 0) for name in optimizers])
        return [(mark.colour, mark.dash) for mark in lay_out(section.items[2]).marks]

    few, many = looks("adam", "adahesscale"), looks(*IMAGE_OPTIMIZERS)
    assert [many[list(IMAGE_OPTIMIZERS).index(name)] for name in ("adam", "adahesscale")] == few
    assert {few[0][0]} == {colour for colour, _ in looks("adam", "scaled-adam")}
    assert looks("scaled-adam") == [(few[0][0], "--")]
    variants = looks("adahesscale", "adahesscale-warm", "adahesscale-bf16", "scaled-adahesscale")
    assert len(set(variants)) == len(variants)


def test_findings_compare_optimizers_that_have_two_seeds():
    adam = [trained("adam", 0.1, seed, test=0.8 + 0.02 * seed) for seed in (0, 1)]
    other = [trained("adahesscale", 0.1, seed, test=0.9) for seed in (0, 1)]
    _, section = row_of([*adam, *other])
    best, speed = section.findings
    expected = "Toy on digits: AdaHesScale has the highest test accuracy, 90.0 ± 0.0 % at step size 0.1; Adam has 81.0 ± 1.0 % at"
    assert best.text.startswith(expected)
    assert "within 2 standard errors" not in best.text
    assert best.figure == "test-accuracy-epochs"
    assert speed.text == "Images per second relative to Adam: AdaHesScale 1.00."
    close = [trained("adahesscale", 0.1, seed, test=0.82) for seed in (0, 1)]
    assert row_of([*adam, *close])[1].findings[0].text.endswith("The difference is within 2 standard errors.")
    assert "highest" not in "".join(finding.text for finding in row_of([adam[0], other[0]])[1].findings)


def test_findings_name_diverged_and_insensitive_optimizers():
    sizes = (1.0, 0.1, 0.01)
    steady = [trained("adahesscale", size, 0, test=0.9) for size in sizes]
    adam = [trained("adam", 1.0, 0, diverged=3), trained("adam", 0.1, 0, test=0.9), trained("adam", 0.01, 0, test=0.5)]
    robust, diverged, _ = row_of([*steady, *adam])[1].findings
    expected = "AdaHesScale comes within 2 percentage points of its best test accuracy at 3 of 3 step sizes, Adam at 1."
    assert (robust.text, robust.figure) == (expected, "step-sizes-test-accuracy")
    assert diverged.text == "1 of 6 runs diverged: 1 of 3 with Adam."


def test_curves_are_one_figure_with_a_switch_for_each_of_split_and_axis():
    _, section = row_of([trained("adam", size, 0) for size in (0.1, 0.01)])
    curves = [item for item in section.items if isinstance(item, Plot) and item.group == "accuracy"]
    assert [curve.view for curve in curves] == list(itertools.product(("test", "validation", "train"), ("epochs", "seconds")))


def test_empty_columns_are_left_out():
    plain, scaled = trained("adahesscale", 0.1, 0), trained("scaled-adam", 0.1, 0)
    plain.values["nonfinite_steps"] = scaled.values["nonfinite_steps"] = 0
    (row,), _ = row_of([plain])
    assert not row.keys() & {"shortened, %", "left out"}
    scaled.values |= {"nonfinite_steps": 3, "scaled_share": 0.25}
    first, second = row_of([plain, scaled])[0]
    assert (first["shortened, %"], first["left out"]) == ("–", "0")
    assert (second["shortened, %"], second["left out"]) == ("25", "3")
    for share, text in ((1.0, "100"), (0.996, "99.6"), (1e-4, "0.01")):
        scaled.values["scaled_share"] = share
        assert row_of([scaled])[0][0]["shortened, %"] == text


def test_step_sizes_are_compared_by_common_seeds_and_the_best_uses_all_its_seeds():
    results = [trained("adam", 0.1, seed, accuracy=0.5 + 0.1 * seed) for seed in range(3)]
    (row,), _ = row_of([*results, trained("adam", 0.01, 0, accuracy=0.4)])
    assert (row["step size"], row["seeds"]) == ("0.1 (edge of the grid)", "3")
    assert row["validation accuracy, %"] == "60.0 ± 5.8"
    (row,), _ = row_of([*results, trained("adam", 0.01, 0, accuracy=0.55)])
    assert (row["step size"], row["seeds"]) == ("0.01 (edge of the grid)", "1")


def test_speeds_of_different_machines_are_not_compared():
    results = [trained(name, 0.1, 0) for name in ("sgd", "adam", "adahesscale")]
    for result, gpu in zip(results, ("A", "A", "B"), strict=True):
        result.facts["machine"] = {"gpu": gpu}
    assert [row["relative to Adam"] for row in row_of(results)[0]] == ["1.00", "1.00", "–"]
    results[2].facts["machine"] = {"gpu": "A"}
    results[0].facts["earlier_machines"] = [{"gpu": "B"}]
    assert [row["relative to Adam"] for row in row_of(results)[0]] == ["–", "1.00", "1.00"]


def test_speeds_of_different_commits_are_not_compared():
    results = [trained("sgd", 0.1, 0), trained("adam", 0.1, 0), trained("adahesscale", 0.1, 0)]
    for result, commit in zip(results, ("a", "a", "b"), strict=True):
        result.facts["commits"] = [commit]
    assert [row["relative to Adam"] for row in row_of(results)[0]] == ["1.00", "1.00", "–"]


def test_modes_are_listed_if_they_differ():
    fast, slow = trained("adam", 0.1, 0), trained("adahesscale", 0.1, 0)
    fast.values["mode"] = slow.values["mode"] = "compiled"
    (row, _), section = row_of([fast, slow])
    assert "steps" not in row
    assert "(cpu, float32; steps ran in this mode: compiled)" in section.text
    slow.values["mode"] = "traced"
    rows, section = row_of([fast, slow])
    assert [row["steps"] for row in rows] == ["compiled", "traced"]
    assert "(cpu, float32; steps ran in this mode: compiled, traced)" in section.text


def test_speed_is_compared_for_equal_numbers_of_networks():
    alone, other = trained("adam", 0.1, 0), trained("adahesscale", 0.1, 0, pace=80.0)
    other.values["together"] = 5
    _, row = row_of([alone, other])[0]
    assert (row["networks at once"], row["relative to Adam"]) == ("5", "–")


def test_runs_that_share_no_seed():
    (row,), _ = row_of([trained("adam", 0.1, 0, accuracy=0.3), trained("adam", 0.01, 1, accuracy=0.4)])
    assert row["step size"] == "0.01"


def test_sgd_that_trains_longer_is_a_separate_method():
    rows, _ = row_of([trained("sgd", 0.1, 0), trained("sgd", 0.1, 0, sgd_epochs=3)])
    assert [row["optimizer"] for row in rows] == ["SGD", "SGD, 3 times as long"]


def test_different_settings_have_separate_sections():
    first, second = EXPERIMENT.sections([trained("adam", 0.1, 0, epochs=epochs) for epochs in (3, 5)])
    assert "5 epochs" in second.title
    assert {item.name for item in second.items} >= {"optimizers-epochs-5", "test-accuracy-seconds-epochs-5"}
    assert not {item.name for item in first.items} & {item.name for item in second.items}
    first, second = EXPERIMENT.sections([trained("adam", 0.1, 0, eps=eps) for eps in (1e-8, 1e-2)])
    assert second.title == "Toy on digits, 3 epochs, eps 0.01"
    (together,) = EXPERIMENT.sections([trained("scaled-adam", 0.1, 0, trust_radius=radius) for radius in (1e-4, 1e-2)])
    assert [row[0] for row in together.items[0].rows] == ["Scaled Adam, Δ = 0.0001", "Scaled Adam, Δ = 0.01"]


def test_training_needs_no_command_line():
    code = "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib', 'jinja2', 'sklearn')))"
    subprocess.run([sys.executable, "-c", f"{code}; import hesscale.experiments.figures.supervised"], check=True, timeout=120)
