"""The tables of a record, for the terminal and the pages, and its figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..colours import COLOURS
from ..lab.plots import Plot, Series, Table
from .methods import BASELINE, METHODS, MODES
from .sweeps import Record, Row, sweep_of
from .targets import TargetResult, spread
from .workloads import CUDA, SWEEPS

LIBRARIES_OWN = 2**28  # bytes on a GPU; below this, workspaces that libraries allocate at first use dominate the memory of a step
BACKWARD = "backward pass, ratio to Adam's"
HEADER = ("method", "mode", "ms a step", "ratio to Adam, same mode", "ratio to eager Adam", "peak memory, ratio to Adam")


def tables(record: Record) -> list[Table]:
    """The tables that the command prints."""
    found = [workload_table(workload, record["machine"]["device"]) for workload in record["workloads"]]
    return [*found, slopes_table(record)] if record["sweep"] else found


def workload_table(workload: dict[str, Any], device: str) -> Table:
    title = f"{workload['description']}, batch {workload['batch']}"
    rows = workload["rows"]
    found: list[Sequence[str]] = [cells(row, device) for row in rows]
    header: tuple[str, ...] = HEADER
    if any(row.get("backward_ratio") for row in rows):
        ratios = [row.get("backward_ratio") for row in rows]
        header = (*HEADER, BACKWARD)
        found = [[*line, spread(ratio) if ratio else ""] for line, ratio in zip(found, ratios, strict=True)]
    return Table(workload["name"], title, header, found)


def cells(row: Row, device: str) -> list[str]:
    mode = MODES[row["mode"]]
    if "error" in row:
        return [row["label"], mode, row["error"], "", "", ""]
    ratios = [spread(row[key]) if row[key] else "–" for key in ("ratio", "ratio_to_eager_adam")]
    is_known = row["memory_ratio"] and (device != CUDA or row["peak_bytes"] / row["memory_ratio"] > LIBRARIES_OWN)
    memory = f"{row['memory_ratio']:.2f}" if is_known else "–"
    ran_as = "" if row["ran_as"] == mode else f" (ran as {row['ran_as']})"
    return [row["label"], mode + ran_as, f"{row['ms']['median']:.3g}", *ratios, memory]


def slopes_table(record: Record) -> Table:
    found = sweep_of(record)
    rows: list[Sequence[str]] = [[*key, *found.slope_cells(key)] for key in found.slopes]
    return Table("slopes", f"time against {found.kind}", ("method", "mode", "slope", "above Adam's"), rows)


def sweep_table(record: Record) -> Table:
    """Milliseconds at every size, and the slope of the fit. The caption lists missing measurements."""
    found = sweep_of(record)
    ends = ("ratio to Adam at the last size", "slope", "slope − Adam's")
    header = [f"ms a step ({SWEEPS[found.kind]})", "mode", *map(str, found.rows), *ends]
    rows: list[Sequence[str]] = []
    notes: list[str] = []
    for key in found.keys:
        label, mode = METHODS[key[0]].label, MODES[key[1]]
        last = found.of(key, "ratio").get(list(found.rows)[-1])
        ratio = spread(last) if last else "–"
        rows.append([label, mode, *found.time_cells(key), ratio, *found.slope_cells(key)])
        errors = {size: rows_at[key]["error"] for size, rows_at in found.rows.items() if "error" in rows_at.get(key, {})}
        notes += [f"- {label}, {mode}, {size}: {error}" for size, error in errors.items()]
    return Table("sweep", f"time against {found.kind}", header, rows, "\n".join(notes))


def targets_table(found: Sequence[TargetResult]) -> Table:
    reached = {True: "yes", False: "**no**", None: "–"}
    rows: list[Sequence[str]] = [[result.text, result.target, result.measured, reached[result.reached]] for result in found]
    return Table("targets", "Targets", ("measurement", "target", "measured", "met"), rows)


def figure(record: Record) -> Plot:
    return sweep_plot(record) if record["sweep"] else ratio_plot(record)


def sweep_plot(record: Record) -> Plot:
    found = sweep_of(record)
    return found.plot("ms", "sweep", f"Time of a step against {found.kind}", "ms a step", SWEEPS[found.kind])


def ratio_plot(record: Record) -> Plot:
    """Ratios to Adam in the same mode, with quartiles: a category for each method, and dots for each workload and mode."""
    rows = [(w["name"], row) for w in record["workloads"] for row in w["rows"] if row.get("ratio")]
    rows = [(name, row) for name, row in rows if METHODS[row["method"]].name != BASELINE]
    workloads, modes = ({value for value, _ in rows}, {row["mode"] for _, row in rows})
    measured = {METHODS[row["method"]].name for _, row in rows}
    names = [name for name in METHODS if name in measured]
    by_label: dict[str, list[Row]] = {}
    for workload, row in rows:
        parts = [workload] * (len(workloads) > 1) + [MODES[row["mode"]]] * (len(modes) > 1)
        by_label.setdefault(", ".join(parts) or workload, []).append(row)
    series = []
    for label, found in by_label.items():
        x = [float(names.index(METHODS[row["method"]].name)) for row in found]
        middle, low, high = ([row["ratio"][q] for row in found] for q in ("median", "q1", "q3"))
        series.append(Series(label, x, middle, low, high, kind="dots"))
    if names:
        series.append(Series("Adam", [-0.5, len(names) - 0.5], [1.0, 1.0], colour=COLOURS["adam"]))
    labels = [METHODS[name].label for name in names]
    return Plot("ratios", "Time of a step relative to Adam", series, y_label="ratio to Adam", log_y=True, categories=labels)
