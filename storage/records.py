"""The journal's format: what one record looks like, and what a file of them amounts to.

    file    = MAGIC version:u32, then frames
    frame   = length:u32 crc32:u32 payload[length]              what one write recorded: all of it counts, or nothing
    payload = records
    record  = length:u32 kind:u8 number:u64 body[length]
    HEADER  = JSON: pool uuid, stripe, lanes, devices           alone in the first frame
    NAMESPACE = fingerprint[16], JSON                           for people
    PUT     = name:u16 stripes:u32 lanes:u16, name, then per stripe length:u32, extent:i64, copy:i64, and per lane and
              stripe CRC-32C:u32                                chunk `number` (its generation) is ready
    DROP    = generation:u64, repeated                          chunks are gone, their slots may hold anything
    RESET   = fingerprint[16]                                   all chunks of a namespace so far are gone

Numbers are little-endian, and `number` is 0 where it means nothing. A file is read up to the first frame that is cut
off or fails its checksum: what comes after is as good as lost in a crash.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np

from forebay.storage.errors import JournalError
from forebay.storage.index import Entry
from forebay.storage.plan import Span

MAGIC = b"FOREBAYJ"
FORMAT = 1
_PREAMBLE = struct.Struct("<8sI")
_FRAME = struct.Struct("<II")
_HEAD = struct.Struct("<IBQ")
_PUT = struct.Struct("<HIH")
FINGERPRINT = 16
RECORDS_PER_FRAME = 1000
"""In a file that is written at once."""


class Kind(enum.IntEnum):
    """Of a record."""

    HEADER = 1
    NAMESPACE = 2
    PUT = 3
    DROP = 4
    RESET = 5


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


def whole_file(content: Iterable[bytes]) -> Iterator[bytes]:
    """A journal that holds these records; the first is the header."""
    rest = iter(content)
    yield _PREAMBLE.pack(MAGIC, FORMAT)
    yield frame(islice(rest, 1))
    while batch := list(islice(rest, RECORDS_PER_FRAME)):
        yield frame(batch)


def frame(content: Iterable[bytes]) -> bytes:
    """Records that count together or not at all."""
    payload = b"".join(content)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def record(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    """A record of any kind."""
    return _HEAD.pack(len(body), kind, number) + body


def header_record(header: Header) -> bytes:
    """The HEADER record."""
    devices = [astuple(device) for device in header.devices]
    content = {"pool": header.pool_uuid.hex(), "stripe": header.stripe, "lanes": header.lanes, "devices": devices}
    return record(Kind.HEADER, 0, json.dumps(content).encode())


def namespace_record(fingerprint: bytes, description: str) -> bytes:
    """The NAMESPACE record."""
    return record(Kind.NAMESPACE, 0, fingerprint + description.encode())


def put_size(entry: Entry) -> int:
    """Length of the PUT record of a chunk (bytes)."""
    return _HEAD.size + _PUT.size + len(entry.name) + 20 * len(entry.spans) + len(entry.checksums)


def put_record(entry: Entry) -> bytes:
    """The PUT record of a ready chunk."""
    count = len(entry.spans)
    head = _PUT.pack(len(entry.name), count, len(entry.checksums) // (4 * count))
    copies = entry.copies or b"\xff" * (8 * count)
    body = b"".join((head, entry.name, _lengths(entry.spans), entry.extents, copies, entry.checksums))
    return record(Kind.PUT, entry.generation, body)


def drop_record(generations: Sequence[int]) -> bytes:
    """The DROP record of some chunks."""
    return record(Kind.DROP, 0, struct.pack(f"<{len(generations)}Q", *generations))


def reset_record(fingerprint: bytes) -> bytes:
    """The RESET record."""
    return record(Kind.RESET, 0, fingerprint)


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
    header, start = _read_header(data, origin)
    found = Replay(header, {}, end=start)
    for begin, end in _sound_frames(data, start):
        _apply(found, data, begin, end)
        found.end = end
    found.live = _live_bytes(data, found)
    return found


def _live_bytes(data: bytes, found: Replay) -> int:
    """Bytes of the PUT records that still count."""
    positions = np.fromiter(found.puts.values(), np.int64, len(found.puts))
    lengths = np.frombuffer(data, np.uint8)[positions[:, None] + np.arange(4)].view("<u4")
    return int(lengths.sum()) + _HEAD.size * len(positions)


def _sound_frames(data: bytes, position: int) -> Iterator[tuple[int, int]]:
    """Where the payload of each frame begins and ends, up to the first that is not whole."""
    view, size = memoryview(data), len(data)
    while position + _FRAME.size <= size:
        length, crc = _FRAME.unpack_from(data, position)
        begin, end = position + _FRAME.size, position + _FRAME.size + length
        if not 0 < length <= size - begin or zlib.crc32(view[begin:end]) != crc:
            return
        yield begin, end
        position = end


def _apply(found: Replay, data: bytes, position: int, end: int) -> None:
    """The records of one frame."""
    unpack, size, puts = _HEAD.unpack_from, _HEAD.size, found.puts
    put, drop, last = int(Kind.PUT), int(Kind.DROP), found.last_generation
    while position + size <= end:
        length, kind, number = unpack(data, position)
        if kind == put:
            puts[number] = position
            if number > last:
                last = number
        elif kind == drop:
            for (generation,) in struct.iter_unpack("<Q", data[position + size : position + size + length]):
                puts.pop(generation, None)
        else:
            _apply_rare(found, data, kind, data[position + size : position + size + length])
        position += size + length
    found.last_generation = last


def _apply_rare(found: Replay, data: bytes, kind: int, body: bytes) -> None:
    """Unknown kinds are skipped: they come from a newer minor version."""
    if kind == Kind.NAMESPACE:
        found.namespaces[body[:FINGERPRINT]] = body[FINGERPRINT:].decode(errors="replace")
    elif kind == Kind.RESET:
        name = _HEAD.size + _PUT.size
        for generation, at in list(found.puts.items()):
            if data.startswith(body, at + name):
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
    try:
        begin, end = next(_sound_frames(data, _PREAMBLE.size), (0, 0))
        if not end or _HEAD.unpack_from(data, begin)[1] != Kind.HEADER:
            raise ValueError("its checksum does not match")
        content: dict[str, Any] = json.loads(data[begin + _HEAD.size : end])
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
    unpack_put, head, body = _PUT.unpack_from, _HEAD.size, _HEAD.size + _PUT.size
    entries = []
    for generation, at in found.puts.items():
        fields = _put_fields(*unpack_put(data, at + head))
        name, lengths, extents, copies, checksums = fields.unpack_from(data, at + body)
        entries.append(Entry(name, generation, _spans(lengths), extents, copies, checksums, recovered=True))
    return entries


@lru_cache(maxsize=256)
def _put_fields(name: int, stripes: int, lanes: int) -> struct.Struct:
    """What follows in a PUT: name, lengths, extents, copies, checksums."""
    return struct.Struct(f"{name}s{4 * stripes}s{8 * stripes}s{8 * stripes}s{4 * stripes * lanes}s")


def live_records(data: bytes, found: Replay) -> Iterator[bytes]:
    """The records a compacted journal keeps."""
    yield header_record(found.header)
    for fingerprint, description in found.namespaces.items():
        yield namespace_record(fingerprint, description)
    for at in found.puts.values():
        yield data[at : at + _HEAD.size + _HEAD.unpack_from(data, at)[0]]
