"""`forebay pool create | inspect | verify | clear`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from forebay.cli.output import OK, PROBLEM, Json, PoolFile, messages, print_json, print_table
from forebay.storage.config import load_config
from forebay.storage.maintenance.clear import clear as clear_pool
from forebay.storage.maintenance.create import DevicePlan, plan
from forebay.storage.maintenance.create import create as create_pool
from forebay.storage.maintenance.inspect import PoolReport
from forebay.storage.maintenance.inspect import inspect as inspect_pool
from forebay.storage.maintenance.verify import VerifyReport
from forebay.storage.maintenance.verify import verify as verify_pool
from forebay.storage.units import format_bytes, format_rate

app = typer.Typer(no_args_is_help=True, help="Create, look into, check and empty a pool.")

SHOWN = 20
"""Bad chunks listed by `verify`; --json lists all."""


@app.command()
def create(
    pool: PoolFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be allocated.")] = False,
    as_json: Json = False,
) -> None:
    """Allocate and label the devices. Again is harmless: what is stored stays.

    Not required: an engine that starts does the same. Exits with 1 when --dry-run finds too little room.
    """
    config = load_config(pool)
    plans = plan(config) if dry_run else create_pool(config)
    fits = all(device.fits for device in plans)
    if as_json:
        devices = [asdict(device) | {"fits": device.fits} for device in plans]
        print_json({"ok": fits, "dry_run": dry_run, "path": config.path, "devices": devices})
    else:
        _show_plans(plans)
    raise typer.Exit(OK if fits else PROBLEM)


def _show_plans(plans: list[DevicePlan]) -> None:
    rows = [
        [
            device.name,
            device.kind,
            format_bytes(device.size),
            format_bytes(device.allocate) if device.allocate else "",
            format_bytes(device.free) if device.free else "",
            escape(device.path) + ("" if device.fits else "  [red]does not fit[/]"),
        ]
        for device in plans
    ]
    right = dict.fromkeys(("size", "to allocate", "free"), "right")
    print_table("", {"device": "left", "kind": "left"} | right | {"path": "left"}, rows)


@app.command()
def inspect(pool: PoolFile, as_json: Json = False) -> None:
    """What the pool holds and for which models. An engine that uses it is not disturbed."""
    report = inspect_pool(load_config(pool))
    if as_json:
        print_json({"ok": True} | asdict(report))
        return
    _show_devices(report)
    _show_namespaces(report)


def _show_devices(report: PoolReport) -> None:
    user = "nobody" if report.owner is None else f"process {report.owner}" if report.owner else "a process elsewhere"
    rows = [
        [
            device.name,
            device.kind,
            format_bytes(device.capacity_bytes) if device.capacity_bytes else "",
            format_bytes(device.used_bytes) if device.used_bytes else "",
            f"{device.used_bytes / device.capacity_bytes:.0%}" if device.used_bytes else "",
            format_rate(device.read_bandwidth) + ("" if device.calibrated else " [dim](assumed)[/]"),
            escape(device.path),
        ]
        for device in report.devices
    ]
    title = f"{escape(report.path)}, used by {user}"
    right = dict.fromkeys(("capacity", "used", "", "read bandwidth"), "right")
    print_table(title, {"device": "left", "kind": "left"} | right | {"path": "left"}, rows)


def _show_namespaces(report: PoolReport) -> None:
    if not any(namespace.chunks for namespace in report.namespaces):
        messages.print("no chunks are stored")
        return
    rows = [
        [
            escape(namespace.model),
            f"{namespace.chunks:,}",
            format_bytes(namespace.bytes),
            str(namespace.description.get("dtype", "")),
            namespace.fingerprint[:12],
        ]
        for namespace in report.namespaces
    ]
    right = dict.fromkeys(("chunks", "bytes"), "right")
    print_table("\nstored", {"model": "left"} | right | {"dtype": "left", "fingerprint": "left"}, rows)


@app.command()
def verify(
    pool: PoolFile,
    drop: Annotated[bool, typer.Option("--drop", help="Make the pool forget what is bad.")] = False,
    as_json: Json = False,
) -> None:
    """Read everything back and compare checksums. No engine may use the pool. Exits with 1 when something is bad."""
    config = load_config(pool)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task("reading", total=None)
        report = verify_pool(
            config, drop=drop, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        print_json({"ok": not report.bad} | asdict(report))
    else:
        _show_verification(report)
    raise typer.Exit(PROBLEM if report.bad else OK)


def _show_verification(report: VerifyReport) -> None:
    rate = f" at {format_rate(report.bytes / report.seconds)}" if report.bytes else ""
    typer.echo(f"{report.chunks:,} chunks, {format_bytes(report.bytes)} read{rate}, {len(report.bad):,} bad")
    for chunk in report.bad[:SHOWN]:
        typer.echo(f"  {chunk.model} {chunk.key}: {chunk.reason}")
    if len(report.bad) > SHOWN:
        typer.echo(f"  and {len(report.bad) - SHOWN:,} more (--json lists all)")
    if report.dropped:
        typer.echo(f"{report.dropped:,} dropped")
    elif report.bad:
        typer.echo("they will be misses, never data; `--drop` makes the pool forget them now")


@app.command()
def clear(
    pool: PoolFile,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the devices' files too, wipe raw devices.")] = False,
    as_json: Json = False,
) -> None:
    """Forget everything the pool holds. No engine may use it."""
    config = load_config(pool)
    if not yes:
        typer.confirm(
            f"forget everything in {config.path}" + (" and give its space back?" if delete else "?"),
            abort=True,
            err=True,
        )
    removed = clear_pool(config, delete=delete)
    if as_json:
        print_json({"ok": True, "removed": [str(path) for path in removed]})
    else:
        typer.echo("\n".join(f"removed {path}" for path in removed) or "it was empty")
