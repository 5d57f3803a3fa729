"""The store of runs that are killed, copied, truncated or shared: results equal an undisturbed run, or an error is raised."""

from __future__ import annotations

import fcntl
import math
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
import toy_experiment
from torch.utils._pytree import tree_map
from toy_experiment import EXPERIMENT, Task, numbers

from hesscale.experiments.lab import locks
from hesscale.experiments.lab import run as run_module
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.locks import is_locked
from hesscale.experiments.lab.store import BusyRun, DamagedRun, Pause, Store, key_of, seeded

TASK = as_task(Task(seed=1, fault="raise once"))
SLOW = as_task(Task(seed=1, steps=50, is_slow=True))
FORK = multiprocessing.get_context("fork")
OURS = str(Path(run_module.__file__).parent)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch, quick_store):
    """All metrics are written immediately."""
    monkeypatch.setattr(run_module, "machine", lambda: {"cpu": "a cpu"})
    monkeypatch.setattr(run_module, "FLUSH_SECONDS", -1.0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The results of undisturbed runs."""
    store = Store(tmp_path_factory.mktemp("alone"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_experiment, "SLOW_SECONDS", 0.0)
        for task in (TASK, SLOW):
            EXPERIMENT.do(store, task, None)
    return {key_of("toy", task): numbers(store, task) for task in (TASK, SLOW)}


def half_done(store: Store, task=TASK) -> Path:
    """The directory of a run that failed two steps after its last checkpoint."""
    store.root.mkdir(parents=True, exist_ok=True)
    with pytest.raises(ValueError, match="told to fail"):
        EXPERIMENT.do(store, task, store.root)
    return store.directory("toy", task)


def test_facts_metrics_and_results_are_stored(tmp_path):
    store = Store(tmp_path)
    with store.open("toy", TASK, "hesscale toy") as run:
        for step, value in enumerate((0.1, math.nan, math.inf, -math.inf, -0.0, 1e-320, 3)):
            run.log(step, loss=value)
        run.progress(7, 7)
        run.finish(
            {"tensor": torch.arange(3), "parameter": torch.nn.Parameter(torch.ones(2)), "list": [1, None, "x"], "nan": math.nan}
        )
    result = store.result("toy", TASK)
    assert [step for step, _ in result.metrics["loss"]] == list(range(7))
    values = [value for _, value in result.metrics["loss"]]
    assert math.isnan(values.pop(1))
    assert values == [0.1, math.inf, -math.inf, 0.0, 1e-320, 3.0]
    assert result.values["tensor"].equal(torch.arange(3))
    assert result.values["parameter"].tolist() == [1, 1]
    assert result.values["list"] == [1, None, "x"]
    assert math.isnan(result.values["nan"])
    (record,) = store.records()
    assert record.status == "finished"
    assert record.task == TASK
    known = {
        "experiment": "toy",
        "command": "hesscale toy",
        "commits": ["abc"],
        "machine": {"cpu": "a cpu"},
        "resumed": 0,
        "done": 7,
        "total": 7,
        "error": "",
    }
    assert record.facts.items() >= known.items()


def test_a_finished_run_is_not_repeated_by_any_command(tmp_path):
    store = Store(tmp_path)
    EXPERIMENT.do(store, TASK, None, "first")
    before = store.record("toy", TASK).facts
    EXPERIMENT.do(Store(tmp_path, tensorboard=True), dict(reversed(TASK.items())), None, "second")
    assert store.record("toy", TASK).facts == before
    assert before["command"] == "first"


def test_an_exception_is_stored_and_the_run_can_resume(tmp_path, alone):
    store = Store(tmp_path)
    half_done(store)
    record = store.record("toy", TASK)
    assert record.status == "failed"
    assert record.facts["error"] == "ValueError: the toy was told to fail"
    assert "in misbehave" in record.facts["traceback"]
    EXPERIMENT.do(store, TASK, None)
    assert numbers(store, TASK) == alone[key_of("toy", TASK)]
    facts = store.record("toy", TASK).facts
    assert (facts["resumed"], facts["error"], facts["traceback"]) == (1, "", "")


def test_a_run_records_all_its_machines(tmp_path, monkeypatch):
    store = Store(tmp_path)
    half_done(store)
    monkeypatch.setattr(run_module, "machine", lambda: {"cpu": "another"})
    monkeypatch.setattr(run_module, "commit", lambda: "def")
    EXPERIMENT.do(store, TASK, None)
    facts = store.record("toy", TASK).facts
    assert (facts["machine"], facts["earlier_machines"], facts["commits"]) == (
        {"cpu": "another"},
        [{"cpu": "a cpu"}],
        ["abc", "def"],
    )


# ---- killed


def do_and_die(root: Path, lines: int) -> None:
    """Do the task in a process that kills itself after so many lines of the store's code."""
    count = 0

    def local(frame, event, argument):
        nonlocal count
        count += event == "line"
        if count == lines:
            os.kill(os.getpid(), signal.SIGKILL)
        return local

    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename.startswith(OURS) else None)
    EXPERIMENT.do(Store(root), TASK, None)
    sys.settrace(None)
    (root / "lines").write_text(str(count))


def exit_code(target, *arguments) -> int:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_any_line(tmp_path, alone, count):
    assert exit_code(do_and_die, tmp_path, 0) == 0
    total = int((tmp_path / "lines").read_text())
    for lines in random.Random(0).sample(range(1, total + 1), count):
        store = Store(tmp_path / str(lines))
        assert exit_code(do_and_die, store.root, lines) == -signal.SIGKILL
        assert {record.status for record in store.records()} <= {"interrupted", "finished"}
        EXPERIMENT.do(store, TASK, None)
        assert numbers(store, TASK) == alone[key_of("toy", TASK)], f"after {lines} lines of {total}"
        assert {path.name for path in store.directory("toy", TASK).iterdir()} <= {"lock", "run.sqlite", "checkpoint.pt"}


def test_killed_again_and_again(tmp_path, alone):
    choose, store, kills = random.Random(0), Store(tmp_path), 0
    while (record := store.record("toy", SLOW)) is None or record.status != "finished":
        process = FORK.Process(target=EXPERIMENT.do, args=(store, SLOW, None))
        process.start()
        process.join(choose.uniform(0.05, 0.3))
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills > 3
    assert numbers(store, SLOW) == alone[key_of("toy", SLOW)]


def test_copied_at_any_moment(tmp_path, alone, monkeypatch):
    """A copy resumes to the same results, or is found to be damaged."""
    choose, good = random.Random(0), 0
    process = FORK.Process(target=EXPERIMENT.do, args=(Store(tmp_path / "original"), SLOW, None))
    process.start()
    copies = []
    while process.is_alive():
        time.sleep(choose.uniform(0, 0.3))
        copies.append(Store(tmp_path / f"copy{len(copies)}"))
        try:
            shutil.copytree(tmp_path / "original", copies[-1].root)
        except (shutil.Error, FileNotFoundError):  # a partial file that is no more
            continue
    monkeypatch.setattr(toy_experiment, "SLOW_SECONDS", 0.0)
    for store in copies:
        try:
            EXPERIMENT.do(store, SLOW, None)
            good += numbers(store, SLOW) == alone[key_of("toy", SLOW)]
        except DamagedRun:
            continue
        assert numbers(store, SLOW) == alone[key_of("toy", SLOW)]
    assert good > 0


def test_paused_in_slices(tmp_path, alone):
    store, slices = Store(tmp_path, seconds=0), 0
    while (record := store.record("toy", TASK)) is None or record.status != "finished":
        slices += 1
        try:
            EXPERIMENT.do(store, TASK, None)
        except Pause:
            assert store.record("toy", TASK).status == "interrupted"
    assert slices == 3
    assert numbers(store, TASK) == alone[key_of("toy", TASK)]


# ---- torn and foreign files


def truncate(path: Path, size: float) -> None:
    with path.open("r+b") as file:
        file.truncate(int(size * path.stat().st_size))


def another_database(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE facts (x); PRAGMA user_version = 1;")


TORN = {
    "empty": lambda path: truncate(path, 0),
    "half": lambda path: truncate(path, 0.5),
    "text": lambda path: path.write_text("not ours"),
    "zeros": lambda path: path.write_bytes(b"\0" * 20000),
    "another database": another_database,
    "pickle that runs code": lambda path: torch.save(Path("x"), path),
    "tensor": lambda path: torch.save(torch.ones(2), path),
}


@pytest.mark.parametrize("damage", TORN.values(), ids=TORN)
@pytest.mark.parametrize("name", ["run.sqlite", "checkpoint.pt"])
def test_a_truncated_file_is_named(tmp_path, name, damage):
    store = Store(tmp_path)
    path = half_done(store) / name
    damage(path)
    with pytest.raises(DamagedRun, match=str(path)):
        EXPERIMENT.do(store, TASK, None)
    if name == "run.sqlite":
        (record,) = store.records()
        assert record.status == "damaged"
        assert str(path) in record.problem
        with pytest.raises(DamagedRun, match=str(path)):
            store.result("toy", TASK)


@pytest.mark.parametrize("damage", TORN.values(), ids=TORN)
def test_a_truncated_finished_run_gives_no_result(tmp_path, damage):
    store = Store(tmp_path)
    EXPERIMENT.do(store, TASK, None)
    path = store.directory("toy", TASK) / "run.sqlite"
    damage(path)
    with pytest.raises(DamagedRun, match=str(path)):
        store.result("toy", TASK)
    with pytest.raises(DamagedRun, match=str(path)):
        EXPERIMENT.do(store, TASK, None)


def plain(value):
    """The value with lists of all digits in place of tensors."""
    return str(tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, value))


def with_bit_flipped(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << position % 8
    return bytes(changed)


@pytest.mark.parametrize("checksums", [True, False], ids=["torch's default", "set_crc32_options(False)"])
def test_a_flipped_bit_changes_no_number_or_is_reported(tmp_path, checksums):
    """Torch alone would load other numbers from most of these files."""
    torch.serialization.set_crc32_options(checksums)
    try:
        path = half_done(Store(tmp_path)) / "checkpoint.pt"
    finally:
        torch.serialization.set_crc32_options(True)
    content, expected = path.read_bytes(), plain(run_module.load_checkpoint(path))
    reported = 0
    positions = range(0, len(content), max(1, len(content) // 200))
    for position in positions:
        path.write_bytes(with_bit_flipped(content, position))
        try:
            assert plain(run_module.load_checkpoint(path)) == expected, f"bit {position % 8} of byte {position}"
        except DamagedRun as error:
            assert f"{path} cannot be read" in str(error)  # noqa: PT017
            assert "remove it to start this run again" in str(error)  # noqa: PT017
            reported += 1
    assert len(positions) >= 60
    assert reported > 30


CHANGES = {
    "a metric": "UPDATE metrics SET value = value + 1e-9 WHERE id = 3",
    "no metric": "DELETE FROM metrics WHERE id = 20",
    "a result": "UPDATE results SET value = '11' WHERE name = 'steps'",
    "no result": "DELETE FROM results WHERE name = 'norm'",
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_finished_run_that_was_changed_gives_no_result(tmp_path, change):
    store = Store(tmp_path)
    EXPERIMENT.do(store, TASK, None)
    path = store.directory("toy", TASK) / "run.sqlite"
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(change).rowcount == 1
    with pytest.raises(DamagedRun, match=f"{path} is not as its run wrote it"):
        store.result("toy", TASK)


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    store, others = Store(tmp_path / "one"), Store(tmp_path / "other")
    directory, other = half_done(store), half_done(others, {**TASK, "seed": 2})
    shutil.copy(other / "checkpoint.pt", directory)
    with pytest.raises(DamagedRun, match=r"checkpoint\.pt does not belong"):
        EXPERIMENT.do(store, TASK, None)
    shutil.copy(other / "run.sqlite", directory)
    with pytest.raises(DamagedRun, match=r"run\.sqlite belongs to another run"):
        EXPERIMENT.do(store, TASK, None)
    assert "belongs to another run" in store.record("toy", TASK).problem
    another_database(directory / "run.sqlite")
    with pytest.raises(DamagedRun, match=r"run\.sqlite is not the database of a run; move it away"):
        EXPERIMENT.do(store, TASK, None)
    (directory / "run.sqlite").unlink()
    with pytest.raises(DamagedRun, match=r"run\.sqlite is missing"):
        EXPERIMENT.do(store, TASK, None)
    assert [record.status for record in store.records()] == ["damaged"]


def test_a_checkpoint_later_than_the_metrics_is_refused(tmp_path):
    store = Store(tmp_path)
    directory = half_done(store)
    with closing(sqlite3.connect(directory / "run.sqlite")) as database, database:
        database.execute("DELETE FROM metrics WHERE id > 6")
    with pytest.raises(DamagedRun, match="does not belong to the metrics"):
        EXPERIMENT.do(store, TASK, None)


def test_a_run_restarts_without_its_truncated_checkpoint(tmp_path, alone):
    store = Store(tmp_path)
    (half_done(store) / "checkpoint.pt").unlink()
    EXPERIMENT.do(store, TASK, None)
    assert numbers(store, TASK) == alone[key_of("toy", TASK)]


def test_a_checkpoint_that_could_not_be_loaded_is_refused_when_it_is_made(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(TypeError, match="a checkpoint must be of tensors"), store.open("toy", TASK) as run:
        run.checkpoint({"where": Path("x")})
    assert not (store.directory("toy", TASK) / "checkpoint.pt").exists()


def test_a_result_that_cannot_be_stored_is_named(tmp_path):
    store = Store(tmp_path)
    with pytest.raises(TypeError, match="where cannot be kept"), store.open("toy", TASK) as run:
        run.finish({"fine": 1, "where": Path("x")})
    assert store.record("toy", TASK).status == "failed"
    assert store.result("toy", TASK) is None


# ---- two at once


def test_a_run_cannot_be_opened_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "LOCK_SECONDS", 0.1)
    store = Store(tmp_path)
    process = FORK.Process(target=EXPERIMENT.do, args=(store, SLOW, None))
    process.start()
    while (record := store.record("toy", SLOW)) is None or "done" not in record.facts:
        time.sleep(0.01)
    assert record.status == "running"
    with pytest.raises(BusyRun, match=f"{store.directory('toy', SLOW)} is in use by process {process.pid}"):
        EXPERIMENT.do(Store(tmp_path), SLOW, None)
    process.kill()
    process.join()
    assert store.record("toy", SLOW).status == "interrupted"


def test_readers_do_not_block_a_run(tmp_path):
    """Readers poll all the time, and the run opens, logs and ends without a complaint; neither do they."""
    store, stop, seen, errors = Store(tmp_path), threading.Event(), set(), []
    directory = store.directory("toy", SLOW)

    def look() -> None:
        while not stop.is_set():
            is_locked(directory)
            for record in store.records():
                seen.add(record.status)
                errors.extend([record.problem] if record.problem else [])

    process = FORK.Process(target=EXPERIMENT.do, args=(store, SLOW, None))
    process.start()
    thread = threading.Thread(target=look)
    thread.start()
    process.join()
    stop.set()
    thread.join()
    assert process.exitcode == 0
    assert not errors
    assert seen >= {"running", "finished"}


def test_a_run_waits_for_readers(tmp_path):
    (tmp_path / "lock").touch()
    looking = (tmp_path / "lock").open()
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.2, looking.close).start()
    locks.lock(tmp_path).close()


def test_progress_is_reported_to_the_waiting_process(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "FLUSH_SECONDS", 100.0)
    store = Store(tmp_path)
    with store.open("toy", TASK) as run:
        run.log(0, loss=1.0)
        run.progress(3, 10)
        run.flushed = -math.inf
        run.log(1, loss=1.0)
        facts = store.record("toy", TASK).facts
        assert (facts["done"], facts["total"]) == (3, 10)


def test_steps_are_whole_numbers(tmp_path):
    store = Store(tmp_path)
    with store.open("toy", TASK) as run:
        run.log(torch.tensor(3), loss=torch.tensor(2.0))
        with pytest.raises(TypeError, match="integer"):
            run.log(0.5, loss=1.0)
        run.finish({})
    assert store.result("toy", TASK).metrics == {"loss": [(3, 2.0)]}


# ---- trouble with the disk


@pytest.mark.parametrize("is_there_again", [False, True])
def test_a_directory_removed_during_the_run(tmp_path, is_there_again):
    store = Store(tmp_path)
    with store.open("toy", TASK) as run:
        shutil.rmtree(run.directory)
        if is_there_again:
            with store.open("toy", TASK):
                pass
        with pytest.raises(DamagedRun, match="was removed during its run"):
            run.checkpoint({"step": 1})
    assert not (store.directory("toy", TASK) / "checkpoint.pt").exists()
    assert is_there_again == (store.record("toy", TASK) is not None)


def test_an_error_is_not_hidden_by_later_errors(tmp_path):
    with pytest.raises(ZeroDivisionError), Store(tmp_path).open("toy", TASK) as run:  # noqa: PT012
        shutil.rmtree(run.directory)
        run.pending.append((0, "loss", 1 / 0))


def test_a_full_disk(tmp_path, alone, monkeypatch):
    """The run fails, says so, and goes on from its last checkpoint once there is space."""
    store = Store(tmp_path)
    steps = 0
    real = run_module.Run.log

    def log(self, step, **values):
        nonlocal steps
        steps += 1
        if steps == 7:
            (pages,) = self.database.execute("PRAGMA page_count").fetchone()
            self.database.execute(f"PRAGMA max_page_count = {pages}")
        real(self, step, **values, **({"x" * 3000: 1.0} if steps >= 7 else {}))

    with monkeypatch.context() as patch:
        patch.setattr(run_module.Run, "log", log)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            EXPERIMENT.do(store, TASK, None)
    assert store.record("toy", TASK).status == "interrupted"
    EXPERIMENT.do(store, TASK, None)
    assert numbers(store, TASK) == alone[key_of("toy", TASK)]


def test_a_checkpoint_that_does_not_fit_leaves_the_last_one(tmp_path, alone, monkeypatch):
    store, real = Store(tmp_path), torch.save

    def save(saved, path):
        if isinstance(saved, dict) and saved["state"]["step"] == 8:
            Path(path).write_bytes(b"half")
            raise OSError("No space left on device")
        real(saved, path)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save)
        with pytest.raises(OSError, match="No space left"):
            EXPERIMENT.do(store, TASK, None)
    directory = store.directory("toy", TASK)
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint.pt", "lock", "run.sqlite"]
    assert torch.load(directory / "checkpoint.pt")["state"]["step"] == 4
    EXPERIMENT.do(store, TASK, None)
    assert numbers(store, TASK) == alone[key_of("toy", TASK)]


# ---- the rest


def test_requests(tmp_path):
    store = Store(tmp_path / "new")
    assert store.requests() == {}
    for command in ("first", "second"):
        store.request("toy", [TASK], command)
    store.request("other", [], "third")
    assert store.requests() == {"toy": ("second", [TASK]), "other": ("third", [])}
    path = store.root / "requests.sqlite"
    path.write_bytes(b"")  # as a process leaves it that was killed before it wrote
    assert store.requests() == {}
    path.write_text("not ours")
    for ask in (store.requests, lambda: store.request("toy", [TASK], "x")):
        with pytest.raises(DamagedRun, match=f"{path} cannot be read"):
            ask()


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    store = Store(tmp_path, tensorboard=True)
    directory = half_done(store)
    EXPERIMENT.do(store, TASK, None)
    events = accumulator.EventAccumulator(str(directory / "tensorboard")).Reload()
    logged = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("norm")]
    assert store.result("toy", TASK).metrics["norm"] == logged


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    store = Store(tmp_path, tensorboard=True)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        EXPERIMENT.do(store, TASK, None)
    assert not is_locked(store.directory("toy", TASK))


def test_seeded():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with seeded(1):
        x = torch.rand(2)
    assert before.equal(torch.get_rng_state())
    with seeded(1):
        assert x.equal(torch.rand(2))
