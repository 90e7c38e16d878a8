"""A preallocated file or a raw block device, read and written past the page cache."""

from __future__ import annotations

import errno
import functools
import logging
import os
from pathlib import Path

from forebay.storage.config import BLOCK, DeviceConfig
from forebay.storage.device import blockdev, direct, preparing, superblock
from forebay.storage.device._native import Queue
from forebay.storage.device.engine import NativeDevice
from forebay.storage.errors import DeviceError
from forebay.storage.units import format_bytes

log = logging.getLogger(__name__)

MAX_THREADS = 16
"""Threads of the `threads` engine: enough to saturate an SSD with stripes (our choice)."""


class FileDevice(NativeDevice):
    """An SSD: one file on it, or all of it.

    O_DIRECT through io_uring; threads where io_uring is refused, the page cache where O_DIRECT is refused and
    `buffered` allows it. The first 4 KiB hold a superblock; offset 0 of the device comes after it.
    """

    def __init__(self, config: DeviceConfig, *, pool_uuid: bytes, capacity: int | None = None) -> None:
        path = preparing.path_of(config)
        size = _check(config, path, pool_uuid, capacity)
        fd, alignments = _open_for_io(config, path)
        try:
            queue = _open_queue(config, fd, size, alignments)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.largest = blockdev.largest_request(fd) or self.largest
        super().__init__(
            queue, name=config.name, kind="file", capacity=size, alignment=alignments.offset, persistent=True
        )

    @staticmethod
    def format(config: DeviceConfig, pool_uuid: bytes) -> int:
        """Make the file or block device ready; see `preparing.prepare`."""
        return preparing.prepare(config, pool_uuid)

    def flush(self) -> None:
        """fdatasync: what was written survives a power cut."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """As `NativeDevice.close`, and close the file."""
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _check(config: DeviceConfig, path: Path, pool_uuid: bytes, capacity: int | None) -> int:
    """The capacity to use, if the superblock is this pool's and the space is there."""
    fd = preparing.open_file(config, path, os.O_RDWR)
    try:
        label = preparing.own(config, path, os.pread(fd, superblock.SIZE, 0), pool_uuid)
        room = os.lseek(fd, 0, os.SEEK_END) - superblock.SIZE
    finally:
        os.close(fd)
    if room < label.capacity:
        raise DeviceError(
            config.name, f"{path} has {format_bytes(max(0, room))} where {format_bytes(label.capacity)} were allocated",
            "run `forebay pool create` to restore it",
        )  # fmt: skip
    if capacity is None:
        return label.capacity
    if capacity > label.capacity:
        raise DeviceError(
            config.name, f"{path} has {format_bytes(label.capacity)}, {format_bytes(capacity)} are asked for",
            "run `forebay pool create` to enlarge it",
        )  # fmt: skip
    return capacity // BLOCK * BLOCK


def _open_for_io(config: DeviceConfig, path: Path) -> tuple[int, direct.Alignments]:
    try:
        found = _open_direct(path)
    except OSError as error:
        raise preparing.explain(config, path, error) from None
    if found is not None:
        return found
    if not config.buffered:
        raise DeviceError(
            config.name, f"{path} refuses O_DIRECT", "set `buffered: true` to use the page cache, or give another path"
        )
    log.warning("device %r: %s refuses O_DIRECT; using the page cache", config.name, path)
    return preparing.open_file(config, path, os.O_RDWR), direct.BUFFERED


def _open_direct(path: Path) -> tuple[int, direct.Alignments] | None:
    """None where the file system refuses O_DIRECT, at once or when it is used."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return None
        raise
    try:
        alignments = direct.probe(fd)
    except OSError:
        os.close(fd)
        raise
    if alignments is not None:
        return fd, alignments
    os.close(fd)
    return None


def _open_queue(config: DeviceConfig, fd: int, capacity: int, alignments: direct.Alignments) -> Queue:
    if config.engine != "threads":
        try:
            return _queue("io_uring", config.depth, config, fd, capacity, alignments)
        except OSError as error:
            reason = error.strerror
        if config.engine == "io_uring":
            raise DeviceError(
                config.name,
                f"io_uring is refused ({reason})",
                "allow it (seccomp, kernel.io_uring_disabled) or set `engine: auto`",
            )
        _say_threads(reason)
    return _queue("threads", min(config.depth, MAX_THREADS), config, fd, capacity, alignments)


def _queue(
    engine: str, depth: int, config: DeviceConfig, fd: int, capacity: int, alignments: direct.Alignments
) -> Queue:
    return Queue(
        engine, f"kv-{config.name}", capacity, depth, fd=fd, start=superblock.SIZE, offset_alignment=alignments.offset,
        length_alignment=alignments.length, memory_alignment=alignments.memory,
    )  # fmt: skip


@functools.cache
def _say_threads(reason: str) -> None:
    log.warning("io_uring is refused here (%s; Docker's default seccomp profile does that): using threads", reason)
