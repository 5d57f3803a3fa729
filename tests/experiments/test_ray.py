"""Sweeps on a real Ray cluster of two nodes, one of which is killed in the middle of the work."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from pathlib import Path

import pytest
from toy_experiment import EXPERIMENT, Task, numbers

from hesscale.experiments.lab import cluster as cluster_module
from hesscale.experiments.lab.cluster import put, take, work_for_a_while
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.locks import is_locked, lock
from hesscale.experiments.lab.store import Pause, Store
from hesscale.experiments.lab.sweep import Interrupted, Sweep, run_tasks

ROOT = Path(__file__).parent.parent.parent


def alone(tmp_path: Path, tasks: list[dict]) -> list:
    store = Store(tmp_path / "alone")
    outcome = run_tasks(EXPERIMENT, store, tasks, workers=2, data=None, command="")
    assert outcome.failed == []
    return [numbers(store, task) for task in tasks]


@pytest.fixture(scope="module")
def two_nodes():
    """This process belongs to the first, and the second may be killed."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 1})
        nodes.second = nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        yield nodes
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.slow
def test_every_kind_of_task_ends_as_expected(tmp_path, two_nodes):
    """One that is fine, one half done, one that raises, one whose worker dies once, and one in use elsewhere."""
    fine, half, raises, dies_once, busy = [
        as_task(Task(seed, fault=fault)) for seed, fault in enumerate(("", "", "raise", "die once", ""))
    ]
    store = Store(tmp_path / "runs")
    with pytest.raises(Pause):
        EXPERIMENT.do(Store(store.root, seconds=0), half, None)
    store.directory("toy", busy).mkdir(parents=True)
    with lock(store.directory("toy", busy)):
        tasks = [fine, half, raises, dies_once, busy]
        outcome = run_tasks(EXPERIMENT, store, tasks, workers=2, data=tmp_path, command="now", ray=two_nodes.address)
    good = [fine, half, dies_once]
    assert outcome.finished == 3
    assert [numbers(store, task) for task in good] == alone(tmp_path, good)
    assert store.record("toy", half).facts["resumed"] == 1
    failed = dict(outcome.failed)
    assert failed.keys() == {store.directory("toy", raises), store.directory("toy", busy)}
    assert failed[store.directory("toy", raises)] == "ValueError: the toy was told to fail"
    assert failed[store.directory("toy", busy)].startswith("BusyRun")
    assert "in misbehave" in store.record("toy", raises).facts["traceback"]
    assert {path.name for path in store.directory("toy", half).iterdir()} == {"lock", "run.sqlite"}
    assert (store.directory("toy", raises) / "checkpoint.pt").exists()


@pytest.mark.slow
def test_a_node_that_dies(tmp_path, two_nodes, monkeypatch):
    """The runs that were on it go on elsewhere from the last checkpoint that came back, to the same numbers."""
    monkeypatch.setattr(cluster_module, "SLICE_SECONDS", 1.5)
    deaths, kill = [], threading.Timer(0.7, two_nodes.remove_node, [two_nodes.second, False])
    again = Sweep.again
    monkeypatch.setattr(Sweep, "again", lambda self, key, reason: (deaths.append(reason), again(self, key, reason)))
    tasks = [as_task(Task(seed, steps=150, is_slow=True)) for seed in range(5)]
    store = Store(tmp_path / "runs")

    def watch(watched) -> None:
        have_come_back = any(done > 0 for _, done, _ in watched.running.values())
        if have_come_back and len([*tmp_path.glob("process*")]) == 2 and kill.ident is None:
            kill.start()  # between two times that a run comes back

    outcome = run_tasks(EXPERIMENT, store, tasks, workers=2, data=tmp_path, command="", ray=two_nodes.address, watch=watch)
    assert deaths
    assert (outcome.finished, outcome.failed) == (5, [])
    assert [numbers(store, task) for task in tasks] == alone(tmp_path, tasks)
    assert not any(is_locked(store.directory("toy", task)) for task in tasks)


@pytest.mark.slow
def test_interrupted(tmp_path, two_nodes, monkeypatch):
    """What has come back is kept, nothing is left locked, and it goes on here to the same numbers."""
    monkeypatch.setattr(cluster_module, "SLICE_SECONDS", 0.3)
    task, store = as_task(Task(0, steps=100, is_slow=True)), Store(tmp_path / "runs")

    def watch(watched) -> None:
        if any(done > 0 for _, done, _ in watched.running.values()):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="0 of 1 runs are finished"):
        run_tasks(EXPERIMENT, store, [task], workers=1, data=None, command="", ray=two_nodes.address, watch=watch)
    assert store.record("toy", task).status == "interrupted"
    run_tasks(EXPERIMENT, store, [task], workers=0, data=None, command="")
    assert [numbers(store, task)] == alone(tmp_path, [task])


@pytest.mark.slow
def test_data_that_is_not_everywhere(tmp_path, two_nodes):
    sys.modules["ray"].shutdown()
    store, nowhere = Store(tmp_path), tmp_path / "nowhere"
    outcome = run_tasks(EXPERIMENT, store, [as_task(Task(0))], workers=1, data=nowhere, command="", ray=two_nodes.address)
    ((_, error),) = outcome.failed
    assert f"{nowhere} does not exist on" in error


@pytest.mark.slow
def test_a_cluster_of_our_own(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    ray.shutdown()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests'}")
    tasks = [as_task(Task(seed)) for seed in range(2)]
    store = Store(tmp_path / "runs")
    outcome = run_tasks(EXPERIMENT, store, tasks, workers=1, data=None, command="", ray="local")
    assert (outcome.finished, outcome.failed) == (2, [])
    assert [numbers(store, task) for task in tasks] == alone(tmp_path, tasks)
    assert not ray.is_initialized()


def test_ray_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[ray\]"):
        run_tasks(EXPERIMENT, Store(tmp_path), [as_task(Task(0))], workers=1, data=None, command="", ray="local")


def test_slices_of_work_end_with_the_same_numbers(tmp_path):
    task, files, errors, slices = as_task(Task(0)), {}, None, 0
    while errors is None:
        (files,), errors = work_for_a_while(EXPERIMENT, [(task, files)], tmp_path, "", tensorboard=False, seconds=0)
        slices += 1
    assert (errors, slices, files.keys()) == ([""], 3, {"run.sqlite"})
    store = Store(tmp_path / "runs")
    put(store.directory("toy", task), files)
    EXPERIMENT.do(Store(tmp_path / "alone"), task, None)
    assert numbers(store, task) == numbers(Store(tmp_path / "alone"), task)


def test_files_of_a_run_that_was_killed_while_writing(tmp_path):
    """What is sent has been put right, and no journal is left that would be played back over what returns."""
    store, task = Store(tmp_path), as_task(Task(0))
    with pytest.raises(Pause):
        EXPERIMENT.do(Store(tmp_path, seconds=0), task, None)
    directory = store.directory("toy", task)
    whole = (directory / "run.sqlite").read_bytes()
    if os.fork() == 0:
        database = sqlite3.connect(directory / "run.sqlite", isolation_level=None)
        database.execute("PRAGMA cache_size = 1")
        database.execute("BEGIN")
        for i in range(3000):
            database.execute("INSERT INTO metrics (step, name, value) VALUES (?, 'x', 1.0)", (i,))
        database.execute("UPDATE facts SET value = '\"torn\"'")
        os.kill(os.getpid(), 9)
    os.wait()
    assert (directory / "run.sqlite-journal").exists()
    files = take(directory)
    assert not (directory / "run.sqlite-journal").exists()
    assert files.keys() == {"run.sqlite", "checkpoint.pt"}
    put(tmp_path / "elsewhere" / "toy" / directory.name, files)
    for each in (store, Store(tmp_path / "elsewhere")):
        EXPERIMENT.do(each, task, None)
    assert numbers(store, task) == numbers(Store(tmp_path / "elsewhere"), task)
    assert len(whole) == len(files["run.sqlite"])


def test_files_are_written_in_an_order_that_tolerates_interruption(tmp_path, monkeypatch):
    """With the new database and the old checkpoint a run goes on from the latter."""
    task = as_task(Task(0))
    here, there = Store(tmp_path / "here", seconds=0), Store(tmp_path / "there", seconds=0)
    with pytest.raises(Pause):
        EXPERIMENT.do(here, task, None)
    put(there.directory("toy", task), take(here.directory("toy", task)))
    with pytest.raises(Pause):
        EXPERIMENT.do(there, task, None)
    files = take(there.directory("toy", task))
    written = []
    real = cluster_module.write_whole

    def write(path, produce):
        if written:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, produce)

    monkeypatch.setattr(cluster_module, "write_whole", write)
    with pytest.raises(KeyboardInterrupt):
        put(here.directory("toy", task), files)
    assert written == ["run.sqlite"]
    store = Store(tmp_path / "here")
    EXPERIMENT.do(store, task, None)
    EXPERIMENT.do(Store(tmp_path / "alone"), task, None)
    assert numbers(store, task) == numbers(Store(tmp_path / "alone"), task)
