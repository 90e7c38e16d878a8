"""The life of a chunk: stored, found, loaded, dropped; and everything an engine may do at the wrong moment."""

import random

import pytest

from forebay.storage.errors import ConfigError, PoolBusyError, PoolError
from forebay.storage.plan import Extent, Span
from forebay.storage.pool import Lookup
from tests.storage.poolkit import STRIPE, check_slots, checksums, finish, keys_of, load, store

KEYS = keys_of("k", 4)


@pytest.fixture
def pool(pools):
    return pools.open(pools.config(ram=16, ssds=[64, 64]))


def test_from_miss_to_ready_and_back(pool):
    assert pool.lookup(KEYS[0]) is Lookup.MISS
    (plan,) = pool.prepare_store(KEYS[:1], [3 * STRIPE])
    assert pool.lookup(KEYS[0]) is Lookup.WRITING
    assert pool.prepare_load(KEYS[:1]) == []
    finish(pool, [plan])
    assert pool.lookup(KEYS[0]) is Lookup.READY
    pool.drop(KEYS[:1])
    assert pool.lookup(KEYS[0]) is Lookup.MISS
    assert all(device.used_bytes == 0 for device in pool.stats().devices)


def test_a_load_reads_what_the_store_wrote(pool):
    (stored,) = pool.prepare_store(KEYS[:1], [2 * STRIPE + 100])
    finish(pool, [stored])
    (plan,) = pool.prepare_load(KEYS[:1])
    assert plan.key == stored.key == KEYS[0]
    assert plan.spans == stored.spans
    assert [span.length for span in plan.spans] == [STRIPE, STRIPE, 100]
    assert plan.extents == stored.extents
    assert plan.checksums == tuple(map(tuple, checksums(KEYS[0], 3)))
    assert plan.verify


def test_verification_can_be_switched_off(pools):
    pool = pools.open(pools.config(ram=16, verify=False))
    store(pool, KEYS)
    assert not any(plan.verify for plan in load(pool, KEYS))


def test_what_is_there_or_on_its_way_is_not_stored_again(pool):
    first = pool.prepare_store(KEYS[:2], [STRIPE])
    assert [plan.key for plan in pool.prepare_store(KEYS, [STRIPE])] == KEYS[2:]
    finish(pool, first)
    assert pool.prepare_store(KEYS, [STRIPE]) == []
    assert [plan.key for plan in pool.prepare_store([b"twice", b"twice"], [STRIPE])] == [b"twice"]


def test_segments_may_depend_on_the_key(pool):
    sizes = {KEYS[0]: [STRIPE], KEYS[1]: [STRIPE, 5000], KEYS[2]: [], KEYS[3]: [0, 10, 0]}
    plans = pool.prepare_store(KEYS, sizes.__getitem__)
    assert {plan.key: plan.spans for plan in plans} == {
        KEYS[0]: (Span(0, 4096),),
        KEYS[1]: (Span(0, 4096), Span(4096, 4096), Span(8192, 904)),
        KEYS[3]: (Span(0, 10),),
    }


def test_each_layer_group_is_striped_over_all_devices(pools):
    pool = pools.open(pools.config(ssds=[99, 99, 99]))
    (plan,) = pool.prepare_store(KEYS[:1], [6 * STRIPE] * 4)
    for group in range(4):
        devices = [extent.device for extent in plan.extents[6 * group : 6 * group + 6]]
        assert devices == [0, 0, 1, 1, 2, 2]


def test_a_chunk_is_one_run_on_each_device(pool):
    for plan in pool.prepare_store(KEYS, [7 * STRIPE]):
        by_device = {}
        for extent in [*plan.extents, *filter(None, plan.copies)]:
            by_device.setdefault(extent.device, []).append(extent.slot)
        for slots in by_device.values():
            assert sorted(slots) == list(range(min(slots), min(slots) + len(slots)))


def test_every_lane_has_its_own_checksums(pools):
    pool = pools.open(pools.config(ram=64), lanes=3)
    store(pool, KEYS[:1], stripes=2)
    (plan,) = load(pool, KEYS[:1])
    assert plan.checksums == tuple(map(tuple, checksums(KEYS[0], 2, lanes=3)))
    assert pool.stats().devices[0].capacity_bytes == 21 * 3 * STRIPE


@pytest.mark.parametrize("wrong", [[], [[1]], [[1, 2], [3, 4]], [[1, 2, 3]]])
def test_incomplete_checksums_are_a_failed_store(pool, wrong):
    pool.prepare_store(KEYS[:1], [2 * STRIPE])
    pool.complete_store({KEYS[0]: wrong})
    assert pool.lookup(KEYS[0]) is Lookup.MISS
    assert pool.stats().failed_stores == 1
    assert all(device.used_bytes == 0 for device in pool.stats().devices)


def test_failed_stores_leave_nothing(pool):
    plans = pool.prepare_store(KEYS, [STRIPE])
    pool.complete_store({plan.key: checksums(plan.key, 1) for plan in plans}, failed=KEYS[1:3])
    assert [pool.lookup(key) for key in KEYS] == [Lookup.READY, Lookup.MISS, Lookup.MISS, Lookup.READY]
    stats = pool.stats()
    assert (stats.stored, stats.failed_stores, stats.pending_store_bytes) == (2, 2, 0)


def test_failed_loads_miss_at_once_and_free_their_slots_with_the_last_reader(pool):
    store(pool, KEYS[:1])
    used = [device.used_bytes for device in pool.stats().devices]
    pool.prepare_load([KEYS[0], KEYS[0]])
    pool.complete_load(KEYS[:1], failed=KEYS[:1])
    assert pool.lookup(KEYS[0]) is Lookup.MISS
    assert pool.prepare_load(KEYS[:1]) == []
    assert [device.used_bytes for device in pool.stats().devices] == used
    pool.complete_load(KEYS[:1])
    assert all(device.used_bytes == 0 for device in pool.stats().devices)


@pytest.mark.parametrize("listed", [True, False])
def test_failed_keys_may_be_listed_apart(pool, listed):
    store(pool, KEYS)
    pool.prepare_load(KEYS)
    pool.complete_load(KEYS if listed else KEYS[1:], failed=[KEYS[0]])
    assert pool.stats().leases == 0
    assert pool.lookup(KEYS[0]) is Lookup.MISS


def test_a_chunk_stored_anew_does_not_take_the_slots_still_read(pool):
    (old,) = pool.prepare_store(KEYS[:1], [STRIPE])
    finish(pool, [old])
    pool.prepare_load(KEYS[:1])
    pool.drop(KEYS[:1])
    (new,) = pool.prepare_store(KEYS[:1], [STRIPE])
    assert not set(new.extents) & set(old.extents)
    finish(pool, [new])
    pool.prepare_load(KEYS[:1])
    pool.complete_load(KEYS[:1])
    assert old.extents[0].slot not in pool._index.spaces[old.extents[0].device].allocate(1)
    pool.complete_load(KEYS[:1])
    assert pool.stats().leases == 0
    assert pool.lookup(KEYS[0]) is Lookup.READY


def test_dropped_while_written(pool):
    plans = pool.prepare_store(KEYS[:1], [STRIPE])
    pool.drop(KEYS[:1])
    assert pool.lookup(KEYS[0]) is Lookup.MISS
    assert pool.prepare_store(KEYS[:1], [STRIPE]) == [], "someone is still writing under this key"
    finish(pool, plans)
    assert pool.lookup(KEYS[0]) is Lookup.MISS
    assert all(device.used_bytes == 0 for device in pool.stats().devices)
    assert store(pool, KEYS[:1]) == KEYS[:1]


def test_reset_in_the_middle_of_everything(pool):
    store(pool, KEYS[:2])
    pool.prepare_load(KEYS[:1])
    writing = pool.prepare_store(KEYS[2:], [STRIPE])
    pool.reset()
    assert [pool.lookup(key) for key in KEYS] == [Lookup.MISS] * 4
    pool.complete_load(KEYS[:1])
    finish(pool, writing)
    stats = pool.stats()
    assert (stats.chunks, stats.leases, stats.writing, stats.pending_store_bytes) == (0, 0, 0, 0)
    assert all(device.used_bytes == 0 for device in stats.devices)
    assert store(pool, KEYS) == KEYS


def test_nonsense_is_harmless(pool):
    pool.complete_load([b"nobody"], failed=[b"no"])
    pool.complete_store({b"nobody": [[1]]}, failed=[b"no"])
    pool.drop([b"nobody", b"nobody"])
    pool.touch([b"nobody"])
    assert pool.prepare_load([b"nobody"]) == []
    assert pool.prepare_store([], [STRIPE]) == []
    plans = pool.prepare_store(KEYS, [STRIPE])
    for _ in range(3):
        finish(pool, plans)
    for _ in range(3):
        pool.complete_load(KEYS)
    assert [pool.lookup(key) for key in KEYS] == [Lookup.READY] * 4
    assert pool.stats().stored == 4
    pool.close()
    pool.close()


def test_pending_stores_are_bounded(pools):
    pool = pools.open(pools.config(ram=64, max_pending_store=3 * STRIPE))
    plans = pool.prepare_store(KEYS, [STRIPE])
    assert [plan.key for plan in plans] == KEYS[:3]
    assert pool.stats().dropped_stores == 1
    assert pool.prepare_store([b"other"], [STRIPE]) == []
    finish(pool, plans)
    assert store(pool, KEYS[3:]) == KEYS[3:]


def test_stats_count_lookups_and_hits(pool):
    store(pool, KEYS[:3])
    for key in KEYS:
        pool.lookup(key)
    stats = pool.stats()
    assert (stats.lookups, stats.hits, stats.chunks, stats.stored) == (4, 3, 3, 3)
    assert [device.name for device in stats.devices] == ["ram", "ssd0", "ssd1"]
    assert stats.devices[0].read_bandwidth == 8e9


def test_where_a_hit_would_come_from(pools):
    pool = pools.open(pools.config(ram=2, ssds=[64], placement="tiered"))
    store(pool, KEYS[:2])
    assert [pool.in_memory(key) for key in KEYS[:3]] == [True, True, False]
    store(pool, KEYS[2:])
    assert [pool.in_memory(key) for key in KEYS] == [False, False, True, True]


def test_one_owner_at_a_time(pools, pool):
    with pytest.raises(PoolBusyError, match=r"pool .*/pool is in use by process \d+; stop it, or give"):
        pools.open(pool.config)
    pool.close()
    pools.open(pool.config)


def test_device_too_small_for_its_ranks(pools):
    with pytest.raises(
        ConfigError, match=r"device 'ram' has 8.0 KiB for 4 ranks, less than one stripe \(4.0 KiB\) each"
    ):
        pools.open(pools.config(ram=2), lanes=4)
    pools.open(pools.config(ram=2))


def test_folder_that_cannot_be_written(pools):
    (pools.folder / "blocked").write_text("")
    with pytest.raises(PoolError, match="`path`"):
        pools.open(pools.config(ram=2, path=pools.folder / "blocked" / "pool"))


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_thousand_rounds_of_an_unreliable_engine_leave_nothing_behind(pools, durable, policy):
    """Aborts, repeats, losses and resets in any order: no lease, no pending byte and no slot is left over."""
    pool = pools.open(pools.config(ram=20, ssds=[30, 25], durable=durable, policy=policy))
    chance = random.Random(1)
    stores, loads = [], []
    for _ in range(1000):
        prompt = keys_of(f"p{chance.randrange(6)}", 8)[: chance.randint(1, 8)]
        action = chance.random()
        if action < 0.35:
            stores += pool.prepare_store(prompt, [chance.choice([1, 2, 5]) * STRIPE])
        elif action < 0.6:
            loads += [plan.key for plan in pool.prepare_load(prompt)]
        elif action < 0.75 and stores:
            some, stores = stores[: len(stores) // 2], stores[len(stores) // 2 :]
            good = {plan.key: checksums(plan.key, len(plan.spans)) for plan in some if chance.random() < 0.7}
            pool.complete_store(good, failed=[plan.key for plan in some if plan.key not in good])
        elif action < 0.93 and loads:
            some, loads = loads[: len(loads) // 2], loads[len(loads) // 2 :]
            pool.complete_load(some, failed=[key for key in some if chance.random() < 0.1])
        elif action < 0.97:
            pool.drop(chance.sample(prompt, 1))
        elif action < 0.98:
            pool.reset()
        check_slots(pool)
    finish(pool, stores)
    pool.complete_load(loads)
    stats = pool.stats()
    assert (stats.leases, stats.writing, stats.pending_store_bytes) == (0, 0, 0)
    pool.reset()
    assert all(device.used_bytes == 0 for device in pool.stats().devices)


def test_plans_name_devices_by_position(pool):
    (plan,) = pool.prepare_store(KEYS[:1], [STRIPE])
    assert plan.extents == (Extent(0, 0),)
    assert plan.copies == (Extent(1, 0),)
    assert plan.generation == 1
