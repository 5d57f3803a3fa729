"""The command ``hesscale``: experiments, their runs and the report, the benchmark of step costs, and the operators."""

from __future__ import annotations

import importlib
import inspect
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Column, Table
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"the command line needs {missing.name}: pip install 'hesscale[experiments]'") from None

import hesscale

from .bench import Settings
from .bench import run as run_bench
from .bench.tables import tables
from .lab.commands import (
    RUNS,
    RunOptions,
    as_rich_table,
    command_of,
    command_text,
    escaped,
    options_of,
    run_experiment,
    settings_of,
    sweep_command,
    tasks_of,
)
from .lab.data import download, load, names
from .lab.download import DataError
from .lab.experiment import experiments
from .lab.store import DamagedRun, Store

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Hessian diagonals for PyTorch.")


@app.command()
def operators(
    containing: Annotated[str, typer.Argument(help="show only operators whose name or family contains this")] = "",
) -> None:
    """List the operators that have a curvature rule."""
    wanted = [op for op in hesscale.operators() if containing.lower() in f"{op.name} {op.family}".lower()]
    if not wanted:
        raise typer.BadParameter(f"no operator or family contains {containing!r}")
    table = Table("operator", "rule")
    for family, members in groupby(sorted(wanted, key=lambda op: op.family), key=lambda op: op.family):
        table.add_section()
        table.add_row(f"[bold]{family.replace('_', ' ')}[/]", "")
        for op in members:
            table.add_row(op.name, op.summary.replace("[", r"\["))
    Console().print(table)
    Console().print(f"{len(wanted)} operators. hesscale.explain(loss) shows those of a loss.")


def bench(**given: Any) -> None:
    """Cost of a training step, as ratios to torch's Adam in the same run."""
    console = Console()
    try:
        record = run_bench(Settings(**given), lambda text: console.print(text, highlight=False, markup=False), "hesscale bench")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for table in tables(record) if record is not None else ():
        console.print(as_rich_table(table))


bench.__signature__ = inspect.Signature(options_of(Settings))  # type: ignore[attr-defined]
bench.__annotations__ = {}
app.command()(bench)

EXPERIMENTS = experiments()
for experiment in EXPERIMENTS.values():
    app.command(experiment.name)(command_of(experiment))
app.command("sweep")(sweep_command(EXPERIMENTS))


@app.command()
def runs(
    only: Annotated[str, typer.Argument(help="show only runs of this experiment")] = "*",
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
) -> None:
    """List runs with their settings, their progress and their errors."""
    if only != "*" and only not in EXPERIMENTS:
        raise typer.BadParameter(f"{only!r} is not one of {', '.join(EXPERIMENTS)}")
    records = Store(where).records(only)
    if not records:
        raise typer.BadParameter(f"there are no such runs below {where}; an experiment makes some, such as hesscale quality")
    columns = ("experiment", "task", "status", "progress", "started (UTC)", "directory")
    table = Table(*[Column(name, overflow="fold") for name in columns])
    for record in records:
        facts = record.facts
        task = " ".join(f"{name}={value}" for name, value in facts.get("task", {}).items())
        progress = f"{facts['done']} / {facts['total']}" if "total" in facts else ""
        status = record.status + (f": {record.problem or facts.get('error')}" if record.status in ("failed", "damaged") else "")
        cells = facts.get("experiment", "?"), task, status, progress, facts.get("started", ""), record.directory.name
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    Console().print(table)


@app.command()
def report(
    names: Annotated[list[str] | None, typer.Argument(help="experiments to show; all that were run by default")] = None,
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
    out: Annotated[Path, typer.Option("--out", help="folder for the page, its figures and tables")] = Path("out/report"),
    page: Annotated[bool, typer.Option("--page/--no-page", help="write index.html")] = True,
    everything: Annotated[bool, typer.Option("--all", help="show all finished runs, not only those of the last command")] = False,
    beside: Annotated[Path | None, typer.Option(help="an earlier report, or its summary.json, to show beside this one")] = None,
    again: Annotated[Path | None, typer.Option(help="make this report again, from the runs that it kept")] = None,
) -> None:
    """Write one page with the figures, tables, settings and commands of the last runs."""
    from .lab.report import report as write
    from .lab.report import report_again

    try:
        if again is not None:
            if names or everything or beside is not None:
                raise ValueError("--again shows what that report showed; leave out experiments, --all and --beside")
            path = report_again(again.expanduser(), out.expanduser(), page)
        else:
            earlier = beside and beside.expanduser()
            path = write(Store(where.expanduser()), names or [], out.expanduser(), page, everything, earlier)
    except (ValueError, DamagedRun) as error:
        raise typer.BadParameter(str(error)) from None
    Console().print(f"wrote {path}", highlight=False, soft_wrap=True)


@app.command()
def demo(
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
    out: Annotated[Path, typer.Option("--out", help="folder for the page")] = Path("out/report"),
) -> None:
    """Run quality and supervised at a small size, and write their report; this takes two minutes."""
    started = time.perf_counter()
    names = ["quality", "supervised"]
    for name in names:
        settings = settings_of(EXPERIMENTS[name], "small", {})
        tasks = tasks_of(EXPERIMENTS[name], [settings])
        run_experiment(EXPERIMENTS[name], tasks, RunOptions(runs=where), command_text(name, "small", {}), settings)
    Console().print(f"Took {time.perf_counter() - started:.0f} s. Open the page in a browser:", highlight=False)
    report(names, where, out)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(names())}")],
    root: Annotated[Path | None, typer.Option("--data", help="folder of data sets, in place of HESSCALE_DATA or data/")] = None,
) -> None:
    """Download a data set, or resume a download that broke off, and check it."""
    with Progress(console=Console()) as progress:
        bars: dict[str, TaskID] = {}

        def draw(file: str, done: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=done, total=total)

        try:
            download(name, root, draw)
            found = load(name, root)
        except DataError as error:
            raise typer.BadParameter(str(error)) from None
    Console().print(f"{found.title}: {len(found.train_labels)} images to train on, {len(found.test_labels)} to test")


@app.command("rl-eval")
def rl_eval(
    checkpoint: Annotated[Path, typer.Argument(help="folder of a run of hesscale rl, or its policy.pt or checkpoint.pt")],
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="number of episodes")] = 10,
    seed: Annotated[int, typer.Option("--seed", min=0, help="seed of the first episode; each further one has the next seed")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic/--sample", help="take the likeliest action, or draw one from the policy")
    ] = True,
    video: Annotated[Path | None, typer.Option("--video", help="file (.mp4) to film the first episode to")] = None,
) -> None:
    """Play episodes with a trained policy, without further training."""
    from .lab.statistics import summary
    from .optimizers import AGENT_OPTIMIZERS
    from .rl.evaluate import evaluate, film, load_policy

    console = Console()
    try:
        policy = load_policy(checkpoint)
        if video is not None:
            with console.status("filming an episode"):
                film(policy, video, 1, seed, deterministic=deterministic)
            console.print(f"wrote {video}", highlight=False, soft_wrap=True)
        with console.status("playing"):
            found = evaluate(policy, episodes, seed, deterministic=deterministic)
    except (ValueError, FileNotFoundError, FloatingPointError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    config = policy.config
    title = f"{config.algo.upper()} with {AGENT_OPTIMIZERS[config.optimizer].label} on {config.env}, after {policy.steps:,} steps"
    table = Table("seed", Column("return", justify="right"), Column("length", justify="right"), title=title, min_width=len(title))
    for k, episode in enumerate(found, start=seed):
        table.add_row(str(k), f"{episode.total:.2f}", str(episode.length))
    table.add_section()
    totals, lengths = [episode.total for episode in found], [float(episode.length) for episode in found]
    table.add_row("mean", summary(totals).text(".2f"), summary(lengths).text(".1f"))
    console.print(table)


@app.command()
def explain(
    factory: Annotated[str, typer.Argument(help="module:function, where the function takes no arguments and returns a loss")],
) -> None:
    """Show what hesscale does with a loss, operator by operator."""
    module, colon, name = factory.partition(":")
    if not colon:
        raise typer.BadParameter(f"{factory!r} is not of the form module:function")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)
        explanation = hesscale.explain(made())
    except Exception as error:  # whatever is wrong with it
        raise typer.BadParameter(f"{type(error).__name__}: {error}") from None
    print(explanation)


@app.command("inspect")
def inspect_curvature(
    factory: Annotated[
        str,
        typer.Argument(help="module:function that returns (model, loader, loss_fn); by default, a network for digits"),
    ] = "",
    steps: Annotated[
        int | None, typer.Option("--steps", min=0, help="train for so many steps and inspect again; 300 for digits, else 0")
    ] = None,
    lr: Annotated[float, typer.Option("--lr", help="step size of AdaHesScale")] = 1e-3,
    method: Annotated[str, typer.Option("--method", help="estimator of the diagonal")] = "hesscale",
    num_samples: Annotated[int, typer.Option("--num-samples", min=0, help="random draws per batch for the comparison")] = 1,
    max_batches: Annotated[int | None, typer.Option("--max-batches", min=1, help="read no more batches")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for the page")] = Path("out/inspect"),
) -> None:
    """Show curvature parameter by parameter, before and after training, and write it to a page."""
    from .inspection import inspect_and_write

    if steps is None:
        steps = 0 if factory else 300
    options: dict[str, Any] = {"steps": steps, "step_size": lr, "method": method}
    try:
        reports = inspect_and_write(factory, out.expanduser(), **options, num_samples=num_samples, max_batches=max_batches)
    except Exception as error:  # whatever is wrong with it
        raise typer.BadParameter(f"{type(error).__name__}: {error}") from None
    for name, report in reports.items():
        print(f"{name}\n\n{report}\n")
    Console().print(f"wrote {out / 'index.html'}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except (DamagedRun, OSError, ModuleNotFoundError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/] {escaped(str(error))}", highlight=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
