"""The part of `forebay bench kv` that replays traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.cli.output import messages, print_table
from forebay.storage.units import format_bytes, format_rate


def run(trace: Path, live: tuple[Path, Path | None, float] | None, options: dict[str, Any]) -> dict[str, Any]:
    """Replay against a pool, or simulate.

    Args:
        trace: the file.
        live: (work folder, pool.yaml or None for a temporary pool, speed); None to simulate.
        options: `kv_bytes_per_token`, `capacity` and `limit` where they are not the defaults.
    """
    from forebay.bench.kv.trace_report import replay_trace, simulate_trace

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True) as bar:
        task = bar.add_task("replaying" if live else "simulating", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if live is None:
            return simulate_trace(trace, progress=progress, **options)
        work, pool, speed = live
        return replay_trace(trace, work=work, pool=pool, speed=speed, progress=progress, **options)


def show(report: dict[str, Any]) -> None:
    """Tables on standard output."""
    if report["benchmark"] == "kv-trace-simulation":
        _show_simulation(report)
    else:
        _show_replay(report)


def _show_simulation(report: dict[str, Any]) -> None:
    rows = [
        [
            row["policy"],
            format_bytes(row["capacity_bytes"]),
            f"{row['hit_rate_blocks']:.1%}",
            f"{row['hit_rate_tokens']:.1%}",
            f"{row['evictions']}",
        ]
        for row in report["results"]
    ]
    headings = ("capacity", "hit blocks", "hit tokens", "evictions")
    title = f"{report['requests']} requests, {report['repeated_blocks']:.1%} of the blocks repeat"
    print_table(title, {"policy": "left"} | dict.fromkeys(headings, "right"), rows)


def _show_replay(report: dict[str, Any]) -> None:
    latency = "  ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in report["load_latency_seconds"].items())
    devices = ", ".join(f"{name} {format_bytes(count)}" for name, count in report["loaded_bytes_by_device"].items())
    rows = [
        ["hit rate", f"{report['hit_rate_blocks']:.1%} of blocks, {report['hit_rate_tokens']:.1%} of tokens"],
        ["without eviction", f"{report['repeated_blocks']:.1%} of blocks"],
        ["load latency", latency or "nothing was loaded"],
        ["loaded", f"{format_bytes(report['loaded_bytes'])} at {format_rate(report['load_bandwidth']['value'])}"],
        ["from", devices or "-"],
        ["stored chunks", f"{report['stored_chunks']}, {report['dropped_stores']} dropped"],
        ["evictions", f"{report['evictions']}"],
        ["time", f"{report['seconds']:.1f} s"],
    ]
    if report["speed"]:
        rows.append(["behind the clock", f"{report['lateness_seconds']:.1f} s at worst"])
    title = f"{report['requests']} requests, {format_bytes(report['capacity_bytes'])}, {report['policy']}"
    print_table(title, {"": "left", " ": "left"}, rows)
