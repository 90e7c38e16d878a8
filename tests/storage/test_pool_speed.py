"""How long the owner takes. Bounds are several times what an idle core needs: they catch a wrong order of growth."""

import os
import random
import time

import pytest

from forebay.storage import journal as journals
from forebay.storage import records
from forebay.storage.index import Entry, Index
from forebay.storage.opening import no_collections
from forebay.storage.plan import cut_spans, pack
from forebay.storage.pool import Lookup
from forebay.storage.records import DeviceRecord, Header
from forebay.storage.recovery import recover
from forebay.storage.space import Space
from tests.storage.poolkit import STRIPE, checksums

STRIPE_100GB = 512 << 10
MIB = 1 << 20


def index_of_100_gb():
    """The journal of a pool that holds 100,000 chunks of 1 MiB and 35,000 of 3 MiB.

    A third as many are gone again. Four were stored at a time, and a fifth of what is there has copies.
    """
    devices = [DeviceRecord("ram", "dram", "", 100_000)]
    devices += [DeviceRecord(f"ssd{i}", "file", f"/ssd{i}", 160_000) for i in range(4)]
    header = Header(bytes(16), STRIPE_100GB, 1, tuple(devices))
    shapes = [cut_spans([MIB], STRIPE_100GB)] * 100_000 + [cut_spans([3 * MIB], STRIPE_100GB)] * 35_000
    random.Random(0).shuffle(shapes)
    content = [b"".join(records.whole_file([records.header_record(header)]))]
    slots = [0] * 5
    for start in range(0, len(shapes), 4):
        batch = range(start, min(start + 4, len(shapes)))
        entries = [chunk(2 * number + 2, shapes[number], slots) for number in batch]
        again = entries if start % 12 == 0 else []
        gone = [Entry(os.urandom(52), e.generation - 1, e.spans, e.extents, e.copies, e.checksums) for e in again]
        if gone:
            content.append(records.frame(map(records.put_record, gone)))
            content.append(records.frame([records.drop_record([entry.generation for entry in gone])]))
        content.append(records.frame(map(records.put_record, entries)))
    return header, b"".join(content)


def chunk(generation, spans, slots):
    """A chunk on the next free slots of one device, or of the memory and one device."""
    device, count = generation // 2 % 4 + 1, len(spans)
    extents = [device << 32 | slots[device] + i for i in range(count)]
    slots[device] += count
    copies = []
    if generation % 5 == 0:
        extents, copies = [slots[0] + i for i in range(count)], extents
        slots[0] += count
    return Entry(b"n" * 16 + os.urandom(36), generation, spans, pack(extents), pack(copies), bytes(4 * count))


def recovered(path, header):
    """What `Pool.open` does with a journal, and the seconds of CPU it took."""
    started = time.thread_time()
    with no_collections():
        data = journals.read(path)
        found = records.replay(data, str(path))
        kept = recover(records.decode(data, found), found.header, header)
        spaces = [Space(device.slots, used) for device, used in zip(header.devices, kept.used)]
        index = Index(spaces, frozenset({0}))
        index.recover(kept.entries)
    return time.thread_time() - started, index, kept


def test_recovery_of_a_100_gb_index(tmp_path):
    header, data = index_of_100_gb()
    path = tmp_path / "journal"
    path.write_bytes(data)
    runs = []
    while len(runs) < 3 and min(runs, default=2) > 1:
        seconds, index, kept = recovered(path, header)
        runs.append(seconds)
    print(f"recovery of a 100 GB index: {len(index):,} chunks, {len(data) / 1e6:.0f} MB journal, {min(runs):.2f} s")
    assert len(index) == 135_000
    assert not kept.lost
    assert sum(space.used for space in index.spaces) == 2 * 100_000 + 6 * 35_000
    assert index.spaces[0].used == 0
    assert min(runs) < 2


def per_item(function, items):
    """Microseconds of CPU per item, the best of five runs."""
    times = []
    for _ in range(5):
        started = time.thread_time()
        function()
        times.append(time.thread_time() - started)
    return min(times) / items * 1e6


@pytest.fixture
def pool(memory_pools):
    return memory_pools.open(memory_pools.config(ram=2000, ssds=[3000, 3000]))


def fill(pool, count=500):
    keys = [os.urandom(36) for _ in range(count)]
    seconds = 0.0
    for start in range(0, count, 20):
        batch = keys[start : start + 20]
        before = time.thread_time()
        plans = pool.prepare_store(batch, [6 * STRIPE])
        seconds += time.thread_time() - before
        sums = {plan.key: checksums(plan.key, 6) for plan in plans}
        before = time.thread_time()
        pool.complete_store(sums)
        seconds += time.thread_time() - before
    return keys, seconds / count * 1e6


def test_lookup_and_load(pool):
    keys, _ = fill(pool)
    lookup = per_item(lambda: [pool.lookup(key) for key in keys], len(keys))
    assert all(pool.lookup(key) is Lookup.READY for key in keys)

    def loads():
        for start in range(0, len(keys), 20):
            pool.prepare_load(keys[start : start + 20])

    load = per_item(loads, len(keys))
    pool.complete_load(keys * 5)
    print(f"lookup {lookup:.2f} us, prepare_load {load:.1f} us per 6-stripe chunk")
    assert lookup < 2 * 4
    assert load < 20 * 4


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
def test_store(pool, full):
    if full:
        for _ in range(4):
            fill(pool)
    microseconds = min(fill(pool)[1] for _ in range(4 if full else 1))
    evictions = pool.stats().evictions
    print(f"prepare_store + complete_store {microseconds:.0f} us per 6-stripe chunk, {evictions} evictions")
    assert bool(evictions) == full
    assert microseconds < 60 * 6


def test_cost_does_not_grow_with_the_pool(memory_pools):
    """A pool that holds a hundred times as much answers as fast."""
    costs = []
    for chunks in (200, 20_000):
        config = memory_pools.config(ram=3 * chunks, path=memory_pools.folder / str(chunks))
        pool = memory_pools.open(config)
        for _ in range(-(-chunks // 500)):
            fill(pool)
        costs.append(min(fill(pool)[1] for _ in range(3)))
        assert pool.stats().evictions > 0
        pool.close()
    print(f"store in a full pool of 200 chunks {costs[0]:.0f} us, of 20,000 chunks {costs[1]:.0f} us")
    assert costs[1] < 4 * costs[0]
