"""`forebay bench ...`: measurements with their peers in the same run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from forebay.cli.output import OK, PROBLEM, messages, print_json, print_table
from forebay.storage.errors import PoolError

app = typer.Typer(no_args_is_help=True, help="Measure, with the peers in the same run.")

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; `-` for standard output.")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the result.")]


@app.callback()
def bench() -> None:
    """Measure, with the peers in the same run."""


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write a report to a file, or to standard output for `-`.

    Raises:
        PoolError: the file cannot be written.
    """
    if str(path) == "-":
        print_json(report)
        return
    try:
        path.write_text(json.dumps(report, indent=2, default=str) + "\n")
    except OSError as error:
        raise PoolError(f"--json {path}: {error.strerror}; give a file that can be written") from None


@app.command()
def kv(
    quick: Annotated[bool, typer.Option("--quick", help="Everything in less than three minutes on two cores.")] = False,
    only: Annotated[str, typer.Option(metavar="NAMES", help="Ratios or parts, separated by commas.")] = "",
    rounds: Annotated[int | None, typer.Option(min=1, max=100, help="Rounds of every comparison.")] = None,
    work: Annotated[Path, typer.Option(metavar="DIR", help="A folder on the disk to measure.")] = Path(),
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """The KV pool against fio, other placements, vLLM's file system tier and recomputation.

    Exit code 0 when everything could be measured, whether or not it cleared its bar.
    """
    from forebay.bench.kv.run import run

    names = [name for name in only.split(",") if name]
    command = shlex.join(["forebay", *sys.argv[1:]])
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        report = run(
            work,
            quick=quick,
            rounds=rounds,
            only=names,
            command=command,
            say=lambda text: bar.update(task, description=text),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if str(json_file) != "-":
        _show(report)
    if json_file:
        write_json(report, json_file)
    if plot:
        from forebay.bench.plot import plot_bars

        plot_bars(report, plot)
    raise typer.Exit(OK if report["ok"] else PROBLEM)


def _show(report: dict[str, Any]) -> None:
    rows = []
    for name, bar in report["bars"].items():
        value = report["ratios"][name]
        if value is not None:
            rows.append(
                [name, f"{value:.3f}", bar["bar"], "[green]yes[/]" if bar["passed"] else "[red]no[/]", bar["meaning"]]
            )
    columns = {"ratio": "left", "measured": "right", "bar": "right", "cleared": "left", "meaning": "left"}
    print_table("", columns, rows)
    for part, problem in report["errors"].items():
        messages.print(f"[red]{part} was not measured:[/] {problem}", soft_wrap=True)
    machine = report["machine"]
    Console(highlight=False).print(
        f"\n{machine['cores']} x {machine['cpu']}, Linux {machine['kernel']}, {machine['disk']['filesystem']} on "
        f"{machine['disk']['driver'] or machine['disk']['device']}, commit {report['commit'] or 'unknown'}, "
        f"{report['seconds']:.0f} s",
        soft_wrap=True,
    )
