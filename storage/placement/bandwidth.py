"""Stripes in proportion to read bandwidth, so that all devices of a load finish together.

A load of N bytes, n_d of them on device d, takes T = max_d (l_d + n_d / B_d), with latency l_d and bandwidth
B_d (see `ideal.py` for its minimum). Hits are prefixes of any length, so every prefix of the chunks written one
after the other has to be balanced: each stripe goes where it would be finished first, given what the device
already has to deliver. For stripes of equal length no other choice makes any prefix faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import ClassVar

from forebay.storage.placement.base import Placement, PlacementState, usable
from forebay.storage.plan import Span


class Bandwidth(Placement):
    """Smooth weighted round-robin by bandwidth, byte-exact; a full device's share goes to the others."""

    name: ClassVar[str] = "bandwidth"

    def eligible(self, key: bytes, weights: Sequence[float]) -> list[int]:
        """Every usable device."""
        return usable(weights)

    def assign(
        self,
        key: bytes,
        spans: Sequence[Span],
        weights: Sequence[float],
        free: Sequence[int],
        state: PlacementState,
    ) -> list[int] | None:
        """Each stripe where it is finished first; None only when there are more stripes than slots."""
        active = [device for device, weight in enumerate(weights) if weight > 0 and free[device] > 0]
        if sum([free[device] for device in active]) < len(spans):
            return None
        work = list(state.work)
        counts = _counts(spans, weights, free, work, active)
        chosen: list[int] = []
        for device in active:
            chosen += [device] * counts[device]
        for device, (_, length) in zip(chosen, spans, strict=True):
            work[device] += length / weights[device]
        # Relative to the least loaded device in use: one that sits out gathers no arrears to catch up on later.
        least = min([work[device] for device in active], default=0.0)
        state.work = [seconds - least if seconds > least else 0.0 for seconds in work]
        return chosen


class Equal(Bandwidth):
    """Plain round-robin: as many stripes for the slow device as for the fast one."""

    name: ClassVar[str] = "equal"

    def assign(
        self,
        key: bytes,
        spans: Sequence[Span],
        weights: Sequence[float],
        free: Sequence[int],
        state: PlacementState,
    ) -> list[int] | None:
        """The same number of stripes for each."""
        return super().assign(key, spans, [1.0 if weight > 0 else 0.0 for weight in weights], free, state)


def _counts(
    spans: Sequence[Span], weights: Sequence[float], free: Sequence[int], work: Sequence[float], active: Sequence[int]
) -> list[int]:
    """Stripes per device: each goes where it is finished first, all taken to be as long as the longest.

    Which of them a device gets is decided afterwards: its stripes lie side by side, in chunk order, so that one
    chunk is one sequential run on each device. Hence the equal lengths: who gets the short last one is not known yet.
    """
    counts = [0] * len(weights)
    longest = max([length for _, length in spans], default=0)
    costs = [longest / weight if weight > 0 else inf for weight in weights]
    finish = [inf] * len(weights)
    for device in active:
        finish[device] = work[device] + costs[device]
    for _ in spans:
        best = finish.index(min(finish))
        counts[best] += 1
        finish[best] = finish[best] + costs[best] if counts[best] < free[best] else inf
    return counts
