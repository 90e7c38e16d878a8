"""The whole pool against a naive model, restarts and crashes included."""

import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.storage.plan import DeviceHealth
from forebay.storage.pool import Lookup
from tests.storage.poolkit import STRIPE, Pools, check_slots, checksums, places_of

PROMPTS = [[b"%c%d" % (letter, i) for i in range(6)] for letter in b"abc"]
ALL = [key for prompt in PROMPTS for key in prompt]
prefixes = st.builds(lambda prompt, length: prompt[:length], st.sampled_from(PROMPTS), st.integers(1, 6))


class PoolMachine(RuleBasedStateMachine):
    """The model: which generation of which key may be found, and which slots someone is using."""

    options: ClassVar[dict[str, object]] = {}

    def __init__(self):
        super().__init__()
        shm = Path("/dev/shm")
        self.folder = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)
        self.pools = Pools(Path(self.folder.name))
        self.config = self.pools.config(ram=8, ssds=[10, 14], **self.options)
        self.pool = self.pools.open(self.config)
        self.may_be_ready = set()
        self.writing = {}
        """Key -> plan, dropped ones included."""
        self.loading = []
        """Plans that are being read."""

    def teardown(self):
        self.pools.close()
        self.folder.cleanup()

    @rule(prefix=prefixes, stripes=st.integers(1, 4))
    def prepare_store(self, prefix, stripes):
        plans = self.pool.prepare_store(prefix, [stripes * STRIPE])
        for plan in plans:
            assert plan.key not in self.writing
            assert len(plan.spans) == len(plan.extents) == len(plan.copies) == stripes
            self.may_be_ready.discard(plan.key)
            self.writing[plan.key] = plan
        in_use = [e for plan in self.writing.values() for e in [*plan.extents, *filter(None, plan.copies)]]
        assert len(set(in_use)) == len(in_use), "a slot is written for two chunks"
        read = {extent for plan in self.loading for extent in plan.extents}
        assert not read & set(in_use), "a slot is overwritten while it is read"

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def complete_store(self, data, good):
        key = data.draw(st.sampled_from(sorted(self.writing)))
        plan = self.writing.pop(key)
        dropped = self.pool.lookup(key) is Lookup.MISS
        if good:
            self.pool.complete_store({key: checksums(key, len(plan.spans))})
            assert dropped or self.pool._down or self.pool.lookup(key) is Lookup.READY
            if not dropped:
                self.may_be_ready.add(key)
        else:
            self.pool.complete_store({}, failed=[key])
            assert self.pool.lookup(key) is Lookup.MISS

    @rule(prefix=prefixes)
    def prepare_load(self, prefix):
        hits = [key for key in prefix if self.pool.lookup(key) is Lookup.READY]
        plans = self.pool.prepare_load(prefix)
        assert [plan.key for plan in plans] == hits
        for plan in plans:
            assert plan.checksums == tuple(map(tuple, checksums(plan.key, len(plan.spans))))
        self.loading += plans

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), good=st.booleans())
    def complete_load(self, data, good):
        plan = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        self.pool.complete_load([plan.key], failed=[] if good else [plan.key])
        if not good:
            self.forget([plan.key])

    @rule(keys=st.lists(st.sampled_from(ALL), max_size=3))
    def drop(self, keys):
        self.pool.drop(keys)
        self.forget(keys)

    @rule()
    def reset(self):
        self.pool.reset()
        self.forget(ALL)

    @rule(name=st.sampled_from(["ram", "ssd0", "ssd1"]), usable=st.booleans())
    def health(self, name, usable):
        self.pool.report_health([DeviceHealth(name, usable, "" if usable else "sick", 0.0)])

    @rule(clean=st.booleans())
    def restart(self, clean):
        healthy = not self.pool._down
        before = {key for key in ALL if self.pool.lookup(key) is Lookup.READY}
        persistent = {entry.name[16:] for entry in self.pool._index if entry.recorded}
        self.pool.close() if clean else self.pools.crash(self.pool)
        self.pool = self.pools.open(self.config)
        found = {key for key in ALL if self.pool.lookup(key) is Lookup.READY}
        assert found == persistent
        assert found <= before or not healthy
        self.may_be_ready &= found
        self.writing, self.loading = {}, []

    def forget(self, keys):
        self.may_be_ready.difference_update(keys)

    @invariant()
    def nothing_is_found_that_was_not_published(self):
        for key in ALL:
            state = self.pool.lookup(key)
            assert state is not Lookup.READY or key in self.may_be_ready
            assert state is not Lookup.WRITING or key in self.writing

    @invariant()
    def bounds_and_counts_hold(self):
        check_slots(self.pool)
        stats = self.pool.stats()
        assert stats.leases == len(self.loading)
        assert stats.writing == len(self.writing)
        total = sum(span.length for plan in self.writing.values() for span in plan.spans)
        assert stats.pending_store_bytes == total

    @invariant()
    def when_nobody_is_at_work_every_slot_is_accounted_for(self):
        if not self.writing and not self.loading:
            used = sum(device.used_bytes for device in self.pool.stats().devices) // STRIPE
            assert used == sum(len(places_of(entry)) for entry in self.pool._index)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"durable": False},
        {"policy": "s3fifo", "watermarks": {"high": 0.9, "low": 0.6}},
        {"placement": "hash", "max_pending_store": 6 * STRIPE},
        {"placement": "tiered"},
    ],
    ids=str,
)
def test_pool_behaves_like_the_model(options):
    machine = type("Machine", (PoolMachine,), {"options": options})
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").runTest()
