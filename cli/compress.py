"""`forebay compress run | inspect | verify | restore`, and `forebay compress MODEL ...` for `run`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperGroup

from forebay.cli.output import Json, messages, print_json, print_table
from forebay.compression.errors import CompressionError
from forebay.storage.units import format_bytes, parse_bytes


class _RunByDefault(TyperGroup):
    """`compress MODEL` is `compress run MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `run` in front where no command is."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    help="Make a Mixture-of-Experts model smaller: one backbone a layer, and what each expert adds to it (PARSER).",
)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder with safetensors weights.")]
Compressed = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `compress run` wrote.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder to make.")]
PAPER = "Settings of the method"
BEYOND = "Beyond the paper"
CALIBRATION = "Calibration"
CHOICES = {
    "backbone": ("barycenter", "mean"),
    "importance": ("output", "wanda"),
    "scope": ("layer", "expert"),
    "backbone_dtype": ("model", "int8"),
    "dtype": ("float32", "bfloat16"),
}


@app.command()
def run(
    model: Model,
    out: Out,
    text: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="Calibration text: a file or folder (.txt .md .rst .py .jsonl).",
            rich_help_panel=CALIBRATION,
        ),
    ],
    rho: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Share of units that become the backbone's; 0.9 by default.", rich_help_panel=PAPER
        ),
    ] = None,
    layers: Annotated[
        str,
        typer.Option(
            help="`default` (the paper's choice, else all), `all`, `last:N`, or 3,5,8-11.",
            rich_help_panel=PAPER,
        ),
    ] = "default",
    backbone: Annotated[str, typer.Option(help="`barycenter` or `mean`.", rich_help_panel=PAPER)] = "barycenter",
    importance: Annotated[str, typer.Option(help="`output` or `wanda`.", rich_help_panel=PAPER)] = "output",
    scope: Annotated[
        str, typer.Option(help="Units compete in their `layer` or within their `expert`.", rich_help_panel=PAPER)
    ] = "layer",
    routing_weight: Annotated[
        bool, typer.Option("--routing-weight", help="Weigh by how often the router picks.", rich_help_panel=PAPER)
    ] = False,
    min_units: Annotated[int, typer.Option(min=0, help="Floor for each expert.", rich_help_panel=PAPER)] = 4,
    memory_budget: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="For all weights, such as 13GiB, instead of --rho: all layers compete.",
            rich_help_panel=BEYOND,
        ),
    ] = "",
    backbone_dtype: Annotated[
        str,
        typer.Option(help="Store backbones in the type of the `model`, or in `int8`.", rich_help_panel=BEYOND),
    ] = "model",
    refit: Annotated[
        bool, typer.Option("--refit", help="Fit kept down columns to the calibration rows.", rich_help_panel=BEYOND)
    ] = False,
    sequences: Annotated[int, typer.Option(min=1, help="How many, at most.", rich_help_panel=CALIBRATION)] = 512,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each.", rich_help_panel=CALIBRATION)] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Rows kept for each expert.", rich_help_panel=CALIBRATION)] = 2048,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.", rich_help_panel=CALIBRATION)] = 4,
    seed: Annotated[int, typer.Option(help="Of the samples.", rich_help_panel=CALIBRATION)] = 0,
    device: Annotated[str, typer.Option(help="`cpu`, `cuda` or `cuda:1`.", rich_help_panel=CALIBRATION)] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="Layers compute in `float32` or `bfloat16`.", rich_help_panel=CALIBRATION)
    ] = "float32",
    allow_unseen: Annotated[
        bool, typer.Option("--allow-unseen", help="Go on with experts no token reached.", rich_help_panel=CALIBRATION)
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Compress a model. One layer is in memory at a time; interrupted, the same command goes on where it was.

    The result is a normal model folder: `vllm serve DIR` serves it.
    """
    given = {
        "backbone": backbone, "importance": importance, "scope": scope, "backbone_dtype": backbone_dtype,
    }  # fmt: skip
    _check_choices(given | {"dtype": dtype})
    if rho is not None and memory_budget:
        raise CompressionError(f"--rho {rho:g} and --memory-budget {memory_budget} both say how much to keep; give one")
    budget = _size(memory_budget)
    with _moe_extra():
        from forebay.compression.budget import estimate
        from forebay.compression.layer import Options
        from forebay.compression.restore import CompressedFolder
        from forebay.compression.run import Settings, compress
        from forebay.compression.summary import report
    chosen: Any = given
    settings = Settings(
        text=text, layers=layers, sequences=sequences, length=length, rows=rows, batch=batch, seed=seed, device=device,
        dtype=dtype, allow_unseen=allow_unseen, memory_budget=budget,
        options=Options(
            rho=0.9 if rho is None else rho, routing_weight=routing_weight, min_units=min_units, refit=refit, **chosen
        ),
    )  # fmt: skip
    if dry_run:
        found = estimate(model, settings)
    else:
        with _progress() as tell:
            compress(model, out, settings, tell)
        found = report(CompressedFolder(out))
    _show(found | {"ok": True, "out": str(out)}, as_json)


@app.command()
def inspect(
    folder: Compressed,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw kept units as a heat map.")] = None,
    as_json: Json = False,
) -> None:
    """What is kept, by layer."""
    with _moe_extra():
        from forebay.compression.restore import CompressedFolder
        from forebay.compression.summary import draw, report
    found = CompressedFolder(folder)
    _show(report(found) | {"ok": True}, as_json)
    if plot:
        draw(found, plot)


@app.command()
def verify(folder: Compressed, as_json: Json = False) -> None:
    """Read every tensor and check shapes, indices and counts; name what is wrong."""
    with _moe_extra():
        from forebay.compression.restore import CompressedFolder
    found = CompressedFolder(folder)
    with _progress() as tell:
        found.verify(lambda done, total: tell("checking", done, total))
    if as_json:
        print_json({"ok": True, "layers": found.parser.layers, "tensors": len(found.names)})
    else:
        typer.echo(f"{folder}: {len(found.names)} tensors, {len(found.parser.layers)} compressed layers, all sound")


@app.command()
def restore(folder: Compressed, out: Out, as_json: Json = False) -> None:
    """Write the dense reconstruction, for tools that know no compressed form."""
    with _moe_extra():
        from forebay.compression.restore import CompressedFolder
    with _progress() as tell:
        CompressedFolder(folder).restore(out, lambda done, total: tell("restoring", done, total))
    if as_json:
        print_json({"ok": True, "out": str(out)})
    else:
        typer.echo(f"{out}: the dense reconstruction of {folder}")


def _check_choices(given: dict[str, str]) -> None:
    for option, value in given.items():
        if value not in CHOICES[option]:
            name = option.replace("_", "-")
            raise CompressionError(f"--{name} {value!r} is not {' or '.join(CHOICES[option])}")


def _size(text: str) -> int | None:
    if not text:
        return None
    try:
        return int(str(parse_bytes(text)))
    except ValueError as error:
        raise CompressionError(f"--memory-budget: {error}") from None


@contextmanager
def _moe_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise CompressionError(f"{error.name} is missing; install it with `pip install forebay[moe]`") from None


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    columns = (BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [
        [
            str(one["layer"]),
            f"{one['kept']:,} of {one['units']:,}",
            " / ".join(f"{one[name]:g}" for name in ("fewest", "median", "most")),
            f"{one['fraction']:.1%}",
        ]
        for one in found["layers"]
    ]
    columns = {"layer": "right", "units kept": "right", "fewest / median / most": "right", "of the parameters": "right"}
    print_table("", columns, rows)
    before, after = found["dense_bytes"], found["bytes"]
    sizes = f"{format_bytes(before)} -> {format_bytes(after)} ({after / before:.1%})"
    int8 = ", int8 backbones" if found["backbone_dtype"] == "int8" else ""
    typer.echo(f"\nwhole model: {sizes}, rho {found['rho']:g}{int8}")
