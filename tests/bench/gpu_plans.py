"""Small measurements on the CPU, as the tests run them; as a script, one with the Triton kernels in the interpreter."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from rich.console import Console

from forebay.bench import gpu_report
from forebay.bench.moe import gpu_dense, gpu_run
from forebay.bench.moe.gpu_check import Case
from forebay.bench.moe.gpu_clock import Budget
from forebay.bench.moe.gpu_table import show
from forebay.bench.moe.layer import Sizes
from forebay.kernels.parser_moe import reference, triton_tuning

CPU = torch.device("cpu")
SMALL = Sizes(6, 2, 160, 64)
TORCH_ARMS = {name: arm for name, arm in gpu_dense.ARMS.items() if name.startswith("torch")}


def plan(**changes) -> gpu_run.Plan:
    small = gpu_run.Plan(
        device=CPU,
        dtype=torch.bfloat16,
        cases=(Case(1, 4, torch.bfloat16), Case(8, 4, torch.float32, "gelu", tuned=True)),
        models={"small": SMALL, "other": replace(SMALL, experts=8)},
        tokens=(1, 70),
        rounds=2,
        copied=1 << 16,
        product=32,
        forward=reference.forward,
        arms=TORCH_ARMS,
    )
    return replace(small, **changes)


def text_of(report) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(show(report))
    return captured.get()


def interpret() -> None:
    """One run in the interpreter, in which a candidate takes as long as its launch does."""
    import time

    from forebay.kernels.parser_moe import triton_forward

    def milliseconds(blocks, launch) -> float:
        started = time.perf_counter()
        launch(blocks)
        return 1e3 * (time.perf_counter() - started)

    triton_tuning.milliseconds = milliseconds
    small = plan(
        dtype=torch.float16,
        cases=(Case(1, 4, torch.float32),),
        models={"small": Sizes(3, 1, 160, 64)},
        tokens=(1, 4),
        rounds=1,
        forward=triton_forward.forward,
        arms={"torch loop over experts": gpu_dense.by_loop},
    )
    print(json.dumps(gpu_report.plain(gpu_run.run(small, Budget(100)))))


if __name__ == "__main__":
    interpret()
