"""One layer of a real model on a GPU, compressed and dense: times, and the least that the card needs for each.

Both run as CUDA graphs, as engines run them, unless one of them waits for the device: then both are launched one by
one. Shape letters as in the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from forebay.bench.moe.gpu_card import Need, Roof
from forebay.bench.moe.gpu_check import LIMITS, Forward, exact, worst
from forebay.bench.moe.gpu_clock import Budget, Clock, capture, load, moved, waits
from forebay.bench.moe.gpu_dense import Arm, Dense, pick, rebuild
from forebay.bench.moe.layer import RHO, Routed, Sizes, random_weights, route, uneven
from forebay.bench.rounds import Series, interleave
from forebay.kernels.parser_moe.weights import ParserWeights

MODELS = {
    "Qwen1.5-MoE": Sizes(60, 4, 1408, 2048),
    "Qwen3-30B-A3B": Sizes(128, 8, 768, 2048),
    "DeepSeek-V2-Lite": Sizes(64, 6, 1408, 2048),
}
TOKENS = (1, 8, 64, 512, 4096)
CHECKED = 64
"""Tokens of a batch whose result is compared with the reference."""
OURS, DENSE = "forebay", "dense"


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer on the card, both ways."""

    name: str
    sizes: Sizes
    kept_E: Tensor
    """Units that each expert keeps, in host memory."""
    weights: ParserWeights
    dense: Dense
    arm_name: str
    arm: Arm
    passed_over: dict[str, str]
    """Better ways to run the dense layer, and why they do not run here."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What all measurements share."""

    device: torch.device
    dtype: torch.dtype
    forward: Forward
    clock: Clock
    budget: Budget
    rounds: int


def build(bench: Bench, name: str, sizes: Sizes, arms: Mapping[str, Arm]) -> Layer:
    """A random layer with a tenth of its units kept, and the best way here to run it dense."""
    random = torch.Generator().manual_seed(11)
    kept_E = uneven(sizes, RHO, random)
    weights = moved(random_weights(sizes, kept_E, bench.dtype, random), bench.device)
    dense = rebuild(weights)
    batch = moved(route(CHECKED, sizes, bench.dtype, random), bench.device)
    return Layer(
        name, sizes, kept_E, weights, dense, *pick(arms, dense, batch, exact(batch, weights, "silu", torch.float32))
    )


def measure(bench: Bench, layer: Layer, tokens: int, roof: Roof) -> dict[str, Any]:
    """One row of the table.

    Raises:
        OutOfTime: the time for the whole run is over.
    """
    random = torch.Generator().manual_seed(tokens)
    routed = [route(tokens, layer.sizes, bench.dtype, random) for _ in range(8 if tokens <= CHECKED else 2)]
    batches = [moved(batch, bench.device) for batch in routed]
    batch = moved(batches[0], bench.device)  # what the graphs read
    calls = {
        DENSE: partial(layer.arm, layer.dense, batch),
        OURS: partial(_ours, bench.forward, layer.weights, batch),
    }
    errors = _errors(calls, batch, layer.weights)
    launches, kind = launched(calls, bench.device)
    arms = {name: partial(bench.clock.seconds, launch, _loads(batch, batches)) for name, launch in launches.items()}
    interleave(arms, 1)  # not counted
    series = {
        name: Series.of(values, "s")
        for name, values in interleave(arms, bench.rounds, lambda arm: bench.budget.check()).items()
    }
    every_E = torch.full_like(layer.kept_E, layer.sizes.hidden)
    needs = {
        DENSE: need(layer.sizes, every_E, 0, routed),
        OURS: need(layer.sizes, layer.kept_E, layer.sizes.hidden, routed),
    }
    limit = LIMITS[bench.dtype]
    return {
        "layer": layer.name,
        "tokens": tokens,
        "dense": layer.arm_name,
        "launched": kind,
        "ratio": series[DENSE].median / series[OURS].median,
        "arms": {name: _arm(series[name], needs[name], roof, errors[name]) for name in series},
        "limit": limit,
        "ok": all(error <= limit for error in errors.values()),
    }


def _ours(forward: Forward, weights: ParserWeights, batch: Routed) -> Tensor:
    return forward(batch.x_TD, batch.weights_TK, batch.ids_TK, weights, "silu")


def _loads(target: Routed, batches: Sequence[Routed]) -> list[Callable[[], None]]:
    return [partial(load, target, batch) for batch in batches]


def _errors(calls: Mapping[str, Callable[[], Tensor]], batch: Routed, weights: ParserWeights) -> dict[str, float]:
    """Relative errors against the reference, on the first tokens."""
    first = Routed(batch.x_TD[:CHECKED], batch.weights_TK[:CHECKED], batch.ids_TK[:CHECKED])
    expected_TD = exact(first, weights, "silu", torch.float32)
    return {name: worst(call()[:CHECKED], expected_TD) for name, call in calls.items()}


def launched(
    calls: Mapping[str, Callable[[], Tensor]], device: torch.device
) -> tuple[Mapping[str, Callable[[], object]], str]:
    """What to time for each of several calls that have run before, and how it is launched."""
    if device.type != "cuda":
        return calls, "calls"
    if waiting := [name for name, call in calls.items() if waits(call)]:
        return calls, f"calls, {' and '.join(waiting)} waits for the GPU"
    try:
        graphs = {name: capture(call) for name, call in calls.items()}
    except RuntimeError as error:  # the checks have seen ours captured
        return calls, f"calls, no graph: {' '.join(str(error).split())[:200]}"
    return {name: _replay(*graph) for name, graph in graphs.items()}, "graphs"


def _replay(replay: Callable[[], object], output: Tensor) -> Callable[[], object]:
    """A replay that keeps the graph's output alive."""

    def run() -> Tensor:
        replay()
        return output

    return run


def need(sizes: Sizes, units_E: Tensor, backbone: int, batches: Sequence[Routed]) -> Need:
    """What a mean batch needs at least, of experts with `units_E` units and a backbone with `backbone` units.

    Weights of every expert hit are read once, tokens are read and written once; nothing between is counted.
    """
    unit = 3 * sizes.model
    moves, operations = 0, 0
    for batch in batches:
        ids = batch.ids_TK.long()
        elements = unit * (backbone + int(units_E[ids.unique()].sum())) + 2 * batch.x_TD.numel()
        moves += elements * batch.x_TD.itemsize
        operations += 2 * unit * (backbone * batch.x_TD.shape[0] + int(units_E[ids].sum()))
    return Need(moves / len(batches), operations / len(batches))


def _arm(seconds: Series, need: Need, roof: Roof, error: float) -> dict[str, Any]:
    return {
        "seconds": seconds.to_json(),
        "floor_seconds": roof.floor(need),
        "bytes": need.bytes,
        "operations": need.operations,
        "bytes_per_second": need.bytes / seconds.median,
        "operations_per_second": need.operations / seconds.median,
        "error": error,
    }
