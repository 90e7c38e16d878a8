"""Finding room: places for a new chunk's stripes and their copies, and what has to leave for them.

Devices are of two classes. In a durable pool every stripe lies on exactly one persistent device; what is placed on a
volatile one as well is a faster second home. So a full volatile device is relieved by *demotion* (its coldest chunks go
on from their copies), and only a lack of persistent room evicts. In any other pool all devices are one class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import NamedTuple

from forebay.storage.config import Watermarks
from forebay.storage.index import NOWHERE, Entry, Index
from forebay.storage.placement import Bandwidth, Placement, PlacementState
from forebay.storage.plan import Span

EVICT_BATCH = 64
"""Chunks evicted beyond need, in one go, on the way down to the low watermark (our choice: well below 1 ms)."""


class Places(NamedTuple):
    """Where a chunk's stripes go: `device << 32 | slot`, one per stripe."""

    extents: list[int]
    copies: list[int]
    """`NOWHERE` for stripes that need none; empty when no stripe has one."""


class Allocator:
    """Places chunks on the devices of an index.

    Args:
        index: whose spaces are used and whose chunks are evicted.
        placement: chooses devices.
        latencies: of the devices (seconds).
        volatile: the devices that forget.
        durable: whether stripes on volatile devices need copies.
        watermarks: fractions of the capacity of a class at which eviction starts and stops.
    """

    def __init__(
        self,
        index: Index,
        placement: Placement,
        latencies: Sequence[float],
        volatile: frozenset[int],
        durable: bool,
        watermarks: Watermarks,
    ) -> None:
        self.weights: list[float] = [0.0] * len(index.spaces)
        """Read bandwidth of each device that may be written (bytes/s), else 0. Set by the owner."""
        self.evicted: list[Entry] = []
        """Chunks evicted since the owner last cleared the list."""
        self.demotions = 0
        self._index = index
        self._placement = placement
        self._state = PlacementState(list(latencies))
        self._copying = Bandwidth()
        self._copy_state = PlacementState(list(latencies))
        self._volatile = volatile
        self._durable = durable
        self._watermarks = watermarks

    def allocate(self, key: bytes, groups: Sequence[Sequence[Span]], protected: frozenset[bytes]) -> Places | None:
        """Take slots for a chunk; None when not enough can be had.

        Args:
            key: of the chunk.
            groups: its stripes by layer group.
            protected: names that must not be evicted for it.
        """
        count = sum(map(len, groups))
        persistent = self._persistent()
        if not self._make_room(key, count, persistent, protected):
            return None
        devices = self._choose(key, groups)
        if devices is None:
            return None
        copies = self._choose_copies(key, groups, devices, persistent) if persistent else []
        return self._take(devices, copies)

    def _persistent(self) -> frozenset[int]:
        """Where copies go; empty when none are kept."""
        if not self._durable or not self._volatile:
            return frozenset()
        return frozenset(d for d, weight in enumerate(self.weights) if weight > 0 and d not in self._volatile)

    def _make_room(self, key: bytes, count: int, persistent: frozenset[int], protected: frozenset[bytes]) -> bool:
        eligible = self._placement.eligible(key, self.weights)
        if persistent:
            resident = frozenset(eligible) & self._volatile
            self._relieve(resident, self._share(count, resident, eligible), lambda: self._demote(resident, protected))
            self._relieve(persistent, count, lambda: self._evict(persistent, protected))
            chosen = frozenset(eligible) & persistent
            if chosen != persistent:  # a placement that leaves no choice, such as `hash`
                self._relieve(chosen, count, lambda: self._evict(chosen, protected))
        else:
            devices = frozenset(eligible)
            self._relieve(devices, count, lambda: self._evict(devices, protected))
        return sum(self._index.spaces[device].free for device in eligible) >= count

    def _share(self, count: int, devices: frozenset[int], eligible: Sequence[int]) -> int:
        """Of `count` stripes, how many to expect on `devices`."""
        total = sum(self.weights[device] for device in eligible)
        return min(count, ceil(count * sum(self.weights[device] for device in devices) / total)) if total else 0

    def _relieve(self, devices: frozenset[int], count: int, step: Callable[[], bool]) -> None:
        """If `count` more slots would pass the high watermark: `step` until they fit below the low one.

        The watermarks are those of the devices together: room on a slow device is used before anything is evicted.
        """
        spaces = [self._index.spaces[device] for device in devices]
        capacity = sum(space.capacity for space in spaces)
        used = sum(space.used for space in spaces) + count
        if used <= ceil(self._watermarks.high * capacity) or count > capacity:
            return
        extra, low = EVICT_BATCH, ceil(self._watermarks.low * capacity)
        while used > low and (extra > 0 or used > capacity) and step():
            used = sum(space.used for space in spaces) + count
            extra -= 1

    def _evict(self, devices: frozenset[int], protected: frozenset[bytes]) -> bool:
        entry = self._index.evict(devices, protected)
        if entry is not None:
            self.evicted.append(entry)
        return entry is not None

    def _demote(self, devices: frozenset[int], protected: frozenset[bytes]) -> bool:
        """Relieve volatile memory; only chunks without copies (stored when there was no room for any) are lost."""
        if self._index.demote(protected):
            self.demotions += 1
            return True
        return self._evict(devices, protected)

    def _choose(self, key: bytes, groups: Sequence[Sequence[Span]]) -> list[int] | None:
        """The device of every stripe."""
        free = [space.free for space in self._index.spaces]
        devices: list[int] = []
        for spans in groups:
            chosen = self._placement.assign(key, spans, self.weights, free, self._state)
            if chosen is None:
                return None
            for device in chosen:
                free[device] -= 1
            devices += chosen
        return devices

    def _choose_copies(
        self, key: bytes, groups: Sequence[Sequence[Span]], devices: Sequence[int], persistent: frozenset[int]
    ) -> list[int]:
        """The device of each stripe's copy. All that need one get one, or none does: a part would save nothing."""
        spans = [span for group in groups for span in group]
        needing = [stripe for stripe, device in enumerate(devices) if device in self._volatile]
        free = [space.free for space in self._index.spaces]
        for device in devices:
            free[device] -= 1
        weights = [weight if device in persistent else 0.0 for device, weight in enumerate(self.weights)]
        chosen = self._copying.assign(key, [spans[stripe] for stripe in needing], weights, free, self._copy_state)
        if not chosen:
            return []
        copies = [NOWHERE] * len(devices)
        for stripe, device in zip(needing, chosen, strict=True):
            copies[stripe] = device
        return copies

    def _take(self, devices: Sequence[int], copies: Sequence[int]) -> Places:
        """Slots on the chosen devices; all that one holds of the chunk, copies included, is a run if possible."""
        wanted: dict[int, list[int]] = {}
        for stripe, device in enumerate(devices):
            wanted.setdefault(device, []).append(2 * stripe)
        for stripe, device in enumerate(copies):
            if device != NOWHERE:
                wanted.setdefault(device, []).append(2 * stripe + 1)
        both = [NOWHERE] * (2 * len(devices))
        for device, positions in wanted.items():
            base = device << 32
            slots = self._index.spaces[device].allocate(len(positions))
            for position, slot in zip(sorted(positions), slots, strict=True):
                both[position] = base | slot
        return Places(both[::2], both[1::2] if copies else [])
