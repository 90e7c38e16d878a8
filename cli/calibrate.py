"""`forebay calibrate`: measure the devices of a pool."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.cli.output import Json, PoolFile, messages, print_json, print_table
from forebay.storage import calibrate as measuring
from forebay.storage.config import load_config
from forebay.storage.profile import Profile
from forebay.storage.units import format_rate


def calibrate(
    pool: PoolFile,
    seconds: Annotated[float, typer.Option(min=0.05, max=600, help="How long each measurement takes.")] = 1.0,
    writes: Annotated[bool, typer.Option(help="Measure writing as well.")] = True,
    as_json: Json = False,
) -> None:
    """Measure every device alone and all together, and store the profile that placement goes by.

    The pool must not be in use. What is stored in it stays.
    """
    config = load_config(pool)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True) as progress:
        task = progress.add_task("opening", total=measuring.steps(config, writes))
        profile = measuring.calibrate(
            config,
            seconds=seconds,
            writes=writes,
            report=lambda what: progress.update(task, description=what, advance=1),
        )
    if as_json:
        print_json(_result(profile, str(config.profile_path)))
    else:
        _show(profile, str(config.profile_path))


def _result(profile: Profile, path: str) -> dict[str, object]:
    devices = {name: device.model_dump() | {"weight": device.weight} for name, device in profile.devices.items()}
    return {
        "ok": True,
        "profile": path,
        "devices": devices,
        "together_vs_alone": measuring.shared(profile),
        "shared_bus": measuring.shared(profile) < measuring.SHARED_BUS,
    }


def _show(profile: Profile, path: str) -> None:
    total = sum(device.weight for device in profile.devices.values())
    rows = [
        [
            name,
            format_rate(device.read_bandwidth),
            format_rate(device.read_together),
            format_rate(device.write_bandwidth) if device.write_bandwidth else "",
            format_rate(device.write_together) if device.write_together else "",
            f"{device.latency * 1e6:.0f} µs",
            f"{device.weight / total:.1%}",
        ]
        for name, device in profile.devices.items()
    ]
    headings = ("read alone", "read together", "write alone", "write together", "latency", "share of bytes")
    print_table("", {"device": "left"} | dict.fromkeys(headings, "right"), rows)
    ratio = measuring.shared(profile)
    if ratio < measuring.SHARED_BUS:
        messages.print(
            f"[yellow]a shared bus shows:[/] together the devices read at {ratio:.0%} of the sum of what they reach "
            "alone; stripes are placed by what they reach together"
        )
    messages.print(f"stored in {path}", soft_wrap=True)
