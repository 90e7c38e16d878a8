"""Compressed MoE layers on a GPU, in one run of less than five minutes: `python -m forebay.bench.gpu_moe --json FILE`.

Checks the kernels against the reference, times layers of real models against the same layers dense, and finds the
block sizes that win on the card. What is measured, and how to read it: docs/parser.md, "On a GPU".
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forebay.bench.gpu_report import messages, saver, shown, unwritable

PROBLEM, USAGE = 1, 2
WIDTH = 160
"""Columns of the table where there is no terminal."""


def main(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One type, one model, three numbers of tokens.")] = False,
    seconds: Annotated[float, typer.Option(min=1, help="No step begins after this time.")] = 270,
) -> None:
    """Check and time compressed MoE layers on this machine's GPU.

    Exit code 0 when everything that there was time for is right, 1 when not, 2 when nothing can be measured here.
    """
    started = time.monotonic()
    problem = missing() or unwritable("--json", json_file)
    if problem:
        messages.print(f"error: {problem}", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE)
    try:
        report = _measure(json_file, quick, seconds, started)
    except (RuntimeError, OSError) as error:
        messages.print(f"error: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
        raise typer.Exit(PROBLEM) from None
    from forebay.bench.moe.gpu_table import show

    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(show(report))
    raise typer.Exit(0 if report["ok"] else PROBLEM)


def missing() -> str:
    """What this machine lacks for a run, in one line; empty when it can begin."""
    try:
        import torch
    except ImportError as error:
        return f'PyTorch is missing ({error}); pip install "forebay[moe]"'
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
    if not found:
        why = "".join(f" ({' '.join(str(warning.message).split())})" for warning in caught[:1])
        return f"torch {torch.__version__} finds no GPU{why}; run this where a CUDA build of PyTorch finds a card"
    try:
        import triton  # noqa: F401 - whether there is one
    except ImportError as error:
        return f"Triton is missing ({error}); pip install triton"
    return ""


def _measure(path: Path | None, quick: bool, seconds: float, started: float) -> dict[str, Any]:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # it warns where it has no block sizes for this card
    import torch

    from forebay.bench.moe.gpu_clock import Budget
    from forebay.bench.moe.gpu_run import plan, run

    save = saver(path, "forebay.bench.gpu_moe", quick, started)
    with shown(started) as progress:
        budget = Budget(seconds - (time.monotonic() - started))
        device = torch.device("cuda", torch.cuda.current_device())
        return run(plan(device, quick), budget, save=save, progress=progress)


if __name__ == "__main__":
    typer.run(main)
