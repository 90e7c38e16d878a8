"""`forebay`: the commands, and what happens to their errors.

Exit codes: 0 all is well, 1 a problem was found, 2 the command line or the configuration is wrong.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import sys
from typing import Annotated

import typer
from rich.logging import RichHandler

from forebay.cli import bench, calibrate, compress, demo, doctor, pool, profile_depth, spdk
from forebay.cli.output import fail, messages
from forebay.compression.errors import CompressionError
from forebay.diffusion.errors import DiffusionError
from forebay.storage.errors import ForebayError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor.doctor)
app.command()(calibrate.calibrate)
app.command()(demo.demo)
app.command("profile-depth")(profile_depth.profile_depth)
app.add_typer(pool.app, name="pool")
app.add_typer(spdk.app, name="spdk")
app.add_typer(compress.app, name="compress")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {importlib.metadata.version('forebay')}")
        raise typer.Exit


@app.callback()
def forebay(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plugins for LLM serving: a striped KV pool, and Mixture-of-Experts models served compressed.

    Exit codes: 0 all is well, 1 a problem was found, 2 the command line or the configuration is wrong.
    """


def main() -> None:
    """Run the command line. Errors that we foresee are one line; anything else is a bug and shows where."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=messages, show_time=False, show_path=False)],
    )
    try:
        app()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        sys.exit(1)
    except (ForebayError, CompressionError, DiffusionError, OSError) as error:
        sys.exit(fail(error))


if __name__ == "__main__":
    main()
