"""A command for each experiment. Each setting is an option. The command does the runs, and prints their tables."""

from __future__ import annotations

import dataclasses
import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import typer
from rich.console import Console

from .data import DataError
from .estimate import time_needed
from .experiment import PRESETS, Experiment, as_task, option
from .machine import commit
from .plots import Table
from .progress import bars, progress_bars, progress_lines
from .store import DAMAGED, FINISHED, DamagedRun, Record, Store, Task, key_of
from .store import RUNNING as BUSY
from .sweep import Interrupted, grid, run_tasks
from .terminal import count, escaped, print_table

RUNS = Path("out/runs")
TOGETHER = 16
SHORT = 50  # if the defaults of all presets are not longer than this, they share a line in help texts
SETTINGS, RUNNING = "Settings", "Runs"  # groups of options in help texts


@dataclass(frozen=True)
class RunOptions:
    """Options of all experiments: where runs and data are stored, and where tasks run."""

    workers: int = option(0, "number of worker processes; 0 for one per core")
    together: int = option(TOGETHER, "maximum number of runs that train together in one process, if the experiment supports it")
    runs: Path = option(RUNS, "folder of runs; finished runs in it are not repeated")  # noqa: RUF009
    data: Optional[Path] = option(None, "folder of data sets, instead of HESSCALE_DATA or data/")  # noqa: RUF009, UP045
    ray: str = option("", "address of a Ray cluster to run on; 'local' starts one")
    tensorboard: bool = option(False, "also log for TensorBoard")
    dry_run: bool = option(False, "only print how much work there is, and how long it would take")

    @property
    def store(self) -> Store:
        return Store(self.runs, tensorboard=self.tensorboard)


def run_options(given: Mapping[str, Any]) -> RunOptions:
    """The given options, with ~ expanded in paths."""
    expanded: dict[str, Any] = {
        name: as_folder(value, f"--{name}") if isinstance(value, Path) else value for name, value in given.items()
    }
    return RunOptions(**expanded)


def as_folder(path: Path, option: str) -> Path:
    """The path with ~ expanded. Raises BadParameter if it is a file."""
    path = path.expanduser()
    if path.exists() and not path.is_dir():
        raise typer.BadParameter(f"{path} is a file, but a folder is needed", param_hint=option)
    return path


def command_of(experiment: Experiment) -> Callable[..., None]:
    """A function that typer turns into a command, with an option for every setting."""

    def command(preset: str, **given: Any) -> None:
        where = run_options({field.name: given.pop(field.name) for field in dataclasses.fields(RunOptions)})
        changed = {name: value for name, value in given.items() if value is not None}
        settings = settings_of(experiment, preset, changed)
        tasks, text = tasks_of(experiment, [settings]), command_text(experiment.name, preset, changed)
        run_experiment(experiment, tasks, where, text, settings)

    own = [
        parameter(field, hints(experiment.settings), None, values_in_presets(experiment, field)) for field in fields(experiment)
    ]
    shared = options_of(RunOptions, RUNNING)
    command.__signature__ = inspect.Signature([PRESET, *own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {}
    command.__doc__ = f"Measure {experiment.title[0].lower()}{experiment.title[1:]}"
    return command


def sweep_command(known: Mapping[str, Experiment]) -> Callable[..., None]:
    """``sweep EXPERIMENT --over setting=value,value …``: every combination of the values."""

    def sweep(experiment: str, preset: str, over: list[str], **given: Any) -> None:
        if experiment not in known:
            raise typer.BadParameter(f"{experiment!r} is not one of {', '.join(known)}", param_hint="experiment")
        chosen = known[experiment]
        settings = settings_of(chosen, preset, {})
        try:
            several = grid(settings, values_over(over))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--over") from None
        command = shlex.join(["hesscale", "sweep", experiment, f"--preset={preset}", *[f"--over={values}" for values in over]])
        run_experiment(chosen, tasks_of(chosen, several), run_options(given), command, *several)

    argument = typer.Argument(help=f"one of {', '.join(known)}")
    text = "a setting and its values, such as step_size=0.1,0.01; give it once for each setting"
    over = typer.Option("--over", help=text, rich_help_panel=SETTINGS)
    kind = inspect.Parameter.KEYWORD_ONLY
    sweep.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("experiment", kind, annotation=Annotated[str, argument]),
            PRESET,
            inspect.Parameter("over", kind, default=[], annotation=Annotated[list[str], over]),
            *options_of(RunOptions, RUNNING),
        ]
    )
    sweep.__annotations__ = {}
    sweep.__doc__ = "Run an experiment with every combination of the given values of its settings."
    return sweep


def values_over(over: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in over:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(f"{text!r} is not of the form setting=value,value")
        found.setdefault(name.strip().replace("-", "_"), []).extend(value.strip() for value in values.split(","))
    return found


def fields(experiment: Experiment) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(experiment.settings)


def hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def options_of(settings: type, group: str = SETTINGS) -> list[inspect.Parameter]:
    """An option of the command line for every field of a dataclass, with the field's default."""
    return [parameter(field, hints(settings), field.default, group=group) for field in dataclasses.fields(settings)]


def parameter(
    field: dataclasses.Field[Any], types: Mapping[str, Any], default: Any, extra: str = "", group: str = SETTINGS
) -> inspect.Parameter:
    kind = types[field.name] if default is not None or field.default is None else Optional[types[field.name]]  # noqa: UP045
    name = field.name.replace("_", "-")
    flags = f"--{name}/--no-{name}" if types[field.name] is bool and default is None else f"--{name}"
    option = typer.Option(flags, help=field.metadata["help"] + extra, rich_help_panel=group)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


PRESET = inspect.Parameter(
    "preset",
    inspect.Parameter.KEYWORD_ONLY,
    default="small",
    annotation=Annotated[
        str,
        typer.Option(
            "--preset",
            help=f"defaults of all other settings: {', '.join(PRESETS[:-1])} or {PRESETS[-1]}",
            rich_help_panel=SETTINGS,
        ),
    ],
)


def values_in_presets(experiment: Experiment, field: dataclasses.Field[Any]) -> str:
    """The default of an option, or its default in each preset. A space after each comma allows line breaks."""
    values = [written(field, getattr(experiment.presets[preset], field.name)) for preset in PRESETS]
    if len({*values}) == 1:
        return f"  [default: {values[0]}]"
    each = [f"{preset}: {value}" for preset, value in zip(PRESETS, values, strict=True)]
    together = f"[{'; '.join(each)}]"
    return f"\n{together}" if len(together) <= SHORT else "".join(f"\n{one}" for one in each)


def written(field: dataclasses.Field[Any], value: Any) -> str:
    if isinstance(value, bool):
        return f"{'' if value else 'no-'}{field.name.replace('_', '-')}"
    return str(value).replace(",", ", ") or "none"


def settings_of(experiment: Experiment, preset: str, changed: Mapping[str, Any]) -> Any:
    if preset not in experiment.presets:
        raise typer.BadParameter(f"{preset!r} is not one of {', '.join(experiment.presets)}", param_hint="--preset")
    try:
        return dataclasses.replace(experiment.presets[preset], **changed)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def tasks_of(experiment: Experiment, several: list[Any]) -> list[Task]:
    """The tasks of all these settings, without duplicates."""
    try:
        tasks = [as_task(task) for settings in several for task in experiment.tasks(settings)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return [task for i, task in enumerate(tasks) if task not in tasks[:i]]


def command_text(name: str, preset: str, changed: Mapping[str, Any]) -> str:
    """The command line that repeats these runs, without the folders of runs and data."""
    words = [f"--{key.replace('_', '-')}={value}" for key, value in changed.items() if not isinstance(value, bool)]
    words += [f"--{'' if value else 'no-'}{key.replace('_', '-')}" for key, value in changed.items() if isinstance(value, bool)]
    return shlex.join(["hesscale", name, f"--preset={preset}", *words])


def run_experiment(experiment: Experiment, tasks: list[Task], where: RunOptions, command: str, *several: Any) -> None:
    """Do the tasks that are not finished, show progress, and print the tables of all results."""
    console, store = Console(), where.store
    if where.workers < 0:
        raise typer.BadParameter(f"it must be 0 or more, not {where.workers}", param_hint="--workers")
    if where.together < 1:
        raise typer.BadParameter(f"it must be at least 1, not {where.together}", param_hint="--together")
    begun = [record for task in tasks if (record := store.record(experiment.name, task)) is not None]
    finished = [record for record in begun if record.status == FINISHED]
    console.print(f"[bold]{experiment.name}[/]: {'; '.join(experiment.work(settings) for settings in several)}.", highlight=False)
    console.print(f"{count(len(tasks), 'run')} in {where.runs}{', '.join(['', *begun_before(begun)])}.", highlight=False)
    if where.dry_run:
        done = {record.directory.name for record in finished}
        left = [task for task in tasks if key_of(experiment.name, task) not in done]
        if left:
            console.print(time_needed(experiment, store, left, workers_of(experiment, tasks, where)), highlight=False)
        return
    check_inputs(experiment, tasks, finished, where)
    store.request(experiment.name, tasks, command)
    failed = do(console, experiment, tasks, where, command) if len(finished) < len(tasks) else []
    for directory, error in failed:
        console.print(f"[red]failed[/] {escaped(f'{directory}: {error}')}", highlight=False)
    show(console, experiment, store, tasks)
    for settings in several if experiment.after is not None else ():
        finish(console, experiment, store, settings)
    if failed:
        raise typer.Exit(1)


def begun_before(records: list[Record]) -> Iterator[str]:
    """Phrases on the runs that earlier commands began: how many are done, and where the others resume."""
    now = [commit()]
    finished = [record for record in records if record.status == FINISHED]
    others = sum(record.facts["commits"] != now for record in finished)
    if finished:
        yield f"{len(finished)} done before" + (f" ({others} with another commit or with uncommitted changes)" if others else "")
    statuses = [record.status for record in records]
    if busy := statuses.count(BUSY):
        yield f"{busy} in progress in another process"
    left = [record for record, status in zip(records, statuses, strict=True) if status not in (FINISHED, DAMAGED, BUSY)]
    resumed = [record for record in left if (record.directory / "checkpoint.pt").exists()]
    shares = sorted(
        record.facts["saved"] / record.facts["total"] for record in resumed if {"saved", "total"} <= record.facts.keys()
    )
    if resumed:
        at = f" at {shares[0]:.0%}" + (f" to {shares[-1]:.0%}" if shares[0] < shares[-1] else "") if shares else ""
        yield f"{len(resumed)} resumed from {'its' if len(resumed) == 1 else 'their'} last checkpoint{at}"
    if len(left) > len(resumed):
        yield f"{len(left) - len(resumed)} started again, since no checkpoint was saved"


def workers_of(experiment: Experiment, tasks: list[Task], where: RunOptions) -> int:
    return 1 if experiment.is_alone(tasks) else where.workers or os.cpu_count() or 1


def finish(console: Console, experiment: Experiment, store: Store, settings: Any) -> None:
    """Do the further work of an experiment (``after``) once its runs have finished."""
    asked = {task: as_task(task) for task in experiment.tasks(settings)}
    finished = {
        task: store.directory(experiment.name, values)
        for task, values in asked.items()
        if store.is_finished(experiment.name, values)
    }
    assert experiment.after is not None
    try:
        for line in experiment.after(settings, finished):
            console.print(escaped(line), highlight=False)
    except (ModuleNotFoundError, OSError, RuntimeError, ValueError) as error:
        console.print(f"[red]failed[/] {escaped(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def check_inputs(experiment: Experiment, tasks: list[Task], finished: list[Record], where: RunOptions) -> None:
    """Check that the data for unfinished tasks exist, and that finished tasks used the same data."""
    done = {record.directory for record in finished}
    left = [task for task in tasks if where.store.directory(experiment.name, task) not in done]
    for task in {task.get("dataset"): task for task in left if not where.ray}.values():
        try:
            experiment.inputs(task, where.data)
        except DataError as error:
            raise typer.BadParameter(str(error), param_hint="--data") from None
    for record in finished:
        try:
            inputs = experiment.inputs(record.task, where.data)
        except DataError:
            continue
        if record.facts.get("inputs", inputs) != inputs:
            raise typer.BadParameter(f"{record.directory} was done with different data of the same name; choose other --runs")


def do(console: Console, experiment: Experiment, tasks: list[Task], where: RunOptions, command: str) -> list[tuple[Path, str]]:
    """Do the tasks that are not finished. Returns those that failed."""
    workers = workers_of(experiment, tasks, where)
    try:
        with bars(console) as progress:
            if console.is_terminal:
                watch = progress_bars(progress, experiment, len(tasks))
            else:
                watch = progress_lines(console, experiment, len(tasks))
            return run_tasks(
                experiment,
                where.store,
                tasks,
                workers=workers,
                data=where.data,
                command=command,
                together=where.together,
                ray=where.ray or None,
                watch=watch,
            ).failed
    except Interrupted as stopped:
        console.print(escaped(str(stopped)), highlight=False)
        raise typer.Exit(130) from None


def show(console: Console, experiment: Experiment, store: Store, tasks: list[Task]) -> None:
    """Print the tables of an experiment."""
    try:
        results = experiment.results(store, tasks)
    except DamagedRun as error:
        console.print(f"[red]damaged[/] {escaped(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    if not results:
        return
    for section in experiment.sections(results):
        console.print(f"\n[bold]{escaped(section.title)}[/]", highlight=False)
        for table in [item for item in section.items if isinstance(item, Table)]:
            print_table(console, table)
    console.print("[bold]hesscale report[/] draws the figures.")
