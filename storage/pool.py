"""The pool: what is stored where, who uses it, and what survives. The facade that engines' adapters talk to.

One `Pool` lives in the scheduler's process and belongs to one thread. It moves no bytes: it hands out plans, one
per chunk, which the transfer engine of every rank carries out on its own lane.
"""

from __future__ import annotations

import enum
import logging
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forebay.storage import records
from forebay.storage.allocator import Allocator, Places
from forebay.storage.config import PoolConfig
from forebay.storage.index import Entry, Index
from forebay.storage.namespace import Namespace
from forebay.storage.opening import Opened, open_pool
from forebay.storage.placement import make_placement
from forebay.storage.plan import (
    NOWHERE,
    ChunkReads,
    DeviceHealth,
    Extent,
    LoadPlan,
    Span,
    StorePlan,
    cut_spans,
    pack,
    unpack,
)
from forebay.storage.stats import DeviceUsage, PoolStats

logger = logging.getLogger(__name__)

Segments = Sequence[int] | Callable[[bytes], Sequence[int]]
"""Bytes of each layer group of a chunk on one lane: the same for all keys, or by key."""


class Lookup(enum.IntEnum):
    """What the pool knows of a key."""

    MISS = 0
    WRITING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class _Shape:
    """How chunks of one size are cut."""

    spans: tuple[Span, ...]
    groups: tuple[tuple[Span, ...], ...]
    size: int


class Pool:
    """An open pool, seen from one namespace. Made by `Pool.open`."""

    @classmethod
    def open(cls, config: PoolConfig, namespace: Namespace, lanes: int = 1) -> Pool:
        """Prepare the devices, take the lock and recover what is there.

        Args:
            config: the pool.
            namespace: what this engine's keys mean.
            lanes: ranks that store different bytes.

        Raises:
            PoolBusyError: another process has it open.
            JournalError: the journal is not ours or of another format.
            ConfigError, DeviceError, PoolError: something cannot be used.
        """
        return cls(config, namespace, lanes, open_pool(config, namespace, lanes))

    def __init__(self, config: PoolConfig, namespace: Namespace, lanes: int, opened: Opened) -> None:
        self.config = config
        self.namespace = namespace
        self.lanes = lanes
        self.pool_uuid = opened.header.pool_uuid
        self.profile = opened.profile
        self._opened = opened
        self._prefix = namespace.fingerprint
        self._journal = opened.journal
        self._volatile = frozenset(d for d, device in enumerate(config.devices) if device.kind == "dram")
        self._index = Index(opened.spaces, self._volatile, config.policy)
        self._index.recover(opened.entries)
        self._allocator = Allocator(
            self._index,
            make_placement(config.placement),
            self.profile.latencies(),
            self._volatile,
            config.durable,
            config.watermarks,
        )
        self._generation = opened.last_generation
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._health: dict[int, dict[str, DeviceHealth]] = {}
        self._down: frozenset[int] = frozenset()
        self._pending = 0
        self._lookups = self._hits = self._stored = self._evictions = 0
        self._failed_stores = self._dropped_stores = self._failed_loads = 0
        self._closed = False
        self._weigh()

    def lookup(self, key: bytes) -> Lookup:
        """Whether a chunk can be loaded now, soon, or not at all. No side effect but a counter."""
        self._lookups += 1
        entry = self._index.get(self._prefix + key)
        if entry is None:
            return Lookup.MISS
        if not entry.ready:
            return Lookup.WRITING
        if self._down and self._sources(entry) is None:
            return Lookup.MISS
        self._hits += 1
        return Lookup.READY

    def in_memory(self, key: bytes) -> bool:
        """Whether a load of a ready chunk would read memory alone."""
        entry = self._index.get(self._prefix + key)
        return entry is not None and all(place >> 32 in self._volatile for place in unpack(entry.extents))

    def reads(self, keys: Sequence[bytes]) -> list[ChunkReads]:
        """What loading each chunk would read on one lane. Nothing for a chunk that cannot be read now."""
        found: list[ChunkReads] = []
        for key in keys:
            entry = self._index.get(self._prefix + key)
            places = self._sources(entry) if entry is not None and entry.ready else None
            found.append((b"", ()) if entry is None or places is None else (places, entry.spans))
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of chunks, given in prefix order: the first will be the last to be evicted."""
        self._index.touch([self._prefix + key for key in keys])

    def prepare_load(self, keys: Sequence[bytes]) -> list[LoadPlan]:
        """Lease chunks and say where they lie.

        A key that is not ready (any more) gets neither a plan nor a lease; its plan is missing from the answer.
        """
        plans: list[LoadPlan] = []
        names = [self._prefix + key for key in keys]
        index, verify_all = self._index, self.config.verify
        for key, name in zip(keys, names, strict=True):
            entry = index.get(name)
            places = self._sources(entry) if entry is not None and entry.ready else None
            if entry is None or places is None:
                continue
            index.lease(name)
            plans.append(LoadPlan(key, entry.spans, places, entry.checksums, verify_all or not entry.verified))
        index.touch(names)
        return plans

    def complete_load(
        self, keys: Iterable[bytes], failed: Iterable[bytes] = (), unread: Collection[bytes] = ()
    ) -> None:
        """Give one lease of each key back, and drop the failed ones at once.

        Args:
            keys: of the plans that have ended, however they ended.
            failed: those whose bytes did not arrive; may or may not be listed in `keys` as well.
            unread: those of `keys` that were given up for lack of time; they stay, as unverified as they were.
        """
        ended, bad = list(keys), set(failed)
        self._failed_loads += len(bad)
        self._drop([self._prefix + key for key in bad])
        index = self._index
        for key in ended + list(bad.difference(ended)):
            name = self._prefix + key
            entry = index.get(name)
            if entry is not None and not entry.verified and key not in unread and index.leased(name):
                entry.verified = True
            index.release(name)
        self._journal.write()

    def prepare_store(self, keys: Sequence[bytes], segments: Segments) -> list[StorePlan]:
        """Find places for chunks, evicting others where needed.

        Keys that are there already, or being written, are left out. The others get plans in order, until one does not
        fit or too many bytes are pending; so what is stored is always a prefix.

        Args:
            keys: in prefix order.
            segments: bytes of each layer group of a chunk on one lane.
        """
        names = [self._prefix + key for key in keys]
        self._index.touch(names)
        protected = frozenset(names)
        entries: list[Entry] = []
        plans: list[StorePlan] = []
        for key, name in zip(keys, names, strict=True):
            if not self._wanted(name):
                continue
            shape = self._shape(segments(key) if callable(segments) else segments)
            if not shape.spans:
                continue
            places = self._place(key, shape, protected)
            if places is None:
                self._dropped_stores += len(keys) - names.index(name)
                break
            entry = self._start(name, shape, places)
            entries.append(entry)
            plans.append(_plan(key, entry, places))
        self._index.rank(entries)
        self._record_evictions()
        self._journal.write()
        return plans

    def complete_store(self, checksums: Mapping[bytes, Sequence[Sequence[int]]], failed: Iterable[bytes] = ()) -> None:
        """Publish chunks that all lanes have written; drop the failed ones.

        Args:
            checksums: key -> `[lane][stripe]`, the CRC-32C of each.
            failed: keys that some lane did not write. They win over `checksums`.
        """
        bad = set(failed)
        for key in bad:
            self._end_store(key, None)
        for key, lanes in checksums.items():
            if key not in bad:
                self._end_store(key, lanes)
        self._journal.write()

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget chunks; unknown keys are ignored."""
        self._drop([self._prefix + key for key in keys])
        self._journal.write()

    def reset(self) -> None:
        """Forget all chunks of this namespace, those being written included."""
        for entry in self._index.select(lambda entry: entry.name.startswith(self._prefix)):
            if entry.recorded:
                self._journal.live -= records.put_size(entry)
            self._index.drop(entry)
        self._journal.append(records.reset_record(self._prefix))
        self._journal.write()

    def report_health(self, reports: Iterable[DeviceHealth], lane: int = 0) -> None:
        """Learn from one rank how its devices do.

        Nothing is placed on a device that any rank cannot write, and a chunk with a stripe that some rank cannot read,
        and no copy elsewhere, is a miss for the time being. Observed bandwidth changes future placements.
        """
        for report in reports:
            self._health.setdefault(lane, {})[report.name] = report
            self.profile.observe(report.name, report.read_bandwidth * self.lanes)
        self._weigh()

    def stats(self) -> PoolStats:
        """How the pool stands."""
        opened = self._opened
        return PoolStats(
            devices=tuple(self._usage(device) for device in range(len(self.config.devices))),
            chunks=len(self._index),
            writing=self._index.writing,
            leases=self._index.leases,
            pending_store_bytes=self._pending,
            lookups=self._lookups,
            hits=self._hits,
            stored=self._stored,
            failed_stores=self._failed_stores,
            dropped_stores=self._dropped_stores,
            failed_loads=self._failed_loads,
            evictions=self._evictions,
            demotions=self._allocator.demotions,
            recovered=len(opened.entries),
            lost=opened.lost,
            recovery_seconds=opened.seconds,
            journal_bytes=self._journal.size,
            journal_problem=self._journal.problem,
        )

    def close(self) -> None:
        """Leave everything for the next start to find; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._journal.problem:
            self._journal.rewrite(self._opened.content(entry for entry in self._index if entry.recorded))
        self._journal.close()
        try:
            self.profile.save(self.config.profile_path)
        except OSError as error:
            logger.warning("profile %s cannot be saved (%s)", self.config.profile_path, error.strerror)
        self._opened.unlock()

    def _sources(self, entry: Entry) -> bytes | None:
        """Where to read each stripe now, packed; None when one is on a device that is out of use."""
        if not self._down:
            return entry.extents
        places = unpack(entry.extents)
        copies = unpack(entry.copies) or (NOWHERE,) * len(places)
        chosen = [copy if place >> 32 in self._down else place for place, copy in zip(places, copies, strict=True)]
        return None if any(place == NOWHERE or place >> 32 in self._down for place in chosen) else pack(chosen)

    def _wanted(self, name: bytes) -> bool:
        """Whether a chunk should be stored: not there, not being written. One that cannot be read makes way."""
        if self._index.is_writing(name):
            return False
        entry = self._index.get(name)
        if entry is not None and self._sources(entry) is None:
            self._drop([name])
            return True
        return entry is None

    def _shape(self, segments: Sequence[int]) -> _Shape:
        key = tuple(segments)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = _cut(key, self.config.stripe)
        return shape

    def _place(self, key: bytes, shape: _Shape, protected: frozenset[bytes]) -> Places | None:
        if self._pending + shape.size * self.lanes > self.config.max_pending_store:
            return None
        return self._allocator.allocate(key, shape.groups, protected)

    def _start(self, name: bytes, shape: _Shape, places: Places) -> Entry:
        self._generation += 1
        entry = Entry(name, self._generation, shape.spans, pack(places.extents), pack(places.copies))
        self._index.start(entry)
        self._pending += shape.size * self.lanes
        return entry

    def _end_store(self, key: bytes, lanes: Sequence[Sequence[int]] | None) -> None:
        """The write of a chunk is over: publish it, or give its slots back when it failed or is no longer wanted."""
        writing = self._index.pending(self._prefix + key)
        if writing is None:
            return
        last = writing.spans[-1]
        self._pending -= (last.offset + last.length) * self.lanes
        entry = self._index.finish(writing.name)
        if lanes is None or [len(lane) for lane in lanes] != [len(writing.spans)] * self.lanes:
            self._failed_stores += 1
            self._drop([writing.name] if entry is not None else [])
        elif entry is not None:
            self._stored += 1
            self._index.publish(entry, b"".join([struct.pack(f"<{len(lane)}I", *lane) for lane in lanes]))
            self._record(entry)

    def _record(self, entry: Entry) -> None:
        """Tell the journal of a new chunk, if a restart could find it."""
        if not entry.copies and any(place >> 32 in self._volatile for place in unpack(entry.extents)):
            return
        entry.recorded = True
        self._journal.append(records.put_record(entry), records.put_size(entry))

    def _drop(self, names: Iterable[bytes]) -> None:
        """Forget chunks, here and in the journal (to be written by the caller before their slots are used again)."""
        dropped = [entry for entry in map(self._index.get, dict.fromkeys(names)) if entry is not None]
        for entry in dropped:
            self._index.drop(entry)
        self._record_drops(dropped)

    def _record_evictions(self) -> None:
        evicted, self._allocator.evicted = self._allocator.evicted, []
        self._evictions += len(evicted)
        self._record_drops(evicted)

    def _record_drops(self, entries: Sequence[Entry]) -> None:
        recorded = [entry for entry in entries if entry.recorded]
        if recorded:
            freed = sum([records.put_size(entry) for entry in recorded])
            self._journal.append(records.drop_record([entry.generation for entry in recorded]), -freed)

    def _weigh(self) -> None:
        """Apply health and profile: no weight for what cannot be written, and no reads from what cannot be read."""
        reports = [report for by_name in self._health.values() for report in by_name.values()]
        unreadable = {report.name for report in reports if not report.usable}
        unwritable = {report.name for report in reports if not report.usable or not report.writable}
        names = [device.name for device in self.config.devices]
        self._down = frozenset(device for device, name in enumerate(names) if name in unreadable)
        weights = zip(names, self.profile.weights(), strict=True)
        self._allocator.weigh([0.0 if name in unwritable else weight for name, weight in weights])

    def _usage(self, device: int) -> DeviceUsage:
        space, config = self._index.spaces[device], self.config.devices[device]
        slot = self.config.stripe * self.lanes
        reports = [by_name[config.name] for by_name in self._health.values() if config.name in by_name]
        return DeviceUsage(
            name=config.name,
            kind=config.kind,
            capacity_bytes=space.capacity * slot,
            used_bytes=space.used * slot,
            quarantined=self._allocator.weights[device] == 0,
            reason=next((report.reason for report in reports if report.reason), ""),
            read_bandwidth=self.profile.devices[config.name].weight,
        )


def _plan(key: bytes, entry: Entry, places: Places) -> StorePlan:
    extents = tuple([Extent(place >> 32, place & 0xFFFFFFFF) for place in places.extents])
    copies = tuple([None if place == NOWHERE else Extent(place >> 32, place & 0xFFFFFFFF) for place in places.copies])
    return StorePlan(key, entry.spans, extents, copies or (None,) * len(extents), entry.generation)


def _cut(segments: tuple[int, ...], stripe: int) -> _Shape:
    sizes = [size for size in segments if size > 0]
    groups = [cut_spans([size], stripe) for size in sizes]
    starts = [sum(sizes[:group]) for group in range(len(sizes))]
    moved = tuple(
        tuple(Span(start + span.offset, span.length) for span in spans)
        for start, spans in zip(starts, groups, strict=True)
    )
    return _Shape(tuple(span for spans in moved for span in spans), moved, sum(sizes))
