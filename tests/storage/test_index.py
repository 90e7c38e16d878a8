"""The index against a naive model: no slot twice, nothing in use is evicted, everything comes back."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.storage.index import Entry, Index
from forebay.storage.plan import NOWHERE, Span, pack, unpack
from forebay.storage.policy import POLICIES
from forebay.storage.space import Space

SIZES = (6, 9)
"""Slots of device 0 (volatile) and device 1."""
KEYS = st.integers(0, 7).map(lambda n: bytes([n]))


def places_of(entry):
    return [place for place in unpack(entry.extents) + unpack(entry.copies) if place != NOWHERE]


class IndexMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self):
        super().__init__()
        self.index = Index([Space(size) for size in SIZES], frozenset({0}), self.policy)
        self.alive = {}
        """Name -> entry that can be found."""
        self.writing = {}
        self.leases = {}
        self.owned = {}
        """Generation -> places that must not be given to anyone else."""
        self.waiting = {}
        """Name -> generations that were dropped while leased."""
        self.generation = 0

    @rule(name=KEYS, count=st.integers(1, 3), copied=st.booleans())
    def store(self, name, count, copied):
        spaces = self.index.spaces
        if name in self.alive or self.index.is_writing(name) or spaces[1].free < count:
            return
        copies = []
        if copied and spaces[0].free >= count:
            extents = spaces[0].allocate(count)
            copies = [1 << 32 | slot for slot in spaces[1].allocate(count)]
        else:
            extents = [1 << 32 | slot for slot in spaces[1].allocate(count)]
        self.generation += 1
        entry = Entry(name, self.generation, (Span(0, 1),) * count, pack(extents), pack(copies))
        self.index.start(entry)
        self.index.rank([entry])
        self.alive[name] = self.writing[name] = entry
        self.owned[entry.generation] = places_of(entry)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data, good):
        name = data.draw(st.sampled_from(sorted(self.writing)))
        expected = self.writing.pop(name)
        entry = self.index.finish(name)
        if self.alive.get(name) is not expected:
            assert entry is None
            del self.owned[expected.generation]
        elif good:
            assert entry is expected
            self.index.publish(entry, b"\0" * 4 * len(entry.spans))
        else:
            self.index.drop(entry)
            self.forget(expected)

    @rule(name=KEYS)
    def finish_unknown(self, name):
        if name not in self.writing:
            assert self.index.finish(name) is None

    @precondition(lambda self: any(entry.ready for entry in self.alive.values()))
    @rule(data=st.data())
    def lease(self, data):
        name = data.draw(st.sampled_from(sorted(name for name, entry in self.alive.items() if entry.ready)))
        self.index.lease(name)
        self.leases[name] = self.leases.get(name, 0) + 1

    @rule(name=KEYS)
    def release(self, name):
        self.index.release(name)
        self.leases[name] = max(0, self.leases.get(name, 0) - 1)
        if not self.leases[name]:
            for generation in self.waiting.pop(name, []):
                del self.owned[generation]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data):
        entry = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        self.index.drop(entry)
        self.forget(entry)

    @rule(names=st.lists(KEYS, unique=True))
    def touch(self, names):
        self.index.touch(names)

    @rule(devices=st.sampled_from([{0}, {1}, {0, 1}]), protected=st.frozensets(KEYS, max_size=2))
    def evict(self, devices, protected):
        candidates = [
            name
            for name, entry in self.alive.items()
            if self.idle(name, protected) and any(place >> 32 in devices for place in places_of(entry))
        ]
        entry = self.index.evict(frozenset(devices), protected)
        if entry is None:
            assert not candidates
        else:
            assert entry.name in candidates
            self.forget(entry)

    @rule(protected=st.frozensets(KEYS, max_size=2))
    def demote(self, protected):
        candidates = {name for name, entry in self.alive.items() if self.idle(name, protected) and entry.copies}
        if not self.index.demote(protected):
            assert not candidates
            return
        (name,) = [name for name in candidates if not self.alive[name].copies]
        entry = self.alive[name]
        assert all(place >> 32 == 1 for place in unpack(entry.extents))
        self.owned[entry.generation] = places_of(entry)

    def idle(self, name, protected):
        return self.alive[name].ready and not self.leases.get(name) and name not in protected

    def forget(self, entry):
        del self.alive[entry.name]
        if entry.name in self.writing:
            return
        if self.leases.get(entry.name):
            self.waiting.setdefault(entry.name, []).append(entry.generation)
        else:
            del self.owned[entry.generation]

    @invariant()
    def same_entries(self):
        assert {entry.name: entry for entry in self.index} == self.alive
        assert all(self.index.get(name) is entry for name, entry in self.alive.items())
        assert self.index.writing == len(self.writing)
        assert self.index.leases == sum(self.leases.values())

    @invariant()
    def slots_have_one_owner(self):
        places = [place for owned in self.owned.values() for place in owned]
        assert len(set(places)) == len(places)
        for device, space in enumerate(self.index.spaces):
            assert space.used == sum(place >> 32 == device for place in places) <= space.capacity

    def teardown(self):
        for name in list(self.writing):
            self.index.finish(name)
        for entry in list(self.index):
            self.index.drop(entry)
        for name, count in self.leases.items():
            for _ in range(count):
                self.index.release(name)
        assert [space.used for space in self.index.spaces] == [0, 0]
        assert self.index.leases == self.index.writing == len(self.index) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_index_behaves_like_the_model(policy):
    machine = type("Machine", (IndexMachine,), {"policy": policy})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    machine.TestCase("runTest").runTest()
