"""`forebay doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from forebay.cli.output import OK, PROBLEM, Json, print_json, print_table
from forebay.storage.config import load_config
from forebay.storage.doctor import Check, examine

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}

Places = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[PLACE]...", help="Folders, files or block devices for the pool, or its POOL.yaml."),
]


def doctor(places: Places = None, as_json: Json = False) -> None:
    """What this machine can do for the pool, what it lacks, and the fix for each lack.

    O_DIRECT is tried on every PLACE (the current folder by default). Exits with 1 when something does not work.
    """
    checks = examine([place for given in places or [Path()] for place in _devices(given)])
    bad = any(check.status == "problem" for check in checks)
    if as_json:
        print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
    else:
        print_table("", {"check": "left", "": "left", "found": "left"}, [_row(check) for check in checks])
    raise typer.Exit(PROBLEM if bad else OK)


def _devices(place: Path) -> list[Path]:
    """The files and block devices of a pool's configuration; any other place as it is."""
    if place.suffix not in (".yaml", ".yml", ".json"):
        return [place]
    return [device.path for device in load_config(place).devices if device.path is not None]


def _row(check: Check) -> list[str]:
    fix = f"\n[dim]fix:[/] {escape(check.fix)}" if check.fix else ""
    return [escape(check.name), _MARKS[check.status], escape(check.found) + fix]
