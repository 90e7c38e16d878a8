"""Tokens per second of every arm: `vs_none`, `vs_intra`, `vs_dual`, `model_fit`, on random weights of LLaDA's shape.

The quick form times each kind of pass once per round and adds them up to refresh cycles of T = 16 steps: one refresh
and fifteen others. `none` and the refreshes of `intra` and of Fast-dLLM's caches are one and the same pass. The long
form times whole generations of every arm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from forebay.bench.dlm.arms import BICACHE, BICACHE_DUAL, DUAL, INTRA, NONE, PREFIX, Arm
from forebay.bench.dlm.cost import Cost
from forebay.bench.dlm.shape import llada_shape, random_weights
from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.depth import TABLES
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer

USER = 100
"""Tokens of the prompt behind the prefix."""
SETTINGS = DecodingSettings(length=256, steps=128, block=32, refresh=16)
TABLE = TABLES["LLaDA-8B-Instruct"]
ARMS = (NONE, INTRA, PREFIX, DUAL, BICACHE, BICACHE_DUAL)
QUICK_PREFIXES, LONG_PREFIXES = (500, 1450), (500, 1450, 4000)


@dataclass(frozen=True, slots=True)
class Bench:
    """One model and one prefix."""

    transformer: Transformer
    prefix: int
    depth: int
    states: PrefixStates

    @classmethod
    def make(cls, transformer: Transformer, prefix: int) -> Bench:
        """With states as deep as the table says."""
        tokens = torch.randint(5, transformer.config.vocabulary, (prefix,), generator=torch.Generator().manual_seed(1))
        depth = BICACHE.layers(TABLE, prefix, prefix + USER, SETTINGS.length)
        states = PrefixStates(tokens.to(transformer.weights.norm_D.device))
        states.deepen(transformer, depth)
        return cls(transformer, prefix, depth, states)

    def request(self, arm: Arm, settings: DecodingSettings = SETTINGS) -> DiffusionRequest:
        """A request of an arm."""
        tokens = torch.randint(
            5, self.transformer.config.vocabulary, (USER,), generator=torch.Generator().manual_seed(2)
        )
        depth = self.depth if arm.depth == "table" else 0
        return DiffusionRequest(
            self.transformer, self.states, depth, tokens.to(self.states.tokens_P.device), arm.settings(settings)
        )

    @property
    def cost(self) -> Cost:
        """Of its passes."""
        return Cost(self.transformer.config, self.prefix, USER + SETTINGS.length, SETTINGS.block)


def measure(context: Context) -> Measurement:
    """All ratios of speed."""
    transformer = Transformer(random_weights(llada_shape()))
    found = Measurement()
    fits = []
    for prefix in QUICK_PREFIXES if context.quick else LONG_PREFIXES:
        context.say(f"P = {prefix}")
        bench = Bench.make(transformer, prefix)
        seconds, details = (_cycles if context.quick else _generations)(bench, context)
        fits += _compare(bench, seconds, details)
        found.details[f"p{prefix}"] = details
        for name, value in _ratios(seconds).items():
            found.ratios[f"{name}_p{prefix}"] = value
    found.ratios["model_fit"] = min(fits)
    return found


def _ratios(seconds: dict[str, float]) -> dict[str, float]:
    bicache = seconds[BICACHE.name]
    return {
        "vs_none": seconds[NONE.name] / bicache,
        "vs_intra": seconds[INTRA.name] / bicache,
        "vs_dual": seconds[DUAL.name] / seconds[BICACHE_DUAL.name],
    }


def _cycles(bench: Bench, context: Context) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of a refresh cycle of every arm, from those of its passes.

    Two blocks of two steps each, refreshed once: its passes are a refresh, one of the block, one of all rows behind
    the prefix, and again one of the block.
    """
    short = replace(SETTINGS, steps=2 * SETTINGS.blocks, refresh=1000)
    kinds: dict[str, Callable[[], dict[str, float]]] = {
        "full": lambda: dict(zip(["full"], _passes(bench.request(NONE, short), 1), strict=True)),
        "others": lambda: dict(
            zip(
                ["refresh", "block", "step", "block_again"], _passes(bench.request(BICACHE_DUAL, short), 4), strict=True
            )
        ),
    }
    rounds = interleave(kinds, context.rounds, lambda kind: context.say(f"P = {bench.prefix}: {kind}"))
    merged = [one | two for one, two in zip(rounds["full"], rounds["others"], strict=True)]
    series = {name: Series.of([one[name] for one in merged], "s") for name in merged[0]}
    full, refresh, step = (series[name].median for name in ("full", "refresh", "step"))
    block = median([*series["block"].values, *series["block_again"].values])
    others = SETTINGS.refresh - 1
    seconds = {
        NONE.name: full * SETTINGS.refresh,
        INTRA.name: full + others * step,
        DUAL.name: full + others * block,
        BICACHE.name: refresh + others * step,
        BICACHE_DUAL.name: refresh + others * block,
    }
    return seconds, {"passes": medians(series), "cycle_seconds": seconds}


def _passes(request: DiffusionRequest, count: int) -> list[float]:
    """Seconds of the first passes of a request."""
    found = []
    for _ in range(count):
        before = time.perf_counter()
        advance(request.transformer, [request])
        found.append(time.perf_counter() - before)
    return found


def _generations(bench: Bench, context: Context) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of a whole generation of every arm."""

    def generate(arm: Arm) -> float:
        request = bench.request(arm)
        before = time.perf_counter()
        while not request.done:
            advance(request.transformer, [request])
        return time.perf_counter() - before

    arms = {arm.name: (lambda arm=arm: generate(arm)) for arm in ARMS}
    rounds = interleave(arms, context.rounds, lambda arm: context.say(f"P = {bench.prefix}: {arm}"))
    series = {name: Series.of(values, "s") for name, values in rounds.items()}
    return {name: one.median for name, one in series.items()}, {"generation_seconds": medians(series)}


def _compare(bench: Bench, seconds: dict[str, float], details: dict[str, Any]) -> list[float]:
    """Measured speed-up over `none`, relative to what counting operations says; of every arm."""
    cost, others = bench.cost, SETTINGS.refresh - 1
    operations = {
        INTRA.name: cost.full() + others * cost.step(),
        DUAL.name: cost.full() + others * cost.block_step(),
        BICACHE.name: cost.refresh(bench.depth) + others * cost.step(),
        BICACHE_DUAL.name: cost.refresh(bench.depth) + others * cost.block_step(),
    }
    none = cost.full() * SETTINGS.refresh
    rows = {}
    for name, count in operations.items():
        measured, expected = seconds[NONE.name] / seconds[name], none / count
        rows[name] = {"speedup": measured, "cost_model": expected, "fit": measured / expected}
    details["model"] = {"depth": bench.depth, "speedups": rows}
    return [row["fit"] for row in rows.values()]
