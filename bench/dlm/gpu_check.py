"""Right before fast: attention on the card against a softmax in float64, the runtime against a plain forward pass.

Attention: requests that share a segment and have ones of their own, an empty one among them; as many queries as there
are heads, and single queries, which FlashAttention treats apart where heads share keys. The runtime: at b = 0, with
every cache within the request, with T = 1 and with keys and values that earlier passes left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from forebay.bench.dlm.exact import PREFIXES, REST, plain_logits
from forebay.bench.dlm.shape import llada_shape, random_weights
from forebay.diffusion.attention import (
    Asked,
    Attention,
    KeyValues,
    Pairs,
    Weighted,
    attend,
    attend_varlen,
    combine,
    fused,
    varlen,
)
from forebay.diffusion.passes import BLOCK_CACHES, BlockCache, Passes, Span
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import LayerWeights, ModelWeights

ALONE, VARLEN = "segment by segment", "varlen"
ENGINES: Mapping[str, Callable[[Pairs], list[Weighted]]] = {ALONE: fused, VARLEN: varlen}
ATTENTION: Mapping[str, Attention] = {ALONE: attend, VARLEN: attend_varlen}

LIMITS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative error of the worst row: about what rounding of inputs to every product makes (our choice)."""
WEIGHT_LIMIT = 1e-3
"""Of the logarithm that weights segments: an error of e there is a relative error of e in their shares."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One check of attention."""

    engine: str
    dtype: torch.dtype
    heads: int = 32
    kv_heads: int = 32
    size: int = 128
    single: bool = False
    """Whether every request has one query."""

    def __str__(self) -> str:
        shape = f"{self.heads} on {self.kv_heads} heads of {self.size}"
        return f"attention {self.engine}, {shape}, {_of(self.dtype)}{', single queries' if self.single else ''}"


@dataclass(frozen=True, slots=True)
class ModelCase:
    """One check of the runtime."""

    engine: str
    dtype: torch.dtype
    kv_heads: int = 4

    def __str__(self) -> str:
        return f"runtime at b = 0, attention {self.engine}, 4 on {self.kv_heads} heads, {_of(self.dtype)}"


Case = AttentionCase | ModelCase


def cases(engines: Mapping[torch.dtype, tuple[str, ...]]) -> Iterator[Case]:
    """All checks, of the engines that there are for each type."""
    for dtype, names in engines.items():
        for name in names:
            yield AttentionCase(name, dtype)
            yield AttentionCase(name, dtype, kv_heads=8)
            yield AttentionCase(name, dtype, heads=4, kv_heads=1, size=48)
            yield AttentionCase(name, dtype, kv_heads=8, single=True)
            yield ModelCase(name, dtype)
            yield ModelCase(name, dtype, kv_heads=1)


def check(case: Case, device: torch.device) -> dict[str, Any]:
    """What was found: errors, their limits, and `ok`."""
    return _attention(case, device) if isinstance(case, AttentionCase) else _model(case, device)


def _attention(case: AttentionCase, device: torch.device) -> dict[str, Any]:
    asked, weight_errors = _asked(case, device), [0.0]

    def watched(pairs: Pairs) -> list[Weighted]:
        found = ENGINES[case.engine](pairs)
        for (queries, segment), one in zip(pairs, found, strict=True):
            exact = _scores(queries, segment.keys).logsumexp(-1).T
            weight_errors.append(_finite((one.weights.double() - exact).abs().max()))
        return found

    found = combine(asked, watched, together=case.engine == VARLEN)
    error = max(worst(mine, _softmax(*one)) for mine, one in zip(found, asked, strict=True))
    limit, weight = LIMITS[case.dtype], max(weight_errors)
    return {
        "case": str(case), "error": error, "limit": limit, "weight_error": weight, "weight_limit": WEIGHT_LIMIT,
        "ok": error <= limit and weight <= WEIGHT_LIMIT,
    }  # fmt: skip


def _asked(case: AttentionCase, device: torch.device) -> list[Asked]:
    """Three requests that share a segment, and two that do not."""
    random = torch.Generator().manual_seed(0)

    def some(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, case.size, generator=random).to(device, case.dtype)

    def segment(count: int) -> KeyValues:
        return KeyValues(some(count, case.kv_heads), some(count, case.kv_heads))

    shared = segment(300)
    own = [[shared, segment(0), segment(33)], [shared, segment(1)], [shared, segment(70)], [segment(17)], [segment(90)]]
    counts = [1] * len(own) if case.single else [case.heads, 3, 70, 1, 90]
    return [Asked(some(count, case.heads), segments) for count, segments in zip(counts, own, strict=True)]


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """(Q, N, M), in float64."""
    keys = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    return torch.einsum("nhs,mhs->hnm", queries.double(), keys) * queries.shape[2] ** -0.5


def _softmax(queries: Tensor, segments: Sequence[KeyValues]) -> Tensor:
    keys, values = (torch.cat([one[place] for one in segments]) for place in (0, 1))
    values = values.double().repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    return torch.einsum("hnm,mhs->nhs", _scores(queries, keys).softmax(-1), values)


def _model(case: ModelCase, device: torch.device) -> dict[str, Any]:
    config = llada_shape(layers=4, hidden=256, intermediate=512, heads=4, vocabulary=1000)
    weights = random_weights(replace(config, kv_heads=case.kv_heads), case.dtype)
    transformer = Transformer(moved(weights, device), attention=ATTENTION[case.engine])
    plain = moved(weights, torch.device("cpu"), torch.float32)
    tokens = torch.randint(5, 1000, (max(PREFIXES) + REST,), generator=torch.Generator().manual_seed(0))
    errors = [0.0]
    for prefix in PREFIXES:
        expected = plain_logits(plain, tokens[: prefix + REST])[prefix:].to(device)
        for cache in BLOCK_CACHES:
            for refresh in (1, 100):
                mine = tokens[: prefix + REST].to(device)
                errors.append(_passes(transformer, mine, prefix, cache, refresh, expected))
    limit = LIMITS[case.dtype]
    return {"case": str(case), "error": max(errors), "limit": limit, "ok": max(errors) <= limit}


def _passes(
    transformer: Transformer, tokens: Tensor, prefix: int, cache: BlockCache, refresh: int, expected: Tensor
) -> float:
    """The worst row of three passes over one block."""
    passes, block = Passes(transformer, PrefixStates(tokens[:prefix]), 0, refresh, cache, 0.97), Span(8, 24)
    wanted, errors = torch.arange(*block, device=tokens.device), []
    for begins in (True, False, False):
        (computed,) = transformer.run([passes.rows(tokens[prefix:], block, wanted, begins)])
        passes.take(computed, begins)
        errors.append(worst(transformer.logits(computed.hidden_ND), expected[wanted]))
    return max(errors)


def moved(weights: ModelWeights, device: torch.device, dtype: torch.dtype | None = None) -> ModelWeights:
    """A copy elsewhere, or of another type."""

    def move(one: Any) -> Any:
        return one.to(device, dtype or one.dtype) if isinstance(one, Tensor) else one

    names = [field.name for field in fields(LayerWeights)]
    layers = [LayerWeights(*(move(getattr(layer, name)) for name in names)) for layer in weights.layers]
    return ModelWeights(
        weights.config, move(weights.embedding_VD), layers, move(weights.norm_D), move(weights.output_VD)
    )


def worst(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row, infinite where a number is none."""
    off, norm = ((one.double().flatten(1)).norm(dim=1) for one in (found.double() - expected.double(), expected))
    return _finite((off / norm.clamp(min=1e-30)).max())


def _finite(value: Tensor) -> float:
    return float(value) if math.isfinite(float(value)) else math.inf


def _of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
