"""The checksum and the raw queue."""

from __future__ import annotations

import os
import select
import tempfile
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.storage.device._native import Queue, bind_memory, crc32c, crc32c_at, crc32c_portable
from forebay.storage.testing import Memory

KNOWN = [  # RFC 3720, B.4, and the customary check value
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


def bitwise(data: bytes, crc: int = 0) -> int:
    """The definition: one bit at a time, reflected polynomial 0x82F63B78."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("function", [crc32c, crc32c_portable, bitwise])
@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_values(function, data, expected):
    assert function(data) == expected


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=2000), seed=st.integers(0, 2**32 - 1))
def test_against_the_definition(data, seed):
    assert crc32c(data, seed) == crc32c_portable(data, seed) == bitwise(data, seed)


@pytest.mark.parametrize("length", [767, 768, 769, 6143, 6144, 6145, 12_287, 12_288, 12_296, 20_000, 100_003])
def test_block_boundaries(length):
    data = os.urandom(length + 8)
    for start in (0, 1, 7):
        part = data[start : start + length]
        assert crc32c(part) == crc32c_portable(part)
        for cut in (0, 1, length // 2, length):
            assert crc32c(part[cut:], crc32c(part[:cut])) == crc32c(part)


def test_at_an_address():
    memory = Memory(8192, os.urandom(8192))
    assert crc32c_at(memory.address + 5, 4000, 7) == crc32c(memory[5:4005], 7)


def test_fast_enough():
    """10 GB/s in cache is what stripes need; a tenth of it tells that the hardware path is off."""
    data = os.urandom(256 << 10)
    best = float("inf")
    for _ in range(200):
        begin = time.perf_counter()
        crc32c(data)
        best = min(best, time.perf_counter() - begin)
    assert len(data) / best > 1e9


# ---- the queue's own checks; what it does is in the conformance suite ----


def memory_queue(memory, **options):
    return Queue("memory", "test", memory.size, 1, address=memory.address, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"depth": 0},
        {"depth": 1, "fd": 0},
        {"depth": 1, "address": 0},
        {"depth": 1, "offset_alignment": 3},
        {"depth": 1, "memory_alignment": 0},
    ],
)
def test_bad_arguments(arguments):
    memory = Memory(4096)
    with pytest.raises(ValueError, match="Queue: bad"):
        Queue("memory", "test", 4096, **{"address": memory.address, **arguments})


def test_bad_file():
    with pytest.raises(OSError, match="Bad file descriptor"):
        Queue("io_uring", "test", 4096, 1, fd=99_999)


@pytest.mark.parametrize(
    "op",
    [
        (1, 0, 0, 4096, [(1, 4096)]),
        [1, 0, 0, 4096, [(1, 4096)], False],
        (1, 0, 0, 4096, 5, False),
        (1, 0, 0, 4096, [4096], False),
        ("tag", 0, 0, 4096, [(1, 4096)], False),
    ],
)
def test_operations_of_a_wrong_shape(op):
    memory = Memory(4096)
    queue = memory_queue(memory)
    with pytest.raises(TypeError):
        queue.submit([op])
    assert queue.close()


def test_numbers_out_of_range():
    memory = Memory(4096)
    queue = memory_queue(memory)
    for op in [(-1, 0, 0, 4096, [(1, 4096)], False), (1, 0, 2**64, 4096, [(1, 4096)], False)]:
        with pytest.raises(OverflowError):
            queue.submit([op])
    with pytest.raises(OverflowError):
        queue.cancel([-1])
    assert queue.close()


def test_short_file_is_an_error():
    """The file ends inside the operation: -EIO, whatever was read."""
    memory = Memory(64 << 10)
    for engine in ("io_uring", "threads"):
        with tempfile.TemporaryFile() as file:
            file.truncate(10_000)
            queue = Queue(engine, "test", 1 << 20, 4, fd=file.fileno())
            pieces = [(memory.address, 5000), (memory.address + 8192, 27_000)]
            queue.submit([(1, 0, 0, 32_000, pieces, True), (2, 0, 0, 10_000, [(memory.address, 10_000)], True)])
            done = {}
            while len(done) < 2:
                select.select([queue.fileno()], [], [], 10)
                done.update({completion[0]: completion[1:3] for completion in queue.poll()})
            assert done == {1: (-5, 0), 2: (10_000, crc32c(bytes(10_000)))}
            assert queue.stats()[4] == 1
            assert queue.close()
            assert queue.close()


def test_dropped_without_close():
    memory = Memory(4096)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        queue = memory_queue(memory)
        queue.submit([(1, 0, 0, 4096, [(0, 4096)], True)])
        del queue
    assert len(os.listdir("/proc/self/fd")) == before


def test_binding_to_a_node_that_is_not_there():
    memory = Memory(4096)
    with pytest.raises(OSError, match="Invalid argument"):
        bind_memory(memory.address, 4096, 1000)
    with pytest.raises(ValueError, match="too large"):
        bind_memory(memory.address, 4096, 100_000)
