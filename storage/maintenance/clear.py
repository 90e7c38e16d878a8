"""Emptying a pool, and giving its space back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from forebay.storage.config import DeviceConfig, PoolConfig
from forebay.storage.device import superblock
from forebay.storage.errors import DeviceError, PoolError
from forebay.storage.lanes import pool_uuid
from forebay.storage.maintenance.locked import locked


def clear(config: PoolConfig, *, delete: bool = False) -> list[Path]:
    """Forget everything the pool holds; the next engine finds it cold. Also mends a damaged journal or uuid.

    Args:
        config: the pool.
        delete: give the space back as well: delete the files, and take the label off drives.

    Returns:
        What was deleted or wiped.

    Raises:
        PoolBusyError: an engine uses the pool.
        DeviceError: a device is not this pool's and was left alone, as were those after it.
    """
    with locked(config):
        removed = _forget(config)
        if delete:
            identity = pool_uuid(config)
            removed += [path for device in config.devices if (path := _give_back(device, identity))]
            removed += _remove([config.profile_path, config.path / "uuid", config.lock_path])
            with contextlib.suppress(OSError):  # something else lies there, which is not ours to delete
                config.path.rmdir()
        return removed


def _forget(config: PoolConfig) -> list[Path]:
    removed = _remove([config.journal_path, config.journal_path.with_suffix(".new")])
    try:
        pool_uuid(config)
    except PoolError:
        removed += _remove([config.path / "uuid"])
    return removed


def _remove(paths: list[Path]) -> list[Path]:
    there = [path for path in paths if path.exists()]
    for path in there:
        path.unlink()
    return there


def _give_back(device: DeviceConfig, identity: bytes) -> Path | None:
    """Delete a file, or take the label off a drive, if it is this pool's."""
    path = device.path
    if device.kind == "spdk":
        from forebay.storage.device.spdk import SpdkDevice

        SpdkDevice.wipe(device, identity)
        return path
    if path is None or not path.exists():
        return None
    with path.open("rb") as file:
        block = file.read(superblock.SIZE)
    label = superblock.unpack(block, device.name, str(path))
    if label.pool_uuid != identity:
        raise DeviceError(device.name, f"{path} belongs to another pool", superblock.remedy(str(path)))
    if path.is_block_device():
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(fd, bytes(superblock.SIZE), 0)
            os.fsync(fd)
        finally:
            os.close(fd)
    else:
        path.unlink()
    return path
