"""Attention of ragged requests whose keys lie in several places.

The keys of a shared prefix are not copied next to a request's own ones: each *segment* is attended to by itself, and
the results are weighted by the share of the softmax that falls to it (as FlashAttention combines its blocks,
arXiv 2205.14135). Requests that share a segment attend to it together.

Shape letters: N queries, M keys, Q query heads, K key and value heads, S head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.diffusion.errors import DiffusionError
from forebay.kernels.attention import attention, readable
from forebay.kernels.cpu import VARIANTS


class KeyValues(NamedTuple):
    """Keys, with RoPE, and values of some positions in one layer: (M, K, S) each."""

    keys: Tensor
    values: Tensor

    def copy(self) -> KeyValues:
        """To be attended to in later passes: on a CPU heads lie one after the other, as each is read by itself."""
        if not self.keys.is_cpu:
            return KeyValues(self.keys.clone(), self.values.clone())
        first = (one.transpose(0, 1).clone(memory_format=torch.contiguous_format) for one in self)
        return KeyValues(*(one.transpose(0, 1) for one in first))


class Asked(NamedTuple):
    """What one request attends to in one layer."""

    queries: Tensor
    """(N, Q, S)."""
    segments: Sequence[KeyValues]


class Weighted(NamedTuple):
    """Attention to one segment."""

    results: Tensor
    """(N, Q, S)."""
    weights: Tensor
    """(N, Q), the logarithm of the softmax's denominator."""


Attention = Callable[[Sequence[Asked]], list[Tensor]]
"""The results of all requests, (N, Q, S) each."""
Pairs = Sequence[tuple[Tensor, KeyValues]]
"""Queries and what they attend to; no pair is empty."""


def attend(asked: Sequence[Asked]) -> list[Tensor]:
    """By our kernel for CPUs where it reads what is asked, and by PyTorch's fused attention elsewhere."""
    if VARIANTS[0] != "portable" and all(readable(*one) for one in asked):
        return attention(asked)
    return combine(asked, fused)


def attend_varlen(asked: Sequence[Asked]) -> list[Tensor]:
    """By FlashAttention, small segments of different lengths in one call. CUDA, 16-bit types."""
    return combine(asked, varlen, together=True)


def combine(
    asked: Sequence[Asked], attention: Callable[[Pairs], list[Weighted]], *, together: bool = False
) -> list[Tensor]:
    """Attention to every segment once, for all who share it, and of every request over its segments.

    Args:
        asked: by request.
        attention: computes all pairs.
        together: whether results are copied next to each other to be weighted in few large operations, as suits a GPU,
            or request by request, as suits a CPU.
    """
    users: dict[int, list[int]] = {}
    segments: dict[int, KeyValues] = {}
    for number, (queries, wanted) in enumerate(asked):
        for segment in wanted if len(queries) else ():
            if len(segment.keys):
                segments[id(segment.keys)] = segment
                users.setdefault(id(segment.keys), []).append(number)
    pairs = [(_join([asked[one].queries for one in users[key]]), segments[key]) for key in users]
    parts: list[list[Weighted]] = [[] for _ in asked]
    for numbers, found in zip(users.values(), attention(pairs), strict=True):
        counts = [len(asked[one].queries) for one in numbers]
        for one, result, weight in zip(numbers, found.results.split(counts), found.weights.split(counts), strict=True):
            parts[one].append(Weighted(result, weight))
    if together:
        return _merge_together(asked, parts)
    return [merge(found) if found else one.queries for one, found in zip(asked, parts, strict=True)]


def _merge_together(asked: Sequence[Asked], parts: Sequence[Sequence[Weighted]]) -> list[Tensor]:
    """Of every request, in one go of those that have as many segments."""
    results = [found[0].results if found else one.queries for one, found in zip(asked, parts, strict=True)]
    for count in {len(found) for found in parts} - {0, 1}:
        numbers = [number for number, found in enumerate(parts) if len(found) == count]
        columns = zip(*(parts[number] for number in numbers), strict=True)
        merged = merge([Weighted(*map(_join, zip(*column, strict=True))) for column in columns])
        pieces = merged.split([len(results[number]) for number in numbers])
        for number, piece in zip(numbers, pieces, strict=True):
            results[number] = piece
    return results


def merge(found: Sequence[Weighted]) -> Tensor:
    """One attention over all segments, (N, Q, S)."""
    if len(found) == 1:
        return found[0].results
    merged, weights = found[0]
    for place, one in enumerate(found[1:], 2):
        share = (one.weights - weights).sigmoid().unsqueeze(-1)
        merged = torch.lerp(merged.float(), one.results.float(), share)
        weights = torch.logaddexp(weights, one.weights) if place < len(found) else weights
    return merged.to(found[0].results.dtype)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def fused(pairs: Pairs) -> list[Weighted]:
    """Each pair by itself."""
    return [_fused_one(queries, segment) for queries, segment in pairs]


def _fused_one(queries: Tensor, segment: KeyValues) -> Weighted:
    q, k, v = (one.transpose(0, 1)[None] for one in (queries, *segment))
    if queries.device.type == "cpu":
        result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    elif has_flash(queries.device, queries.dtype):
        result, weight, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    else:
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        result, weight, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        weight = weight[..., : len(queries)]  # it is made longer, up to a multiple of 32
    return Weighted(result[0].transpose(0, 1), weight[0].transpose(0, 1))


def varlen(pairs: Pairs) -> list[Weighted]:
    """Small segments packed into one call; one with half of all keys or more is not copied to lie next to others."""
    half = sum(len(segment.keys) for _, segment in pairs) / 2
    small = [len(segment.keys) < half for _, segment in pairs]
    packed = iter(_packed([pair for pair, is_small in zip(pairs, small, strict=True) if is_small]))
    return [next(packed) if is_small else _fused_one(*pair) for pair, is_small in zip(pairs, small, strict=True)]


def _packed(pairs: Pairs) -> list[Weighted]:
    if len(pairs) < 2:
        return fused(pairs)
    counts, lengths = [len(one) for one, _ in pairs], [len(segment.keys) for _, segment in pairs]
    queries = torch.cat([one for one, _ in pairs])
    keys, values = (torch.cat([segment[place] for _, segment in pairs]) for place in (0, 1))
    results, weights = _call_varlen(queries, keys, values, counts, lengths)
    if heads_first(queries.device, queries.dtype):
        weights = weights.transpose(0, 1)
    return [Weighted(*pair) for pair in zip(results.split(counts), weights.split(counts), strict=True)]


def _call_varlen(
    queries: Tensor, keys: Tensor, values: Tensor, counts: Sequence[int], lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    found: tuple[Tensor, Tensor] = varlen_attn(
        queries, keys, values, _starts(tuple(counts), queries.device), _starts(tuple(lengths), queries.device),
        max(counts), max(lengths), return_aux=AuxRequest(lse=True), enable_gqa=queries.shape[1] != keys.shape[1],
    )  # fmt: skip
    return found


@lru_cache
def heads_first(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `varlen_attn` returns weights as (Q, N), as its kernels do, or as (N, Q), as its documentation says.

    Asked of a call with two queries of one head, because the shape does not tell where N = Q.

    Raises:
        DiffusionError: neither.
    """
    one = torch.zeros(2, 1, 64, device=device, dtype=dtype)
    shape = tuple(_call_varlen(one, one, one, [2], [2])[1].shape)
    if shape not in ((1, 2), (2, 1)):
        raise DiffusionError(
            f"varlen_attn of torch {torch.__version__} gives weights of shape {shape} for 2 queries of 1 head; "
            "(1, 2) or (2, 1) is needed: use a version from 2.10 on, or `attend`"
        )
    return shape == (1, 2)


@lru_cache
def has_flash(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether FlashAttention runs there: 16-bit types, compute capability 8.0."""
    sixteen = dtype in (torch.float16, torch.bfloat16)
    return sixteen and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=256)
def _starts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each sequence begins, and where the last one ends.

    Kept, because copying it to a GPU makes the host wait, and all layers of a pass ask for the same.
    """
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
