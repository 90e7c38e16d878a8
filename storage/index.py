"""Which chunks the pool holds, where, and who is using them. One owner thread, no locks.

A name is the namespace's fingerprint followed by the engine's key. A chunk is *writing* from the moment its slots
are taken until the last lane has written them, then *ready*. Only a ready chunk can be leased (read) or evicted. A
chunk that is dropped while it is read or written is gone for everyone who asks, but its slots are given back only
when the last reader or the writer is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from forebay.storage.plan import NOWHERE, Span, pack, unpack
from forebay.storage.policy import make_policy
from forebay.storage.space import Space


class Entry:
    """One chunk."""

    __slots__ = ("checksums", "copies", "extents", "generation", "name", "ready", "recorded", "spans", "verified")

    def __init__(
        self,
        name: bytes,
        generation: int,
        spans: tuple[Span, ...],
        extents: bytes,
        copies: bytes,
        checksums: bytes = b"",
        recovered: bool = False,
    ) -> None:
        self.name = name
        self.generation = generation
        self.spans = spans
        self.extents = extents
        """Packed place of every stripe."""
        self.copies = copies
        """Packed second place of every stripe, `NOWHERE` for those that need none; empty when there are none at all."""
        self.checksums = checksums
        """CRC-32C of every stripe, lane after lane, 4 bytes each; empty until ready."""
        self.ready = recovered
        self.verified = not recovered
        """False when the bytes may not be what was stored, until a load has checked them."""
        self.recorded = recovered
        """Whether the journal knows of it."""


class Index:
    """Entries by name, leases, and the order in which they leave.

    Args:
        spaces: the slots of every device.
        volatile: the devices whose content does not survive the process.
        policy: name of the eviction policy.
    """

    def __init__(self, spaces: Sequence[Space], volatile: frozenset[int], policy: str = "lru") -> None:
        self.spaces = spaces
        self._volatile = volatile
        self._entries: dict[bytes, Entry] = {}
        self._writing: dict[bytes, Entry] = {}
        self._leases: dict[bytes, int] = {}
        self._zombies: dict[bytes, list[Entry]] = {}
        self._order = make_policy(policy)
        self._resident = make_policy(policy)
        self.get = self._entries.get
        """`get(name)`: the entry, writing or ready, or None."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def leases(self) -> int:
        """Leases that are out."""
        return sum(self._leases.values())

    @property
    def writing(self) -> int:
        """Chunks being written, dropped ones included."""
        return len(self._writing)

    def leased(self, name: bytes) -> bool:
        """Whether a lease of this name is out."""
        return name in self._leases

    def pending(self, name: bytes) -> Entry | None:
        """The chunk of this name that is being written, dropped or not."""
        return self._writing.get(name)

    def is_writing(self, name: bytes) -> bool:
        """Whether someone still writes a chunk of this name, dropped or not."""
        return name in self._writing

    def start(self, entry: Entry) -> None:
        """Add a chunk that is about to be written; its slots are taken already. `rank` has to follow."""
        self._entries[entry.name] = entry
        self._writing[entry.name] = entry

    def recover(self, entries: Sequence[Entry]) -> None:
        """Add ready chunks, coldest first, whose slots are taken already."""
        names = [entry.name for entry in entries]
        self._entries.update(zip(names, entries, strict=True))
        self._order.insert(names[::-1])

    def rank(self, entries: Sequence[Entry]) -> None:
        """Give chunks that were started, in prefix order, their place in the order of eviction."""
        self._order.insert([entry.name for entry in entries])
        self._resident.insert([entry.name for entry in entries if entry.copies])

    def finish(self, name: bytes) -> Entry | None:
        """The write of `name` is over. The entry, or None when it is unknown or was dropped meanwhile."""
        entry = self._writing.pop(name, None)
        if entry is None:
            return None
        if self._entries.get(name) is not entry:
            self._free(entry)
            return None
        return entry

    def publish(self, entry: Entry, checksums: bytes) -> None:
        """Make a chunk whose write is over ready."""
        entry.checksums = checksums
        entry.ready = True

    def lease(self, name: bytes) -> None:
        """Keep the chunk's slots as they are until `release`."""
        self._leases[name] = self._leases.get(name, 0) + 1

    def release(self, name: bytes) -> None:
        """Give one lease back; without one out this does nothing.

        Leases count by name: a chunk that was dropped and stored anew is one with its predecessor here, whose slots
        stay until all readers of either are done.
        """
        count = self._leases.get(name, 0)
        if count > 1:
            self._leases[name] = count - 1
        elif count == 1:
            del self._leases[name]
            for entry in self._zombies.pop(name, ()):
                self._free(entry)

    def touch(self, names: Sequence[bytes]) -> None:
        """Note a use of chunks, in prefix order."""
        self._order.touch(names)
        if self._volatile:
            self._resident.touch(names)

    def drop(self, entry: Entry) -> None:
        """Forget a chunk. Its slots come back when nobody reads or writes them any more."""
        del self._entries[entry.name]
        self._order.remove(entry.name)
        self._resident.remove(entry.name)
        if entry.name in self._writing:
            return
        if entry.name in self._leases:
            self._zombies.setdefault(entry.name, []).append(entry)
        else:
            self._free(entry)

    def evict(self, devices: frozenset[int], protected: frozenset[bytes]) -> Entry | None:
        """Drop the coldest idle chunk that has slots on `devices`; None when there is none."""

        def evictable(name: bytes) -> bool:
            return self._idle(name, protected) and self._touches(self._entries[name], devices)

        name = self._order.pop(evictable)
        if name is None:
            return None
        entry = self._entries[name]
        self.drop(entry)
        return entry

    def demote(self, protected: frozenset[bytes]) -> bool:
        """Take the coldest idle chunk out of volatile memory: from now on it is read from its copies."""
        name = self._resident.pop(lambda name: self._idle(name, protected))
        if name is None:
            return False
        entry = self._entries[name]
        old, copies = unpack(entry.extents), unpack(entry.copies)
        entry.extents = pack([place if copy == NOWHERE else copy for place, copy in zip(old, copies, strict=True)])
        entry.copies = b""
        self._give_back([place for place, copy in zip(old, copies, strict=True) if copy != NOWHERE])
        return True

    def select(self, wanted: Callable[[Entry], bool]) -> list[Entry]:
        """All entries for which `wanted` holds."""
        return [entry for entry in self._entries.values() if wanted(entry)]

    def _idle(self, name: bytes, protected: frozenset[bytes]) -> bool:
        return self._entries[name].ready and name not in self._leases and name not in protected

    @staticmethod
    def _touches(entry: Entry, devices: frozenset[int]) -> bool:
        return any(place >> 32 in devices for place in unpack(entry.extents) + unpack(entry.copies))

    def _free(self, entry: Entry) -> None:
        self._give_back([place for place in unpack(entry.extents) + unpack(entry.copies) if place != NOWHERE])

    def _give_back(self, places: list[int]) -> None:
        """Release slots, device by device and neighbours together."""
        slots: dict[int, list[int]] = {}
        for place in sorted(places):
            slots.setdefault(place >> 32, []).append(place & 0xFFFFFFFF)
        for device, freed in slots.items():
            self.spaces[device].release(freed)
