"""The experiment ``cost`` measures updates of every method, resumes, and reports the results."""

from __future__ import annotations

import dataclasses

import pytest

from hesscale.experiments.bench.measure import Case
from hesscale.experiments.bench.methods import METHODS, Method, Step
from hesscale.experiments.figures import cost
from hesscale.experiments.lab.experiment import as_task
from hesscale.experiments.lab.series_layout import check
from hesscale.experiments.lab.store import Result, Store

EXPERIMENT = cost.EXPERIMENT
TINY = cost.Settings(sweeps="outputs", most_outputs=16, methods="adam,adahesscale", rounds=2, block=1e-6)
MACHINE = {"cpu": "a processor", "torch": "2.0"}


def done(folder, settings):
    store, tasks = Store(folder), [as_task(task) for task in cost.tasks(settings)]
    for task in tasks:
        EXPERIMENT.do(store, task, None)
    return EXPERIMENT.results(store, tasks)


def test_the_papers_setting():
    asked = cost.tasks(EXPERIMENT.presets["paper"])
    assert [(t.sweep, t.size) for t in asked] == [("outputs", 2**k) for k in range(4, 10)] + [("layers", 2**k) for k in range(8)]
    assert {t.rounds for t in asked} == {30}
    assert asked[0].methods == "sgd,adam,adahesscale,adahesscale-gn,adahessian,ggnmc,bl89,exact-ggn,exact-h"
    assert EXPERIMENT.is_alone(map(as_task, asked))
    assert EXPERIMENT.work(EXPERIMENT.presets["paper"]).startswith("14 networks, 9 methods, 30 rounds of 20 ms")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sweeps": "width"}, "no sweep is called 'width'; there are outputs, layers"),
        ({"methods": "nothing"}, "no method is called 'nothing'; there are adam"),
        ({"device": "tpu"}, "no device is called 'tpu'"),
        ({"rounds": 0}, "rounds must be at least 1, not 0"),
        ({"most_layers": 0}, "the smallest network of the sweep over layers has more than 0 layers"),
    ],
)
def test_unknown_names_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        cost.tasks(dataclasses.replace(cost.Settings(), **changed))


def test_adam_always_runs():
    assert {task.methods for task in cost.tasks(dataclasses.replace(TINY, methods="bl89, bl89"))} == {"adam,bl89"}


def test_updates_are_part_of_steps(tmp_path):
    (result,) = done(tmp_path, dataclasses.replace(TINY, methods="adam,exact-ggn"))
    rows = {row["method"]: row for row in result.values["rows"]}
    assert list(rows) == ["adam", "exact-ggn"]
    for row in rows.values():
        assert 0 < row["ms"]["median"] < row["step_ms"]["median"]
        assert len(row["times_ms"]) == 2
    assert rows["adam"]["ratio"] == rows["adam"]["step_ratio"] == {"median": 1, "q1": 1, "q3": 1}
    assert result.values["parameters"] == 64 * 512 + 512 + 512 * 16 + 16
    for item in EXPERIMENT.sections([result])[0].items:
        check(item)


def test_a_method_that_fails_is_an_error_and_one_that_takes_too_long_is_left_out(tmp_path, monkeypatch):
    broken = Method("bl89", "broken", lambda *_: 1 / 0)
    monkeypatch.setitem(METHODS, "bl89", broken)
    with pytest.raises(RuntimeError, match="bl89: ZeroDivisionError: division by zero"):
        done(tmp_path / "broken", dataclasses.replace(TINY, methods="adam,bl89,sgd"))
    (result,) = done(tmp_path / "slow", dataclasses.replace(TINY, limit=1e-9))
    assert all(row["error"].startswith("too slow: the first step took") for row in result.values["rows"])
    for item in EXPERIMENT.sections([result])[0].items:
        check(item)


class Interrupted(BaseException):
    pass


class TestResume:
    """With times that the number of the round decides."""

    settings = dataclasses.replace(TINY, rounds=12)

    @pytest.fixture(autouse=True)
    def _measured(self, monkeypatch):
        self.begun, self.stop_at = [], None

        def interleave(cases, rounds, device, seed):
            if seed == self.stop_at:
                raise Interrupted
            self.begun.append(seed)
            for k, case in enumerate(cases):
                case.step.update_ms += [10 * (k + 1) + seed + i for i in range(rounds)]
            return {k: [100 * (k + 1) + seed + i for i in range(rounds)] for k in range(len(cases))}, {}

        def prepare(workload, method, mode, batch, **_):
            return Case(Step(method, mode, workload.model(batch[0].device), workload.loss(), batch), 1)

        monkeypatch.setattr(cost, "prepare", prepare)
        monkeypatch.setattr(cost, "interleave", interleave)
        monkeypatch.setattr(cost, "CHECKPOINT_SECONDS", -1)

    def interrupted(self, folder):
        self.stop_at = 10
        with pytest.raises(Interrupted):
            done(folder, self.settings)
        assert self.begun == [0, 5]
        self.stop_at, self.begun = None, []

    def test_the_rounds_that_were_measured_are_kept(self, tmp_path):
        (whole,) = done(tmp_path / "whole", self.settings)
        row = whole.values["rows"][1]
        assert row["times_ms"] == [20 + k for k in range(12)]
        assert row["ratio"]["median"] == pytest.approx((25 / 15 + 26 / 16) / 2, rel=1e-4)
        assert row["step_ratio"]["median"] == pytest.approx((205 / 105 + 206 / 106) / 2, rel=1e-4)
        self.begun = []
        self.interrupted(tmp_path / "parts")
        (result,) = done(tmp_path / "parts", self.settings)
        assert self.begun == [10]
        assert result.values == whole.values

    def test_but_not_those_of_another_machine(self, tmp_path, monkeypatch):
        self.interrupted(tmp_path)
        monkeypatch.setattr(cost, "machine", lambda: {"cpu": "another"})
        (result,) = done(tmp_path, self.settings)
        assert self.begun == [0, 5, 10]
        assert result.values["rows"][1]["times_ms"] == [20 + k for k in range(12)]


def measured(sweep, size, ratios, **changed):
    """Adam takes size² ms, others as many times that as ``ratios`` says; a text is why one was not measured."""

    def row(method, ratio):
        if isinstance(ratio, str):
            return {"method": method, "label": method, "mode": "eager", "error": ratio}
        spread = {"median": ratio, "q1": ratio - 0.25, "q3": ratio + 0.25}
        ms = {name: value * size**2 for name, value in spread.items()}
        return {"method": method, "label": method, "mode": "eager", "ms": ms, "ratio": spread, "step_ratio": spread}

    task = dataclasses.replace(cost.Task(sweep, size, "", 30, 20.0, 10.0, 1, "cpu"), **changed)
    return Result(task, {"rows": [row(method, ratio) for method, ratio in ratios.items()]}, {}, {"machine": MACHINE})


def items_of(section):
    return {item.name: item for item in section.items}


def test_averages_are_shown_with_the_published_ones():
    points = [
        measured("layers", 2, {"adam": 1, "adahesscale": 3.0, "exact-h": "too slow"}),
        measured("layers", 1, {"adam": 1, "adahesscale": 2.0, "exact-h": 8.0}),
        measured("outputs", 16, {"adam": 1, "adahesscale": 1.0, "exact-h": 4.0}),
    ]
    (section,) = EXPERIMENT.sections(points)
    assert "a processor, 1 thread, with torch 2.0" in section.text
    items, two_of_three = items_of(section), "6.00 (2 of 3 sizes)"
    assert items["averages"].rows == [
        ["Adam (torch)", "1.00", "1.00", "1.00", "1.00 – 1.00", "–", "1.00"],
        ["AdaHesScale", "1.00", "2.50", "2.00", "1.00 – 3.00", "2", "2.00"],
        ["exact H, dense recursion", "4.00", "8.00 (1 of 2 sizes)", two_of_three, "4.00 – 8.00", "–", two_of_three],
    ]
    times = items["layers-time-table"]
    assert times.header == ["method", "1", "2", "slope", "slope − Adam's"]
    assert times.rows[0] == ["Adam (torch)", "1", "4", "2.000", "+0.000"]
    assert times.rows[1] == ["AdaHesScale", "2", "12", "2.585", "+0.585"]
    assert times.rows[2] == ["exact H, dense recursion", "8", "–", "–", "–"]
    assert "exact-h at 2: too slow" in times.caption
    assert items["layers-ratio-table"].rows[1] == ["AdaHesScale", "2.00 (1.75–2.25)", "3.00 (2.75–3.25)"]
    line = items["layers-ratio"].series[1]
    assert (line.x, line.y, line.low, line.high) == ([1, 2], [2.0, 3.0], [1.75, 2.75], [2.25, 3.25])
    assert all(item.log_x and item.log_y for name, item in items.items() if name.endswith(("time", "ratio")))
    for item in section.items:
        check(item)


def test_findings_are_averages_of_steady_measurements():
    points = [
        measured("layers", size, {"adam": 1, "adahesscale": ratio, "adahessian": 0.9}) for size, ratio in ((1, 2.0), (2, 3.0))
    ]
    (section,) = EXPERIMENT.sections(points)
    (finding,) = section.findings  # the quartiles of AdaHessian are 0.65 and 1.15
    assert finding.text == (
        "An update of AdaHesScale takes 2.50 times as long as Adam's, on average over 2 networks (2.00 to 3.00). The paper has 2."
    )
    assert finding.figure == "layers-ratio"


def test_different_settings_have_separate_sections():
    points = [measured("layers", size, {"adam": 1}, threads=threads) for threads in (1, 2) for size in (1, 2)]
    first, second = EXPERIMENT.sections(points)
    assert "2 threads" in second.text
    assert not items_of(first).keys() & items_of(second).keys()


def test_measurements_of_the_same_network_are_merged():
    points = [measured("layers", 1, {"adam": 1, "bl89": 2.0}), measured("layers", 1, {"adam": 1, "bl89": "too slow", "sgd": 0.5})]
    (section,) = EXPERIMENT.sections(points)
    assert [row[:2] for row in items_of(section)["averages"].rows] == [
        ["Adam (torch)", "1.00"],
        ["BL89", "2.00"],
        ["SGD (torch)", "0.50"],
    ]
