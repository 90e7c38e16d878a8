"""The conformance suite: what every kind of device must do, as a class to derive a test from.

```python
class TestMyDevice(DeviceConformance):
    def open(self, folder: Path) -> Device:
        return MyDevice(folder / "data", size=self.CAPACITY)
```
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import select
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.storage.device._native import crc32c
from forebay.storage.device.base import Device, DeviceStats, Direction, Op
from forebay.storage.testing.driving import Memory, collect, run

READ, WRITE = Direction.READ, Direction.WRITE
MIB = 1 << 20
SLOT = 64 << 10
_GAUGES = {"queued", "in_flight"}


class DeviceConformance:
    """Derive, implement `open`, and pytest runs the suite against the device."""

    CAPACITY = 64 * MIB
    """Bytes that `open` must offer at least."""

    def open(self, folder: Path) -> Device:
        """A device of at least `CAPACITY` bytes; called again with the same folder once the last one is closed."""
        raise NotImplementedError

    @pytest.fixture
    def device(self, tmp_path: Path) -> Iterator[Device]:
        """A device for one test."""
        with contextlib.closing(self.open(tmp_path)) as device:
            yield device

    # ---- bytes ----

    @pytest.mark.parametrize("shift", [0, 1, 64])
    def test_round_trip(self, device: Device, shift: int) -> None:
        """Any length, from and to any address."""
        for length in (1, 511, 512, 513, 4095, 4096, 4097, 65536, 100_001, MIB, MIB + 64, 5 * MIB + 3):
            data = random.Random(length).randbytes(length)
            source, target = Memory(length + shift), Memory(length + shift + 64)
            source[shift : shift + length] = data
            offset = 3 * device.alignment
            written = run(device, [Op(1, WRITE, offset, length, [source.piece(shift, length)], True)])[1]
            read = run(device, [Op(2, READ, offset, length, [target.piece(shift, length)], True)])[2]
            assert (written.result, read.result) == (length, length)
            assert (written.checksum, read.checksum) == (crc32c(data), crc32c(data))
            assert target[shift : shift + length] == data
            assert target[:shift] == bytes(shift)
            assert target[shift + length :] == bytes(64)

    @pytest.mark.parametrize("gap", [0, 64, 4096, 4097])
    def test_scatter_and_gather(self, device: Device, gap: int) -> None:
        """Many pieces, gathered in one order and scattered in another."""
        for size in (64, 4096, 12_288, 16_384, 50_000):
            count = min(48, MIB // size)
            memory = Memory(2 * count * (size + gap))
            data = random.Random(size).randbytes(count * size)
            for i in range(count):
                memory[i * (size + gap) : i * (size + gap) + size] = data[i * size : (i + 1) * size]
            pieces = [memory.piece(i * (size + gap), size) for i in range(count)]
            targets = [memory.piece((2 * count - 1 - i) * (size + gap), size) for i in range(count)]
            assert run(device, [Op(1, WRITE, 0, len(data), pieces, True)])[1].checksum == crc32c(data)
            assert run(device, [Op(2, READ, 0, len(data), targets, True)])[2].checksum == crc32c(data)
            for i in range(count):
                at = (2 * count - 1 - i) * (size + gap)
                assert memory[at : at + size] == data[i * size : (i + 1) * size]

    def test_more_pieces_than_the_kernel_takes(self, device: Device) -> None:
        """3000 pieces in one operation."""
        memory = Memory(2 * 3000 * 512, os.urandom(3000 * 512))
        size = 3000 * 512
        assert run(device, [Op(1, WRITE, 0, size, [memory.piece(i * 512, 512) for i in range(3000)], True)])[1].result
        pieces = [memory.piece(size + i * 512, 512) for i in range(3000)]
        assert run(device, [Op(2, READ, 0, size, pieces, True)])[2].checksum == crc32c(memory[:size])
        assert memory[size:] == memory[:size]

    def test_address_zero(self, device: Device) -> None:
        """Reads discard such a piece, writes put zeros."""
        for hole in (512, 4096, 10_001):
            self._round_trip_with_hole(device, hole)

    def _round_trip_with_hole(self, device: Device, hole: int) -> None:
        memory = Memory(8192, b"\xaa" * 8192)
        length = 4096 + hole + 4096
        pieces = [memory.piece(0, 4096), (0, hole), memory.piece(4096, 4096)]
        stored = b"\xaa" * 4096 + bytes(hole) + b"\xaa" * 4096
        assert run(device, [Op(1, WRITE, 0, length, pieces, True)])[1].checksum == crc32c(stored)
        whole = Memory(length)
        assert run(device, [Op(2, READ, 0, length, [whole.piece(0, length)], True)])[2].checksum == crc32c(stored)
        assert whole[:length] == stored
        memory[:] = bytes(8192)
        assert run(device, [Op(3, READ, 0, length, pieces, True)])[3].checksum == crc32c(stored)
        assert memory[:] == b"\xaa" * 8192

    def test_neighbours_are_left_alone(self, device: Device) -> None:
        """A short write pads within its alignment unit and no further."""
        memory = Memory(3 * SLOT, b"\x11" * 3 * SLOT)
        run(device, [Op(1, WRITE, 0, 3 * SLOT, [memory.piece(0, 3 * SLOT)], False)])
        memory[:SLOT] = b"\x22" * SLOT
        run(device, [Op(2, WRITE, SLOT, SLOT - 4097, [memory.piece(0, SLOT - 4097)], False)])
        run(device, [Op(3, READ, 0, 3 * SLOT, [memory.piece(0, 3 * SLOT)], False)])
        assert memory[:SLOT] == b"\x11" * SLOT
        assert memory[SLOT : 2 * SLOT - 4097] == b"\x22" * (SLOT - 4097)
        assert memory[2 * SLOT - 4096 :] == b"\x11" * (SLOT + 4096)

    def test_the_last_bytes(self, device: Device) -> None:
        """The whole capacity can be used."""
        length = 2 * device.alignment - 1 if device.alignment > 1 else 1
        offset = device.capacity - -(-length // device.alignment) * device.alignment
        memory = Memory(2 * length, os.urandom(length))
        assert run(device, [Op(1, WRITE, offset, length, [memory.piece(0, length)], True)])[1].result == length
        assert run(device, [Op(2, READ, offset, length, [memory.piece(length, length)], True)])[2].result == length
        assert memory[length:] == memory[:length]

    def test_no_checksum_unless_asked(self, device: Device) -> None:
        """0 otherwise."""
        memory = Memory(SLOT, os.urandom(SLOT))
        assert run(device, [Op(1, WRITE, 0, SLOT, [memory.piece(0, SLOT)], False)])[1].checksum == 0
        assert run(device, [Op(2, READ, 0, SLOT, [memory.piece(0, SLOT)], False)])[2].checksum == 0

    def test_against_an_oracle(self, device: Device) -> None:
        """Random batches, never overlapping in flight, against a dictionary of bytes."""

        @settings(max_examples=15, deadline=None)
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            _compare_with_oracle(device, data)

        check()

    # ---- the queue ----

    def test_many_outstanding(self, device: Device) -> None:
        """Far more operations than the device's depth, in one call."""
        count = 1500
        memory = Memory(count * 4096, os.urandom(count * 4096))
        data = memory[:]
        writes = [Op(i, WRITE, i * 4096, 4096, [memory.piece(i * 4096, 4096)], True) for i in range(count)]
        assert {completion.result for completion in run(device, writes).values()} == {4096}
        memory[:] = bytes(count * 4096)
        reads = [Op(i, READ, i * 4096, 4096, [memory.piece(i * 4096, 4096)], True) for i in range(count)]
        assert {completion.result for completion in run(device, reads).values()} == {4096}
        assert memory[:] == data

    def test_growing_operations(self, device: Device) -> None:
        """Staged operations of growing length, all in flight together."""
        lengths = [1001 * (i + 1) for i in range(200)]
        memory = Memory(sum(lengths) * 2 + 1, os.urandom(sum(lengths) * 2 + 1))
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        ops = [
            Op(i, WRITE, i * 4 * SLOT, length, [memory.piece(start + 1, length)], True)
            for i, (start, length) in enumerate(zip(starts, lengths, strict=True))
        ]
        written = run(device, ops)
        read = run(device, [op._replace(direction=READ) for op in ops])
        assert [written[op.tag].checksum for op in ops] == [read[op.tag].checksum for op in ops]
        assert {read[op.tag].result - op.length for op in ops} == {0}

    def test_reads_overtake_writes(self, device: Device) -> None:
        """A read that comes after many writes does not wait for them."""
        memory = Memory(2 * MIB)
        count = 120
        writes = [Op(i, WRITE, i % 60 * MIB, MIB, [memory.piece(0, MIB)], False) for i in range(count)]
        device.submit(writes)
        device.submit([Op(count, READ, 61 * MIB, 4096, [memory.piece(MIB, 4096)], False)])
        order = [completion.tag for completion in collect(device, count + 1)]
        assert order.index(count) < count * 2 // 3

    def test_completions_and_readiness(self, device: Device) -> None:
        """`fileno` is readable while the completion of a whole batch waits; `poll` never blocks."""
        memory = Memory(4096)
        assert device.poll() == []
        assert not _readable(device, 0)
        before = time.monotonic()
        device.submit([Op(7, READ, 0, 4096, [memory.piece(0, 4096)], False)])
        assert _readable(device, 10)
        assert _readable(device, 0)  # still
        (completion,) = device.poll()
        assert (completion.tag, completion.result) == (7, 4096)
        assert 0 < completion.seconds <= time.monotonic() - before
        assert not _readable(device, 0)
        assert device.poll() == []
        device.submit([])
        assert device.poll() == []

    def test_the_end_of_a_batch_is_told_once(self, device: Device) -> None:
        """One wake-up for all of it: nobody is woken for each operation."""
        memory = Memory(200 * 4096)
        batch = [Op(i, READ, i * 4096, 4096, [memory.piece(i * 4096, 4096)], False) for i in range(200)]
        device.submit(batch)
        assert _readable(device, 10)
        assert sorted(completion.tag for completion in device.poll()) == list(range(200))

    def test_wide_tags(self, device: Device) -> None:
        """Tags are 64 bits (the highest is left to wrappers)."""
        memory = Memory(4096)
        tag = 2**63 - 1
        assert run(device, [Op(tag, READ, 0, 4096, [memory.piece(0, 4096)], False)])[tag].result == 4096

    # ---- cancelling ----

    @pytest.mark.parametrize("shift", [0, 1])
    def test_cancelled_reads_touch_nothing(self, device: Device, shift: int) -> None:
        """Each operation either completes whole, or with -ECANCELED and its memory as it was."""
        size, count = MIB, 60
        source = Memory(size, b"\x55" * size)
        run(device, [Op(i, WRITE, i * size, size, [source.piece(0, size)], False) for i in range(count)])
        memory = Memory(count * size + 1)
        ops = [Op(i, READ, i * size, size, [memory.piece(i * size + shift, size)], False) for i in range(count)]
        device.submit(ops)
        device.cancel(range(10, count + 5))
        done = {completion.tag: completion.result for completion in collect(device, count)}
        assert sorted(done) == list(range(count))
        assert all(done[tag] == size for tag in range(10))
        assert {done[tag] for tag in range(10, count)} <= {size, -errno.ECANCELED}
        assert -errno.ECANCELED in done.values()
        run(device, [Op(999, READ, 0, 4096, [source.piece(0, 4096)], False)])  # late bytes would be there by now
        for tag, result in done.items():
            part = memory[tag * size + shift : (tag + 1) * size + shift]
            assert part == (b"\x55" if result == size else b"\0") * size

    def test_cancelled_writes(self, device: Device) -> None:
        """They complete once, and the device goes on working."""
        memory = Memory(MIB, b"\x77" * MIB)
        device.submit([Op(i, WRITE, i * MIB, MIB, [memory.piece(0, MIB)], False) for i in range(60)])
        device.cancel(list(range(60)))
        results = [completion.result for completion in collect(device, 60)]
        assert set(results) <= {MIB, -errno.ECANCELED}
        assert -errno.ECANCELED in results
        assert run(device, [Op(1, WRITE, 0, MIB, [memory.piece(0, MIB)], True)])[1].result == MIB

    def test_cancelling_what_is_not_there(self, device: Device) -> None:
        """Unknown and finished tags are ignored."""
        memory = Memory(4096)
        device.cancel([])
        device.cancel([1, 2, 3])
        run(device, [Op(1, READ, 0, 4096, [memory.piece(0, 4096)], False)])
        device.cancel([1])
        assert device.poll() == []

    # ---- mistakes, counters, ends ----

    def test_mistakes_of_the_caller(self, device: Device) -> None:
        """ValueError, and nothing of the batch is queued."""
        memory = Memory(8192)
        good = Op(1, READ, 0, 4096, [memory.piece(0, 4096)], False)
        bad = [
            good._replace(length=4095),
            good._replace(offset=device.capacity),
            good._replace(offset=device.capacity - device.alignment, length=8192, memory=[memory.piece(0, 8192)]),
            good._replace(length=0, memory=[]),
        ]
        if device.alignment > 1:
            bad.append(good._replace(offset=device.alignment // 2))
        for op in bad:
            with pytest.raises(ValueError, match="operation 1"):
                device.submit([good, op])
        assert device.stats().queued == device.stats().in_flight == 0
        assert not _readable(device, 0.05)

    def test_counters(self, device: Device) -> None:
        """They count what was done, and never go back."""
        memory = Memory(16 * MIB)
        seen = [device.stats()]
        for round_ in range(3):
            ops = [Op(i, WRITE, i * MIB, MIB, [memory.piece(i * MIB, MIB)], False) for i in range(16)]
            run(device, ops if round_ == 0 else [op._replace(direction=READ) for op in ops])
            seen.append(device.stats())
        for earlier, later in itertools.pairwise(seen):
            assert all(getattr(later, name) >= getattr(earlier, name) for name in set(DeviceStats._fields) - _GAUGES)
        last = seen[-1]
        assert (last.read_bytes, last.write_bytes) == (32 * MIB, 16 * MIB)
        assert (last.read_ops, last.write_ops, last.errors) == (32, 16, 0)
        assert (last.queued, last.in_flight) == (0, 0)
        assert seen[1].read_busy_ns == 0
        assert 0 < last.read_saturated_bytes <= last.read_bytes
        assert 0 < last.read_saturated_ns <= last.read_busy_ns
        assert last.cpu_ns > 0

    def test_registering_while_busy(self, device: Device) -> None:
        """Memory can be registered, also twice, while operations use it; the bytes stay right."""
        memory, other = Memory(16 * MIB, os.urandom(16 * MIB)), Memory(4 * MIB)
        data = memory[:]
        ops = [Op(i, WRITE, i * MIB, MIB, [memory.piece(i * MIB, MIB)], True) for i in range(16)]
        device.submit(ops)
        results = [device.register(memory.address, memory.size), device.register(other.address, other.size)]
        threads = [threading.Thread(target=device.register, args=memory.piece(0, MIB * n)) for n in (1, 2, 16)]
        for thread in threads:
            thread.start()
        collect(device, 16)
        for thread in threads:
            thread.join()
        assert all(isinstance(result, bool) for result in results)
        memory[:] = bytes(memory.size)
        run(device, [op._replace(direction=READ) for op in ops])
        assert memory[:] == data

    def test_flush(self, device: Device) -> None:
        """Can be called at any time."""
        device.flush()
        memory = Memory(SLOT)
        run(device, [Op(1, WRITE, 0, SLOT, [memory.piece(0, SLOT)], False)])
        device.flush()

    def test_closing(self, tmp_path: Path) -> None:
        """Twice is once; with work outstanding it does not hang; afterwards nothing can be submitted."""
        device = self.open(tmp_path)
        memory = Memory(200 * SLOT)
        ops = [Op(i, READ, i * SLOT, SLOT, [memory.piece(i * SLOT, SLOT)], False) for i in range(200)]
        device.submit(ops)
        begin = time.monotonic()
        device.close()
        device.close()
        assert time.monotonic() - begin < 10
        with pytest.raises(ValueError, match="closed"):
            device.submit(ops)
        device.cancel([1])
        assert not device.register(memory.address, 4096) or device.kind == "dram"

    def test_nothing_leaks(self, tmp_path: Path) -> None:
        """No descriptor and no thread outlives `close`."""
        self._open_use_close(tmp_path)
        descriptors, threads = _count("fd"), _count("task")
        for _ in range(3):
            self._open_use_close(tmp_path)
        assert _count("fd") == descriptors
        end = time.monotonic() + 10
        while _count("task") > threads and time.monotonic() < end:  # the kernel ends its own a little later
            time.sleep(0.01)
        assert _count("task") <= threads

    def _open_use_close(self, folder: Path) -> None:
        memory = Memory(MIB)
        with contextlib.closing(self.open(folder)) as device:
            run(device, [Op(1, WRITE, 0, MIB, [memory.piece(0, MIB)], True)])
            run(device, [Op(2, READ, 0, MIB - 7, [memory.piece(3, MIB - 7)], True)])


def _count(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


def _readable(device: Device, timeout: float) -> bool:
    return bool(select.select([device.fileno()], [], [], timeout)[0])


def _compare_with_oracle(device: Device, data: st.DataObject) -> None:
    oracle: dict[int, bytes] = {}
    for step in range(data.draw(st.integers(1, 5), "steps")):
        slots = data.draw(st.lists(st.integers(0, 31), min_size=1, max_size=12, unique=True), "slots")
        memory = Memory(len(slots) * 2 * SLOT)
        ops = []
        for i, slot in enumerate(slots):
            write = slot not in oracle or data.draw(st.booleans(), "write")
            length = data.draw(st.integers(1, SLOT), "length") if write else len(oracle[slot])
            pieces = data.draw(_shapes(memory.address + i * 2 * SLOT, length), "pieces")
            if write:
                oracle[slot] = _place(memory, pieces, random.Random(step * 1000 + slot).randbytes(length))
            ops.append(Op(slot, WRITE if write else READ, slot * SLOT, length, pieces, True))
        for tag, completion in run(device, ops).items():
            assert completion.result == len(oracle[tag])
            assert completion.checksum == crc32c(oracle[tag])
        for op in ops:
            assert _seen(memory, op.memory, oracle[op.tag]) == oracle[op.tag]


@st.composite
def _shapes(draw: st.DrawFn, address: int, length: int) -> list[tuple[int, int]]:
    """Pieces of `length` bytes in the 128 KiB from `address`: aligned or not, with gaps, some of them address 0."""
    unit = draw(st.sampled_from([1, 64, 512, 4096]))
    cuts = draw(st.lists(st.integers(0, length // unit), max_size=6))
    edges = sorted({0, length, *(cut * unit for cut in cuts)})
    shift = draw(st.sampled_from([0, 1, 64, 512, 4096]))
    holes = draw(st.sets(st.integers(0, len(edges) - 2), max_size=2))
    gap = draw(st.sampled_from([0, 64, 512, 4096]))
    return [
        (0 if i in holes else address + shift + i * gap + start, end - start)
        for i, (start, end) in enumerate(itertools.pairwise(edges))
    ]


def _place(memory: Memory, pieces: Sequence[tuple[int, int]], content: bytes) -> bytes:
    """Put `content` into the pieces; returns it as the device will see it, zeros for address 0."""
    stored, at = bytearray(), 0
    for address, length in pieces:
        part = content[at : at + length] if address else bytes(length)
        if address:
            memory[address - memory.address : address - memory.address + length] = part
        stored += part
        at += length
    return bytes(stored)


def _seen(memory: Memory, pieces: Sequence[tuple[int, int]], expected: bytes) -> bytes:
    """What the pieces hold, taking what was discarded from `expected`."""
    seen, at = bytearray(), 0
    for address, length in pieces:
        start = address - memory.address
        seen += memory[start : start + length] if address else expected[at : at + length]
        at += length
    return bytes(seen)
