"""What travels between the owner of the index and those who move bytes.

The pool (one per engine, in the scheduler's process) decides where every stripe lies; the transfer engines
(one per worker process) move the bytes. Both see the same numbers: a *lane* is one rank's share of every
device, and a slot number means the same place in every lane, so one decision serves all ranks.

A chunk is a run of bytes: the pages of all layers of its KV blocks, layer after layer. `spans` cut it into
stripes, none longer than a slot and none crossing a layer group.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Self

Memory = Sequence[tuple[int, int]]
"""(address, length) pieces that make up a chunk in order. Address 0: discard on load, zeros on store."""


class Extent(NamedTuple):
    """A slot of a device, in every lane."""

    device: int
    """Index into `PoolConfig.devices`."""
    slot: int


NOWHERE = -1
"""Stands for no extent among packed places."""


@lru_cache(maxsize=256)
def _codec(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}q")


def pack(places: Sequence[int]) -> bytes:
    """Places (`device << 32 | slot`, or `NOWHERE`) as plans, the index and the journal keep them: 8 bytes each."""
    return _codec(len(places)).pack(*places)


def unpack(packed: bytes) -> tuple[int, ...]:
    """The places in `packed`; none for empty bytes."""
    return _codec(len(packed) >> 3).unpack(packed)


class Span(NamedTuple):
    """A stripe's place in its chunk (bytes)."""

    offset: int
    length: int


ChunkReads = tuple[bytes, tuple[Span, ...]]
"""The stripes of one chunk: their packed places and what each is of the chunk."""


@dataclass(slots=True)
class LoadPlan:
    """One chunk to read: stripe i is `spans[i]` of the chunk, at place i. Packed: most of it travels unread."""

    key: bytes
    spans: tuple[Span, ...]
    places: bytes
    """See `pack`."""
    sums: bytes
    """CRC-32C of every stripe, lane after lane, 4 bytes each."""
    verify: bool

    @classmethod
    def of(
        cls,
        key: bytes,
        spans: tuple[Span, ...],
        extents: Sequence[Extent],
        checksums: Sequence[Sequence[int]],
        verify: bool,
    ) -> Self:
        """From extents, and checksums by lane and stripe."""
        places = pack([extent.device << 32 | extent.slot for extent in extents])
        sums = b"".join([struct.pack(f"<{len(spans)}I", *lane) for lane in checksums])
        return cls(key, spans, places, sums, verify)

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where each stripe is."""
        return tuple([Extent(place >> 32, place & 0xFFFFFFFF) for place in unpack(self.places)])

    def lane_checksums(self, lane: int) -> tuple[int, ...]:
        """CRC-32C of every stripe on one lane."""
        count = len(self.spans)
        return struct.unpack_from(f"<{count}I", self.sums, 4 * count * lane)

    @property
    def checksums(self) -> tuple[tuple[int, ...], ...]:
        """CRC-32C by lane and stripe."""
        return tuple(struct.iter_unpack(f"<{len(self.spans)}I", self.sums))


@dataclass(slots=True)
class StorePlan:
    """One chunk to write: stripe i goes to `extents[i]` and, when `copies[i]` is there, to it as well."""

    key: bytes
    spans: tuple[Span, ...]
    extents: tuple[Extent, ...]
    copies: tuple[Extent | None, ...]
    generation: int


@dataclass(slots=True)
class TransferResult:
    """How one load or store ended, as one lane saw it."""

    transfer: int
    """The id given to `submit_load` or `submit_store`."""
    failed: dict[bytes, str] = field(default_factory=dict)
    """Keys that failed, each with the reason: what the device said, a deadline, a checksum."""
    late: set[bytes] = field(default_factory=set)
    """Those of `failed` that were given up because the load took too long; nothing is wrong with their bytes."""
    checksums: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    """Stores only: the CRC-32C of each stripe of each key that was written."""
    bytes: int = 0
    seconds: float = 0.0
    device_bytes: dict[str, int] = field(default_factory=dict)
    device_seconds: dict[str, float] = field(default_factory=dict)
    """From submit to the last answer of each device, as the device saw it: their spread is the skew."""


class DeviceHealth(NamedTuple):
    """What a transfer engine tells the pool about a device."""

    name: str
    usable: bool
    """False while quarantined: it is neither read nor written."""
    reason: str
    """Why it is quarantined, empty when it is not."""
    read_bandwidth: float
    """Observed bytes per second under load; 0.0 when nothing was observed since the last report."""
    writable: bool = True
    """False while only writing fails (read-only, full): its chunks are still read, nothing new is placed on it."""


def lane_slots(capacity: int, lanes: int, stripe: int) -> int:
    """Slots of one lane on a device of `capacity` bytes that `lanes` ranks share."""
    return capacity // lanes // stripe


def cut_spans(segments: Sequence[int], stripe: int, block: int = 4096) -> tuple[Span, ...]:
    """Cut a chunk into stripes of nearly equal length.

    Args:
        segments: bytes of each layer group, in order; a stripe never crosses from one to the next.
        stripe: the longest allowed (bytes, a multiple of `block`).
        block: stripes but the last of a segment are multiples of this (bytes).
    """
    spans: list[Span] = []
    start = 0
    for segment in segments:
        count = -(-segment // stripe)
        length = -(-segment // (count * block)) * block
        for offset in range(0, segment, length):
            spans.append(Span(start + offset, min(length, segment - offset)))
        start += segment
    return tuple(spans)
