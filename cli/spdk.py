"""`forebay spdk attach | status | detach`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.markup import escape

from forebay.cli.output import OK, PROBLEM, Json, messages, print_json, print_table
from forebay.storage.spdk import record
from forebay.storage.spdk.attach import Attached, attach
from forebay.storage.spdk.detach import detach
from forebay.storage.spdk.rpc import DEFAULT_SOCKET, SECONDS, Rpc
from forebay.storage.spdk.status import BdevStatus, Status, status
from forebay.storage.spdk.target import Target, Traffic
from forebay.storage.spdk.wanted import parse
from forebay.storage.units import format_bytes

app = typer.Typer(no_args_is_help=True, help="Make drives of an SPDK target devices of a pool.")

Socket = Annotated[
    Path, typer.Option("--socket", envvar="FOREBAY_SPDK_SOCKET", help="The target's RPC socket.", show_default=True)
]
State = Annotated[
    Path | None,
    typer.Option(
        "--state", help="Where what attach made is on record.  [default: /run/forebay or ~/.local/state/forebay]"
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0.1, max=3600, help="Longest wait for one answer of the target, in s.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the RPCs that would change the target.")]


@app.command("attach")
def attach_command(
    sources: Annotated[
        list[str], typer.Argument(metavar="DRIVE|BDEV...", help="PCI addresses of NVMe drives, or names of bdevs.")
    ],
    names: Annotated[
        list[str] | None, typer.Option("--name", help="Name of the device; once for each drive or bdev, in order.")
    ] = None,
    socket: Socket = DEFAULT_SOCKET,
    state: State = None,
    timeout: Timeout = SECONDS,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Serve drives and bdevs at sockets of their own, and print the devices to put into pool.yaml.

    Again is harmless: what is there as wanted stays. When something fails, what this call made is undone.
    """
    wanted = parse(sources, names or [])
    target = Target(socket, timeout)
    path = state or record.default_path(socket)
    if dry_run:
        done = attach(target, wanted, record.load(path, socket), dry_run=True)
    else:
        with record.opened(path, socket) as ours:
            done = attach(target, wanted, ours)
    if as_json:
        data = {"dry_run": dry_run, "state": path, "rpcs": _rpcs(done.sent), "notes": done.notes}
        print_json({"ok": True, "devices": [asdict(one) for one in done.devices]} | data)
        return
    _show_notes(done.notes)
    if dry_run:
        _show_rpcs(done.sent)
    else:
        typer.echo(_snippet(done.devices))


def _snippet(devices: Sequence[Attached]) -> str:
    lines = [
        f"  - {{name: {_yaml(one.name)}, kind: spdk, path: {_yaml(str(one.path))}}}  # {format_bytes(one.size)}"
        for one in devices
    ]
    return "\n".join(["devices:", *lines])


def _yaml(text: str) -> str:
    """In quotes where YAML would see something else than this text."""
    plain = re.fullmatch(r"[\w./-]+", text) and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)


@app.command("status")
def status_command(
    socket: Socket = DEFAULT_SOCKET, state: State = None, timeout: Timeout = SECONDS, as_json: Json = False
) -> None:
    """What the target has and has done, and what of it is ours. Changes nothing.

    Exits with 1 when something that attach made is gone.
    """
    path = state or record.default_path(socket)
    found = status(Target(socket, timeout), record.load(path, socket))
    if as_json:
        print_json({"ok": not found.missing, "socket": socket, "state": path} | asdict(found))
        raise typer.Exit(PROBLEM if found.missing else OK)
    typer.echo(f"{found.version} at {socket}")
    _show_bdevs(found.bdevs)
    _show_controllers(found)
    for name in found.missing:
        messages.print(f"{escape(name)} is on record as ours but not there; attach again, or `forebay spdk detach`")
    raise typer.Exit(PROBLEM if found.missing else OK)


def _show_bdevs(bdevs: Sequence[BdevStatus]) -> None:
    rows = [
        [
            escape(one.bdev.name),
            escape(one.bdev.driver),
            one.bdev.pci,
            format_bytes(one.bdev.size),
            "ours" if one.ours else "claimed" if one.bdev.claimed else "",
            *_traffic(one.traffic),
        ]
        for one in bdevs
    ]
    left = dict.fromkeys(("bdev", "driver", "drive"), "left")
    right = dict.fromkeys(("read", "mean", "written", "mean "), "right")
    print_table("", left | {"size": "right", "": "left"} | right, rows)


def _traffic(traffic: Traffic | None) -> list[str]:
    if traffic is None:
        return [""] * 4
    reads = [format_bytes(traffic.read_bytes), _latency(traffic.read_seconds, traffic.read_ops)]
    return [*reads, format_bytes(traffic.write_bytes), _latency(traffic.write_seconds, traffic.write_ops)]


def _latency(seconds: float, operations: int) -> str:
    return f"{seconds / operations * 1e6:.0f} us" if operations else ""


def _show_controllers(found: Status) -> None:
    if not found.controllers:
        messages.print("no controllers")
        return
    rows = [
        [
            escape(one.controller.name),
            escape(one.controller.bdev or ""),
            "?" if one.controller.sessions is None else str(one.controller.sessions),
            "ours" if one.ours else "",
            escape(str(one.controller.socket)),
        ]
        for one in found.controllers
    ]
    columns = {"controller": "left", "bdev": "left", "sessions": "right", "": "left", "socket": "left"}
    print_table("\ncontrollers", columns, rows)


@app.command("detach")
def detach_command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[DEVICE]...", help="Devices; without any, all that attach made.")
    ] = None,
    socket: Socket = DEFAULT_SOCKET,
    state: State = None,
    timeout: Timeout = SECONDS,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Undo what attach made: the sockets, then drives that nobody else uses. Refused while an engine is connected."""
    path = state or record.default_path(socket)
    target = Target(socket, timeout)
    if dry_run:
        undone = detach(target, record.load(path, socket), names or [], dry_run=True)
    else:
        with record.opened(path, socket) as ours:
            undone = detach(target, ours, names or [])
    if as_json:
        print_json({"ok": True, "dry_run": dry_run, "rpcs": _rpcs(undone.sent), "notes": undone.notes})
        return
    _show_notes(undone.notes)
    _show_rpcs(undone.sent)
    if not undone.sent:
        messages.print("nothing to undo")


def _rpcs(sent: Sequence[Rpc]) -> list[dict[str, object]]:
    return [{"method": rpc.method, "params": dict(rpc.params)} for rpc in sent]


def _show_rpcs(sent: Sequence[Rpc]) -> None:
    for rpc in sent:
        typer.echo(str(rpc))


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        messages.print(escape(note), soft_wrap=True)
