"""The benchmark of step costs: measurements, tables from records, and failures as rows."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import hesscale
from hesscale.estimators import estimate
from hesscale.experiments import bench
from hesscale.experiments.bench import (
    command,
    ensemble,
    exact,
    measure,
    methods,
    networks,
    record_files,
    sweeps,
    tables,
    targets,
    workloads,
)
from hesscale.experiments.bench import settings as settings_module
from hesscale.experiments.bench.methods import METHODS, Step
from hesscale.experiments.bench.workloads import WORKLOADS

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # BackPACK's hooks
ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")
SMALL = workloads.Workload("small", "small", lambda: workloads.mlp(3, 4, 2, 2), (3,), 2, {"cpu": 5})


def quietly(_):
    pass


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run on the CPU: its folder and its record."""
    folder = tmp_path_factory.mktemp("bench")
    bench.main(["--quick", "--out", str(folder)])
    return folder, json.loads((folder / "step_cost.json").read_text(encoding="utf-8"))


def test_a_quick_run_has_ratios_of_its_methods(quick):
    folder, record = quick
    assert {path.name for path in folder.iterdir()} == {"step_cost.json", "step_cost.md", "step_cost.png"}
    (workload,) = record["workloads"]
    rows = {row["method"]: row for row in workload["rows"]}
    assert list(rows) == ["adam", "adahesscale", "adahesscale-gn", "adahesscale-every10"]
    for row in rows.values():
        assert row["ratio"]["q1"] <= row["ratio"]["median"] <= row["ratio"]["q3"]
        assert row["ratio"] == row["ratio_to_eager_adam"]
        assert row["memory_ratio"] > 0
        assert row["ran_as"] == "eager"
        assert len(row["times_ms"]) == 3
    assert rows["adam"]["ratio"]["median"] == rows["adam"]["memory_ratio"] == 1
    assert rows["adahesscale"]["memory_ratio"] > 1
    assert rows["adahesscale-every10"]["calls"] % 10 == 0
    assert record["finished"]
    assert record["command"] == f"python benchmarks/step_cost.py --quick --out {folder}"
    assert {"cpu", "cores", "threads", "gpu", "torch", "python", "commit"} <= record["machine"].keys()


def test_the_backward_pass_is_timed_separately(quick):
    _, record = quick
    (workload,) = record["workloads"]
    rows = {row["method"]: row for row in workload["rows"]}
    assert rows["adam"]["backward_ratio"]["median"] == 1
    assert rows["adahesscale"]["backward_ratio"]["median"] > 0
    header, *_ = tables.workload_table(workload, "cpu").header[-1:]
    assert header == tables.BACKWARD
    for row in workload["rows"]:
        row = dict(row)
        row.pop("backward_ratio")
        assert len(tables.workload_table({**workload, "rows": [row]}, "cpu").header) == len(tables.HEADER)


def test_backward_passes_are_averaged_block_by_block():
    step = Step(METHODS["adam"], "eager", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))
    case = measure.Case(step, calls=2)
    step.run()
    assert len(step.backward_times) == 1
    case.forget_backward()
    assert case.backward_ms(CPU) is None
    step.backward_times += [1e-3, 3e-3, 5e-3, 7e-3]
    assert case.backward_ms(CPU) == pytest.approx([2, 6])
    assert case.backward_ms(torch.device("cuda")) is None


@pytest.mark.parametrize("name", ["vit", "gpt", "nf-resnet", "nf-resnet-b1"])
def test_deep_networks_have_diagonals_for_all_parameters(name):
    workload = WORKLOADS[name]
    model, (x, y) = workload.model(CPU), workload.data(CPU)
    loss = workload.loss()(model(x[:1]), y[: len(y) // len(x)])
    hesscale.backward(loss)
    assert all(p.hess_diag.isfinite().all() and p.hess_diag.any() for p in model.parameters())


def test_the_table_is_made_from_the_record(quick):
    folder, record = quick
    text = (folder / "step_cost.md").read_text(encoding="utf-8")
    assert text == record_files.page(record, "step_cost")
    record = json.loads(json.dumps(record))
    record["workloads"][0]["rows"][1]["ratio"] = {"median": 123.0, "q1": 122.0, "q3": 124.0}
    assert "| 123.00 (122.00–124.00) |" in record_files.page(record, "step_cost")


def test_tables_are_inserted_between_markers(quick, tmp_path, capsys):
    folder, record = quick
    page, path = tmp_path / "page.md", folder / "step_cost.json"
    page.write_text(f"above\n\n{record_files.BEGIN}\nold\n{record_files.END}\nbelow\n", encoding="utf-8")
    for _ in range(2):
        bench.main(["--report", str(folder), "--into", str(page)])
    text = page.read_text(encoding="utf-8")
    assert text == f"above\n\n{record_files.BEGIN}\n\n{record_files.readme([(path, record)], page)}\n{record_files.END}\nbelow\n"
    link = text.partition("[Record](")[2].partition(")")[0]
    assert (tmp_path / link).samefile(path)
    capsys.readouterr()
    bench.main(["--report", str(folder)])
    assert "### Targets" in capsys.readouterr().out
    with pytest.raises(ValueError, match="needs one line"):
        record_files.insert(folder / "step_cost.md", "")
    with pytest.raises(ValueError, match="there are no records in"):
        record_files.load(tmp_path)
    for text in ("{}", "[]", "{"):
        (tmp_path / "stray.json").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"stray\.json is not (a record|JSON)"):
            record_files.load(tmp_path)


def test_a_report_rewrites_the_pages_of_records(quick, tmp_path):
    _, record = quick
    (tmp_path / "cpu").mkdir()
    page = tmp_path / "page.md"
    page.write_text(f"{record_files.BEGIN}\n{record_files.END}\n", encoding="utf-8")
    (tmp_path / "cpu/run.json").write_text(json.dumps(record), encoding="utf-8")
    bench.main(["--report", str(tmp_path), "--into", str(page)])
    assert (tmp_path / "cpu/run.md").read_text(encoding="utf-8") == record_files.page(record, "run")


def test_the_page_of_benchmarks_is_that_of_the_stored_records():
    page, folder = ROOT / "benchmarks/README.md", ROOT / "results/step_cost"
    stored = page.read_text(encoding="utf-8").partition(record_files.BEGIN)[2].partition(record_files.END)[0].strip()
    found = record_files.load(folder) if any(folder.rglob("*.json")) else []
    assert stored == (record_files.readme(found, page).strip() if found else "")
    assert all(
        record_files.page(record, path.stem) == path.with_suffix(".md").read_text(encoding="utf-8") for path, record in found
    )


def test_3c3d_is_that_of_deepobs():
    model = WORKLOADS["3c3d"].network()
    assert sum(p.numel() for p in model.parameters()) == 918_340
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_networks_fit_their_batches(workload):
    if workload.name in ("mlp-4x4096", "gpt2"):
        pytest.skip("too large to try")
    model = workload.model(CPU)
    x, y = workload.data(CPU)
    targets_of_one = len(y) // len(x)
    assert workload.loss()(model(x[:2]), y[: 2 * targets_of_one]).isfinite()
    twin = workload.model(CPU)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_gpt2_is_the_smallest():
    with torch.device("meta"):
        model = WORKLOADS["gpt2"].network()
    assert round(sum(p.numel() for p in model.parameters()), -5) == 124_400_000
    small = networks.gpt2(16, 2, 1, 50, 8)
    out = small(torch.randint(50, (2, 8)))
    assert out.shape == (16, 50)
    assert out.dtype == torch.float32
    assert small[-1].weight is small[0].embed.weight


def test_sweeps_are_those_of_appendix_d():
    assert [w.size for w in workloads.sweep("outputs")] == [2**k for k in range(4, 10)]
    assert [w.size for w in workloads.sweep("layers")] == [2**k for k in range(8)]
    last = workloads.sweep("layers")[2].network()
    assert [(m.in_features, m.out_features) for m in last if isinstance(m, nn.Linear)] == [
        (64, 512),
        *[(512, 512)] * 3,
        (512, 100),
    ]


@pytest.mark.parametrize("estimator", ["exact", "ggn"])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.MSELoss])
def test_dense_recursions_are_exact(loss, estimator):
    torch.manual_seed(0)
    model = workloads.mlp(3, 4, 2, 2).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    y = torch.randint(2, (5,)) if loss is nn.CrossEntropyLoss else torch.randn(5, 2, dtype=torch.float64)
    params = list(model.parameters())
    truth = estimate(estimator, loss()(model(x), y), params)
    exact.backward(exact.forward(model, loss(), x, y), gauss_newton=estimator == "ggn")
    torch.testing.assert_close([p.hess_diag for p in params], list(truth))
    torch.testing.assert_close([p.grad for p in params], list(torch.autograd.grad(loss()(model(x), y), params)))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_takes_steps(method):
    if method.source.startswith("Diag"):
        pytest.importorskip("backpack")
    step = Step(method, "eager", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))
    step.optimizer.param_groups[0]["lr"] = 0.01
    before = [p.detach().clone() for p in step.model.parameters()]
    for _ in range(2):
        step.run()
    assert all(not torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
    step.rest()
    assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.parametrize("name", ["backpack-ggn", "backpack-h"])
def test_the_update_uses_backpacks_diagonal(name, monkeypatch):
    pytest.importorskip("backpack")
    step = Step(METHODS[name], "eager", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))
    params = list(step.model.parameters())
    seen = []
    monkeypatch.setattr(step.optimizer, "step", lambda: seen.extend(p.hess_diag.clone() for p in params))
    step.run()
    model = SMALL.model(CPU)
    loss = SMALL.loss()(model(SMALL.data(CPU)[0]), SMALL.data(CPU)[1])
    truth = estimate({"backpack-ggn": "ggn", "backpack-h": "exact"}[name], loss, list(model.parameters()))
    torch.testing.assert_close(seen, list(truth), rtol=1e-4, atol=1e-6)


def test_missing_backpack_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "backpack", None)
    with pytest.raises(methods.NotMeasured, match="BackPACK is not installed"):
        Step(METHODS["backpack-h"], "eager", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))


def test_a_compiled_step_is_asked_for_by_mode(monkeypatch):
    asked = []

    class Compiled:
        mode = "traced"

        def __call__(self, x, y):
            asked.append(self.loss_fn(self.model, x, y))

    def compile_step(model, loss_fn, optimizer, *, backend, cuda_graph):
        asked.append((backend, cuda_graph))
        compiled = Compiled()
        compiled.model, compiled.loss_fn = model, loss_fn
        return compiled

    monkeypatch.setattr(hesscale, "compile_step", compile_step, raising=False)
    for mode in ("compiled", "graph"):
        Step(METHODS["adahesscale"], mode, SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU)).rest()
    assert asked == [("inductor", False), ("inductor", True)]
    rows = measure.rows_of(
        SMALL, [(METHODS["adam"], "eager"), (METHODS["adam"], "compiled")], CPU, rounds=2, block=1e-4, limit=9, log=quietly
    )
    assert [row["ran_as"] for row in rows] == ["eager", "traced"]
    assert rows[1]["ratio"]["median"] == 1 != rows[1]["ratio_to_eager_adam"]["median"]
    assert "(ran as traced)" in tables.cells(rows[1], "cpu")[1]
    assert "ran as traced" in targets.caveats(rows[1])


def test_a_version_without_compile_step_is_reported(monkeypatch):
    monkeypatch.delattr(hesscale, "compile_step", raising=False)
    with pytest.raises(methods.NotMeasured, match="no compile_step"):
        Step(METHODS["adam"], "compiled", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))


def test_a_failed_method_is_recorded_and_others_continue(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("it broke | here\nand more")

    calls = []

    def breaks_later(optimizer, closure=None):
        calls.append(1)
        if len(calls) > 12:  # more than it takes to warm up
            raise RuntimeError("broke later")

    late = type("Late", (torch.optim.SGD,), {"step": breaks_later})
    table = {**METHODS, "sgd": methods.Method("sgd", "early", broken), "bl89": methods.Method("bl89", "late", late)}
    monkeypatch.setattr(settings_module, "METHODS", table)
    said = []
    names = "adam,sgd,bl89,adahesscale"
    record = bench.run(bench.Settings(quick=True, methods=names, out=str(tmp_path), name="broken"), said.append, "test")
    rows = {row["method"]: row for row in record["workloads"][0]["rows"]}
    assert rows["sgd"]["error"] == "RuntimeError: it broke | here"
    assert rows["bl89"]["error"] == "RuntimeError: broke later"
    assert rows["adahesscale"]["ratio"]["median"] > 0
    assert any("it broke" in line for line in said)
    assert "it broke \\| here" in (tmp_path / "broken.md").read_text(encoding="utf-8")


def test_an_interrupted_run_keeps_its_results(tmp_path, monkeypatch):
    measured = iter([[{"method": "adam", "label": "Adam", "mode": "eager", "error": "none"}]])

    def rows_of(*_, **__):
        try:
            return next(measured)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(command, "rows_of", rows_of)
    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.Settings(only="mlp-64,mlp-64-rl", modes="eager", out=str(tmp_path)), quietly, "test")
    record = json.loads((tmp_path / "step_cost.json").read_text(encoding="utf-8"))
    assert [w["name"] for w in record["workloads"]] == ["mlp-64"]
    assert not record["finished"]
    assert "The run was not finished." in (tmp_path / "step_cost.md").read_text(encoding="utf-8")


def test_without_matplotlib_there_is_no_figure(quick, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "hesscale.experiments.lab.matplotlib_files")
    assert record_files.save(tmp_path, "step_cost", quick[1]) == [
        "step_cost.json",
        "step_cost.md",
        "no figure, for want of matplotlib.figure",
    ]


def test_a_machine_without_git_or_proc_is_described_too(monkeypatch):
    read_text = Path.read_text

    def missing(*_, **__):
        raise FileNotFoundError

    def without_proc(path, *arguments, **options):
        return missing() if str(path).startswith("/proc") else read_text(path, *arguments, **options)

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(Path, "read_text", without_proc)
    found = command.machine_of(bench.Settings())
    assert found["commit"] == "unknown"
    assert found["cpu"]


def test_a_stopwatch_times_updates_separately(monkeypatch):
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    step = Step(METHODS["sgd"], "eager", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))
    monkeypatch.setattr(step, "forward", lambda: wait(100))
    monkeypatch.setattr(step, "update", lambda loss: wait(1))
    watch = measure.Stopwatch(step)
    times, errors = measure.interleave([measure.Case(watch, 3)], 2, CPU)
    assert not errors
    assert times == {0: [101e3, 101e3]}
    assert watch.update_ms == [1e3, 1e3]


@pytest.mark.parametrize("name", ["sgd", "adahesscale", "exact-ggn", "exact-h", "backpack-ggn"])
def test_an_update_is_all_that_comes_after_the_forward_pass(name):
    if name.startswith("backpack"):
        pytest.importorskip("backpack")
    step = Step(METHODS[name], "eager", SMALL.model(CPU), SMALL.loss(), SMALL.data(CPU))
    step.optimizer.param_groups[0]["lr"] = 0.01
    before = [p.detach().clone() for p in step.model.parameters()]
    loss = step.forward()
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
    step.update(loss)
    assert all(p.grad is not None and not torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


def test_a_failed_adam_leaves_times_without_ratios(monkeypatch):
    def broken(*_):
        raise RuntimeError("no Adam")

    adam = methods.Method("adam", "Adam", broken)
    rows = measure.rows_of(SMALL, [(adam, "eager"), (METHODS["sgd"], "eager")], CPU, rounds=2, block=1e-4, limit=9, log=quietly)
    assert rows[0]["error"] == "RuntimeError: no Adam"
    assert rows[1]["ms"]["median"] > 0
    assert rows[1]["ratio"] is rows[1]["ratio_to_eager_adam"] is rows[1]["memory_ratio"] is None
    assert measure.rows_of(SMALL, [(adam, "eager")], CPU, rounds=2, block=1e-4, limit=9, log=quietly) == rows[:1]


def test_slow_and_unsafe_methods_are_left_out():
    adam = (METHODS["adam"], "eager")
    (row,) = measure.rows_of(SMALL, [adam], CPU, rounds=2, block=1e-4, limit=1e-9, log=quietly)
    assert row["error"].startswith("too slow: the first step took")
    (row,) = measure.rows_of(WORKLOADS["3c3d"], [(METHODS["backpack-h"], "eager")], CPU, rounds=1, block=1, limit=9, log=quietly)
    assert row["error"].startswith("left out: asks for")
    with pytest.raises(methods.NotMeasured, match="Linear and Tanh"):
        Step(METHODS["exact-h"], "eager", nn.Sequential(nn.Linear(3, 2), nn.ELU()), SMALL.loss(), SMALL.data(CPU))


def test_peak_memory_counts_tensors_that_exist_at_the_same_time():
    kept = []

    def use(_):
        for _ in range(3):
            torch.empty(1000, device=CPU)
        kept.append(torch.empty(500, device=CPU))

    _, peak = measure.with_peak(lambda: torch.empty(2000, device=CPU), use, CPU, from_the_start=False)
    assert peak == 4 * (2000 + 1000)
    assert measure.peak_of(object()) is None


@pytest.mark.parametrize(("from_the_start", "peak"), [(False, 70), (True, 900)])
def test_peak_memory_on_cuda_excludes_earlier_allocations(monkeypatch, from_the_start, peak):
    """After the warm-up, unless a graph was captured in it."""
    memory = {"now": 30, "peak": 30}

    def use(most):
        memory["peak"] = max(memory["peak"], most)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: memory["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: memory.update(peak=memory["now"]))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory["peak"])
    found = measure.with_peak(lambda: use(930), lambda _: use(100), torch.device("cuda"), from_the_start=from_the_start)
    assert found == (None, peak)


def test_a_sweep_has_slopes_and_stops_where_steps_are_too_slow(tmp_path, monkeypatch):
    small = [workloads.point("outputs", n, lambda n=n: workloads.mlp(64, 8, 1, n), n) for n in (2, 4, 8)]
    monkeypatch.setattr(settings_module, "sweep", lambda kind: small)
    stop = iter([{(METHODS["sgd"], "eager"): "too slow at outputs=2 already"}, {}, {}])
    monkeypatch.setattr(command, "too_slow_to_go_on", lambda *_: next(stop))
    settings = bench.Settings(sweep="outputs", quick=True, methods="adam,sgd,adahesscale", out=str(tmp_path))
    record = bench.run(settings, quietly, "test")
    assert {path.name for path in tmp_path.iterdir()} == {"outputs.json", "outputs.md", "outputs.png"}
    fitted = sweeps.sweep_of(record).slopes
    assert set(fitted) == {("adam", "eager"), ("adahesscale", "eager")}
    assert fitted["adam", "eager"].above_adam == 0
    text = (tmp_path / "outputs.md").read_text(encoding="utf-8")
    assert "- SGD (torch), eager, 4: too slow at outputs=2 already" in text
    assert "3 rounds, 30 are needed" in text


def test_what_is_too_slow_for_the_next_size():
    rows = [
        {"method": "adam", "mode": "eager", "ms": {"median": 1.0}},
        {"method": "sgd", "mode": "eager", "ms": {"median": 3000.0}},
        {"method": "bl89", "mode": "eager", "error": "too slow: the first step took 99 s"},
        {"method": "ggnmc", "mode": "eager", "error": "RuntimeError: else"},
    ]
    found = command.too_slow_to_go_on(rows, SMALL, 10)
    assert [method.name for method, _ in found] == ["sgd", "bl89"]


def test_slope_of_a_power_law():
    assert sweeps.fit([(x, 3 * x**1.5) for x in (1, 2, 4, 8)]) == pytest.approx(1.5)


def record_with(rows, **more):
    machine = {"device": "cpu"}
    return {
        "machine": machine,
        "sweep": None,
        "rounds": 30,
        "workloads": [{"name": "mlp-64", "size": None, "rows": rows}],
        **more,
    }


def measured(method, mode, ratio, times=30):
    spread = {"median": ratio, "q1": ratio, "q3": ratio}
    return {
        "method": method,
        "mode": mode,
        "ratio": spread,
        "ratio_to_eager_adam": spread,
        "ran_as": methods.MODES[mode],
        "times_ms": [ratio] * times,
    }


def test_targets_are_checked_against_the_record():
    rows = [
        measured("adahesscale", "eager", 1.21),
        measured("adahesscale-gn", "eager", 1.1),
        measured("adahesscale", "compiled", 0.5),
    ]
    found = {
        v.text: v
        for v in targets.target_results(
            [
                record_with(
                    rows, ensemble={"ratio": {"median": 4.5, "q1": 4, "q3": 5}, "ran_as": "compiled", "single_ms": [1] * 30}
                )
            ]
        )
    }
    assert found["CPU, mlp-64, eager, AdaHesScale / Adam in the same mode"].reached is False
    assert found["CPU, mlp-64, compiled, AdaHesScale / eager Adam"].reached is False
    assert found["CPU, mlp-64, compiled, AdaHesScale / Adam in the same mode"].reached is True
    gauss_newton = found["CPU, mlp-64, eager, AdaHesScaleGN / AdaHesScale"]
    assert gauss_newton.reached is True
    assert "1.10 times Adam's time, within the paper's 1.25" in gauss_newton.measured
    assert found["CPU, 3c3d, eager, AdaHesScale / Adam in the same mode"] == targets.TargetResult(
        "CPU, 3c3d, eager, AdaHesScale / Adam in the same mode", "≤ 1.70", "not measured", None
    )
    assert next(v for text, v in found.items() if "ensemble" in text).reached is True


def test_later_records_replace_earlier_ones_and_failures_are_shown():
    early, late = record_with([measured("adahesscale", "eager", 9)]), record_with([measured("adahesscale", "eager", 1)])
    assert targets.check_target(targets.TARGETS[0], [early, late]).reached is True
    failed = record_with([{"method": "adahesscale", "mode": "eager", "error": "it broke"}])
    assert targets.check_target(targets.TARGETS[0], [failed]).measured == "not measured: it broke"

    found = targets.check_target(targets.TARGETS[0], [late, failed])
    assert (found.measured, found.reached) == ("1.00 (1.00–1.00); a later run failed: it broke", True)


@pytest.mark.parametrize(("quantity", "mode"), [("ratio", "compiled"), ("ratio_to_eager_adam", "eager")])
def test_no_target_is_checked_if_adam_fell_back(quantity, mode):
    target = targets.Target("cpu", "mlp-64", "compiled", "adahesscale", 1.0, quantity)
    rows = [measured("adam", "eager", 1), measured("adam", "compiled", 1), measured("adahesscale", "compiled", 0.5)]
    assert targets.check_target(target, [record_with(rows)]).reached is True
    next(row for row in rows if row["method"] == "adam" and row["mode"] == mode)["ran_as"] = "traced"
    found = targets.check_target(target, [record_with(rows)])
    assert (found.measured, found.reached) == ("0.50 (0.50–0.50); Adam (torch) ran as traced", None)


class TestGaussNewton:
    @staticmethod
    def judge(*records):
        return targets.check_gauss_newton(targets.TARGETS[0], records)

    def test_both_rows_are_of_one_run(self):
        full, gn = measured("adahesscale", "eager", 2), measured("adahesscale-gn", "eager", 1)
        assert self.judge(record_with([full]), record_with([gn])).measured == "not measured"
        assert self.judge(record_with([full, gn]), record_with([measured("adahesscale-gn", "eager", 9)])).reached is True
        assert self.judge(record_with([full, measured("adahesscale-gn", "eager", 1, times=40)])).reached is None

    @pytest.mark.parametrize("which", [0, 1])
    def test_neither_may_have_fallen_back(self, which):
        rows = [measured("adahesscale", "eager", 2), measured("adahesscale-gn", "eager", 1)]
        rows[which]["ran_as"] = "traced"
        found = self.judge(record_with(rows))
        assert found.reached is None
        assert "ran as traced" in found.measured

    def test_a_later_failure_is_shown_with_the_measurement(self):
        full, gn = measured("adahesscale", "eager", 2), measured("adahesscale-gn", "eager", 1)
        failed = {"method": "adahesscale-gn", "mode": "eager", "error": "it broke"}
        found = self.judge(record_with([full, gn]), record_with([full, failed]))
        assert found.reached is True
        assert found.measured.endswith("a later run failed: it broke")
        assert self.judge(record_with([full, failed])).measured == "not measured: it broke"

    def test_three_decimals(self):
        rows = [measured("adahesscale", "eager", 1), measured("adahesscale-gn", "eager", 1.003)]
        found = self.judge(record_with(rows))
        assert found.reached is False
        assert found.measured.startswith("1.003 (1.003–1.003); 1.00 times Adam's time, within")


def test_rounded_values_are_on_the_same_side_of_the_limit():
    for ratio, text, reached in (
        (1.204, "1.204", False),
        (1.2001, "1.2001", False),
        (1.196, "1.20", True),
        (1.21, "1.21", False),
    ):
        found = targets.check_target(targets.TARGETS[0], [record_with([measured("adahesscale", "eager", ratio)])])
        assert (found.measured, found.reached) == (f"{text} ({text}–{text})", reached)
    ensemble = {"ratio": {"median": 3.996, "q1": 3.9, "q3": 4}, "ran_as": "compiled", "single_ms": [1] * 30}
    found = targets.check_ensemble([record_with([], ensemble=ensemble)])
    assert (found.measured, found.reached) == ("3.996 (3.900–4.000)", False)


def swept(sizes, above=0.0):
    def row(method, slope, size):
        spread = {"median": size**slope}
        return {"method": method, "mode": "eager", "ms": spread, "ratio": spread}

    points = [{"size": size, "rows": [row("adahesscale", above, size)]} for size in sizes]
    return record_with([], sweep="layers", workloads=points)


def test_a_slope_needs_four_sizes():
    few, enough, steep = swept((1, 2, 4)), swept((1, 2, 4, 8)), swept((1, 2, 4, 8), 0.0502)
    found, _ = targets.check_sweep("layers", [few])
    assert (found.measured, found.reached) == ("0.000, 0.000 above Adam's; 3 sizes, 4 are needed", None)
    assert targets.check_sweep("layers", [few, enough])[0].reached is True
    found, _ = targets.check_sweep("layers", [enough, steep, swept(())])
    assert (found.measured, found.reached) == ("0.050, 0.0502 above Adam's", False)


def test_targets_are_not_checked_with_too_few_rounds():
    found = targets.check_target(targets.TARGETS[0], [record_with([measured("adahesscale", "eager", 1.0, times=29)])])
    assert found.reached is None
    assert found.measured.endswith("29 rounds, 30 are needed")


def test_targets_and_left_out_methods_have_known_names():
    for target in targets.TARGETS:
        assert target.workload in WORKLOADS
        assert target.method in METHODS
        assert target.mode in METHODS[target.method].modes
    assert all(name in METHODS for w in WORKLOADS.values() for name in w.left_out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nothing"], "no workload is called 'nothing'; there are mlp-64, "),
        (["--methods", "adam,nothing"], "no method is called 'nothing'; there are adam, sgd, "),
        (["--modes", "fast"], "no mode is called 'fast'; there are eager, compiled, graph"),
        (["--sweep", "width"], "no sweep is called 'width'; there are outputs, layers"),
        (["--device", "tpu"], "no device is called 'tpu'; there are cpu, cuda"),
        (["--modes", "graph"], "the mode graph needs --device cuda"),
        (["--sweep", "layers", "--only", "3c3d"], "--sweep has its own workloads"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_cuda_must_be_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        bench.run(bench.Settings(device="cuda"), quietly, "test")


def test_a_plan_names_everything_by_default():
    work = settings_module.plan(bench.Settings())
    assert [w.name for w, _ in work] == ["mlp-64", "mlp-64-rl", "mlp-4x512", "mlp-4x512-b1", "3c3d"]
    pairs = [(method.name, mode) for method, mode in work[0][1]]
    assert {name for name, mode in pairs if mode == "eager"} == set(METHODS)
    assert {name for name, mode in pairs if mode == "compiled"} == {name for name, m in METHODS.items() if not m.source}
    assert {mode for _, mode in settings_module.plan(bench.Settings(device="cuda"))[0][1]} == {"eager", "compiled", "graph"}


def test_devices_have_folders_of_their_own():
    folders = [bench.Settings(device=device).folder for device in ("cpu", "cuda")]
    assert folders == [Path("out/step_cost/cpu"), Path("out/step_cost/cuda")]
    assert bench.Settings(device="cuda", out="here").folder == Path("here")


def test_the_command_is_the_one_that_was_given():
    settings = bench.Settings(only="3c3d,mlp-64", rounds=5, quick=True)
    assert settings.command("bench") == "bench --only 3c3d,mlp-64 --rounds 5 --quick"


def test_the_script_runs_from_a_checkout(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["step_cost.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "benchmarks/step_cost.py"), run_name="__main__")
    assert "--rounds" in capsys.readouterr().out


def test_an_ensemble_is_measured_against_single_runs_in_turn(monkeypatch):
    """Eager on both sides: the test is of the counting."""
    calls = {"together": 0, "alone": 0}
    make = hesscale.func.ensemble

    def ensemble_in_eager(*arguments, **options):
        step = make(*arguments, **options, backend="eager")
        monkeypatch.setattr(
            ensemble.Together, "run", lambda self: calls.update(together=calls["together"] + 1) or step(*self.batch)
        )
        return step

    def alone(*_):
        return lambda x, y: calls.update(alone=calls["alone"] + 1)

    monkeypatch.setattr(hesscale.func, "ensemble", ensemble_in_eager)
    monkeypatch.setattr(methods, "compiled_step", alone)
    monkeypatch.setattr(Step, "ran_as", "compiled")
    found = ensemble.ensemble_row(CPU, rounds=3, block=1e-9)
    assert calls == {"together": 4 + 1 + 3, "alone": 4 + 3 * 32}
    expected = [32 * one / whole for one, whole in zip(found["single_ms"], found["ensemble_ms"], strict=True)]
    assert found["ratio"]["median"] == pytest.approx(sorted(expected)[1], rel=1e-3)
    assert found["ran_as"] == "compiled and eager"
    assert "times the member-steps per second" in record_files.ensemble_line({"ensemble": found})
    result = targets.check_ensemble([record_with([], ensemble=found)])
    assert result.reached is None
    assert "ran as compiled and eager; 3 rounds" in result.measured

    def broken(*_):
        return lambda x, y: alone()(x, y) or (calls["alone"] > 110 and 1 / 0)

    monkeypatch.setattr(methods, "compiled_step", broken)
    assert ensemble.ensemble_row(CPU, rounds=3, block=1e-9)["error"].startswith("ZeroDivisionError")


def test_an_ensemble_that_cannot_be_measured_is_recorded(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no ensemble")

    monkeypatch.setattr(command, "ensemble_row", broken)
    settings = bench.Settings(quick=True, methods="adam", ensemble=True, out=str(tmp_path))
    assert bench.run(settings, quietly, "test")["ensemble"] == {"error": "RuntimeError: no ensemble"}
    assert "not measured: RuntimeError: no ensemble" in (tmp_path / "step_cost.md").read_text(encoding="utf-8")


class TestCommandLine:
    @pytest.fixture
    def invoke(self, monkeypatch):
        testing = pytest.importorskip("typer.testing")
        from hesscale.experiments.cli import app

        monkeypatch.setenv("COLUMNS", "200")
        return lambda *words: testing.CliRunner().invoke(app, list(words))

    def test_bench_has_every_option_of_the_script(self, invoke):
        result = invoke("bench", "--help")
        assert result.exit_code == 0
        assert all(f"--{field.name}" in result.output for field in fields(bench.Settings))

    def test_bench_prints_its_tables(self, invoke, tmp_path):
        result = invoke("bench", "--quick", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        assert "AdaHesScaleGN" in result.output
        assert json.loads((tmp_path / "step_cost.json").read_text())["command"] == f"hesscale bench --quick --out {tmp_path}"

    def test_bench_prints_slopes(self, invoke, tmp_path, monkeypatch):
        small = [workloads.point("layers", n, lambda n=n: workloads.mlp(64, 4, n, 3), 3) for n in (1, 2)]
        monkeypatch.setattr(settings_module, "sweep", lambda kind: small)
        result = invoke("bench", "--quick", "--sweep", "layers", "--methods", "adam", "--out", str(tmp_path))
        assert result.exit_code == 0, result.output
        assert "+0.000" in result.output

    def test_bench_refuses_unknown_names(self, invoke):
        result = invoke("bench", "--only", "nothing")
        assert result.exit_code == 2
        assert "no workload is called 'nothing'" in result.output

    def test_operators_are_listed(self, invoke):
        result = invoke("operators")
        assert result.exit_code == 0
        assert all(op.name in result.output for op in hesscale.operators())
        assert "TanhBackward0" in invoke("operators", "tanh").output
        assert "AddmmBackward0" not in invoke("operators", "tanh").output
        assert invoke("operators", "nothing").exit_code == 2

    def test_main_runs_the_app(self, monkeypatch):
        pytest.importorskip("typer")
        from hesscale.experiments import cli

        monkeypatch.setattr(sys, "argv", ["hesscale", "--help"])
        with pytest.raises(SystemExit, match="0"):
            cli.main()


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "hesscale.experiments.cli", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs typer: pip install .*\[experiments\]"):
        __import__("hesscale.experiments.cli")
