"""Loads that are given up: what arrived counts, nothing is held against the device, and its answer comes no later."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.storage.plan import Extent, LoadPlan, Span, StorePlan, TransferResult, pack
from forebay.storage.pool import Pool
from tests.storage.poolkit import NAMESPACE, STRIPE, Pools, keys_of, store
from tests.storage.test_transfer import STRIPE as LONG
from tests.storage.test_transfer import Rig, whole

SPANS = (Span(0, LONG),)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.faults.clear()
    rig.engine.close()


class Chunks:
    """Eight chunks of one stripe on the device that can be made slow, and one in memory."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.extents = {bytes([n]): Extent(1, 2 * n) for n in range(8)} | {b"ram": Extent(0, 1)}
        self.data = {key: bytearray(os.urandom(LONG)) for key in self.extents}
        plans = [StorePlan(key, SPANS, (extent,), (None,), 1) for key, extent in self.extents.items()]
        rig.engine.submit_store(1, [(plan, whole(self.data[plan.key])) for plan in plans])
        self.checksums = rig.run(1).checksums

    def load(self, patience: float) -> tuple[TransferResult, dict[bytes, bytearray]]:
        found = {key: bytearray(LONG) for key in self.data}
        plans = [
            LoadPlan.of(key, SPANS, (extent,), (self.checksums[key],), True) for key, extent in self.extents.items()
        ]
        self.rig.engine.submit_load(2, [(plan, whole(found[plan.key])) for plan in plans], patience=patience)
        return self.rig.run(2), found


def test_what_has_arrived_stays_and_the_rest_is_late(rig: Rig) -> None:
    chunks = Chunks(rig)
    rig.faults.throttle(10 * LONG)
    before = time.monotonic()
    result, found = chunks.load(patience=0.35)
    assert time.monotonic() - before < 0.75, "all of it would take 0.8 s"
    assert result.late == set(result.failed)
    assert 1 <= len(result.late) <= 6
    assert all("given up after 0.35 s" in reason for reason in result.failed.values())
    for key in chunks.data.keys() - result.late:
        assert found[key] == chunks.data[key]
    assert b"ram" not in result.late
    assert result.device_seconds["ssd"] >= 0.3
    assert result.device_bytes["ssd"] == (8 - len(result.late)) * LONG


def test_nothing_is_held_against_the_device(rig: Rig) -> None:
    chunks = Chunks(rig)
    rig.faults.hang()
    for _ in range(5):
        assert len(chunks.load(patience=0.02)[0].late) == 8
    assert all(report.usable for report in rig.engine.health())


def test_failures_of_their_own_are_not_late(rig: Rig) -> None:
    chunks = Chunks(rig)
    rig.faults.fail(errno.EIO, count=1)
    rig.faults.hang()
    result, _ = chunks.load(patience=0.1)
    assert len(result.failed) == 8
    assert len(result.late) == 7


def test_the_deadline_still_holds(rig: Rig) -> None:
    chunks = Chunks(rig)
    rig.faults.hang()
    result, _ = chunks.load(patience=100)
    assert not result.late
    assert len(result.failed) == 8


def test_a_read_to_nowhere(rig: Rig) -> None:
    """What asks how fast a device is: a part of a stripe, thrown away."""
    chunks = Chunks(rig)
    probe = LoadPlan(b"probe", (Span(0, 4096),), pack([1 << 32 | 2 * 3]), b"", verify=False)
    rig.engine.submit_load(-1, [(probe, [(0, 4096)])])
    result = rig.run(-1)
    assert (result.failed, result.device_bytes) == ({}, {"ssd": 4096})
    assert result.device_seconds["ssd"] > 0
    assert chunks.load(patience=10)[0].failed == {}


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    pools = Pools(tmp_path)
    yield pools
    pools.close()


def opened(pools: Pools) -> Pool:
    return pools.open(pools.config(ram=8, ssds=[64], durable=True, verify=False), NAMESPACE)


def test_chunks_that_were_late_stay_and_are_still_to_be_verified(pools: Pools) -> None:
    keys = keys_of("a", 4)
    first = opened(pools)
    store(first, keys)
    pools.crash(first)
    pool = opened(pools)
    pool.prepare_load(keys)
    pool.complete_load(keys, unread=keys[2:])
    assert (pool.stats().leases, pool.stats().failed_loads) == (0, 0)
    assert [plan.verify for plan in pool.prepare_load(keys)] == [False, False, True, True]


def test_what_a_load_would_read(pools: Pools) -> None:
    pool = opened(pools)
    keys = keys_of("a", 4)
    store(pool, keys, stripes=2)
    pool.prepare_store(keys_of("b", 1), [STRIPE])
    found = pool.reads([*keys, b"unknown", *keys_of("b", 1)])
    assert [(plan.places, plan.spans) for plan in pool.prepare_load(keys)] == found[:4]
    assert found[4:] == [(b"", ()), (b"", ())], "neither what is not there nor what is being written"
