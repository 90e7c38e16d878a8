"""A preallocated file or a raw block device, read and written past the page cache."""

from __future__ import annotations

import errno
import fcntl
import functools
import logging
import os
from pathlib import Path

from forebay.storage.config import BLOCK, DeviceConfig
from forebay.storage.device import blockdev, direct, superblock
from forebay.storage.device._native import Queue
from forebay.storage.device.engine import NativeDevice
from forebay.storage.device.superblock import Superblock
from forebay.storage.errors import DeviceError
from forebay.storage.units import format_bytes

log = logging.getLogger(__name__)

MAX_THREADS = 16
"""Threads of the `threads` engine: enough to saturate an SSD with stripes (our choice)."""

_FIXES = {
    errno.ENOENT: "run `forebay pool create`, or correct the path",
    errno.EACCES: "give this user read and write permission",
    errno.EPERM: "give this user read and write permission",
    errno.EROFS: "remount it read-write, or give another path",
    errno.EISDIR: "give the path of a file in it",
    errno.ENOTDIR: "correct the path",
    errno.ENXIO: "check that the drive is still there",
    errno.ENODEV: "check that the drive is still there",
}


class FileDevice(NativeDevice):
    """An SSD: one file on it, or all of it.

    O_DIRECT through io_uring; threads where io_uring is refused, the page cache where O_DIRECT is refused and
    `buffered` allows it. The first 4 KiB hold a superblock; offset 0 of the device comes after it.
    """

    def __init__(self, config: DeviceConfig, *, pool_uuid: bytes, capacity: int | None = None) -> None:
        path = _path(config)
        size = _check(config, path, pool_uuid, capacity)
        fd, alignments = _open_for_io(config, path)
        try:
            queue = _open_queue(config, fd, size, alignments)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        super().__init__(
            queue, name=config.name, kind="file", capacity=size, alignment=alignments.offset, persistent=True
        )

    @staticmethod
    def format(config: DeviceConfig, pool_uuid: bytes) -> int:
        """Create the file if need be, allocate real blocks and write the superblock; idempotent, safe in parallel.

        Returns:
            The capacity in bytes.

        Raises:
            DeviceError: no room or permission, a missing folder, or content that is not this pool's.
        """
        path = _path(config)
        raw = path.is_block_device()
        if config.size is None and not raw:
            raise DeviceError(config.name, f"{path} is a file without a size", "add one, for example `size: 100GiB`")
        fd = _open(config, path, os.O_RDWR | (0 if raw else os.O_CREAT))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # until closed
            return _prepare(config, path, fd, pool_uuid)
        finally:
            os.close(fd)

    def flush(self) -> None:
        """fdatasync: what was written survives a power cut."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        """As `NativeDevice.close`, and close the file."""
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


# ---- preparing ----


def _prepare(config: DeviceConfig, path: Path, fd: int, pool_uuid: bytes) -> int:
    block = os.pread(fd, superblock.SIZE, 0)
    raw = blockdev.is_block_device(fd)
    before = _own(config, path, block, pool_uuid) if superblock.is_ours(block) else None
    if raw:
        blockdev.refuse_in_use(config.name, path, fd)
    if before is None and raw:
        blockdev.refuse_foreign(config.name, path, fd)
    if before is None and not raw and block:
        raise DeviceError(config.name, f"{path} exists and is not a forebay device", "give another path, or delete it")
    label = Superblock(pool_uuid, config.name, _capacity(config, path, fd, raw))
    if raw:
        _write(config, path, fd, label)
    elif before is None:
        _create(config, path, fd, label)
    else:
        _resize(config, path, fd, before, label)
    return label.capacity


def _create(config: DeviceConfig, path: Path, fd: int, label: Superblock) -> None:
    """The superblock comes first, so that an interrupted preparation is recognised as ours and completed later."""
    try:
        _write(config, path, fd, label)
        _allocate(config, path, fd, label)
    except DeviceError:
        path.unlink(missing_ok=True)
        raise


def _resize(config: DeviceConfig, path: Path, fd: int, before: Superblock, label: Superblock) -> None:
    """The superblock never promises more than there is."""
    size = os.fstat(fd).st_size
    if label.capacity >= before.capacity:
        try:
            _allocate(config, path, fd, label)
        except DeviceError:
            os.ftruncate(fd, size)
            raise
    if label != before:
        _write(config, path, fd, label)
    if size > superblock.SIZE + label.capacity:
        os.ftruncate(fd, superblock.SIZE + label.capacity)


def _capacity(config: DeviceConfig, path: Path, fd: int, raw: bool) -> int:
    size = config.size
    if raw:
        room = blockdev.device_size(fd) - superblock.SIZE
        if size is not None and size > room:
            raise DeviceError(
                config.name, f"size {format_bytes(size)} is more than the {format_bytes(room)} of {path}",
                "make it smaller, or leave size out to use all of it",
            )  # fmt: skip
        size = room if size is None else size
    assert size is not None, "checked before the file was made"
    return size // BLOCK * BLOCK


def _write(config: DeviceConfig, path: Path, fd: int, label: Superblock) -> None:
    try:
        os.pwrite(fd, label.pack(), 0)
        os.fsync(fd)
    except OSError as error:
        raise _explain(config, path, error) from None


def _allocate(config: DeviceConfig, path: Path, fd: int, label: Superblock) -> None:
    """Real blocks, so that no write finds the disk full."""
    try:
        os.posix_fallocate(fd, 0, superblock.SIZE + label.capacity)
        os.fsync(fd)
    except OSError as error:
        raise _explain(config, path, error) from None


# ---- opening ----


def _check(config: DeviceConfig, path: Path, pool_uuid: bytes, capacity: int | None) -> int:
    """The capacity to use, if the superblock is this pool's and the space is there."""
    fd = _open(config, path, os.O_RDWR)
    try:
        label = _own(config, path, os.pread(fd, superblock.SIZE, 0), pool_uuid)
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


def _own(config: DeviceConfig, path: Path, block: bytes, pool_uuid: bytes) -> Superblock:
    label = superblock.unpack(block, config.name, str(path))
    if label.pool_uuid != pool_uuid:
        raise DeviceError(
            config.name, f"{path} belongs to another pool ({label.pool_uuid.hex()}, not {pool_uuid.hex()})",
            superblock.remedy(str(path)),
        )  # fmt: skip
    if label.name != config.name:
        raise DeviceError(config.name, f"{path} is device {label.name!r} of this pool", "correct the name or the path")
    return label


def _open_for_io(config: DeviceConfig, path: Path) -> tuple[int, direct.Alignments]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _explain(config, path, error) from None
    else:
        alignments = direct.probe(fd)
        if alignments is not None:
            return fd, alignments
        os.close(fd)
    if not config.buffered:
        raise DeviceError(
            config.name, f"{path} refuses O_DIRECT", "set `buffered: true` to use the page cache, or give another path"
        )
    log.warning("device %r: %s refuses O_DIRECT; using the page cache", config.name, path)
    return _open(config, path, os.O_RDWR), direct.BUFFERED


def _open(config: DeviceConfig, path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _explain(config, path, error) from None


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


# ---- both ----


def _path(config: DeviceConfig) -> Path:
    assert config.path is not None, "DeviceConfig requires a path for kind `file`"
    return config.path


def _explain(config: DeviceConfig, path: Path, error: OSError) -> DeviceError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        stats = os.statvfs(path.parent)
        free = format_bytes(stats.f_bavail * stats.f_frsize)
        size = "its size" if config.size is None else format_bytes(config.size)
        return DeviceError(config.name, f"{path} needs {size}, {free} are free", "make it smaller, or free some space")
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return DeviceError(config.name, f"the folder {path.parent} does not exist", "create it, or correct the path")
    fix = _FIXES.get(error.errno or 0, "check the path")
    return DeviceError(config.name, f"{path}: {error.strerror}", fix)
