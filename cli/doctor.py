"""`forebay doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from forebay.cli.output import OK, PROBLEM, Json, print_json, print_table
from forebay.storage.config import DeviceConfig, load_config
from forebay.storage.doctor import Check, examine

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}

Places = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[PLACE]...", help="Folders, files, block devices or sockets for the pool, or its POOL.yaml."
    ),
]


def doctor(places: Places = None, as_json: Json = False) -> None:
    """What this machine can do for the pool, what it lacks, and the fix for each lack.

    O_DIRECT is tried on every PLACE (the current folder by default). Exits with 1 when something does not work.
    """
    given = [place for one in places or [Path()] for place in _places(one)]
    checks = examine(
        [place for place in given if isinstance(place, Path)],
        [place for place in given if isinstance(place, DeviceConfig)],
    )
    bad = any(check.status == "problem" for check in checks)
    if as_json:
        print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
    else:
        print_table("", {"check": "left", "": "left", "found": "left"}, [_row(check) for check in checks])
    raise typer.Exit(PROBLEM if bad else OK)


def _places(place: Path) -> Sequence[Path | DeviceConfig]:
    """What is meant: the devices of a pool's configuration, a server's socket, or a place of files."""
    if place.is_socket():
        return [DeviceConfig(name="drive", kind="spdk", path=place.absolute())]
    if place.suffix not in (".yaml", ".yml", ".json"):
        return [place]
    devices = load_config(place).devices
    return [device if device.kind == "spdk" else device.path for device in devices if device.path is not None]


def _row(check: Check) -> list[str]:
    fix = f"\n[dim]fix:[/] {escape(check.fix)}" if check.fix else ""
    return [escape(check.name), _MARKS[check.status], escape(check.found) + fix]
