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
from forebay.storage.index import Entry, Index
from forebay.storage.placement import Bandwidth, Placement, PlacementState
from forebay.storage.plan import NOWHERE, Span
from forebay.storage.space import Space

EVICT_BATCH = 64
"""Chunks evicted beyond need, in one go, on the way down to the low watermark (our choice: well below 1 ms)."""


class _Class:
    """Devices that fill up together. The watermarks are theirs as a whole: all room is used before anything evicts."""

    def __init__(self, devices: frozenset[int], spaces: Sequence[Space], watermarks: Watermarks) -> None:
        self.devices = devices
        self.spaces = [spaces[device] for device in devices]
        self.capacity = sum(space.capacity for space in self.spaces)
        self.high = ceil(watermarks.high * self.capacity)
        self.low = ceil(watermarks.low * self.capacity)

    @property
    def used(self) -> int:
        """Slots in use."""
        used = 0
        for space in self.spaces:
            used += space.used
        return used


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
        self.weights: Sequence[float] = []
        """Read bandwidth of each device that may be written (bytes/s), else 0."""
        self.evicted: list[Entry] = []
        """Chunks evicted since the owner last cleared the list."""
        self.demotions = 0
        self._index = index
        self._spaces = index.spaces
        self._placement = placement
        self._state = PlacementState(list(latencies))
        self._copying = Bandwidth()
        self._copy_state = PlacementState(list(latencies))
        self._volatile = volatile
        self._durable = durable
        self._watermarks = watermarks
        self._classes: dict[frozenset[int], _Class] = {}
        self._persistent: frozenset[int] = frozenset()
        self._copy_weights: list[float] = []

    def weigh(self, weights: Sequence[float]) -> None:
        """From now on place by these bandwidths (bytes/s; 0 for a device that must not be written)."""
        self.weights = weights
        usable = frozenset(device for device, weight in enumerate(weights) if weight > 0)
        self._persistent = usable - self._volatile if self._durable and self._volatile else frozenset()
        self._copy_weights = [weight if d in self._persistent else 0.0 for d, weight in enumerate(weights)]

    def allocate(self, key: bytes, groups: Sequence[Sequence[Span]], protected: frozenset[bytes]) -> Places | None:
        """Take slots for a chunk; None when not enough can be had.

        Args:
            key: of the chunk.
            groups: its stripes by layer group.
            protected: names that must not be evicted for it.
        """
        count = sum(map(len, groups))
        if not self._make_room(key, count, protected):
            return None
        free = [space.free for space in self._spaces]
        devices = self._choose(key, groups, free)
        if devices is None:
            return None
        copies = self._choose_copies(key, groups, devices, free) if self._persistent else []
        return self._take(devices, copies)

    def _make_room(self, key: bytes, count: int, protected: frozenset[bytes]) -> bool:
        """Evict and demote until `count` stripes fit where the placement may put them. Whether they do."""
        eligible = frozenset(self._placement.eligible(key, self.weights))
        if self._persistent:
            resident = eligible & self._volatile
            expected = min(count, self._class(resident).capacity)
            self._relieve(resident, expected, lambda: self._demote(resident, protected))
            self._relieve(self._persistent, count, lambda: self._evict(self._persistent, protected))
            eligible_persistent = eligible & self._persistent
            if eligible_persistent != self._persistent:  # a placement that leaves no choice, such as `hash`
                self._relieve(eligible_persistent, count, lambda: self._evict(eligible_persistent, protected))
        else:
            self._relieve(eligible, count, lambda: self._evict(eligible, protected))
        found = self._class(eligible)
        return found.capacity - found.used >= count

    def _class(self, devices: frozenset[int]) -> _Class:
        found = self._classes.get(devices)
        if found is None:
            found = self._classes[devices] = _Class(devices, self._spaces, self._watermarks)
        return found

    def _relieve(self, devices: frozenset[int], count: int, step: Callable[[], bool]) -> None:
        """If `count` more slots would pass the high watermark: `step` until they fit below the low one."""
        found = self._class(devices)
        if found.used + count <= found.high or count > found.capacity:
            return
        extra = EVICT_BATCH
        while (used := found.used + count) > found.low and (extra > 0 or used > found.capacity) and step():
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

    def _choose(self, key: bytes, groups: Sequence[Sequence[Span]], free: list[int]) -> list[int] | None:
        """The device of every stripe; `free` is what is left afterwards."""
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
        self, key: bytes, groups: Sequence[Sequence[Span]], devices: Sequence[int], free: Sequence[int]
    ) -> list[int]:
        """The device of each stripe's copy. All that need one get one, or none does: a part would save nothing."""
        spans = [span for group in groups for span in group]
        needing = [stripe for stripe, device in enumerate(devices) if device in self._volatile]
        moved = [spans[stripe] for stripe in needing]
        chosen = self._copying.assign(key, moved, self._copy_weights, free, self._copy_state)
        if not chosen:
            return []
        copies = [NOWHERE] * len(devices)
        for stripe, device in zip(needing, chosen, strict=True):
            copies[stripe] = device
        return copies

    def _take(self, devices: Sequence[int], copies: Sequence[int]) -> Places:
        """Slots on the chosen devices; all that one holds of the chunk, copies included, is a run if possible."""
        wanted = [NOWHERE] * (2 * len(devices))
        wanted[::2] = devices
        if copies:
            wanted[1::2] = copies
        places = [NOWHERE] * len(wanted)
        for device in {*devices, *copies} - {NOWHERE}:
            positions = [position for position, chosen in enumerate(wanted) if chosen == device]
            base = device << 32
            for position, slot in zip(positions, self._spaces[device].allocate(len(positions)), strict=True):
                places[position] = base | slot
        return Places(places[::2], places[1::2] if copies else [])
