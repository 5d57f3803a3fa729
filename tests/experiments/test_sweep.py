"""Sweeps in worker processes: those that die, those that raise, and a driver that is stopped or killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import toy_experiment
from toy_experiment import EXPERIMENT, TOGETHER, Settings, Task, numbers

from hesscale.experiments.lab import sweep as sweep_module
from hesscale.experiments.lab import workers as workers_module
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.store import Store
from hesscale.experiments.lab.sweep import Interrupted, SweepProgress, grid, run_tasks

pytestmark = pytest.mark.usefixtures("quick_store")
ROOT = Path(__file__).parent.parent.parent


def alone(tmp_path: Path, tasks: list[dict]) -> list:
    """The results of tasks that are done one after another without interruption."""
    store = Store(tmp_path / "alone")
    for task in tasks:
        EXPERIMENT.do(store, task, None)
    return [numbers(store, task) for task in tasks]


def test_every_kind_of_task_ends_as_expected(tmp_path, monkeypatch):
    """Two are fine, one of them asked for twice; one was done before; one raises; a process dies always, and another once."""
    monkeypatch.setattr(sweep_module, "RETRIES", 1)
    done, *fine = [as_task(Task(seed)) for seed in range(3)]
    dies_once, raises, dies = [as_task(Task(seed, fault=fault)) for seed, fault in enumerate(("die once", "raise", "die"))]
    store, watched = Store(tmp_path / "runs"), []
    EXPERIMENT.do(store, done, None, "before")
    before = store.record("toy", done).facts
    tasks = [dies, done, dies_once, fine[0], raises, *fine]
    outcome = run_tasks(EXPERIMENT, store, tasks, workers=2, data=tmp_path, command="now", watch=watched.append)

    good = [done, *fine, dies_once]
    assert outcome.finished == 4
    assert [numbers(store, task) for task in good] == alone(tmp_path, good)
    assert store.record("toy", done).facts == before
    assert store.record("toy", dies_once).facts["resumed"] == 1
    failed = dict(outcome.failed)
    assert failed == {
        store.directory("toy", raises): "ValueError: the toy was told to fail",
        store.directory("toy", dies): "its worker died 2 times, at last with exit code -9",
    }
    assert "in misbehave" in store.record("toy", raises).facts["traceback"]
    assert store.record("toy", dies).status == "interrupted"
    assert watched[-1] == SweepProgress(4, {}, failed=2)
    assert {len(each.running) for each in watched} == {0, 1, 2}
    labels = {label for each in watched for label, _, _ in each.running.values()}
    assert labels == {"seed=2 fault=die", "seed=0 fault=die once", "seed=1 fault=", "seed=1 fault=raise", "seed=2 fault="}
    assert (4, 10) in {(done, total) for each in watched for _, done, total in each.running.values()}

    EXPERIMENT.do(store, raises | {"fault": ""}, None)
    again = run_tasks(EXPERIMENT, store, good, workers=2, data=None, command="again")
    assert (again.finished, again.failed) == (4, [])


@pytest.fixture
def no_processes(monkeypatch):
    """What worker processes would do is done here."""
    monkeypatch.setattr(workers_module, "run_in_processes", lambda sweep, workers: sweep_module.run_here(sweep))


def who_was_together(folder: Path) -> set[str]:
    return {path.name.removeprefix("together") for path in folder.glob("together*")}


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("workers", [0, 2])
def test_tasks_of_a_kind_are_done_together(tmp_path, workers):
    tasks = [as_task(Task(seed, scale=1.0 if seed < 5 else 2.0)) for seed in range(8)]
    store = Store(tmp_path / "runs")
    outcome = run_tasks(TOGETHER, store, tasks, workers=workers, data=tmp_path, command="", together=3)
    assert (outcome.finished, outcome.failed) == (8, [])
    assert [numbers(store, task) for task in tasks] == alone(tmp_path, tasks)
    assert who_was_together(tmp_path) == {"0+1", "2+3+4", "5+6+7"}


@pytest.mark.usefixtures("no_processes")
def test_there_is_work_for_all_workers(tmp_path):
    tasks = [as_task(Task(seed)) for seed in range(4)]
    run_tasks(TOGETHER, Store(tmp_path / "runs"), tasks, workers=2, data=tmp_path, command="", together=16)
    assert who_was_together(tmp_path) == {"0+1", "2+3"}
    with pytest.raises(ValueError, match="together must be at least 1, not 0"):
        run_tasks(TOGETHER, Store(tmp_path / "runs"), tasks, workers=2, data=tmp_path, command="", together=0)


@pytest.mark.usefixtures("no_processes")
def test_the_rest_of_an_interrupted_group_resumes_as_a_group(tmp_path):
    tasks = [as_task(Task(seed)) for seed in range(8)]
    store = Store(tmp_path / "runs")
    for task in tasks[:6]:
        TOGETHER.do(store, task, None)
    run_tasks(TOGETHER, store, tasks, workers=2, data=tmp_path, command="", together=4)
    assert who_was_together(tmp_path) == {"6+7"}


def test_a_busy_task_does_not_split_its_group(tmp_path):
    tasks = [as_task(Task(seed)) for seed in range(3)]
    store = Store(tmp_path / "runs")
    with store.open("toy", tasks[1], ""):
        outcome = run_tasks(TOGETHER, store, tasks, workers=0, data=tmp_path, command="", together=3)
    assert outcome.finished == 2
    ((directory, error),) = outcome.failed
    assert directory == store.directory("toy", tasks[1])
    assert error.startswith("BusyRun")
    assert who_was_together(tmp_path) == {"0+2"}
    assert store.record("toy", tasks[0]).facts["resumed"] == 0


def test_a_failed_task_does_not_affect_its_group(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "RETRIES", 1)
    faults = ["", "raise", "", "", "die once", ""]
    tasks = [as_task(Task(seed, fault=fault, scale=1.0 + (seed > 2))) for seed, fault in enumerate(faults)]
    store = Store(tmp_path / "runs")
    outcome = run_tasks(TOGETHER, store, tasks, workers=1, data=tmp_path, command="", together=3)
    assert (outcome.finished, outcome.failed) == (5, [(store.directory("toy", tasks[1]), "ValueError: the toy was told to fail")])
    good = [task for task in tasks if task["fault"] != "raise"]
    assert [numbers(store, task) for task in good] == alone(tmp_path, good)


def test_in_this_process(tmp_path):
    store, watched, threads = Store(tmp_path / "runs"), [], torch.get_num_threads()
    tasks = [as_task(Task(seed, fault="raise" if seed == 1 else "")) for seed in range(3)]
    outcome = run_tasks(EXPERIMENT, store, tasks, workers=0, data=None, command="", watch=watched.append)
    assert (outcome.finished, len(outcome.failed)) == (2, 1)
    assert [each.finished for each in watched] == [0, 1, 1, 2]
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="workers must be 0 or more, not -1"):
        run_tasks(EXPERIMENT, store, tasks, workers=-1, data=None, command="")


def test_a_label_of_a_task_alone_is_the_experiment(tmp_path):
    watched = []
    run_tasks(EXPERIMENT, Store(tmp_path), [as_task(Task(0))], workers=0, data=None, command="", watch=watched.append)
    assert [label for label, _, _ in watched[0].running.values()] == ["toy"]


def test_a_damaged_run_does_not_stop_the_others(tmp_path):
    store, tasks = Store(tmp_path), [as_task(Task(seed)) for seed in range(3)]
    path = store.directory("toy", tasks[0]) / "run.sqlite"
    path.parent.mkdir(parents=True)
    path.write_text("not ours")
    outcome = run_tasks(EXPERIMENT, store, tasks, workers=0, data=None, command="")
    assert outcome.finished == 2
    ((directory, error),) = outcome.failed
    assert directory == path.parent
    assert error.startswith(f"DamagedRun: {path} cannot be read")
    assert path.read_text() == "not ours"


def test_interrupted_in_this_process(tmp_path):
    def watch(watched: SweepProgress) -> None:
        if watched.finished == 1:
            raise KeyboardInterrupt

    tasks = [as_task(Task(seed)) for seed in range(3)]
    with pytest.raises(Interrupted, match=r"1 of 3 runs are finished. The same command resumes"):
        run_tasks(EXPERIMENT, Store(tmp_path), tasks, workers=0, data=None, command="hesscale toy", watch=watch)


STEPS = 60  # of 0.02 s each
DRIVER = """
import signal
import sys
from toy_experiment import EXPERIMENT, Task
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.store import Store
from hesscale.experiments.lab.sweep import run_tasks

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whoever runs tests in the background may have switched off
    tasks = [as_task(Task(seed, steps=int(sys.argv[2]), is_slow=True)) for seed in range(3)]
    run_tasks(EXPERIMENT, Store(sys.argv[1]), tasks, workers=2, data=None, command="hesscale toy")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_stopped(tmp_path, how, monkeypatch):
    """Its workers stop with it, what they did is kept, and the same again ends with the same numbers."""
    tasks = [as_task(Task(seed, steps=STEPS, is_slow=True)) for seed in range(3)]
    store, script = Store(tmp_path / "runs"), tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, script, store.root, str(STEPS)]
    driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while sum(record.facts.get("done", 0) > 4 for record in store.records()) < 2:
        assert driver.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(random.Random(how).uniform(0, 0.3))
    if how == signal.SIGKILL:
        driver.kill()
    else:
        os.killpg(driver.pid, how)  # as a terminal does
    _, errors = driver.communicate()
    assert driver.returncode != 0
    if how == signal.SIGINT:
        assert "Interrupted: Stopped: 0 of 3 runs are finished. The same command resumes" in errors
    while "running" in Counter(record.status for record in store.records()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    states = [record for record in store.records() if record.status == "interrupted"]
    assert len(states) >= 2
    assert all((record.directory / "checkpoint.pt").exists() for record in states)
    monkeypatch.setattr(toy_experiment, "SLOW_SECONDS", 0.0)
    outcome = run_tasks(EXPERIMENT, store, tasks, workers=0, data=None, command="")
    assert (outcome.finished, outcome.failed) == (3, [])
    assert [numbers(store, task) for task in tasks] == alone(tmp_path, tasks)


# ---- the settings of a sweep


def test_grid_is_every_combination_of_the_right_types():
    found = grid(Settings(seeds=5), {"scale": ["1", "0.5", 1], "is_slow": ["true", "No"], "fault": [" die "]})
    assert found == [Settings(5, 10, scale, is_slow, "die") for scale in (1.0, 0.5) for is_slow in (True, False)]
    assert all(type(settings.scale) is float for settings in found)
    assert grid(Settings(), {}) == [Settings()]


@pytest.mark.parametrize(
    ("over", "complaint"),
    [
        ({"speed": ["1"]}, "speed is not a setting; the settings are seeds, steps, scale, is_slow, fault"),
        ({"seeds": []}, "seeds has no values"),
        ({"seeds": ["3", "1.5"]}, "seeds must be a value of type int, not '1.5'"),
        ({"seeds": [True]}, "seeds must be a value of type int, not 'True'"),
        ({"seeds": [""]}, "seeds must be a value of type int, not ''"),
        ({"scale": ["fast"]}, "scale must be a value of type float, not 'fast'"),
        ({"scale": ["nan"]}, "scale must be a value of type float, not 'nan'"),
        ({"is_slow": ["2"]}, "is_slow must be a value of type bool, not '2'"),
    ],
)
def test_grid_names_invalid_settings(over, complaint):
    with pytest.raises(ValueError, match=complaint):
        grid(Settings(), over)


def test_grid_refuses_fields_that_are_no_plain_values():
    @dataclass(frozen=True)
    class Odd:
        sizes: tuple = (1,)

    with pytest.raises(ValueError, match="sizes must be a value of type tuple, not '2'"):
        grid(Odd(), {"sizes": ["2"]})
