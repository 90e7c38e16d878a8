"""`forebay demo`: a real model behind `vllm serve`, cold, warm from the pool, recomputed, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.output import OK, PROBLEM, Json, messages, print_json, print_table

if TYPE_CHECKING:
    from forebay.bench.demo import Row


def demo(
    documents: Annotated[int, typer.Option(min=1, max=20, help="How many long documents to ask about.")] = 2,
    work: Annotated[
        Path | None, typer.Option(help="Keep the pool and the server's log here; by default they are removed.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the times.")] = None,
    as_json: Json = False,
) -> None:
    """Serve SmolLM2-135M-Instruct on the CPU and compare the times to first token of long prompts.

    Every question is asked cold, warm from the pool, still in the engine, recomputed without any cache, and once
    more after the server was restarted. All greedy answers must be identical (exit code 1 otherwise).
    """
    from forebay.bench import demo as job

    rows = job.run(documents, work=work, say=lambda text: messages.print(f"[dim]·[/] {text}", soft_wrap=True))
    result = job.as_json(rows)
    if as_json:
        print_json(result)
    else:
        _show(rows)
    if plot:
        from forebay.bench.ttft_plot import plot_ttft

        plot_ttft(rows, plot)
    raise typer.Exit(OK if result["ok"] else PROBLEM)


def _show(rows: list[Row]) -> None:
    headings = ("tokens", "cold", "recomputed", "warm", "restarted", "in engine", "gain")
    cells = [
        [
            row.title.removeprefix("Python manual, "),
            f"{row.tokens}",
            *(f"{value:.2f} s" for value in (row.cold, row.recomputed, row.warm, row.restarted, row.device_hit)),
            f"{row.recomputed / row.warm:.1f}x",
        ]
        for row in rows
    ]
    print_table("Time to first token", {"document": "left"} | dict.fromkeys(headings, "right"), cells)
    messages.print("recomputed: no cache at all; in engine: vLLM still had the blocks; gain: recomputed / warm")
    for row in rows:
        if not row.same_answers:
            messages.print(f"[bold red]the answers to {row.title!r} differ[/]; keep the pool with --work and report it")
