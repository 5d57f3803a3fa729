"""The command ``hesscale``: experiments, their runs and the report, the benchmark of step costs, and the operators."""

from __future__ import annotations

import importlib
import inspect
import platform
import sys
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch

import hesscale

from .install import how_to_install

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress, TaskID
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"the command line needs {missing.name}: {how_to_install('experiments')}") from None

from .bench import Settings
from .bench import run as run_bench
from .bench.tables import tables
from .lab.commands import (
    RUNS,
    RunOptions,
    as_folder,
    command_of,
    command_text,
    options_of,
    run_experiment,
    settings_of,
    sweep_command,
    tasks_of,
)
from .lab.data import download, load, names
from .lab.download import DataError
from .lab.experiment import experiments
from .lab.help_texts import Command, Group
from .lab.plots import Table
from .lab.run_list import as_json, details, lines, run_of, select
from .lab.store import DamagedRun, Store
from .lab.terminal import count, escaped, print_table

START, EXPERIMENT, RUN = "Start", "Experiments", "Runs"  # groups of commands in the help text
DEMO: dict[str, dict[str, Any]] = {"quality": {}, "supervised": {}, "rl": {"steps": 20_000}}  # with changes to the preset small
POLICIES = ("policy.pt", "checkpoint.pt")
app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def command(group: str, *examples: str, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command, with examples in its help text."""
    epilog = "\n".join(f"hesscale {example}" for example in examples)
    return app.command(name, cls=Command, epilog=epilog, rich_help_panel=group)


def print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"hesscale {hesscale.__version__} (torch {torch.__version__}, Python {platform.python_version()})")
        raise typer.Exit


@app.callback(epilog="hesscale demo\nhesscale rl --help\nhesscale runs rl\nhesscale report")
def main_options(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="print versions")] = False,
) -> None:
    """Run the paper's experiments, list their runs, and write a report about them.

    `hesscale COMMAND --help` describes a command and its options.
    """


@command(START, "demo", "demo --out /tmp/report")
def demo(
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
    out: Annotated[Path, typer.Option("--out", help="folder for the page")] = Path("out/report"),
) -> None:
    """Start here: run three small experiments in about three minutes, and write a page with their figures."""
    started = time.perf_counter()
    for k, (name, changed) in enumerate(DEMO.items(), start=1):
        Console().print(f"\n[bold]{k} of {len(DEMO)}[/]", highlight=False)
        settings = settings_of(EXPERIMENTS[name], "small", changed)
        tasks = tasks_of(EXPERIMENTS[name], [settings])
        run_experiment(EXPERIMENTS[name], tasks, RunOptions(runs=where), command_text(name, "small", changed), settings)
    report(list(DEMO), where, out)
    Console().print(f"It took {time.perf_counter() - started:.0f} s. Open this page in a browser.", highlight=False)


@command(START, "operators", "operators pooling")
def operators(
    containing: Annotated[str, typer.Argument(help="show only operators whose name or family contains this")] = "",
) -> None:
    """List the operators that have a curvature rule."""
    wanted = [op for op in hesscale.operators() if containing.lower() in f"{op.name} {op.family}".lower()]
    if not wanted:
        raise typer.BadParameter(f"no operator or family contains {containing!r}")
    console = Console()
    for family, members in groupby(sorted(wanted, key=lambda op: op.family), key=lambda op: op.family):
        rows: list[Sequence[str]] = [(op.name, op.summary) for op in members]
        print_table(console, Table(family, family.replace("_", " "), ("operator", "rule"), rows))
    console.print(f"{count(len(wanted), 'operator')}. hesscale.explain(loss) shows the operators of a loss.")


def bench(**given: Any) -> None:
    """Measure the time of a training step, relative to torch's Adam in the same run."""
    console = Console()
    try:
        record = run_bench(Settings(**given), lambda text: console.print(text, highlight=False, markup=False), "hesscale bench")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for table in tables(record) if record is not None else ():
        print_table(console, table)


bench.__signature__ = inspect.Signature(options_of(Settings))  # type: ignore[attr-defined]
bench.__annotations__ = {}
EXPERIMENTS = experiments()
for experiment in EXPERIMENTS.values():
    examples = [f"{experiment.name} --preset smoke", *(f"{experiment.name} {options}" for options in experiment.examples)]
    command(EXPERIMENT, *examples, name=experiment.name)(command_of(experiment))
command(EXPERIMENT, "sweep quality --over step_size=0.1,0.01 --over seeds=2,4", name="sweep")(sweep_command(EXPERIMENTS))
command(EXPERIMENT, "bench --quick", "bench --only mlp-64 --methods adam,adahesscale")(bench)


@command(RUN, "runs", "runs rl optimizer=adam seed=0", "runs failed", "runs 3f2a", "runs --json rl")
def runs(
    filters: Annotated[
        list[str] | None, typer.Argument(help="an experiment, a status, setting=value, or the beginning of a run's id")
    ] = None,
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
    is_json: Annotated[bool, typer.Option("--json", help="print all records as JSON")] = False,
) -> None:
    """List runs, one per line, with the settings in which they differ. Show everything about a single run."""
    console = Console(soft_wrap=True)
    records = Store(as_folder(where, "--runs")).records()
    if not records:
        raise typer.BadParameter(f"there are no runs in {where} yet; run an experiment first, such as hesscale quality")
    try:
        found = select(records, list(EXPERIMENTS), filters or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if is_json:
        text = [as_json(found)]
    elif len(found) == 1:
        text = list(details(found[0]))
    else:
        text = list(lines(found, console.width if console.is_terminal else None))
    for line in text:
        console.print(line, highlight=False, markup=False)


@command(RUN, "report", "report rl --out /tmp/report", "report supervised --beside results/supervised")
def report(
    names: Annotated[list[str] | None, typer.Argument(help="experiments to show; by default, all that have runs")] = None,
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
    out: Annotated[Path, typer.Option("--out", help="folder for the page, its figures and tables")] = Path("out/report"),
    page: Annotated[bool, typer.Option("--page/--no-page", help="write index.html")] = True,
    everything: Annotated[bool, typer.Option("--all", help="show all finished runs, not only those of the last command")] = False,
    beside: Annotated[
        Path | None, typer.Option(help="folder or summary.json of an earlier report, whose results are shown beside these")
    ] = None,
    again: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of an earlier report to write again, from the runs that are saved in it; several become one report"
        ),
    ] = None,
) -> None:
    """Write a page with the figures, tables, settings and commands of the last runs."""
    from .lab.report import report as write
    from .lab.report import report_again

    try:
        if again:
            if names or everything or beside is not None:
                raise ValueError("--again writes the same report as before; leave out experiments, --all and --beside")
            path = report_again([source.expanduser() for source in again], as_folder(out, "--out"), page)
        else:
            earlier = beside and beside.expanduser()
            store = Store(as_folder(where, "--runs"))
            path = write(store, names or [], as_folder(out, "--out"), page, everything, earlier, show_problem)
    except (ValueError, DamagedRun) as error:
        raise typer.BadParameter(str(error)) from None
    Console().print(f"wrote {path}", highlight=False, soft_wrap=True)


def show_problem(problem: str) -> None:
    Console(stderr=True).print(f"[yellow]problem[/] {escaped(problem)}", highlight=False, soft_wrap=True)


@command(START, "data mnist", "data cifar100 --data DATA")
def data(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(names())}")],
    root: Annotated[Path | None, typer.Option("--data", help="folder of data sets, instead of HESSCALE_DATA or data/")] = None,
) -> None:
    """Download a data set and check it. An interrupted download is resumed."""
    with Progress(console=Console()) as progress:
        bars: dict[str, TaskID] = {}

        def draw(file: str, done: int, total: int | None) -> None:
            if file not in bars:
                bars[file] = progress.add_task(file)
            progress.update(bars[file], completed=done, total=total)

        try:
            root = root and as_folder(root, "--data")
            download(name, root, draw)
            found = load(name, root)
        except DataError as error:
            raise typer.BadParameter(str(error)) from None
    Console().print(f"{found.title}: {len(found.train_labels)} training images, {len(found.test_labels)} test images")


@command(RUN, "rl-eval --last", "rl-eval 3f2a --episodes 20 --video agent.mp4", name="rl-eval")
def rl_eval(
    run: Annotated[
        str, typer.Argument(help="the beginning of a run's id, the folder of a run, or the path of a policy.pt or checkpoint.pt")
    ] = "",
    last: Annotated[bool, typer.Option("--last", help="evaluate the agent of the most recent run")] = False,
    where: Annotated[Path, typer.Option("--runs", help="folder of runs")] = RUNS,
    episodes: Annotated[int, typer.Option("--episodes", min=1, help="number of episodes")] = 10,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="seed of the first episode; later episodes use the seeds after it")
    ] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic/--sample", help="take the most likely action, or sample an action from the policy")
    ] = True,
    video: Annotated[Path | None, typer.Option("--video", help="file (.mp4) for a video of the first episode")] = None,
) -> None:
    """Evaluate a trained policy on a few episodes, without further training."""
    from .lab.statistics import summary
    from .optimizers import AGENT_OPTIMIZERS
    from .rl.evaluate import evaluate, film, load_policy

    console = Console()
    if bool(run) == last:
        raise typer.BadParameter("name a run or pass --last, but not both; hesscale runs rl lists the runs")
    try:
        path = Path(run).expanduser()
        if last or not path.exists():
            path = run_of(Store(as_folder(where, "--runs")), run, last, POLICIES)
        policy = load_policy(path)
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
    rows: list[Sequence[str]] = [(str(seed + k), f"{each.total:.2f}", str(each.length)) for k, each in enumerate(found)]
    totals, lengths = [each.total for each in found], [float(each.length) for each in found]
    rows.append(("mean", summary(totals).text(".2f"), summary(lengths).text(".1f")))
    print_table(console, Table("episodes", title, ("seed", "return", "length"), rows))


@command(START, "explain my_module:loss")
def explain(
    factory: Annotated[
        str, typer.Argument(help="module:function, a function without arguments that returns a loss, or a loss and its model")
    ],
) -> None:
    """Show which rule applies at each operator of a loss, and what the exact diagonal at the outputs costs."""
    module, colon, name = factory.partition(":")
    if not colon:
        raise typer.BadParameter(f"{factory!r} is not of the form module:function")
    sys.path.insert(0, "")
    try:
        made = getattr(importlib.import_module(module), name)
        result = made()
        loss, model = result if isinstance(result, tuple) else (result, None)
        explanation = hesscale.explain(loss, model=model)
    except Exception as error:  # the user's function may raise any error
        raise typer.BadParameter(f"{type(error).__name__}: {error}") from None
    print(explanation)


@command(START, "inspect", "inspect my_module:my_function --max-batches 20", name="inspect")
def inspect_curvature(
    factory: Annotated[
        str,
        typer.Argument(
            help="module:function, a function that returns (model, loader, loss_fn); by default, a small network for digits"
        ),
    ] = "",
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=0, help="number of training steps before the second inspection; 300 by default for digits, otherwise 0"
        ),
    ] = None,
    lr: Annotated[float, typer.Option("--lr", help="step size of AdaHesScale")] = 1e-3,
    method: Annotated[str, typer.Option("--method", help="estimator of the diagonal")] = "hesscale",
    num_samples: Annotated[
        int, typer.Option("--num-samples", min=0, help="Monte-Carlo draws per batch, to which HesScaleGN is compared; 0 for none")
    ] = 1,
    max_batches: Annotated[int | None, typer.Option("--max-batches", min=1, help="maximum number of batches to read")] = None,
    out: Annotated[Path, typer.Option("--out", help="folder for the page")] = Path("out/inspect"),
) -> None:
    """Show the curvature of each parameter before and after training, and write a page about it."""
    from .inspection import inspect_and_write

    if steps is None:
        steps = 0 if factory else 300
    options: dict[str, Any] = {"steps": steps, "step_size": lr, "method": method}
    try:
        reports = inspect_and_write(factory, out.expanduser(), **options, num_samples=num_samples, max_batches=max_batches)
    except Exception as error:  # the user's function may raise any error
        raise typer.BadParameter(f"{type(error).__name__}: {error}") from None
    for name, report in reports.items():
        print(f"{name}\n\n{report}\n")
    Console().print(f"wrote {out / 'index.html'}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line."""
    try:
        app(prog_name="hesscale")
    except (DamagedRun, OSError, ModuleNotFoundError) as error:
        Console(stderr=True).print(f"[red]{type(error).__name__}[/] {escaped(str(error))}", highlight=False)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
