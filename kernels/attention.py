"""Attention without a mask on the CPU: our C kernel, for queries whose keys lie in several places.

Torch's kernel computes a few queries at less than half of the processor's speed, and one place of keys at a time, whose
results then have to be merged. Ours holds a panel of queries (heads that share keys count as more queries) in vectors
and goes over all keys once. Products and sums are float32.

Shape letters: N queries, M keys, Q query heads, K key and value heads, S head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forebay.kernels import _cpu
from forebay.kernels.cpu import ELEMENTS, VARIANTS

Segment = tuple[Tensor, Tensor]
"""Keys and values of some positions, (M, K, S) each; K divides Q."""


def readable(queries: Tensor, segments: Sequence[Segment]) -> bool:
    """Whether the kernel reads these: on the CPU, of one type it knows, and heads contiguous."""
    dtype = queries.dtype
    if dtype not in ELEMENTS or not queries.is_cpu or queries.stride(-1) != 1:
        return False
    return all(one.dtype is dtype and one.is_cpu and one.stride(-1) == 1 for pair in segments for one in pair)


def attention(asked: Sequence[tuple[Tensor, Sequence[Segment]]], *, variant: str = VARIANTS[0]) -> list[Tensor]:
    """softmax(q k^T / sqrt(S)) v of every asker over all keys of its segments, (N, Q, S) each.

    Results depend neither on the number of threads nor on the other queries.

    Args:
        asked: `readable` queries of one type, (N, Q, S), and at least one key to attend to.
        variant: the kernel of that instruction set, one of `cpu.VARIANTS`.
    """
    first, (keys, _), *_ = asked[0][0], *asked[0][1]
    heads, size = first.shape[1:]
    counts = [len(queries) for queries, _ in asked]
    results = torch.empty(sum(counts), heads, size, dtype=first.dtype).split(counts)
    numbers: list[int] = []
    for result, (queries, segments) in zip(results, asked, strict=True):
        numbers += result.data_ptr(), queries.data_ptr(), *queries.shape[:1], *queries.stride()[:2], len(segments)
        for keys, values in segments:
            numbers += keys.data_ptr(), values.data_ptr(), len(keys), *keys.stride()[:2], *values.stride()[:2]
    kv_heads = keys.shape[1]
    shape = kv_heads, heads // kv_heads, size
    _cpu.attention(variant, ELEMENTS[first.dtype], torch.get_num_threads(), shape, numbers)
    return list(results)
