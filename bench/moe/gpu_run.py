"""All measurements on a GPU, one step after the other until the time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from forebay.bench.machine import source_commit
from forebay.bench.moe.gpu_card import Roof, describe, measure_roof
from forebay.bench.moe.gpu_check import Case, Forward, cases, check
from forebay.bench.moe.gpu_clock import Budget, Clock, is_lost, take_step
from forebay.bench.moe.gpu_dense import ARMS, Arm
from forebay.bench.moe.gpu_times import MODELS, TOKENS, Bench, build, measure
from forebay.bench.moe.gpu_tuning import Sweep, choosing, default, suggest
from forebay.bench.moe.layer import RHO, Sizes
from forebay.kernels.parser_moe.ops import parser_moe

Report = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    device: torch.device
    dtype: torch.dtype
    """Of the timed layers."""
    cases: tuple[Case, ...]
    models: Mapping[str, Sizes]
    tokens: tuple[int, ...]
    rounds: int
    copied: int
    """Bytes of the copy that the card's bandwidth is measured with."""
    product: int
    """Rows and columns of the matrices that its rate is measured with."""
    forward: Forward = parser_moe
    arms: Mapping[str, Arm]


def plan(device: torch.device, quick: bool) -> Plan:
    """Everything, or with `quick` one type, one model and three numbers of tokens."""
    # Tensor cores take bfloat16 from compute capability 8.0 on.
    served = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    dtypes = (served,) if quick else tuple(dict.fromkeys((served, torch.float16, torch.float32)))
    return Plan(
        device=device,
        dtype=served,
        cases=cases(dtypes),
        models=dict(list(MODELS.items())[:1]) if quick else MODELS,
        tokens=(1, 8, 512) if quick else TOKENS,
        rounds=7 if quick else 15,
        copied=min(1 << 30, torch.cuda.get_device_properties(device).total_memory // 16),
        product=8192,
        arms=ARMS,
    )


def run(
    plan: Plan,
    budget: Budget,
    *,
    save: Callable[[Report], None] = lambda report: None,
    progress: Callable[[int, int, str], None] = lambda done, total, step: None,
) -> Report:
    """Measure, and return everything as one JSON-ready object.

    A step that fails is reported under `errors`; what there is no time for is under `left_out`.

    Args:
        plan: what to measure.
        budget: no step begins when it is over.
        save: given the report so far after every step.
        progress: told how many steps of how many are done, and the next one.
    """
    torch.set_float32_matmul_precision("highest")
    report: Report = {
        "benchmark": "gpu_moe",
        "card": describe(plan.device),
        "commit": source_commit(),
        "rho": RHO,
        "dtype": str(plan.dtype),
        "roof": None,
        **{name: [] for name in ("checks", "rows", "blocks", "suggested", "left_out")},
        "dense_passed_over": {},
        "errors": {},
    }
    every = list(steps(plan, budget, report))
    for number, (name, step) in enumerate(every):
        progress(number, len(every), name)
        if not take_step(name, step, budget, report) and is_lost(plan.device):
            report["left_out"] += [f"{later}: the GPU answers no more" for later, _ in every[number + 1 :]]
            break
        save(report)
    report["suggested"] = suggest(report["blocks"])
    report["ok"] = not report["errors"] and all(row["ok"] for row in [*report["checks"], *report["rows"]])
    save(report)
    return report


def steps(plan: Plan, budget: Budget, report: Report) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names and actions, the most telling first. An action adds to the report."""
    clock = Clock(plan.device)
    bench = Bench(plan.device, plan.dtype, plan.forward, clock, budget, plan.rounds)
    sweep = Sweep(budget, {sizes: name for name, sizes in plan.models.items()})
    report["blocks"] = sweep.rows

    @lru_cache(maxsize=1)
    def layer(name: str) -> Any:
        built = build(bench, name, plan.models[name], plan.arms)
        report["dense_passed_over"].update(built.passed_over)
        return built

    def rates() -> None:
        report["roof"] = asdict(measure_roof(plan.device, plan.dtype, clock, plan.copied, plan.product))

    def correct(case: Case) -> None:
        if case.tuned:
            report["checks"].append(check(case, plan.device, plan.forward))
            return
        with choosing(default):
            report["checks"].append(check(case, plan.device, plan.forward))

    def timed(name: str, tokens: int) -> None:
        with choosing(sweep.choose):
            report["rows"].append(measure(bench, layer(name), tokens, Roof(**report["roof"])))

    yield "rates of the card", rates
    for case in plan.cases:
        yield f"check: {case}", partial(correct, case)
    for name in plan.models:
        for tokens in plan.tokens:
            yield f"{name}, {tokens} tokens", partial(timed, name, tokens)
