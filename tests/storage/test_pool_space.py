"""What is placed where, what makes room for it, and what never does."""

from collections import Counter

import pytest

from forebay.storage.placement import ideal_time
from forebay.storage.pool import Lookup
from forebay.storage.profile import Profile
from tests.storage.poolkit import STRIPE, check_slots, checksums, finish, keys_of, load, store

WHOLE = {"high": 1.0, "low": 1.0}


def ready(pool, keys):
    return [key for key in keys if pool.lookup(key) is Lookup.READY]


def used(pool):
    return [device.used_bytes // STRIPE for device in pool.stats().devices]


def set_bandwidths(config, *rates):
    """Leave a calibrated profile beside the pool."""
    profile = Profile.load(config.profile_path, config.devices)
    for device, rate in zip(profile.devices.values(), rates, strict=True):
        device.read_bandwidth = rate
    config.path.mkdir(parents=True, exist_ok=True)
    profile.save(config.profile_path)


def test_any_prefix_is_read_at_the_speed_of_all(pools):
    config = pools.config(ssds=[4000, 2000, 1000], placement="bandwidth")
    rates = [400e6, 200e6, 100e6]
    set_bandwidths(config, *rates)
    pool = pools.open(config)
    keys = keys_of("long", 200)
    store(pool, keys, stripes=6)
    read, worst = Counter(), 0.0
    for count, plan in enumerate(pool.prepare_load(keys), 1):
        for span, extent in zip(plan.spans, plan.extents):
            read[extent.device] += span.length
        time = max(read[device] / rate for device, rate in enumerate(rates))
        if count >= 8:
            worst = max(worst, time / ideal_time(sum(read.values()), rates))
    assert worst <= 1.1


def test_room_on_slow_devices_is_used_before_anything_is_evicted(pools):
    config = pools.config(ssds=[10, 30], watermarks=WHOLE)
    set_bandwidths(config, 4e9, 1e9)
    pool = pools.open(config)
    keys = keys_of("k", 20)
    assert store(pool, keys, stripes=2) == keys
    assert ready(pool, keys) == keys
    assert used(pool) == [10, 30]
    assert pool.stats().evictions == 0


def test_the_tail_of_the_coldest_prompt_leaves_first(pools):
    pool = pools.open(pools.config(ssds=[10], watermarks=WHOLE))
    a, b = keys_of("a", 5), keys_of("b", 5)
    store(pool, a)
    store(pool, b)
    pool.touch(a)
    store(pool, [b"new"])
    assert ready(pool, a + b) == a + b[:4]
    store(pool, keys_of("c", 6))
    assert ready(pool, a + b) == a[:3]


def test_a_prompt_does_not_evict_its_own_head(pools):
    pool = pools.open(pools.config(ssds=[8], watermarks=WHOLE))
    keys = keys_of("k", 20)
    store(pool, keys[:6])
    assert store(pool, keys) == keys[6:8]
    assert ready(pool, keys) == keys[:8]
    assert pool.stats().dropped_stores == 12


def test_what_is_read_or_written_stays(pools):
    pool = pools.open(pools.config(ssds=[8], watermarks=WHOLE))
    read, written = keys_of("r", 4), keys_of("w", 4)
    store(pool, read)
    pool.prepare_load(read)
    plans = pool.prepare_store(written, [STRIPE])
    assert store(pool, keys_of("new", 3)) == []
    assert ready(pool, read) == read
    finish(pool, plans)
    pool.complete_load(read[2:])
    assert store(pool, keys_of("new", 7)) == keys_of("new", 6)
    assert ready(pool, read) == read[:2]
    check_slots(pool)


def test_eviction_stops_at_the_low_watermark(pools):
    pool = pools.open(pools.config(ssds=[100], watermarks={"high": 0.9, "low": 0.5}))
    for key in keys_of("k", 90):
        store(pool, [key])
    assert pool.stats().evictions == 0
    store(pool, [b"one more"])
    assert used(pool) == [50]
    assert pool.stats().evictions == 41


def test_one_store_evicts_no_more_than_a_batch_beyond_its_need(pools):
    pool = pools.open(pools.config(ram=1000, watermarks={"high": 1.0, "low": 0.1}))
    store(pool, keys_of("k", 1000))
    store(pool, [b"one more"])
    assert pool.stats().evictions == 64


def test_a_chunk_larger_than_the_pool_evicts_nothing(pools):
    pool = pools.open(pools.config(ssds=[8]))
    keys = store(pool, keys_of("k", 8))
    assert store(pool, [b"huge"], stripes=9) == []
    assert ready(pool, keys) == keys


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize("placement", ["bandwidth", "equal", "hash", "tiered", "single"])
@pytest.mark.parametrize("durable", [True, False])
def test_stores_beyond_capacity_never_pass_the_bound(pools, placement, policy, durable):
    pool = pools.open(pools.config(ram=16, ssds=[24, 40], placement=placement, policy=policy, durable=durable))
    for round_ in range(60):
        keys = keys_of(f"p{round_}", 4)
        assert store(pool, keys, stripes=1 + round_ % 3), "room can always be made"
        check_slots(pool)
        load(pool, keys)
    assert pool.stats().evictions > 0
    assert ready(pool, keys_of("p59", 4)) == keys_of("p59", 4)


def test_stores_racing_evictions(pools):
    """Many prompts at once, more than fit, finishing in another order than they began."""
    pool = pools.open(pools.config(ssds=[20, 12], max_pending_store=16 * STRIPE))
    waiting = []
    for round_ in range(200):
        waiting += pool.prepare_store(keys_of(f"p{round_}", 3), [2 * STRIPE])
        extents = [extent for plan in waiting for extent in plan.extents]
        assert len(set(extents)) == len(extents), "two writers, one slot"
        if round_ % 3 == 2:
            waiting.reverse()
            finish(pool, waiting[:4])
            waiting = waiting[4:]
        check_slots(pool)
    finish(pool, waiting)
    assert pool.stats().pending_store_bytes == 0


class TestDurable:
    """Every stripe lies on a persistent device; memory is a faster second home."""

    def test_stripes_in_memory_have_a_copy(self, pools):
        pool = pools.open(pools.config(ram=64, ssds=[64, 64]))
        for plan in pool.prepare_store(keys_of("k", 10), [5 * STRIPE]):
            for extent, copy in zip(plan.extents, plan.copies):
                assert (copy is None) == (extent.device != 0)
                assert copy is None or copy.device in (1, 2)

    def test_full_memory_demotes_the_coldest(self, pools):
        pool = pools.open(pools.config(ram=8, ssds=[64], placement="tiered", watermarks=WHOLE))
        a, b = keys_of("a", 4), keys_of("b", 4)
        store(pool, a + b)
        pool.touch(a)
        store(pool, keys_of("c", 2))
        assert [pool.in_memory(key) for key in a + b] == [True] * 6 + [False] * 2
        assert ready(pool, a + b) == a + b
        stats = pool.stats()
        assert (stats.demotions, stats.evictions) == (2, 0)
        (plan,) = load(pool, [b[3]])
        assert plan.extents[0].device == 1
        assert plan.checksums == tuple(map(tuple, checksums(b[3], 1)))

    def test_demotion_goes_on_until_the_persistent_devices_are_full(self, pools):
        pool = pools.open(pools.config(ram=8, ssds=[40], watermarks=WHOLE))
        keys = keys_of("k", 40)
        assert store(pool, keys) == keys
        assert ready(pool, keys) == keys
        assert used(pool) == [8, 40]
        store(pool, [b"one more"])
        assert pool.stats().evictions == 1

    def test_chunks_being_read_are_not_demoted(self, pools):
        pool = pools.open(pools.config(ram=4, ssds=[64], placement="tiered", watermarks=WHOLE))
        keys = store(pool, keys_of("k", 4))
        pool.prepare_load(keys)
        (plan,) = pool.prepare_store([b"next"], [STRIPE])
        assert plan.extents[0].device == 1
        pool.complete_load(keys)
        (plan,) = pool.prepare_store([b"after"], [STRIPE])
        assert plan.extents[0].device == 0

    def test_without_room_for_copies_memory_is_still_used(self, pools):
        """The persistent device is full of what is being read: the new chunk lives in memory alone."""
        pool = pools.open(pools.config(ram=8, ssds=[4], watermarks=WHOLE))
        first = store(pool, keys_of("k", 4))
        pool.prepare_load(first)
        (plan,) = pool.prepare_store([b"next"], [2 * STRIPE])
        assert {extent.device for extent in plan.extents} == {0}
        assert plan.copies == (None, None)
        finish(pool, [plan])
        pool.complete_load(first)
        for round_ in range(20):
            store(pool, keys_of(f"p{round_}", 2))
            check_slots(pool)

    def test_copies_are_balanced_too(self, pools):
        config = pools.config(ram=600, ssds=[600, 600])
        set_bandwidths(config, 8e9, 3e9, 1e9)
        plans = pools.open(config).prepare_store(keys_of("k", 80), [6 * STRIPE])
        after_restart = Counter(
            (copy or extent).device for plan in plans for extent, copy in zip(plan.extents, plan.copies)
        )
        assert after_restart[1] == pytest.approx(3 * after_restart[2], rel=0.05)

    @pytest.mark.parametrize(("ram", "ssd", "durable", "idle"), [(8, 64, True, 0), (64, 8, False, 0), (64, 8, True, 1)])
    def test_memory_that_cannot_be_used_is_pointed_out(self, pools, caplog, ram, ssd, durable, idle):
        pools.open(pools.config(ram=ram, ssds=[ssd], durable=durable))
        hint = "holds what fits on its persistent devices (32.0 KiB), less than its memory (256.0 KiB)"
        assert caplog.text.count(hint) == idle


class TestExclusive:
    """Not durable: every stripe lies once, and the capacities add up."""

    def test_capacity_is_the_sum(self, pools):
        pool = pools.open(pools.config(ram=20, ssds=[30, 10], durable=False, watermarks=WHOLE))
        keys = keys_of("k", 30)
        plans = pool.prepare_store(keys, [2 * STRIPE])
        assert len(plans) == 30
        assert all(plan.copies == (None, None) for plan in plans)
        assert used(pool) == [20, 30, 10]

    def test_memory_alone(self, pools):
        pool = pools.open(pools.config(ram=10, watermarks=WHOLE))
        keys = store(pool, keys_of("k", 10))
        assert ready(pool, keys) == keys
        assert store(pool, [b"new"]) == [b"new"]
        assert ready(pool, keys) == keys[:9]


def test_whole_chunk_placements_keep_chunks_whole(pools):
    for placement in ("hash", "tiered", "single"):
        pool = pools.open(
            pools.config(ssds=[64, 64], placement=placement, path=pools.folder / placement, durable=False)
        )
        plans = pool.prepare_store(keys_of("k", 10), [4 * STRIPE])
        assert all(len({extent.device for extent in plan.extents}) == 1 for plan in plans)
        pool.close()
        for ssd in (0, 1):
            (pools.folder / f"ssd{ssd}").unlink()
