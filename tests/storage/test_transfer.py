"""Transfers through real devices: every byte arrives, and every fault becomes a failed key."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.config import PoolConfig
from forebay.storage.device import open_device, prepare_device
from forebay.storage.device.faulty import FaultyDevice
from forebay.storage.plan import Extent, LoadPlan, Memory, Span, StorePlan, TransferResult, cut_spans, lane_slots
from forebay.storage.transfer import MERGED, SCATTERED, TransferEngine, _Run, slice_memory

STRIPE = 64 * 1024
CHUNK = 200_000
UUID = bytes(16)


class Rig:
    """A DRAM and a file device, the file behind a fault injector."""

    def __init__(self, folder: Path, lanes: int = 1, lane: int = 0) -> None:
        self.config = PoolConfig.model_validate(
            {
                "path": folder,
                "stripe": STRIPE,
                "devices": [
                    {"name": "ram", "kind": "dram", "size": "8MiB", "huge_pages": False},
                    {"name": "ssd", "kind": "file", "size": "8MiB", "path": folder / "ssd.kv", "buffered": True},
                ],
                "faults": {"deadline": 0.5, "errors": 3, "probation": 0.3},
            }
        )
        ram, ssd = self.config.devices
        capacities = [prepare_device(ram, UUID), prepare_device(ssd, UUID)]
        self.faults = FaultyDevice(open_device(ssd, pool_uuid=UUID))
        devices = [open_device(ram, pool_uuid=UUID, capacity=capacities[0] // lanes), self.faults]
        slots = [lane_slots(capacity, lanes, STRIPE) for capacity in capacities]
        self.engine = TransferEngine(self.config, devices, lane=lane, lane_slots=slots, lane_offsets=[False, True])
        self.ids = iter(range(1, 1 << 30))

    def run(self, transfer: int, timeout: float = 20) -> TransferResult:
        (result,) = self.engine.wait([transfer], timeout)
        assert result.transfer == transfer
        return result

    def store(self, chunks: dict[bytes, tuple[bytearray, int]]) -> tuple[TransferResult, dict[bytes, StorePlan]]:
        plans = {key: store_plan(key, slot) for key, (_, slot) in chunks.items()}
        transfer = next(self.ids)
        self.engine.submit_store(transfer, [(plans[key], whole(data)) for key, (data, _) in chunks.items()])
        return self.run(transfer), plans

    def load(
        self, plan: StorePlan, checksums: tuple[int, ...], *, verify: bool = True
    ) -> tuple[TransferResult, bytearray]:
        target = bytearray(CHUNK)
        lanes = (checksums,) * (self.engine.lane + 1)
        transfer = next(self.ids)
        load = LoadPlan.of(plan.key, plan.spans, plan.extents, lanes, verify)
        self.engine.submit_load(transfer, [(load, whole(target))])
        return self.run(transfer), target


def store_plan(key: bytes, slot: int, *, copies: bool = False) -> StorePlan:
    """Stripes alternate between the two devices."""
    spans = cut_spans([CHUNK], STRIPE)
    extents = tuple(Extent(index % 2, slot + index) for index in range(len(spans)))
    backup = tuple(Extent(1, slot + 50 + i) if copies and e.device == 0 else None for i, e in enumerate(extents))
    return StorePlan(key, spans, extents, backup, 1)


def whole(data: bytearray) -> list[tuple[int, int]]:
    """One piece that covers a buffer."""
    return [(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.faults.clear()
    rig.engine.close()


def test_round_trip(rig: Rig) -> None:
    chunks = {bytes([i]): (bytearray(os.urandom(CHUNK)), 4 * i) for i in range(10)}
    stored, plans = rig.store(chunks)
    assert not stored.failed
    assert set(stored.checksums) == set(chunks)
    assert set(stored.device_bytes) == {"ram", "ssd"}
    assert sum(stored.device_bytes.values()) == stored.bytes == 10 * CHUNK
    for key, (data, _) in chunks.items():
        loaded, target = rig.load(plans[key], stored.checksums[key])
        assert not loaded.failed
        assert target == data


class Neighbours:
    """Two chunks of four stripes on the file device; the second begins where the first ends, and has a gap."""

    SPANS = cut_spans([4 * STRIPE], STRIPE)
    SLOTS: ClassVar = {b"a": [10, 11, 12, 13], b"b": [14, 15, 20, 21]}

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.data = {key: bytearray(os.urandom(4 * STRIPE)) for key in self.SLOTS}
        self.places = {key: tuple(Extent(1, slot) for slot in slots) for key, slots in self.SLOTS.items()}
        plans = {key: StorePlan(key, self.SPANS, self.places[key], (None,) * 4, 1) for key in self.data}
        rig.engine.submit_store(1, [(plans[key], whole(self.data[key])) for key in self.data])
        self.checksums = rig.run(1).checksums

    def load(self, memory: dict[bytes, Memory], *, verify: bool = False) -> tuple[TransferResult, int]:
        """The result, and in how many operations it came."""
        before = self.rig.faults.stats()
        loads = [LoadPlan.of(key, self.SPANS, self.places[key], (self.checksums[key],), verify) for key in self.data]
        self.rig.engine.submit_load(2, [(plan, memory[plan.key]) for plan in loads])
        result = self.rig.run(2)
        after = self.rig.faults.stats()
        return result, after.read_ops + after.errors - before.read_ops - before.errors


@pytest.mark.parametrize(
    ("layout", "verify", "operations"),
    [("apart", True, 8), ("apart", False, 3), ("together", True, 8), ("together", False, 2), ("in pieces", False, 3)],
)
def test_stripes_next_to_each_other_are_read_at_once(rig: Rig, layout: str, verify: bool, operations: int) -> None:
    """Without verification; across chunks only where their memory touches. The bytes are the same either way."""
    chunks, room = Neighbours(rig), mmap.mmap(-1, 12 * STRIPE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    second = start + (4 if layout == "together" else 8) * STRIPE
    memory: dict[bytes, Memory] = {b"a": [(start, 4 * STRIPE)], b"b": [(second, 4 * STRIPE)]}
    if layout == "in pieces":
        memory[b"a"] = [(start, STRIPE // 2), (start + STRIPE, 7 * STRIPE // 2)]
    result, count = chunks.load(memory, verify=verify)
    assert not result.failed
    assert result.bytes == 8 * STRIPE
    for key, pieces in memory.items():
        assert b"".join(ctypes.string_at(*piece) for piece in pieces) == chunks.data[key]
    assert count == operations


def test_an_operation_that_fails_fails_all_chunks_it_was_to_bring(rig: Rig) -> None:
    chunks, room = Neighbours(rig), mmap.mmap(-1, 8 * STRIPE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    rig.faults.fail(errno.EIO)
    result, _ = chunks.load({b"a": [(start, 4 * STRIPE)], b"b": [(start + 4 * STRIPE, 4 * STRIPE)]})
    assert set(result.failed) == {b"a", b"b"}
    rig.faults.clear()


def test_no_operation_grows_beyond_its_limit() -> None:
    """Long ones only where the memory is one piece of whole pages."""
    job = object()
    for start, limit in ((1 << 30, MERGED), ((1 << 30) + 512, SCATTERED)):
        run = _Run(job, 0, 0, STRIPE, [(start, STRIPE)], [b"k"], 0, None, MERGED)
        while run.take(b"k", run.length, STRIPE, [(start + run.length, STRIPE)]):
            pass
        assert run.length == limit
        assert run.memory == [(start, limit)]


def test_copies_hold_the_same_bytes(rig: Rig) -> None:
    data = bytearray(os.urandom(CHUNK))
    plan = store_plan(b"k", 0, copies=True)
    rig.engine.submit_store(1, [(plan, whole(data))])
    stored = rig.run(1)
    from_copies = tuple(copy or extent for extent, copy in zip(plan.extents, plan.copies, strict=True))
    assert {extent.device for extent in from_copies} == {1}
    loaded, target = rig.load(StorePlan(b"k", plan.spans, from_copies, (), 1), stored.checksums[b"k"])
    assert not loaded.failed
    assert target == data


def test_lanes_do_not_touch_each_other(tmp_path: Path) -> None:
    rigs = [Rig(tmp_path, lanes=2, lane=lane) for lane in range(2)]
    data = [bytearray(os.urandom(CHUNK)) for _ in rigs]
    kept = [rig.store({b"k": (data[lane], 3)}) for lane, rig in enumerate(rigs)]
    for lane, rig in enumerate(rigs):
        stored, plans = kept[lane]
        loaded, target = rig.load(plans[b"k"], stored.checksums[b"k"])
        assert not loaded.failed
        assert target == data[lane]
        rig.engine.close()


def test_wrong_bytes_are_never_a_hit(rig: Rig) -> None:
    stored, plans = rig.store({b"a": (bytearray(os.urandom(CHUNK)), 0)})
    rig.store({b"b": (bytearray(os.urandom(CHUNK)), 0)})
    loaded, _ = rig.load(plans[b"a"], stored.checksums[b"a"])
    assert "checksum" in loaded.failed[b"a"]
    unchecked, _ = rig.load(plans[b"a"], stored.checksums[b"a"], verify=False)
    assert not unchecked.failed


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV])
def test_errors_fail_the_key_and_quarantine_the_device(rig: Rig, code: int) -> None:
    stored, plans = rig.store({b"a": (bytearray(os.urandom(CHUNK)), 0)})
    rig.faults.fail(code)
    for _ in range(3):
        loaded, _ = rig.load(plans[b"a"], stored.checksums[b"a"])
        assert os.strerror(code) in loaded.failed[b"a"]
    health = {report.name: report for report in rig.engine.health()}
    assert not health["ssd"].usable
    assert health["ram"].usable
    started = time.monotonic()
    refused, _ = rig.load(plans[b"a"], stored.checksums[b"a"])
    assert refused.failed
    assert time.monotonic() - started < 0.1
    rig.faults.clear()
    wait_until(rig, usable=True)
    loaded, _ = rig.load(plans[b"a"], stored.checksums[b"a"])
    assert not loaded.failed


def test_a_device_that_only_fails_to_write_still_serves(rig: Rig) -> None:
    stored, plans = rig.store({b"a": (bytearray(os.urandom(CHUNK)), 0)})
    rig.faults.fail(errno.EROFS, writes_only=True)
    for slot in (10, 20, 30):
        failed, _ = rig.store({b"b": (bytearray(CHUNK), slot)})
        assert failed.failed
    health = {report.name: report for report in rig.engine.health()}
    assert health["ssd"].usable
    assert not health["ssd"].writable
    loaded, _ = rig.load(plans[b"a"], stored.checksums[b"a"])
    assert not loaded.failed


def test_a_hung_device_fails_the_load_at_the_deadline(rig: Rig) -> None:
    stored, plans = rig.store({b"a": (bytearray(os.urandom(CHUNK)), 0)})
    rig.faults.hang()
    started = time.monotonic()
    loaded, _ = rig.load(plans[b"a"], stored.checksums[b"a"])
    assert 0.4 < time.monotonic() - started < 2
    assert "no answer within 0.5 s" in loaded.failed[b"a"]
    rig.faults.clear()


def test_cancelled_stores_end_and_touch_nothing_later(rig: Rig) -> None:
    rig.faults.hang()
    rig.engine.submit_store(9, [(store_plan(b"a", 0), whole(bytearray(CHUNK)))])
    rig.engine.cancel([9])
    assert rig.run(9).failed
    assert not rig.engine.pending()
    rig.faults.clear()


def test_failures_known_beforehand_are_part_of_the_result(rig: Rig) -> None:
    rig.engine.submit_load(5, [], failed={b"gone": "no longer in the pool"})
    assert rig.run(5).failed == {b"gone": "no longer in the pool"}


def wait_until(rig: Rig, *, usable: bool) -> None:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        rig.engine.poll()
        if all(report.usable == usable for report in rig.engine.health()):
            return
        time.sleep(0.02)
    raise AssertionError("the device did not come back")


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.lists(st.booleans(), min_size=8, max_size=8), st.data()
)
def test_slices_cover_the_memory_exactly(lengths: list[int], holes: list[bool], data: st.DataObject) -> None:
    memory = [(0 if hole else (index + 1) << 20, length) for index, (length, hole) in enumerate(zip(lengths, holes))]
    total = sum(lengths)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=5))})
    spans = [Span(start, end - start) for start, end in zip(cuts, cuts[1:])]
    slices = slice_memory(memory, spans)
    flat = [address + i if address else 0 for address, length in memory for i in range(length)]
    for span, pieces in zip(spans, slices):
        got = [address + i if address else 0 for address, length in pieces for i in range(length)]
        assert got == flat[span.offset : span.offset + span.length]


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6), st.integers(1, 64))
def test_spans_partition_the_chunk(segments: list[int], blocks: int) -> None:
    spans = cut_spans(segments, blocks * 4096)
    assert [span.offset for span in spans] == [sum(s.length for s in spans[:i]) for i in range(len(spans))]
    assert sum(span.length for span in spans) == sum(segments)
    assert all(0 < span.length <= blocks * 4096 for span in spans)
    ends = {span.offset + span.length for span in spans}
    assert {sum(segments[: i + 1]) for i in range(len(segments))} <= ends
