"""Devices of the pool and how to open them."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.storage.config import BLOCK, DeviceConfig
from forebay.storage.device.base import Device
from forebay.storage.host_memory import HostMemory


def open_device(
    config: DeviceConfig,
    *,
    pool_uuid: bytes,
    capacity: int | None = None,
    shared: str | None = None,
    memory: HostMemory | None = None,
) -> Device:
    """Open a device that `prepare_device` has made ready.

    Args:
        config: which device.
        pool_uuid: 16 bytes that name the pool; a file of another pool is refused.
        capacity: bytes to use instead of `config.size`: one rank's share of a `dram` region, or less of a file.
        shared: a name under which the processes of this host share one `dram` region. Without it the region
            belongs to this process.
        memory: what this process shares with servers of drives; every `spdk` device needs some of it.

    Raises:
        DeviceError: one line that names the device, what is wrong and the fix.
    """
    if config.kind == "dram":
        from forebay.storage.device.dram import DramDevice

        return DramDevice(config, capacity=capacity, shared=shared)
    if config.kind == "spdk":
        from forebay.storage.device.spdk import SpdkDevice

        assert memory is not None, "open_lane shares memory where a device needs it"
        return SpdkDevice(config, pool_uuid=pool_uuid, capacity=capacity, memory=memory)
    from forebay.storage.device.file import FileDevice

    return FileDevice(config, pool_uuid=pool_uuid, capacity=capacity)


def host_memory(devices: Sequence[DeviceConfig], more: int = 0) -> HostMemory | None:
    """What a process has to share with the servers of its drives, and `more` bytes; None where there are none.

    Raises:
        PoolError: there are not enough huge pages.
    """
    if all(device.kind != "spdk" for device in devices):
        return None
    from forebay.storage.device.spdk import memory_needed

    return HostMemory(more + sum(memory_needed(device) for device in devices if device.kind == "spdk"))


def capacity_of(config: DeviceConfig, pool_uuid: bytes) -> int:
    """Bytes that a device of the pool has, for whoever moves none of them itself; made ready where that takes asking.

    A drive with a `size` is not asked, because a server may have one client: who opens it finds out if it has less.

    Raises:
        DeviceError: as `prepare_device`.
    """
    if config.kind == "spdk" and config.size is not None:
        return config.size // BLOCK * BLOCK
    return prepare_device(config, pool_uuid) or 0


def prepare_device(config: DeviceConfig, pool_uuid: bytes) -> int | None:
    """Create, allocate and label what the device needs; again is harmless, also from several processes at once.

    Returns:
        The capacity in bytes of a file or drive, which a whole drive without a `size` tells only here. `config.size`
        of a `dram` region, which needs no preparation.

    Raises:
        DeviceError: no room, no permission, or something that is not this pool's is there.
    """
    if config.kind == "dram":
        return config.size
    if config.kind == "spdk":
        from forebay.storage.device.spdk import SpdkDevice

        return SpdkDevice.format(config, pool_uuid)
    from forebay.storage.device.file import FileDevice

    return FileDevice.format(config, pool_uuid)
