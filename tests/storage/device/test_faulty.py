"""The device that fails on command."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.storage.config import DeviceConfig
from forebay.storage.device import open_device, prepare_device
from forebay.storage.device._native import crc32c
from forebay.storage.device.base import Device, Direction, Op
from forebay.storage.device.faulty import FaultyDevice
from forebay.storage.testing import DeviceConformance, Memory, run
from forebay.storage.testing.driving import collect

UUID = bytes(16)
SIZE = 64 << 10
READ, WRITE = Direction.READ, Direction.WRITE


class TestFaultless(DeviceConformance):
    def open(self, folder: Path) -> Device:
        config = DeviceConfig.model_validate({"name": "ram0", "kind": "dram", "size": "64MiB"})
        return FaultyDevice(open_device(config, pool_uuid=UUID))


class Rig:
    """A faulty file of sixteen slots, all written."""

    def __init__(self, folder: Path) -> None:
        fields = {"name": "ssd0", "kind": "file", "size": 16 * SIZE, "path": folder / "data"}
        config = DeviceConfig.model_validate(fields)
        prepare_device(config, UUID)
        self.device = FaultyDevice(open_device(config, pool_uuid=UUID))
        self.memory = Memory(16 * SIZE, os.urandom(16 * SIZE))
        self.data = self.memory[:]
        assert self.results(WRITE) == [SIZE] * 16
        self.memory[:] = bytes(16 * SIZE)

    def ops(self, direction: Direction = READ, slots: range = range(16)) -> list[Op]:
        return [Op(i, direction, i * SIZE, SIZE, [self.memory.piece(i * SIZE, SIZE)], True) for i in slots]

    def results(self, direction: Direction = READ) -> list[int]:
        done = run(self.device, self.ops(direction))
        return [done[i].result for i in range(16)]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.device.close()


def test_failing(rig: Rig) -> None:
    rig.device.fail(errno.EIO)
    assert rig.results() == rig.results(WRITE) == [-errno.EIO] * 16
    assert rig.memory[:] == bytes(16 * SIZE)
    assert rig.device.stats().errors == 32
    rig.device.clear()
    assert rig.results() == [SIZE] * 16
    assert rig.memory[:] == rig.data


def test_the_next_two(rig: Rig) -> None:
    rig.device.fail(errno.EIO, count=2)
    assert rig.results() == [-errno.EIO] * 2 + [SIZE] * 14
    assert rig.results() == [SIZE] * 16


def test_every_third(rig: Rig) -> None:
    rig.device.fail(errno.EIO, every=3)
    assert [i for i, result in enumerate(rig.results()) if result < 0] == [2, 5, 8, 11, 14]


def test_a_range(rig: Rig) -> None:
    rig.device.fail(errno.EIO, offsets=range(3 * SIZE + 100, 5 * SIZE))
    assert [i for i, result in enumerate(rig.results()) if result < 0] == [3, 4]


@pytest.mark.parametrize(("fault", "code"), [("read_only", errno.EROFS), ("full", errno.ENOSPC)])
def test_writes_alone(rig: Rig, fault: str, code: int) -> None:
    getattr(rig.device, fault)()
    assert rig.results(WRITE) == [-code] * 16
    assert rig.results() == [SIZE] * 16


def test_short(rig: Rig) -> None:
    rig.device.short(count=1)
    done = run(rig.device, rig.ops())
    assert [done[i].result for i in range(16)] == [-errno.EIO] + [SIZE] * 15
    assert done[0].checksum == 0
    assert rig.memory[: SIZE // 2] == rig.data[: SIZE // 2]
    assert rig.memory[SIZE // 2 : SIZE] == bytes(SIZE // 2)


def test_vanishing(rig: Rig) -> None:
    rig.device.hang(count=2)
    rig.device.submit(rig.ops(slots=range(2)))
    rig.device.vanish()
    assert [completion.result for completion in collect(rig.device, 2)] == [-errno.ENODEV] * 2
    assert rig.results() == rig.results(WRITE) == [-errno.ENODEV] * 16


def test_delay(rig: Rig) -> None:
    rig.device.delay(0.2)
    begin = time.monotonic()
    assert rig.results() == [SIZE] * 16
    assert 0.2 <= time.monotonic() - begin < 5
    assert rig.memory[:] == rig.data


def test_hanging_until_cleared(rig: Rig) -> None:
    rig.device.hang()
    rig.device.submit(rig.ops())
    assert not select.select([rig.device.fileno()], [], [], 0.1)[0]
    assert rig.device.stats().in_flight == 16
    rig.device.cancel(range(4))
    assert {completion.result for completion in collect(rig.device, 4)} == {-errno.ECANCELED}
    rig.device.clear()
    assert {completion.result for completion in collect(rig.device, 12)} == {SIZE}
    assert rig.memory[: 4 * SIZE] == bytes(4 * SIZE)
    assert rig.memory[4 * SIZE :] == rig.data[4 * SIZE :]


def test_stuck_cannot_be_cancelled(rig: Rig) -> None:
    rig.device.hang(stuck=True, count=1)
    rig.device.submit(rig.ops(slots=range(1)))
    rig.device.cancel([0])
    assert rig.device.poll() == []
    rig.device.clear()
    assert [completion.result for completion in collect(rig.device, 1)] == [SIZE]


def test_silent_corruption(rig: Rig) -> None:
    rig.device.corrupt(2 * SIZE + 5000, 1)
    done = run(rig.device, rig.ops())
    assert {completion.result for completion in done.values()} == {SIZE}
    wrong = [i for i in range(16) if done[i].checksum != crc32c(rig.data[i * SIZE : (i + 1) * SIZE])]
    assert wrong == [2]
    rig.device.corrupt()
    done = run(rig.device, rig.ops())
    # Flipping slot 2's bit again restores that block, but its others are wrong now.
    assert all(done[i].checksum != crc32c(rig.data[i * SIZE : (i + 1) * SIZE]) for i in range(16))


def test_corrupting_while_busy(rig: Rig) -> None:
    rig.device.submit(rig.ops())
    rig.device.corrupt(15 * SIZE, 1)
    assert {completion.result for completion in collect(rig.device, 16)} == {SIZE}


def test_closing_while_hung(rig: Rig) -> None:
    rig.device.hang()
    rig.device.submit(rig.ops())
    begin = time.monotonic()
    rig.device.close()
    assert time.monotonic() - begin < 2
    assert {completion.result for completion in rig.device.poll()} == {-errno.ECANCELED}


def test_throttled(rig: Rig) -> None:
    """One operation after the other, and their times say so."""
    rig.device.throttle(80 * SIZE)
    begin = time.monotonic()
    done = run(rig.device, rig.ops())
    assert 0.19 <= time.monotonic() - begin < 2
    assert rig.memory[:] == rig.data
    seconds = sorted(completion.seconds for completion in done.values())
    assert seconds[0] >= 0.01
    assert seconds[-1] >= 0.19
