"""The command line: experiments from their settings, runs, sweeps, the report, and clear refusals."""

from __future__ import annotations

import dataclasses
import struct
import textwrap

import numpy
import pytest
from typer.testing import CliRunner

from hesscale.experiments import cli
from hesscale.experiments.lab import commands, report
from hesscale.experiments.lab.sweep import Interrupted, run_tasks

NAMES = tuple(cli.EXPERIMENTS)
QUALITY = ("quality", "--preset=smoke", "--examples=1", "--seeds=1")
SUPERVISED = ("supervised", "--preset=smoke", "--optimizer=adam@0.01", "--seeds=1", "--epochs=1", "--backend=eager")


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: CliRunner().invoke(cli.app, [*words])


@pytest.fixture
def no_processes(monkeypatch):
    """Runs are done in this process, whatever workers are asked for."""

    def here(*arguments, workers, **options):
        return run_tasks(*arguments, workers=0, **options)

    monkeypatch.setattr(commands, "run_tasks", here)


@pytest.fixture
def no_figures(monkeypatch):
    """Reports are written with empty figures, since drawing takes most of the time."""

    def save_empty(item, stem, colours):
        stem.parent.mkdir(exist_ok=True, parents=True)
        stem.with_name(f"{stem.name}.svg").write_text('<svg viewBox="0 0 1 1"></svg>')

    monkeypatch.setattr(report, "save_figure", save_empty)


def words_of(result) -> str:
    """What was printed, without frames and line breaks."""
    return " ".join(result.output.replace("│", " ").split())


def test_the_help_lists_every_command_in_a_named_group(invoke):
    result = invoke("--help")
    headings = [line for line in result.output.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Options:", "Start:", "Experiments:", "Runs:", "Examples:"]


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_command_whose_help_shows_its_settings(invoke, name):
    result = invoke(name, "--help")
    experiment = cli.EXPERIMENTS[name]
    assert result.exit_code == 0
    assert f"Measure {experiment.title[0].lower()}{experiment.title[1:]}" in words_of(result)
    for field in dataclasses.fields(experiment.settings):
        assert f"--{field.name.replace('_', '-')}" in result.output
    assert "--preset" in result.output
    assert "--runs" in result.output


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", ["smoke", "small", "paper"])
def test_a_dry_run_says_how_much_work_it_is_and_does_none(invoke, tmp_path, name, preset):
    result = invoke(name, "--preset", preset, "--dry-run")
    assert result.exit_code == 0, result.output
    assert cli.EXPERIMENTS[name].work(cli.EXPERIMENTS[name].presets[preset]) in words_of(result)
    assert "The time is unknown" in words_of(result)
    assert not (tmp_path / "out").exists()


def test_an_experiment_runs_once_and_is_reported(invoke, tmp_path):
    first = invoke("quality", "--preset", "smoke", "--examples", "3", "--workers", "1")  # in a process of its own
    assert first.exit_code == 0, first.output
    assert "HesScaleGN" in first.output
    again = invoke("quality", "--preset", "smoke", "--examples", "3")
    assert "1 run in out/runs, 1 done before" in words_of(again)
    assert "finished" in invoke("runs").output
    assert "examples=3" in words_of(invoke("runs", "quality"))
    made = invoke("report", "--no-page", "--out", "page")
    assert made.exit_code == 0, made.output
    assert "hesscale quality --preset=smoke --examples=3" in (tmp_path / "page" / "summary.json").read_text()
    assert any((tmp_path / "page" / "figures").glob("*.svg"))


def test_a_sweep_asks_for_every_combination(invoke):
    over = ["--over", "step_size=0.1", "--over", "step-size=0.01", "--over", "seeds=1,2"]
    result = invoke("sweep", "quality", "--preset", "smoke", *over, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "4 runs" in words_of(result)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["quality", "--preset", "huge"], "'huge' is not one of smoke, small, paper"),
        (["quality", "--dataset", "nothing"], "not 'nothing'"),
        (["quality", "--seeds", "0"], "seeds must be at least 1, not 0"),
        (["quality", "--seeds", "many"], "--seeds"),
        (["sweep", "nothing"], f"'nothing' is not one of {', '.join(NAMES)}"),
        (["sweep", "quality", "--over", "step_size"], "'step_size' is not of the form"),
        (["sweep", "quality", "--over", "speed=1"], "speed is not a setting"),
        (["sweep", "quality", "--over", "step_size=fast"], "'fast'"),
        (["quality", "--workers", "-1"], "it must be 0 or more, not -1"),
        (["runs"], "there are no runs in out/runs yet"),
        (["runs", "--runs", __file__], "is a file, but a folder is needed"),
        (["quality", "--data", __file__], "is a file, but a folder is needed"),
        (["rl-eval"], "name a run or pass --last"),
        (["rl-eval", "3f"], "no run in out/runs has policy.pt"),
        (["report"], "hesscale"),
        (["report", "nothing"], "nothing"),
        (["data", "nothing"], "there is no data set 'nothing'"),
        (["explain", "module"], "is not of the form module:function"),
        (["explain", "no_such_module:loss"], "no_such_module"),
        (["explain", "json:loads"], "TypeError"),
    ],
)
def test_invalid_settings_are_named(invoke, words, told):
    result = invoke(*words)
    assert result.exit_code == 2, result.output
    assert told in words_of(result)


@pytest.mark.usefixtures("no_processes")
def test_a_failed_run_is_reported_with_the_reason(invoke):
    result = invoke("quality", "--preset", "smoke", "--step-size", "1e300")
    assert result.exit_code == 1
    assert "a network diverged" in words_of(result)
    assert "failed" in words_of(invoke("runs"))


def test_an_interrupted_command_says_how_to_resume(invoke, monkeypatch):
    def interrupted(*_, **__):
        raise Interrupted("stopped; go on with: hesscale quality")

    monkeypatch.setattr(commands, "run_tasks", interrupted)
    result = invoke("quality", "--preset", "smoke")
    assert result.exit_code == 130
    assert "go on with: hesscale quality" in words_of(result)


@pytest.mark.usefixtures("no_processes")
def test_a_damaged_run_is_named(invoke, tmp_path):
    invoke(*QUALITY)
    (database,) = tmp_path.glob("out/runs/quality/*/run.sqlite")
    database.write_bytes(database.read_bytes()[:5000])
    result = invoke(*QUALITY)
    assert result.exit_code == 1
    assert "run.sqlite" in words_of(result)
    assert "damaged" in words_of(invoke("runs"))
    assert "problem quality:" in words_of(invoke("report", "--no-page"))


def test_missing_data_is_named(invoke, tmp_path):
    result = invoke("quality", "--preset", "smoke", "--dataset", "mnist", "--workers", "1", "--data", "nowhere")
    assert result.exit_code == 2
    assert "hesscale data mnist" in words_of(result)
    assert not (tmp_path / "out").exists()  # nothing was begun


def mnist_like(root, seed):
    """Files with MNIST's names and shapes, and other pixels."""
    generator = numpy.random.default_rng(seed)
    (root / "MNIST" / "raw").mkdir(parents=True)
    for split, count in (("train", 60_000), ("t10k", 10_000)):
        images, labels = generator.integers(0, 256, (count, 28, 28), numpy.uint8), generator.integers(0, 10, count, numpy.uint8)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
            (root / "MNIST" / "raw" / f"{split}-{kind}-ubyte").write_bytes(head + values.tobytes())


@pytest.mark.usefixtures("no_processes")
def test_runs_with_other_data_of_the_same_name_are_not_mixed_up(invoke, tmp_path):
    for seed, name in enumerate(("one", "another")):
        mnist_like(tmp_path / name, seed)
    command = [*QUALITY, "--dataset", "mnist"]
    assert invoke(*command, "--data", "one").exit_code == 0
    assert invoke(*command, "--data", "one").exit_code == 0
    refused = invoke(*command, "--data", "another")
    assert refused.exit_code == 2
    assert "was done with different data of the same name" in words_of(refused)
    assert invoke(*command, "--data", "nowhere").exit_code == 0  # nothing is left to do


@pytest.mark.usefixtures("no_processes", "no_figures")
def test_a_failed_command_does_not_hide_finished_runs(invoke, tmp_path):
    assert invoke(*SUPERVISED).exit_code == 0
    assert invoke(*SUPERVISED, "--batch", "5000").exit_code == 1  # more than there are images
    assert invoke("report", "--no-page").exit_code == 0
    summary = (tmp_path / "out" / "report" / "summary.json").read_text()
    assert "--epochs=1" in summary
    assert "--batch" not in summary


def test_a_download_has_one_bar_for_each_file(invoke, monkeypatch):
    added = []

    def download(name, root, draw):
        for done in range(5):
            draw("images.gz", done, 5)

    monkeypatch.setattr(cli, "download", download)
    monkeypatch.setattr(cli.Progress, "add_task", lambda self, file: added.append(file) or 0)
    monkeypatch.setattr(cli.Progress, "update", lambda *_, **__: None)
    assert invoke("data", "digits").exit_code == 0
    assert added == ["images.gz"]


def test_digits_need_no_download(invoke):
    assert "1500 training images, 297 test images" in words_of(invoke("data", "digits"))


def test_a_loss_is_explained(invoke, tmp_path):
    source = """
        import torch

        def loss():
            return torch.tanh(torch.nn.Linear(3, 2)(torch.ones(4, 3))).square().mean()
    """
    (tmp_path / "of_mine.py").write_text(textwrap.dedent(source))
    result = invoke("explain", "of_mine:loss")
    assert result.exit_code == 0, result.output
    assert "TanhBackward0" in result.output


@pytest.mark.usefixtures("no_processes", "no_figures")
def test_the_demonstration_ends_with_the_page(invoke, monkeypatch, tmp_path):
    changes = {
        "quality": {"seeds": 1, "examples": 2},
        "supervised": {"optimizer": "adam@0.01,adahesscale@0.01", "seeds": 1, "epochs": 1, "backend": "eager"},
    }
    tiny = {}
    for name, changed in changes.items():
        experiment = cli.EXPERIMENTS[name]
        small = dataclasses.replace(experiment.presets["smoke"], **changed)
        tiny[name] = dataclasses.replace(experiment, presets={**experiment.presets, "small": small})
    monkeypatch.setattr(cli, "EXPERIMENTS", tiny)
    monkeypatch.setattr(cli, "DEMO", {name: {} for name in tiny})
    result = invoke("demo")
    assert result.exit_code == 0, result.output
    assert "index.html" in words_of(result)
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert "AdaHesScale" in page
    assert "diag(G)" in page
