"""Making a file or block device ready: created, allocated, labelled, and nobody else's."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from forebay.storage.config import BLOCK, DeviceConfig
from forebay.storage.device import blockdev, superblock
from forebay.storage.device.superblock import Superblock
from forebay.storage.errors import DeviceError
from forebay.storage.units import format_bytes

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


def prepare(config: DeviceConfig, pool_uuid: bytes) -> int:
    """Create the file if need be, allocate real blocks and write the superblock; idempotent, safe in parallel.

    Returns:
        The capacity in bytes.

    Raises:
        DeviceError: no room or permission, a missing folder, or content that is not this pool's.
    """
    path = path_of(config)
    raw = path.is_block_device()
    if config.size is None and not raw:
        raise DeviceError(config.name, f"{path} is a file without a size", "add one, for example `size: 100GiB`")
    fd = _open_locked(config, path, os.O_RDWR | (0 if raw else os.O_CREAT))
    try:
        return _prepare(config, path, fd, pool_uuid)
    finally:
        os.close(fd)


def _open_locked(config: DeviceConfig, path: Path, flags: int) -> int:
    """One process at a time, until the descriptor is closed."""
    while True:
        fd = open_file(config, path, flags)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # another process failed to prepare it and removed it meanwhile


def _prepare(config: DeviceConfig, path: Path, fd: int, pool_uuid: bytes) -> int:
    block = os.pread(fd, superblock.SIZE, 0)
    raw = blockdev.is_block_device(fd)
    before = own(config, path, block, pool_uuid) if superblock.is_ours(block) else None
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
        raise explain(config, path, error) from None


def _allocate(config: DeviceConfig, path: Path, fd: int, label: Superblock) -> None:
    """Real blocks, so that no write finds the disk full."""
    try:
        os.posix_fallocate(fd, 0, superblock.SIZE + label.capacity)
        os.fsync(fd)
    except OSError as error:
        raise explain(config, path, error) from None


def own(config: DeviceConfig, path: Path, block: bytes, pool_uuid: bytes) -> Superblock:
    """The superblock in `block`, if it is this device's of this pool.

    Raises:
        DeviceError: it is not.
    """
    label = superblock.unpack(block, config.name, str(path))
    if label.pool_uuid != pool_uuid:
        raise DeviceError(
            config.name, f"{path} belongs to another pool ({label.pool_uuid.hex()}, not {pool_uuid.hex()})",
            superblock.remedy(str(path)),
        )  # fmt: skip
    if label.name != config.name:
        raise DeviceError(config.name, f"{path} is device {label.name!r} of this pool", "correct the name or the path")
    return label


def open_file(config: DeviceConfig, path: Path, flags: int) -> int:
    """os.open, with errors that name the device and the fix."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise explain(config, path, error) from None


def path_of(config: DeviceConfig) -> Path:
    """The path, which the configuration made sure of."""
    assert config.path is not None, "DeviceConfig requires a path for kind `file`"
    return config.path


def explain(config: DeviceConfig, path: Path, error: OSError) -> DeviceError:
    """What went wrong with a file, and what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        stats = os.statvfs(path.parent)
        free = format_bytes(stats.f_bavail * stats.f_frsize)
        size = "its size" if config.size is None else format_bytes(config.size)
        return DeviceError(config.name, f"{path} needs {size}, {free} are free", "make it smaller, or free some space")
    if error.errno == errno.ENOENT and not path.parent.is_dir():
        return DeviceError(config.name, f"the folder {path.parent} does not exist", "create it, or correct the path")
    fix = _FIXES.get(error.errno or 0, "check the path")
    return DeviceError(config.name, f"{path}: {error.strerror}", fix)
