"""The slots of one device: a hard bound, runs of neighbours where there are any, and no work per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Space:
    """Allocator of `capacity` slots.

    Free slots are kept as maximal runs, found by either end (so that a freed run grows into its neighbours) and
    by size class, run length in [2^k, 2^(k+1)): memory and time go with the number of runs, not of slots.
    """

    def __init__(self, capacity: int, used: NDArray[np.int64] | None = None) -> None:
        """Args:
        capacity: number of slots.
        used: the slots that are taken already, each once (after recovery).
        """
        self.capacity = capacity
        self.used = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._classes: list[set[int]] = [set() for _ in range(capacity.bit_length() + 1)]
        self._filled = 0
        """Bit k: class k has runs."""
        for start, length in _gaps(capacity, used):
            self._add(start, length)
        self.used = 0 if used is None else len(used)

    @property
    def free(self) -> int:
        """Slots that can be allocated."""
        return self.capacity - self.used

    def allocate(self, count: int) -> list[int]:
        """`count` slots: one ascending run if there is one long enough, else several.

        Raises:
            ValueError: when fewer are free; nothing is taken then.
        """
        if count > self.free:
            raise ValueError(f"{count} slots asked for, {self.free} of {self.capacity} are free")
        slots: list[int] = []
        wanted = count
        while wanted:
            start = self._find(wanted)
            length = self._remove(start)
            if length > wanted:
                self._add(start + wanted, length - wanted)
                length = wanted
            slots += range(start, start + length)
            wanted -= length
        self.used += count
        return slots

    def release(self, slots: Sequence[int]) -> None:
        """Give slots back; neighbours in the sequence are given back together."""
        index, count = 0, len(slots)
        while index < count:
            start = slots[index]
            stop = index + 1
            while stop < count and slots[stop] == start + stop - index:
                stop += 1
            self._merge(start, stop - index)
            index = stop
        self.used -= count

    def _find(self, wanted: int) -> int:
        """The start of a run of at least `wanted` slots, else of one of the longest."""
        sure = (wanted - 1).bit_length()
        larger = self._filled >> sure
        if larger:
            level = sure + (larger & -larger).bit_length() - 1
            return next(iter(self._classes[level]))
        return max(self._some(self._filled.bit_length() - 1), key=self._by_start.__getitem__)

    def _some(self, level: int) -> list[int]:
        """A few runs of a size class: enough to avoid most needless cuts, few enough to stay cheap."""
        return [start for start, _ in zip(self._classes[level], range(8), strict=False)]

    def _merge(self, start: int, length: int) -> None:
        """Add a run, joined with the free runs that touch it."""
        before = self._by_end.get(start)
        if before is not None:
            length += self._remove(before)
            start = before
        if start + length in self._by_start:
            length += self._remove(start + length)
        self._add(start, length)

    def _add(self, start: int, length: int) -> None:
        self._by_start[start] = length
        self._by_end[start + length] = start
        level = length.bit_length() - 1
        self._classes[level].add(start)
        self._filled |= 1 << level

    def _remove(self, start: int) -> int:
        length = self._by_start.pop(start)
        del self._by_end[start + length]
        level = length.bit_length() - 1
        self._classes[level].discard(start)
        if not self._classes[level]:
            self._filled &= ~(1 << level)
        return length


def _gaps(capacity: int, used: NDArray[np.int64] | None) -> list[tuple[int, int]]:
    """The free runs (start, length) between the used slots."""
    taken: NDArray[Any] = np.sort(used) if used is not None else np.empty(0, np.int64)
    starts = np.concatenate(([0], taken + 1))
    lengths = np.concatenate((taken, [capacity])) - starts
    return [(int(start), int(length)) for start, length in zip(starts[lengths > 0], lengths[lengths > 0], strict=True)]
