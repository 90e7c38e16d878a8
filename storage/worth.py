"""Is a hit worth loading, and how much of it?

A request with a hit of n chunks may load the first k of them and compute the rest. All devices start at once, so the
load takes as long as the slowest of them; computing begins when it has ended. The time to first token is

    T(k) = OVERHEAD + max over devices of (queued + bytes of the first k chunks) / bandwidth  +  compute(k)

with T(0) = compute(0), and the best k is loaded: the tail of the hit is trimmed for as long as that helps, and nothing
is loaded where computing everything is faster. Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from forebay.storage.plan import ChunkReads, unpack

OVERHEAD = 0.005
"""Seconds that a load costs apart from its bytes (our choice: a device's latency and one more step of the engine)."""


def cumulate(chunks: Sequence[ChunkReads], counts: Iterable[int], devices: int) -> dict[int, list[int]]:
    """Bytes of the first n chunks on each device, for every n in `counts` (at most as many as there are)."""
    total = [0] * devices
    totals: dict[int, list[int]] = {}
    done = 0
    for count in sorted(set(counts)):
        for places, spans in chunks[done:count]:
            for place, span in zip(unpack(places), spans, strict=True):
                total[place >> 32] += span[1]
        done = count
        totals[count] = total.copy()
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


def shortest(loading: Sequence[float], computing: Sequence[float]) -> int:
    """The k whose time to first token is shortest; of equal ones the largest, which leaves the processor free.

    Args:
        loading: seconds to load the first k chunks, for k from 0.
        computing: seconds to compute what is left then.
    """
    totals = [load + compute for load, compute in zip(loading, computing, strict=True)]
    least = min(totals)
    return max(k for k, total in enumerate(totals) if total == least and total < math.inf)


def within(loading: Sequence[float], limit: float) -> int:
    """The largest k that is loaded within `limit` seconds: all there is to go by while computing was not measured."""
    return max((k for k, load in enumerate(loading) if load <= limit), default=0)
