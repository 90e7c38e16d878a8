"""Whole generations of every arm on a device, alone and many at once, and what they could take at best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from forebay.bench.dlm.arms import BICACHE, BICACHE_DUAL, BICACHE_PAPER, DUAL, INTRA, NONE, ORDINARY, Arm
from forebay.bench.dlm.gpu_floor import Work
from forebay.bench.moe.gpu_card import Roof
from forebay.bench.moe.gpu_clock import Budget, OutOfTime
from forebay.bench.rounds import Series
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.depth import DepthTable
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.runtime import Runtime, RuntimeSettings
from forebay.diffusion.transformer import Transformer

WARM = 3
"""Passes: the first one of a request is of another kind than the second one."""
CAREFUL = 2.0
"""How much longer than at best something is expected to take that has not run yet (our choice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A model, a prefix whose states are there as deep as any arm reuses them, and what is asked behind it."""

    transformer: Transformer
    table: DepthTable
    settings: DecodingSettings
    user: int
    states: PrefixStates

    @classmethod
    def make(
        cls, transformer: Transformer, table: DepthTable, settings: DecodingSettings, prefix: int, user: int
    ) -> Bench:
        """With random tokens."""
        bench = cls(
            transformer=transformer, table=table, settings=settings, user=user,
            states=PrefixStates(tokens(transformer, prefix, seed=1)),
        )  # fmt: skip
        for arm in sorted((BICACHE, BICACHE_PAPER, ORDINARY), key=bench.depth):
            bench.states.deepen(transformer, bench.depth(arm))
        return bench

    @property
    def prefix(self) -> int:
        """P."""
        return len(self.states.tokens_P)

    @property
    def work(self) -> Work:
        """To count what its requests need."""
        item = self.transformer.weights.norm_D.element_size()
        return Work(self.transformer.config, self.prefix, self.user, item)

    def depth(self, arm: Arm) -> int:
        """b."""
        return arm.layers(self.table, self.prefix, self.prefix + self.user, self.settings.length)

    def floor(self, arm: Arm, roof: Roof) -> float:
        """Seconds of a generation at best."""
        return self.work.floor(roof, arm.settings(self.settings), self.depth(arm))

    def request(self, arm: Arm, settings: DecodingSettings | None = None) -> DiffusionRequest:
        """A request of an arm."""
        asked = tokens(self.transformer, self.user, seed=2)
        chosen = arm.settings(settings or self.settings)
        return DiffusionRequest(self.transformer, self.states, self.depth(arm), asked, chosen)

    def warm(self, arm: Arm) -> None:
        """Run the kinds of passes that an arm has, so that kernels are loaded and chosen."""
        request = self.request(arm)
        for _ in range(WARM):
            step(request)


def tokens(transformer: Transformer, count: int, seed: int) -> torch.Tensor:
    """Random ones, on the model's device."""
    random = torch.Generator().manual_seed(seed)
    made = torch.randint(5, transformer.config.vocabulary, (count,), generator=random)
    return made.to(transformer.weights.norm_D.device)


def step(request: DiffusionRequest) -> None:
    """One pass."""
    advance(request.transformer, [request])


def generate(request: DiffusionRequest) -> None:
    """A whole answer."""
    while not request.done:
        step(request)


def seconds(device: torch.device, action: Callable[[], object]) -> float:
    """How long an action takes, with all that it leaves to the device."""
    wait(device)
    before = time.perf_counter()
    action()
    wait(device)
    return time.perf_counter() - before


def wait(device: torch.device) -> None:
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def serve(bench: Bench, arm: Arm, requests: int, batch: int) -> float:
    """Seconds for requests that share the bench's prefix, so many of them at a time; its states are there."""
    runtime = Runtime(bench.transformer, bench.table, RuntimeSettings(batch=batch, audit=0))

    def submit(number: int, settings: DecodingSettings) -> None:
        asked = tokens(bench.transformer, bench.user, seed=10 + number)
        runtime.submit(str(number), torch.cat([bench.states.tokens_P, asked]), arm.settings(settings), bench.prefix)

    def drive() -> None:
        while not runtime.idle:
            runtime.step()

    submit(requests, replace(bench.settings, steps=1))
    drive()
    for number in range(requests):
        submit(number, bench.settings)
    return seconds(bench.states.tokens_P.device, drive)


@dataclass(slots=True)
class Cells:
    """Times by what was measured; whether there is time for one more."""

    budget: Budget
    times: dict[tuple[Any, ...], list[float]] = field(default_factory=dict)

    def take(self, key: tuple[Any, ...], floor: float, measure: Callable[[], float]) -> None:
        """Measure once more.

        Raises:
            OutOfTime: it would end too late.
        """
        expected = max(self.times.get(key, [floor * CAREFUL]))
        if time.monotonic() + expected > self.budget.ends:
            raise OutOfTime
        taken = measure()
        self.times.setdefault(key, []).append(taken)

    def median(self, key: tuple[Any, ...]) -> float | None:
        """Seconds; None where nothing was measured."""
        return median(self.times[key]) if key in self.times else None


def arm_rows(benches: dict[int, Bench], arms: tuple[Arm, ...], cells: Cells, roof: Roof) -> Iterator[dict[str, Any]]:
    """What was found of single generations."""
    for prefix, bench in benches.items():
        others = {one.name: cells.median((prefix, one.name)) for one in (NONE, INTRA, DUAL)}
        for arm in arms:
            taken = cells.median((prefix, arm.name))
            if taken is None:
                continue
            floor = bench.floor(arm, roof)
            yield {
                "prefix": prefix, "arm": arm.name, "meaning": arm.meaning, "depth": bench.depth(arm),
                "seconds": Series.of(cells.times[prefix, arm.name], "s").to_json(),
                "tokens_per_second": bench.settings.length / taken,
                "floor_seconds": floor, "of_floor": floor / taken,
                **{f"vs_{name}": other / taken if other else None for name, other in others.items()},
            }  # fmt: skip


def batch_rows(bench: Bench, cells: Cells, requests: int) -> Iterator[dict[str, Any]]:
    """What was found of requests that share a prefix, for each arm one at a time and all at once."""
    for arm in (BICACHE, BICACHE_DUAL):
        one, many = (cells.median(("batch", arm.name, batch)) for batch in (1, requests))
        if one and many:
            made = requests * bench.settings.length
            yield {
                "prefix": bench.prefix, "arm": arm.name, "requests": requests, "depth": bench.depth(arm),
                "tokens_per_second_one": made / one, "tokens_per_second_all": made / many, "ratio": one / many,
                "rounds": len(cells.times["batch", arm.name, requests]),
            }  # fmt: skip
