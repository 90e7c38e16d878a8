"""Opening one lane of the pool: the devices as one worker process sees them."""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

from forebay.storage.config import PoolConfig
from forebay.storage.device import host_memory, open_device, prepare_device
from forebay.storage.errors import DeviceError, PoolError
from forebay.storage.plan import lane_slots
from forebay.storage.transfer import TransferEngine


def pool_uuid(config: PoolConfig) -> bytes:
    """The pool's identity (16 bytes), made by whichever process asks first and kept in `<path>/uuid`.

    Raises:
        PoolError: the folder cannot be created or written.
    """
    try:
        config.path.mkdir(parents=True, exist_ok=True)
        return _read_or_create(config.path / "uuid")
    except OSError as error:
        raise PoolError(
            f"pool folder {config.path}: {error.strerror}; give `path` a folder that can be written"
        ) from None


def _read_or_create(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        text = os.read(descriptor, 64).strip()
        if not text:
            text = uuid.uuid4().hex.encode()
            os.pwrite(descriptor, text + b"\n", 0)
            os.fsync(descriptor)
        return uuid.UUID(text.decode()).bytes
    except ValueError:
        raise PoolError(f"{path} does not hold a pool's uuid; run `forebay pool clear` to start afresh") from None
    finally:
        os.close(descriptor)


def check_paths(config: PoolConfig) -> None:
    """Find at once what would fail later: folders that are missing or cannot be written, devices that are not there.

    Raises:
        DeviceError, PoolError: one line with the path and the fix.
    """
    for device in config.devices:
        if device.path is None or device.path.exists():
            continue
        if device.kind == "spdk":
            raise DeviceError(device.name, f"socket {device.path} does not exist", "run `forebay spdk attach`")
        if device.path.is_relative_to("/dev"):
            raise DeviceError(device.name, f"{device.path} does not exist", "name a block device that `lsblk` shows")
        folder = device.path.parent
        if folder != config.path and not os.access(folder, os.W_OK):
            state = "cannot be written" if folder.exists() else "does not exist"
            raise DeviceError(device.name, f"folder {folder} {state}", "create it, or correct `path`")
    pool_uuid(config)


def open_lane(
    config: PoolConfig, lane: int = 0, lanes: int = 1, *, shared_memory: bool = False, staging: int = 0
) -> TransferEngine:
    """Open every device and the engine that moves one lane's bytes.

    Args:
        config: the pool.
        lane: this process's lane.
        lanes: lanes in all.
        shared_memory: `dram` regions are one piece of memory that all worker processes see (replicated layouts).
        staging: bytes that the caller will take from the engine's `memory`, where there is one, for its own buffers.

    Raises:
        DeviceError, PoolError: a device or the pool's folder cannot be used.
    """
    identity, memory = pool_uuid(config), host_memory(config.devices, staging)
    devices, slots, whole = [], [], []
    for device in config.devices:
        capacity = prepare_device(device, identity) or 0
        per_lane = lane_slots(capacity, lanes, config.stripe)
        slots.append(per_lane)
        private = device.kind == "dram" and not shared_memory
        whole.append(not private)
        shared = f"forebay-{identity.hex()}-{device.name}" if device.kind == "dram" and shared_memory else None
        devices.append(
            open_device(
                device,
                pool_uuid=identity,
                capacity=per_lane * config.stripe if private else capacity,
                shared=shared,
                memory=memory,
            )
        )
    return TransferEngine(config, devices, lane=lane, lane_slots=slots, lane_offsets=whole, memory=memory)
