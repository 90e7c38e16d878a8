"""All measurements of a diffusion model on a GPU, one step after the other until the time is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from forebay.bench.dlm.arms import BICACHE, BICACHE_DUAL, Arm
from forebay.bench.dlm.gpu_check import Case, cases, check
from forebay.bench.dlm.gpu_plan import Plan
from forebay.bench.dlm.gpu_profile import KINDS, profile
from forebay.bench.dlm.gpu_speed import Bench, Cells, arm_rows, batch_rows, generate, seconds, serve
from forebay.bench.dlm.shape import random_weights
from forebay.bench.dlm.speed import TABLE
from forebay.bench.machine import source_commit
from forebay.bench.moe.gpu_card import Roof, describe, measure_roof
from forebay.bench.moe.gpu_clock import Budget, Clock, OutOfTime, is_lost, take_step
from forebay.diffusion.attention import heads_first
from forebay.diffusion.transformer import Transformer

Report = dict[str, Any]
Step = tuple[str, Callable[[], None]]


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
        budget: nothing begins that is expected to end later.
        save: given the report so far after every step.
        progress: told how many steps of how many are done, and the next one.
    """
    torch.set_float32_matmul_precision("highest")
    steps = _Steps(plan, Cells(budget))
    report: Report = {
        "benchmark": "gpu_dlm", "card": describe(plan.device), "commit": source_commit(), "dtype": str(plan.dtype),
        "model": asdict(plan.config), "settings": asdict(plan.settings), "user": plan.user, "roof": None,
        "checks": steps.checks, "passes": steps.passes, "facts": steps.facts, "rows": [], "batches": [],
        "left_out": [], "errors": {},
    }  # fmt: skip
    every = list(steps)
    for number, (name, step) in enumerate(every):
        progress(number, len(every), name)
        fine = take_step(name, step, budget, report)
        report |= steps.found()
        report["ok"] = not report["errors"] and all(one["ok"] for one in steps.checks)
        save(report)
        if not fine and is_lost(plan.device):
            report["left_out"] += [f"{later}: the GPU answers no more" for later, _ in every[number + 1 :]]
            save(report)
            break
    return report


@dataclass(slots=True)
class _Steps:
    """Names and actions, the most telling first, and what they have found so far."""

    plan: Plan
    cells: Cells
    roof: Roof | None = None
    transformer: Transformer | None = None
    benches: dict[int, Bench] = field(default_factory=dict)
    checks: list[dict[str, Any]] = field(default_factory=list)
    passes: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Step]:
        plan = self.plan
        yield "rates of the card", self._rates
        if plan.device.type == "cuda":
            yield "layout of what varlen_attn gives", self._layout
        for case in cases(plan.engines):
            yield f"check: {case}", partial(self._check, case)
        yield "weights", self._weights
        for prefix in plan.prefixes:
            yield f"P {prefix}: states, and every kind of pass once", partial(self._bench, prefix)
        for kind in KINDS:
            yield f"P {plan.shared}: one pass, {kind}", partial(self._profile, kind)
        for turn in range(plan.rounds):
            named = f"round {turn + 1} of {plan.rounds}"
            for prefix in plan.prefixes:
                for arm in _turned(plan.arms, turn):
                    yield f"P {prefix}, {arm.name}, {named}", partial(self._generate, prefix, arm)
            for arm in _turned((BICACHE, BICACHE_DUAL), turn):
                for batch in _turned((1, plan.requests), turn):
                    name = f"P {plan.shared}, {arm.name}, {plan.requests} requests, {batch} at a time, {named}"
                    yield name, partial(self._serve, arm, batch)

    def found(self) -> Report:
        """Of all arms, so far."""
        if self.roof is None:
            return {}
        shared = self.benches.get(self.plan.shared)
        return {
            "roof": asdict(self.roof),
            "rows": list(arm_rows(self.benches, self.plan.arms, self.cells, self.roof)),
            "batches": list(batch_rows(shared, self.cells, self.plan.requests)) if shared else [],
        }

    def _rates(self) -> None:
        plan = self.plan
        self.roof = measure_roof(plan.device, plan.dtype, Clock(plan.device), plan.copied, plan.product)

    def _check(self, case: Case) -> None:
        self.checks.append(check(case, self.plan.device))

    def _layout(self) -> None:
        first = heads_first(self.plan.device, self.plan.dtype)
        self.facts["weights of varlen_attn"] = "(heads, queries)" if first else "(queries, heads)"

    def _weights(self) -> None:
        plan = self.plan
        self.transformer = Transformer(random_weights(plan.config, plan.dtype, str(plan.device)))
        self.facts["attention"] = getattr(self.transformer.attention, "__name__", "")

    def _bench(self, prefix: int) -> None:
        assert self.transformer is not None, "there are no weights"
        plan = self.plan
        bench = Bench.make(self.transformer, TABLE, plan.settings, prefix, plan.user)
        for arm in plan.arms:
            bench.warm(arm)
        self.benches[prefix] = bench

    def _profile(self, kind: str) -> None:
        assert self.roof is not None, "the rates of the card are unknown"
        self.passes.append(profile(self._of(self.plan.shared), kind, self.roof))

    def _generate(self, prefix: int, arm: Arm) -> None:
        assert self.roof is not None, "the rates of the card are unknown"
        bench, device = self._of(prefix), self.plan.device
        request = bench.request(arm)
        floor = bench.floor(arm, self.roof)
        self.cells.take((prefix, arm.name), floor, lambda: seconds(device, lambda: generate(request)))

    def _serve(self, arm: Arm, batch: int) -> None:
        assert self.roof is not None, "the rates of the card are unknown"
        bench, requests = self._of(self.plan.shared), self.plan.requests
        floor = requests * bench.floor(arm, self.roof)
        self.cells.take(("batch", arm.name, batch), floor, lambda: serve(bench, arm, requests, batch))
        if self.plan.device.type == "cuda":
            self.facts["most bytes in use"] = torch.cuda.max_memory_allocated(self.plan.device)

    def _of(self, prefix: int) -> Bench:
        if prefix not in self.benches:
            raise OutOfTime
        return self.benches[prefix]


def _turned(items: tuple[Any, ...], turn: int) -> tuple[Any, ...]:
    """In an order that turns by one place each round, so that a slow minute meets all."""
    place = turn % len(items)
    return items[place:] + items[:place]
