"""The journal's format: what one record looks like, and what a file of them amounts to.

    file    = MAGIC version:u32, then records
    record  = length:u32 crc32:u32 kind:u8 payload[length]      the checksum covers kind and payload
    HEADER  = JSON: pool uuid, stripe, lanes, devices           first record, once
    NAMESPACE = fingerprint[16], JSON                           before the first chunk of a namespace
    PUT     = generation:u64 name:u16 stripes:u32 lanes:u16, name, then per stripe length:u32, extent:i64, copy:i64,
              and per lane and stripe CRC-32C:u32               a chunk is ready
    DROP    = generation:u64, repeated                          chunks are gone, their slots may hold anything
    RESET   = fingerprint[16]                                   all chunks of a namespace so far are gone

Numbers are little-endian. A file is read up to the first record that is cut off or fails its checksum: what comes
after is as good as lost in a crash.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from typing import Any

from forebay.storage.errors import JournalError
from forebay.storage.index import Entry
from forebay.storage.plan import Span

MAGIC = b"FOREBAYJ"
FORMAT = 1
_PREAMBLE = struct.Struct("<8sI")
_FRAME = struct.Struct("<IIB")
_PUT = struct.Struct("<QHIH")
_GENERATION = struct.Struct("<Q")
FINGERPRINT = 16


class Kind(enum.IntEnum):
    """Of a record."""

    HEADER = 1
    NAMESPACE = 2
    PUT = 3
    DROP = 4
    RESET = 5


_PUT_KIND, _DROP_KIND = int(Kind.PUT), int(Kind.DROP)
_STARTS = [zlib.crc32(bytes((kind,))) for kind in range(256)]
"""Checksum of the kind alone."""


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device as the journal's places refer to it, by position in the header's list."""

    name: str
    kind: str
    path: str
    slots: int
    """Per lane."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the places in a journal mean."""

    pool_uuid: bytes
    stripe: int
    lanes: int
    devices: tuple[DeviceRecord, ...]


@dataclass(slots=True)
class Replay:
    """What a journal amounts to."""

    header: Header
    namespaces: dict[bytes, str]
    """JSON of each namespace by fingerprint."""
    puts: dict[int, int] = field(default_factory=dict)
    """Generation -> position of the record, of the chunks that are there, oldest first."""
    last_generation: int = 0
    end: int = 0
    """Length of the sound part (bytes)."""
    live: int = 0
    """Bytes of records that a compacted journal would keep."""


def preamble() -> bytes:
    """The start of a journal."""
    return _PREAMBLE.pack(MAGIC, FORMAT)


def record(kind: int, payload: bytes = b"") -> bytes:
    """A framed record."""
    return _FRAME.pack(len(payload), zlib.crc32(payload, _STARTS[kind]), kind) + payload


def header_record(header: Header) -> bytes:
    """The HEADER record."""
    devices = [astuple(device) for device in header.devices]
    content = {"pool": header.pool_uuid.hex(), "stripe": header.stripe, "lanes": header.lanes, "devices": devices}
    return record(Kind.HEADER, json.dumps(content).encode())


def namespace_record(fingerprint: bytes, description: str) -> bytes:
    """The NAMESPACE record."""
    return record(Kind.NAMESPACE, fingerprint + description.encode())


def put_size(entry: Entry) -> int:
    """Length of the PUT record of a chunk (bytes)."""
    return _FRAME.size + _PUT.size + len(entry.name) + 20 * len(entry.spans) + len(entry.checksums)


def put_record(entry: Entry) -> bytes:
    """The PUT record of a ready chunk."""
    count = len(entry.spans)
    head = _PUT.pack(entry.generation, len(entry.name), count, len(entry.checksums) // (4 * count))
    copies = entry.copies or b"\xff" * (8 * count)
    return record(Kind.PUT, b"".join((head, entry.name, _lengths(entry.spans), entry.extents, copies, entry.checksums)))


def drop_record(generations: Sequence[int]) -> bytes:
    """The DROP record."""
    return record(Kind.DROP, struct.pack(f"<{len(generations)}Q", *generations))


def reset_record(fingerprint: bytes) -> bytes:
    """The RESET record."""
    return record(Kind.RESET, fingerprint)


@lru_cache(maxsize=256)
def _lengths(spans: tuple[Span, ...]) -> bytes:
    return struct.pack(f"<{len(spans)}I", *(span.length for span in spans))


@lru_cache(maxsize=256)
def _spans(lengths: bytes) -> tuple[Span, ...]:
    spans, offset = [], 0
    for (length,) in struct.iter_unpack("<I", lengths):
        spans.append(Span(offset, length))
        offset += length
    return tuple(spans)


def replay(data: bytes, origin: str) -> Replay | None:
    """Read a journal; None when it is empty.

    Args:
        data: the whole file.
        origin: its path, for messages.

    Raises:
        JournalError: it is not a journal, of another format, or its header is damaged.
    """
    if not data:
        return None
    _check_preamble(data, origin)
    header, position = _read_header(data, origin)
    found = Replay(header, {}, end=position)
    _walk(data, found)
    return found


def _walk(data: bytes, found: Replay) -> None:
    """Apply all sound records after the header."""
    unpack_frame, frame, crc32 = _FRAME.unpack_from, _FRAME.size, zlib.crc32
    unpack_generation = _GENERATION.unpack_from
    view, end, position, puts, last = memoryview(data), len(data), found.end, found.puts, 0
    while position + frame <= end:
        length, crc, kind = unpack_frame(data, position)
        payload = position + frame
        stop = payload + length
        if stop > end or crc32(view[position + 8 : stop]) != crc:
            break
        if kind == _PUT_KIND:
            (generation,) = unpack_generation(data, payload)
            puts[generation] = position
            if generation > last:
                last = generation
        elif kind == _DROP_KIND:
            for generation in struct.unpack_from(f"<{length >> 3}Q", data, payload):
                puts.pop(generation, None)
        else:
            _apply(found, data, kind, data[payload:stop])
        position = stop
    found.end, found.last_generation = position, last
    found.live = sum([frame + unpack_frame(data, put)[0] for put in puts.values()])


def _apply(found: Replay, data: bytes, kind: int, payload: bytes) -> None:
    """One of the rare records. Unknown kinds are skipped: they come from a newer minor version."""
    if kind == Kind.NAMESPACE:
        found.namespaces[payload[:FINGERPRINT]] = payload[FINGERPRINT:].decode(errors="replace")
    elif kind == Kind.RESET:
        name = _FRAME.size + _PUT.size
        for generation, at in list(found.puts.items()):
            if data.startswith(payload, at + name):
                del found.puts[generation]


def _check_preamble(data: bytes, origin: str) -> None:
    """Raise unless `data` starts like a journal of our format."""
    if len(data) < _PREAMBLE.size or not data.startswith(MAGIC):
        raise JournalError(f"{origin}: not a forebay journal; give the pool another path, or remove the file")
    found = _PREAMBLE.unpack_from(data)[1]
    if found != FORMAT:
        raise JournalError(f"{origin}: format {found}, this version reads format {FORMAT}; run `forebay pool clear`")


def _read_header(data: bytes, origin: str) -> tuple[Header, int]:
    """The header and where it ends. It was written before the file got its name, so it is never cut off."""
    start = _PREAMBLE.size
    try:
        length, crc, kind = _FRAME.unpack_from(data, start)
        end = start + _FRAME.size + length
        if kind != Kind.HEADER or zlib.crc32(data[start + 8 : end]) != crc:
            raise ValueError("its checksum does not match")
        content: dict[str, Any] = json.loads(data[start + _FRAME.size : end])
        devices = tuple(DeviceRecord(*device) for device in content["devices"])
        return Header(bytes.fromhex(content["pool"]), int(content["stripe"]), int(content["lanes"]), devices), end
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise JournalError(
            f"{origin}: the header is damaged ({error}); run `forebay pool clear` for an empty pool"
        ) from None


def decode(data: bytes, found: Replay) -> list[Entry]:
    """The chunks of a replayed journal, oldest first. Places are as the header numbers them.

    What the devices really hold is not known before a load has checked it: the host may have lost power with writes
    on their way, or a device may have been put back from a backup. So none of them counts as verified.
    """
    unpack_put, size, skip = _PUT.unpack_from, _PUT.size, _FRAME.size
    entries = []
    for at in found.puts.values():
        generation, name_length, count, lanes = unpack_put(data, at + skip)
        name = at + skip + size
        lengths = name + name_length
        extents = lengths + 4 * count
        copies = extents + 8 * count
        checksums = copies + 8 * count
        spans = _spans(data[lengths:extents])
        entry = Entry(data[name:lengths], generation, spans, data[extents:copies], data[copies:checksums])
        entry.checksums = data[checksums : checksums + 4 * count * lanes]
        entry.ready = entry.recorded = True
        entry.verified = False
        entries.append(entry)
    return entries


def live_records(data: bytes, found: Replay) -> list[bytes]:
    """The records a compacted journal keeps, as they are."""
    start = _PREAMBLE.size
    kept = [data[start : start + _FRAME.size + _FRAME.unpack_from(data, start)[0]]]
    kept += [namespace_record(fingerprint, description) for fingerprint, description in found.namespaces.items()]
    kept += [data[at : at + _FRAME.size + _FRAME.unpack_from(data, at)[0]] for at in found.puts.values()]
    return kept
