"""The matrix of tasks and optimizers: networks, training that resumes, the choice of step sizes, and what tables say."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import hesscale
from hesscale.experiments import cli
from hesscale.experiments.figures import optimizers
from hesscale.experiments.lab import commands, report
from hesscale.experiments.lab.data import fingerprint
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.series_layout import check
from hesscale.experiments.lab.store import Pause, Result, Store
from hesscale.experiments.lab.sweep import run_tasks
from hesscale.experiments.tasks import networks, text, trainer, transformers
from hesscale.experiments.tasks.problem import loss_of
from hesscale.experiments.tasks.registry import PROBLEMS

EXPERIMENT = optimizers.EXPERIMENT
CPU = torch.device("cpu")
SETTINGS = optimizers.Settings(task="digits-tanh", optimizer="adam", step_size="1e-3", seeds=1, steps=10, batch=16, device="cpu")
NUMBERS = ("train_loss", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy")


def tasks(**changed):
    return optimizers.tasks(replace(SETTINGS, **changed))


def done(folder, asked, **options):
    store, asked = Store(folder, **options), [as_task(task) for task in asked]
    for task in asked:
        EXPERIMENT.do(store, task, None)
    return EXPERIMENT.results(store, asked)


def training(**changed):
    (task,) = tasks(**changed)
    return trainer.Training(task, PROBLEMS[task.problem].load(None, CPU))


# ---------------------------------------------------------------------------------------------------------- networks and data

SMALL = {
    "ResNet, batch norm": (lambda: networks.resnet(5, channels=1, widths=(8, 16), blocks=1), (3, 1, 8, 8)),
    "ResNet, group norm": (lambda: networks.resnet(5, networks.group_norm, channels=1, widths=(8, 16), blocks=1), (3, 1, 8, 8)),
    "GAP": (lambda: networks.gap_cnn(5, width=4), (3, 1, 8, 8)),
    "GELU": (lambda: networks.gelu_cnn(5), (2, 1, 28, 28)),
    "ViT": (lambda: transformers.ViT(5, channels=1, size=8, width=8, depth=2, heads=2), (3, 1, 8, 8)),
    "GPT": (lambda: transformers.GPT(5, context=6, width=8, heads=2), (3, 6)),
    "LSTM": (lambda: text.CharLSTM(5, width=8), (3, 6)),
}


@pytest.mark.parametrize("name", SMALL)
def test_networks_have_hessian_diagonals_which_are_exact_at_the_outputs(name):
    torch.manual_seed(0)
    build, shape = SMALL[name]
    model = build()
    x = torch.randint(5, shape) if len(shape) == 2 else torch.randn(shape)
    y = torch.randint(5, shape if len(shape) == 2 else shape[:1])
    loss = loss_of(model, x, y)
    hesscale.backward(loss)
    for p in model.parameters():
        assert p.hess_diag.shape == p.shape
        assert torch.isfinite(p.hess_diag).all()
    with torch.no_grad():
        q = model(x).flatten(0, -2).softmax(1)
    *_, bias = model.parameters()
    torch.testing.assert_close(bias.hess_diag, (q - q * q).mean(0))


def test_the_resnet_is_that_of_18_layers():
    model = networks.resnet(100)
    assert sum(p.numel() for p in model.parameters()) == 11_220_132
    assert sum(p.dim() > 1 for p in model.parameters()) == 18 + 3  # and three shortcuts
    assert [module.num_groups for module in (networks.group_norm(16), networks.group_norm(512))] == [4, 32]


@pytest.mark.parametrize("name", ["GPT", "LSTM"])
def test_a_character_is_predicted_from_those_before_it(name):
    model, x = SMALL[name][0](), torch.randint(5, (1, 6))
    changed = x.clone()
    changed[0, 3] = (x[0, 3] + 1) % 5
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])


def test_texts_are_split_by_position_and_labels_are_the_next_characters():
    splits = text.load(None, CPU)
    x, y = splits.train.take(torch.tensor([[5, 9]]))
    assert x.shape == y.shape == (1, 2, text.CONTEXT)
    assert torch.equal(x[..., 1:], y[..., :-1])
    parts = [splits.train, splits.validation, splits.test]
    whole = "".join(sorted(text.TEXTS["python-topics"]()))
    assert sum(part.count + text.CONTEXT for part in parts) == len(whole)
    assert splits.classes == len(set(whole))
    numbers = splits.test.evaluated
    assert (numbers.diff() == text.CONTEXT).all()
    assert splits.test.take(numbers[-1:])[1].shape == (1, text.CONTEXT)
    assert len(fingerprint("python-topics")) == 64


def test_a_loss_is_the_mean_over_all_predictions():
    model, x, y = SMALL["GPT"][0](), torch.randint(5, (2, 6)), torch.randint(5, (2, 6))
    torch.testing.assert_close(loss_of(model, x, y), F.cross_entropy(model(x).mT, y))


# ------------------------------------------------------------------------------------------------------------------- training


def test_the_command_trains_and_reports(tmp_path, monkeypatch, quick_store):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "run_tasks", lambda *given, workers, **options: run_tasks(*given, workers=0, **options))
    monkeypatch.setattr(report, "save_figure", lambda *_: [])  # takes most of the time
    words = ["optimizers", "--preset=smoke", "--task=digits-tanh", "--steps=20", "--seeds=1"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "4 networks of 1 task, 80 steps in all" in " ".join(result.output.split())
    result = CliRunner().invoke(cli.app, ["report", "--no-page", "--out", "page"])
    assert result.exit_code == 0, result.output
    shown = json.loads((tmp_path / "page" / "summary.json").read_text())["optimizers"]["shown"]
    assert list(shown) == ["summary", "digits-tanh-optimizers", "digits-tanh-step-sizes"]
    assert [row[0] for row in shown["summary"]["rows"]] == ["Adam", "AdaHesScale"]


@pytest.mark.parametrize(
    ("task", "optimizer", "backend"),
    [("digits-resnet", "adam", "eager"), ("digits-resnet", "adahesscale", "eager"), ("digits-tanh", "adahesscale", "traced")],
)
def test_a_run_that_resumes_has_the_same_numbers(tmp_path, monkeypatch, quick_store, task, optimizer, backend):
    monkeypatch.setattr(trainer, "BLOCK", 5)
    asked = tasks(task=task, optimizer=optimizer, backend=backend, steps=15, schedule="cosine", eval_size=50)
    (whole,) = done(tmp_path / "whole", asked)
    monkeypatch.setattr(trainer, "CHECKPOINT_SECONDS", -1)
    for _ in range(2):
        with pytest.raises(Pause):
            done(tmp_path / "parts", asked, seconds=-1)
    (parts,) = done(tmp_path / "parts", asked)
    assert parts.facts["resumed"] == 2
    assert whole.values["mode"] == parts.values["mode"] == backend
    for name in (*NUMBERS, "worst", "diverged_at"):
        assert whole.values[name] == parts.values[name]
    assert whole.metrics["test_loss"] == parts.metrics["test_loss"]
    assert [step for step, _ in parts.metrics["test_loss"]] == [5, 10, 15]


def test_every_optimizer_of_a_seed_has_the_same_start_and_batches():
    first, second = training(), training(optimizer="adahesscale")
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert all(map(torch.equal, first.batches(20, 3), second.batches(20, 3)))
    assert not torch.equal(first.batches(0, 3)[0], first.batches(20, 3)[0])
    other = trainer.Training(replace(first.task, seed=1), first.splits)
    assert not torch.equal(first.batches(0, 3)[0], other.batches(0, 3)[0])


@pytest.mark.parametrize(("optimizer", "size"), [("sgd", "1e30"), ("adahesscale", "1e30")])
def test_a_run_that_diverges_is_a_result(tmp_path, quick_store, optimizer, size):
    (result,) = done(tmp_path, tasks(task="digits-relu7", optimizer=optimizer, step_size=size))
    assert 1 < result.values["diverged_at"] <= 10
    assert result.values["worst"] >= 1
    assert "test_accuracy" not in result.values
    EXPERIMENT.sections([result])


def test_a_jump_is_the_largest_loss_by_the_first():
    progress = trainer.Progress()
    progress.add([2.0, 6.0], 0.5)
    progress.add([1.0, 3.0], 1.5)
    assert (progress.values()["worst"], progress.train_loss) == (3.0, 3.0)
    assert (progress.values()["seconds"], progress.values()["step_seconds"]) == (2.0, 0.5)
    progress.add([1.0, math.nan, math.inf], 3.0)
    assert (progress.diverged_at, progress.values()["worst"]) == (6, 3.0)


def test_options_reach_the_optimizer():
    assert training().optimizer.param_groups[0]["eps"] == 1e-8
    for name in ("adam", "adahesscale"):
        assert training(optimizer=name, eps=1e-3).optimizer.param_groups[0]["eps"] == 1e-3
    assert "eps" not in training(optimizer="sgd", eps=1e-3).optimizer.param_groups[0]
    cosine = training(schedule="cosine")
    rates = []
    for step in (0, 5, 10):
        cosine.set_rate(step)
        rates.append(cosine.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-3, 5e-4, 0])


# ------------------------------------------------------------------------------------------------------- settings and figures


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "nothing"}, "no task is called 'nothing'; there are digits-tanh"),
        ({"task": ""}, "task names no task"),
        ({"optimizer": "nothing"}, "no optimizer is called 'nothing'; there are sgd"),
        ({"optimizer": "scaled-adam"}, "no optimizer is called 'scaled-adam'"),
        ({"step_size": "fast"}, "a step size must be a number, not 'fast'"),
        ({"seeds": 0}, "seeds must be at least 1, not 0"),
        ({"steps": -1}, "steps must be at least 0, not -1"),
        ({"evaluations": 0}, "evaluations must be at least 1, not 0"),
        ({"eps": -1.0}, "eps must be 0 or positive and finite, not -1.0"),
        ({"schedule": "linear"}, "schedule='linear' is not one of constant, cosine"),
        ({"backend": "jax"}, "backend='jax' is not one of auto"),
        ({"device": "tpu"}, "device='tpu' is not one of auto"),
    ],
)
def test_unknown_names_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        tasks(**changed)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="a batch of 5000 is larger than the 1200 training examples"):
        training(batch=5000)


def test_the_largest_preset_is_the_whole_matrix():
    asked = optimizers.tasks(optimizers.PRESETS["paper"])
    assert {task.problem for task in asked} == {*PROBLEMS}
    assert {task.step_size for task in asked} == {1e-4, 3e-4, 1e-3, 3e-3, 1e-2}
    assert (asked[0].steps, asked[0].batch, asked[0].backend) == (1000, 64, "inductor" if torch.cuda.is_available() else "eager")


def trained(optimizer, step_size, seed, *, validation=0.5, test=0.4, loss=1.0, diverged=None, seconds=1.0, **changed):
    """A made-up result."""
    (task,) = tasks(optimizer=optimizer, step_size=str(step_size), **changed)
    values = {"diverged_at": diverged, "worst": 1.5, "seconds": 2.0, "step_seconds": seconds, "mode": "eager"}
    final = {"validation_accuracy": validation, "test_accuracy": test, "validation_loss": loss, "test_loss": loss}
    return Result(replace(task, seed=seed), values | (final if diverged is None else {}), {}, {})


def tables(results):
    """The rows of the summary and those of each task, by column."""
    sections = EXPERIMENT.sections(results)
    for section in sections:
        for item in section.items:
            check(item)
    rows = [[dict(zip(s.items[0].header, row, strict=True)) for row in s.items[0].rows] for s in sections]
    return rows[0], rows[1:], sections[1:]


def test_tuned_is_by_the_validation_split_and_untuned_at_adams_default():
    results = [
        *(trained("adam", 1e-3, seed, validation=0.6, test=0.5) for seed in (0, 1)),
        *(trained("adam", 3e-3, seed, validation=0.7, test=0.7 + 0.2 * seed) for seed in (0, 1)),
        *(trained("adam", 1e-2, seed, validation=0.5, test=0.95) for seed in (0, 1)),
        *(trained("adahesscale", 1e-3, seed, validation=0.6, test=0.6, seconds=2.0) for seed in (0, 1)),
        *(trained("adahesscale", 1e-2, seed, validation=0.1, test=0.1, seconds=2.0) for seed in (0, 1)),
    ]
    _, ((adam, other),), (section,) = tables(results)
    assert (adam["step size"], other["step size"]) == ("0.003", "0.001 (edge of the grid)")
    assert (adam["test accuracy, %"], adam["untuned: accuracy, %"]) == ("80.0 ± 10.0", "50.0 ± 0.0")
    assert (adam["untuned / tuned Adam, %"], other["untuned / tuned Adam, %"]) == ("62.5", "75.0")
    assert (adam["seconds / Adam's"], other["seconds / Adam's"]) == ("1.00", "2.00")
    assert (adam["diverged"], adam["largest jump"]) == ("0 of 6", "1.5 at 0.01")
    line = section.items[1].series[0]
    assert (line.x, line.y) == ([1e-3, 3e-3, 1e-2], pytest.approx([0.5, 0.8, 0.95]))
    assert line.high[1] == pytest.approx(0.9)


def test_texts_are_tuned_by_loss():
    results = [
        trained("adam", 1e-3, 0, task="char-gpt", loss=2.0, validation=0.9),
        trained("adam", 1e-2, 0, task="char-gpt", loss=1.0, validation=0.1),
        trained("adam", 1e-1, 0, task="char-gpt", diverged=3),
    ]
    _, ((row,),), (section,) = tables(results)
    assert (row["step size"], row["test loss"], row["diverged"]) == ("0.01", "1", "1 of 3 (0.1: 1)")
    assert section.items[1].y_label == "test loss"
    assert math.isnan(section.items[1].series[0].y[2])


def test_a_seed_that_diverged_counts_as_accuracy_0():
    results = [
        *(trained("adam", 1e-3, seed, validation=0.5, test=0.5) for seed in (0, 1)),
        trained("adam", 1e-2, 0, validation=0.9, test=0.9),
        trained("adam", 1e-2, 1, diverged=5),
        trained("adahesscale", 1e-3, 0, validation=0.8, test=0.8),
        trained("adahesscale", 1e-3, 1, diverged=5),
    ]
    (_, summary), ((adam, other),), _ = tables(results)
    assert adam["step size"] == "0.001 (edge of the grid)"
    assert (other["untuned: accuracy, %"], other["untuned: loss"], other["untuned / tuned Adam, %"]) == (
        "40.0 ± 40.0",
        "1",
        "80.0",
    )
    assert (summary["worst untuned, %"], summary["in"], summary["diverged"]) == ("80.0", "digits-tanh", "1 of 2")


def scores(optimizer, values, **changed):
    return [trained(optimizer, 1e-3, seed, test=value, validation=value, **changed) for seed, value in enumerate(values)]


def test_ahead_and_behind_is_by_two_standard_errors():
    results = []
    for name, values in {"digits-tanh": (0.9, 0.92), "digits-relu": (0.7, 1.0), "digits-vit": (0.1, 0.1)}.items():
        results += [*scores("adam", (0.8, 0.82), task=name), *scores("adahesscale", values, task=name)]
    (adam, other), _, _ = tables(results)
    assert (other["ahead of Adam"], other["behind Adam"], other["tasks compared"]) == ("1: digits-tanh", "1: digits-vit", "3")
    assert (adam["ahead of Adam"], adam["worst untuned, %"]) == ("–", "100.0")
    assert (other["worst untuned, %"], other["in"]) == ("12.3", "digits-vit")
    (_, other), _, _ = tables([*scores("adam", [0.5]), *scores("adahesscale", [0.9])])
    assert (other["ahead of Adam"], other["tasks compared"]) == ("–", "0")


def test_findings_count_tasks_and_name_untuned_optimizers():
    results = []
    for name, values in {"digits-tanh": (0.9, 0.92), "digits-relu": (0.7, 1.0), "digits-vit": (0.4, 0.4)}.items():
        results += [*scores("adam", (0.8, 0.82), task=name), *scores("adahesscale", values, task=name)]
    tuned, untuned = EXPERIMENT.sections(results)[0].findings
    expected = (
        "Tuned, AdaHesScale is better than Adam in 1 of 3 tasks and worse in 1, by more than 2 standard errors of the difference."
    )
    assert (tuned.text, tuned.figure) == (expected, "digits-tanh-step-sizes")
    assert "AdaHesScale has at least 49.4 % of the accuracy of tuned Adam in every one of 3 tasks" in untuned.text
    same = [*scores("adam", (0.8, 0.82)), *scores("adahesscale", (0.8, 0.82))]
    assert (
        "no optimizer differs from Adam by more than 2 standard errors in the task"
        in EXPERIMENT.sections(same)[0].findings[0].text
    )
    assert not any(
        "Tuned" in found.text for found in EXPERIMENT.sections([*scores("adam", [0.5]), *scores("sgd", [0.5])])[0].findings
    )


@pytest.mark.parametrize(
    ("dead", "columns"), [("adam", ("1: char-gpt", "0")), ("sgd", ("0", "1: char-gpt")), ("both", ("0", "0"))]
)
def test_on_texts_a_diverged_optimizer_is_behind(dead, columns):
    results = [
        trained(name, 1e-3, seed, task="char-gpt", diverged=3 if seed and dead in (name, "both") else None)
        for name in ("sgd", "adam")
        for seed in (0, 1)
    ]
    (sgd, _), _, _ = tables(results)
    assert (sgd["ahead of Adam"], sgd["behind Adam"]) == columns


def test_without_adam_nothing_is_compared():
    (row,), ((own,),), _ = tables(scores("adahesscale", (0.5, 0.6)))
    assert (row["worst untuned, %"], row["ahead of Adam"], own["seconds / Adam's"]) == ("–", "–", "–")
    assert own["untuned: accuracy, %"] == "55.0 ± 5.0"
    (_,), ((own,),), _ = tables([trained("adam", 3e-3, 0)])
    assert (own["untuned: accuracy, %"], own["untuned / tuned Adam, %"]) == ("–", "–")
    assert EXPERIMENT.sections([]) == []


def test_seconds_of_other_machines_are_not_compared():
    results = [*scores("adam", [0.5]), *scores("adahesscale", [0.5])]
    results[1].facts["machine"] = {"cpu": "another"}
    _, ((adam, other),), _ = tables(results)
    assert (adam["seconds / Adam's"], other["seconds / Adam's"]) == ("1.00", "–")


def test_settings_are_kept_apart():
    results = [*scores("adam", [0.5]), *scores("adam", [0.6], schedule="cosine"), *scores("adam", [0.6], task="digits-vit")]
    _, rows, sections = tables(results)
    assert len(rows) == 3
    assert [section.items[0].name for section in sections] == [
        "digits-tanh-schedule-constant-optimizers",
        "digits-tanh-schedule-cosine-optimizers",
        "digits-vit-optimizers",
    ]
    assert sections[1].title == "MLP 64-64 with tanh on digits, schedule cosine"


def test_an_optimizer_has_the_same_colour_in_every_task():
    results = [*scores("adam", [0.5]), *scores("adahesscale", [0.5]), *scores("adahesscale", [0.5], task="digits-vit")]
    _, _, (first, second) = tables(results)
    assert first.items[1].series[1].colour == second.items[1].series[0].colour
