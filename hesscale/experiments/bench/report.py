"""Tables and figures, made from the records alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..lab.files import write_whole
from .methods import BASELINE, METHODS, MODES
from .targets import NOT_MEASURED, Record, Row, TargetResult, slopes, spread, target_results
from .workloads import CUDA, SWEEPS

BEGIN, END = "<!-- step cost: begin, written by step_cost.py --report -->", "<!-- step cost: end -->"
KEYS = {"command", "started", "machine", "rounds", "sweep", "finished", "workloads"}  # of every record
LIBRARIES_OWN = 2**28  # bytes on a GPU, below which the workspaces of its libraries, made at first use, outweigh a step
HEADER = ("method", "mode", "ms a step", "to Adam, same mode", "to eager Adam", "peak memory to Adam")
MARKS = {"eager": "o", "compiled": "s", "graph": "^"}


def save(folder: Path, name: str, record: Record) -> list[str]:
    """The record, its table and its figure, each whole or not at all; the names of the files written."""
    write_whole(folder / f"{name}.json", lambda path: path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8"))
    save_page(folder / f"{name}.md", record)
    written = [f"{name}.json", f"{name}.md"]
    if any("ms" in row for workload in record["workloads"] for row in workload["rows"]):
        try:
            draw = sweep_figure if record["sweep"] else ratio_figure
            write_whole(folder / f"{name}.png", draw(record))
            written.append(f"{name}.png")
        except ModuleNotFoundError as error:
            written.append(f"no figure, for want of {error.name}")
    return written


def save_page(path: Path, record: Record) -> None:
    write_whole(path, lambda partial: partial.write_text(page(record, path.stem), encoding="utf-8"))


def load(folder: Path) -> list[tuple[Path, Record]]:
    """Every record below a folder, oldest first."""
    found = [(path, read(path)) for path in sorted(folder.rglob("*.json"))]
    if not found:
        raise ValueError(f"no records below {folder}")
    return sorted(found, key=lambda item: item[1]["started"])


def read(path: Path) -> Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or not record.keys() >= KEYS:
        raise ValueError(f"{path} is no record of this benchmark: move it out of the folder")
    return record


# --------------------------------------------------------------------------------------------------------------------- text


def page(record: Record, name: str) -> str:
    return f"# Step cost\n\n{section(record)}\n![{caption(record)}]({name}.png)\n{own_targets(record)}"


def readme(found: Sequence[tuple[Path, Record]], page: Path) -> str:
    """Every record's tables and all targets, with links to the files, for the page that collects them."""
    parts = ["### Targets\n\n" + targets_table(target_results([record for _, record in found]))]
    for path, record in found:
        link = Path(os.path.relpath(path, page.parent)).as_posix()
        files = f"[Record]({link}), [figure]({link.removesuffix('.json')}.png).\n"
        parts.append(f"### {title(record)}\n\n" + section(record).replace("\n### ", "\n#### ") + "\n" + files)
    return "\n".join(parts)


def insert(path: Path, text: str) -> None:
    """Replace what stands between the two marks."""
    page = path.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{path} needs one line {BEGIN!r} and one line {END!r}")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    write_whole(path, lambda partial: partial.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8"))


def title(record: Record) -> str:
    machine = record["machine"]
    what = f"cost against {record['sweep']}" if record["sweep"] else "whole steps"
    return f"{machine['gpu'] or machine['cpu']}: {what}"


def caption(record: Record) -> str:
    return f"time against {record['sweep']}" if record["sweep"] else "ratios to Adam"


def section(record: Record) -> str:
    head = f"    {record['command']}\n\n{describe(record)}\n"
    if record["sweep"]:
        return f"{head}\n{sweep_table(record)}"
    tables = [
        f"### {w['description']}, batch {w['batch']}, {w['parameters']:,} parameters\n\n"
        + workload_table(w, record["machine"]["device"])
        for w in record["workloads"]
    ]
    return "\n".join([head, *tables, ensemble_line(record)])


def describe(record: Record) -> str:
    m = record["machine"]
    where = f"{m['gpu']}, CUDA {m['cuda']}, {'TF32' if m['tf32'] else 'no TF32'}; " if m["gpu"] else ""
    unfinished = "" if record["finished"] else " The run was not finished."
    return (
        f"{where}{m['cpu']}, {m['cores']} cores, {m['threads']} thread{'s' * (m['threads'] != 1)}; torch {m['torch']}, "
        f"Python {m['python']}; {record['started'][:10]}, commit {m['commit']}. Medians and quartiles of {record['rounds']} "
        f"rounds.{unfinished}"
    )


def workload_table(workload: dict[str, Any], device: str) -> str:
    return table(HEADER, [cells(row, device) for row in workload["rows"]])


def cells(row: Row, device: str) -> list[str]:
    if "error" in row:
        return [row["label"], MODES[row["mode"]], row["error"], "", "", ""]
    mode = MODES[row["mode"]] if row["ran_as"] == MODES[row["mode"]] else f"{MODES[row['mode']]} (ran as {row['ran_as']})"
    ratios = [spread(row[key]) if row[key] else "–" for key in ("ratio", "ratio_to_eager_adam")]
    tells = row["memory_ratio"] and (device != CUDA or row["peak_bytes"] / row["memory_ratio"] > LIBRARIES_OWN)
    memory = f"{row['memory_ratio']:.2f}" if tells else "–"
    return [row["label"], mode, f"{row['ms']['median']:.3g}", *ratios, memory]


def sweep_table(record: Record) -> str:
    """Milliseconds at every size, and the slope of the fit."""
    fitted = slopes(record)
    sizes = [w["size"] for w in record["workloads"]]
    header = [
        f"ms a step ({SWEEPS[record['sweep']]})",
        "mode",
        *map(str, sizes),
        "to Adam at the last",
        "slope",
        "slope − Adam's",
    ]
    keys = list(dict.fromkeys((row["method"], row["mode"]) for w in record["workloads"] for row in w["rows"]))
    body = []
    notes = []
    for method, mode in keys:
        by_size = {
            w["size"]: row for w in record["workloads"] for row in w["rows"] if (row["method"], row["mode"]) == (method, mode)
        }
        times = [f"{by_size[n]['ms']['median']:.3g}" if "ms" in by_size.get(n, {}) else "–" for n in sizes]
        slope = fitted.get((method, mode))
        last = by_size.get(sizes[-1], {}).get("ratio")
        above = "–" if slope is None or slope.above_adam is None else f"{slope.above_adam:+.3f}"
        ends = [spread(last) if last else "–", "–" if slope is None else f"{slope.slope:.3f}", above]
        body.append([METHODS[method].label, MODES[mode], *times, *ends])
        notes += [
            f"- {METHODS[method].label}, {MODES[mode]}, {n}: {row['error']}" for n, row in by_size.items() if "error" in row
        ]
    return table(header, body) + ("\nMissing:\n\n" + "\n".join(notes) + "\n" if notes else "")


def ensemble_line(record: Record) -> str:
    found = record.get("ensemble")
    if not found:
        return ""
    if "error" in found:
        return f"Ensemble: not measured: {found['error']}\n"
    return (
        f"Ensemble of {found['members']} MLPs 64-64, batch 64: {spread(found['ratio'])} times the member-steps per second of "
        "as many single compiled runs in turn.\n"
    )


def own_targets(record: Record) -> str:
    """The targets that this record says something about."""
    found = [result for result in target_results([record]) if result.measured != NOT_MEASURED]
    return f"\n## Targets\n\n{targets_table(found)}" if found else ""


def targets_table(found: Sequence[TargetResult]) -> str:
    return table(["work", "target", "measured", "reached"], [result_cells(result) for result in found])


def result_cells(result: TargetResult) -> list[str]:
    return [result.text, result.target, result.measured, {True: "yes", False: "**no**", None: "–"}[result.reached]]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# ------------------------------------------------------------------------------------------------------------------ figures


def sweep_figure(record: Record) -> Callable[[Path], None]:
    """Milliseconds a step against the size, both axes logarithmic; one colour a method, one dash a mode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained", dpi=90)
    axes = figure.subplots()
    curves: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for workload in record["workloads"]:
        for row in workload["rows"]:
            if "ms" in row:
                curves.setdefault((row["method"], row["mode"]), []).append((workload["size"], row))
    fitted = slopes(record)
    others = iter(f"C{k}" for k in range(10))
    colours = {method: METHODS[method].colour or next(others) for method in dict.fromkeys(m for m, _ in curves)}
    modes = list(dict.fromkeys(mode for _, mode in curves))
    for (method, mode), points in curves.items():
        label = METHODS[method].label + (f", {MODES[mode]}" if len(modes) > 1 else "")
        if (method, mode) in fitted:
            label += f" ({fitted[method, mode].slope:.2f})"
        sizes = [size for size, _ in points]
        dash = ("-", "--", ":")[modes.index(mode)]
        axes.plot(sizes, [r["ms"]["median"] for _, r in points], dash, color=colours[method], marker=".", label=label)
        low, high = ([r["ms"][q] for _, r in points] for q in ("q1", "q3"))
        axes.fill_between(sizes, low, high, color=colours[method], alpha=0.15, linewidth=0)
    every = [workload["size"] for workload in record["workloads"]]
    axes.set(xscale="log", yscale="log", xlabel=f"number of {record['sweep']}", ylabel="ms a step")
    axes.set_xticks(every, [str(size) for size in every])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.set_title(f"{SWEEPS[record['sweep']]}; slope in brackets", fontsize=10)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    return lambda path: FigureCanvasAgg(figure).print_png(path)


def ratio_figure(record: Record) -> Callable[[Path], None]:
    """Ratios to Adam in the same mode, with quartiles, a panel for each workload."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    workloads = [w for w in record["workloads"] if any(row.get("ratio") for row in w["rows"])]
    measured = {METHODS[row["method"]].name for w in workloads for row in w["rows"] if row.get("ratio")}
    names = [name for name in METHODS if name in measured - {BASELINE}]
    figure = Figure(figsize=(3 + 2.8 * max(1, len(workloads)), 1.5 + 0.3 * len(names)), layout="constrained", dpi=90)
    panels: Any = figure.subplots(1, max(1, len(workloads)), sharey=True, squeeze=False)[0]
    modes = [m for m in MODES if any(row["mode"] == m for w in workloads for row in w["rows"])]
    for axes, workload in zip(panels, workloads, strict=False):
        for row in workload["rows"]:
            if row.get("ratio") and METHODS[row["method"]].name in names:
                value, k = row["ratio"], modes.index(row["mode"])
                y = names.index(METHODS[row["method"]].name) + 0.22 * (k - (len(modes) - 1) / 2)
                around = [[value["median"] - value["q1"]], [value["q3"] - value["median"]]]
                axes.errorbar(value["median"], y, xerr=around, fmt=MARKS[row["mode"]], color=f"C{k}", markersize=5)
        axes.axvline(1, color=METHODS[BASELINE].colour, linewidth=0.8)
        axes.set(xscale="log", title=workload["name"], xlabel="ratio to Adam")
        low, high = axes.get_xlim()
        ticks = [tick for tick in (0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(names)), [METHODS[name].label for name in names])
    panels[0].invert_yaxis()
    marks = [panels[0].plot([], [], MARKS[m], color=f"C{k}", label=MODES[m])[0] for k, m in enumerate(modes)]
    figure.legend(handles=marks, loc="outside lower right", ncols=3, frameon=False)
    return lambda path: FigureCanvasAgg(figure).print_png(path)
