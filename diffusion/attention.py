"""Attention of ragged requests whose keys lie in several places.

The keys of a shared prefix are not copied next to a request's own ones: each *segment* is attended to by itself, and
the results are weighted by the share of the softmax that falls to it (as FlashAttention combines its blocks,
arXiv 2205.14135).

Shape letters: N queries, M keys, Q query heads, K key and value heads, S head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class KeyValues(NamedTuple):
    """Keys, with RoPE, and values of some positions in one layer: (M, K, S) each."""

    keys: Tensor
    values: Tensor


class Asked(NamedTuple):
    """What one request attends to in one layer."""

    queries: Tensor
    """(N, Q, S)."""
    segments: Sequence[KeyValues]


Attention = Callable[[Sequence[Asked]], list[Tensor]]
"""The results of all requests, (N, Q, S) each."""


def attend(asked: Sequence[Asked]) -> list[Tensor]:
    """By PyTorch's fused attention, request by request."""
    return [_attend_one(queries, [one for one in segments if len(one.keys)]) for queries, segments in asked]


def _attend_one(queries: Tensor, segments: Sequence[KeyValues]) -> Tensor:
    if not len(queries):
        return queries
    if len(segments) == 1:
        return _fused(queries, segments[0])
    if queries.device.type != "cpu":
        return _fused(queries, KeyValues(*(torch.cat(parts) for parts in zip(*segments, strict=True))))
    found = [_fused_with_weight(queries, one) for one in segments]
    return merge([result for result, _ in found], [weight for _, weight in found])


def merge(results: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """One attention over all segments.

    Args:
        results: (N, Q, S), of each segment.
        weights: (N, Q), the logarithm of each softmax's denominator.
    """
    shares = torch.stack(list(weights)).softmax(0).unsqueeze(-1)
    merged = results[0].float().mul_(shares[0])  # a result of attention belongs to nobody else
    for result, share in zip(results[1:], shares[1:], strict=True):
        merged.addcmul_(result.float(), share)
    return merged.to(results[0].dtype)


def _fused(queries: Tensor, segment: KeyValues) -> Tensor:
    q, k, v = (one.transpose(0, 1)[None] for one in (queries, *segment))
    grouped = queries.shape[1] != segment.keys.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)[0].transpose(0, 1)


def _fused_with_weight(queries: Tensor, segment: KeyValues) -> tuple[Tensor, Tensor]:
    q, k, v = (one.transpose(0, 1)[None] for one in (queries, *segment))
    result, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return result[0].transpose(0, 1), weight[0].transpose(0, 1)
