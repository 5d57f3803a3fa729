"""The command ``hesscale``: a demonstration, the list of operators, and the benchmark of step costs."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"the command line needs {missing.name}: pip install 'hesscale[experiments]'") from None

import hesscale

from .bench import HELP, Settings
from .bench import run as run_bench
from .bench.report import HEADER, cells
from .bench.targets import slopes

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Hessian diagonals for PyTorch.")
DEFAULT = Settings()


def option(name: str) -> object:
    return typer.Option(f"--{name}", help=HELP[name])


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def demo(context: typer.Context) -> None:
    """Train a small network and compare its Hessian diagonals with the exact one."""
    from . import demo as demonstration

    demonstration.main(context.args)


@app.command()
def operators(containing: Annotated[str, typer.Argument(help="only names and families that contain this")] = "") -> None:
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


@app.command()
def bench(
    device: Annotated[str, option("device")] = DEFAULT.device,
    only: Annotated[str, option("only")] = DEFAULT.only,
    methods: Annotated[str, option("methods")] = DEFAULT.methods,
    modes: Annotated[str, option("modes")] = DEFAULT.modes,
    sweep: Annotated[str, option("sweep")] = DEFAULT.sweep,
    rounds: Annotated[int, option("rounds")] = DEFAULT.rounds,
    block: Annotated[float, option("block")] = DEFAULT.block,
    limit: Annotated[float, option("limit")] = DEFAULT.limit,
    threads: Annotated[int, option("threads")] = DEFAULT.threads,
    tf32: Annotated[bool, option("tf32")] = DEFAULT.tf32,
    ensemble: Annotated[bool, option("ensemble")] = DEFAULT.ensemble,
    quick: Annotated[bool, option("quick")] = DEFAULT.quick,
    out: Annotated[str, option("out")] = DEFAULT.out,
    name: Annotated[str, option("name")] = DEFAULT.name,
    report: Annotated[str, option("report")] = DEFAULT.report,
    into: Annotated[str, option("into")] = DEFAULT.into,
) -> None:
    """Cost of a training step, as ratios to torch's Adam in the same run."""
    settings = Settings(**{key: value for key, value in locals().items() if key in HELP})
    console = Console()
    try:
        record = run_bench(settings, lambda text: console.print(text, highlight=False, markup=False), "hesscale bench")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if record is None:
        return
    for workload in record["workloads"]:
        table = Table(*HEADER, title=f"{workload['description']}, batch {workload['batch']}")
        for row in workload["rows"]:
            table.add_row(*(cell.replace("[", r"\[") for cell in cells(row, record["machine"]["device"])))
        console.print(table)
    if record["sweep"]:
        table = Table("method", "mode", "slope", "above Adam's", title=f"time against {record['sweep']}")
        for (method, mode), slope in slopes(record).items():
            above = "" if slope.above_adam is None else f"{slope.above_adam:+.3f}"
            table.add_row(method, mode, f"{slope.slope:.3f}", above)
        console.print(table)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
