"""Records of the benchmark on disk: JSON, and a Markdown page and a figure that are made from it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ..lab.files import write_text
from ..lab.markdown import markdown_table
from ..lab.plots import Table
from .sweeps import Record
from .tables import figure, sweep_table, targets_table, workload_table
from .targets import NOT_MEASURED, spread, target_results

BEGIN, END = "<!-- step cost: begin, written by step_cost.py --report -->", "<!-- step cost: end -->"
KEYS = {"command", "started", "machine", "rounds", "sweep", "finished", "workloads"}  # in every record


def save(folder: Path, name: str, record: Record) -> list[str]:
    """Write the record, its page and its figure, each atomically. Returns the names of the files."""
    write_text(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
    save_page(folder / f"{name}.md", record)
    written = [f"{name}.json", f"{name}.md"]
    if any("ms" in row for workload in record["workloads"] for row in workload["rows"]):
        try:
            from ..lab.matplotlib_files import save_figure

            save_figure(figure(record), folder / name, kinds=("png",))
            written.append(f"{name}.png")
        except ModuleNotFoundError as error:
            written.append(f"no figure, for want of {error.name}")
    return written


def save_page(path: Path, record: Record) -> None:
    write_text(path, page(record, path.stem))


def load(folder: Path) -> list[tuple[Path, Record]]:
    """All records in a folder, the oldest first."""
    found = [(path, read(path)) for path in sorted(folder.rglob("*.json"))]
    if not found:
        raise ValueError(f"there are no records in {folder}")
    return sorted(found, key=lambda item: item[1]["started"])


def read(path: Path) -> Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or not record.keys() >= KEYS:
        raise ValueError(f"{path} is not a record of this benchmark; move it out of the folder")
    return record


def page(record: Record, name: str) -> str:
    return f"# Step cost\n\n{section(record)}\n![{caption(record)}]({name}.png)\n{own_targets(record)}"


def readme(found: Sequence[tuple[Path, Record]], page: Path) -> str:
    """The tables of all records and of all targets, with links to the files, for a page of all results."""
    parts = ["### Targets\n\n" + table(targets_table(target_results([record for _, record in found])))]
    for path, record in found:
        link = Path(os.path.relpath(path, page.parent)).as_posix()
        files = f"[Record]({link}), [figure]({link.removesuffix('.json')}.png).\n"
        parts.append(
            f"### {title(record)}{'' if record['sweep'] else f' ({path.stem})'}\n\n"
            + section(record).replace("\n### ", "\n#### ")
            + "\n"
            + files
        )
    return "\n".join(parts)


def insert(path: Path, text: str) -> None:
    """Replace the text between the two markers in a file."""
    page = path.read_text(encoding="utf-8")
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{path} needs one line {BEGIN!r} and one line {END!r}")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    write_text(path, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def title(record: Record) -> str:
    machine = record["machine"]
    what = f"cost against {record['sweep']}" if record["sweep"] else "whole steps"
    return f"{machine['gpu'] or machine['cpu']}: {what}"


def caption(record: Record) -> str:
    return f"time against {record['sweep']}" if record["sweep"] else "ratios to Adam"


def section(record: Record) -> str:
    head = f"    {record['command']}\n\n{describe(record)}\n"
    if record["sweep"]:
        found = sweep_table(record)
        return f"{head}\n{table(found)}" + (f"\nMissing:\n\n{found.caption}\n" if found.caption else "")
    tables = [
        f"### {w['description']}, batch {w['batch']}, {w['parameters']:,} parameters\n\n"
        + table(workload_table(w, record["machine"]["device"]))
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
    """The targets that this record has measured."""
    found = [result for result in target_results([record]) if result.measured != NOT_MEASURED]
    return f"\n## Targets\n\n{table(targets_table(found))}" if found else ""


def table(found: Table) -> str:
    return markdown_table(found.header, found.rows)
