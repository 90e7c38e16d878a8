"""A drive that SPDK serves from user space, reached through memory that we share with it: no system call, no copy.

The other side is a vhost-user-blk server: SPDK's `vhost_create_blk_controller`, or QEMU's storage daemon. Should it go
away, what is in flight fails, and the device attaches again when it is back.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from forebay.storage.config import BLOCK, DeviceConfig
from forebay.storage.device import blockdev, preparing, superblock
from forebay.storage.device._native import Queue, virtqueue
from forebay.storage.device.base import Direction
from forebay.storage.device.engine import NativeDevice
from forebay.storage.device.superblock import Superblock
from forebay.storage.device.vhost_user import TIMEOUT, Connection, eventfds
from forebay.storage.errors import DeviceError, ForebayError
from forebay.storage.host_memory import HostMemory
from forebay.storage.units import format_bytes

logger = logging.getLogger(__name__)

SLOT = 1 << 20
"""Bytes that one operation moves at a time where its memory is not shared (our choice: from here on drives are at
their full speed)."""
SEGMENTS = 126
"""Parts of one request, at most: what SPDK takes."""
SECTOR = 512
RETRY = 1.0
"""Seconds between two attempts to attach again (our choice)."""


def memory_needed(config: DeviceConfig) -> int:
    """Bytes of shared memory that a device takes: its queue, and room for what does not lie in that memory."""
    return virtqueue(0, config.depth)[4] + BLOCK + config.depth * SLOT


class SpdkDevice(NativeDevice):
    """An SSD behind a vhost-user-blk socket.

    Bytes that lie in `memory` are moved without a copy, others through a part of it. The first 4 KiB of the drive
    hold a superblock; offset 0 of the device comes after it.

    Args:
        config: `path` is the socket.
        pool_uuid: 16 bytes; a drive of another pool is refused.
        memory: of this process, shared with every server.
        capacity: bytes to use, if less than all.

    Raises:
        DeviceError: no server, or a drive that is not this pool's.
    """

    def __init__(
        self, config: DeviceConfig, *, pool_uuid: bytes, memory: HostMemory, capacity: int | None = None
    ) -> None:
        share = _Share.take(memory, config.depth)
        connection = _connect(config, share)
        try:
            label = _read_label(config, connection, share, pool_uuid)
            if capacity is not None and capacity > label.capacity:
                raise DeviceError(
                    config.name,
                    f"{config.path} has {format_bytes(label.capacity)}, {format_bytes(capacity)} are asked for",
                    "run `forebay pool create` to enlarge it",
                )
            size = label.capacity if capacity is None else capacity // BLOCK * BLOCK
            queue = share.queue(config, connection, config.depth, size, start=superblock.SIZE)
        except BaseException:
            connection.close()
            raise
        self.largest = SLOT
        self.memory = memory
        super().__init__(
            queue, name=config.name, kind="spdk", capacity=size, alignment=connection.disk.block, persistent=True
        )
        self._flushes = connection.disk.flush
        self._keeper = _Keeper(config, queue, share, connection, pool_uuid, label)

    @staticmethod
    def format(config: DeviceConfig, pool_uuid: bytes) -> int:
        """Label the drive, unless it is labelled already; the capacity in bytes.

        Raises:
            DeviceError: no server, too small, or something that is not this pool's is there.
        """
        with _raw(config) as raw:
            return _label(config, raw, pool_uuid)

    @staticmethod
    def wipe(config: DeviceConfig, pool_uuid: bytes) -> None:
        """Take the label off.

        Raises:
            DeviceError: no server, or a drive that is not this pool's.
        """
        with _raw(config) as raw:
            preparing.own(config, preparing.path_of(config), raw.read(0, superblock.SIZE), pool_uuid)
            raw.write(0, bytes(superblock.SIZE))

    def register(self, address: int, length: int) -> bool:
        """Whether it lies in the memory that is shared: no other can be moved directly."""
        return self.memory.holds(address, length)

    def flush(self) -> None:
        """What was written survives a power cut; nothing to do where the server says that it does anyway."""
        if self._flushes:
            self._queue.flush()

    def close(self) -> None:
        """As `NativeDevice.close`, and leave the server."""
        self._keeper.stop()
        super().close()
        self._keeper.leave()


@dataclass(frozen=True, slots=True)
class _Share:
    """The parts of the shared memory that belong to one device."""

    memory: HostMemory
    ring: int
    arena: int

    @classmethod
    def take(cls, memory: HostMemory, depth: int) -> Self:
        ring = memory.take(virtqueue(0, depth)[4])
        return cls(memory, ring, memory.take(depth * SLOT))

    def queue(self, config: DeviceConfig, connection: Connection, depth: int, capacity: int, start: int) -> Queue:
        disk = connection.disk
        return Queue(
            "vhost", f"kv-{config.name}", capacity, depth, start=start, offset_alignment=disk.block,
            length_alignment=disk.block, memory_alignment=SECTOR, shared=(self.memory.address, self.memory.size),
            ring=self.ring, arena=self.arena, slot=SLOT,
            segments=(min(SEGMENTS, disk.segments), min(SLOT, disk.segment) // disk.block * disk.block),
        )  # fmt: skip

    def start(self, connection: Connection, queue: Queue, depth: int) -> None:
        """Have the queue served; it is attached before the server may look at it."""
        kick, call = eventfds()
        try:
            queue.attach(kick, call)
            connection.start(virtqueue(self.ring, depth)[:4], kick, call)
        except BaseException:
            queue.detach()
            raise
        finally:
            os.close(kick)
            os.close(call)


class _Raw:
    """The whole drive, read and written one operation at a time, before its queue is put to use."""

    def __init__(self, config: DeviceConfig, connection: Connection, share: _Share) -> None:
        self._config, self._connection, self._share = config, connection, share
        self.disk = connection.disk
        self._memory = ctypes.create_string_buffer(blockdev.HEAD)

    def __enter__(self) -> Self:
        self._queue = self._share.queue(self._config, self._connection, 1, self.disk.capacity, start=0)
        try:
            self._share.start(self._connection, self._queue, 1)
        except BaseException:
            self._queue.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(DeviceError):  # the next call to the server says so
            self._connection.stop()
        self._queue.detach()
        self._queue.close()

    def read(self, offset: int, size: int) -> bytes:
        self._move(Direction.READ, offset, size)
        return self._memory.raw[:size]

    def write(self, offset: int, data: bytes) -> None:
        ctypes.memmove(self._memory, data, len(data))
        self._move(Direction.WRITE, offset, len(data))
        if self.disk.flush:
            self._queue.flush()

    def _move(self, direction: Direction, offset: int, size: int) -> None:
        self._queue.submit([(0, direction, offset, size, [(ctypes.addressof(self._memory), size)], False)])
        select.select([self._queue.fileno()], [], [], TIMEOUT)
        done = self._queue.poll()
        if not done or done[0][1] < 0:
            what = os.strerror(-done[0][1]) if done else f"no answer within {TIMEOUT:g} s"
            raise DeviceError(
                self._config.name, f"{self._config.path}: the drive cannot be accessed ({what})", "see the server's log"
            )


@contextlib.contextmanager
def _raw(config: DeviceConfig) -> Iterator[_Raw]:
    """The drive, for as long as the context lasts, with memory of its own."""
    memory = HostMemory(memory_needed(config.model_copy(update={"depth": 1})))
    try:
        share = _Share.take(memory, 1)
        connection = _connect(config, share)
        try:
            with _Raw(config, connection, share) as raw:
                yield raw
        finally:
            connection.close()
    finally:
        memory.close()


def _connect(config: DeviceConfig, share: _Share) -> Connection:
    connection = Connection(config.name, preparing.path_of(config))
    try:
        if connection.disk.read_only:
            raise DeviceError(config.name, f"{config.path} is read-only", "create the controller without `readonly`")
        if connection.disk.block > BLOCK:
            raise DeviceError(
                config.name, f"{config.path} has blocks of {connection.disk.block} bytes", f"at most {BLOCK} are served"
            )
        connection.share(share.memory.fd, share.memory.address, share.memory.size)
    except BaseException:
        connection.close()
        raise
    return connection


def _read_label(config: DeviceConfig, connection: Connection, share: _Share, pool_uuid: bytes) -> Superblock:
    with _Raw(config, connection, share) as raw:
        return preparing.own(config, preparing.path_of(config), raw.read(0, superblock.SIZE), pool_uuid)


def _label(config: DeviceConfig, raw: _Raw, pool_uuid: bytes) -> int:
    path, room = preparing.path_of(config), raw.disk.capacity - superblock.SIZE
    if room < max(BLOCK, config.size or 0):
        raise DeviceError(
            config.name, f"{path} has {format_bytes(max(0, room))}, {format_bytes(config.size or BLOCK)} are asked for",
            "make `size` smaller, or leave it out to use all of the drive",
        )  # fmt: skip
    label = Superblock(pool_uuid, config.name, (config.size or room) // BLOCK * BLOCK)
    head = raw.read(0, min(blockdev.HEAD, raw.disk.capacity))
    if superblock.is_ours(head):
        if preparing.own(config, path, head, pool_uuid) == label:
            return label.capacity
    elif found := blockdev.foreign(head, raw.read(raw.disk.capacity - SECTOR, SECTOR)):
        raise DeviceError(config.name, f"{path} contains {found}", "wipe the drive if it may be lost, or give another")
    raw.write(0, label.pack())
    return label.capacity


class _Keeper:
    """Attaches the queue, and again whenever the server comes back."""

    def __init__(
        self, config: DeviceConfig, queue: Queue, share: _Share, connection: Connection, pool_uuid: bytes,
        label: Superblock,
    ) -> None:  # fmt: skip
        self._config, self._queue, self._share = config, queue, share
        self._pool_uuid, self._label = pool_uuid, label
        self._connection: Connection | None = connection
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            share.start(connection, queue, config.depth)
        except BaseException:
            queue.close()
            os.close(self._stop)
            raise
        self._thread = threading.Thread(target=self._run, name=f"kv-{config.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Attach no more."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        os.close(self._stop)
        self._stop = -1

    def leave(self) -> None:
        """Close the connection, after the queue was closed."""
        if self._connection is not None:
            try:
                self._connection.stop()
            except DeviceError as error:
                logger.warning("%s", error)
            self._connection.close()
            self._connection = None

    def _run(self) -> None:
        while not self._stopped():
            if self._connection is None:
                self._attach()
            elif self._connection.gone():
                logger.warning("device %r: the server of %s is gone", self._config.name, self._config.path)
                self._connection.close()
                self._connection = None
                self._queue.detach()

    def _stopped(self) -> bool:
        """After waiting for something to happen."""
        watched = [self._stop] if self._connection is None else [self._stop, self._connection.fileno()]
        ready, _, _ = select.select(watched, [], [], RETRY if self._connection is None else None)
        return self._stop in ready

    def _attach(self) -> None:
        connection: Connection | None = None
        try:
            if not Path(preparing.path_of(self._config)).exists():
                return
            connection = _connect(self._config, self._share)
            if _read_label(self._config, connection, self._share, self._pool_uuid) != self._label:
                raise DeviceError(self._config.name, f"{self._config.path} serves another drive now", "restart")
            self._share.start(connection, self._queue, self._config.depth)
        except (ForebayError, OSError) as error:
            if connection is not None:
                connection.close()
            logger.debug("%s", error)
            return
        self._connection = connection
        logger.warning("device %r: attached to %s again", self._config.name, self._config.path)
