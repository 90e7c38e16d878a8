"""What the benchmarks that need a GPU say while they run, and leave behind."""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

messages = Console(stderr=True, highlight=False)


def unwritable(option: str, path: Path | None) -> str:
    """Why no result can be written to the path of an option; empty when it can."""
    try:
        if path:
            path.open("a").close()
    except OSError as error:
        return f"{option} {path}: {error.strerror}; give a file that can be written"
    return ""


def saver(path: Path | None, module: str, quick: bool, started: float) -> Callable[[dict[str, Any]], None]:
    """Writes a report, with the command that made it, as often as it is called; nowhere without a path."""
    facts = {"command": shlex.join(["python", "-m", module, *sys.argv[1:]]), "quick": quick}

    def save(report: dict[str, Any]) -> None:
        report |= facts | {"seconds": time.monotonic() - started}
        if path:
            path.write_text(json.dumps(plain(report), indent=2) + "\n")

    return save


@contextmanager
def shown(started: float) -> Iterator[Callable[[int, int, str], None]]:
    """Tells a person how many steps of how many are done, and what comes next."""
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int, step: str) -> None:
            bar.update(task, completed=done, total=total, description=step)
            if bar.disable:
                messages.print(f"{time.monotonic() - started:.0f} s, {done} of {total}: {step}", markup=False)

        yield progress


def plain(value: Any) -> Any:
    """The same for JSON, which knows no infinity: None instead."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
