"""Output in a terminal: tables, lists of runs, help texts, progress, and estimates of time."""

from __future__ import annotations

import io
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console
from toy_experiment import EXPERIMENT, Task
from typer.testing import CliRunner

from hesscale.experiments import cli, install
from hesscale.experiments.lab import progress
from hesscale.experiments.lab.commands import begun_before
from hesscale.experiments.lab.estimate import time_needed
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.plots import Table
from hesscale.experiments.lab.progress import bars, learned, progress_bars, progress_lines
from hesscale.experiments.lab.run_list import as_json, details, lines, run_of, select
from hesscale.experiments.lab.store import Pause, Store
from hesscale.experiments.lab.sweep import SweepProgress
from hesscale.experiments.lab.terminal import print_table

pytestmark = pytest.mark.usefixtures("quick_store")
WIDTH = 80
SUMMARIES = sorted(Path(__file__).parents[2].glob("results/*/summary.json"))


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    print_table(console, table)
    return console.file.getvalue()


@pytest.mark.parametrize("path", SUMMARIES, ids=[path.parent.name for path in SUMMARIES])
def test_every_committed_table_fits_and_keeps_its_words(path):
    for experiment in json.loads(path.read_text()).values():
        for name, shown in experiment["shown"].items():
            if "header" not in shown:
                continue
            text = printed(Table(name, shown["title"], shown["header"], shown["rows"]))
            assert max(map(len, text.splitlines())) <= WIDTH, name
            words = {word.rstrip(":;") for word in text.split()}
            cells = [cell for row in [shown["header"], *shown["rows"]] for cell in row]
            assert {word.rstrip(":;") for cell in cells for word in cell.split()} <= words, name


def test_a_column_that_is_all_the_same_becomes_a_line():
    text = printed(Table("t", "Title", ("method", "seeds", "loss"), [("SGD", "3", "0.1"), ("Adam", "3", "0.25")]))
    assert "seeds: 3" in text
    assert [line.split() for line in text.splitlines()[-2:]] == [["SGD", "0.1"], ["Adam", "0.25"]]


@pytest.mark.parametrize("words", [[], *([name] for name in cli.EXPERIMENTS), ["runs"], ["rl-eval"], ["bench"], ["sweep"]])
def test_help_fits_and_has_examples(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = CliRunner().invoke(cli.app, [*words, "--help"]).output
    assert max(len(line) for line in text.splitlines() if not line.startswith("  hesscale")) <= WIDTH
    assert re.search(r"Examples?:\n  hesscale", text)
    assert "scaled-\n" not in text  # no name is broken


def test_help_lists_short_defaults_of_presets_in_a_line_and_long_ones_below_each_other(monkeypatch):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    lines = [line.strip() for line in CliRunner().invoke(cli.app, ["quality", "--help"]).output.splitlines()]
    assert "[smoke: 2; small: 10; paper: 40]" in lines
    lines = [line.strip() for line in CliRunner().invoke(cli.app, ["supervised", "--help"]).output.splitlines()]
    assert "smoke: 1e-3, 1e-2" in lines
    assert "[default: augment]" in " ".join(lines)


def test_help_lists_commands_in_groups():
    text = CliRunner().invoke(cli.app, ["--help"]).output
    assert text.index("Start:") < text.index("demo") < text.index("Experiments:") < text.index("robot") < text.index("Runs:")


def test_the_version_is_printed():
    assert CliRunner().invoke(cli.app, ["--version"]).output.startswith("hesscale ")


@pytest.fixture
def store(tmp_path) -> Store:
    """Four toy runs: two finished, one interrupted at its checkpoint, and one that failed."""
    found = Store(tmp_path / "runs")
    for seed in (0, 1):
        EXPERIMENT.do(found, as_task(Task(seed)), None)
    with suppress(Pause), Store(tmp_path / "runs", seconds=0).open("toy", as_task(Task(2))) as run:
        run.progress(4, 10)
        run.checkpoint({})
    with pytest.raises(ValueError, match="oh"), found.open("toy", as_task(Task(3))):
        raise ValueError("oh")
    return found


def test_runs_are_listed_with_the_settings_that_differ(store):
    heading, header, *rows, problem = lines(store.records("toy"), None)
    assert heading == f"toy: 4 runs in {store.root}/toy (2 finished, 1 interrupted, 1 failed)"
    assert header.split() == ["status", "seed", "path"]
    assert [row.split()[-2] for row in rows] == ["0", "1", "2", "3"]
    assert rows[2].split()[:2] == ["interrupted", "40%"]
    assert [row.split()[-1] for row in rows] == [str(store.directory("toy", as_task(Task(seed)))) for seed in range(4)]
    assert problem.strip() == "1 failed: ValueError: oh"
    narrow = list(lines(store.records("toy"), 50))
    assert narrow[2].split()[-1] == store.directory("toy", as_task(Task(0))).name
    assert max(map(len, narrow[1:-1])) <= 50


def test_runs_are_selected(store):
    def seeds(*filters: str) -> list[int]:
        return [record.task["seed"] for record in select(store.records(), ["toy"], filters)]

    assert seeds() == [0, 1, 2, 3]
    assert seeds("toy", "finished", "seed=1") == [1]
    assert seeds(store.directory("toy", as_task(Task(3))).name[:8]) == [3]
    for text, told in {
        "seed=9": "no run matches",
        "speed=1": "no run has a setting named speed",
        "zz": "is not an experiment",
    }.items():
        with pytest.raises(ValueError, match=told):
            seeds(text)


def test_a_single_run_is_shown_in_full_and_all_as_json(store):
    failed = list(details(select(store.records(), ["toy"], ["failed"])[0]))
    assert "  error: ValueError: oh" in failed
    assert "    seed=3" in failed
    found = json.loads(as_json(store.records()))
    assert [run["settings"]["seed"] for run in found] == [0, 1, 2, 3]
    assert found[2]["path"] == str(store.directory("toy", as_task(Task(2))))


def test_an_id_that_begins_several_runs_is_refused(store):
    with pytest.raises(ValueError, match="4 runs have an id that begins with : "):
        run_of(store, "", False, ["run.sqlite"])
    assert run_of(store, "", True, ["checkpoint.pt"]) == store.directory("toy", as_task(Task(2)))


def test_resumed_runs_are_described(store):
    done, resumed, again = begun_before(store.records())
    assert done.startswith("2 done before")
    assert resumed == "1 resumed from its last checkpoint at 40%"
    assert again == "1 started again, since no checkpoint was saved"
    with store.open("toy", as_task(Task(9))):
        assert "1 in progress in another process" in list(begun_before(store.records()))


def test_time_is_estimated_from_finished_runs(store, tmp_path):
    tasks = [as_task(Task(seed)) for seed in range(10, 14)]
    assert "The time is unknown" in time_needed(EXPERIMENT, Store(tmp_path / "none"), tasks, 2)
    for seed in (0, 1):
        with Store(store.root).open("toy", as_task(Task(seed))) as run:
            run.note(seconds=60.0, together=1)
    assert time_needed(EXPERIMENT, store, tasks, 2) == "It will take about 2 min with 2 workers, estimated from 2 finished runs."


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    found = Clock()
    monkeypatch.setattr(progress, "time", found)
    return found


def watched(done: int) -> SweepProgress:
    return SweepProgress(1, {"a": ("seed=0", done, 100), "b": ("seed=1", 0, 0)}, {"a": 12.5})


def test_progress_lines_show_metric_speed_and_time_left(clock):
    console = Console(file=io.StringIO(), width=WIDTH)
    say = progress_lines(console, cli.EXPERIMENTS["rl"], 3)
    say(watched(0))
    clock.now = 10.0
    say(watched(50))
    assert console.file.getvalue() == "1 of 3 runs, 50%, return 12.5, 5 steps/s, 30 s left\n"


def test_one_diverging_run_does_not_hide_the_metric_of_others():
    runs = SweepProgress(0, {}, {"a": 0.25, "b": 0.5, "c": 1e34})
    assert learned(cli.EXPERIMENTS["supervised"], runs) == "median loss 0.5"


def test_progress_bars_fit(clock):
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=True, color_system=None)
    with bars(console) as shown:
        draw = progress_bars(shown, cli.EXPERIMENTS["rl"], 3)
        draw(watched(0))
        clock.now = 10.0
        draw(watched(50))
        shown.refresh()
    text = console.file.getvalue()
    assert "5 steps/s, 30 s left" in text
    assert "return 12.5" in text


def test_install_hints_work_from_a_checkout_and_without_one(monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(install, "__file__", str(tmp_path / "hesscale" / "experiments" / "install.py"))
    assert install.how_to_install("rl") == f"pip install -e '{tmp_path}[rl]'"
    (tmp_path / "pyproject.toml").unlink()
    assert install.how_to_install("rl") == "pip install 'hesscale[rl]'"
