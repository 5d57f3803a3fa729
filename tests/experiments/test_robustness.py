"""Scores by step size are normalised as the paper says, divergence is the worst of all, and intervals are those of rliable."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.empty(0).device.type != "cpu", reason="agents act on the CPU")

pytest.importorskip("gymnasium")
np = pytest.importorskip("numpy")

from typer.testing import CliRunner  # noqa: E402

from hesscale.experiments.cli import app  # noqa: E402
from hesscale.experiments.figures import rl, robustness  # noqa: E402
from hesscale.experiments.figures._normalised import Method, aggregate, aggregate_tuned, methods_of, scores_of  # noqa: E402
from hesscale.experiments.lab.baseline import read_summary  # noqa: E402
from hesscale.experiments.lab.experiment import as_task  # noqa: E402
from hesscale.experiments.lab.plots import Plot  # noqa: E402
from hesscale.experiments.lab.report import Account, report_again, settings_of, write_report  # noqa: E402
from hesscale.experiments.lab.run_files import read_runs  # noqa: E402
from hesscale.experiments.lab.series_layout import check  # noqa: E402
from hesscale.experiments.lab.statistics import bootstrap_interval, iqm  # noqa: E402
from hesscale.experiments.lab.store import DamagedRun, Result, Store  # noqa: E402
from hesscale.experiments.rl.config import Config  # noqa: E402

EXPERIMENT = robustness.EXPERIMENT
SCORES = np.array([[0.10, 0.42, 0.95], [0.31, 0.77, 0.50], [0.05, 0.64, 0.88], [0.22, 0.90, 0.71], [0.48, 0.15, 0.99]])


def result(optimizer, size, seed, found, diverged_at=None, **task):
    config = Config(**{"algo": "ppo", "env": "Ant-v5", "steps": 100, **task}, optimizer=optimizer, step_size=size, seed=seed)
    return Result(config, {"mean_return": found, "diverged_at": diverged_at}, {}, {})


def some(**task):
    """Averages of 100, 300, 150 and, because of a divergence, 150; the worst run has 90."""
    return [
        *(result("adam", 1e-3, seed, found, **task) for seed, found in enumerate((90.0, 110.0))),
        *(result("adam", 1e-2, seed, found, **task) for seed, found in enumerate((200.0, 400.0))),
        *(result("scaled-adam", 1e-3, seed, found, **task) for seed, found in enumerate((120.0, 180.0))),
        result("scaled-adam", 1e-2, 0, 210.0, **task),
        result("scaled-adam", 1e-2, 1, 1000.0, diverged_at=50, **task),
    ]


def of_env(env, results):
    return scores_of(env, results, methods_of(results))


# ----------------------------------------------------------------------------------------------------------------- statistics


def test_iqm_is_the_mean_without_the_outer_quarters():
    assert iqm(SCORES) == pytest.approx((0.31 + 0.42 + 0.48 + 0.50 + 0.64 + 0.71 + 0.77 + 0.22 + 0.88) / 9)
    assert iqm(np.arange(8.0).reshape(2, 4)) == 3.5
    assert iqm([[5.0, -100.0, 7.0]]) == pytest.approx(-88 / 3)  # a quarter of three is none
    np.testing.assert_allclose(iqm(np.stack([SCORES, 2 * SCORES])), [iqm(SCORES), 2 * iqm(SCORES)])


def test_intervals_are_those_of_rliable():
    """rliable 1.2 with 200,000 resamples: IQM 0.54778, interval 0.39556 to 0.68667."""
    assert iqm(SCORES) == pytest.approx(0.54778, abs=1e-5)
    assert bootstrap_interval(SCORES, resamples=20_000) == pytest.approx((0.39556, 0.68667), abs=0.004)


def test_runs_are_drawn_within_environments():
    scores = np.array([[0.0, 10.0], [1.0, 11.0]])
    seen = []
    bootstrap_interval(scores, lambda drawn: seen.append(drawn) or drawn.mean((-1, -2)), resamples=200)
    (drawn,) = seen
    assert drawn.shape == (200, 2, 2)
    assert set(drawn[..., 0].ravel()) == {0.0, 1.0}
    assert set(drawn[..., 1].ravel()) == {10.0, 11.0}
    apart = drawn[:, :, 0] != drawn[:, :, 1] - 10
    assert 0.3 < apart.mean() < 0.7  # each environment draws its own
    assert 0.3 < (drawn[:, 0] == drawn[:, 1]).mean() < 0.7  # with replacement


def test_intervals_depend_on_the_seed_alone():
    first, same, other = (bootstrap_interval(SCORES, resamples=50, seed=seed) for seed in (0, 0, 1))
    assert first == same != other
    low, high = bootstrap_interval(SCORES, level=0.5)
    assert bootstrap_interval(SCORES)[0] < low < iqm(SCORES) < high < bootstrap_interval(SCORES)[1]
    assert bootstrap_interval([[0.3, 0.5]]) == (0.4, 0.4)


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ([1.0, 2.0], {}, r"scores has the shape \(2,\), expected \(runs, environments\)"),
        ([[1.0, np.nan]], {}, "not finite"),
        (SCORES, {"resamples": 0}, "resamples=0 must be positive"),
        (SCORES, {"level": 95}, "level=95 between 0 and 1"),
    ],
)
def test_invalid_scores_have_no_interval(scores, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(scores, **options)


# --------------------------------------------------------------------------------------------------------------------- scores


def test_scores_are_normalised_by_averages_and_divergence_is_the_worst():
    scores = of_env("Ant-v5", some())
    assert (scores.low, scores.high) == (100.0, 300.0)
    assert {cell: scores.of(cell) for cell in scores.returns} == {
        (Method("adam"), 1e-3): pytest.approx({0: -0.05, 1: 0.05}),
        (Method("adam"), 1e-2): pytest.approx({0: 0.5, 1: 1.5}),
        (Method("scaled-adam"), 1e-3): pytest.approx({0: 0.1, 1: 0.4}),
        (Method("scaled-adam"), 1e-2): pytest.approx({0: 0.55, 1: -0.05}),
    }
    means = scores.means(Method("scaled-adam"))
    assert list(means) == [1e-3, 1e-2]
    assert means[1e-2].mean == pytest.approx(0.25)
    assert means[1e-2].error == pytest.approx(0.3)
    assert scores.diverged[Method("scaled-adam"), 1e-2] == 1


def test_a_run_without_an_episode_is_the_worst_and_equal_returns_have_no_scores():
    found = [result("adam", 1e-3, 0, 2.0), result("adam", 1e-2, 0, None), result("adam", 1, 0, 1.0)]
    assert of_env("Ant-v5", found).of((Method("adam"), 1e-2)) == {0: 0.0}
    assert of_env("Ant-v5", found[:1]) is None
    assert of_env("Ant-v5", found[1:2]) is None


def test_the_aggregate_takes_seeds_that_all_environments_have():
    first, second = some(), some(env="Hopper-v5")
    known = [of_env("a", first), of_env("b", second[1:])]
    points = aggregate(known, Method("adam"))
    assert points[1e-3].interval is None  # one seed is left
    matrix = [[scores.of((Method("adam"), 1e-2))[seed] for scores in known] for seed in (0, 1)]
    assert points[1e-2].iqm == iqm(matrix)
    assert points[1e-2].interval == bootstrap_interval(matrix)
    known = [of_env("a", first), of_env("b", second[2:])]
    assert list(aggregate(known, Method("adam"))) == [1e-2]


def test_a_section_has_a_plot_for_each_environment_and_one_for_all():
    results = [*some(), *some(env="hesscale/UR-Reacher-2D-v0"), *some(env="Humanoid-v5", steps=500), *some(algo="a2c")]
    ppo, a2c = robustness.sections(results)
    sensitivity, overall, total, _, *plots = ppo.items
    assert [plot.title for plot in plots] == ["PPO on Ant-v5", "PPO on hesscale/UR-Reacher-2D-v0", "PPO on Humanoid-v5"]
    for item in [*ppo.items, *a2c.items]:
        check(item)
    names = [item.name for item in [*ppo.items, *a2c.items]]
    assert len(set(names)) == len(names) == 12
    assert "100 environment steps on Ant-v5, hesscale/UR-Reacher-2D-v0; 500 environment steps on Humanoid-v5." in ppo.text
    assert "missing" not in ppo.text
    adam, scaled = plots[0].series
    assert (adam.label, adam.x, adam.y) == ("Adam", [1e-3, 1e-2], [0.0, 1.0])
    assert scaled.y == pytest.approx([0.25, 0.25])
    assert (scaled.low[1], scaled.high[1]) == pytest.approx((-0.05, 0.55))
    assert plots[0].log_x
    assert "0 is a return of 100.0, and 1 is a return of 300.0" in plots[0].caption
    assert total.title == "PPO over 3 environments"
    assert total.series[0].y == pytest.approx([0.0, 1.0])  # of three times 0.5 and 1.5 each
    assert sensitivity.rows[0] == ["Ant-v5", "Adam", "1.00 ± 0.50 at 0.01", "0.00 ± 0.05 at 0.001", "1.00", "0 of 4"]
    assert sensitivity.rows[1][4:] == ["0.00", "1 of 4 (0.01: 1)"]
    assert overall.rows[0][3:] == ["1.00", "1.00 ± 0.00", "0 of 12"]
    assert overall.rows[1][5] == "3 of 12 (0.01: 3)"


def test_findings_are_the_scores_over_step_sizes_and_what_diverged():
    """Scores of Adam are 0, 1 and 0.5 at three step sizes, and those of Scaled Adam 0.25 throughout."""
    more = [result("adam", 1e-1, seed, 200.0) for seed in (0, 1)] + [result("scaled-adam", 1e-1, seed, 150.0) for seed in (0, 1)]
    (section,) = robustness.sections([*some(), *more])
    first, *_, last = section.findings
    texts = "0.25 to 0.25 for Scaled Adam and 0.00 to 1.00 for Adam"
    assert first.text == f"PPO, scores on Ant-v5 at step sizes 0.001 to 0.1: {texts}."
    assert (first.figure, last.text) == ("ppo-all", "PPO: 1 of 12 runs diverged: 1 of 6 with Scaled Adam.")
    (section,) = robustness.sections(some())  # two step sizes do not show a range
    share, _ = [finding.text for finding in section.findings]
    best = "25 % (Scaled Adam, step size 0.001)"
    assert share == f"PPO: the best step size on Ant-v5 reaches {best} of the score of Adam at its best step size."


def test_a_finding_compares_with_an_adam_that_is_tuned_in_each_environment():
    found = [
        result(optimizer, 1e-3, seed, mean + seed, env=env)
        for env, adam, scaled in (("Ant-v5", 100.0, 80.0), ("Hopper-v5", 50.0, 40.0))
        for optimizer, mean in (("adam", adam), ("scaled-adam", scaled), ("untrained", 0.0))
        for seed in (0, 1)
    ]
    (section,) = robustness.sections(found)
    expected = "one step size for all 2 environments reaches 80 % (Scaled Adam, step size 0.001) of"
    assert expected in section.findings[0].text


def untrained(found, **task):
    return [result("untrained", 0.0, seed, found, **task) for seed in (0, 1)]


def test_the_score_of_untrained_agents_is_zero():
    """Averages are 100, 300, 150 and 150; untrained agents have 200."""
    scores = of_env("Ant-v5", [*some(), *untrained(200.0)])
    assert (scores.low, scores.high) == (200.0, 300.0)
    assert scores.of((Method("adam"), 1e-3)) == pytest.approx({0: -1.1, 1: -0.9})
    assert {method.optimizer for method, _ in scores.returns} == {"adam", "scaled-adam"}
    assert of_env("Ant-v5", [*some(), *untrained(1000.0)]) is None  # nothing learned
    (section,) = robustness.sections([*some(), *untrained(200.0), *some(env="Hopper-v5")])
    assert "0 is the return of untrained agents" in section.text
    assert "These environments have no untrained agents, so there 0 is the lowest average: Hopper-v5." in section.text
    assert "untrained" not in {series.label for item in section.items[-2:] for series in item.series}


def test_trust_radii_are_compared_with_each_other_and_with_tuned_adam():
    """Adam's best step sizes differ between the environments; untrained agents have a return of 0."""
    adam = [result("adam", size, 0, found) for size, found in ((1e-3, 50.0), (1e-2, 100.0))]
    adam += [result("adam", size, 0, found, env="Hopper-v5") for size, found in ((1e-3, 200.0), (1e-2, 20.0))]
    scaled = [
        result("scaled-adam", 1, 0, found, env=env, trust_radius=radius)
        for radius, returns in ((1e-7, (90.0, 140.0)), (1e-6, (40.0, 150.0)))
        for env, found in zip(("Ant-v5", "Hopper-v5"), returns, strict=True)
    ]
    floor = [result("untrained", 0.0, 0, 0.0, env=env) for env in ("Ant-v5", "Hopper-v5")]
    found = [*adam, *scaled, *floor]
    methods = methods_of(found)
    known = [scores_of(env, [r for r in found if r.task.env == env], methods) for env in ("Ant-v5", "Hopper-v5")]
    assert aggregate_tuned(known, Method("adam")).iqm == 1.0
    assert aggregate_tuned(known[:1], Method("scaled-adam")) is None  # each has a radius
    (section,) = robustness.sections(found)
    (table,) = [item for item in section.items if item.name == "ppo-beside-adam"]
    assert [row[:5] for row in table.rows] == [
        ["Adam", "best of each environment", "1.00", "100", "–"],
        ["Scaled Adam, Δ = 1e-7", "1", "0.80", "80", "70, Hopper-v5"],
        ["Scaled Adam, Δ = 1e-6", "1", "0.57", "57", "40, Ant-v5"],
    ]
    (plot,) = [item for item in section.items if item.name == "ppo-by-radius"]
    scaled, best = plot.series
    assert (scaled.label, scaled.x, scaled.y) == ("Scaled Adam, α = 1", [1e-7, 1e-6], pytest.approx([0.8, 0.575]))
    assert (best.y, best.dashed) == ([1.0, 1.0], True)
    assert "Δ = 1e-7, 1e-6 for scaled optimizers" in section.text
    for item in section.items:
        check(item)
    shares = {"mean": 0.5, "critic": 0.25}
    counted = [
        dataclasses.replace(r, values=r.values | ({"scaled_share": shares} if r.task.trust_radius == 1e-7 else {})) for r in found
    ]
    (section,) = robustness.sections(counted)
    (table,) = [item for item in section.items if item.name == "ppo-beside-adam"]
    assert table.header[5] == "steps shortened, %"
    assert [row[5] for row in table.rows] == ["–", "38", "–"]


def test_a_section_says_what_is_missing():
    (found,) = robustness.sections([*some()[:-1], *[dataclasses.replace(r, task=t) for r, t in flat()]])
    assert "Some runs are missing: this report has 15 of 16." in found.text
    assert (
        "These environments are left out, because no average is above that of untrained agents, all are the same, or no episode "
        "ended: Hopper-v5." in found.text
    )
    assert [item.title for item in found.items][-1] == "PPO on Ant-v5"
    (found,) = robustness.sections([result("adam", 1e-3, 0, None)])
    assert found.items == []


def flat():
    same = [result(*cell, seed, 5.0) for seed in (0, 1) for cell in (("adam", 1e-3), ("adam", 1e-2))]
    same += [result(*cell, seed, 5.0) for seed in (0, 1) for cell in (("scaled-adam", 1e-3), ("scaled-adam", 1e-2))]
    return [(found, dataclasses.replace(found.task, env="Hopper-v5")) for found in same]


def test_an_environment_with_several_lengths_counts_as_several():
    found, other = robustness.sections([*some(), *some(steps=2000), *some(eps=1e-8)])
    assert not {item.name for item in found.items} & {item.name for item in other.items}
    assert [item.title for item in found.items[4:]] == ["PPO on Ant-v5, 100 steps", "PPO on Ant-v5, 2,000 steps"]


# ---------------------------------------------------------------------------------------------------------------------- tasks


def test_the_paper_s_grid_gives_humanoids_more_steps():
    pytest.importorskip("mujoco")
    asked = EXPERIMENT.tasks(robustness.PRESETS["paper"])
    assert len(asked) == 10 * 10 * 2 * (3 * 9 + 1)
    assert {task.env for task in asked if task.steps == 10_000_000} == {"Humanoid-v5", "HumanoidStandup-v5"}
    assert {task.steps for task in asked} == {2_000_000, 10_000_000}
    assert {task.optimizer for task in asked} == {"adam", "scaled-adam", "scaled-adahesscale", "untrained"}
    assert sorted({task.step_size for task in asked}) == [0.0, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1.0]
    assert EXPERIMENT.work(robustness.PRESETS["paper"]) == "5600 agents, 20,160,000,000 environment steps in all"
    same = EXPERIMENT.tasks(robustness.Settings(env="Humanoid-v5", steps=50))
    assert {task.steps for task in same} == {50}


def test_all_optimizers_are_compared_whatever_the_trust_radius():
    """Scores are normalised over all that a section has."""
    asked = EXPERIMENT.tasks(robustness.Settings(trust_radius="1e-6", step_size="1e-4,1e-3", seeds=1))
    values = {"mean_return": 1.0, "mean_return_of_episodes": 1.0, "diverged_at": None, "steps_per_second": 1.0}
    results = [Result(task, {**values, "mean_return": -float(k)}, {}, {}) for k, task in enumerate(asked)]
    (section,) = robustness.sections(results)
    assert {row[1] for row in section.items[0].rows} == {"Adam", "Scaled Adam", "Scaled AdaHesScale"}


def test_tasks_are_those_of_rl():
    shared = {"algo": "a2c", "optimizer": "adam", "step_size": "1e-3,1", "steps": 10, "eps": 1e-8, "half_value_loss": True}
    asked = EXPERIMENT.tasks(robustness.Settings(**shared))
    assert [task for task in asked if task.optimizer != "untrained"] == rl.tasks(rl.Settings(**shared))


def test_trust_radii_apply_only_to_scaled_optimizers():
    asked = rl.tasks(rl.Settings(optimizer="adam,scaled-adam", seeds=1, trust_radius="1e-7,1e-6,1e-7"))
    assert [(task.optimizer, task.trust_radius) for task in asked] == [
        ("adam", Config.trust_radius),
        ("scaled-adam", 1e-7),
        ("scaled-adam", 1e-6),
    ]


def test_an_adaptive_radius_is_a_separate_method():
    asked = EXPERIMENT.tasks(robustness.Settings(optimizer="adam,scaled-adam@1", step_size="1e-3", seeds=1, target_kl=0.01))
    assert [(task.optimizer, task.target_kl) for task in asked] == [("adam", 0), ("scaled-adam", 0.01), ("untrained", 0)]
    found = [result(task.optimizer, task.step_size, 0, 1.0 + k, target_kl=task.target_kl) for k, task in enumerate(asked)]
    found += [result("scaled-adam", 1.0, 0, 5.0), result("scaled-adam", 1.0, 0, 4.0, trust_radius=1e-6)]
    labels = {method.label: method.name for method in methods_of(found).values()}
    assert labels["Scaled Adam, Δ = 1e-8, KL = 0.01"] == "Scaled Adam with Δ = 1e-8 and KL = 0.01"
    (section,) = robustness.sections(found)
    assert {row[1] for row in section.items[0].rows} == labels.keys() - {"untrained"}
    assert "at first, where it adapts to a KL divergence" in section.text
    (plot,) = [item for item in section.items if item.name == "ppo-by-radius"]
    assert [(line.label, line.x) for line in plot.series[:2]] == [
        ("Scaled Adam, α = 1", [1e-8, 1e-6]),
        ("Scaled Adam, KL = 0.01, α = 1", [1e-8]),
    ]


def test_a_decaying_radius_is_a_separate_method():
    settings = robustness.Settings(
        algo="a2c,ppo", optimizer="adam,scaled-adam@1", step_size="1e-3", seeds=1, radius_decay=100_000
    )
    asked = EXPERIMENT.tasks(settings)
    assert {(task.optimizer, task.radius_decay) for task in asked} == {("adam", 0), ("scaled-adam", 100_000), ("untrained", 0)}
    found = [result("scaled-adam", 1.0, 0, 5.0, radius_decay=100_000), result("scaled-adam", 1.0, 0, 4.0)]
    assert [method.label for method in methods_of(found).values()] == [
        "Scaled Adam, Δ = 1e-8/(1 + t/100000)",
        "Scaled Adam, Δ = 1e-8",
    ]
    assert [method.label for method in methods_of(found[:1]).values()] == ["Scaled Adam"]
    (section,) = robustness.sections([*found, result("untrained", 0.0, 0, 0.0), result("adam", 1e-3, 0, 1.0)])
    assert "at first, where it adapts to a KL divergence or decays" in section.text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_kl": -0.01}, "target_kl must be at least 0, not -0.01"),
        ({"target_kl": 0.01, "radius_decay": 10}, "target_kl and radius_decay both change the trust radius"),
        ({"radius_decay": -1}, "radius_decay must be at least 0, not -1"),
        ({"humanoid_steps": -1}, "humanoid_steps must be at least 0, not -1"),
        ({"step_size": "1e-3;1"}, "a step size must be a number, not '1e-3;1'"),
        ({"trust_radius": "1e-7,-1"}, "trust_radius: a trust radius must be positive, not -1"),
        ({"steps": 0}, "steps must be at least 1, not 0"),
        ({"optimizer": "sgd"}, "no optimizer is called 'sgd'"),
        ({"env": "cartpole-v1"}, "similar names are CartPole-v1"),
    ],
)
def test_bad_settings_are_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        EXPERIMENT.tasks(robustness.Settings(**changed))


def test_the_smoke_preset_runs(tmp_path):
    settings = dataclasses.replace(robustness.PRESETS["smoke"], steps=60, seeds=1)
    store, asked = Store(tmp_path), [as_task(task) for task in EXPERIMENT.tasks(settings)]
    for task in asked:
        EXPERIMENT.do(store, task, None)
    (found,) = robustness.sections(EXPERIMENT.results(store, asked))
    assert [len(item.series) for item in found.items if isinstance(item, Plot)] == [2, 2]


# ------------------------------------------------------------------------------------------------------------ runs that are kept


def kept_report(folder, results=None, command="hesscale robustness --some"):
    """A report of one environment whose curves have a value that is not finite."""
    results = [*some(), *untrained(50.0)] if results is None else results
    for k, found in enumerate(results):
        found.metrics["charts/episodic_return"] = [(10, 1.5 + k), (20, float("nan")), (30, 1 / 3)]
        found.metrics["losses/value_loss"] = [(10, 1.0)]
    account = Account("robustness", "title", command, robustness.sections(results), len(results))
    account.results, account.curves, account.statuses["finished"] = results, EXPERIMENT.curves, len(results)
    account.settings = settings_of([dataclasses.asdict(found.task) for found in results])
    account.commits, account.started, account.finished = ["abc"], "2026-01-01", "2026-01-02"
    write_report([account], folder, page=False)
    return results


def test_a_report_can_be_made_again_from_its_stored_runs(tmp_path):
    results = kept_report(tmp_path / "first")
    again = read_runs(tmp_path / "first" / "robustness-runs.json.gz", Config)
    assert [(r.task, r.values) for r in again] == [(r.task, r.values) for r in results]
    assert again[2].metrics["charts/episodic_return"] == [(10, 3.5), (20, pytest.approx(np.nan, nan_ok=True)), (30, 0.333333)]
    assert set(again[2].metrics) == {"charts/episodic_return"}
    report_again([tmp_path / "first"], tmp_path / "second", page=False)
    names = {path.relative_to(tmp_path / "first") for path in (tmp_path / "first").rglob("*") if path.is_file()}
    assert names == {path.relative_to(tmp_path / "second") for path in (tmp_path / "second").rglob("*") if path.is_file()}
    told = CliRunner().invoke(app, ["report", "--again", str(tmp_path / "first"), "--out", str(tmp_path / "third"), "--no-page"])
    assert told.exit_code == 0, told.output
    assert (tmp_path / "third" / "summary.json").exists()
    told = CliRunner().invoke(app, ["report", "rl", "--again", str(tmp_path / "first")])
    assert told.exit_code == 2
    for name in ("summary.json", "robustness-runs.json.gz"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_stored_runs_that_are_damaged_or_of_another_version_are_refused(tmp_path):
    kept_report(tmp_path)
    file = tmp_path / "robustness-runs.json.gz"
    with pytest.raises(DamagedRun, match="this version cannot read runs from"):
        read_runs(file, robustness.Settings)  # other settings
    packed = bytearray(file.read_bytes())
    packed[len(packed) // 2] ^= 1
    file.write_bytes(packed)
    with pytest.raises(DamagedRun, match="this version cannot read runs from"):
        read_runs(file, Config)
    file.unlink()
    with pytest.raises(ValueError, match="keeps no runs"):
        report_again([tmp_path], tmp_path / "second")


def test_stored_runs_of_several_reports_become_one_report(tmp_path):
    results = kept_report(tmp_path / "first")
    more = [dataclasses.replace(r, task=dataclasses.replace(r.task, seed=r.task.seed + 7)) for r in results]
    kept_report(tmp_path / "second", [*results[:3], *more], command="hesscale robustness --more")
    folders = ["--again", str(tmp_path / "first"), "--again", str(tmp_path / "second")]
    told = CliRunner().invoke(app, ["report", *folders, "--out", str(tmp_path / "both"), "--no-page"])
    assert told.exit_code == 0, told.output
    found = read_runs(tmp_path / "both" / "robustness-runs.json.gz", Config)
    assert [r.task for r in found] == [r.task for r in (*results, *more)]
    facts = read_summary(tmp_path / "both")["robustness"]
    assert facts["command"] == "hesscale robustness --some\nhesscale robustness --more"
    assert facts["runs"] == f"{len(found)} of {len(found)} runs finished."
    assert (facts["commit"], facts["when"]) == ("abc", "2026-01-01 to 2026-01-02 UTC")
