"""`forebay bench ...`: measurements with their peers in the same run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from forebay.cli import bench_trace
from forebay.cli.output import OK, PROBLEM, messages, print_json, print_table
from forebay.storage.errors import ConfigError, PoolError
from forebay.storage.units import parse_bytes

if TYPE_CHECKING:
    from forebay.bench.suite import Suite

app = typer.Typer(no_args_is_help=True, help="Measure, with the peers in the same run.")

TRACE = "Replay of a trace"
OWN = "Your own model"
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; `-` for standard output.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Everything in less than three minutes on two cores.")]
Only = Annotated[str, typer.Option(metavar="NAMES", help="Ratios or parts, separated by commas.")]
Rounds = Annotated[int | None, typer.Option(min=1, max=100, help="Rounds of every comparison.")]
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
    quick: Quick = False,
    only: Only = "",
    rounds: Rounds = None,
    work: Annotated[Path, typer.Option(metavar="DIR", help="A folder on the disk to measure.")] = Path(),
    json_file: JsonFile = None,
    plot: Plot = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Replay this trace instead.", rich_help_panel=TRACE)
    ] = None,
    no_io: Annotated[
        bool, typer.Option("--no-io", help="Hit rates alone, for all policies.", rich_help_panel=TRACE)
    ] = False,
    pool: Annotated[
        Path | None, typer.Option(metavar="POOL.yaml", help="Against this pool.", rich_help_panel=TRACE)
    ] = None,
    kv_bytes_per_token: Annotated[
        str, typer.Option(metavar="SIZE", help="128KiB with --no-io (Llama-3.1-8B), else 2KiB.", rich_help_panel=TRACE)
    ] = "",
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Several with --no-io, else 4GiB.", rich_help_panel=TRACE)
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option(min=0, help="Requests; 0 for all. All with --no-io, else 1000.", rich_help_panel=TRACE),
    ] = None,
    speed: Annotated[
        float, typer.Option(min=0, help="Of the trace's clock; 0 as fast as possible.", rich_help_panel=TRACE)
    ] = 0.0,
) -> None:
    """The KV pool against fio, other placements, vLLM's file system tier and recomputation.

    With `--trace`, a serving trace in Mooncake's format against a pool instead. Exit code 0 when everything could be
    measured, whether or not it cleared its bar.
    """
    command = shlex.join(["forebay", *sys.argv[1:]])
    if trace is None:
        from forebay.bench.kv.suite import KV

        report = _measure(KV, work, quick, rounds, only, command)
    else:
        sizes = {
            "kv_bytes_per_token": _size("--kv-bytes-per-token", kv_bytes_per_token),
            "capacity": _size("--capacity", capacity),
        }
        options = {name: size for name, size in sizes.items() if size} | ({} if limit is None else {"limit": limit})
        report = bench_trace.run(trace, None if no_io else (work, pool, speed), options) | {"command": command}
    _finish(report, _show if trace is None else bench_trace.show, json_file, plot)


def _size(option: str, text: str) -> int:
    try:
        return int(parse_bytes(text)) if text else 0  # type: ignore[call-overload]
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


@app.command()
def moe(
    quick: Quick = False,
    only: Only = "",
    rounds: Rounds = None,
    work: Annotated[Path, typer.Option(metavar="DIR", help="A folder for temporary files.")] = Path(),
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Compressed Mixture-of-Experts models against the dense ones, the published numbers, and other ways to compress.

    Exit code 0 when everything could be measured, whether or not it cleared its bar.
    """
    from forebay.bench.moe.suite import MOE

    report = _measure(MOE, work, quick, rounds, only, shlex.join(["forebay", *sys.argv[1:]]))
    _finish(report, _show, json_file, plot)


@app.command()
def dlm(
    quick: Quick = False,
    only: Only = "",
    rounds: Rounds = None,
    work: Annotated[Path, typer.Option(metavar="DIR", help="A folder for temporary files.")] = Path(),
    json_file: JsonFile = None,
    plot: Plot = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Compare the arms on this model instead.", rich_help_panel=OWN)
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Lines with `system`, `prompt` and `answer`.", rich_help_panel=OWN),
    ] = None,
    length: Annotated[
        int, typer.Option(min=1, help="Tokens of an answer; half as many steps.", rich_help_panel=OWN)
    ] = 256,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.", rich_help_panel=OWN)] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=OWN)] = "cpu",
) -> None:
    """Diffusion language models: BiCache against no cache, refreshes within a request, and Fast-dLLM.

    With `--model` and `--tasks`, speed and accuracy of every arm on your own model and questions. Exit code 0 when
    everything could be measured, whether or not it cleared its bar.
    """
    command = shlex.join(["forebay", *sys.argv[1:]])
    if model is not None or tasks is not None:
        from forebay.bench.dlm import own

        report = own.run(model, tasks, length=length, dtype=dtype, device=device, say=messages.print)
        report["command"] = command
        show = _show_arms
    else:
        from forebay.bench.dlm.suite import DLM

        report, show = _measure(DLM, work, quick, rounds, only, command), _show
    _finish(report, show, json_file, plot)


@app.command()
def passthrough(
    quick: Quick = False,
    only: Only = "",
    rounds: Rounds = None,
    work: Annotated[Path, typer.Option(metavar="DIR", help="A folder on the disk to measure.")] = Path(),
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Drives behind a vhost-user-blk server, as SPDK is one, against the kernel's way to them; pools that are shared.

    The server is QEMU's storage daemon; wants root, for huge pages. Exit code 0 when everything could be measured,
    whether or not it cleared its bar.
    """
    from forebay.bench.passthrough.suite import PASSTHROUGH

    report = _measure(PASSTHROUGH, work, quick, rounds, only, shlex.join(["forebay", *sys.argv[1:]]))
    _finish(report, _show, json_file, plot)


def _finish(
    report: dict[str, Any], show: Callable[[dict[str, Any]], None], json_file: Path | None, plot: Path | None
) -> NoReturn:
    """What every benchmark does with its report in the end."""
    if str(json_file) != "-":
        show(report)
    if json_file:
        write_json(report, json_file)
    if plot:
        _plot(report, plot)
    raise typer.Exit(OK if report["ok"] else PROBLEM)


def _measure(suite: Suite, work: Path, quick: bool, rounds: int | None, only: str, command: str) -> dict[str, Any]:
    from forebay.bench.suite import run

    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        return run(
            suite,
            work,
            quick=quick,
            rounds=rounds,
            only=[name for name in only.split(",") if name],
            command=command,
            say=lambda text: bar.update(task, description=text),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _plot(report: dict[str, Any], path: Path) -> None:
    from forebay.bench import plot

    kinds = {
        "kv": plot.plot_bars,
        "moe": plot.plot_bars,
        "dlm": plot.plot_bars,
        "passthrough": plot.plot_bars,
        "dlm-own": plot.plot_arms,
        "kv-trace-replay": plot.plot_replay,
        "kv-trace-simulation": plot.plot_hit_rates,
    }
    kinds[report["benchmark"]](report, path)


def _show_arms(report: dict[str, Any]) -> None:
    columns = dict.fromkeys(("tokens/s", "speed-up", "accuracy", "agreement", "layers"), "right")
    rows = [
        [
            name,
            f"{arm['tokens_per_second']:.1f}",
            f"{arm['speedup']:.2f}",
            f"{arm['accuracy']:.3f}" if "accuracy" in arm else "",
            f"{arm['agreement']:.3f}",
            f"{arm['layers_reused']:.1f}",
        ]
        for name, arm in report["arms"].items()
    ]
    print_table("", {"arm": "left"} | columns, rows)


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
