"""Making the devices of a pool ready, or only saying what that would take."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from forebay.storage.config import BLOCK, DeviceConfig, PoolConfig
from forebay.storage.device import blockdev, prepare_device, superblock
from forebay.storage.device.preparing import path_of
from forebay.storage.device.vhost_user import Connection
from forebay.storage.errors import DeviceError
from forebay.storage.lanes import pool_uuid
from forebay.storage.maintenance.locked import locked


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What making a device ready takes. All in bytes."""

    name: str
    kind: str
    path: str
    size: int
    """What the pool will have of it."""
    allocate: int
    """Disk space still to be taken."""
    free: int
    """Disk space, or memory, that is free."""

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return (self.size if self.kind == "dram" else self.allocate) <= self.free


def plan(config: PoolConfig) -> list[DevicePlan]:
    """What `create` would do to every device. Changes nothing.

    Raises:
        DeviceError: a path that cannot be used.
    """
    plans = {"dram": _plan_memory, "file": _plan_file, "spdk": _plan_drive}
    return [plans[device.kind](device) for device in config.devices]


def create(config: PoolConfig) -> list[DevicePlan]:
    """Make every device ready: allocate files, label them. Again is harmless; content is kept.

    Returns:
        What is there now.

    Raises:
        PoolBusyError: an engine uses the pool.
        DeviceError, PoolError: a device or the pool's folder cannot be used.
    """
    with locked(config):
        identity = pool_uuid(config)
        for device in config.devices:
            prepare_device(device, identity)
        return plan(config)


def _plan_memory(device: DeviceConfig) -> DevicePlan:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return DevicePlan(device.name, device.kind, "", device.size or 0, 0, available)


def _plan_file(device: DeviceConfig) -> DevicePlan:
    path = path_of(device)
    try:
        if path.is_block_device():
            return _plan_block(device, path)
        taken = path.stat().st_blocks * 512 if path.exists() else 0
        stats = os.statvfs(path.parent)
    except OSError as error:
        raise DeviceError(device.name, f"{path}: {error.strerror}", "create the folder, or correct the path") from None
    if device.size is None:
        raise DeviceError(device.name, f"{path} is a file without a size", "add one, for example `size: 100GiB`")
    size = device.size // BLOCK * BLOCK
    needed = max(0, size + superblock.SIZE - taken)
    return DevicePlan(device.name, device.kind, str(path), size, needed, stats.f_bavail * stats.f_frsize)


def _plan_drive(device: DeviceConfig) -> DevicePlan:
    connection = Connection(device.name, path_of(device))
    connection.close()
    return _plan_whole(device, path_of(device), connection.disk.capacity)


def _plan_block(device: DeviceConfig, path: Path) -> DevicePlan:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = blockdev.device_size(fd)
    finally:
        os.close(fd)
    return _plan_whole(device, path, size)


def _plan_whole(device: DeviceConfig, path: Path, total: int) -> DevicePlan:
    room = total - superblock.SIZE
    size = room if device.size is None else device.size
    return DevicePlan(device.name, device.kind, str(path), size // BLOCK * BLOCK, max(0, size - room), 0)
