"""From what a journal says to what is still true, for the devices there are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.storage.index import Entry
from forebay.storage.records import DeviceRecord, Header

IN_MEMORY = "lay in memory only"
"""The ordinary loss at a restart: nothing to warn about."""

Places = NDArray[np.int64]


@dataclass(slots=True)
class Recovered:
    """What a restart finds."""

    entries: list[Entry]
    """Chunks that are still there, with their places in the new numbering, oldest first."""
    used: list[Places]
    """Slots they occupy, by new device."""
    lost: list[Entry]
    """Chunks that are not."""
    reasons: Counter[str]
    """How many were lost, and why."""


def recover(entries: Sequence[Entry], old: Header, new: Header) -> Recovered:
    """Keep the chunks all of whose stripes lie where the journal says, or have a copy that does.

    Args:
        entries: what the journal holds, oldest first; changed in place.
        old: the journal's header.
        new: the header that describes the devices of now.
    """
    newest = list({entry.name: entry for entry in entries}.values())
    if old.pool_uuid != new.pool_uuid or old.stripe != new.stripe or old.lanes != new.lanes:
        reason = _mismatch(old, new)
        nothing = [np.empty(0, np.int64) for _ in new.devices]
        return Recovered([], nothing, list(entries), Counter({reason: len(entries)}))
    return _Recovery(newest, old, new).run()


def _mismatch(old: Header, new: Header) -> str:
    if old.pool_uuid != new.pool_uuid:
        return "belong to another pool"
    if old.stripe != new.stripe:
        return f"stripe size changed from {old.stripe} to {new.stripe}"
    return f"number of ranks changed from {old.lanes} to {new.lanes}"


class _Recovery:
    """One pass over all places at once: a row per stripe."""

    def __init__(self, entries: list[Entry], old: Header, new: Header) -> None:
        self.entries = entries
        self.new = new
        fates = [_fate(device, new) for device in old.devices]
        gone = (-1, 0, "on no known device")
        self.target = np.array([fate[0] for fate in (*fates, gone)], np.int64)
        self.limit = np.array([fate[1] for fate in (*fates, gone)], np.int64)
        self.why = [fate[2] for fate in (*fates, gone)]

    def run(self) -> Recovered:
        counts = np.array([len(entry.extents) >> 3 for entry in self.entries], np.int64)
        owner = np.repeat(np.arange(len(self.entries)), counts)
        first = np.frombuffer(b"".join([entry.extents for entry in self.entries]), np.int64)
        second = np.frombuffer(b"".join([entry.copies for entry in self.entries]), np.int64)
        places = self._translate(first)
        places = np.where(places >= 0, places, self._translate(second))
        reasons = self._why_lost(first, second, places, owner)
        for index in _claimed_twice(places, owner, set(reasons)):
            reasons[index] = "claim the same place"
        return self._sort(places, counts, owner, reasons)

    def _device(self, places: Places) -> Places:
        """Old device of each place; the last row of the tables for those on none."""
        last = len(self.target) - 1
        device = places >> 32
        return np.where((device < 0) | (device >= last), last, device)

    def _translate(self, places: Places) -> Places:
        """Places in the new numbering, -1 where the bytes are gone."""
        device, slot = self._device(places), places & 0xFFFFFFFF
        kept = (self.target[device] >= 0) & (slot < self.limit[device])
        return np.where(kept, self.target[device] << 32 | slot, -1)

    def _why_lost(self, first: Places, second: Places, places: Places, owner: Places) -> dict[int, str]:
        """By entry: the fate of its first stripe that is gone."""
        rows = np.flatnonzero(places < 0)[::-1]
        blamed = np.where(second[rows] >= 0, self._device(second[rows]), self._device(first[rows]))
        return {int(index): self.why[int(device)] for index, device in zip(owner[rows], blamed, strict=True)}

    def _sort(self, places: Places, counts: Places, owner: Places, reasons: dict[int, str]) -> Recovered:
        lost = [self.entries[index] for index in sorted(reasons)]
        packed, start = places.tobytes(), 0
        for entry, stop in zip(self.entries, (8 * np.cumsum(counts)).tolist(), strict=True):
            entry.extents, entry.copies = packed[start:stop], b""
            start = stop
        kept, held = self.entries, places
        if reasons:
            kept = [entry for index, entry in enumerate(self.entries) if index not in reasons]
            held = places[~np.isin(owner, list(reasons))]
        used = [held[held >> 32 == device] & 0xFFFFFFFF for device in range(len(self.new.devices))]
        return Recovered(kept, used, lost, Counter(reasons.values()))


def _fate(device: DeviceRecord, new: Header) -> tuple[int, int, str]:
    """Of an old device: its new index or -1, how many of its slots are still good, and why others are not."""
    names = [candidate.name for candidate in new.devices]
    if device.kind == "dram":
        return -1, 0, IN_MEMORY
    if device.name not in names:
        return -1, 0, f"device {device.name!r} was removed"
    index = names.index(device.name)
    now = new.devices[index]
    if now.kind != device.kind or now.path != device.path:
        return -1, 0, f"device {device.name!r} moved from {device.path} to {now.path or 'memory'}"
    if new.lanes > 1 and now.slots != device.slots:
        return -1, 0, f"device {device.name!r} was resized"
    return index, min(device.slots, now.slots), f"device {device.name!r} became smaller"


def _claimed_twice(places: Places, owner: Places, lost: set[int]) -> set[int]:
    """Entries that share a slot with another one; the journal is damaged, so neither is believed."""
    alive: NDArray[Any] = (places >= 0) & ~np.isin(owner, list(lost)) if lost else places >= 0
    order = np.argsort(places[alive], kind="stable")
    sorted_places, owners = places[alive][order], owner[alive][order]
    same = np.flatnonzero(sorted_places[1:] == sorted_places[:-1])
    return set(owners[same].tolist()) | set(owners[same + 1].tolist())
