"""A device that does not answer: a pipe stands in for it, as io_uring reads it like a file that never comes."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Callable, Iterator

import pytest

from forebay.storage.device._native import Queue, crc32c
from forebay.storage.testing import Memory

LENGTH = 10_000
READ, WRITE = 0, 1


class HungDevice:
    """Depth 4; operations hang until the test feeds or drains the pipe. Memory must be page-aligned."""

    def __init__(self, direction: int) -> None:
        output, self.input = os.pipe()
        self.output = output
        self.fd = output if direction == READ else self.input
        self.direction = direction
        self.queue = Queue("io_uring", "hung", 1 << 30, 4, fd=self.fd, memory_alignment=4096)
        self.memory = Memory(16 * 16384)

    def op(self, tag: int, *, staged: bool, checksum: bool = False) -> tuple[object, ...]:
        pieces = [(self.memory.address + 16384 * tag + (64 if staged else 0), LENGTH)]
        return (tag, self.direction, 0, LENGTH, pieces, checksum)

    def started(self, count: int) -> None:
        self.until(lambda: self.queue.stats()[11] == count)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, self.queue.stats()
            time.sleep(0.001)

    def done(self, count: int) -> dict[int, tuple[int, int]]:
        found = {}
        while len(found) < count:
            assert select.select([self.queue.fileno()], [], [], 10)[0], found
            found.update({completion[0]: completion[1:3] for completion in self.queue.poll()})
        return found

    def close(self) -> None:
        self.queue.close(0.1)
        os.close(self.input)
        os.close(self.output)


@pytest.fixture
def reading() -> Iterator[HungDevice]:
    device = HungDevice(READ)
    yield device
    device.close()


def test_queued_and_staged_reads_are_given_up_at_once(reading: HungDevice) -> None:
    reading.queue.submit([reading.op(tag, staged=True) for tag in range(8)])
    reading.started(4)
    reading.queue.cancel(list(range(8)))
    assert reading.done(8) == dict.fromkeys(range(8), (-errno.ECANCELED, 0))
    reading.started(4)  # the places stay taken: the kernel may still write into their buffers
    os.write(reading.input, b"late" * LENGTH)
    reading.started(0)
    assert reading.memory[:] == bytes(reading.memory.size)
    assert reading.queue.poll() == []
    assert reading.queue.stats()[4] == 0  # nobody's error


def test_the_queue_works_on_after_a_late_answer(reading: HungDevice) -> None:
    reading.queue.submit([reading.op(0, staged=True)])
    reading.started(1)
    reading.queue.cancel([0])
    reading.queue.submit([reading.op(1, staged=True, checksum=True)])
    os.write(reading.input, b"a" * LENGTH + b"b" * LENGTH)
    assert reading.done(2)[0] == (-errno.ECANCELED, 0)
    reading.started(0)
    assert reading.memory[16384 + 64 : 16384 + 64 + LENGTH] in (b"a" * LENGTH, b"b" * LENGTH)


def test_direct_reads_cannot_be_given_up(reading: HungDevice) -> None:
    reading.queue.submit([reading.op(0, staged=False, checksum=True)])
    reading.started(1)
    reading.queue.cancel([0])
    assert not select.select([reading.queue.fileno()], [], [], 0.1)[0]
    os.write(reading.input, b"x" * LENGTH)
    assert reading.done(1) == {0: (LENGTH, crc32c(b"x" * LENGTH))}


@pytest.mark.parametrize("staged", [True, False])
def test_what_comes_in_parts_is_joined(reading: HungDevice, staged: bool) -> None:
    reading.queue.submit([reading.op(0, staged=staged, checksum=True)])
    data = os.urandom(LENGTH)
    for start in range(0, LENGTH, 1000):
        reading.started(1)
        os.write(reading.input, data[start : start + 1000])
        time.sleep(0.002)
    assert reading.done(1) == {0: (LENGTH, crc32c(data))}
    start = 64 if staged else 0
    assert reading.memory[start : start + LENGTH] == data


def test_many_pieces_that_come_in_parts(reading: HungDevice) -> None:
    pieces = [(reading.memory.address + 16384 * i, 3000) for i in range(7)]
    reading.queue.submit([(1, READ, 0, 21_000, pieces, True)])
    data = os.urandom(21_000)
    for start in range(0, 21_000, 700):
        reading.started(1)
        os.write(reading.input, data[start : start + 700])
        time.sleep(0.001)
    assert reading.done(1) == {1: (21_000, crc32c(data))}
    assert b"".join(reading.memory[16384 * i : 16384 * i + 3000] for i in range(7)) == data


def test_staged_writes_are_given_up() -> None:
    device = HungDevice(WRITE)
    try:
        os.set_blocking(device.input, True)
        device.queue.submit([device.op(tag % 16, staged=True) for tag in range(14)])
        device.until(lambda: device.queue.stats()[3] >= 6)  # 64 KiB fit into the pipe
        device.queue.cancel(list(range(14)))
        results = device.done(14)
        assert set(results.values()) == {(LENGTH, 0), (-errno.ECANCELED, 0)}
        os.set_blocking(device.output, False)
        device.until(lambda: not _drain(device.output) and device.queue.stats()[11] == 0)
    finally:
        device.close()


def test_closing_a_hung_device_leaves_it_behind(reading: HungDevice) -> None:
    threads, descriptors = set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    hung = HungDevice(READ)
    hung.queue.submit([hung.op(tag, staged=tag % 2 == 0) for tag in range(6)])
    hung.started(4)
    begin = time.monotonic()
    assert hung.queue.close(0.2) is False
    assert hung.queue.close() is False
    assert 0.2 <= time.monotonic() - begin < 2
    assert [completion[:2] for completion in hung.queue.poll()] == [(4, -errno.ECANCELED), (5, -errno.ECANCELED)]
    with pytest.raises(ValueError, match="closed"):
        hung.queue.submit([])
    assert hung.queue.register(hung.memory.address, 4096) is False
    del hung.queue
    os.write(hung.input, b"x" * 4 * LENGTH)  # it answers after all: the thread ends and frees everything
    end = time.monotonic() + 10
    while set(os.listdir("/proc/self/task")) - threads and time.monotonic() < end:
        time.sleep(0.01)
    assert set(os.listdir("/proc/self/task")) <= threads
    os.close(hung.input)
    os.close(hung.output)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _drain(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""
