"""What an earlier report showed, beside what runs show now: its summary outlasts the runs that it was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plots import Plot, Series, Table

if TYPE_CHECKING:
    from .report import Account

FACTS = ("command", "settings", "runs", "commit", "machine", "when")


def read_summary(path: Path) -> dict[str, dict[str, Any]]:
    """By experiment, of a report's folder or its ``summary.json``."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not all(isinstance(each["shown"], dict) and isinstance(each["command"], str) for each in found.values()):
            raise TypeError("it is not of a report")
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no summary that a report wrote ({error!r})") from None
    return dict(found)


def set_beside(account: Account, summary: Mapping[str, Any]) -> None:
    """Add series and rows to plots and tables of the same name; where a label is in both, the summary's is called earlier.

    Heat maps, of whose numbers a summary has little, stay as they are.
    """
    shown = summary["shown"]
    items = [item for item in account.items if isinstance(item, (Plot, Table)) and item.name in shown]
    if not items:
        raise ValueError(f"the summary shows nothing of {account.name} that these runs show: {', '.join(shown)}")
    for item in items:
        if isinstance(item, Plot):
            add_series(item, shown[item.name])
        else:
            add_rows(item, shown[item.name])
    account.earlier += [{name: summary[name] for name in FACTS if name in summary}, *summary.get("earlier", [])]


def differences(account: Account, earlier: Mapping[str, Any]) -> str:
    """Settings of what is shown beside it that are not those of the account, in words."""
    settings = earlier.get("settings", {})
    found = [f"{name}: {value}" for name, value in settings.items() if account.settings.get(name, value) != value]
    return f"Other settings than here: {'; '.join(found)}." if found else ""


def add_series(plot: Plot, shown: Mapping[str, Any]) -> None:
    if shown["x"] != (list(plot.categories) or plot.x_label) or shown["y"] != plot.y_label:
        raise ValueError(f"{plot.title} has other axes in the summary: {shown['x']} and {shown['y']}")
    names = renamed([found["label"] for found in shown["series"]], {series.label for series in plot.series})
    for found in shown["series"]:
        label = names[found["label"]]
        ends: dict[str, Any] = {name: numbers(found[name]) for name in ("low", "high") if name in found}
        is_dashed = found.get("dashed", False) or label != found["label"]
        look: dict[str, Any] = {"kind": found.get("kind", "line"), "colour": found.get("colour"), "dashed": is_dashed}
        plot.series.append(Series(label, numbers(found["x"]), numbers(found["y"]), **ends, **look))


def add_rows(table: Table, shown: Mapping[str, Any]) -> None:
    """Columns that only one of them has are empty in the rows of the other."""
    before = list(shown["header"])
    if before[0] != table.header[0]:
        raise ValueError(f"{table.title} has other rows in the summary: its first column is {before[0]!r}")
    names = renamed([row[0] for row in shown["rows"]], {row[0] for row in table.rows})
    header = [*table.header, *[name for name in before if name not in table.header]]
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    rows += [{**dict(zip(before, row, strict=True)), before[0]: names[row[0]]} for row in shown["rows"]]
    table.header, table.rows = header, [[row.get(name, "–") for name in header] for row in rows]


def renamed(labels: Sequence[str], here: set[str]) -> dict[str, str]:
    """What to call those of a summary, so that each is told from those that are here and from the others."""
    names: dict[str, str] = {}
    for label in labels:
        name = label
        while label not in names and name in here | set(names.values()):
            name += ", earlier"
        names.setdefault(label, name)
    return names


def numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]
