"""Sick devices: nothing is placed on them, nothing is read from them, and nothing is lost that has a copy."""

import pytest

from forebay.storage.plan import DeviceHealth
from forebay.storage.pool import Lookup
from tests.storage.poolkit import STRIPE, finish, keys_of, load, store

KEYS = keys_of("k", 4)


def sick(name, **fields):
    return DeviceHealth(name, **{"usable": False, "reason": "Input/output error", "read_bandwidth": 0.0, **fields})


def well(name, read_bandwidth=0.0):
    return DeviceHealth(name, True, "", read_bandwidth)


def devices_of(plans):
    return {extent.device for plan in plans for extent in plan.extents}


@pytest.fixture
def pool(pools):
    return pools.open(pools.config(ram=64, ssds=[64, 64]))


def test_nothing_is_placed_on_a_quarantined_device(pool):
    pool.report_health([sick("ssd0")])
    plans = pool.prepare_store(KEYS, [8 * STRIPE])
    assert devices_of(plans) == {0, 2}
    assert {copy.device for plan in plans for copy in plan.copies if copy} == {2}
    usage = pool.stats().devices[1]
    assert (usage.quarantined, usage.reason) == (True, "Input/output error")
    pool.report_health([well("ssd0")])
    assert devices_of(pool.prepare_store(keys_of("n", 4), [8 * STRIPE])) == {0, 1, 2}
    assert not pool.stats().devices[1].quarantined


def test_chunks_on_it_miss_until_it_is_back(pools):
    pool = pools.open(pools.config(ssds=[64, 64], placement="tiered"))
    store(pool, KEYS)
    pool.report_health([sick("ssd0")])
    assert [pool.lookup(key) for key in KEYS] == [Lookup.MISS] * 4
    assert pool.prepare_load(KEYS) == []
    pool.report_health([well("ssd0")])
    assert [pool.lookup(key) for key in KEYS] == [Lookup.READY] * 4
    assert len(load(pool, KEYS)) == 4


def test_with_a_copy_they_are_still_read(pools):
    pool = pools.open(pools.config(ram=64, ssds=[64], placement="tiered"))
    store(pool, KEYS)
    assert devices_of(load(pool, KEYS)) == {0}
    pool.report_health([sick("ram")])
    assert [pool.lookup(key) for key in KEYS] == [Lookup.READY] * 4
    assert devices_of(load(pool, KEYS)) == {1}


def test_what_cannot_be_read_is_stored_anew_elsewhere(pools):
    pool = pools.open(pools.config(ssds=[64, 64], placement="tiered"))
    store(pool, KEYS)
    pool.report_health([sick("ssd0")])
    plans = pool.prepare_store(KEYS, [STRIPE])
    assert [plan.key for plan in plans] == KEYS
    assert devices_of(plans) == {1}
    finish(pool, plans)
    assert [pool.lookup(key) for key in KEYS] == [Lookup.READY] * 4


def test_a_read_only_device_still_serves(pools):
    pool = pools.open(pools.config(ssds=[64, 64], placement="tiered"))
    store(pool, KEYS)
    pool.report_health([DeviceHealth("ssd0", True, "Read-only file system", 0.0, writable=False)])
    assert [pool.lookup(key) for key in KEYS] == [Lookup.READY] * 4
    assert devices_of(load(pool, KEYS)) == {0}
    assert devices_of(pool.prepare_store(keys_of("n", 2), [STRIPE])) == {1}


def test_with_no_device_left_stores_are_dropped_and_loads_miss(pool):
    store(pool, KEYS)
    pool.report_health([sick("ram"), sick("ssd0"), sick("ssd1")])
    assert [pool.lookup(key) for key in KEYS] == [Lookup.MISS] * 4
    assert pool.prepare_store(keys_of("n", 2), [STRIPE]) == []
    assert pool.stats().dropped_stores == 2


def test_one_sick_rank_is_enough(pools):
    pool = pools.open(pools.config(ssds=[64, 64]), lanes=2)
    pool.report_health([well("ssd0"), sick("ssd1")], lane=1)
    pool.report_health([well("ssd0"), well("ssd1")], lane=0)
    assert devices_of(pool.prepare_store(KEYS, [4 * STRIPE])) == {0}
    pool.report_health([well("ssd1")], lane=1)
    assert devices_of(pool.prepare_store(keys_of("n", 2), [4 * STRIPE])) == {0, 1}


def test_a_device_that_becomes_slow_gets_less(pools):
    pool = pools.open(pools.config(ssds=[640, 640], max_pending_store=1 << 30))
    even = pool.prepare_store(keys_of("a", 40), [4 * STRIPE])
    for _ in range(100):
        pool.report_health([well("ssd0", 1.5e9), well("ssd1", 0.5e9)])
    uneven = pool.prepare_store(keys_of("b", 40), [4 * STRIPE])

    def share(plans):
        extents = [extent for plan in plans for extent in plan.extents]
        return sum(extent.device == 1 for extent in extents) / len(extents)

    assert share(even) == 0.5
    assert share(uneven) == pytest.approx(0.25, abs=0.03)
    assert pool.stats().devices[1].read_bandwidth == pytest.approx(0.5e9, rel=0.01)


def test_what_was_learnt_is_kept(pools):
    pool = pools.open(pools.config(ssds=[64]))
    for _ in range(100):
        pool.report_health([well("ssd0", 3e9)])
    pool.close()
    again = pools.open(pool.config)
    assert again.stats().devices[0].read_bandwidth == pytest.approx(3e9, rel=0.01)


def test_unknown_devices_are_ignored(pool):
    pool.report_health([sick("other"), well("another", 1e9)])
    assert store(pool, KEYS) == KEYS
