"""Memory as a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay.storage.config import DeviceConfig
from forebay.storage.device import open_device, prepare_device, shared_memory
from forebay.storage.device.base import Device, Direction, Op
from forebay.storage.errors import DeviceError
from forebay.storage.testing import DeviceConformance, Memory, run

UUID = bytes(range(16))


def config(**fields: object) -> DeviceConfig:
    return DeviceConfig.model_validate({"name": "ram0", "kind": "dram", "size": "64MiB", **fields})


class TestDram(DeviceConformance):
    def open(self, folder: Path) -> Device:
        return open_device(config(), pool_uuid=UUID)


class TestSharedDram(DeviceConformance):
    def open(self, folder: Path) -> Device:
        return open_device(config(), pool_uuid=UUID, shared=f"forebay-test-{os.getpid()}")


def test_two_processes_see_one_region() -> None:
    name = f"forebay-test-{os.getpid()}-two"
    first, second = (open_device(config(), pool_uuid=UUID, shared=name) for _ in range(2))
    memory = Memory(8192, os.urandom(4096))
    run(first, [Op(1, Direction.WRITE, 4096, 4096, [memory.piece(0, 4096)], False)])
    first.close()
    run(second, [Op(1, Direction.READ, 4096, 4096, [memory.piece(4096, 4096)], False)])
    assert memory[:4096] == memory[4096:]
    assert (shared_memory.FOLDER / name).exists()
    second.close()
    assert not (shared_memory.FOLDER / name).exists()


def test_what_a_crash_left_is_replaced() -> None:
    path = shared_memory.FOLDER / f"forebay-test-{os.getpid()}-crash"
    path.write_bytes(b"old")
    device = open_device(config(), pool_uuid=UUID, shared=path.name)
    assert path.stat().st_size == device.capacity
    device.close()
    assert not path.exists()


def test_sizes_must_agree() -> None:
    name = f"forebay-test-{os.getpid()}-sizes"
    first = open_device(config(), pool_uuid=UUID, shared=name)
    with pytest.raises(DeviceError, match="use one size everywhere"):
        open_device(config(), pool_uuid=UUID, capacity=1 << 20, shared=name)
    first.close()
    assert not (shared_memory.FOLDER / name).exists()


def test_capacity_is_one_ranks_share() -> None:
    assert prepare_device(config(), UUID) == 64 << 20
    device = open_device(config(), pool_uuid=UUID, capacity=(10 << 20) + 100)
    assert device.capacity == 10 << 20
    device.close()


@pytest.mark.parametrize("shared", [None, f"forebay-test-{os.getpid()}-big"])
def test_too_large(shared: str | None) -> None:
    with pytest.raises(DeviceError, match=r"device 'ram0': .*(make it smaller|make the device smaller)"):
        open_device(config(size=1 << 50), pool_uuid=UUID, shared=shared)
    assert shared is None or not (shared_memory.FOLDER / shared).exists()


def test_missing_numa_node() -> None:
    with pytest.raises(DeviceError, match="cannot bind to numa_node 63"):
        open_device(config(numa_node=63), pool_uuid=UUID)


def test_without_huge_pages_and_on_node_0() -> None:
    device = open_device(config(huge_pages=False, numa_node=0), pool_uuid=UUID)
    memory = Memory(8192, os.urandom(4096))
    run(device, [Op(1, Direction.WRITE, 0, 4096, [memory.piece(0, 4096)], False)])
    run(device, [Op(1, Direction.READ, 0, 4096, [memory.piece(4096, 4096)], False)])
    assert memory[:4096] == memory[4096:]
    device.close()
