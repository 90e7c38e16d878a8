"""Attention of ragged requests whose keys lie in several places.

The keys of a shared prefix are not copied next to a request's own ones: each *segment* is attended to by itself, and
the results are weighted by the share of the softmax that falls to it (as FlashAttention combines its blocks,
arXiv 2205.14135). Requests that share a segment attend to it together.

Shape letters: N queries, M keys, Q query heads, K key and value heads, S head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class KeyValues(NamedTuple):
    """Keys, with RoPE, and values of some positions in one layer: (M, K, S) each."""

    keys: Tensor
    values: Tensor


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
    """By PyTorch's fused attention, segment by segment."""
    return combine(asked, _fused)


def attend_varlen(asked: Sequence[Asked]) -> list[Tensor]:
    """By FlashAttention for sequences of different lengths: all segments in one call. CUDA, 16-bit types."""
    return combine(asked, _varlen)


def combine(asked: Sequence[Asked], attention: Callable[[Pairs], list[Weighted]]) -> list[Tensor]:
    """Attention to every segment once, for all who share it, and of every request over its segments.

    Args:
        asked: by request.
        attention: computes all pairs.
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
    return [merge(found) if found else one.queries for one, found in zip(asked, parts, strict=True)]


def merge(found: Sequence[Weighted]) -> Tensor:
    """One attention over all segments, (N, Q, S)."""
    if len(found) == 1:
        return found[0].results
    shares = torch.stack([one.weights for one in found]).softmax(0).unsqueeze(-1)
    merged = found[0].results.float() * shares[0]
    for one, share in zip(found[1:], shares[1:], strict=True):
        merged.addcmul_(one.results.float(), share)
    return merged.to(found[0].results.dtype)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _fused(pairs: Pairs) -> list[Weighted]:
    return [_fused_one(queries, segment) for queries, segment in pairs]


def _fused_one(queries: Tensor, segment: KeyValues) -> Weighted:
    q, k, v = (one.transpose(0, 1)[None] for one in (queries, *segment))
    if queries.device.type == "cpu":
        result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    else:
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        result, weight, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
        weight = weight[..., : len(queries)]
    return Weighted(result[0].transpose(0, 1), weight[0].transpose(0, 1))


def _varlen(pairs: Pairs) -> list[Weighted]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    queries = torch.cat([one for one, _ in pairs])
    keys, values = (torch.cat([segment[place] for _, segment in pairs]) for place in (0, 1))
    counts, lengths = [len(one) for one, _ in pairs], [len(segment.keys) for _, segment in pairs]
    results, weights = varlen_attn(
        queries, keys, values, _starts(counts, queries), _starts(lengths, queries), max(counts), max(lengths),
        return_aux=AuxRequest(lse=True), enable_gqa=queries.shape[1] != keys.shape[1],
    )  # fmt: skip
    by_query = weights.transpose(0, 1)  # its kernels return (Q, N), unlike its documentation
    return [Weighted(*pair) for pair in zip(results.split(counts), by_query.split(counts), strict=True)]


def _starts(counts: Sequence[int], like: Tensor) -> Tensor:
    """Where each sequence begins, and where the last one ends."""
    return torch.tensor([0, *counts], device=like.device).cumsum(0, dtype=torch.int32)
