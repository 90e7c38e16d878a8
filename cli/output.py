"""What every command does alike: JSON or a table, and errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forebay.compression.errors import CompressionError
from forebay.diffusion.errors import DiffusionError
from forebay.storage.errors import ConfigError, ForebayError

OK = 0
PROBLEM = 1
"""Something is wrong with a pool, a device or this machine."""
USAGE = 2
"""The command line or the configuration is wrong."""

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
PoolFile = Annotated[Path, typer.Argument(metavar="POOL.yaml", help="The pool's configuration.")]

messages = Console(stderr=True, highlight=False)
"""For progress, questions and errors; results go to standard output."""


def print_json(data: Mapping[str, Any]) -> None:
    """One JSON object on standard output; paths and bytes as text."""
    print(json.dumps(data, indent=2, default=_plain))  # noqa: T201


def print_table(title: str, columns: Mapping[str, str], rows: list[list[str]]) -> None:
    """A table on standard output.

    Args:
        title: above it.
        columns: heading -> `left` or `right`.
        rows: cells in the order of `columns`, as rich markup.
    """
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for heading, side in columns.items():
        table.add_column(heading, justify="right" if side == "right" else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def fail(error: ForebayError | CompressionError | DiffusionError | OSError) -> int:
    """Print the error in one line, also as JSON where that was asked for, and return the exit code."""
    text = " ".join(str(error).split())
    messages.print(f"[bold red]error:[/] {escape(text)}", soft_wrap=True)
    if "--json" in sys.argv:
        print_json({"ok": False, "error": text})
    return USAGE if isinstance(error, ConfigError) else PROBLEM


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
