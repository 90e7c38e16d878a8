"""What a restart finds: everything that was published, nothing that was not, whatever happened in between."""

import logging
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay.storage.errors import JournalError
from forebay.storage.namespace import Namespace
from forebay.storage.pool import Lookup
from tests.storage.poolkit import NAMESPACE, STRIPE, check_slots, checksums, finish, keys_of, load, store

KEYS = keys_of("k", 6)


def ready(pool, keys=KEYS):
    return [key for key in keys if pool.lookup(key) is Lookup.READY]


def reopen(pools, pool, **changes):
    pool.close()
    return pools.open(pool.config.model_copy(update=changes), pool.namespace, pool.lanes)


def assert_intact(pool, keys, stripes):
    """Every chunk has plans, checksums and places of its own."""
    plans = load(pool, keys)
    assert [plan.key for plan in plans] == keys
    for plan in plans:
        assert plan.checksums == tuple(map(tuple, checksums(plan.key, stripes, pool.lanes)))
        assert plan.verify
        assert all(extent.device == 1 for extent in plan.extents)
    check_slots(pool)


@pytest.mark.parametrize("stop", ["close", "crash"])
def test_everything_is_warm_again(pools, stop):
    pool = pools.open(pools.config(ram=64, ssds=[64]))
    store(pool, KEYS, stripes=3)
    getattr(pool if stop == "close" else pools, stop)(*([] if stop == "close" else [pool]))
    again = pools.open(pool.config)
    assert ready(again) == KEYS
    assert (again.stats().recovered, again.stats().lost) == (6, 0)
    assert_intact(again, KEYS, 3)


def test_what_lay_in_memory_is_read_from_the_copies(pools):
    pool = pools.open(pools.config(ram=64, ssds=[64]))
    plans = pool.prepare_store(KEYS, [3 * STRIPE])
    finish(pool, plans)
    assert any(extent.device == 0 for plan in plans for extent in plan.extents)
    again = reopen(pools, pool)
    for plan, stored in zip(load(again, KEYS), plans):
        assert plan.extents == tuple(copy or extent for extent, copy in zip(stored.extents, stored.copies))
    assert again.stats().devices[0].used_bytes == 0


def test_without_copies_it_is_gone(pools):
    pool = pools.open(pools.config(ram=3, ssds=[64], durable=False, placement="tiered"))
    store(pool, KEYS)
    again = reopen(pools, pool)
    assert ready(again) == KEYS[3:]
    assert again.stats().devices[1].used_bytes == 3 * STRIPE


def test_memory_alone_starts_cold(pools):
    pool = pools.open(pools.config(ram=64))
    store(pool, KEYS)
    again = reopen(pools, pool)
    assert ready(again) == []
    assert store(again, KEYS) == KEYS


def test_chunks_not_published_are_not_there(pools):
    pool = pools.open(pools.config(ssds=[64]))
    store(pool, KEYS[:2])
    pool.prepare_store(KEYS[2:], [STRIPE])
    again = reopen(pools, pool)
    assert ready(again) == KEYS[:2]
    assert again.stats().devices[0].used_bytes == 2 * STRIPE


@pytest.mark.parametrize("stop", ["close", "crash"])
def test_what_was_given_up_stays_away(pools, stop):
    pool = pools.open(pools.config(ssds=[8], watermarks={"high": 1.0, "low": 1.0}))
    store(pool, KEYS)
    pool.drop(KEYS[:1])
    pool.prepare_load(KEYS[1:2])
    pool.complete_load([], failed=KEYS[1:2])
    fresh = keys_of("n", 5)
    store(pool, fresh)
    expected = ready(pool, KEYS + fresh)
    assert len(expected) == 8
    pool.close() if stop == "close" else pools.crash(pool)
    again = pools.open(pool.config)
    assert ready(again, KEYS + fresh) == expected
    check_slots(again)


def test_a_drop_is_in_the_file_before_its_slots_are_handed_out(pools):
    """A crash right after the plan must not find the old chunk at the place that is being overwritten."""
    pool = pools.open(pools.config(ssds=[4], watermarks={"high": 1.0, "low": 1.0}))
    store(pool, KEYS[:4])
    assert len(pool.prepare_store([b"new"], [2 * STRIPE])) == 1
    pools.crash(pool)
    assert ready(pools.open(pool.config)) == KEYS[:2]


def test_recovered_chunks_are_verified_once_even_if_verification_is_off(pools):
    pool = pools.open(pools.config(ssds=[64], verify=False))
    store(pool, KEYS)
    again = reopen(pools, pool)
    assert again.config.verify is False
    again.complete_load([], failed=[])
    plans = again.prepare_load(KEYS)
    assert all(plan.verify for plan in plans)
    again.complete_load(KEYS, failed=KEYS[:1])
    assert [plan.verify for plan in load(again, KEYS)] == [False] * 5
    assert [plan.verify for plan in load(reopen(pools, again), KEYS)] == [True] * 5


def test_order_of_eviction_survives(pools):
    pool = pools.open(pools.config(ssds=[6], watermarks={"high": 1.0, "low": 1.0}))
    for key in KEYS:
        store(pool, [key])
    again = reopen(pools, pool)
    store(again, [b"new"])
    assert ready(again) == KEYS[1:]


class TestNamespaces:
    """Nothing of one model is ever served to another."""

    def test_never_mix(self, pools):
        config = pools.config(ssds=[64])
        spaces = [NAMESPACE, Namespace(model="m", weights="w2"), Namespace(model="m", weights="w", dtype="fp8")]
        for number, space in enumerate(spaces):
            pool = pools.open(config, space)
            assert ready(pool) == []
            store(pool, KEYS[: number + 1])
            pool.close()
        for number, space in enumerate(spaces):
            pool = pools.open(config, space)
            assert ready(pool) == KEYS[: number + 1]
            assert pool.stats().chunks == 6
            pool.close()

    def test_reset_empties_only_ones_own(self, pools):
        config, other = pools.config(ssds=[64]), Namespace(model="m", weights="other")
        pool = pools.open(config, other)
        store(pool, KEYS)
        pool.close()
        pool = pools.open(config)
        store(pool, KEYS[:3])
        pool.reset()
        assert ready(pool) == []
        store(pool, KEYS[:1])
        pools.crash(pool)
        pool = pools.open(config)
        assert ready(pool) == KEYS[:1]
        pool.close()
        assert ready(pools.open(config, other)) == KEYS

    def test_others_are_evicted_first(self, pools):
        config, other = pools.config(ssds=[8], watermarks={"high": 1.0, "low": 1.0}), Namespace(model="m", weights="o")
        ours = pools.open(config)
        store(ours, KEYS[:4])
        ours.close()
        pool = pools.open(config, other)
        store(pool, KEYS[:4])
        pool.close()
        pool = pools.open(config)
        store(pool, keys_of("n", 4))
        assert ready(pool) == KEYS[:4]
        assert pool.stats().chunks == 8


class TestChangedConfiguration:
    """Chunks that a change makes unreachable are dropped, with the number and the reason in the log."""

    @pytest.fixture
    def pool(self, pools):
        pool = pools.open(pools.config(ram=8, ssds=[64, 64], placement="tiered"))
        assert store(pool, KEYS) == KEYS
        return pool

    def test_adding_a_device_keeps_everything(self, pools, pool):
        again = reopen(pools, pool, devices=pools.config(ram=8, ssds=[64, 64, 64]).devices)
        assert ready(again) == KEYS
        assert store(again, [b"new"]) == [b"new"]

    def test_reordering_keeps_everything(self, pools, pool):
        again = reopen(pools, pool, devices=pool.config.devices[::-1])
        assert ready(again) == KEYS
        assert {extent.device for plan in load(again, KEYS) for extent in plan.extents} == {0, 1}

    @pytest.mark.parametrize("gone", [1, 2])
    def test_removing_a_device_drops_what_lay_there(self, pools, pool, gone, caplog):
        there = [plan.key for plan in load(pool, KEYS) if pool_copy_device(pool, plan.key) != gone]
        devices = tuple(device for number, device in enumerate(pool.config.devices) if number != gone)
        with caplog.at_level(logging.WARNING):
            again = reopen(pools, pool, devices=devices)
        assert 0 < len(there) < 6
        assert ready(again) == there
        assert f"{6 - len(there)} stored chunks are dropped: device 'ssd{gone - 1}' was removed" in caplog.text
        assert ready(reopen(pools, again, devices=pool.config.devices)) == there, "they do not come back"

    def test_growing_keeps_and_shrinking_drops_what_is_cut_off(self, pools, caplog):
        pool = pools.open(pools.config(ssds=[8]))
        store(pool, KEYS)
        grown = reopen(pools, pool, devices=pools.config(ssds=[16]).devices)
        assert ready(grown) == KEYS
        store(grown, keys_of("n", 4))
        with caplog.at_level(logging.WARNING):
            shrunk = reopen(pools, grown, devices=pools.config(ssds=[4]).devices)
        assert ready(shrunk) == KEYS[:4][::1]
        assert "device 'ssd0' became smaller" in caplog.text
        check_slots(shrunk)

    def test_resizing_moves_the_lanes(self, pools, caplog):
        pool = pools.open(pools.config(ssds=[16]), lanes=2)
        store(pool, KEYS)
        pool.close()
        again = pools.open(pools.config(ssds=[32]), lanes=2)
        assert ready(again) == []
        assert "6 stored chunks are dropped: device 'ssd0' was resized" in caplog.text

    @pytest.mark.parametrize(
        ("changes", "lanes", "reason"),
        [
            ({"stripe": 2 * STRIPE}, 1, "stripe size changed from 4096 to 8192"),
            ({}, 2, "number of ranks changed from 1 to 2"),
        ],
    )
    def test_other_slots_drop_everything(self, pools, pool, changes, lanes, reason, caplog):
        pool.close()
        again = pools.open(pool.config.model_copy(update=changes), lanes=lanes)
        assert ready(again) == []
        assert all(device.used_bytes == 0 for device in again.stats().devices)
        assert f"6 stored chunks are dropped: {reason}" in caplog.text

    def test_a_moved_device_is_empty(self, pools, pool, caplog):
        devices = list(pool.config.devices)
        devices[1] = devices[1].model_copy(update={"path": pools.folder / "elsewhere"})
        devices[2] = devices[2].model_copy(update={"path": pools.folder / "elsewhere too"})
        assert ready(reopen(pools, pool, devices=tuple(devices))) == []
        assert "moved from" in caplog.text

    def test_a_pool_with_a_new_identity_is_empty(self, pools, caplog):
        pool = pools.open(pools.config(ssds=[16]))
        store(pool, KEYS)
        pool.close()
        (pool.config.path / "uuid").unlink()
        (pools.folder / "ssd0").unlink()
        assert ready(pools.open(pool.config)) == []
        assert "belong to another pool" in caplog.text


def pool_copy_device(pool, key):
    """Where the one persistent stripe of a chunk lies."""
    from forebay.storage.plan import unpack

    entry = pool._index.get(pool._prefix + key)
    (place,) = unpack(entry.copies or entry.extents)
    return place >> 32


class TestDamage:
    """A torn or altered journal costs chunks, never an exception, never a chunk that was not published."""

    @pytest.fixture
    def recorded(self, memory_pools):
        """A pool, its journal, and what was true after each of its records."""
        pool = memory_pools.open(memory_pools.config(ssds=[4], watermarks={"high": 1.0, "low": 1.0}))
        history = [(pool._journal.size, set())]
        for number in range(5):
            store(pool, [b"key%d" % number], stripes=2)
            history.append((pool._journal.size, {entry.name[16:] for entry in pool._index}))
        pool.close()
        return pool.config, pool.config.journal_path.read_bytes(), history

    def test_torn_at_every_byte(self, memory_pools, recorded):
        config, data, history = recorded
        for length in range(history[0][0], len(data) + 1):
            config.journal_path.write_bytes(data[:length])
            pool = memory_pools.open(config)
            found = {entry.name[16:] for entry in pool._index}
            earlier = [chunks for size, chunks in history if size <= length]
            later = next((chunks for size, chunks in history if size > length), earlier[-1])
            assert found in (earlier[-1], earlier[-1] & later), "a store is a DROP, if it evicts, and a PUT"
            check_slots(pool)
            pool.close()

    def test_every_altered_byte(self, memory_pools, recorded):
        config, data, history = recorded
        published = set().union(*(chunks for _, chunks in history))
        for position in range(history[0][0], len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 0x41
            config.journal_path.write_bytes(damaged)
            pool = memory_pools.open(config)
            assert {entry.name[16:] for entry in pool._index} <= published
            assert all(plan.verify for plan in load(pool, sorted(published)))
            check_slots(pool)
            pool.close()

    def test_a_pool_goes_on_after_a_torn_tail(self, memory_pools, recorded):
        config, data, _ = recorded
        config.journal_path.write_bytes(data[:-5])
        pool = memory_pools.open(config)
        store(pool, [b"new"])
        pool.close()
        assert ready(memory_pools.open(config), [b"new"]) == [b"new"]

    def test_an_empty_journal_is_a_new_one(self, memory_pools, recorded):
        config, _, _ = recorded
        config.journal_path.write_bytes(b"")
        pool = memory_pools.open(config)
        assert pool.stats().chunks == 0
        store(pool, KEYS[:1])
        assert ready(reopen(memory_pools, pool)) == KEYS[:1]

    def test_a_foreign_journal_is_left_alone(self, memory_pools, recorded):
        config, _, _ = recorded
        config.journal_path.write_bytes(b"someone's notes")
        for _ in range(2):
            with pytest.raises(JournalError, match="not a forebay journal; give the pool another path"):
                memory_pools.open(config)
        assert config.journal_path.read_bytes() == b"someone's notes"

    def test_two_chunks_at_one_place_are_both_dropped(self, memory_pools, recorded):
        config, _, _ = recorded
        pool = memory_pools.open(config)
        pool.reset()
        (a, b) = pool.prepare_store([b"a", b"b"], [2 * STRIPE])
        pool._index.get(pool._prefix + b"b").extents = pool._index.get(pool._prefix + b"a").extents
        finish(pool, [a, b])
        memory_pools.crash(pool)
        again = memory_pools.open(config)
        assert again.stats().chunks == 0
        check_slots(again)


@contextmanager
def no_file_beyond(size):
    """A real error of the file system: files cannot grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestJournalErrors:
    """The journal's disk is full or gone: the pool serves on, says so once, and is durable again when it can be."""

    def test_the_pool_goes_on(self, pools, caplog):
        pool = pools.open(pools.config(ssds=[64]))
        store(pool, KEYS[:2])
        with no_file_beyond(pool._journal.size + 100):
            for key in KEYS[2:]:
                assert store(pool, [key], stripes=2) == [key]
            pool.drop(KEYS[:1])
            assert ready(pool) == KEYS[1:]
        assert pool.stats().journal_problem == "File too large"
        assert caplog.text.count("the pool goes on") == 1
        assert ready(reopen(pools, pool)) == KEYS[1:], "a proper stop writes a new journal"

    def test_a_crash_then_finds_what_was_recorded_before(self, pools):
        pool = pools.open(pools.config(ssds=[64]))
        store(pool, KEYS[:2])
        with no_file_beyond(pool._journal.size + 10):
            store(pool, KEYS[2:])
        pools.crash(pool)
        again = pools.open(pool.config)
        assert ready(again) == KEYS[:2]
        assert all(plan.verify for plan in load(again, KEYS))

    def test_even_from_the_start(self, pools):
        config = pools.config(ssds=[64])
        pools.open(config).close()
        with no_file_beyond(0):
            pool = pools.open(config)
            assert store(pool, KEYS) == KEYS
            pool.close()
            assert pool.stats().journal_problem


CHILD = """
import sys
from forebay.storage.pool import Pool
from tests.storage.poolkit import Pools, NAMESPACE, checksums, keys_of, STRIPE
from pathlib import Path
pools = Pools(Path(sys.argv[1]))
pool = pools.open(pools.config(ram=8, ssds=[40], max_pending_store=8 * STRIPE))
round_ = int(sys.argv[2])
while True:
    round_ += 1
    plans = pool.prepare_store(keys_of(f"r{round_}", 3), [2 * STRIPE])
    pool.complete_store({plan.key: checksums(plan.key, 2) for plan in plans})
    live = b" ".join(sorted(entry.name[16:] for entry in pool._index if entry.ready))
    sys.stdout.buffer.write(live + b"\\n")
    sys.stdout.buffer.flush()
"""


def test_kill_9_at_any_moment(pools):
    """After every kill: what the last complete line of the child listed is there, up to the step it was in."""
    for round_ in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(pools.folder), str(1000 * round_)], stdout=subprocess.PIPE, cwd=Path.cwd()
        )
        lines = [child.stdout.readline() for _ in range(5 + 40 * round_)]
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines(keepends=True)
        child.wait()
        child.stdout.close()
        listed = {key for line in lines[-1:] for key in line.split()}
        assert lines[-1].endswith(b"\n")
        pool = pools.open(pools.config(ram=8, ssds=[40]))
        found = {entry.name[16:] for entry in pool._index}
        missing = listed - found
        assert len(missing) <= 12, "only what the interrupted step evicted may be missing"
        new = {key.split(b"-")[0] for key in found - listed}
        assert len(new) <= 1, "only what the interrupted step stored may be new"
        assert len(listed) >= 10
        check_slots(pool)
        for plan in load(pool, sorted(found)):
            assert plan.checksums == tuple(map(tuple, checksums(plan.key, 2)))
        pool.close()


def test_the_journal_is_compacted_in_the_background(pools, monkeypatch):
    from forebay.storage import journal

    monkeypatch.setattr(journal, "COMPACT_FROM", 4096)
    monkeypatch.setattr(journal, "COMMIT_PERIOD", 0.01)
    pool = pools.open(pools.config(ssds=[8], watermarks={"high": 1.0, "low": 1.0}))
    pool._journal._period = 0.01
    written = 0
    for round_ in range(3000):
        before = pool._journal.size
        store(pool, keys_of(f"r{round_}", 2))
        written += max(0, pool._journal.size - before)
    expected = {entry.name for entry in pool._index}
    pool._journal._halt()
    pool._journal.compact_if_due()
    assert pool._journal.size < 10_000 < written
    assert pool._journal.size == pool.config.journal_path.stat().st_size
    pools.crash(pool)
    again = pools.open(pool.config)
    assert {entry.name for entry in again._index} == expected
    assert not list(pool.config.path.glob("*.new"))
