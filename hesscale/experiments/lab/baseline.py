"""An earlier report as a baseline: its series and rows are shown beside those of the runs.

Only its ``summary.json`` is needed, not the runs that it was made from.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.colors import is_color_like

from .compact import rounded
from .plots import Plot, Section, Series, Table
from .series_layout import KINDS, as_array

if TYPE_CHECKING:
    from .report import Account

FACTS = ("command", "settings", "runs", "commit", "machine", "when")
NUMBERS = ("x", "y", "low", "high")
Facts = dict[str, Any]


def summary_file(path: Path) -> Path:
    return path / "summary.json" if path.is_dir() else path


def read_summary(path: Path) -> dict[str, Facts]:
    """The summary of a report by experiment, from its folder or its ``summary.json``."""
    file = summary_file(path)
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        expect(isinstance(found, dict) and bool(found), "it contains no experiment")
        for facts in found.values():
            check_facts(facts)
            expect(
                isinstance(facts["shown"], dict) and all(map(is_item, facts["shown"].values())), "a figure or table is invalid"
            )
            for earlier in facts.get("earlier", []):
                check_facts(earlier)
    except FileNotFoundError:
        raise ValueError(f"there is no {file}: `hesscale report` writes one") from None
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} was not written by hesscale report ({error!r})") from None
    return dict(found)


def check_facts(facts: Facts) -> None:
    """Check that the metadata of a report are strings."""
    expect(isinstance(facts["command"], str), "its command is not a string")
    expect(all(isinstance(facts.get(name, ""), str) for name in FACTS if name != "settings"), "its metadata are not strings")
    expect(all(isinstance(value, str) for value in facts.get("settings", {}).values()), "a setting is not a string")


def is_item(shown: Facts) -> bool:
    if "rows" in shown:
        rows = [shown["header"], *shown["rows"]]
        return len({len(row) for row in rows}) == 1 and all(isinstance(cell, str) for row in rows for cell in row)
    return "panels" in shown or ({"x", "y"} <= shown.keys() and all(map(is_series, shown["series"])))


def is_series(found: Facts) -> bool:
    values = [found[name] for name in NUMBERS if name in found]
    has_numbers = all(isinstance(value, float | int | None) for several in values for value in several)
    has_look = found.get("kind", "line") in KINDS and is_color_like(found.get("colour", "k"))
    return isinstance(found["label"], str) and has_numbers and has_look and {"x", "y"} <= found.keys()


def expect(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def add_baseline(account: Account, summary: Facts) -> None:
    """Add the series and rows of a summary to plots and tables of the same name, unless they are already there.

    Labels of runs with other settings get the suffix "earlier". Heat maps do not change, since a summary lacks their numbers.
    """
    shown = summary["shown"]
    kinds = {Plot: "series", Table: "rows"}
    items = [item for item in account.items if isinstance(item, (Plot, Table)) and kinds[type(item)] in shown.get(item.name, ())]
    if not items:
        raise ValueError(
            f"the summary and these runs have nothing in common for {account.name}; these runs show {', '.join(shown)}"
        )
    here = {label for item in items for label in labels_of(item)}
    there = [label for item in items for label in labels_shown(shown[item.name])]
    names = renamed(there, here, is_other=is_other(account.settings, summary.get("settings", {})))
    for item in items:
        if isinstance(item, Plot):
            add_series(item, shown[item.name], names)
        else:
            add_rows(item, shown[item.name], names)
    before = [{name: summary[name] for name in FACTS if name in summary}, *summary.get("earlier", [])]
    own = {"command": account.command, "settings": account.settings, **account.made}
    account.baselines += [facts for facts in before if facts != own]
    for section in account.sections:
        if any(item is other for item in section.items for other in items):
            say(section, account)


def say(section: Section, account: Account) -> None:
    """Add a sentence to a section that it also shows earlier reports, and how their settings differ."""
    others = [text for facts in account.baselines if (text := differences(account, facts))]
    if account.baselines:
        section.text = " ".join(["The figures and tables also show earlier reports.", *others, section.text])


def differences(account: Account, earlier: Facts) -> str:
    """A sentence on the settings in which a baseline differs from the runs."""
    there, found = earlier.get("settings", {}), []
    for name in dict.fromkeys([*account.settings, *there]):
        own, other = (settings.get(name, "not known") for settings in (account.settings, there))
        if set(own.split(", ")) != set(other.split(", ")):
            found.append(f"{name} {other} (here {own})")
    return f"Their settings differ: {'; '.join(found)}." if found else ""


def labels_of(item: Plot | Table) -> list[str]:
    return [row[0] for row in item.rows] if isinstance(item, Table) else [series.label for series in item.series]


def labels_shown(shown: Facts) -> list[str]:
    return [row[0] for row in shown["rows"]] if "rows" in shown else [found["label"] for found in shown["series"]]


def is_other(here: Mapping[str, str], there: Mapping[str, str]) -> bool:
    """Whether a setting has one value in all runs here and another value in all runs there."""
    shared = [(here[name], there[name]) for name in here.keys() & there.keys()]
    return any(own != other and "," not in own + other for own, other in shared)


def renamed(labels: Sequence[str], here: set[str], is_other: bool) -> dict[str, str]:
    """New labels for the series of a summary, so that all labels differ."""
    names: dict[str, str] = {}
    for label in labels:
        name = f"{label}, earlier" if is_other else label
        while label not in names and name in here | set(names.values()):
            name += ", earlier"
        names.setdefault(label, name)
    return names


def add_series(plot: Plot, shown: Facts, names: Mapping[str, str]) -> None:
    if shown["x"] != (list(plot.categories) or plot.x_label) or shown["y"] != plot.y_label:
        raise ValueError(f"{plot.title} has other axes in the summary: {shown['x']} and {shown['y']}")
    own = [(series.label, *values_of(series)) for series in plot.series]
    for found in shown["series"]:
        values = {name: [float("nan") if value is None else value for value in found[name]] for name in NUMBERS if name in found}
        label = names[found["label"]]
        is_dashed = found.get("dashed", False) or label != found["label"]
        series = Series(label, **values, kind=found.get("kind", "line"), colour=found.get("colour"), dashed=is_dashed)
        if (found["label"], *values_of(series)) not in own:
            plot.series.append(series)


def values_of(series: Series) -> list[list[float | None] | None]:
    """The numbers of a series, in the format of a summary."""
    values = [getattr(series, name) for name in NUMBERS]
    return [None if several is None else rounded(as_array(several)) for several in values]


def add_rows(table: Table, shown: Facts, names: Mapping[str, str]) -> None:
    """Add the rows of a summary to a table. A row has a dash in columns that only the other table has."""
    here, before = numbered(table.header), numbered(shown["header"])
    if before[0] != here[0]:
        raise ValueError(f"{table.title} has other rows in the summary: its first column is {shown['header'][0]!r}")
    columns = [*here, *[column for column in before if column not in here]]
    own = [cells(here, row, columns) for row in table.rows]
    others = [found for row in shown["rows"] if (found := cells(before, row, columns)) not in own]
    table.header = [name for name, _ in columns]
    table.rows = [*own, *[[names[row[0]], *row[1:]] for row in others]]


def cells(header: Sequence[object], row: Sequence[str], columns: Sequence[object]) -> list[str]:
    found = dict(zip(header, map(str, row), strict=True))
    return [found.get(column, "–") for column in columns]


def numbered(header: Sequence[str]) -> list[tuple[str, int]]:
    """Each column as its name and the number of earlier columns with the same name, since a name may occur twice."""
    seen: Counter[str] = Counter()
    found = []
    for name in header:
        found.append((name, seen[name]))
        seen[name] += 1
    return found
