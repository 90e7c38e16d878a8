"""Is a hit worth loading, and how much of it?

A request with a hit of n chunks may load the first k of them and compute the rest. All devices start at once, so the
load takes as long as the slowest of them; computing begins when it has ended. The time to first token is

    T(k) = OVERHEAD + max over devices of (queued + bytes of the first k chunks) / bandwidth  +  compute(k)

with T(0) = compute(0), and the best k is loaded: the tail of the hit is trimmed for as long as that helps, and nothing
is loaded where computing everything is faster. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

OVERHEAD = 0.005
"""Seconds that a load costs apart from its bytes (our choice: a device's latency and one more step of the engine)."""


def cumulate(chunks: Iterable[Mapping[int, int]], devices: int) -> list[list[int]]:
    """Bytes of the first 0, 1, 2, ... chunks on each device, from the bytes of every chunk by device."""
    totals = [[0] * devices]
    for chunk in chunks:
        total = totals[-1].copy()
        for device, count in chunk.items():
            total[device] += count
        totals.append(total)
    return totals


def load_seconds(wanted: Sequence[float], queued: Sequence[float], bandwidths: Sequence[float]) -> float:
    """How long a load takes; infinite where bytes lie on a device without bandwidth, 0 where there are none.

    Args:
        wanted: bytes on each device.
        queued: bytes of other loads that each device still has to deliver.
        bandwidths: bytes per second of each device.
    """
    slowest = 0.0
    for count, ahead, bandwidth in zip(wanted, queued, bandwidths, strict=True):
        if count:
            slowest = max(slowest, (ahead + count) / bandwidth if bandwidth > 0 else math.inf)
    return slowest + OVERHEAD if slowest else 0.0


def choose(
    loads: Sequence[Sequence[float]], computes: Sequence[float], queued: Sequence[float], bandwidths: Sequence[float]
) -> int:
    """The k whose time to first token is shortest; of equal ones the largest, which leaves the processor free.

    Args:
        loads: bytes on each device if the first k chunks are loaded, for k from 0.
        computes: seconds to compute what is left then.
        queued: see `load_seconds`.
        bandwidths: see `load_seconds`.
    """
    best, shortest = 0, math.inf
    for kept, (wanted, compute) in enumerate(zip(loads, computes, strict=True)):
        total = load_seconds(wanted, queued, bandwidths) + compute
        if total < math.inf and total <= shortest:
            best, shortest = kept, total
    return best
