"""The report of a store's runs: a page, figures, tables, a summary of the numbers, and the commands that produced them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from .baseline import NUMBERS, add_baseline, read_summary, summary_file
from .compact import rounded
from .experiment import Experiment, experiments
from .files import write_text
from .markdown import aligned_table, escaped
from .matplotlib_files import save_figure
from .page import page_of, slug
from .plots import Heat, Plot, Section, Series, Table
from .run_files import read_runs, write_runs
from .series_layout import as_array, check, palette
from .store import FAILED, FINISHED, DamagedRun, Result, Store, Task

FEW = 8  # the maximum number of values of a setting to list
Log: TypeAlias = Callable[[str], None]


def silent(text: str) -> None:
    """Log nothing."""


@dataclass
class Account:
    """The part of a report for one experiment: its figures and tables, and how they were produced."""

    name: str
    title: str
    command: str = ""
    sections: list[Section] = field(default_factory=list)
    asked: int = 0  # number of runs
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    machines: list[str] = field(default_factory=list)
    started: str = ""
    finished: str = ""
    baselines: list[dict[str, Any]] = field(default_factory=list)  # metadata of earlier reports that it also shows
    results: list[Result] = field(default_factory=list)
    curves: Sequence[str] = ()  # metrics that are stored for each run

    @property
    def items(self) -> list[Plot | Heat | Table]:
        return [item for section in self.sections for item in section.items]

    @property
    def plots(self) -> list[Plot]:
        return [item for item in self.items if isinstance(item, Plot)]

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each label, the same in all plots."""
        return palette(self.plots)

    @property
    def is_partial(self) -> bool:
        return self.statuses[FINISHED] < self.asked or bool(self.problems)

    @property
    def progress(self) -> str:
        others = [f"{count} {status}" for status, count in self.statuses.items() if status != FINISHED]
        done = f"{self.statuses[FINISHED]} of {self.asked} runs finished"
        return done + (f"; {', '.join(others)}" if others else "") + "."

    @property
    def made(self) -> dict[str, str]:
        """The commit, the machine and the time."""
        found = {
            "runs": self.progress,
            "commit": "; ".join(self.commits),
            "machine": "; ".join(self.machines),
            "when": f"{self.started} to {self.finished} UTC" if self.finished else "",
        }
        return {name: value for name, value in found.items() if value}

    def file_name(self, item: Plot | Heat | Table) -> str:
        return f"{slug(self.name)}-{slug(item.name)}"


def report(
    store: Store,
    names: list[str],
    folder: Path,
    page: bool = True,
    everything: bool = False,
    beside: Path | None = None,
    log: Log = silent,
) -> Path:
    """Write the report of these experiments, or of all experiments that have runs. Returns the path to open.

    It shows the runs of the last command, or with ``everything`` all finished runs. With ``beside``, it also shows the results of
    this earlier report. Problems, such as runs that cannot be read, are also passed to ``log``.
    """
    known = experiments()
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no experiment is named {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    requests = {} if everything else store.requests()
    others = {name: store.finished(name) for name in known if name not in requests}
    requests |= {name: found for name, found in others.items() if found[1]}
    if missing := [name for name in names if name not in requests]:
        raise ValueError(f"{store.root} has no runs of {', '.join(missing)}: run `hesscale {missing[0]}` first")
    if not requests:
        example = "quality" if "quality" in known else next(iter(sorted(known)), "quality")
        raise ValueError(f"{store.root} has no runs: run an experiment first, such as `hesscale {example}`")
    accounts = []
    for name in names or requests:
        command, tasks = requests[name]
        if name in known:
            accounts.append(account_of(store, known[name], command, tasks))
        else:
            problem = "This version has no experiment of that name."
            accounts.append(Account(name, name, command, asked=len(tasks), problems=[problem]))
    for account in accounts:
        for problem in account.problems:
            log(f"{account.name}: {problem}")
    if beside is not None:
        add_baselines(accounts, read_summary(beside), beside, folder)
    return write_report(accounts, folder, page=page)


def add_baselines(accounts: Sequence[Account], before: dict[str, dict[str, Any]], beside: Path, folder: Path) -> None:
    """Add the results of an earlier summary to each account. Raises ValueError if writing to the folder would lose any."""
    shared = [account for account in accounts if account.name in before]
    if not shared:
        raise ValueError(f"{beside} shows {', '.join(before)}, not {', '.join(account.name for account in accounts)}")
    shown = {account.name: {item.name for item in account.items if not isinstance(item, Heat)} for account in shared}
    lost = [f"{name}: {item}" for name, found in before.items() for item in found["shown"] if item not in shown.get(name, ())]
    if lost and summary_file(beside).resolve() == (folder / "summary.json").resolve():
        raise ValueError(
            f"writing to {folder} would lose results that only its summary has: {', '.join(lost)}; choose another --out"
        )
    for account in shared:
        if account.items:
            add_baseline(account, before[account.name])


def account_of(store: Store, experiment: Experiment, command: str, tasks: list[Task]) -> Account:
    """Read the runs of these tasks. If a run cannot be read, this is noted in the account's ``problems``."""
    account = Account(experiment.name, experiment.title, command, asked=len(tasks), settings=settings_of(tasks))
    account.curves = experiment.curves
    names = {option.name for option in dataclasses.fields(experiment.task)}
    if any(task.keys() != names for task in tasks):
        account.problems.append("These runs have other settings than this version of the experiment, so run it again.")
        return account
    results: list[Result] = []
    errors: Counter[str] = Counter()
    for task in tasks:
        record = store.record(experiment.name, task)
        status = "not started" if record is None else record.status
        if record is not None and status == FINISHED:
            try:
                results += experiment.results(store, [task])
            except (DamagedRun, TypeError) as error:  # TypeError: this version has no such setting
                status, record.problem = "damaged", f"{record.directory} cannot be read: {error}"
        account.statuses[status] += 1
        if record is not None and record.problem:
            account.problems.append(record.problem)
        elif record is not None and status == FAILED:
            errors[record.facts["error"]] += 1
    account.problems += [f"{count} failed: {error}" for error, count in errors.items()]
    facts = [result.facts for result in results]
    account.commits = unique(commit for found in facts for commit in found["commits"])
    account.machines = unique(", ".join(f"{name} {value}" for name, value in found["machine"].items()) for found in facts)
    account.started = min((found["started"] for found in facts), default="")
    account.finished = max((found["finished"] for found in facts), default="")
    account.sections = experiment.sections(results) if results else []
    account.results = results
    return account


def report_again(sources: Sequence[Path], folder: Path, page: bool = True) -> Path:
    """Make one report from the runs that earlier reports have stored in the folders ``sources``. Returns the path to open.

    If several folders have a run with the same settings, that of the first folder is used.
    """
    known, accounts = experiments(), dict[str, Account]()
    for source in sources:
        before = read_summary(source)
        kept = [known[name] for name in before if name in known and runs_file(source, name).exists()]
        if not kept:
            raise ValueError(f"{source} keeps no runs: only reports of {', '.join(n for n, e in known.items() if e.curves)} do")
        for experiment in kept:
            add_kept(accounts.setdefault(experiment.name, Account(experiment.name, experiment.title)), experiment, source, before)
    for account in accounts.values():
        tasks = [dataclasses.asdict(result.task) for result in account.results]
        account.asked = account.statuses[FINISHED] = len(tasks)
        account.settings, account.sections = settings_of(tasks), known[account.name].sections(account.results)
    return write_report([*accounts.values()], folder, page=page)


def add_kept(account: Account, experiment: Experiment, source: Path, before: dict[str, dict[str, Any]]) -> None:
    """Add the runs that an earlier report has stored to an account, with their metadata."""
    made, done = before[experiment.name], {result.task for result in account.results}
    account.results += [r for r in read_runs(runs_file(source, experiment.name), experiment.task) if r.task not in done]
    account.curves = experiment.curves
    account.command = "\n".join(unique([*account.command.splitlines(), *made["command"].splitlines()]))
    account.commits, account.machines = (
        unique([*known, *([made[fact]] if fact in made else [])])
        for known, fact in ((account.commits, "commit"), (account.machines, "machine"))
    )
    started, _, finished = made.get("when", "").removesuffix(" UTC").partition(" to ")
    account.started = min(filter(None, (account.started, started)), default="")
    account.finished = max(account.finished, finished)


def runs_file(folder: Path, experiment: str) -> Path:
    return folder / f"{slug(experiment)}-runs.json.gz"


def write_report(accounts: Sequence[Account], folder: Path, *, page: bool = True) -> Path:
    """Write figures, ``tables.md``, ``summary.json``, the runs and, with ``page``, ``index.html``. Returns the path to open."""
    for account in accounts:
        for item in account.items:
            check(item)
        if repeated := [name for name, count in Counter(map(account.file_name, account.items)).items() if count > 1]:
            raise ValueError(f"{account.name} has more than one figure or table named {', '.join(repeated)}")
    for account in accounts:
        for item in account.items:
            if not isinstance(item, Table):
                save_figure(item, folder / "figures" / account.file_name(item), account.colours)
    write_text(folder / "tables.md", "\n".join(markdown(account) for account in accounts))
    write_text(folder / "summary.json", summary(accounts))
    for account in accounts:
        if account.curves and account.results:
            write_runs(runs_file(folder, account.name), account.results, account.curves)
    if page:
        write_text(folder / "index.html", page_of(accounts, folder))
    return folder / "index.html" if page else folder


def markdown(account: Account) -> str:
    """All tables of an experiment."""
    lines = [f"# {account.title}", "", *indented(account.command), "", f"{account.progress}", ""]
    for found in account.baselines:
        runs = found.get("runs", "").rstrip(".")
        lines += [f"Beside them, from an earlier report ({escaped(runs)}):", "", *indented(found["command"]), ""]
    lines += [f"- {problem}" for problem in account.problems] + [""] * bool(account.problems)
    findings = [f"- {escaped(finding.text)}" for section in account.sections for finding in section.findings]
    lines += [*findings, ""] if findings else []
    for section in account.sections:
        if tables := [item for item in section.items if isinstance(item, Table)]:
            lines += [f"## {section.title}", "", *([section.text, ""] if section.text else [])]
        for item in tables:
            lines += [f"### {item.title}", "", aligned_table(item), *([item.caption, ""] if item.caption else [])]
    return "\n".join(lines)


def indented(command: str) -> list[str]:
    return [f"    {line}" for line in command.splitlines()]


def summary(accounts: Sequence[Account]) -> str:
    """The numbers of plots and tables, rounded, with one line for each experiment."""
    lines = [f"{json.dumps(account.name)}: {json.dumps(numbers_of(account), ensure_ascii=False)}" for account in accounts]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def numbers_of(account: Account) -> dict[str, Any]:
    shown = {item.name: describe(item) for item in account.items}
    return {
        "command": account.command,
        "settings": account.settings,
        **account.made,
        **({"earlier": account.baselines} if account.baselines else {}),
        "problems": account.problems,
        "findings": [finding.text for section in account.sections for finding in section.findings],
        "shown": shown,
    }


def describe(item: Plot | Heat | Table) -> dict[str, Any]:
    if isinstance(item, Table):
        return {"title": item.title, "header": list(item.header), "rows": [[str(cell) for cell in row] for row in item.rows]}
    if isinstance(item, Heat):
        matrices = {title: as_array(values) for title, values in item.panels}
        ends = {title: (m.shape, *rounded([m.min(), m.max()])) for title, m in matrices.items()}
        panels = {title: {"shape": shape, "min": low, "max": high} for title, (shape, low, high) in ends.items()}
        return {"title": item.title, "panels": panels}
    series = [describe_series(series) for series in item.series]
    return {"title": item.title, "x": list(item.categories) or item.x_label, "y": item.y_label, "series": series}


def describe_series(series: Series) -> dict[str, Any]:
    """The numbers of a series, and its style if that is not the default."""
    look = {"kind": series.kind, "colour": series.colour, "dashed": series.dashed}
    usual = {"kind": "line", "colour": None, "dashed": False}
    values = {name: found for name in NUMBERS if (found := getattr(series, name)) is not None}
    return (
        {"label": series.label}
        | {name: value for name, value in look.items() if value != usual[name]}
        | {name: rounded(as_array(found)) for name, found in values.items()}
    )


def settings_of(tasks: Sequence[Task]) -> dict[str, str]:
    """Each setting with its values."""
    found = {}
    for name in tasks[0] if tasks else ():
        values = [str(value) or "–" for value in unique(task.get(name) for task in tasks)]
        is_long = len(values) > FEW
        found[name] = f"{len(values)} values, {values[0]} … {values[-1]}" if is_long else ", ".join(values)
    return found


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
