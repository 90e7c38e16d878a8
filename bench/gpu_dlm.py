"""A diffusion model of LLaDA-8B's shape on a GPU, in 8 minutes at most: `python -m forebay.bench.gpu_dlm --out FILE`.

Checks attention and the runtime on the card, looks at single passes, and times whole generations of every way to reuse
keys and values, with random weights. Prints Markdown with the card's name.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.bench.gpu_report import messages, saver, shown, unwritable

PROBLEM, USAGE = 1, 2
NEEDED = (8, 0)
"""Compute capability: bfloat16 and FlashAttention."""


def main(
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="Nothing begins that would end later.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="One round of two prefixes.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="A dry run with a tiny model, without a GPU.")] = False,
) -> None:
    """Check and time a diffusion model on this machine's GPU.

    Exit code 0 when everything that there was time for is right, 1 when not, 2 when nothing can be measured here.
    """
    started = time.monotonic()
    try:
        problem = ("" if cpu else missing()) or unwritable("--out", out)
        report = None if problem else _measure(out, started + 60 * minutes, started, quick=quick, cpu=cpu)
    except (RuntimeError, OSError) as error:
        messages.print(f"error: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
        raise typer.Exit(PROBLEM) from None
    if report is None:
        messages.print(f"error: {problem}", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE)
    from forebay.bench.dlm.gpu_table import show

    typer.echo(show(report), nl=False)
    raise typer.Exit(0 if report["ok"] else PROBLEM)


def missing() -> str:
    """What this machine lacks for a run, in one line; empty when it can begin."""
    try:
        import torch
    except ImportError as error:
        return f'PyTorch is missing ({error}); pip install "forebay[dlm]"'
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
    if not found:
        why = "".join(f" ({' '.join(str(warning.message).split())})" for warning in caught[:1])
        return (
            f"torch {torch.__version__} finds no GPU{why}; run this where a CUDA build of PyTorch finds a card, or try "
            "it with --cpu"
        )
    return too_small(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[0])


def too_small(name: str, capability: tuple[int, int], free: int) -> str:
    """Why a card with so many free bytes is not enough; empty when it is."""
    import torch

    from forebay.bench.dlm.gpu_plan import plan

    if capability < NEEDED:
        return f"{name} has compute capability {capability[0]}.{capability[1]}; {NEEDED[0]}.{NEEDED[1]} is needed"
    needed = plan(torch.device("cuda"), quick=False).bytes
    if free < needed:
        return f"{name} has {free / 2**30:.1f} GiB free; {needed / 2**30:.1f} GiB are needed: end what uses it"
    return ""


def _measure(path: Path | None, ends: float, started: float, *, quick: bool, cpu: bool) -> dict[str, Any]:
    import torch

    from forebay.bench.dlm.gpu_plan import plan, tiny
    from forebay.bench.dlm.gpu_run import run
    from forebay.bench.moe.gpu_clock import Budget

    save = saver(path, "forebay.bench.gpu_dlm", quick, started)
    with shown(started) as progress:
        budget = Budget(ends - time.monotonic())
        if cpu:
            return run(tiny(torch.device("cpu")), budget, save=save, progress=progress)
        device = torch.device("cuda", torch.cuda.current_device())
        return run(plan(device, quick), budget, save=save, progress=progress)


if __name__ == "__main__":
    typer.run(main)
