"""Tokens per second of every arm: `vs_none`, `vs_intra`, `vs_dual`, `model_fit`, on random weights of LLaDA's shape.

Each kind of pass is timed in every round, and they are added up to refresh cycles of T = 16 steps: one refresh and
fifteen others. `none` and the refreshes of `intra` and of Fast-dLLM's caches are one and the same pass. The long form
adds a longer prefix, and a whole generation of every arm behind the shortest one, to compare with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
    for prefix in _prefixes(context):
        bench = Bench.make(transformer, prefix)
        rounds, details = _cycles(bench, context)
        details["model"] = {"depth": bench.depth, "speedups": _compare(bench, rounds)}
        if not context.quick and prefix == min(LONG_PREFIXES):
            details["generations"] = _generations(bench, context)
        fits += [row["fit"] for row in details["model"]["speedups"].values()]
        found.details[f"p{prefix}"] = details
        found.ratios[f"vs_none_p{prefix}"] = _speedup(rounds, NONE, BICACHE)
        found.ratios[f"vs_intra_p{prefix}"] = _speedup(rounds, INTRA, BICACHE)
        found.ratios[f"vs_dual_p{prefix}"] = _speedup(rounds, DUAL, BICACHE_DUAL)
    found.ratios["model_fit"] = min(fits)
    return found


def _prefixes(context: Context) -> tuple[int, ...]:
    """Those that the wanted ratios are about; `model_fit` is about all."""
    known = QUICK_PREFIXES if context.quick else LONG_PREFIXES
    if not context.wanted or "model_fit" in context.wanted:
        return known
    return tuple(prefix for prefix in known if any(name.endswith(f"_p{prefix}") for name in context.wanted))


def _speedup(rounds: Sequence[Mapping[str, float]], slow: Arm, fast: Arm) -> float:
    """The median over the rounds: what is compared was measured side by side."""
    return median(one[slow.name] / one[fast.name] for one in rounds)


def _cycles(bench: Bench, context: Context) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Seconds of a refresh cycle of every arm in every round, from those of its passes.

    Two blocks of four steps each, refreshed once: its passes are a refresh, three of the block, one of all rows behind
    the prefix, and again three of the block.
    """
    short = replace(SETTINGS, steps=4 * SETTINGS.blocks, refresh=1000)
    kinds: dict[str, Callable[[], list[float]]] = {
        "full": lambda: _passes(bench.request(NONE, short), 1),
        "others": lambda: _passes(bench.request(BICACHE_DUAL, short), 8),
    }
    found = interleave(kinds, context.rounds, lambda kind: context.say(f"P = {bench.prefix}: {kind}"))
    rounds, passes = [], []
    for (full,), (refresh, *before, step, one, two, three) in zip(found["full"], found["others"], strict=True):
        block = median([*before, one, two, three])
        passes.append({"full": full, "refresh": refresh, "step": step, "block": block})
        rounds.append(_arms(full, refresh, step, block))
    series = {name: Series.of([one[name] for one in passes], "s") for name in passes[0]}
    return rounds, {"passes": medians(series), "cycle_seconds": rounds}


def _arms(full: float, refresh: float, step: float, block: float) -> dict[str, float]:
    """Cycles, in whatever passes are counted in."""
    others = SETTINGS.refresh - 1
    return {
        NONE.name: full * SETTINGS.refresh,
        INTRA.name: full + others * step,
        DUAL.name: full + others * block,
        BICACHE.name: refresh + others * step,
        BICACHE_DUAL.name: refresh + others * block,
    }


def _passes(request: DiffusionRequest, count: int) -> list[float]:
    """Seconds of the first passes of a request."""
    found = []
    for _ in range(count):
        before = time.perf_counter()
        advance(request.transformer, [request])
        found.append(time.perf_counter() - before)
    return found


def _generations(bench: Bench, context: Context) -> dict[str, dict[str, float]]:
    """A whole generation of every arm, once."""
    found: dict[str, dict[str, float]] = {}
    for arm in ARMS:
        context.say(f"P = {bench.prefix}, a whole generation: {arm.name}")
        request = bench.request(arm)
        before = time.perf_counter()
        while not request.done:
            advance(request.transformer, [request])
        seconds = time.perf_counter() - before
        found[arm.name] = {
            "seconds": seconds,
            "speedup": found.get(NONE.name, {"seconds": seconds})["seconds"] / seconds,
        }
    return found


def _compare(bench: Bench, rounds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Measured speed-up over `none`, and what counting operations says; of every arm."""
    cost, depth = bench.cost, bench.depth
    operations = _arms(cost.full(), cost.refresh(depth), cost.step(), cost.block_step())
    rows = {}
    for arm in (INTRA, DUAL, BICACHE, BICACHE_DUAL):
        measured, expected = _speedup(rounds, NONE, arm), operations[NONE.name] / operations[arm.name]
        rows[arm.name] = {"speedup": measured, "cost_model": expected, "fit": measured / expected}
    return rows
