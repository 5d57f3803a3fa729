"""Reports: figures as files and on a page, tables, a summary, and missing runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest

from hesscale.experiments.lab import report as reports
from hesscale.experiments.lab.baseline import add_baseline, add_rows, read_summary
from hesscale.experiments.lab.experiment import Experiment, as_task
from hesscale.experiments.lab.inline_svg import on_dark
from hesscale.experiments.lab.matplotlib_files import draw_plot, save_figure
from hesscale.experiments.lab.plots import Finding, Heat, Plot, Section, Series, Table
from hesscale.experiments.lab.report import Account, report, write_report
from hesscale.experiments.lab.series_layout import COLOURS, lay_out
from hesscale.experiments.lab.store import Store

METHODS = ["HesScale", "BL89", "g² < 1 & <b>bold</b>", "$x$ and $y$"]


def accounts() -> list[Account]:
    """Every kind of item, with unusual text and numbers."""
    random = np.random.default_rng(0)
    cloud = np.exp(random.normal(size=(4, 20)))
    cloud[1, 3:5] = [np.inf, 0.0]
    steps = 2.0 ** np.arange(6)
    strip = [Series(name, [number] * 20, cloud[number], kind="dots") for number, name in enumerate(METHODS)]
    layers = [Series(name, np.repeat([0, 1], 10), cloud[number], kind="dots") for number, name in enumerate(METHODS)]
    lines = [Series("Adam", steps, steps, steps - 2, steps + 1), Series("exact H", steps, steps**1.5, dashed=True, colour="k")]
    gap = [1.0, 2.0, float("nan"), 1.0, 2.0, 1.0]
    learning = [Series("Adam", steps, gap, np.array(gap) - 0.1, np.array(gap) + 0.1), Series("SGD", [1, 32], [1.5, 1.5])]
    bars = [Series(name, [0, 1], [0.9, 0.5], [0.8, 0.4], [0.95, 0.55], kind="bars") for name in ("before", "after")]
    matrices = [(f"layer {number}", random.normal(size=(12, 12))) for number in range(3)]
    strips = [Plot("strip", "Errors", strip, log_y=True, categories=METHODS)]
    quality = [
        Section("Whole networks", "One <script>.\n\nAnd `code`.", strips),
        Section("Layers", items=[Plot("layers", "By layer", layers, "layer", "error", categories=["1", "2"])]),
    ]
    cost = [
        Plot("cost", "Cost", lines, "layers", "ms", log_x=True, log_y=True, caption="Bands are quartiles."),
        Plot("learning", "Loss", learning, "step", "loss"),
        Plot("rho", "Dominance", bars, categories=["layer 1", "layer 2"]),
        Plot("nothing", "Nothing yet", []),
        Heat("hessians", "Hessians", matrices),
        Heat("shared", "Absolute values", [(title, np.abs(values)) for title, values in matrices], shared=True),
        Table("costs", "Costs", ["method", "ms"], [["a | b", "1.25 ± 0.1"], ["<i>", "—"]], "Medians."),
    ]
    facts = {"commits": ["abc1234"], "machines": ["cpu X, torch 2"], "started": "2024-01-01", "finished": "2024-01-02"}
    done = Counter(finished=3)
    return [
        Account("quality", "How far <from> exact", "hesscale quality > out", quality, 4, done, ["x is damaged"], **facts),
        Account("cost", "Cost of a step", "hesscale cost", [Section("All", "", cost)], 3, done, [], {"seed": "0, 1"}, **facts),
        Account("empty", "Nothing yet", "hesscale empty", asked=2, statuses=Counter({"not started": 2})),
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    assert write_report(accounts(), path) == path / "index.html"
    return path


def items_of(kind):
    return [(account, item) for account in accounts() for item in account.items if isinstance(item, kind)]


class TestFiles:
    def test_each_figure_is_written_twice(self, folder):
        names = [account.file_name(item) for account, item in items_of((Plot, Heat))]
        written = {path.name for path in (folder / "figures").iterdir()}
        assert written == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
        assert (folder / "figures" / "quality-strip.png").read_bytes().startswith(b"\x89PNG")

    def test_the_same_numbers_give_the_same_bytes(self, folder, tmp_path):
        assert write_report(accounts()[:1], tmp_path, page=False) == tmp_path
        written = {path.name: path.read_bytes() for path in tmp_path.glob("figures/*")}
        assert written == {name: (folder / "figures" / name).read_bytes() for name in written}
        assert {path.name for path in tmp_path.iterdir()} == {"figures", "tables.md", "summary.json"}

    def test_tables_as_markdown(self, folder):
        text = (folder / "tables.md").read_text()
        assert "# Cost of a step\n\n    hesscale cost\n\n3 of 3 runs finished.\n" in text
        assert "| method | ms |\n| :--- | ---: |\n| a \\| b | 1.25 ± 0.1 |\n| &lt;i> | — |\n\nMedians." in text
        assert "- x is damaged" in text

    def test_summary(self, folder):
        found = json.loads((folder / "summary.json").read_text())
        assert found["cost"]["settings"] == {"seed": "0, 1"}
        assert found["cost"]["commit"] == "abc1234"
        assert found["quality"]["problems"] == ["x is damaged"]
        shown = found["cost"]["shown"]
        assert shown["cost"]["series"][0] == {
            "label": "Adam",
            "x": [1, 2, 4, 8, 16, 32],
            "y": [1, 2, 4, 8, 16, 32],
            "low": [-1, 0, 2, 6, 14, 30],
            "high": [2, 3, 5, 9, 17, 33],
        }
        assert shown["learning"]["series"][0]["y"][2] is None
        assert shown["hessians"]["panels"]["layer 0"]["shape"] == [12, 12]
        assert shown["costs"]["rows"][0] == ["a | b", "1.25 ± 0.1"]
        assert found["empty"] == {
            "command": "hesscale empty",
            "settings": {},
            "runs": "0 of 2 runs finished; 2 not started.",
            "problems": [],
            "findings": [],
            "shown": {},
        }

    def test_duplicate_names_are_refused(self, tmp_path):
        twice = [Account("a", "a", sections=[Section("s", items=[Plot("x y", "", []), Plot("X-y", "", [])])])]
        with pytest.raises(ValueError, match="a has more than one figure or table named a-x-y"):
            write_report(twice, tmp_path)
        with pytest.raises(ValueError, match="'ρ' cannot name a file"):
            write_report([Account("a", "a", sections=[Section("s", items=[Plot("ρ", "", [])])])], tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestEarlier:
    @staticmethod
    def beside(account, summary):
        before = {item.name: len(item.series) for item in account.plots}
        add_baseline(account, summary)
        return [(plot, plot.series[: before[plot.name]], plot.series[before[plot.name] :]) for plot in account.plots]

    def test_earlier_series_are_drawn_as_before(self, folder):
        """Beside the same with other numbers: the same points, and bars, dots and colours as before."""
        summary = json.loads((folder / "summary.json").read_text())
        for account in accounts()[:2]:
            for plot in account.plots:
                for series in plot.series:
                    series.y = 2 * np.array(series.y, dtype=float)
                    if series.low is not None:
                        series.low, series.high = 2 * np.array(series.low), 2 * np.array(series.high)
            for plot, own, earlier in self.beside(account, summary[account.name]):
                for a, b in zip(own, earlier, strict=True):
                    assert (b.label, b.kind, b.colour, b.dashed) == (f"{a.label}, earlier", a.kind, a.colour, True)
                    finite = np.isfinite(a.y)
                    np.testing.assert_allclose(2 * np.array(b.y)[finite], np.array(a.y)[finite], rtol=1e-3)
                    assert (a.low is None) == (b.low is None)
                lay_out(plot)

    def test_identical_results_are_shown_once(self, folder):
        account = accounts()[1]
        summary = json.loads((folder / "summary.json").read_text())["cost"]
        summary["settings"] = account.settings
        assert all(not earlier for _, _, earlier in self.beside(account, summary))
        (table,) = [item for item in account.items if isinstance(item, Table)]
        assert len(table.rows) == 2
        assert account.baselines == []
        assert account.sections[0].text == ""

    def test_a_label_has_one_name_in_all_items(self):
        """A curve of before is not taken for that of a run which has none, for it diverged."""

        def account(rows, series):
            items = [Table("t", "T", ["method", "ms"], rows), Plot("p", "P", series)]
            return Account("a", "A", "now", sections=[Section("S", "Text.", items)])

        before = {"t": {"header": ["method", "ms"], "rows": [["Adam", "1"], ["SGD", "2"]]}}
        before["p"] = {"x": "", "y": "", "series": [{"label": label, "x": [1], "y": [1]} for label in ("Adam", "SGD")]}
        found = account([["Adam", "diverged"]], [])
        add_baseline(found, {"command": "before", "settings": {"epochs": "2, 1", "task": "x"}, "shown": before})
        table, plot = found.items
        assert [row[0] for row in table.rows] == ["Adam", "Adam, earlier", "SGD"]
        assert [series.label for series in plot.series] == ["Adam, earlier", "SGD"]
        settings = "epochs 2, 1 (here not known); task x (here not known)"
        expected = f"The figures and tables also show earlier reports. Their settings differ: {settings}. Text."
        assert found.sections[0].text == expected

    def test_the_same_command_at_another_time_is_named(self):
        account = accounts()[1]
        shown = {"costs": {"header": ["method", "ms"], "rows": [["c", "3"]]}}
        add_baseline(account, {"command": account.command, "settings": account.settings, "commit": "older", "shown": shown})
        assert account.baselines[0]["commit"] == "older"

    def test_results_of_other_settings_are_labelled_earlier(self):
        account = accounts()[1]
        account.settings = {"seed": "0, 1", "task": "x"}
        shown = {"costs": {"header": ["method", "ms"], "rows": [["c", "3"]]}}
        add_baseline(account, {"command": "", "settings": {"seed": "2", "task": "y"}, "shown": shown})
        (table,) = [item for item in account.items if isinstance(item, Table)]
        assert [row[0] for row in table.rows] == ["a | b", "<i>", "c, earlier"]

    def test_rows_with_other_columns(self):
        """Of which some have the same name."""
        table = Table("t", "T", ["method", "ms", "paper", "new", "paper"], [["a", "1", "p", "x", "q"]])
        shown = {"header": ["method", "old", "paper", "ms"], "rows": [["a", "o", "r", "2"], ["b", "p", "s", "3"]]}
        add_rows(table, shown, {"a": "a, earlier", "b": "b"})
        assert table.header == ["method", "ms", "paper", "new", "paper", "old"]
        assert table.rows == [
            ["a", "1", "p", "x", "q", "–"],
            ["a, earlier", "2", "r", "–", "–", "o"],
            ["b", "3", "s", "–", "–", "p"],
        ]
        with pytest.raises(ValueError, match="T has other rows in the summary: its first column is 'layer'"):
            add_rows(table, {"header": ["layer"], "rows": []}, {})

    @pytest.mark.parametrize(
        "change",
        [
            {"command": 1},
            {"settings": None},
            {"settings": {"seed": 1}},
            {"runs": 3},
            {"machine": {}},
            {"earlier": [1]},
            {"earlier": [{"runs": "x"}]},
            {"shown": {"p": {"x": "", "y": "", "series": [{"label": 1, "x": [1], "y": [1]}]}}},
            {"shown": {"p": {"x": "", "y": "", "series": [{"label": "a", "x": [1], "y": [[1]]}]}}},
            {"shown": {"p": {"x": "", "y": "", "series": [{"label": "a", "x": [1], "y": [1], "colour": "nocolour"}]}}},
            {"shown": {"p": {"x": "", "y": "", "series": [{"label": "a", "x": [1], "y": [1], "kind": "pie"}]}}},
            {"shown": {"p": {"x": "", "y": ""}}},
            {"shown": {"t": {"header": ["a", "b"], "rows": [["1"]]}}},
            {"shown": {"t": {"header": ["a", 1], "rows": []}}},
        ],
    )
    def test_invalid_summaries_are_refused(self, change, tmp_path):
        path = tmp_path / "summary.json"
        path.write_text(json.dumps({"a": {"command": "c", "shown": {}}}))
        read_summary(tmp_path)
        path.write_text(json.dumps({"a": {"command": "c", "shown": {}} | change}))
        with pytest.raises(ValueError, match=r"summary.json was not written by hesscale report"):
            read_summary(path)


def page_with(folder, *sections):
    return write_report([Account("a", "Title", sections=[*sections])], folder).read_text()


class TestPage:
    def test_is_self_contained(self, folder):
        """One file, which reads nothing else and links to the other files of the report."""
        page = (folder / "index.html").read_text()
        assert len(page) < 400_000
        assert re.findall(r'(?:src|href)="(?!#|figures/|tables.md|summary.json|data:image/png;base64,)', page) == []
        assert not re.search(r"@import|https?://", page)
        assert page.count("<svg") == len(items_of((Plot, Heat)))

    def test_needs_no_script(self, folder):
        """Figures are drawn, sections fold and switches work by HTML and CSS alone."""
        page = (folder / "index.html").read_text()
        (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        assert "innerHTML" not in script
        whole = page.replace(script, "")
        assert whole.count("<details") == whole.count("<summary") > 3
        for number in items_of((Plot, Heat)):
            assert f'href="figures/{number[0].file_name(number[1])}.png"' in whole

    def test_text_is_escaped(self, folder):
        page = (folder / "index.html").read_text()
        assert "<p>One &lt;script&gt;.</p>\n<p>And <code>code</code>.</p>" in page
        assert "<h2>How far &lt;from&gt; exact</h2>" in page
        assert "<pre>hesscale quality &gt; out</pre>" in page
        assert "<td>&lt;i&gt;</td>" in page
        assert ">g² &lt; 1 &amp; &lt;b&gt;bold&lt;/b&gt;</text>" in page

    def test_links_lead_somewhere(self, folder):
        page = (folder / "index.html").read_text()
        ids = re.findall(r' id="([^"]*)"', page)
        assert len(ids) == len(set(ids))
        assert {"quality", "quality-1", "quality-2", "cost", "cost-1", "empty"} <= set(ids)
        assert set(re.findall(r'(?:href="|url\()#([^")]*)', page)) <= set(ids)

    def test_missing_runs_are_reported(self, folder):
        page = (folder / "index.html").read_text()
        assert '<div class="problem"><p>3 of 4 runs finished.</p><ul><li>x is damaged</li></ul></div>' in page
        assert '<div class="problem"><p>0 of 2 runs finished; 2 not started.</p></div>' in page
        assert "Dashes are medians. 2 of 80 points are not finite, or not positive on a logarithmic axis, and not drawn." in page

    def test_labels_are_not_formatted(self, tmp_path):
        label = "</script><script>alert(1)</script>\" onload='x'"
        plot = Plot("p", label, [Series(label, [1], [1]), Series("b", [1], [1])])
        page = page_with(tmp_path, Section(label, label, [plot], [Finding(label, "p")]))
        assert page.count("<script>") == page.count("</script>") == 1
        names = []

        class Reader(HTMLParser):
            def handle_starttag(self, tag, attrs):
                found = dict(attrs)
                assert "onload" not in found
                names.extend([found["data-series"]] if "data-series" in found else [])

        Reader().feed(page)
        assert names == [label, "b"]

    def test_colours_follow_light_and_dark(self, folder):
        page = (folder / "index.html").read_text()
        used = set(re.findall(r"var\((--[^)]+)\)", page))
        light, dark = (set(re.findall(r"(--[\w-]+):", part)) for part in page.split("@media (prefers-color-scheme: dark)")[0:3:2])
        light |= set(re.findall(r"(--[\w-]+): #", page))
        assert used <= light
        assert dark <= light
        assert not re.search(r"(?:fill|stroke): #", "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL)))

    @pytest.mark.parametrize(("colour", "other"), [("1f5a96", "5c9ee0"), ("222222", "bfbfbf"), ("e4af58", "e4af58")])
    def test_colours_on_dark_are_light_enough(self, colour, other):
        """Lighter of the same hue; what is light enough stays."""
        assert on_dark(other) == f"#{other}"
        sums = [sum(int(text[k : k + 2], 16) for k in (0, 2, 4)) for text in (colour, on_dark(colour)[1:])]
        assert (sums[0] == sums[1]) is (colour == other)
        assert sums[1] >= 300


class TestFindings:
    @staticmethod
    def section(name, findings, figures=3):
        plots = [Plot(f"{name}-{number}", f"{name} {number}", [Series("a", [1, 2], [1, 2])]) for number in range(figures)]
        found = [Finding(f"{name} finding {number} of `code`.", f"{name}-{number}") for number in range(findings)]
        return Section(name, "", plots, found)

    def test_the_page_opens_with_findings_and_their_figures(self, tmp_path):
        page = page_with(tmp_path, self.section("x", 4), self.section("y", 4))
        header, rest = page.split("</header>")
        assert re.findall(r"<li>(. finding .)", header) == [
            "x finding 0",
            "y finding 0",
            "x finding 1",
            "y finding 1",
            "x finding 2",
        ]
        assert re.findall(r"<li>(. finding .)", rest) == ["y finding 2", "x finding 3", "y finding 3"]
        assert "x finding 0 of <code>code</code>. " in header
        assert re.findall(r"<h2>(. .)</h2>", header) == ["x 0", "y 0"]
        assert re.findall(r"<h4>(. .)</h4>", rest) == ["x 1", "x 2", "y 1", "y 2"]  # no figure is there twice
        assert header.count("<svg") == 2
        assert "<details open" not in page

    def test_every_experiment_has_findings_at_the_top(self, tmp_path):
        accounts = [Account(name, name, sections=[self.section(name, 3)]) for name in "xyz"]
        page = write_report(accounts, tmp_path).read_text()
        found = re.findall(r"<li>(. finding .)", page.split("</header>")[0])
        assert found == ["x finding 0", "x finding 1", "y finding 0", "y finding 1", "z finding 0"]

    def test_sections_are_expanded_without_findings(self, tmp_path):
        page = page_with(tmp_path, self.section("x", 0))
        assert '<details id="a-1" open>' in page
        assert "findings" not in page.split("</style>")[-1]

    def test_findings_are_in_the_tables_and_the_summary(self, tmp_path):
        page_with(tmp_path, self.section("x", 2))
        texts = [f"x finding {number} of `code`." for number in range(2)]
        assert json.loads((tmp_path / "summary.json").read_text())["a"]["findings"] == texts
        assert "".join(f"- {text}\n" for text in texts) in (tmp_path / "tables.md").read_text()

    def test_plots_of_a_group_are_one_figure_with_switches(self, tmp_path):
        views = list(itertools.product(("test", "train"), ("epochs", "seconds")))
        plots = [Plot("-".join(view), " ".join(view), [Series("a", [1], [1])], group="g", view=view) for view in views]
        page = page_with(tmp_path, Section("s", "", [Plot("p", "p", []), *plots, Plot("q", "q", [])]))
        assert page.count("<figure>") == 3
        assert re.findall(r'class="(s\d\d)"( checked)?>(\w+)', page) == [
            ("s00", " checked", "test"),
            ("s01", "", "train"),
            ("s10", " checked", "epochs"),
            ("s11", "", "seconds"),
        ]
        assert re.findall(r'class="view (v[^"]*)"', page) == ["v00 v10", "v00 v11", "v01 v10", "v01 v11"]
        for name in ("00", "01", "10", "11"):
            assert f"figure:has(.s{name}:checked) .view:not(.v{name})" in page


class TestAxes:
    """A run that diverged does not change the limits of the axis, and a note says so."""

    steps = np.arange(1, 21)

    def lines(self, worse, log_y=False, **diverged):
        series = [Series(name, self.steps, factor / np.sqrt(self.steps)) for name, factor in (("Adam", 10.0), ("SGD", 12.0))]
        return Plot("p", "", [*series, Series("BL89", self.steps, **diverged)], log_y=log_y, worse=worse)

    @pytest.mark.parametrize("log_y", [False, True])
    @pytest.mark.parametrize("others", [1, 2])
    def test_values_of_a_run_that_diverged(self, log_y, others):
        plot = self.lines("up", log_y, y=10.0 ** (self.steps + 8))
        plot.series = plot.series[-1 - others :]
        found = lay_out(plot)
        largest = max(max(series.y) for series in plot.series[:-1])
        assert largest < found.high < 1e3 * largest
        assert found.notes == ["Cut off above the axis: BL89 (to 1e28)."]

    def test_worse_returns_are_cut_off(self):
        plot = self.lines("down", y=-(10.0**self.steps))
        found = lay_out(plot)
        assert -30 < found.low < 0.5
        assert 12 < found.high < 15
        assert found.notes == ["Cut off below the axis: BL89 (to −1e20)."]

    def test_a_band(self):
        plot = self.lines("up", True, y=np.full(20, 5.0), low=np.full(20, 1e-9), high=np.full(20, 1e12))
        found = lay_out(plot)
        assert 0.5 < found.low < 2.3  # half the smallest value is 1.1
        assert 12 < found.high < 1e4
        assert found.notes == [f"Cut off {side} the axis: the band of BL89." for side in ("above", "below")]

    def test_kept_values_are_not_cut_off(self):
        """Adam, which has the score of an untrained agent at large step sizes, is shown, and a run far below is cut off."""
        series = [Series("Scaled Adam", [1, 2, 3], [0.9, 0.95, 0.95]), Series("Adam", [1, 2, 3], [0.9, 0.0, -0.1])]
        plot = Plot("p", "", series, worse="down", kept=(0, 1))
        assert lay_out(plot).low is None
        plot.series.append(Series("SGD", [1, 2, 3], [0.5, -40, -50]))
        assert -1.6 < lay_out(plot).low < -0.1
        assert lay_out(plot).notes == ["Cut off below the axis: SGD (to −50)."]

    def test_beginnings(self):
        """Accuracies begin far below where they end."""
        y = np.array([0.1, *np.linspace(0.9, 0.95, 19)])
        plot = Plot("p", "", [Series(name, self.steps, y) for name in ("Adam", "SGD")], worse="down")
        found = lay_out(plot)
        assert 0.75 < found.low < 0.9
        assert found.notes == ["Cut off below the axis: the beginning of every line."]

    @pytest.mark.parametrize("worse", ["", "up", "down"])
    @pytest.mark.parametrize("log_y", [False, True])
    def test_other_axes_are_not_cut_off(self, worse, log_y):
        found = lay_out(self.lines(worse, log_y, y=15.0 / self.steps, low=14.0 / self.steps, high=18.0 / self.steps))
        assert (found.low, found.high, found.notes) == (None, None, [])

    def test_the_svg_file_has_the_limits_of_the_axes(self):
        axes = draw_plot(self.lines("up", y=10.0**self.steps), None).axes[0]
        assert axes.get_ylim()[1] < 100

    def test_ticks_are_short(self):
        plot = Plot("p", "", [Series("a", [0, 40_000], [0, 3e6])])
        figure = draw_plot(plot, None)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        labels = [[label.get_text() for label in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)]
        assert {"20k", "40k"} <= set(labels[0])
        assert {"1M", "3M"} <= set(labels[1])
        assert axes.yaxis.get_offset_text().get_text() == ""


class TestMarks:
    def test_clouds_stay_in_their_slots(self):
        series = [Series(name, [0] * 30 + [1] * 30, np.arange(60.0), kind="dots") for name in "abc"]
        found = lay_out(Plot("p", "", series, categories=["x", "y"]))
        drawn = found.marks
        assert found.notes == ["Dashes are medians."]
        ends = [(mark.x[mark.x < 0.5].min(), mark.x[mark.x < 0.5].max()) for mark in drawn]
        assert -0.5 < ends[0][0] < ends[0][1] < ends[1][0] < 0 < ends[1][1] < ends[2][0] < ends[2][1] < 0.5
        np.testing.assert_allclose(drawn[1].x[30:] - drawn[1].x[:30], 1)
        assert [y for _, _, y in drawn[0].medians] == [14.5, 44.5]
        again = lay_out(Plot("p", "", series, categories=["x", "y"])).marks
        np.testing.assert_array_equal(drawn[2].x, again[2].x)

    def test_a_cloud_alone_is_in_the_middle(self):
        series = [Series(name, [n], [1.0], kind="dots") for n, name in enumerate("ab")]
        drawn = lay_out(Plot("p", "", series, categories="ab")).marks
        assert [mark.x.tolist() for mark in drawn] == [[0], [1]]
        assert not any(mark.in_legend or mark.medians for mark in drawn)

    def test_dots_with_fractional_x_are_not_moved(self):
        series = [Series("a", [0.2, 1, 1, 1], [1, 2, 3, 4], kind="dots"), Series("b", [0, 1], [1, 2], kind="dots")]
        drawn = lay_out(Plot("p", "", series, categories=["x", "y"])).marks
        assert [mark.x.tolist() for mark in drawn] == [[0.2, 1, 1, 1], [0, 1]]
        assert not drawn[0].medians

    def test_a_label_is_in_the_legend_once(self):
        series = [Series(label, [0, 1], [1, 2], kind=kind) for label in "ab" for kind in ("dots", "line")]
        drawn = lay_out(Plot("p", "", series, categories=["x", "y"])).marks
        assert [mark.in_legend for mark in drawn] == [True, False, True, False]
        assert [mark.colour for mark in drawn] == [COLOURS[0], COLOURS[0], COLOURS[1], COLOURS[1]]

    def test_bars_are_side_by_side(self):
        first, second = lay_out(Plot("p", "", [Series(name, [10, 20], [1, 2], kind="bars") for name in "ab"])).marks
        edges = [mark.x[number] + side * mark.width / 2 for number in (0, 1) for mark in (first, second) for side in (-1, 1)]
        assert edges == sorted(edges)
        assert ((first.x + second.x) / 2).tolist() == [10, 20]

    def test_points_that_cannot_be_drawn_are_counted(self):
        plot = Plot("p", "", [Series("a", [0, 1, 2, 3], [1, 0, -1, np.nan]), Series("b", [1], [2], kind="dots")], log_y=True)
        found = lay_out(plot)
        np.testing.assert_array_equal(found.marks[0].y, [1, np.nan, np.nan, np.nan])
        assert found.notes[0].startswith("3 of 5 points")
        assert lay_out(dataclasses.replace(plot, log_y=False)).notes == ["1 of 5 points are not finite and not drawn."]

    def test_a_band_that_reaches_zero_ends_at_the_smallest_number(self):
        found = lay_out(Plot("p", "", [Series("a", [1, 2], [4.0, 5.0], [-1.0, 3.0], [6.0, 7.0])], log_y=True))
        assert found.marks[0].low.tolist() == [3, 3]
        assert found.notes == []

    def test_a_label_keeps_its_colour(self):
        plots = [Plot("p", "", [Series(name, [1], [1]) for name in names]) for names in ("abc", "ca")]
        account = Account("x", "x", sections=[Section("s", items=plots)])
        assert [mark.colour for mark in lay_out(plots[1], account.colours).marks] == [COLOURS[2], COLOURS[0]]
        plots[1].series[0].colour = "#123456"  # everywhere then
        assert [mark.colour for mark in lay_out(plots[0], account.colours).marks] == [COLOURS[0], COLOURS[1], "#123456"]

    def test_lines_of_one_colour_have_different_dashes(self):
        series = [Series(name, [1, 2], [1, 2], colour="#123456", dashed=name == "b") for name in "abc"]
        series += [
            Series("other", [1, 2], [1, 2]),
            Series("a", [1, 2], [3, 4]),
            Series("dots", [1], [1], kind="dots", colour="#123456"),
        ]
        marks = {mark.label: mark for mark in lay_out(Plot("p", "", series)).marks}
        assert [marks[name].dash for name in ("a", "b", "c", "other")] == ["-", "--", ":", "-"]

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            (Plot("p", "", [Series("a", [1], [1], kind="pie")]), "plot p, series a: kind 'pie' is not one of line, dots, bars"),
            (Plot("p", "", [Series("a", [1, 2], [1])]), "differ in length"),
            (Plot("p", "", [Series("a", [1], [1], [0])]), "low needs high, and high needs low"),
            (Plot("p", "", [Series("a", [1], [1], [2], [0])]), "low is above high"),
            (Plot("p", "", [Series("a", [2], [1])], categories=["x", "y"]), "x is not within a category, 0 to 1"),
            (Plot("p", "", [Series("a", [np.nan], [1])], categories=["x", "y"]), "x is not within a category, 0 to 1"),
            (Plot("p", "", [Series("a", [1], [1], kind="bars")], log_x=True), "give them categories"),
            (Heat("h", "", []), "heat map h: every panel needs a matrix"),
            (Heat("h", "", [("a", [1.0, 2.0])]), "heat map h: every panel needs a matrix"),
            (Table("t", "", ["a", "b"], [["1"]]), "table t: every row needs 2 cells"),
        ],
    )
    def test_invalid_items_are_refused(self, item, message, tmp_path):
        with pytest.raises(ValueError, match=message):
            write_report([Account("a", "a", sections=[Section("s", items=[item])])], tmp_path)
        if not isinstance(item, Table):
            with pytest.raises(ValueError, match=message):
                save_figure(item, tmp_path / "x")


class TestDrawing:
    def test_the_legend_is_below_the_axes(self):
        plot = next(item for _, item in items_of(Plot) if item.name == "layers")
        figure = draw_plot(plot, None)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == [*METHODS[:3], r"\$x\$ and \$y\$"]
        assert legend.get_window_extent().y1 <= figure.axes[0].get_window_extent().y0
        assert figure.axes[0].get_window_extent().width > 0.8 * figure.bbox.width

    def test_axes(self):
        figure = draw_plot(next(item for _, item in items_of(Plot) if item.name == "cost"), None)
        axes = figure.axes[0]
        assert (axes.get_xscale(), axes.get_yscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "log", "layers", "ms")
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "8", "16", "32"]

    def test_every_finite_dot_is_drawn(self):
        figure = draw_plot(next(item for _, item in items_of(Plot) if item.name == "strip"), None)
        assert [len(cloud.get_offsets()) for cloud in figure.axes[0].collections] == [20, 18, 20, 20]
        assert figure.legends == []


@dataclasses.dataclass(frozen=True)
class Task:
    seed: int
    kind: str = "a"


def run(task, run, data):
    if task.seed == 13:
        raise RuntimeError("unlucky")
    return {"square": task.seed**2}


def sections(results):
    points = Series("square", [result.task.seed for result in results], [result.values["square"] for result in results])
    return [Section("Squares", items=[Plot("squares", "Squares", [points])])]


class TestReport:
    @pytest.fixture
    def store(self, tmp_path, monkeypatch):
        known = [Experiment(name, name.title(), Task, {}, Task, list, str, run, sections) for name in ("squares", "cubes")]
        monkeypatch.setattr(reports, "experiments", lambda: {experiment.name: experiment for experiment in known})
        self.experiment = known[0]
        return Store(tmp_path / "runs")

    def ask(self, store, *seeds, done=()):
        tasks = [as_task(Task(seed)) for seed in seeds]
        store.request("squares", tasks, f"hesscale squares --seeds {len(seeds)}")
        for seed in done:
            try:
                self.experiment.do(store, as_task(Task(seed)), None, "")
            except RuntimeError:
                assert seed == 13

    def summary(self, store, tmp_path, names=()):
        path = report(store, list(names), tmp_path / "out")
        assert path == tmp_path / "out" / "index.html"
        return json.loads((tmp_path / "out" / "summary.json").read_text())

    def test_finished_runs(self, store, tmp_path):
        self.ask(store, 1, 2, 3, done=(1, 2, 3))
        found = self.summary(store, tmp_path, ["squares"])["squares"]
        assert found["command"] == "hesscale squares --seeds 3"
        assert found["runs"] == "3 of 3 runs finished."
        assert found["settings"] == {"seed": "1, 2, 3", "kind": "a"}
        assert found["problems"] == []
        assert found["shown"]["squares"]["series"] == [{"label": "square", "x": [1, 2, 3], "y": [1, 4, 9]}]
        assert {"commit", "machine", "when"} <= found.keys()
        assert 'class="problem"' not in (tmp_path / "out" / "index.html").read_text()

    def test_everything_that_is_finished(self, store, tmp_path):
        for seed, command in ((1, "hesscale squares --seeds 1"), (2, "hesscale squares"), (3, "hesscale squares")):
            self.experiment.do(store, as_task(Task(seed)), None, command)
        unasked = self.summary(store, tmp_path, ["squares"])["squares"]
        assert sorted(unasked["command"].splitlines()) == ["hesscale squares", "hesscale squares --seeds 1"]
        assert unasked["runs"] == "3 of 3 runs finished."
        self.ask(store, 1, 4)
        assert self.summary(store, tmp_path)["squares"]["runs"] == "1 of 2 runs finished; 1 not started."
        report(store, ["squares"], tmp_path / "all", page=False, everything=True)
        text = (tmp_path / "all" / "tables.md").read_text()
        assert "    hesscale squares --seeds 1\n" in text
        assert "    hesscale squares\n" in text
        assert "3 of 3 runs finished." in text

    def test_runs_that_are_missing_failed_or_damaged(self, store, tmp_path):
        self.ask(store, *range(10), 13, done=(1, 2, 3, 4, 13))
        (store.directory("squares", as_task(Task(1))) / "run.sqlite").write_bytes(b"torn" * 100)
        results_are_torn(store.directory("squares", as_task(Task(2))))
        found = self.summary(store, tmp_path)["squares"]
        assert found["runs"] == "2 of 11 runs finished; 6 not started, 2 damaged, 1 failed."
        assert found["settings"]["seed"] == "11 values, 0 … 13"
        assert found["shown"]["squares"]["series"][0]["y"] == [9, 16]
        torn, unreadable, failed = found["problems"]
        assert "file is not a database" in torn
        assert "cannot be read" in unreadable
        assert failed == "1 failed: RuntimeError: unlucky"
        assert "2 of 11 runs finished" in (tmp_path / "out" / "index.html").read_text()

    def test_nothing_finished(self, store, tmp_path):
        self.ask(store, 1, 2)
        found = self.summary(store, tmp_path)["squares"]
        assert (found["runs"], found["shown"]) == ("0 of 2 runs finished; 2 not started.", {})

    def test_runs_of_another_version(self, store, tmp_path):
        store.request("squares", [{"seed": 1}], "hesscale squares")
        store.request("gone", [{"seed": 1}], "hesscale gone")
        found = self.summary(store, tmp_path)
        assert "other settings than this version" in found["squares"]["problems"][0]
        assert found["gone"]["problems"] == ["This version has no experiment of that name."]
        logged = []
        report(store, [], tmp_path / "again", page=False, log=logged.append)
        assert [text.partition(":")[0] for text in logged] == ["squares", "gone"]

    def test_beside_an_earlier_report(self, store, tmp_path):
        self.ask(store, 1, 2, done=(1, 2))
        report(store, [], tmp_path / "first", page=False)
        self.ask(store, 3, done=(3,))
        report(store, [], tmp_path / "both", beside=tmp_path / "first")
        found = json.loads((tmp_path / "both" / "summary.json").read_text())["squares"]
        now, earlier = found["shown"]["squares"]["series"]
        assert now == {"label": "square", "x": [3], "y": [9]}
        assert earlier == {"label": "square, earlier", "dashed": True, "x": [1, 2], "y": [1, 4]}
        assert found["runs"] == "1 of 1 runs finished."
        assert found["earlier"][0]["command"] == "hesscale squares --seeds 2"
        assert found["earlier"][0]["runs"] == "2 of 2 runs finished."
        text = (tmp_path / "both" / "tables.md").read_text()
        assert "from an earlier report (2 of 2 runs finished):\n\n    hesscale squares --seeds 2\n" in text
        page = (tmp_path / "both" / "index.html").read_text()
        assert "<pre>hesscale squares --seeds 2</pre>" in page
        assert "<p>The figures and tables also show earlier reports. Their settings differ: seed 1, 2 (here 3).</p>" in page
        self.ask(store, 4, done=(4,))
        report(store, [], tmp_path / "thrice", page=False, beside=tmp_path / "both" / "summary.json")
        thrice = json.loads((tmp_path / "thrice" / "summary.json").read_text())["squares"]
        labels = [series["label"] for series in thrice["shown"]["squares"]["series"]]
        assert labels == ["square", "square, earlier", "square, earlier, earlier"]

    def test_nothing_of_an_earlier_report_is_lost(self, store, tmp_path):
        self.ask(store, 1, 2, done=(1, 2))
        report(store, [], tmp_path / "out", page=False)
        self.ask(store, 1, done=())
        first = json.loads((tmp_path / "out" / "summary.json").read_text())
        for _ in range(2):
            report(store, [], tmp_path / "out", page=False, beside=tmp_path / "out")  # in place, again and again
            found = json.loads((tmp_path / "out" / "summary.json").read_text())["squares"]
            assert len(found["shown"]["squares"]["series"]) == 2
        first["squares"]["shown"]["more"] = {"header": ["a"], "rows": []}
        (tmp_path / "out" / "summary.json").write_text(json.dumps(first))
        with pytest.raises(
            ValueError, match="out would lose results that only its summary has: squares: more; choose another --out"
        ):
            report(store, [], tmp_path / "out", page=False, beside=tmp_path / "out")
        self.ask(store, 13, done=(13,))
        report(store, [], tmp_path / "other", page=False, beside=tmp_path / "out")  # of runs that have nothing to show

    @pytest.mark.parametrize(
        "text", ["", "[1]", '{"squares": 1}', '{"squares": {"shown": {}}}', '{"squares": {"shown": 1, "command": ""}}']
    )
    def test_beside_what_is_no_summary(self, text, store, tmp_path):
        self.ask(store, 1, done=(1,))
        path = tmp_path / "summary.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"summary.json was not written by hesscale report"):
            report(store, [], tmp_path / "out", beside=path)
        with pytest.raises(ValueError, match=r"there is no .*nowhere: `hesscale report` writes one"):
            report(store, [], tmp_path / "out", beside=tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("found", "message"),
        [
            ({"cubes": {"command": "", "shown": {}}}, "shows cubes, not squares"),
            (
                {"squares": {"command": "", "shown": {"more": {"panels": {}}}}},
                "have nothing in common for squares; these runs show more",
            ),
            (
                {"squares": {"command": "", "shown": {"squares": {"x": "t", "y": "", "series": []}}}},
                "Squares has other axes in the summary",
            ),
            ({"squares": {"command": "", "shown": {"squares": {"x": "", "y": ""}}}}, "was not written by hesscale report"),
        ],
    )
    def test_beside_a_summary_of_something_else(self, found, message, store, tmp_path):
        self.ask(store, 1, done=(1,))
        (tmp_path / "summary.json").write_text(json.dumps(found))
        with pytest.raises(ValueError, match=message):
            report(store, [], tmp_path / "out", beside=tmp_path)

    def test_unknown_names(self, store, tmp_path):
        with pytest.raises(ValueError, match="no experiment is named circles; there are cubes, squares"):
            report(store, ["circles"], tmp_path)

    def test_nothing_to_report(self, store, tmp_path):
        with pytest.raises(ValueError, match="runs has no runs: run an experiment first, such as `hesscale cubes`"):
            report(store, [], tmp_path)
        self.ask(store, 1, done=(1,))
        with pytest.raises(ValueError, match="runs has no runs of cubes: run `hesscale cubes` first"):
            report(store, ["squares", "cubes"], tmp_path)


def results_are_torn(directory):
    import sqlite3

    database = sqlite3.connect(directory / "run.sqlite")
    with database:
        database.execute("UPDATE results SET value = ?", (b"{torn",))
    database.close()
