"""Drives behind a vhost-user-blk socket, served by QEMU's storage daemon."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.storage.config import DeviceConfig
from forebay.storage.device import host_memory, open_device, prepare_device, superblock
from forebay.storage.device.base import Device, Direction
from forebay.storage.testing import DeviceConformance
from tests.storage.device.vhost import StorageDaemon, huge_pages, need_daemon

UUID = bytes(range(16))
MIB = 1 << 20
SIZE = 64 * MIB
READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture(scope="module", autouse=True)
def pages() -> Iterator[None]:
    need_daemon()
    with huge_pages(100):
        yield


def config(folder: Path, **fields: object) -> DeviceConfig:
    return DeviceConfig.model_validate(
        {"name": "nvme0", "kind": "spdk", "path": folder / "socket", "size": SIZE, "depth": 8, **fields}
    )


def opened(wanted: DeviceConfig) -> Device:
    """Prepared and open; its memory is closed after it."""
    prepare_device(wanted, UUID)
    memory = host_memory([wanted])
    assert memory is not None
    try:
        device = open_device(wanted, pool_uuid=UUID, memory=memory)
    except BaseException:
        memory.close()
        raise
    close = device.close

    def close_both() -> None:
        close()
        memory.close()

    device.close = close_both  # type: ignore[method-assign]
    return device


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StorageDaemon]:
    with StorageDaemon(tmp_path / "disk", tmp_path / "socket", SIZE + superblock.SIZE) as running:
        yield running


@pytest.fixture
def device(tmp_path: Path, daemon: StorageDaemon) -> Iterator[Device]:
    with contextlib.closing(opened(config(tmp_path))) as made:
        yield made


class TestStorageDaemon(DeviceConformance):
    DEPTH = 8
    running: dict[Path, StorageDaemon]

    @pytest.fixture(autouse=True)
    def daemons(self) -> Iterator[None]:
        self.running = {}
        yield
        for daemon in self.running.values():
            daemon.kill()

    def open(self, folder: Path) -> Device:
        folder.mkdir(exist_ok=True)
        if folder not in self.running:
            self.running[folder] = StorageDaemon(folder / "disk", folder / "socket", SIZE + superblock.SIZE)
            self.running[folder].start()
        return opened(config(folder, depth=self.DEPTH))


class TestShallow(TestStorageDaemon):
    DEPTH = 1
