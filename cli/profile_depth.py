"""`forebay profile-depth`: how deep a model's prefixes may be reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forebay.cli.output import Json, messages, print_json, print_table
from forebay.diffusion.errors import DiffusionError

if TYPE_CHECKING:
    from forebay.diffusion.depth_file import DepthFile

SAMPLING = "What is measured"


def profile_depth(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A Hugging Face folder of a diffusion language model.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Text: a file or folder (.txt .md .rst .py, .jsonl with `text` or `messages`).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    tau: Annotated[float, typer.Option(help="What a layer's mean similarity must exceed.")] = 0.97,
    worst_tau: Annotated[
        float | None, typer.Option(help="What its least similar token must exceed too; beyond the paper.")
    ] = None,
    samples: Annotated[int, typer.Option(help="For each share (published: 500).", rich_help_panel=SAMPLING)] = 32,
    shares: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Per cents that are prefix: 20,40,60 or FIRST-LAST:STEP.", rich_help_panel=SAMPLING
        ),
    ] = "5-95:5",
    length: Annotated[int, typer.Option(help="Tokens of a window of text.", rich_help_panel=SAMPLING)] = 512,
    seed: Annotated[int, typer.Option(help="Of the choice of samples.", rich_help_panel=SAMPLING)] = 0,
    dtype: Annotated[str, typer.Option(help="`float32` or `bfloat16`.", rich_help_panel=SAMPLING)] = "float32",
    device: Annotated[str, typer.Option(help="`cpu`, `cuda` or `cuda:1`.", rich_help_panel=SAMPLING)] = "cpu",
    from_file: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Apply thresholds to what this file has measured: no model runs."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The table to write.")] = Path("forebay_depth.json"),
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw similarity by layer and share.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how long it would take.")] = False,
    as_json: Json = False,
) -> None:
    """Measure how deep a diffusion language model's prefixes may be reused, and write its depth table.

    In the model's folder, `forebay_depth.json` is what the model is served with. Interrupted, the same command goes on
    where it was.
    """
    if from_file is None and (model is None or text is None):
        raise DiffusionError("give a MODEL and --text PATH, or --from FILE")
    with _extra():
        from forebay.diffusion import depth_plot, profile
        from forebay.diffusion.depth_file import read_file, write_file
    if from_file is not None:
        file = profile.apply_tau(read_file(from_file), tau, worst_tau)
    else:
        assert model is not None
        assert text is not None
        settings = profile.ProfileSettings(
            text=text, samples=samples, shares=profile.parse_shares(shares), length=length, seed=seed, dtype=dtype,
            device=device,
        )  # fmt: skip
        profile.check_taus(tau, worst_tau)
        profiler = profile.Profiler(model, settings)
        if dry_run:
            _show_estimate(profiler.passes, profiler.tokens, profiler.estimate(), as_json)
            return
        with _progress() as tell:
            found = profiler.run(out.with_name(f"{out.name}.part"), tell)
        file = profiler.file(found, tau, worst_tau)
    write_file(out, file)
    if plot:
        depth_plot.draw(file, plot)
    _show(file, out, as_json)


@contextmanager
def _extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise DiffusionError(f"{error.name} is missing; install it with `pip install forebay[dlm]`") from None


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    columns = (BarColumn(24), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task("comparing prefixes", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show_estimate(passes: int, tokens: int, seconds: float, as_json: bool) -> None:
    if as_json:
        print_json({"ok": True, "passes": passes, "tokens": tokens, "seconds": seconds})
    else:
        typer.echo(f"{passes:,} passes over {tokens:,} tokens, about {seconds:.0f} s")


def _show(file: DepthFile, out: Path, as_json: bool) -> None:
    from forebay.diffusion.depth import DepthTable

    if as_json:
        print_json(file.model_dump() | {"ok": True, "out": str(out)})
        return
    table = DepthTable(file.leading, file.model.layers, file.source)
    rows = [
        [
            f"{one.share} %",
            f"{one.samples}",
            f"{table.depth(one.share, 100, 0, 'paper')}",
            f"{table.depth(one.share, 100, 0)}",
            " ".join(f"{value:.3f}" for value in one.mean[:8]) + (" ..." if len(one.mean) > 8 else ""),
        ]
        for one in file.similarities
    ]
    columns = dict.fromkeys(("share", "samples", "b, paper", "b, boundary"), "right") | {"mean, by layer": "left"}
    print_table("", columns, rows)
    worst = f", least similar token above {file.worst_tau:g}" if file.worst_tau is not None else ""
    typer.echo(f"\n{out}: {file.model.name or 'a model'}, {file.model.layers} layers, mean above {file.tau:g}{worst}")
