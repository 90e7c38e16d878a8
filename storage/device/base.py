"""The device contract: asynchronous scatter/gather reads and writes into memory.

A device is an address space of bytes with a queue in front. `submit` never blocks: it hands a batch of
operations to the device's own threads, which move the bytes with the GIL released. `poll` collects what
has finished, in any order. Every kind of device passes `forebay.storage.testing.DeviceConformance`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Direction(enum.IntEnum):
    """Which way the bytes go. Reads are served before writes (loads before stores)."""

    READ = 0
    WRITE = 1


class Op(NamedTuple):
    """One operation: `length` bytes at `offset` of the device, scattered over or gathered from `memory`."""

    tag: int
    """Chosen by the caller (64 bit, unique among what is outstanding on this device)."""
    direction: int
    """A `Direction`."""
    offset: int
    """Bytes from the start of the device; a multiple of `Device.alignment`."""
    length: int
    """Bytes; equals the sum of the lengths in `memory`. Any length: the device pads up to `alignment`."""
    memory: Sequence[tuple[int, int]]
    """(address, length) pieces in order. The caller keeps them alive until the completion arrives."""
    checksum: bool
    """Whether to compute the CRC-32C of the `length` bytes on the way."""


class Completion(NamedTuple):
    """What became of one `Op`."""

    tag: int
    result: int
    """Bytes moved (always the full `length`), or a negative errno. A short transfer is reported as -EIO."""
    checksum: int
    """CRC-32C of the bytes, 0 when not asked for or when the operation failed."""
    seconds: float
    """From `submit` to completion."""


class DeviceStats(NamedTuple):
    """Counters since the device was opened; all monotonic except the two depths."""

    read_bytes: int
    write_bytes: int
    read_ops: int
    write_ops: int
    errors: int
    read_busy_ns: int
    """Wall time with at least one read outstanding."""
    read_saturated_ns: int
    """Wall time with 4 or more reads outstanding: bytes over it is the device's bandwidth, not the load's."""
    read_saturated_bytes: int
    blocked_ns: int
    """Time that the device's threads spent blocked in I/O system calls while work was outstanding."""
    cpu_ns: int
    """CPU time of the device's threads."""
    queued: int
    """Operations accepted and not yet started."""
    in_flight: int
    """Operations started and not yet finished."""


class Device(ABC):
    """Bytes with a queue. One thread of the owner calls it; its own threads move the data."""

    name: str
    kind: str
    capacity: int
    """Bytes."""
    alignment: int
    """Offsets are multiples of this (bytes)."""
    largest: int = 1 << 20
    """Bytes that reach the device as one request; a longer operation is split on the way."""
    persistent: bool
    """Whether the content survives the process and a reboot."""

    @abstractmethod
    def submit(self, ops: Sequence[Op]) -> None:
        """Queue `ops` in order. Never blocks, never raises for what a device can cause: that is a completion."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """All completions since the last call; empty when there are none."""

    @abstractmethod
    def fileno(self) -> int:
        """An eventfd that becomes readable when all operations of one `submit` are over, or one failed.

        `poll` drains it. It may find completions before: whoever wants each as it comes looks without waiting.
        """

    @abstractmethod
    def cancel(self, tags: Iterable[int]) -> None:
        """Give up on operations that are late.

        A queued operation completes with -ECANCELED and touches no memory. One in flight through a staging
        buffer completes with -ECANCELED at once and its bytes are thrown away when they arrive. One whose
        bytes go straight to the caller's memory cannot be given up: it completes when the device answers.
        Unknown tags are ignored.
        """

    @abstractmethod
    def register(self, address: int, length: int) -> bool:
        """Register caller memory for faster I/O (pinned once instead of per operation).

        Returns whether it was registered; False (memlock limit, no io_uring) costs speed and nothing else.
        """

    @abstractmethod
    def stats(self) -> DeviceStats:
        """Counters since opening."""

    @abstractmethod
    def flush(self) -> None:
        """Make completed writes durable (fdatasync where it applies). Blocks."""

    @abstractmethod
    def close(self) -> None:
        """Stop the threads and release everything; idempotent. Outstanding operations complete or are dropped first."""
