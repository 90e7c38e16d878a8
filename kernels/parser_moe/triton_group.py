"""Pairs sorted by expert, on the device and in one launch: what the variant for many tokens starts with.

Shape letters as in `triton_math`. Pairs of experts that are not this rank's form group E. No atomics: the order is
stable, so results do not change from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def group_of(ids_ptr: tl.tensor, pairs: tl.tensor, P: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """Group of each pair; E + 1 past the end."""
    ids = tl.load(ids_ptr + pairs, mask=pairs < P, other=0)
    group = tl.where((ids >= 0) & (ids < E), ids, E)
    return tl.where(pairs < P, group, E + 1).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def group_pairs(
    ids_ptr: tl.tensor, order_ptr: tl.tensor, starts_ptr: tl.tensor, P: tl.tensor, E: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Program e of E + 1 writes the pairs of group e to order[starts[e]:starts[e + 1]].

    Every program reads all ids, twice. That is E P reads of the cache, and cheaper than the launches of a sort.
    """
    e = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    smaller = tl.zeros([CHUNK], tl.int32)
    for first in range(0, P, CHUNK):
        smaller += (group_of(ids_ptr, first + lanes, P, E) < e).to(tl.int32)
    start = tl.sum(smaller)
    tl.store(starts_ptr + e, start)
    for first in range(0, P, CHUNK):
        mine = (group_of(ids_ptr, first + lanes, P, E) == e).to(tl.int32)
        tl.store(order_ptr + start + tl.cumsum(mine) - 1, first + lanes, mask=mine != 0)
        start += tl.sum(mine)
    if e == E:
        tl.store(starts_ptr + E + 1, P)


@triton.jit  # type: ignore[untyped-decorator]
def locate(
    starts_ptr: tl.tensor, block: tl.tensor, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
) -> tl.tensor:
    """Group of a block of BLOCK_T pairs, and where in the order it begins and its group ends.

    Blocks are numbered group by group. Past the last one the group is above E.
    """
    groups = tl.arange(0, BLOCK_E)
    begins = tl.load(starts_ptr + groups, mask=groups <= E, other=0)
    ends = tl.load(starts_ptr + groups + 1, mask=groups <= E, other=0)
    blocks = (ends - begins + BLOCK_T - 1) // BLOCK_T
    e = tl.sum((tl.cumsum(blocks) <= block).to(tl.int32))
    before = tl.sum(tl.where(groups < e, blocks, 0))
    begin = tl.load(starts_ptr + e, mask=e <= E, other=0) + (block - before) * BLOCK_T
    return e, begin, tl.load(starts_ptr + e + 1, mask=e <= E, other=0)
