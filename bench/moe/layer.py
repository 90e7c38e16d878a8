"""One compressed layer against vLLM's own fused MoE on the same layer dense: `decode1_vs_dense` and its siblings.

A layer of Qwen1.5-MoE's size with a tenth of its units kept, unevenly over the experts; the dense layer is its
reconstruction, in the layout that vLLM packs weights into, and both must agree. Routing is outside both. The ratios
are in bfloat16, which vLLM serves such a checkpoint in; the full form times float32 as well.

The ratios are of one layer that runs again and again, and of a compressed one much stays in a large cache meanwhile. A
model runs one layer after the other and finds little there: what `COPIES` layers in turn take is in the details. Both
lie on huge pages, where our vLLM method moves them too. For few tokens the same layers with their backbones in int8 are
timed beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians
from forebay.compression.experts import Expert
from forebay.compression.int8 import quantize
from forebay.kernels.cpu import VARIANTS
from forebay.kernels.parser_moe import cpu
from forebay.kernels.parser_moe.reference import expert
from forebay.kernels.parser_moe.weights import ParserWeights
from forebay.storage.errors import ForebayError
from forebay.storage.huge_pages import collapse


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one layer: E experts of which K take a token, H hidden units, D model dimension."""

    experts: int
    top_k: int
    hidden: int
    model: int


EXPERTS, TOP_K, HIDDEN, MODEL, RHO = 60, 4, 1408, 2048, 0.9
SIZES = Sizes(EXPERTS, TOP_K, HIDDEN, MODEL)
LEAST_KEPT = 4
COPIES = 6
RATIOS = {"decode1_vs_dense": 1, "decode8_vs_dense": 8, "prefill512_vs_dense": 512}
CALLS = {1: 96, 8: 12, 512: 1}
"""Layers run per round, by tokens."""
INT8_TOKENS = 8
"""Up to so many, a backbone in int8 is timed as well: it is less to read, not less to compute."""
ROUTINGS = 64
SERVED = torch.bfloat16
TOLERANCE = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Layers:
    """The same layer both ways."""

    compressed: list[ParserWeights]
    """One, and copies of it."""
    int8: list[ParserWeights]
    """The same with backbones in int8."""
    w13_EID: Tensor
    """Gate and up of all experts (I = 2 H), packed by vLLM."""
    w2_EDH: Tensor
    instruction_set: str
    """The name of vLLM's kernels."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens and where they go."""

    x_TD: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


def measure(context: Context) -> Measurement:
    """Ratios of median times per layer.

    Raises:
        ForebayError: vLLM's CPU kernels are missing, or the results differ.
    """
    measurement = Measurement()
    for dtype in (SERVED,) if context.quick else (SERVED, torch.float32):
        context.say(f"building the layer, {dtype}")
        layers = build(dtype)
        for name, tokens in RATIOS.items():
            context.say(f"{tokens} tokens, {dtype}")
            ratio, details = _compare(layers, dtype, tokens, context.rounds + 4)
            measurement.details.setdefault(str(dtype), {})[name] = details
            if dtype is SERVED:
                measurement.ratios[name] = ratio
    measurement.details |= {"threads": torch.get_num_threads(), "kernels": VARIANTS[0]}
    return measurement


def build(dtype: torch.dtype) -> Layers:
    """A random layer, compressed and dense."""
    compressed = _compressed(dtype)
    instruction_set, pack = _vllm(dtype)
    w13_EID = torch.empty(EXPERTS, 2 * HIDDEN, MODEL, dtype=dtype)
    w2_EDH = torch.empty(EXPERTS, MODEL, HIDDEN, dtype=dtype)
    for e in range(EXPERTS):
        gate_HD, up_HD, down_DH = expert(compressed, e, dtype)
        pack(torch.cat([gate_HD, up_HD])[None], w13_EID[e : e + 1], instruction_set)
        pack(down_DH[None], w2_EDH[e : e + 1], instruction_set)
    copies = [_copy(compressed) for _ in range(COPIES)]
    return Layers(copies, [in_int8(weights) for weights in copies], w13_EID, w2_EDH, instruction_set)


def _compressed(dtype: torch.dtype) -> ParserWeights:
    random = torch.Generator().manual_seed(11)
    return random_weights(SIZES, uneven(SIZES, RHO, random), dtype, random)


def random_weights(sizes: Sizes, kept_E: Tensor, dtype: torch.dtype, random: torch.Generator) -> ParserWeights:
    """A compressed layer of which expert e keeps `kept_E[e]` units, in host memory."""
    kept = int(kept_E.sum())

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=random) * 0.02).to(dtype)

    units = [torch.randperm(sizes.hidden, generator=random)[:count].sort().values for count in kept_E.tolist()]
    return ParserWeights(
        gate_HD=matrix(sizes.hidden, sizes.model),
        up_HD=matrix(sizes.hidden, sizes.model),
        down_DH=matrix(sizes.model, sizes.hidden),
        residual_gate_RD=matrix(kept, sizes.model),
        residual_up_RD=matrix(kept, sizes.model),
        residual_down_RD=matrix(kept, sizes.model),
        indices_R=torch.cat(units).int(),
        offsets_E1=torch.cat([torch.zeros(1), kept_E.cumsum(0)]).int(),
    )


def uneven(sizes: Sizes, rho: float, random: torch.Generator) -> Tensor:
    """Kept units of each expert: together (1 - rho) of all, log-normally uneven, none below the floor."""
    share_E = torch.randn(sizes.experts, generator=random).mul(0.5).exp()
    spare = round((1 - rho) * sizes.experts * sizes.hidden) - LEAST_KEPT * sizes.experts
    ends_E = (share_E.cumsum(0) / share_E.sum() * spare).round().int()
    return ends_E.diff(prepend=torch.zeros(1, dtype=torch.int32)) + LEAST_KEPT


def _copy(weights: ParserWeights) -> ParserWeights:
    parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
    copies = {name: part.clone() for name, part in parts.items() if part is not None}
    for tensor in copies.values():
        collapse(tensor.data_ptr(), tensor.nbytes)
    return ParserWeights(**copies)


def in_int8(weights: ParserWeights) -> ParserWeights:
    """The same layer with its backbone in int8; residuals are shared."""
    stored = quantize(Expert(weights.gate_HD, weights.up_HD, weights.down_DH))
    gate_scale_H, up_scale_H, down_scale_D = stored.scales
    for tensor in (stored.weights.gate_HD, stored.weights.up_HD, stored.weights.down_DH):
        collapse(tensor.data_ptr(), tensor.nbytes)
    return replace(
        weights,
        gate_HD=stored.weights.gate_HD,
        up_HD=stored.weights.up_HD,
        down_DH=stored.weights.down_DH,
        gate_scale_H=gate_scale_H,
        up_scale_H=up_scale_H,
        down_scale_D=down_scale_D,
    )


def _vllm(dtype: torch.dtype) -> tuple[str, Callable[[Tensor, Tensor, str], None]]:
    """The best of vLLM's kernels here, and what packs weights for them."""
    try:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        pack = torch.ops._C.prepack_moe_weight
    except (ImportError, AttributeError):
        raise ForebayError("vLLM's CPU kernels are missing; install vLLM's CPU wheel") from None
    tiles = dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return "amx" if tiles else "vec", pack


def _compare(layers: Layers, dtype: torch.dtype, tokens: int, rounds: int) -> tuple[float, dict[str, Any]]:
    random = torch.Generator().manual_seed(tokens)
    batches = [route(tokens, SIZES, dtype, random) for _ in range(ROUTINGS)]
    dense, ours = partial(_dense, layers), [partial(_ours, weights) for weights in layers.compressed]
    runs = {"vLLM, dense": [dense], "forebay": ours[:1], "forebay, layers in turn": ours}
    _check(dense, ours[0], batches[0], dtype)
    if tokens <= INT8_TOKENS and dtype is SERVED:
        int8 = [partial(_ours, weights) for weights in layers.int8]
        runs["int8 backbones, layers in turn"] = int8
        _check(dense, int8[0], batches[0], dtype)
    arms = {name: _timed(cycle(found), cycle(batches), CALLS[tokens]) for name, found in runs.items()}
    series = {name: Series.of(values, "s") for name, values in interleave(arms, rounds).items()}
    details = {
        "seconds": medians(series),
        "ratio_of_layers_in_turn": series["vLLM, dense"].median / series["forebay, layers in turn"].median,
        "tokens_per_second": {name: tokens / values.median for name, values in series.items()},
        "floor": {"vLLM, dense": _floor(tokens, dtype, 0.0, 1.0), "forebay": _floor(tokens, dtype, 1.0, 1 - RHO)},
    }
    return series["vLLM, dense"].median / series["forebay"].median, details


def route(tokens: int, sizes: Sizes, dtype: torch.dtype, random: torch.Generator) -> Routed:
    """Random tokens, and where a random router sends them."""
    x_TD = torch.randn(tokens, sizes.model, generator=random).to(dtype)
    weights_TK, ids_TK = torch.randn(tokens, sizes.experts, generator=random).softmax(1).topk(sizes.top_k)
    return Routed(x_TD, weights_TK, ids_TK.int())


def _dense(layers: Layers, batch: Routed) -> Tensor:
    from vllm._custom_ops import cpu_fused_moe

    y_TD, weights, ids = torch.empty_like(batch.x_TD), batch.weights_TK, batch.ids_TK
    isa = layers.instruction_set
    cpu_fused_moe(y_TD, batch.x_TD, layers.w13_EID, layers.w2_EDH, None, None, weights, ids, "silu", isa)
    return y_TD


def _ours(weights: ParserWeights, batch: Routed) -> Tensor:
    return cpu.forward(batch.x_TD, batch.weights_TK, batch.ids_TK, weights, "silu")


def _timed(runs: Any, batches: Any, calls: int) -> Callable[[], float]:
    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(calls):
            next(runs)(next(batches))
        return (time.perf_counter() - started) / calls

    return seconds


def _check(
    dense: Callable[[Routed], Tensor], ours: Callable[[Routed], Tensor], batch: Routed, dtype: torch.dtype
) -> None:
    expected_TD, found_TD = dense(batch).float(), ours(batch).float()
    error = float((found_TD - expected_TD).norm() / expected_TD.norm())
    if not error <= TOLERANCE[dtype]:
        raise ForebayError(f"the layers differ by {error:g}: the times mean nothing")


def _floor(tokens: int, dtype: torch.dtype, backbones: float, share: float) -> dict[str, float]:
    """Bytes of weights and floating-point operations that no way round: `share` of each expert, and the backbone."""
    expert_size = 3 * HIDDEN * MODEL
    hit = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    return {
        "bytes": (backbones + share * hit) * expert_size * dtype.itemsize,
        "operations": 2 * tokens * (backbones + share * TOP_K) * expert_size,
    }
