"""Devices of the pool and how to open them."""

from __future__ import annotations

from forebay.storage.config import DeviceConfig
from forebay.storage.device.base import Device


def open_device(
    config: DeviceConfig, *, pool_uuid: bytes, capacity: int | None = None, shared: str | None = None
) -> Device:
    """Open a device that `prepare_device` has made ready.

    Args:
        config: which device.
        pool_uuid: 16 bytes that name the pool; a file of another pool is refused.
        capacity: bytes to use instead of `config.size`: one rank's share of a `dram` region, or less of a file.
        shared: a name under which the processes of this host share one `dram` region. Without it the region
            belongs to this process.

    Raises:
        DeviceError: one line that names the device, what is wrong and the fix.
    """
    if config.kind == "dram":
        from forebay.storage.device.dram import DramDevice

        return DramDevice(config, capacity=capacity, shared=shared)
    from forebay.storage.device.file import FileDevice

    return FileDevice(config, pool_uuid=pool_uuid, capacity=capacity)


def prepare_device(config: DeviceConfig, pool_uuid: bytes) -> int | None:
    """Create, allocate and label what the device needs; again is harmless, also from several processes at once.

    Returns:
        The capacity in bytes of a `file`, which a raw block device without a `size` tells only here. `config.size`
        of a `dram` region, which needs no preparation.

    Raises:
        DeviceError: no room, no permission, or something that is not this pool's is there.
    """
    if config.kind == "dram":
        return config.size
    from forebay.storage.device.file import FileDevice

    return FileDevice.format(config, pool_uuid)
