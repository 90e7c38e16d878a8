"""Requests that share a prefix, eight at once against one at a time: `batch8_vs_batch1`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from forebay.bench.dlm.arms import BICACHE, BICACHE_DUAL, Arm
from forebay.bench.dlm.shape import llada_shape, random_weights
from forebay.bench.dlm.speed import TABLE, USER
from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians
from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.depth import DepthTable
from forebay.diffusion.runtime import Runtime, RuntimeSettings
from forebay.diffusion.transformer import Transformer

REQUESTS, PREFIX = 8, 500


def measure(context: Context) -> Measurement:
    """Throughput of BiCache, and among the details that with Fast-dLLM's dual cache."""
    layers, steps = (2, 8) if context.quick else (16, 32)
    transformer = Transformer(random_weights(llada_shape(layers=layers)))
    table = DepthTable(
        {share: -(-depth * layers // 32) for share, depth in TABLE.leading.items()}, layers, TABLE.source
    )
    settings = DecodingSettings(length=2 * steps, steps=steps, block=32, refresh=16)
    arms: dict[str, Any] = {
        f"{arm.name}, batch {batch}": lambda arm=arm, batch=batch: _run(
            transformer, table, arm.settings(settings), batch
        )
        for arm in (BICACHE, BICACHE_DUAL)
        for batch in (1, REQUESTS)
    }
    found = interleave(arms, context.rounds, context.say)
    series = {name: Series.of(values, "tokens/s") for name, values in found.items()}

    def ratio(arm: Arm) -> float:
        return series[f"{arm.name}, batch {REQUESTS}"].median / series[f"{arm.name}, batch 1"].median

    return Measurement(
        {"batch8_vs_batch1": ratio(BICACHE)}, {"with_dual_cache": ratio(BICACHE_DUAL), "arms": medians(series)}
    )


def _run(transformer: Transformer, table: DepthTable, settings: DecodingSettings, batch: int) -> float:
    """Tokens per second of all requests; the states of their prefix are there."""
    runtime = Runtime(transformer, table, RuntimeSettings(batch=batch, audit=0))
    random = torch.Generator().manual_seed(3)
    shared = torch.randint(5, transformer.config.vocabulary, (PREFIX,), generator=random)

    def submit(name: str, chosen: DecodingSettings) -> None:
        rest = torch.randint(5, transformer.config.vocabulary, (USER,), generator=random)
        runtime.submit(name, torch.cat([shared, rest]), chosen, PREFIX)

    submit("first", replace(settings, steps=1))
    _drive(runtime)
    for number in range(REQUESTS):
        submit(str(number), settings)
    before = time.perf_counter()
    _drive(runtime)
    return REQUESTS * settings.length / (time.perf_counter() - before)


def _drive(runtime: Runtime) -> None:
    while not runtime.idle:
        runtime.step()
